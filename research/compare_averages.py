"""Measure how far averages of the weights lag behind the weights in held-out reward.

    OMP_NUM_THREADS=1 python research/compare_averages.py CONFIG [KEY=VALUE ...] [--warmups 10 40 80] [--every 6]

Trains the config once, in one process. For each warm-up of the decay it keeps an average of the weights, by the rule of
`train.ema`. Every `--every` iterations, the weights and each average sample each held-out prompt from the same noise.
Prints a table in Markdown: the mean reward of the weights, and for each warm-up the reward of the weights minus that of
the average, with the standard error over the prompts. The last row is the mean over all evaluations.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from collections.abc import Sequence

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from flowgrpo import config
from flowgrpo.data import stored
from flowgrpo.data.prompts import load_split
from flowgrpo.errors import InputError
from flowgrpo.flow.setup import trainer
from flowgrpo.training.loop import Loop
from flowgrpo.training.reports import metrics
from flowgrpo.training.run.random_states import preserve_random_state
from flowgrpo.training.run.run_data import RunData
from flowgrpo.training.scoring import scorer
from flowgrpo.training.weights.trained_weights import follow

Difference = tuple[float, float]  # mean difference, standard error


class Averages:
    """Averages of a run's weights, one for each warm-up.

    Args:
        run: the averages follow its optimizer steps, by its rule with the given warm-ups.
    """

    def __init__(self, run: Loop, warmups: Sequence[float]):
        ema = run.state.config.train.ema
        self._weights, self._real = run.state.weights, run.state.weights.after_update
        self._rules = {warmup: ema.model_copy(update={"warmup": warmup}) for warmup in warmups}
        self.tensors = {warmup: [p.detach().clone() for p in run.state.weights.parameters] for warmup in warmups}
        run.state.weights.after_update = self._after_update

    @torch.no_grad()
    def _after_update(self) -> None:
        step = self._weights.updates
        for warmup, slow in self.tensors.items():
            if (decay := self._rules[warmup].decay_at(step)) < 1:
                follow(slow, self._weights.parameters, decay)
        self._real()


def difference(some: Sequence[float], others: Sequence[float]) -> Difference:
    """Return the mean difference of pairs and its standard error, over pairs whose rewards are known."""
    pairs = [gap for a, b in zip(some, others, strict=True) if math.isfinite(gap := a - b)]
    return statistics.fmean(pairs), statistics.stdev(pairs) / math.sqrt(len(pairs))


def measured(run: Loop, warmups: Sequence[float]) -> dict[int, tuple[float, dict[float, Difference]]]:
    """Train; return for each evaluation the weights' mean reward, and its excess over that of each average."""
    averages = Averages(run, warmups)
    found: dict[int, tuple[float, dict[float, Difference]]] = {}

    def rewards() -> list[float]:
        with preserve_random_state():
            scores = [sample.rewards for sample in run.wing.eval_samples()]
        names = [reward.name for reward in run.state.rewards]
        return metrics.totals_of(scores, run.state.combination, names).tolist()

    def evaluate() -> None:
        if run.state.done == 0:
            return
        totals, lags = rewards(), {}
        for warmup, slow in averages.tensors.items():
            with run.state.weights.swap(slow):
                lags[warmup] = difference(totals, rewards())
        found[run.state.done] = statistics.fmean(filter(math.isfinite, totals)), lags
        print(row(run.state.done, *found[run.state.done]), flush=True)

    run.evaluate = evaluate
    run.run()
    return found


def row(place: object, reward: float | None, lags: dict[float, Difference]) -> str:
    """Return a row of the table."""
    cells = [f"{lag:+.4f} ± {error:.4f}" for lag, error in lags.values()]
    return f"| {place} | {'' if reward is None else f'{reward:.3f}'} | {' | '.join(cells)} |"


def pooled(found: Sequence[dict[float, Difference]]) -> dict[float, Difference]:
    """Return the mean over several evaluations, whose errors are assumed to be independent."""
    mean = {}
    for warmup in found[0]:
        lags, errors = zip(*(each[warmup] for each in found), strict=True)
        mean[warmup] = statistics.fmean(lags), math.sqrt(sum(error**2 for error in errors)) / len(errors)
    return mean


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--warmups", type=float, nargs="+", default=[10.0, 40.0, 80.0])
    parser.add_argument("--every", type=int, default=6, help="iterations between two evaluations")
    parser.add_argument("--prompts", type=int, default=512, help="held-out ones")
    options = parser.parse_args(arguments)
    if options.prompts < 2:
        parser.error("--prompts: a standard error is of 2 prompts or more")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        keys = [f"eval.every={options.every}", f"eval.prompts={options.prompts}", "eval.save=0", "run.processes=1"]
        keys += [f"run.dir={folder}", "run.name=averages", "run.trees=null", "run.checkpoint.every=100000"]
        try:
            chosen = config.load(options.config, [*options.overrides, *keys])
        except InputError as error:
            parser.error(str(error))
        if chosen.train.ema is None:
            parser.error("train.ema: is null, so that there is no average; leave it out, or set its decay")
        set_seed(chosen.run.seed)
        rewards, watched = scorer.rewards(chosen.rewards, [])
        held_out = load_split(chosen.prompts, "eval")[: options.prompts]
        run = trainer(chosen, Accelerator(), RunData(stored.train_prompts(chosen), held_out, rewards, watched))
        run.state.folder.mkdir(parents=True)
        print(f"| iteration | reward | {' | '.join(f'warm-up {warmup:g}' for warmup in options.warmups)} |")
        print("|---" * (2 + len(options.warmups)) + "|", flush=True)
        found = measured(run, options.warmups)
        print(row("mean", None, pooled([lags for _, lags in found.values()])))


if __name__ == "__main__":
    main()
