"""Are the decoder's numbers actions too?"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field
from typing_extensions import override

from flowgrpo.mdlm.decoding.decode import Decoder
from flowgrpo.mdlm.methods.schedules.schedule_actions import check_action, check_start
from flowgrpo.schema.base import Choice, Positive
from flowgrpo.schema.imports.lazy import lazy

if TYPE_CHECKING:
    from flowgrpo.mdlm.methods.schedules import learned_schedule
    from flowgrpo.mdlm.methods.schedules.learned_schedule import SchedulePolicy
else:
    learned_schedule = lazy("flowgrpo.mdlm.methods.schedules.learned_schedule")


class Schedule(Choice):
    """What every schedule has."""

    @abstractmethod
    def policy(self, steps: int) -> SchedulePolicy | None:
        """The distribution of the numbers, for decodes of at most so many steps; None where they stay as they are."""

    @abstractmethod
    def check(self, decoder: Decoder, steps: int) -> None:
        """See that the schedule goes with a decoder.

        Raises:
            InputError: it does not.
        """


class Unscheduled(Schedule):
    """The decoder's numbers stay as they are."""

    name: Literal["none"] = "none"

    @override
    def policy(self, steps: int) -> None:
        return None

    @override
    def check(self, decoder: Decoder, steps: int) -> None:
        """Any decoder goes with it."""


class LearnedSchedule(Schedule):
    """Co-GRPO (arXiv 2512.22288), reconstructed: numbers of the decoder are drawn, and trained by the same advantage."""

    name: Literal["learned"] = "learned"
    start: Annotated[dict[str, float | list[float]], Field(min_length=1)] = {"temperature": 0.8}
    """Mean of each number to begin with, of all steps or of each: ratio, temperature, selection_temperature, cfg_scale."""
    std: Positive = 0.3
    """Standard deviation of the numbers' logits."""
    learning_rate: Positive = 0.03
    """Of the schedule's own parameters."""

    @override
    def policy(self, steps: int) -> SchedulePolicy:
        return learned_schedule.SchedulePolicy(self.start, steps, self.std)

    @override
    def check(self, decoder: Decoder, steps: int) -> None:
        """See that the decoder has these numbers, and that each lies between its bounds."""
        check_start(self.start, steps)
        for action in self.start:
            check_action(action, decoder)
