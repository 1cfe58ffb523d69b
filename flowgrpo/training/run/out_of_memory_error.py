"""The out-of-memory error: its phase, the requested amount, and a remedy."""

from __future__ import annotations

import re

ASKED = re.compile(r"[Tt]ried to allocate (?P<bytes>\d+) bytes|(?:[Tt]ried|Unable) to allocate (?P<words>[\d.]+ \w+)")
FREE = re.compile(r"total capacity of (?P<total>[\d.]+ \w+) of which (?P<free>[\d.]+ \w+) is free")


class OutOfMemory(MemoryError):
    """An out-of-memory error whose message is one sentence.

    Attributes:
        phase: key of `memory_advice.SWITCHES`; None if unknown.
        place: what ran out of memory within the phase, such as a reward.
        remedy: option to set or hardware to use.
        sizes: probed batch sizes in use, by key of `train`.
        kept_graphs: whether graphs of a rollout were in memory.
    """

    def __init__(self, phase: str | None, error: BaseException, place: str | None = None):
        super().__init__(phase, error, place)
        self.phase, self.place, self.amounts = phase, place, _amounts(str(error))
        self.remedy: str | None = None
        self.sizes: dict[str, int] = {}
        self.kept_graphs = False

    def __str__(self) -> str:
        phase = f" in the {self.phase} phase" if self.phase else ""
        place = f", by {self.place}" if self.place else ""
        remedy = f"; what helps most is {self.remedy}" if self.remedy else ""
        return f"out of memory{phase}{place} ({self.amounts}){remedy}"


def last_resort(phase: str | None) -> str:
    """Return the advice for a phase in which every memory option (`memory_advice.SWITCHES`) is set already."""
    if phase == "rewards":
        return "a lower batch_size in the options of the reward, or serve it on another machine (flowgrpo serve)"
    return "a larger GPU, or smaller samples (model.call, model.length)"


def _amounts(said: str) -> str:
    """Return the requested and the free memory in words, from the error text or else measured on this machine."""
    asked, free = ASKED.search(said), FREE.search(said)
    wanted = "" if asked is None else f"{asked['words'] or _gib(int(asked['bytes']))} asked for, "
    if free is not None:
        return f"{wanted}{free['free']} of the GPU's {free['total']} free"
    if "CUDA" in said or "CUBLAS" in said:
        return f"{wanted}on the GPU"
    import psutil

    memory = psutil.virtual_memory()
    return f"{wanted}{_gib(memory.available)} of this machine's {_gib(memory.total)} free"


def _gib(number: float) -> str:
    return f"{number / 2**30:.2f} GiB"
