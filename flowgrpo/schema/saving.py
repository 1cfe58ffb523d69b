"""Config sections of what a run saves: checkpoints, experiment trackers, and trees of rollouts."""

from __future__ import annotations

from pydantic import Field

from flowgrpo.schema.base import Strict


class Checkpoint(Strict):
    """Options of checkpoints: how often they are written, and how many are kept."""

    every: int = Field(5, ge=1)
    """Iterations between two checkpoints; there is one after the last iteration, too."""
    keep: int = Field(2, ge=1)
    """Number of latest checkpoints to keep, and of latest sound ones (their samples had rewards)."""


class Tracker(Strict):
    """Options of one experiment tracker (wandb, tensorboard)."""

    project: str = Field("flowgrpo", min_length=1)
    """Project of the run; for tensorboard a folder in the run's folder."""
    name: str | None = None
    """Name of the run in the tracker; null: run.name."""
    entity: str | None = None
    """User or team that the project belongs to."""
    tags: list[str] = []
    """Words to find the run by."""


class Trees(Strict):
    """Options of the trees of rollouts that a run saves for inspection."""

    every: int = Field(8, ge=1)
    """Keep trees every this many iterations, from the first on, and those of the last iteration."""
    prompts: int = Field(2, ge=1)
    """Number of groups whose trees are kept in such an iteration, from the first on."""
    side: int = Field(80, ge=16, le=512)
    """Longest side of a kept picture, pixels; smaller ones are kept as they are."""
    score: bool = True
    """Score the model's one-step prediction at each state, too; this calls the rewards once for each state."""

    def due(self, iteration: int, iterations: int) -> bool:
        """Return whether the trees of `iteration`, counted from 0, are saved."""
        return iteration % self.every == 0 or iteration == iterations - 1
