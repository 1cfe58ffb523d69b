"""How answers are made: a decoder of the table, in training at temperature 1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import model_validator

from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding.decode import Decoder
from flowgrpo.mdlm.decoding.decoders import build
from flowgrpo.schema.base import Choice

if TYPE_CHECKING:
    from flowgrpo.mdlm.decoding.predictor import MaskPredictor


class Decoding(Choice):
    """A decoder of the table by `name`, with any of its words and numbers replaced; a plain word is its name.

    See `flowgrpo.mdlm.decoding.decoders.build`, which checks them. Without `steps` it commits one token a step.
    """

    name: str = "low_confidence"
    proposal: str | dict[str, Any] | None = None
    scorer: Any = None
    modifiers: Any = None
    committer: Any = None
    region: Any = None
    steps: Any = None
    cfg_scale: Any = None
    suppressed: Any = None
    eos_early_stop: Any = None
    cache: Any = None

    @model_validator(mode="before")
    @classmethod
    def _word(cls, written: Any) -> Any:
        return {"name": written} if isinstance(written, str) else written

    def build(
        self,
        length: int,
        eos_id: int | None,
        place: str,
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
        written = {key: value for key, value in self._written().items() if value is not None}
        try:
            return build(written, length, eos_id, predictor, block_size)
        except InputError as error:
            raise InputError(str(error).replace("decoder", place, 1)) from None

    def _written(self) -> dict[str, Any]:
        return self.model_dump()


class Rollouts(Decoding):
    """The decoder of training, which draws at temperature 1 unless another is given."""

    def _written(self) -> dict[str, Any]:
        proposal = {"name": self.proposal} if isinstance(self.proposal, str) else self.proposal or {}
        return {**super()._written(), "proposal": {"temperature": 1.0, **proposal}}
