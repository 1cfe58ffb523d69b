"""Runs of the plane's field that keep graphs, in one process and in two."""

from accelerate import Accelerator
from field import lines, settings, trainer, weights_of


def run_of(folder, replay, preset, overrides, algorithm, **options):
    usual = {"train__iterations": 3, "train__updates": 2, "train__replay": replay, "eval__every": 9}
    chosen = settings(folder / replay, **{**usual, "algorithm": {"preset": preset, **algorithm}, **overrides})
    done = trainer(chosen, held_out=0, **options)
    done.run()
    return done


def of_two(rank, folder, word):
    """Train in two processes; return the weights, and what the first update evaluates."""
    chosen = settings(folder, run__name=word, train__replay=word, train__iterations=2, train__updates=2)
    run = trainer(chosen, held_out=0, accelerator=Accelerator(cpu=True))
    run.run()
    return weights_of(run), lines(run)[0]["cost/update_evaluations"]
