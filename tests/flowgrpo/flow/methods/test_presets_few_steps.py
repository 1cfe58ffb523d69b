"""Models of 2 to 8 steps: what fits of each method, as the page says, and the method that is made for them."""

import re
from pathlib import Path

import pytest
import torch
import yaml
from field import TARGET, GaussianFlow, credit, lines, nearness, settings, step_in_place, trainer

from flowgrpo.errors import InputError
from flowgrpo.flow.methods.presets import PRESETS
from flowgrpo.flow.planning.plan import predict_cost
from flowgrpo.schema.imports.heavy import Tensor

PAGE = (Path(__file__).parents[4] / "docs/guides/few_steps.md").read_text()
HEAD = "| preset | 2 steps | 3 steps | 4 steps | 8 steps |"
NUMBERS = [int(word) for word in re.findall(r"(\d) steps", HEAD)]


def asked():
    """What the page asks to set of a preset at a number of steps, where the preset does not fit as it stands."""
    body = PAGE.split(HEAD)[1].split("\n\n")[0].splitlines()[2:]
    for line in body:
        names, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        for steps, cell in zip(NUMBERS, cells, strict=True):
            for name in re.findall(r"`(\w+)`", names):
                if cell != "as it is":
                    yield (name, steps), yaml.safe_load(cell.strip("`"))


ASKED = dict(asked())


def chosen(folder, preset, written, **options):
    algorithm = {"preset": preset, **written}
    if preset == "dense_grpo":
        algorithm["kernel"] = {"calibrate": {"rounds": 1}}
    return settings(folder, algorithm=algorithm, train__groups=2, train__group_size=24, **options)


@pytest.mark.parametrize("preset", PRESETS)
def test_what_the_page_says_fits_few_steps_fits_and_nothing_else_does(tmp_path, preset):
    for steps in NUMBERS:
        written = ASKED.get((preset, steps))
        if written is not None:
            with pytest.raises(InputError, match=r"algorithm\..*(, take |; set algorithm\.)"):
                predict_cost(chosen(tmp_path, preset, {}), steps)
        assert predict_cost(chosen(tmp_path, preset, written or {}), steps).trained_edges > 0


TRAINED = ("rvm", "awm_late", "tempflow_fast", "flow_dppo")  # in a plain run: each kind of cell


@pytest.mark.parametrize(
    "preset", [pytest.param(name, marks=() if name in TRAINED else pytest.mark.zoo) for name in PRESETS]
)
def test_a_method_trains_at_few_steps(tmp_path, preset):
    for steps in NUMBERS:
        written = ASKED.get((preset, steps), {})
        config = chosen(tmp_path / str(steps), preset, written, train__iterations=1)
        run = trainer(config, reward=nearness, held_out=0, steps=steps)
        run.run()
        (line,) = lines(run)
        assert line["policy/grad_norm"] > 0
        assert line["policy/max_abs_log_ratio"] in (0, None)


@pytest.mark.parametrize(
    ("preset", "written"), [("rvm", {}), ("rvm", {"likelihood": {"times": "schedule"}}), ("tempflow", {})]
)
def test_a_flow_of_four_steps_learns_its_known_optimum(tmp_path, preset, written):
    """The reward -|x - target|^2 of a Gaussian is largest where its mean is the target, by ODE in the same four steps."""
    config = settings(
        tmp_path,
        algorithm={"preset": preset, "objective": {"kl": {"beta": 0.0}}, **written},
        train__iterations=20,
        train__groups=4,
        train__group_size=12,
        train__learning_rate=0.1,
        train__optimizer={"betas": [0.5, 0.9]},
        eval__every=20,
        run__checkpoint__every=20,
    )
    run = trainer(config, GaussianFlow(), steps=4)
    run.run()
    before, after = (line["reward/closeness/mean"] for line in lines(run, "eval"))
    assert before < -2
    assert after > -0.4
    assert (run.policy.modules["field"].mean.detach() - TARGET).norm() < 0.3


def surrogate(v: Tensor, target: Tensor, coefficient: Tensor) -> Tensor:
    """The source's loss of one sample: half the squared distance from where its signed gradient leads."""
    aim = (v - coefficient * (v - target)).detach()
    return 0.5 * (v - aim).square().mean()


def test_rvm_has_twice_the_gradient_of_its_source(tmp_path):
    """Advantages by the rewards of all groups, one noise level a sample, a signed regression to noise - x0."""
    run = trainer(settings(tmp_path, algorithm={"preset": "rvm"}, train__updates=1), reward=nearness, steps=4)
    batch = run.rollout(0, run.groups(0))
    credited = credit(run, batch)
    step_in_place(run, credited)
    found = torch.cat([p.grad.flatten() for p in run.weights.parameters])
    noised, tree, field = credited.noised, batch.tree, run.policy.modules["field"]
    rewards = batch.scores.values[:, 0]
    groups = torch.tensor([tree.nodes[leaf].root.group for leaf in tree.leaves])
    means = torch.stack([rewards[groups == group].mean() for group in groups])
    advantage = 0.1 * ((rewards - means) / (rewards.std(correction=0) + 1e-4)).clamp(-5, 5)
    total, seen = torch.zeros(()), []
    for call in noised.calls:
        (state,), target = noised.noised(call)
        v = field(state, torch.tensor([draw.sigma for draw in call.draws]), noised.rows(call))
        for row, draw in enumerate(call.draws):
            seen.append(draw.leaf)
            total = total + surrogate(v[row], target[row], advantage[draw.leaf].float()) / len(rewards)
    assert sorted(seen) == list(range(len(rewards)))
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(total, list(run.weights.parameters))])
    torch.testing.assert_close(found, 2 * gradient, rtol=1e-4, atol=1e-7)
    assert found.norm() > 1e-3
