"""Runs of the plane's field with too little memory, in one process and two, for `test_batch_sizes` and `test_oom_retry`."""

import json
import random
from pathlib import Path

import torch
from accelerate import Accelerator
from field import Network, closeness, lines, settings, trainer, weights_of

from flowgrpo.training.fitting import batch_probing

SAID = "CUDA out of memory. Tried to allocate 2.00 GiB."
AUTO = {"train__micro_batch": "auto", "train__rollout_batch": "auto"}


def counting():
    """Make a clock by which each call takes a second, so that the largest size that fits is the fastest."""
    return iter(range(10**9)).__next__


class Short(Network):
    """Run out of memory in calls of more rows than `with_gradient`, or than `without`."""

    with_gradient = without = 1000

    def forward(self, x, sigma, rows):
        if len(x) > (self.with_gradient if torch.is_grad_enabled() else self.without):
            raise torch.OutOfMemoryError(SAID)
        return super().forward(x, sigma, rows)


def judged_at_a_whim(samples, prompts):
    return closeness(samples, prompts) + torch.randn(len(prompts)) / 100 + random.random() / 100


def begun(folder, net=None, accelerator=None, **overrides):
    """Build a run that draws from the global generators."""
    torch.manual_seed(1), random.seed(1)
    chosen = settings(folder, **{"train__group_size": 12, "train__replay": "always", **overrides})
    return trainer(chosen, net or Short(), reward=judged_at_a_whim, accelerator=accelerator or Accelerator())


def told(run):
    return lines(run), lines(run, "eval"), weights_of(run)


def short(with_gradient=1000, without=1000):
    net = Short()
    net.with_gradient, net.without = with_gradient, without
    return net


def few(algorithm):
    """Ask for no more draws than a short schedule has."""
    return {"algorithm__likelihood__draws": 3} if algorithm in ("awm", "dgpo") else {}


def sizes(run):
    return run.config.train.micro_batch, run.config.train.rollout_batch


def held(run):
    written = json.loads((run.folder / "batches.json").read_text())["held"]
    return [(each["step"], each.get("micro_batch"), each.get("rollout_batch"), each["why"]) for each in written]


def at(run, iteration, change):
    """Change something when an iteration begins to roll out."""
    real = run.rollout

    def rollout(number, groups):
        if number == iteration:
            change()
        return real(number, groups)

    run.rollout = rollout


def equal(some, others):
    assert some[:2] == others[:2]
    assert all(torch.equal(tensor, others[2][name]) for name, tensor in some[2].items())


def of_two(rank, folder, with_gradient, without):
    """Train in two processes, of which the second has less memory; return sizes and weights."""
    batch_probing.clock = counting()
    net = short(with_gradient, without) if rank else Short()
    run = begun(folder, net, Accelerator(cpu=True), **AUTO, train__iterations=2)
    run.run()
    return *sizes(run), weights_of(run)


def of_two_disks(rank, folder):
    """Return the sizes of two processes, of which only the first sees what the run has found."""
    run = begun(Path(folder, str(rank)), Short(), Accelerator(cpu=True), **AUTO, train__iterations=1)
    with run.report:
        run.batch_sizes.prepare()
    return sizes(run)


def beside_an_evaluator(rank, folder):
    """Return the sizes of two processes that train and one that evaluates; larger calls are always faster."""
    batch_probing.clock = counting()
    run = begun(folder, Short(), Accelerator(cpu=True), **AUTO, train__iterations=1, run__evaluators=1)
    run.run()
    return sizes(run)


def of_two_short_later(rank, folder):
    """Train in two processes, of which the second comes to have less memory."""
    batch_probing.clock = counting()
    net = Short()
    run = begun(folder, net, Accelerator(cpu=True), **AUTO, train__iterations=2)
    if rank:
        at(run, 1, lambda: setattr(net, "without", 4))
    run.run()


def beside_a_generator(rank, folder):
    """Train beside a generator whose rollout runs out of memory."""
    net = Short()
    run = begun(folder, net, Accelerator(cpu=True), train__iterations=2, run__generators=1, run__staleness=1)
    at(run, 1, lambda: setattr(net, "without", 0))
    run.run()
