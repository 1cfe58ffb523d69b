"""Runs whose model is a velocity field in the plane: the real trainer in milliseconds."""

import math

import torch
from opened import Opened

from flowgrpo import config
from flowgrpo.data import prompts
from flowgrpo.flow.pipeline.velocity_field import FieldPolicy
from flowgrpo.flow.trainer import flow_loop
from flowgrpo.flow.updates.update import update_part
from flowgrpo.training.weights.trained_weights import Weights
from rewards import Reward
from samplers.schedule import linear_sigmas

# Presets that draw more steps than a short schedule has, unless they are told to.
MANY_DRAWS = ("awm", "awm_fast", "awm_split", "awm_tree", "awm_late", "awm_brush", "dgpo", "sol_rl")
TARGET = torch.tensor([1.5, -1.0])
STD = 0.3
TEXTS = ("a", "bb", "ccc", "dddd", "eeeee")


class GaussianFlow(torch.nn.Module):
    """The exact velocity of N(mean, STD^2) in the plane, with the mean as the only parameter."""

    def __init__(self):
        super().__init__()
        self.mean = torch.nn.Parameter(torch.zeros(2))

    def forward(self, x, sigma, rows):
        sigma = sigma[:, None]
        variance = (1 - sigma) ** 2 * STD**2 + sigma**2
        centred = x - (1 - sigma) * self.mean
        return sigma / variance * centred - (self.mean + (1 - sigma) * STD**2 / variance * centred)


class Network(torch.nn.Module):
    """A small network over state, time and the prompt's length."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.layers = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))

    def forward(self, x, sigma, rows):
        length = torch.tensor([[len(row.prompt) / 10] for row in rows])
        return self.layers(torch.cat([x, sigma[:, None], length], dim=1)) + x


def closeness(samples, prompts):
    return -((samples - TARGET) ** 2).sum(1)


def nearness(samples, prompts):
    """Return closeness between 0 and 1, for VGPO, which weighs by values that are not negative."""
    return torch.exp(closeness(samples, prompts) / 4)


def settings(folder, **overrides):
    """Configure a small run in a folder; `__` in the name of an override is a dot."""
    train = {"iterations": 6, "groups": 4, "group_size": 8, "micro_batch": 16, "learning_rate": 0.05, "draft": None}
    written = {
        "model": {"path": "field", "lora": None},
        "algorithm": {"preset": "flow_grpo"},
        "train": train,
        "eval": {"every": 2, "prompts": 2, "save": 0},
        "run": {"name": "r", "dir": str(folder), "checkpoint": {"every": 1, "keep": 10}},
    }
    for key, value in overrides.items():
        config._set(written, key.replace("__", "."), value)
    return config.validate(written)


def trainer(
    chosen,
    field=None,
    reward=closeness,
    texts=TEXTS,
    held_out=2,
    steps=6,
    teacher=lambda weight: weight + 0.1,
    **options,
):
    """Build a run of a configuration; the first prompts are evaluated too. `teacher` maps each weight to the teacher's."""
    policy = FieldPolicy(field or Network(), (2,), linear_sigmas(steps, 3.0))
    algorithm = chosen.algorithm
    kl = algorithm.objective.kl
    weights = Weights(
        policy.modules, None, ema=chosen.train.ema, reference=algorithm.reference, refresh=kl.refresh,
        old=algorithm.old, bank=algorithm.bank,
    )  # fmt: skip
    if algorithm.reference == "teacher":
        weights.put_reference({name: teacher(p) for name, p in weights.named.items()})
    rows = [prompts.Prompt(text) for text in texts]
    chosen.run.folder.mkdir(parents=True, exist_ok=True)
    options = {"rewards": [Reward("closeness", reward)], "eval_prompts": rows[:held_out], **options}
    return Opened(flow_loop(chosen, policy, weights, train_prompts=rows, **options))


def lines(run, phase="train"):
    """Return the run's metrics without times and memory."""
    told = [line for line in run.report.lines if line["phase"] == phase]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))} for line in told]


def credit(run, batch):
    """Return the edges of a batch that the update replays, with their credits."""
    return run.credit_edges(batch, run.compare(batch))


def step_in_place(run, credited, part=0):
    """Measure a part by an optimizer step that moves nothing; the gradients stay on the parameters."""
    return step_of_part(run, credited, part, torch.optim.SGD(run.weights.parameters, lr=0.0))


def step_of_part(run, credited, part, optimizer):
    return update_part(
        run.policy, credited, part, weights=run.weights, optimizer=optimizer, scaler=run.scaler,
        objective=run.config.algorithm.objective, max_grad_norm=math.inf,
        sum_shards=run.collectives.sum_shards, sum_processes=run.collectives.sum, moved=run.config.moved(part),
    )  # fmt: skip


def weights_of(run):
    return {name: tensor.clone() for name, tensor in run.weights.tensors().items()}


def differing(run, other):
    """Return the names of a run's weights that another run does not have to the bit."""
    others = weights_of(other)
    return [name for name, tensor in weights_of(run).items() if not torch.equal(tensor, others[name])]


def resumed(run, done=None):
    """Resume a run, after `done` iterations if that is given, and run it to its end."""
    run.resume()
    if done is not None:
        assert run.done == done
    run.run()
    return run
