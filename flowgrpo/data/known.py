"""Configs of known models of the hub, so that planning needs no network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import yaml

from flowgrpo.schema.imports.lazy import lazy

if TYPE_CHECKING:
    import tokenizers
    import transformers
else:
    tokenizers = lazy("tokenizers")
    transformers = lazy("transformers")

FILE = Path(__file__).parent / "known_models.yaml"
TOKENIZERS = ("Tokenizer", "TokenizerFast")
TOKEN = ".{1,3}"  # English has about four letters per token; plans should overestimate
IMAGE, VIDEO, IMAGE_ID = "<|image_pad|>", "<|video_pad|>", 151655  # of Qwen2.5-VL
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@cache
def texts() -> dict[str, dict[str, Any]]:
    """Return the config.json of known language models, by hub id."""
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))["texts"]


@contextmanager
def text_folder(name: str) -> Iterator[str]:
    """Yield a temporary folder with the config.json of a known language model."""
    with TemporaryDirectory() as place:
        (Path(place) / "config.json").write_text(json.dumps(texts()[name]))
        yield place


@cache
def models() -> dict[str, dict[str, Any]]:
    """Return the known pipelines by hub id: class, and library, class and config of each component."""
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))["models"]


@contextmanager
def folder(name: str, *, with_tokenizers: bool = True) -> Iterator[str]:
    """Yield a temporary folder with the configs of a known pipeline, laid out as by `save_pretrained`.

    The tokenizers have no vocabulary; they only approximate the number of tokens of a text.
    """
    known = dict(models()[name])
    index: dict[str, Any] = {"_class_name": known.pop("class")}
    with TemporaryDirectory() as place:
        for component, value in known.items():
            if not isinstance(value, list):
                index[component] = value
                continue
            library, kind, config = value
            subfolder = Path(place) / component
            subfolder.mkdir()
            if kind.endswith("Processor"):
                if with_tokenizers:
                    _processor().save_pretrained(subfolder)
            elif kind.endswith(TOKENIZERS):
                kind = "PreTrainedTokenizerFast"
                if with_tokenizers:
                    _tokenizer(**config).save_pretrained(subfolder)
            else:
                file = f"{component}_config.json" if component in ("scheduler", "guider") else "config.json"
                (subfolder / file).write_text(json.dumps(config))
            index[component] = [library, kind]
        (Path(place) / "model_index.json").write_text(json.dumps(index))
        yield place


def _tokenizer(**options: Any) -> transformers.PreTrainedTokenizerFast:
    words = {"<pad>": 0, "</s>": 1, "<unk>": 2, IMAGE: IMAGE_ID, VIDEO: IMAGE_ID + 1}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(TOKEN), "isolated")
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    more = {"additional_special_tokens": [IMAGE, VIDEO]}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special, **more, **options)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _processor() -> transformers.ProcessorMixin:
    """Return a Qwen2-VL processor, the only kind of processor in the known pipelines."""
    pictures, videos = transformers.Qwen2VLImageProcessor(), transformers.Qwen2VLVideoProcessor()
    return transformers.Qwen2VLProcessor(pictures, _tokenizer(), videos, chat_template=TEMPLATE)
