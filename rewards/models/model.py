"""Base classes of rewards with a model: lazy loading, batches, device, dtype."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import hf_hub_download
from safetensors.torch import load_file
from torch import nn
from transformers.utils import logging

from rewards.base import RewardError, nearest
from rewards.compute import DTYPES, batched, leave_out_cudnn_attention
from rewards.image import check_images
from rewards.memory import is_out_of_memory
from rewards.models import hub
from rewards.models.preprocessing import Preprocessing, of_transformers
from rewards.models.weight_names import describe_missing

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
FIRST_SENTENCE = re.compile(r".*?(?=[.:]?\s*\n|\.\s|\.?$)")


class ModelReward(ABC):
    """A reward with a model, which is loaded by the first call or by `to`.

    A subclass sets its name (`called`) and the hub id of its `weights`, the default of `path`, and implements `_load` and
    `_score`. Features are compared in float32, whatever the dtype of the model.
    """

    called: str
    weights: str

    def __init__(self, path: str | None = None, *, batch_size: int = 16, dtype: str = "float32") -> None:
        if dtype not in DTYPES:
            raise RewardError(f"{self.called}: there is no dtype {dtype!r}, {nearest(str(dtype), DTYPES)}")
        if not isinstance(batch_size, int) or batch_size < 1:
            raise RewardError(f"{self.called}: batch_size is {batch_size!r}, but must be 1 or more")
        self.path = self.tokenizer_path = str(path or self.weights)
        self.batch_size, self.dtype = batch_size, DTYPES[dtype]
        self.device = torch.device("cpu")

    @cached_property
    def model(self) -> Any:
        """The frozen module in evaluation mode, loaded on first use."""
        leave_out_cudnn_attention()  # so that a server scores as the training process does
        with self.loading(self.path):
            return self._load().eval().requires_grad_(False).to(self.device)

    @cached_property
    def tokenizer(self) -> transformers.PreTrainedTokenizerBase:
        """Tokenizer of transformers, beside the weights unless a subclass says otherwise."""
        with self.loading(self.tokenizer_path):
            return transformers.AutoTokenizer.from_pretrained(self.tokenizer_path)

    def to(self, device: torch.device | str) -> ModelReward:
        """Load the model if necessary, and move it."""
        self.device = torch.device(device)
        self.model.to(self.device)
        return self

    def score_batches(self, *inputs: Any) -> torch.Tensor:
        """Return `_score` of all samples in batches, float32 on the CPU; `inputs` are tensors and lists of one length."""
        parts = zip(*(batched(each, self.batch_size) for each in inputs), strict=True)
        with torch.no_grad():
            return torch.cat([self._score(*part).float().cpu() for part in parts])

    def load_pretrained(self, kind: Any, **given: Any) -> nn.Module:
        """Return a model of transformers at `path`; raise RewardError if it lacks weights or has another type.

        `given` is empty, or the `config` and `state_dict` that were read already.
        """
        if not given:
            self.read_config(kind, self.path)
        try:
            return load_pretrained(kind, self.path, self.dtype, **given)
        except RewardError as error:
            raise RewardError(f"{self.called}: {error}") from error

    def read_config(self, kind: Any, path: str) -> Any:
        """Return the config of a model of transformers at `path`; raise RewardError if it is not one of class `kind`."""
        config = transformers.AutoConfig.from_pretrained(path)
        wanted = getattr(kind, "config_class", None)  # an Auto class has none
        parts = (config, getattr(config, "vision_config", None))  # a whole model may give its vision network
        if wanted is not None and not any(isinstance(part, wanted) for part in parts):
            raise RewardError(
                f"{self.called}: {path} holds a model of type {config.model_type}, not {wanted.model_type}"
            )
        return config

    def text_features(self, texts: list[str], **limits: int) -> torch.Tensor:
        """Return features (b, D) of texts by a contrastive model of transformers; `limits` are options of the tokenizer."""
        tokens = self.tokenizer(texts, padding=True, truncation=True, return_tensors="pt", **limits).to(self.device)
        output = self.model.get_text_features(tokens["input_ids"], attention_mask=tokens["attention_mask"])
        return pooled_features(output)

    def file(self, filename: str) -> Path:
        """Return a file of weights: `path` itself, or `filename` in the folder or of the hub id `path`."""
        place = Path(self.path)
        if place.is_file():
            return place
        if not place.is_dir():
            return Path(hf_hub_download(self.path, filename))
        if not (place / filename).is_file():
            here = ", ".join(sorted(p.name for p in place.iterdir())[:5]) or "nothing"
            raise RewardError(f"{self.called}: there is no {filename} in {place}, which holds {here}")
        return place / filename

    @contextmanager
    def loading(self, path: str) -> Iterator[None]:
        """Turn any error while something at `path` is loaded into a RewardError, except running out of memory."""
        local = Path(path).exists()
        if not local and not HUB_ID.fullmatch(path):
            hint = f"give a path that is there or a hub id such as {self.weights}"
            raise RewardError(f"{self.called}: there is no {path}, {hint}")
        try:
            with hub.cache_if_unreachable(path):
                yield
        except RewardError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            sentence = FIRST_SENTENCE.match(str(error).strip())
            assert sentence is not None  # matches any text
            reason = None if local else hub.explain_failure(error, path, "give a folder that holds it")
            if reason is None:
                reason = "could not be loaded" if local else "is not here, and the hub did not give it either"
                reason += f" ({type(error).__name__}: {sentence.group()})"
            raise RewardError(f"{self.called}: {path} {reason}") from error

    @abstractmethod
    def _load(self) -> nn.Module:
        """Return the model on the CPU."""

    @abstractmethod
    def _score(self, *inputs: Any) -> torch.Tensor:
        """Return scores (b, ...) of a batch."""


class PictureReward(ModelReward):
    """A reward of pictures and, if it reads them, of their prompts."""

    @cached_property
    def preprocessing(self) -> Preprocessing:
        """The preprocessing of transformers' image processor at `path`."""
        with self.loading(self.path):
            return of_transformers(transformers.AutoImageProcessor.from_pretrained(self.path))

    def __call__(self, images: torch.Tensor, prompts: Sequence[str]) -> Sequence[float | None]:
        """Return one score per picture, float (B, 3, H, W) in [0, 1]; long prompts are truncated."""
        check_images(self.called, images)
        return self.score_batches(images, list(prompts)).tolist()

    def pixels(self, images: torch.Tensor) -> torch.Tensor:
        """Preprocess pictures to (b, 3, h, w) in the model's dtype on its device."""
        return self.preprocessing(images.to(self.device)).to(self.dtype)


class PairedReward(PictureReward):
    """A reward whose model embeds pictures and prompts in one space."""

    @torch.no_grad()
    def features(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        """Return features (B, 2 D), from which `rewards.models.votes` learns.

        The first D are the picture's normalised embedding. The others are its elementwise product with the prompt's; they
        sum to the cosine.
        """
        features = []
        for part in zip(batched(images, self.batch_size), batched(list(prompts), self.batch_size), strict=True):
            picture, prompt = (nn.functional.normalize(embedding.float()) for embedding in self._embed(*part))
            features.append(torch.cat([picture, picture * prompt], dim=1).cpu())
        return torch.cat(features)

    def cosine(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        """Return the cosine of each picture and its prompt, (b,) float32."""
        picture, prompt = self._embed(images, prompts)
        return torch.cosine_similarity(picture.float(), prompt.float())

    @abstractmethod
    def _embed(self, images: torch.Tensor, prompts: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return embeddings (b, D) of pictures and of their prompts."""


def load_pretrained(kind: Any, path: str, dtype: torch.dtype, **given: Any) -> transformers.PreTrainedModel:
    """Load a model of transformers; raise RewardError if weights are missing, which transformers would draw at random.

    `given` is empty, or the `config` and `state_dict` that were read from `path`.
    """
    with _silent():
        model, report = kind.from_pretrained(None if given else path, dtype=dtype, output_loading_info=True, **given)
    if report["missing_keys"]:
        absent, surplus = report["missing_keys"], report["unexpected_keys"]
        raise RewardError(f"{path} {describe_missing(absent, surplus, len(model.state_dict()), type(model).__name__)}")
    return model


@contextmanager
def _silent() -> Iterator[None]:
    """Silence transformers' progress bars and reports."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors by name in a .safetensors file or a file of torch.save; unpickle nothing else."""
    if path.suffix == ".safetensors":
        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True)


def select_weights(weights: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Return the weights whose names begin with `prefix`, without it; raise ValueError if there are none."""
    part = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    if not part:
        raise ValueError(f"none of its weights is named {prefix}*")
    return part


def aesthetic_head(weights: dict[str, torch.Tensor], last: int = 7) -> nn.Sequential:
    """Return the linear head D-1024-128-64-16-1 of an aesthetic predictor, float32.

    Its layers are numbered 0, 2, 4, 6 and `last`, since dropout layers have the other numbers: LAION's has none before the
    last layer, 7; that of V2.5 has, so it is 8.
    """
    widths = [weights["0.weight"].shape[1], 1024, 128, 64, 16, 1]
    layers = zip((0, 2, 4, 6, last), pairwise(widths), strict=True)
    head = nn.Sequential(OrderedDict((str(number), nn.Linear(*pair)) for number, pair in layers))
    head.load_state_dict(weights)
    return head


def pooled_features(output: Any) -> torch.Tensor:
    """Return features (b, D) from get_*_features of transformers: a tensor, or a field in later versions."""
    return getattr(output, "pooler_output", output)


def encode_unique(encode: Callable[[list[str]], torch.Tensor], texts: Sequence[str]) -> torch.Tensor:
    """Return `encode` of all texts, but encode each distinct text once: a batch often shares one prompt."""
    distinct = list(dict.fromkeys(texts))
    return encode(distinct)[[distinct.index(text) for text in texts]]
