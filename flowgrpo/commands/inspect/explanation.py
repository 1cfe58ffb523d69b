"""The page of one explained sample: what the noise of each step decided, and what other noise would have given."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from flowgrpo.commands.page_parts.numbers import number
from flowgrpo.commands.page_parts.pages import template
from flowgrpo.training.reports.tree_store import encode_picture

if TYPE_CHECKING:
    from flowgrpo.flow.diagnostics.counterfactual import Explanation, Look, Step


@dataclass(frozen=True)
class Tile:
    """A picture with its reward; `own` marks the explained sample."""

    look: Look
    own: bool = False

    @property
    def url(self) -> str:
        """Data URL of the picture."""
        return f"data:image/webp;base64,{encode_picture(self.look.picture)}"

    @property
    def reward(self) -> str:
        """The reward as text."""
        return number(self.look.reward)


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """A step of the sample, formatted; `share` is the step's share of the reward's variance, in percent."""

    step: Step
    share: str  # with its standard error
    bar: float  # length of the share's bar
    whisker: tuple[float, float]  # start and end of its standard error
    spread: str  # standard deviation of the redraws' rewards
    advantage: str
    predicted: tuple[Tile, Tile]  # predictions of the clean sample before and after the step
    tiles: list[Tile]  # the redraws and the sample, those without a reward first, then from the worst to the best
    better: int  # redraws with a larger reward than the sample's

    @classmethod
    def of(cls, step: Step, sample: Look) -> StepRow:
        """Format a step of a sample."""
        share, advantage = step.share, step.advantage
        tiles = [*map(Tile, step.redraws), Tile(sample, own=True)]
        known = [look.reward for look in step.redraws if look.reward is not None]
        return cls(
            step=step,
            share="–" if share is None else f"{round(100 * share.share)}% ± {100 * share.error:.0f}".replace("-", "−"),
            bar=0.0 if share is None else _percent(share.share),
            whisker=(0.0, 0.0)
            if share is None
            else (_percent(share.share - share.error), _percent(share.share + share.error)),
            spread=number(step.deviation, 2),
            advantage="–" if advantage is None else f"{'+' if advantage > 0 else ''}{number(advantage, 2)}",
            predicted=(Tile(step.before), Tile(step.after)),
            tiles=sorted(tiles, key=lambda tile: -math.inf if tile.look.reward is None else tile.look.reward),
            better=0 if sample.reward is None else sum(reward > sample.reward for reward in known),
        )


def _percent(share: float) -> float:
    return min(100.0, max(0.0, 100 * share))


@dataclass(frozen=True)
class Explained:
    """The explanation of a sample (`of`), with the run's name and method and the step of its checkpoint."""

    of: Explanation
    _: KW_ONLY
    run: str
    step: int
    method: str

    @property
    def rows(self) -> list[StepRow]:
        """The steps."""
        return [StepRow.of(step, self.of.sample) for step in self.of.steps]

    @property
    def total(self) -> tuple[float, float] | None:
        """Sum of the shares and its standard error; None without variance."""
        left = self.of.residual
        return None if left is None else (1 - left.share, left.error)

    @property
    def sentences(self) -> list[str]:
        """Summary of the page."""
        shared = [(row, row.step.share) for row in self.rows if row.step.share is not None]
        if not shared and self.of.lost:
            return [f"{self.of.lost} samples have no reward, so that the steps cannot be told apart."]
        if not shared:
            return ["Other noise changes nothing: all samples from this start have the same reward."]
        most, share = max(shared, key=lambda each: each[1].share)
        if share.share > 2 * share.error:
            words = [
                f"The noise of step {most.step.index} has the largest share of the reward's variance from this start: "
                f"{most.share}."
            ]
        else:
            words = ["No step stands out: the shares are small beside their errors, which more --chains make smaller."]
        redraws = [(look.reward, row) for row in self.rows for look in row.step.redraws if look.reward is not None]
        own = self.of.sample.reward
        if redraws and own is not None:
            best, row = max(redraws, key=lambda each: each[0])
            if best > own:
                words.append(
                    f"The best redraw (new noise in step {row.step.index} only) has reward {number(best)} instead of "
                    f"{number(own)}."
                )
            else:
                words.append(f"No redraw of a single step is better than this sample, of reward {number(own)}.")
        return words

    @property
    def document(self) -> dict[str, Any]:
        """All numbers of the page, for JSON. Steps are counted from 0; the steps' shares sum to 1 up to their errors."""
        explanation, rows, total = self.of, self.rows, self.total
        return {
            "run": self.run,
            "checkpoint": self.step,
            "method": self.method,
            "prompt": explanation.row.prompt,
            "seed": explanation.row.seed,
            "reward": explanation.sample.reward,
            "reward_without_noise": explanation.still.reward,
            "noise_of_method": not explanation.lent,
            "shares": [
                {"step": row.step.index, "share": row.step.share.share, "error": row.step.share.error}
                for row in rows
                if row.step.share is not None
            ],
            "sum": None if total is None else {"share": total[0], "error": total[1]},
            "total_variance": explanation.variance,
            "credit": [{"step": row.step.index, "advantage": row.step.advantage} for row in rows],
            "redraws": [
                {"step": row.step.index, "rewards": [look.reward for look in row.step.redraws]} for row in rows
            ],
            "evaluations": explanation.evaluations,
        }

    def page(self) -> str:
        """Return the page as self-contained HTML."""
        return template("explanation.html.jinja").render(
            told=self, of=self.of, sample=Tile(self.of.sample, own=True), still=Tile(self.of.still), number=number
        )
