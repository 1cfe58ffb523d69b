"""Schedules of a decoder's settings, such as its temperature: fixed, or drawn as actions at each step."""

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
    """A schedule of the decoder's settings, such as its temperature."""

    @abstractmethod
    def policy(self, steps: int) -> SchedulePolicy | None:
        """Return the policy that draws decoder settings at each of at most `steps` steps; None if the settings are fixed."""

    @abstractmethod
    def check(self, decoder: Decoder, steps: int) -> None:
        """Raise InputError if the schedule does not fit a decoder."""


class Unscheduled(Schedule):
    """The decoder's settings are fixed."""

    name: Literal["none"] = "none"

    @override
    def policy(self, steps: int) -> None:
        return None

    @override
    def check(self, decoder: Decoder, steps: int) -> None:
        pass


class LearnedSchedule(Schedule):
    """Co-GRPO (arXiv 2512.22288), reconstructed: settings of the decoder are drawn, and trained by the same advantage."""

    name: Literal["learned"] = "learned"
    start: Annotated[dict[str, float | list[float]], Field(min_length=1)] = {"temperature": 0.8}
    """First mean of each number, one for all steps or a list: ratio, temperature, selection_temperature, cfg_scale."""
    std: Positive = 0.3
    """First standard deviation of the numbers, before a sigmoid maps them into their bounds."""
    learning_rate: Positive = 0.03
    """Learning rate of the schedule's own parameters."""

    @override
    def policy(self, steps: int) -> SchedulePolicy:
        return learned_schedule.SchedulePolicy(self.start, steps, self.std)

    @override
    def check(self, decoder: Decoder, steps: int) -> None:
        check_start(self.start, steps)
        for action in self.start:
            check_action(action, decoder)
