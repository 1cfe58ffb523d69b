"""The decoder section of a config: a row of the table of decoders with changes; in training at temperature 1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import model_validator
from typing_extensions import override

from flowgrpo.mdlm.decoding.decode import Decoder
from flowgrpo.mdlm.decoding.decoders import Others, build
from flowgrpo.schema.base import Choice

if TYPE_CHECKING:
    from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor

Word = str | dict  # a word, or a map of options; without `name`, options of the row's own word


class Decoding(Others, Choice):
    """A decoder of the table with any of its words and numbers replaced; a plain word is its name."""

    name: str = "low_confidence"
    """A row of the table of decoders."""
    proposal: Word | None = None
    """How a token is chosen for each open position; null: as in the row."""
    scorer: Word | None = None
    """How sure the decoder is of each proposal; null: as in the row."""
    modifiers: list[Word] | None = None
    """Changes of the scores before they are compared; null: as in the row."""
    committer: Word | None = None
    """Which positions take their token at a step; null: as in the row."""
    region: Word | None = None
    """Blocks in which tokens are committed, one after the other; null: as in the row."""

    @model_validator(mode="before")
    @classmethod
    def _word(cls, written: Any) -> Any:
        """Drop null keys, which mean the same as missing ones."""
        if not isinstance(written, dict):
            return {"name": written} if isinstance(written, str) else written
        return {key: value for key, value in written.items() if value is not None}

    def build(
        self,
        length: int,
        eos_id: int | None,
        place: str,
        *,
        predictor: MaskPredictor | None = None,
        block_size: int | None = None,
    ) -> Decoder:
        """Build the decoder for answers of some length; see `flowgrpo.mdlm.decoding.decoders.build`."""
        return build(self.dump(), length, eos_id, predictor, block_size, place=place)

    def dump(self) -> dict[str, Any]:
        """Return the name of the row and the changes to it, as `build` takes them."""
        return {"name": self.name, **self.model_dump(exclude_defaults=True)}


class Rollouts(Decoding):
    """The decoder of training: at temperature 1 by default."""

    @override
    def dump(self) -> dict[str, Any]:
        proposal = {"name": self.proposal} if isinstance(self.proposal, str) else self.proposal or {}
        return {**super().dump(), "proposal": {"temperature": 1.0, **proposal}}
