"""Config of LoRA adapters, of merged LoRAs, and of the quantised base below adapters."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from flowgrpo.errors import InputError
from flowgrpo.schema.base import Strict

LoraPath = str | Annotated[dict[str, str], Field(min_length=1)]


class Lora(Strict):
    """Options of low-rank adapters."""

    path: LoraPath | None = None
    """LoRA to start from, with its rank, alpha and targets: a file, a folder (also an export or a run), a hub id, or a
    map from networks to these; null: new adapters, which change nothing at first."""
    rank: int | None = Field(16, ge=1)
    """Rank of each adapter; null: that of path."""
    alpha: float | None = Field(32, gt=0)
    """An adapter's output is multiplied by alpha / rank; null: that of path."""
    targets: Literal["auto", "all-linear"] | Annotated[list[str], Field(min_length=1)] | None = "auto"
    """Layer names, auto (the attention projections) or all-linear (all linear layers but a language model's head);
    null: those of path."""

    @model_validator(mode="before")
    @classmethod
    def _as_path_has_it(cls, written: Any) -> Any:
        if isinstance(written, dict) and written.get("path") is not None:
            return {**dict.fromkeys(("rank", "alpha", "targets")), **written}
        return written

    @model_validator(mode="after")
    def _known(self) -> Lora:
        for key in ("rank", "alpha", "targets"):
            if self.path is None and getattr(self, key) is None:
                raise InputError(f"model.lora.{key}: null takes it from model.lora.path, but that is not set")
        return self


Quantised = Literal["int8", "nf4"]


def check_base(lora: Lora | None, quantise: Quantised | None, merge: LoraPath | None) -> None:
    """Raise InputError if a quantised base is trained, or a LoRA is merged into a base with adapters."""
    if quantise is not None and lora is None:
        way_out = "give model.lora a rank, or set model.quantise=null"
        raise InputError(
            f"model.quantise: only a frozen base can be quantised, and model.lora=null trains it; {way_out}"
        )
    if merge is not None and lora is not None:
        raise InputError("model.merge: it needs model.lora=null; adapters start from model.lora.path instead")
