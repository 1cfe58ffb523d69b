"""The page of one sample: what the noise of each step decided, and what other noise would have given."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from flowgrpo.commands.gallery.numbers import difference, number
from flowgrpo.commands.gallery.pages import template
from flowgrpo.training.reports.tree_store import encoded

if TYPE_CHECKING:
    from flowgrpo.flow.diagnostics.counterfactual import Explanation, Look, Step


@dataclass(frozen=True)
class Tile:
    """A picture as the page shows it, `own` where it is that of the sample itself."""

    look: Look
    own: bool = False

    @property
    def url(self) -> str:
        """Its data."""
        return f"data:image/webp;base64,{encoded(self.look.picture)}"

    @property
    def reward(self) -> str:
        """In digits."""
        return number(self.look.reward)


@dataclass(frozen=True)
class StepRow:
    """A step as the page shows it."""

    step: Step
    sample: Look

    @property
    def share(self) -> str:
        """Its share of the variance with its standard error, in percent; an en dash where there is no variance."""
        own = self.step.share
        return "–" if own is None else f"{100 * own.share:.0f}% ± {100 * own.error:.0f}".replace("-", "−")

    @property
    def bar(self) -> float:
        """How long the bar of the share is, in percent."""
        return 0.0 if self.step.share is None else min(100.0, max(0.0, 100 * self.step.share.share))

    @property
    def whisker(self) -> tuple[float, float]:
        """Where the share's standard error begins and ends, in percent."""
        own = self.step.share
        low, high = (0.0, 0.0) if own is None else (own.share - own.error, own.share + own.error)
        return min(100.0, max(0.0, 100 * low)), min(100.0, max(0.0, 100 * high))

    @property
    def spread(self) -> str:
        """Standard deviation of the rewards of its redraws."""
        return number(self.step.deviation, 2)

    @property
    def advantage(self) -> str:
        """What the method gave."""
        own = self.step.advantage
        return "–" if own is None else f"{'+' if own > 0 else ''}{number(own, 2)}"

    @property
    def foretold(self) -> tuple[Tile, Tile]:
        """What was foretold before the step and after it."""
        return Tile(self.step.before), Tile(self.step.after)

    @property
    def rise(self) -> str:
        """How the reward of what is foretold changed over the step."""
        return difference(self.step.before.reward, self.step.after.reward)

    @property
    def tiles(self) -> list[Tile]:
        """The redraws and the sample itself, from the worst to the best; those without a reward first."""
        every = [*map(Tile, self.step.redraws), Tile(self.sample, own=True)]
        return sorted(every, key=lambda tile: float("-inf") if tile.look.reward is None else tile.look.reward)

    @property
    def better(self) -> int:
        """How many redraws have a larger reward than the sample."""
        own = self.sample.reward
        known = [look.reward for look in self.step.redraws if look.reward is not None]
        return 0 if own is None else sum(reward > own for reward in known)


@dataclass(frozen=True)
class Explained:
    """An explanation, of a checkpoint of a run."""

    of: Explanation
    _: KW_ONLY
    run: str
    step: int
    method: str

    @property
    def rows(self) -> list[StepRow]:
        """Its steps."""
        return [StepRow(step, self.of.sample) for step in self.of.steps]

    @property
    def total(self) -> tuple[float, float] | None:
        """What the shares add up to, and the standard error of that; None without any variance."""
        left = self.of.residual
        return None if left is None else (1 - left.share, left.error)

    @property
    def sentences(self) -> list[str]:
        """What a look at the page should tell first."""
        shared = [(row, row.step.share) for row in self.rows if row.step.share is not None]
        if not shared and self.of.lost:
            return [f"{self.of.lost} samples have no reward, so that the steps cannot be told apart."]
        if not shared:
            return ["Other noise changes nothing: all samples from this start have the same reward."]
        most, share = max(shared, key=lambda each: each[1].share)
        if share.share > 2 * share.error:
            where = f"step {most.step.index + 1}"
            found = [
                f"The noise of {where} has the largest share of the reward's variance from this start: {most.share}."
            ]
        else:
            found = ["No step stands out: the shares are small beside their errors, which more --chains make smaller."]
        chances = [(look.reward, row) for row in self.rows for look in row.step.redraws if look.reward is not None]
        own = self.of.sample.reward
        if chances and own is not None:
            best, row = max(chances, key=lambda each: each[0])
            if best > own:
                words = f"would have given reward {number(best)} in place of {number(own)}"
                found.append(f"The best of all redraws, other noise in step {row.step.index + 1} alone, {words}.")
            else:
                found.append(f"No redraw of a single step is better than this sample, of reward {number(own)}.")
        return found

    @property
    def told(self) -> dict[str, Any]:
        """All numbers, as JSON.

        `shares`, of the variance over the noise of all steps with their standard errors, `total_variance` itself, `credit`
        and `redraws` by step, counted from 0; `sum` of the shares, which is 1 but for its error.
        """
        explanation, rows = self.of, self.rows
        total = self.total
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
        """The page, as HTML that needs nothing beside itself."""
        asked = {
            "told": self,
            "of": self.of,
            "sample": Tile(self.of.sample, own=True),
            "still": Tile(self.of.still),
            "number": number,
        }
        return template("explanation.html.jinja").render(asked)
