"""Runs whose rollouts some processes make for others. `test_async_rollout` compares them with runs that make their own."""

import os
import signal
import tempfile
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from field import TEXTS, closeness, lines, resumed, settings, trainer, weights_of
from torch import distributed

from flowgrpo.training.distributed.channel import Channel, pack
from flowgrpo.training.run.stop_reasons import Stopped
from rewards import Reward

NUMBERS = {
    "train__groups": 4,
    "train__group_size": 4,
    "train__updates": 2,
    "train__iterations": 4,
    "train__replay": "always",  # as those must whose samples others make
    "run__checkpoint": {"every": 4},
}
STOPPED = {
    "preset": "flow_grpo",
    "tree": {"stop": {"step": 2, "keep": 0.5, "floor": 0.25}},
    "baseline": {"name": "leave_one_out"},
}
CASES = {
    "chains": {},
    "brushes of known prompts": {
        "algorithm": {"preset": "tempflow", "tree": {"branches": 2}},
        "prompts__pick": {"by": "variance", "robust": 1.0, "worst": -9.0},
    },
    "trees that adapt": {"algorithm": {"preset": "adaptive", "tree": {"branches": 4, "every": 1}}},
    "budgets by what is known": {"prompts__pick": {"by": "variance", "budget": "knapsack", "worst": -9.0}},
    "an average and a reference that follows": {
        "algorithm": {"preset": "flow_grpo", "objective": {"kl": {"beta": 0.2, "reference": "moving", "refresh": 3}}},
        "train__ema": {"decay": 0.8},
    },
    "rewards forgotten by log ratios": {
        "algorithm__baseline": "tracker",
        "prompts__pick": {"by": "variance", "worst": -9.0},
        "train__half_life": {"by": "log_ratio", "after": 0.01},
    },
    "drafted starts": {"train__draft": {"pool": 2, "call": {}}},
    "chains that are stopped early": {"algorithm": STOPPED},
    "calibrated noise": {"algorithm": {"preset": "dense_grpo", "kernel": {"calibrate": {"rounds": 1}}}},
}


def shared_folder():
    """Make an empty folder that all processes have."""
    box = [tempfile.mkdtemp()]
    distributed.broadcast_object_list(box)
    return Path(box[0])


def begun(folder, texts=TEXTS, reward=closeness, **choices):
    return trainer(
        settings(folder, **{**NUMBERS, **choices}),
        steps=4,
        texts=texts,
        held_out=0,
        rewards=[Reward("closeness", reward)],
        accelerator=Accelerator(cpu=True),  # else several processes of a CPU are not connected
    )


def told(run):
    return [{k: v for k, v in line.items() if k != "time/generate"} for line in lines(run)], weights_of(run)


def runs(rank, generators=0, cases=CASES, lags=(0, 2)):
    """Metric lines and weights of each case, without staleness and with."""
    found = {}
    for case in cases:
        for staleness in lags:
            folder = Path(tempfile.mkdtemp())
            iterations = {"train__iterations": 4 if staleness else 3}
            run = begun(folder, run__generators=generators, run__staleness=staleness, **CASES[case], **iterations)
            run.run()
            found[case, staleness] = told(run)
    return found


def chains(rank):
    return runs(rank, 0, ["chains"], [2])


chains_with_one, chains_with_two = (partial(runs, generators=n, cases=["chains"], lags=[2]) for n in (1, 2))


def interrupted(rank):
    """Stop a run in its second iteration, then resume it. Return what each process said, and what the run reported."""
    folder = shared_folder()
    said = stopped(begun(folder, run__generators=1, run__staleness=2), 1)
    return said, told(resumed(begun(folder, run__generators=1, run__staleness=2)))


def forgetting(rank):
    """Metric lines of a run whose rewards are forgotten by log ratios, their sum, and what is known of the prompts."""
    return forgot(tempfile.mkdtemp())


def forgot(folder):
    run = begun(folder, **CASES["rewards forgotten by log ratios"])
    run.run()
    return lines(run), run.prompt_stats.odometer, run.prompt_stats.seen


def stopped(run, done):
    """Send SIGTERM to a run after some iterations, and return what it said."""
    real = run.iterate

    def iterate():
        if run.done == done:
            os.kill(os.getpid(), signal.SIGTERM)
        return real()

    run.iterate = iterate
    try:
        run.run()
    except Stopped as stop:
        return str(stop)
    return None


def lost(rank):
    """End the generator without a word while it makes the samples of the third iteration."""
    run = begun(Path(tempfile.mkdtemp()), run__generators=1, run__staleness=2)
    real = run.rollout

    def rollout(iteration, groups):
        if rank == 1 and iteration == 2:
            os._exit(1)
        return real(iteration, groups)

    run.rollout = rollout
    run.run()
    return told(run)


def posted(rank):
    """Post six messages, at most two unrequested. Return how many are under way after each, or what was received."""
    post = Channel(torch.device("cpu"))
    if rank == 1:
        return [post.unpack(post.receive(0)) for _ in range(6)]
    found = []
    for number in range(6):
        post.post(pack(number), 1, 2)
        found.append(len(post._under_way[1]))
    post.flush(1)
    return found


def unreadable(rank):
    """Let the training process have no memory for what its generator sends."""
    run = begun(Path(tempfile.mkdtemp()), run__generators=1, run__staleness=1)
    if rank == 0:

        def unpack(content):
            raise torch.OutOfMemoryError("CUDA out of memory")

        run.rollouts._post.unpack = unpack
    run.run()


def adapted(folder):
    """Run a tree that adapts, and return its shapes."""
    train = {"train__group_size": 8, "train__learning_rate": 1e-3, "train__updates": 1}
    run = begun(folder, algorithm={"preset": "adaptive", "tree": {"branches": 4, "every": 2}}, **train)
    run.run()
    return run.shaping.state()["shapes"]


def adapting(rank):
    """Do the same on processes that train together."""
    return adapted(shared_folder())


def ended_early(folder):
    """Run chains that are stopped early, and return its lines and weights."""
    run = begun(folder, algorithm=STOPPED)
    run.run()
    return told(run)


def ending_early(rank):
    """Do the same on processes that train together."""
    return ended_early(shared_folder())


def hinted(folder):
    """Run with hints, and return their state."""
    hints = {"name": "noised", "success": -2.0, "ladder": [0.0, 1.0]}
    train = {"train__updates": 1, "train__iterations": 6, "train__learning_rate": 1e-3}
    run = begun(folder, algorithm={"preset": "flow_grpo", "hints": hints}, **train)
    run.run()
    return run.hints.state()


def hinting(rank):
    """Do the same on processes that train together."""
    return hinted(shared_folder())


def searched(folder, **choices):
    """Run with candidates for failed prompts, two groups of each prompt, and return what is remembered."""
    hints = {"name": "noised", "source": "search", "width": 24, "success": -1.6, "ladder": [0.0, 1.0]}
    train = {"train__updates": 1, "train__iterations": 6, "train__learning_rate": 1e-3}
    run = begun(folder, texts=("a", "bb"), algorithm={"preset": "flow_grpo", "hints": hints}, **train, **choices)
    run.run()
    assert sum(line.get("hints/found", 0) for line in lines(run)) > 0
    return run.hints.state()


def searching(rank):
    """Do the same on processes that train together."""
    return searched(shared_folder())


def searching_together(rank):
    """Do the same on processes of one data shard, of which the first scores; to the others all would be a success."""
    reward = closeness if rank == 0 else lambda samples, prompts: torch.zeros(len(samples))
    return searched(shared_folder(), run__context_parallel=2, reward=reward)
