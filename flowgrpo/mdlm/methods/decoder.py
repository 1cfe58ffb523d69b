"""How answers are made: a decoder of the table, in training at temperature 1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import model_validator
from typing_extensions import override

from flowgrpo.mdlm.decoding.decode import Decoder
from flowgrpo.mdlm.decoding.decoders import Others, build
from flowgrpo.schema.base import Choice

if TYPE_CHECKING:
    from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor

Word = str | dict  # options alone, without a name, are those of the row's own word


class Decoding(Others, Choice):
    """A decoder of the table with any of its words and numbers replaced; a plain word is its name.

    `flowgrpo.mdlm.decoding.decoders.build` knows the row, and checks the options of the words.
    """

    name: str = "low_confidence"
    """A row of the table of decoders."""
    proposal: Word | None = None
    """What each open position would become; null: as in the row."""
    scorer: Word | None = None
    """Which open position is surest of its proposal; null: as in the row."""
    modifiers: list[Word] | None = None
    """What changes scores before they are compared; null: as in the row."""
    committer: Word | None = None
    """How many positions take their token at a step; null: as in the row."""
    region: Word | None = None
    """Where tokens may be committed; null: as in the row."""

    @model_validator(mode="before")
    @classmethod
    def _word(cls, written: Any) -> Any:
        """A map of what was given; a null says the same as no key."""
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
        """The decoder for answers of some length.

        Args:
            place: where it was written, for errors.
            predictor: the model; None if it is not loaded yet.
            block_size: tokens of a block of a block-causal model that is not loaded yet.

        Raises:
            InputError: a word or an option is unknown, or they do not fit together.
        """
        return build(self.written(), length, eos_id, predictor, block_size, place=place)

    def written(self) -> dict[str, Any]:
        """The name and what differs from its row, as `build` takes it."""
        return {"name": self.name, **self.model_dump(exclude_defaults=True)}


class Rollouts(Decoding):
    """The decoder of training, which draws at temperature 1 unless another is given."""

    @override
    def written(self) -> dict[str, Any]:
        """The name, what differs from its row, and the temperature."""
        proposal = {"name": self.proposal} if isinstance(self.proposal, str) else self.proposal or {}
        return {**super().written(), "proposal": {"temperature": 1.0, **proposal}}
