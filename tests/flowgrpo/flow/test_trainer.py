"""What a run of a flow model learns, and what it asks for."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from field import (
    MANY_DRAWS,
    TARGET,
    GaussianFlow,
    Network,
    credit,
    lines,
    nearness,
    settings,
    step_in_place,
    trainer,
    weights_of,
)

from flowgrpo.flow.methods.presets import PRESETS
from rewards import Reward

# What they sample is the start's, or they are drawn to where the start is tilted to, a step away from it, or to a teacher.
OF_THE_START = ("rwr", "sft_best", "dpo", "seppo", "gdro", "ram", "opd")
LOOSE = {"crd": {"beta": 0.05}, "dgpo": {"beta": 0.5}}  # or their log ratios are soon as far as they are to go
SLOW = ("pepg", "nft", "sol_rl")  # which need twice as many iterations as the others do with little momentum
pytestmark = pytest.mark.usefixtures("noise_drawn_once")
FAST = {"train__iterations": 15, "train__optimizer": {"betas": [0.5, 0.9]}}
# In a plain run: each kind of credit and old policy, and what has no closed form to be held against in the oracle.
PLAIN = ("flow_grpo", "mix_grpo", "mc_grpo", "adaptive", "branch_grpo", "vgpo", "epg", "nft", "crd", "dgpo")


@pytest.mark.parametrize(
    "preset",
    [
        pytest.param(preset, marks=() if preset in PLAIN else pytest.mark.zoo)
        for preset in PRESETS
        if preset not in OF_THE_START
    ],
)
def test_a_flow_in_the_plane_learns_its_known_optimum(tmp_path, preset):
    """The expected reward -|x - target|^2 of N(mean, STD^2) is largest where mean = target."""
    held = PRESETS[preset]["objective"].get("kl", {})
    objective = {"kl": {} if held.keys() & {"target", "previous"} else {"beta": 0.0}}
    if "clip_range" in PRESETS[preset]["objective"]:
        objective["clip_range"] = 0.2
    objective |= LOOSE.get(preset, {})
    few = {"likelihood": {"draws": 3}} if preset in MANY_DRAWS else {}
    chosen = settings(
        tmp_path,
        algorithm={"preset": preset, "objective": objective, **few},
        train__groups=2,
        train__group_size=12,
        train__learning_rate=0.1,
        eval__every=30,
        run__checkpoint__every=30,
        **({"train__iterations": 30} if preset in SLOW else FAST),
    )
    run = trainer(chosen, GaussianFlow())
    if preset == "vgpo":
        run.rewards, run.eval_rewards = [Reward("nearness", nearness)], run.rewards
    run.run()
    learnt = run.policy.modules["field"].mean.detach()
    assert (learnt - TARGET).norm() < 0.25
    assert lines(run, "eval")[0]["reward/closeness/mean"] < -2
    assert lines(run, "eval")[-1]["reward/closeness/mean"] > -0.4
    assert all(line["policy/max_abs_log_ratio"] in (0, None) for line in lines(run))


def test_seppo_learns_the_known_optimum_as_its_snapshots_follow(tmp_path):
    chosen = settings(
        tmp_path,
        algorithm={"preset": "seppo", "objective": {"beta": 2.0}, "likelihood": {"bank": {"every": 4, "keep": 3}}},
        **(FAST | {"train__iterations": 32}),
        train__groups=2,
        train__group_size=12,
        train__learning_rate=0.1,
        run__checkpoint__every=50,
    )
    run = trainer(chosen, GaussianFlow(), held_out=0)
    run.run()
    assert (run.policy.modules["field"].mean.detach() - TARGET).norm() < 0.25


def test_a_pull_to_the_reference_holds_the_policy_back(tmp_path):
    def distance(beta):
        kl = {"form": "velocity", "beta": beta}
        objective = {"name": "clip", "clip_range": 0.2, "kl": kl}
        chosen = settings(
            tmp_path / str(beta),
            algorithm={"preset": "flow_grpo", "objective": objective},
            train__iterations=5,
            run__checkpoint__every=5,
        )
        run = trainer(chosen, GaussianFlow(), held_out=0)
        run.run()
        measured = [line["policy/kl"] for line in lines(run)]
        return run.policy.modules["field"].mean.norm().item(), measured

    free, none = distance(0.0)
    held, measured = distance(3.0)
    assert held < 0.7 * free
    assert none == [None] * 5
    assert measured[0] >= 0
    assert measured[-1] > 0


def test_the_drift_metric_sees_a_wrong_state(tmp_path, monkeypatch):
    from flowgrpo.flow import trainer as module

    honest = module.rollout

    def shifted(*arguments, **options):
        tree, scores = honest(*arguments, **options)
        tree.evaluations[0].trained[0].next_state[0][0] += 1e-3
        return tree, scores

    monkeypatch.setattr(module, "rollout", shifted)
    run = trainer(settings(tmp_path, train__iterations=1))
    run.run()
    assert lines(run)[0]["policy/max_abs_log_ratio"] > 1e-4


def test_gradients_do_not_depend_on_the_micro_batch(tmp_path):
    def after(micro_batch):
        run = trainer(
            settings(tmp_path / str(micro_batch), train__iterations=2, train__micro_batch=micro_batch), held_out=0
        )
        run.run()
        return weights_of(run), [line["policy/max_abs_log_ratio"] for line in lines(run)]

    (reference, drift), (tensors, own_drift) = after(32), after(7)
    assert drift == own_drift == [0, 0]
    for name, tensor in reference.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("rollout", "update"), [(7, 3), (3, 7), pytest.param(5, 5, marks=pytest.mark.zoo)])
def test_a_rollout_has_batches_of_its_own(tmp_path, rollout, update):
    """Of 8 rows of a part: calls without a gradient have rollout_batch rows, those with one micro_batch."""
    sizes = {True: [], False: []}

    class Watched(Network):
        def forward(self, x, sigma, rows):
            sizes[torch.is_grad_enabled()].append(len(x))
            return super().forward(x, sigma, rows)

    def run(folder, **batches):
        more = {"train__updates": 4, "train__replay": "always", "algorithm__objective__kl__beta": 0.0}
        chosen = settings(tmp_path / folder, **batches, **more, train__iterations=1)
        done = trainer(chosen, Watched(), held_out=0)
        done.run()
        return done

    reference, _ = run("reference", train__micro_batch=32), [own.clear() for own in sizes.values()]
    done = run("own", train__micro_batch=update, train__rollout_batch=rollout)
    full = {3: [3, 3, 2], 5: [5, 3], 7: [7, 1]}  # of 8
    for grad, size in ((False, rollout), (True, update)):
        calls = 4 * (5 if grad else 6)  # parts, steps
        assert Counter(sizes[grad]) == Counter(full[size] * calls)
    bound = 0.0 if rollout == update else 1e-6
    assert all(line["policy/max_abs_log_ratio"] <= bound for line in lines(done))
    for name, tensor in weights_of(reference).items():
        torch.testing.assert_close(weights_of(done)[name], tensor, rtol=1e-3, atol=1e-5)


def test_updates_split_the_groups_and_each_takes_one_step(tmp_path):
    run = trainer(settings(tmp_path, train__iterations=3, train__updates=4))
    run.run()
    assert run.weights.updates == 12
    line = lines(run)[0]
    # 4 groups x 8 samples, 6 steps of which the first 5 are trained; flow_grpo's KL adds a reference forward each, and the
    # first of the 4 parts goes backward through the rollout's own graphs
    assert line["cost/rollout_evaluations"] == 32 * 6
    assert line["cost/trained_edges"] == 32 * 5
    assert line["cost/update_evaluations"] == 2 * 32 * 5 - 8 * 5
    assert line["cost/model_evaluations"] == 32 * 6 + 2 * 32 * 5 - 8 * 5
    assert line["cost/decoded"] == 32


def test_a_revisited_prompt_gets_fresh_noise(tmp_path):
    run = trainer(settings(tmp_path, train__iterations=1), texts=("a",))
    first = {root.row.seed for root in run._roots(0, run.groups(0), run._starts(0, run.groups(0)).starts)}
    second = {root.row.seed for root in run._roots(1, run.groups(1), run._starts(1, run.groups(1)).starts)}
    assert len(first) == len(second) == 32
    assert not first & second


def test_a_shared_start_is_one_noise_per_group(tmp_path):
    run = trainer(settings(tmp_path, algorithm={"preset": "dance_grpo"}))
    seeds = {}
    for root in run._roots(0, run.groups(0), run._starts(0, run.groups(0)).starts):
        seeds.setdefault(root.group, set()).add(root.row.seed)
    assert [len(own) for own in seeds.values()] == [1] * 4
    assert len(set.union(*seeds.values())) == 4


def test_group_wise_rewards_meet_one_group_at_a_time(tmp_path):
    met = []

    def ranked(samples, prompts):
        met.append(tuple(prompts))
        return [float(i) for i in range(len(prompts))]

    ranked.group_wise = True
    chosen = settings(tmp_path, train__iterations=1, eval__every=1)
    run = trainer(chosen, reward=ranked)
    run.rewards = [Reward("ranked", ranked, group_wise=True)]
    run.run()
    assert [len(call) for call in met] == [1, 1] + [8] * 4 + [1, 1]  # held-out, one sample a prompt; groups; held-out
    assert all(len(set(call)) == 1 for call in met)


def gradients(run, weights):
    """Of each part of the first iteration, where its groups weigh so much."""
    groups = replace(run.groups(0), weights=torch.tensor(weights, dtype=torch.float64))
    credited = credit(run, run.rollout(0, groups))
    found = []
    for part in range(run.config.train.updates):
        step_in_place(run, credited, part)
        found.append(torch.cat([p.grad.flatten() for p in run.weights.parameters]))
    return found


def test_the_weight_of_a_group_scales_its_part_of_the_loss(tmp_path):
    """With one group in each part the gradients are w_g g_g; with both in one part (w_0 g_0 + w_1 g_1) / 2."""
    apart, together = (
        trainer(settings(tmp_path / str(updates), train__groups=2, train__updates=updates)) for updates in (2, 1)
    )
    first, second = gradients(apart, [1.0, 1.0])
    weighted = gradients(apart, [0.5, 1.5])
    torch.testing.assert_close(weighted[0], 0.5 * first)
    torch.testing.assert_close(weighted[1], 1.5 * second)
    torch.testing.assert_close(gradients(together, [0.5, 1.5])[0], (0.5 * first + 1.5 * second) / 2)


def test_equal_rewards_move_nothing_without_a_pull(tmp_path):
    once = {"train__iterations": 1, "run__patience": None}
    chosen = settings(tmp_path, algorithm={"preset": "mix_grpo"}, train__optimizer={"weight_decay": 0.0}, **once)
    run = trainer(chosen, reward=lambda samples, prompts: [0.1] * len(prompts))
    before = weights_of(run)
    run.run()
    assert lines(run)[0]["groups/zero_std_fraction"] == 1.0
    assert lines(run)[0]["policy/grad_norm"] == 0.0
    assert all(torch.equal(before[name], t) for name, t in weights_of(run).items())
