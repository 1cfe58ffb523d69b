"""The page of one explained sample: what the noise of each step decided, and what other noise would have given."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from flowgrpo.commands.gallery.numbers import number
from flowgrpo.commands.gallery.pages import template
from flowgrpo.training.reports.tree_store import encoded

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
        return f"data:image/webp;base64,{encoded(self.look.picture)}"

    @property
    def reward(self) -> str:
        """The reward as text."""
        return number(self.look.reward)


@dataclass(frozen=True)
class StepRow:
    """A step of the sample, formatted; shares are of the variance of the reward."""

    step: Step
    sample: Look

    @property
    def share(self) -> str:
        """Share with its standard error, in percent; an en dash without variance."""
        own = self.step.share
        return "–" if own is None else f"{100 * own.share:.0f}% ± {100 * own.error:.0f}".replace("-", "−")

    @property
    def bar(self) -> float:
        """Length of the share's bar, in percent."""
        return 0.0 if self.step.share is None else _percent(self.step.share.share)

    @property
    def whisker(self) -> tuple[float, float]:
        """Start and end of the share's standard error, in percent."""
        own = self.step.share
        return (0.0, 0.0) if own is None else (_percent(own.share - own.error), _percent(own.share + own.error))

    @property
    def spread(self) -> str:
        """Standard deviation of the rewards of the redraws."""
        return number(self.step.deviation, 2)

    @property
    def advantage(self) -> str:
        """The method's advantage."""
        own = self.step.advantage
        return "–" if own is None else f"{'+' if own > 0 else ''}{number(own, 2)}"

    @property
    def foretold(self) -> tuple[Tile, Tile]:
        """Predictions of the clean sample before and after the step."""
        return Tile(self.step.before), Tile(self.step.after)

    @property
    def tiles(self) -> list[Tile]:
        """The redraws and the sample, those without a reward first, then from the worst to the best."""
        every = [*map(Tile, self.step.redraws), Tile(self.sample, own=True)]
        return sorted(every, key=lambda tile: float("-inf") if tile.look.reward is None else tile.look.reward)

    @property
    def better(self) -> int:
        """Number of redraws with a larger reward than the sample's."""
        own = self.sample.reward
        known = [look.reward for look in self.step.redraws if look.reward is not None]
        return 0 if own is None else sum(reward > own for reward in known)


def _percent(share: float) -> float:
    return min(100.0, max(0.0, 100 * share))


@dataclass(frozen=True)
class Explained:
    """An explanation `of` a sample, with its run, the step of its checkpoint and the run's method."""

    of: Explanation
    _: KW_ONLY
    run: str
    step: int
    method: str

    @property
    def rows(self) -> list[StepRow]:
        """The steps."""
        return [StepRow(step, self.of.sample) for step in self.of.steps]

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
            where = f"step {most.step.index + 1}"
            words = [
                f"The noise of {where} has the largest share of the reward's variance from this start: {most.share}."
            ]
        else:
            words = ["No step stands out: the shares are small beside their errors, which more --chains make smaller."]
        redraws = [(look.reward, row) for row in self.rows for look in row.step.redraws if look.reward is not None]
        own = self.of.sample.reward
        if redraws and own is not None:
            best, row = max(redraws, key=lambda each: each[0])
            if best > own:
                gain = f"would have given reward {number(best)} in place of {number(own)}"
                words.append(f"The best of all redraws, other noise in step {row.step.index + 1} alone, {gain}.")
            else:
                words.append(f"No redraw of a single step is better than this sample, of reward {number(own)}.")
        return words

    @property
    def told(self) -> dict[str, Any]:
        """All numbers, for JSON: steps are counted from 0, and the sum of the shares is 1 but for its error."""
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
