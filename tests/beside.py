"""Runs whose evaluations other processes make; `test_async_evaluation` compares them with runs that make their own."""

import os
import time

import torch
from accelerate import Accelerator
from ahead import shared_folder, stopped
from field import closeness, lines, nearness, resumed, settings, trainer, weights_of
from torch import distributed

from flowgrpo.training.run.stop_reasons import Stopped
from rewards import Reward

NUMBERS = {"train__group_size": 4, "train__updates": 2, "train__iterations": 5, "eval__prompts": 3, "eval__save": 3}


def begun(folder, **choices):
    run = trainer(
        settings(folder, **{**NUMBERS, **choices}),
        steps=4,
        held_out=3,
        rewards=[Reward("closeness", closeness)],
        eval_rewards=[Reward("nearness", nearness)],
        accelerator=Accelerator(cpu=True),  # else several processes of a CPU are not connected
    )
    run.samples.write = lambda samples, step: kept(run.folder, samples, step)
    return run


def kept(folder, samples, step):
    """Keep the numbers of samples of the plane, which are not pictures."""
    file = folder / f"samples-{step}.pt"
    torch.save([sample.decoded for sample in samples], file)


def told(run):
    """Lines of both phases, the weights, and the samples of each evaluation."""
    samples = {file.stem: torch.load(file) for file in sorted(run.folder.glob("samples-*.pt"))}
    return lines(run), lines(run, "eval"), weights_of(run), samples


def runs(rank, **choices):
    run = begun(shared_folder(), **choices)
    run.run()
    return told(run)


def alone(rank):
    return runs(rank)


def with_one(rank):
    return runs(rank, run__evaluators=1)


def with_two(rank):
    return runs(rank, run__evaluators=2)


def with_a_generator(rank):
    return runs(rank, run__evaluators=1, run__generators=1, run__staleness=1)


def behind(rank):
    return runs(rank, run__staleness=1)


def slow(rank):
    """Delay the first evaluation until a checkpoint is asked for. Return the phase and step of each line."""
    run = begun(shared_folder(), run__evaluators=1)
    if run.worker is not None:
        real = run.eval_samples

        def eval_samples():
            while not (run.folder / "asked").exists() and run.done == 0:
                time.sleep(0.01)  # of the first question, until a checkpoint was asked for
            return real()

        run.eval_samples = eval_samples
    else:
        save = run.save
        run.save = lambda: (save(), (run.folder / "asked").touch())
    run.run()
    return [(line["phase"], line["step"]) for line in run.report.lines]


def interrupted(rank):
    """Stop a run in its third iteration, then resume it. Return what each process said, and what the run reported."""
    folder = shared_folder()
    said = stopped(begun(folder, run__evaluators=1), 2)
    distributed.barrier()
    return said, told(resumed(begun(folder, run__evaluators=1)))


def lost(rank):
    """End the evaluator without a word in its second evaluation. Return what the training process says."""
    run = begun(shared_folder(), run__evaluators=1)
    real = run.eval_samples

    def eval_samples():
        if run.done == 2:
            os._exit(1)
        return real()

    run.eval_samples = eval_samples
    try:
        run.run()
    except Stopped as stop:
        return type(stop).__name__, str(stop), stop.rest
