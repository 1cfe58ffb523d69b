"""The base of rewards that hold a model: loaded when first needed, called in batches, on the device it is moved to."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from rewards.base import RewardError, batched, nearest
from rewards.compute import DTYPES, leave_out_cudnn_attention
from rewards.image import check_images
from rewards.memory import is_out_of_memory
from rewards.models import hub
from rewards.models.preprocessing import Preprocessing, of_transformers
from rewards.models.weight_names import lacking

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
FIRST_SENTENCE = re.compile(r".*?(?=[.:]?\s*\n|\.\s|\.?$)")


class ModelReward(ABC):
    """A reward that holds a model. Making it loads nothing: the first call does, or `to`.

    A subclass says how errors call it (`called`) and where its `weights` usually are, loads in `_load`, scores in `_score`.

    Args:
        path: of the weights, unless they come from their usual place: a hub id, a folder or, where it says so, a file.
        batch_size: samples that the model sees at a time.
        dtype: of the model: float32, bfloat16 or float16; features are compared in float32.

    Raises:
        RewardError: an option is wrong; and when the model is loaded: it cannot be found, or is not complete.
    """

    called: str
    weights: str

    def __init__(self, path: str | None = None, *, batch_size: int = 16, dtype: str = "float32") -> None:
        if dtype not in DTYPES:
            raise RewardError(f"{self.called}: there is no dtype {dtype!r}, {nearest(str(dtype), DTYPES)}")
        if not isinstance(batch_size, int) or batch_size < 1:
            raise RewardError(f"{self.called}: batch_size is {batch_size!r}, but must be 1 or more")
        self.path, self.batch_size, self.dtype = str(path or self.weights), batch_size, DTYPES[dtype]
        self.device = torch.device("cpu")

    @cached_property
    def model(self) -> Any:
        """The module, ready to be called, with methods of its own library; loaded here."""
        leave_out_cudnn_attention()  # a server's scores are then those of the process that trains
        with self.loading(self.path):
            return self._load().eval().requires_grad_(False).to(self.device)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Transformers' tokenizer beside the weights."""
        return self.tokenizer_at(self.path)

    def to(self, device: torch.device | str) -> ModelReward:
        """Load the model if it is not yet, and move it."""
        self.device = torch.device(device)
        self.model.to(self.device)
        return self

    def batched(self, *inputs: Any) -> torch.Tensor:
        """`_score` of all samples, float32 on the CPU; `inputs` are tensors and lists of one length."""
        parts = zip(*(batched(each, self.batch_size) for each in inputs), strict=True)
        with torch.no_grad():
            return torch.cat([self._score(*part).float().cpu() for part in parts])

    def pretrained(self, kind: Any) -> nn.Module:
        """The model of a class of transformers at `path`, refused if any weight is missing there, which would be random."""
        config = AutoConfig.from_pretrained(self.path)
        if kind is not AutoModel and not isinstance(config, kind.config_class):
            wanted = kind.config_class.model_type
            raise RewardError(f"{self.called}: {self.path} holds a model of type {config.model_type}, not {wanted}")
        try:
            return pretrained(kind, self.path, self.dtype)
        except RewardError as error:
            raise RewardError(f"{self.called}: {error}") from error

    def tokenizer_at(self, path: str) -> PreTrainedTokenizerBase:
        """Transformers' tokenizer at `path`."""
        with self.loading(path):
            return AutoTokenizer.from_pretrained(path)

    def text_features(self, texts: list[str], **limits: int) -> torch.Tensor:
        """Features (b, D) of texts, by a model of transformers that compares them with pictures or sounds.

        Args:
            limits: of the tokenizer, such as `max_length`.
        """
        tokens = self.tokenizer(texts, padding=True, truncation=True, return_tensors="pt", **limits).to(self.device)
        return pooled_features(
            self.model.get_text_features(tokens["input_ids"], attention_mask=tokens["attention_mask"])
        )

    def file(self, filename: str) -> Path:
        """A file of weights: `path` if it is one, `filename` in the folder `path`, or `filename` of that hub id."""
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
        """Whatever is raised while something at `path` is loaded, as one sentence."""
        local = Path(path).exists()
        if not local and not HUB_ID.fullmatch(path):
            raise RewardError(
                f"{self.called}: there is no {path}, give a path that is there or a hub id such as {self.weights}"
            )
        try:
            yield
        except RewardError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            sentence = FIRST_SENTENCE.match(str(error).strip())
            assert sentence is not None  # any text has one, if only an empty one
            said = f"{type(error).__name__}: {sentence.group()}"
            reason = None if local else hub.why(error, path, "give a folder that holds it")
            otherwise = "could not be loaded" if local else "is not here, and the hub did not give it either"
            raise RewardError(f"{self.called}: {path} {reason or f'{otherwise} ({said})'}") from error

    @abstractmethod
    def _load(self) -> nn.Module:
        """The model, on the CPU."""

    @abstractmethod
    def _score(self, *inputs: Any) -> torch.Tensor:
        """Scores (b, ...) of a batch."""


class PictureReward(ModelReward):
    """A model's reward of pictures and, if it reads them, of their prompts."""

    @cached_property
    def preprocessing(self) -> Preprocessing:
        """How the model wants its pictures; what transformers' image processor beside the weights does."""
        with self.loading(self.path):
            return of_transformers(AutoImageProcessor.from_pretrained(self.path))

    def __call__(self, images: torch.Tensor, prompts: Sequence[str]) -> Sequence[float | None]:
        """One score per picture.

        Args:
            images: float (B, 3, H, W) in [0, 1].
            prompts: B strings; a long one is cut at the length that the model reads.

        Raises:
            ValueError: these are not such images.
            RewardError: the model cannot be loaded.
        """
        check_images(self.called, images)
        return self.batched(images, list(prompts)).tolist()

    def pixels(self, images: torch.Tensor) -> torch.Tensor:
        """Pictures as the model takes them, (b, 3, h, w) in its dtype on its device."""
        return self.preprocessing(images.to(self.device)).to(self.dtype)


class PairedReward(PictureReward):
    """A reward whose model embeds pictures and prompts in one space; a subclass does so in `_embedded`."""

    @torch.no_grad()
    def features(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        """Features (B, 2 D) of pictures, which `rewards.models.votes` learns over.

        The picture's embedding, of unit length, and each number of it times that of the prompt's, whose sum is their cosine.
        """
        found = []
        parts = zip(batched(images, self.batch_size), batched(list(prompts), self.batch_size), strict=True)
        for seen, read in (self._embedded(*part) for part in parts):
            direction = nn.functional.normalize(seen.float())
            found.append(torch.cat([direction, direction * nn.functional.normalize(read.float())], dim=1).cpu())
        return torch.cat(found)

    def cosine(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        """Of each picture and its prompt, (b,) float32."""
        seen, read = self._embedded(images, prompts)
        return torch.cosine_similarity(seen.float(), read.float())

    @abstractmethod
    def _embedded(self, images: torch.Tensor, prompts: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings (b, D) of pictures and of their prompts."""


def pretrained(kind: Any, path: str, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a class of transformers in a folder or of a hub id.

    Raises:
        RewardError: any weight is missing there, which transformers would fill with random numbers.
    """
    with _silent():
        model, report = kind.from_pretrained(path, dtype=dtype, output_loading_info=True)
    if report["missing_keys"]:
        absent, surplus = report["missing_keys"], report["unexpected_keys"]
        raise RewardError(f"{path} {lacking(absent, surplus, len(model.state_dict()), type(model).__name__)}")
    return model


@contextmanager
def _silent() -> Iterator[None]:
    """Without transformers' bars and tables: what matters of them is checked and said in one sentence."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file of weights, .safetensors or what torch saved, by name; nothing else is unpickled."""
    if path.suffix == ".safetensors":
        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True)


def part_of(weights: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The weights whose names begin with `prefix`, without it.

    Raises:
        ValueError: no name begins so.
    """
    part = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    if not part:
        raise ValueError(f"none of its weights is named {prefix}*")
    return part


def laion_aesthetic_head(weights: dict[str, torch.Tensor]) -> nn.Sequential:
    """The head of the LAION aesthetic predictor, which ImageReward took over: D -> 1024 -> 128 -> 64 -> 16 -> 1, all linear.

    Args:
        weights: by names such as `0.weight`; the authors' dropout between the layers numbers them 0, 2, 4, 6 and 7.
    """
    first, second, third, fourth, last = (
        nn.Linear(*widths) for widths in pairwise([weights["0.weight"].shape[1], 1024, 128, 64, 16, 1])
    )
    head = nn.Sequential(first, nn.Identity(), second, nn.Identity(), third, nn.Identity(), fourth, last)
    head.load_state_dict(weights)
    return head


def pooled_features(output: Any) -> torch.Tensor:
    """The features (b, D) that transformers' get_image_features and the like return: a tensor, in later versions a field."""
    return getattr(output, "pooler_output", output)


def encode_unique(encode: Callable[[list[str]], torch.Tensor], texts: Sequence[str]) -> torch.Tensor:
    """`encode` of all texts, each of them encoded once: a batch mostly holds the samples of one prompt."""
    each = list(dict.fromkeys(texts))
    return encode(each)[[each.index(text) for text in texts]]
