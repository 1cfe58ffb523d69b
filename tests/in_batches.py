"""What `training/test_batch_sizes` runs, in one process and in two: the field of the plane with too little memory."""

import json
import random
from pathlib import Path

import torch
from accelerate import Accelerator
from field import Network, closeness, lines, settings, trainer, weights_of

from flowgrpo.training.fitting import batch_probing
from rewards import Reward

SAID = "CUDA out of memory. Tried to allocate 2.00 GiB."
AUTO = {"train__micro_batch": "auto", "train__rollout_batch": "auto"}


def counting():
    """A clock by which each call takes a second, so that the largest size that fits is the fastest."""
    return iter(range(10**9)).__next__


class Short(Network):
    """A network that runs out of memory in calls of more rows than `with_gradient`, or than `without`."""

    with_gradient = without = 1000

    def forward(self, x, sigma, rows):
        if len(x) > (self.with_gradient if torch.is_grad_enabled() else self.without):
            raise torch.OutOfMemoryError(SAID)
        return super().forward(x, sigma, rows)


def judged_at_a_whim(samples, prompts):
    return closeness(samples, prompts) + torch.randn(len(prompts)) / 100 + random.random() / 100


def begun(folder, net=None, accelerator=None, **overrides):
    """A run that has not begun to train, which draws from the global generators."""
    torch.manual_seed(1), random.seed(1)
    chosen = settings(folder, **{"train__group_size": 12, "train__replay": "always", **overrides})
    return trainer(chosen, net or Short(), reward=judged_at_a_whim, accelerator=accelerator)


def told(run):
    """All that a run has made of its numbers."""
    return lines(run), lines(run, "eval"), weights_of(run)


def short(with_gradient=1000, without=1000):
    net = Short()
    net.with_gradient, net.without = with_gradient, without
    return net


def few(algorithm):
    """Draws that a short schedule has."""
    return {"algorithm__likelihood__draws": 3} if algorithm in ("awm", "dgpo") else {}


def held(run):
    written = json.loads((run.folder / "batches.json").read_text())["held"]
    return [(each["step"], each.get("micro_batch"), each.get("rollout_batch"), each["why"]) for each in written]


def at(run, iteration, change):
    """Let something change when an iteration begins to roll out, in a run that goes on from wherever."""
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
    """The sizes and the numbers of a run of two processes, of which the second has less memory."""
    batch_probing.clock = counting()
    net = Short()
    if rank:
        net.with_gradient, net.without = with_gradient, without
    run = begun(folder, net, Accelerator(cpu=True), **AUTO, train__iterations=2)
    run.run()
    return run.config.train.micro_batch, run.config.train.rollout_batch, weights_of(run)


def of_two_disks(rank, folder):
    """The sizes that two processes go on with, of which only the first sees what the run has found."""
    run = begun(Path(folder, str(rank)), Short(), Accelerator(cpu=True), **AUTO, train__iterations=1)
    with run.report:
        run.batch_sizes.prepare()
    return run.config.train.micro_batch, run.config.train.rollout_batch


def beside_an_evaluator(rank, folder):
    """The sizes of a run of two processes that train and one that only evaluates; larger calls are always faster."""
    batch_probing.clock = counting()
    run = begun(folder, Short(), Accelerator(cpu=True), **AUTO, train__iterations=1, run__evaluators=1)
    run.run()
    return run.config.train.micro_batch, run.config.train.rollout_batch


def ranked(samples, prompts):
    """Places in a group by closeness, which compare all of its samples."""
    return closeness(samples, prompts).argsort().argsort().float()


def run_short(run, net):
    """Let memory run out in a process, once in each of three iterations, where it has already met the other process."""
    roots, finished, update_part, known = run._roots, run.finishing.finished, run._update_part, set()

    def first(iteration):
        new = run.done == iteration and iteration not in known
        known.update([iteration] if new else [])
        return new

    def roots_behind_a_draft(*arguments):
        found = roots(*arguments)
        if first(1):
            net.without = run.config.train.rollout_rows // 2
        return found

    def finished_behind_rewards_of_divided_groups(*arguments, **options):
        if first(2):
            raise torch.OutOfMemoryError(SAID)
        return finished(*arguments, **options)

    def update_part_behind_another(credited, part):
        if part == 1 and first(3):
            net.with_gradient = run.config.train.micro_batch // 2
        return update_part(credited, part)

    run._roots, run._update_part = roots_behind_a_draft, update_part_behind_another
    run.finishing.finished = finished_behind_rewards_of_divided_groups


def of_two_short_later(rank, folder, short, dying=None, resume=False):
    """The sizes, the told lines and the weights of a run of two processes, of which the second may come to have less memory.

    Its starts are drafted, and both have a part of each group, which a reward compares.

    Args:
        dying: an iteration in which both are killed.
    """
    batch_probing.clock = counting()
    net, rewards = Short(), [Reward("closeness", closeness), Reward("ranked", ranked, group_wise=True)]
    sizes = {"train__groups": 2, "train__iterations": 5, "train__draft": {"pool": 2, "call": {}}}
    sizes |= {"train__group_size": 24, "train__replay": "always", "algorithm__objective__kl__beta": 0.0}
    run = trainer(settings(folder, **AUTO, **sizes), net, rewards=rewards, accelerator=Accelerator(cpu=True))

    def killed():
        raise RuntimeError("killed")

    if short and rank:
        run_short(run, net)
    if dying is not None:
        at(run, dying, killed)
    if resume:
        run.resume()
    run.run()
    train = run.config.train
    return (train.micro_batch, train.rollout_batch), lines(run), weights_of(run)


def of_two_with_graphs(rank, folder, name):
    """The parts whose graphs a process keeps in the end, and the weights; the second one's memory may run out by them."""
    net = Short()
    options = {"train__replay": "auto", "train__iterations": 3, "run__name": name}
    run = begun(folder, net, Accelerator(cpu=True), **options)
    if name == "short" and rank:
        at(run, 1, lambda: setattr(net, "with_gradient", 0 if run.kept_graphs.parts else 1000))
    run.run()
    return tuple(run.kept_graphs.parts), weights_of(run)


def beside_a_generator(rank, folder):
    """How a run of a process that trains and a generator ends whose rollout runs out of memory."""
    net = Short()
    run = begun(folder, net, Accelerator(cpu=True), train__iterations=2, run__generators=1, run__staleness=1)
    at(run, 1, lambda: setattr(net, "without", 0))
    run.run()
