"""Config sections of what a run saves: checkpoints, experiment trackers, and trees of rollouts."""

from __future__ import annotations

from pydantic import Field

from flowgrpo.schema.base import Strict


class Checkpoint(Strict):
    """How often checkpoints are written, and how many are kept."""

    every: int = Field(5, ge=1)
    """Iterations between two checkpoints; there is one after the last iteration, too."""
    keep: int = Field(2, ge=1)
    """How many are kept, the last ones; and beside them as many of the sound ones."""


class Tracker(Strict):
    """Options of one experiment tracker (wandb, tensorboard)."""

    project: str = Field("flowgrpo", min_length=1)
    """Project that the run belongs to; of tensorboard the folder in the run's folder."""
    name: str | None = None
    """The run's name there; null: run.name."""
    entity: str | None = None
    """User or team that the project belongs to."""
    tags: list[str] = []
    """Words to find the run by."""


class Trees(Strict):
    """Which trees of rollouts a run saves for inspection."""

    every: int = Field(8, ge=1)
    """Iterations from one whose trees are kept to the next; those of the first and the last iteration are kept, too."""
    prompts: int = Field(2, ge=1)
    """How many prompts of such an iteration: those of its first groups."""
    side: int = Field(80, ge=16, le=512)
    """Longest side of a kept picture, pixels; smaller ones are kept as they are."""
    score: bool = True
    """Whether what the model foretells of each state is scored, too, which asks the rewards once for each state."""

    def due(self, iteration: int, iterations: int) -> bool:
        """Return whether the trees of `iteration`, counted from 0, are saved."""
        return iteration % self.every == 0 or iteration == iterations - 1
