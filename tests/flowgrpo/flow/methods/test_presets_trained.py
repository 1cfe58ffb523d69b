"""Every method of the table, and every pruning of a branch tree: exact replays, independence of batching, exact resumes."""

import json
import math
from dataclasses import replace
from functools import cache

import field
import numpy as np
import pytest
import torch
from field import MANY_DRAWS, Network, credit, differing, lines, nearness, settings, step_in_place, weights_of

from flowgrpo.errors import InputError
from flowgrpo.flow.methods import sample_presets
from flowgrpo.flow.methods.presets import PRESETS
from flowgrpo.flow.rollouts import noise_calibration
from samplers.pruning import prune

FEW_DRAWS = {"likelihood": {"draws": 2}}  # of a schedule of six steps
SMALLER = {"dense_grpo": {"kernel": {"calibrate": {"rounds": 1}}}, **dict.fromkeys(MANY_DRAWS, FEW_DRAWS)}
RULES = ("parent_top1", "extremes", "depth")
METHODS = {
    **{name: {"preset": name, **SMALLER.get(name, {})} for name in PRESETS},
    **{rule: {"preset": "branch_grpo", "tree": {"prune": {"rule": rule}}} for rule in RULES},
    "summed": {"preset": "flow_grpo", "kernel": {"log_prob": "sum"}},  # in float64
    "prefix": {"preset": "branch_grpo", "objective": "prefix_ratio"},  # of paths that share their first steps
    "trajectory": {"preset": "branch_grpo", "objective": "trajectory_ratio"},
    "ddim_sde": {"preset": "stepwise_flow_grpo", "kernel": "ddim_sde"},
}
GATHERED = RULES[:2]  # they leave some edges of an evaluation, so that rows meet others in the update
# A micro-batch of more than a group, which leaves a rest of every tree, and of all that there is; of a part of a group.
SIZES, PART = (7, 64), 4
OF_A_PART = ("flow_grpo", "tempflow", "branch_grpo", "nft", "extremes")  # in a plain run
# A plain run leaves these out: others have their kind of tree, their kernel, their objective and what it is held by.
VARIANTS = (
    *("flow_grpo_window", "mc_grpo", "pref_grpo", "tempflow_fast", "branch_grpo_mix", "dense_grpo", "vgpo"),
    *("pepg", "sol_rl", "awm_fast", "rvm", "sft_best", "parent_top1"),
)
pytestmark = pytest.mark.usefixtures("noise_drawn_once")


class Killed(BaseException):
    """What no reward is forgiven."""


def judge(dies_at=math.inf):
    """A reward between 0 and 1; the process dies at one of its calls."""
    calls = []

    def judged(samples, prompts):
        calls.append(1)
        if len(calls) == dies_at:
            raise Killed
        return nearness(samples, prompts)

    return judged


def trainer(folder, algorithm, reward=None, every=1, **train):
    """A run of two groups of 12 in six steps, whose updates replay; every tree has a size that divides 12, and 6 or 4."""
    numbers = {"iterations": 2, "groups": 2, "group_size": 12, "micro_batch": 16, "learning_rate": 0.01, "draft": None}
    numbers["replay"] = "always"  # the graphs of a rollout would meet its log-probabilities whatever a replay made
    options = {f"train__{key}": value for key, value in {**numbers, **train}.items()}
    chosen = settings(folder, algorithm=algorithm, run__checkpoint__every=every, **options)
    return field.trainer(chosen, reward=reward or judge(), held_out=0)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run to its end, once for each method and micro-batch."""

    @cache
    def run(method, micro_batch):
        sizes = {"group_size": 4 if method == "awm_late" else 6, "micro_batch": micro_batch}
        done = trainer(tmp_path_factory.mktemp(method), METHODS[method], every=9, **sizes)
        done.run()
        return done

    return run


CASES = [pytest.param(method, SIZES, marks=pytest.mark.zoo if method in VARIANTS else ()) for method in METHODS] + [
    pytest.param(method, (PART,), marks=() if method in OF_A_PART else pytest.mark.zoo) for method in METHODS
]


@pytest.mark.parametrize(("method", "sizes"), CASES)
def test_the_update_meets_the_rollout_s_log_probabilities_and_learns_alike_in_any_micro_batch(finished, method, sizes):
    """Bit for bit where an evaluation is replayed as it ran, and to rounding where pruning gathers its rows anew."""
    whole, start = weights_of(finished(method, SIZES[-1])), Network().state_dict()
    assert all((tensor - whole[f"field.{name}"]).abs().max() > 1e-3 for name, tensor in start.items())
    for micro_batch in sizes:
        run = finished(method, micro_batch)
        assert len(lines(run)) == 2
        for line in lines(run):
            assert line["policy/grad_norm"] > 0
            drift = line["policy/max_abs_log_ratio"]
            if method in sample_presets.PRESETS:  # an old policy that follows slowly, or none, is not the rollout's
                assert drift is None
            else:
                assert drift <= (1e-6 if method in GATHERED else 0.0)
        for name, tensor in weights_of(run).items():
            torch.testing.assert_close(tensor, whole[name], rtol=0, atol=1e-5)


def begun(folder, method):
    """A run, its first rollout, and what is credited to that."""
    run = trainer(folder, METHODS[method], updates=1)
    rolled = run.rollout(0, run.groups(0))
    return run, rolled, credit(run, rolled)


def trained_nodes(tree):
    return {node for e in tree.evaluations for edges in e.trained for node in edges.nodes.tolist()}


def gradient(run, credited):
    """The gradient of one optimizer step that moves nothing."""
    step_in_place(run, credited)
    return torch.cat([p.grad.flatten() for p in run.weights.parameters])


def without(credited, tree, dropped):
    """The same edges in the evaluations of the rollout, where the dropped ones weigh nothing."""
    weight = credited.units.weight.clone()
    weight[credited.units.of_edge[sorted(dropped)]] = 0.0
    return replace(credited, tree=tree, units=replace(credited.units, weight=weight))


@pytest.mark.parametrize("preset", ["tempflow", "branch_grpo", "vgpo"])
def test_any_edges_can_leave_the_update_without_a_trace(tmp_path, preset):
    """Also some of the siblings that leave one state, with a divergence, weights of steps and of edges."""
    run, rolled, credited = begun(tmp_path, preset)
    dropped = sorted(trained_nodes(rolled.tree))[::3]
    keep = torch.ones(len(rolled.tree.nodes), dtype=torch.bool)
    keep[dropped] = False
    gathered = gradient(run, replace(credited, tree=prune(rolled.tree, keep, 16)))
    torch.testing.assert_close(gradient(run, without(credited, rolled.tree, dropped)), gathered, rtol=0, atol=1e-6)
    assert (gradient(run, credited) - gathered).abs().max() > 1e-3


@pytest.mark.parametrize("rule", GATHERED)
def test_a_pruned_edge_has_no_say_in_the_gradient(tmp_path, rule):
    run, rolled, credited = begun(tmp_path, rule)
    gathered = gradient(run, credited)
    kept = trained_nodes(credited.tree)
    dropped = trained_nodes(rolled.tree) - kept
    # 2 groups of 3 trees, split at steps 0 and 2: 2, 2, 4, 4, 4 trained edges, of which half of the last eight leave
    assert (len(kept), len(dropped)) == (6 * 12, 6 * 4)

    torch.testing.assert_close(gradient(run, without(credited, rolled.tree, dropped)), gathered, rtol=0, atol=1e-6)
    assert (gradient(run, replace(credited, tree=rolled.tree)) - gathered).abs().max() > 1e-3

    def disturb(nodes):
        for evaluation in rolled.tree.evaluations:
            for edges in evaluation.trained:
                hit = torch.isin(edges.nodes, torch.tensor(sorted(nodes)))
                edges.next_state[0][hit] += 1.0
                edges.log_prob[hit] -= 1.0

    disturb(dropped)
    assert torch.equal(gradient(run, credit(run, rolled)), gathered)
    disturb(list(kept)[:1])
    assert not torch.equal(gradient(run, credit(run, rolled)), gathered)


@pytest.mark.parametrize("rule", GATHERED)
def test_a_chain_whose_reward_was_lost_is_pruned_before_any_other(tmp_path, rule):
    """Half of the chains leave: of each last split one, and of the 12 of a group all but 3 at either end."""

    def only_second_children(samples, prompts):
        return nearness(samples, prompts) * torch.tensor([math.nan, 1.0]).repeat(len(prompts) // 2)

    run = trainer(tmp_path, METHODS[rule], only_second_children)
    rolled = run.rollout(0, run.groups(0))
    assert rolled.scores.lost.tolist() == [rolled.tree.nodes[leaf].path[-1] == 0 for leaf in rolled.tree.leaves]
    kept = [rolled.tree.nodes[node] for node in trained_nodes(credit(run, rolled).tree)]
    chains = [node.path for node in kept if node.step > 3]  # steps 3 and 4 lie below the last split, at step 2
    assert len(chains) == 2 * 24 / 2
    assert {path[-1] for path in chains} == {1}


def test_a_moving_reference_and_its_coefficient_resume_bit_for_bit(tmp_path):
    kl = {"beta": 0.1, "refresh": 3, "previous": 0.1, "target": 1e-7, "max_beta": 0.4}
    chosen = {"preset": "sage_grpo", "objective": {"clip_range": 0.2, "kl": kl}}
    whole = trainer(tmp_path / "a", chosen, iterations=4)
    whole.run()
    killed = trainer(tmp_path / "b", chosen, judge(dies_at=2 * 2 + 1), iterations=4)  # two calls an iteration
    with pytest.raises(Killed):
        killed.run()
    rest = trainer(tmp_path / "b", chosen, iterations=4)
    rest.resume()
    assert (rest.done, rest.beta) == (2, 0.4)  # the divergence was above 1.5 of the target twice: 0.1, 0.2, 0.4
    kept = weights_of(rest)  # four optimizer steps; the reference is of the third
    assert any((tensor - kept[f"reference.{name}"]).abs().max() > 1e-3 for name, tensor in rest.weights.named.items())
    rest.run()
    assert [line["policy/kl"] > 1.5e-7 for line in lines(whole)] == [True] * 4
    assert whole.beta == rest.beta == 0.4
    assert lines(whole) == lines(rest)
    assert not differing(whole, rest)


def test_the_coefficient_of_the_divergence_adapts_to_its_target(tmp_path):
    def after(target):
        kl = {"form": "exact", "beta": 0.1, "target": target, "max_beta": 0.3}
        run = trainer(tmp_path / str(target), {"preset": "flow_grpo", "objective": {"clip_range": 0.2, "kl": kl}})
        run.run()
        return run.beta

    assert after(1e-7) == 0.3  # doubled twice, and bounded
    assert after(1e3) == 0.1  # halved, and bounded


CALIBRATED = {"preset": "dense_grpo", "kernel": {"calibrate": {"rounds": 3, "step": 0.02, "difference": 8}}}


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """A run that calibrated, and its two iterations."""
    run = trainer(tmp_path_factory.mktemp("calibrated"), CALIBRATED)
    run.run()
    return run


def test_a_calibration_follows_its_counts_and_is_kept(calibrated):
    run = calibrated
    kept = json.loads((run.folder / "calibration.json").read_text())
    assert kept.keys() == {"levels", "rounds", "metrics"}
    assert kept["rounds"][0]["levels"] == [0.7] * 6
    sigmas, cap = run.policy.sigmas, run.policy.sigmas[1]
    noise = [math.sqrt(s / (1 - (s if s < 1 else cap))) for s in sigmas[:5]]  # flow_sde's g at level 1
    ups = 0
    for before, after in zip(kept["rounds"], [*kept["rounds"][1:], kept], strict=True):
        # 24 trajectories, whose gains are never exactly 0; the last step is ODE and has none
        assert [p + n for p, n in zip(before["positive"], before["negative"], strict=True)] == [24] * 5 + [0]
        for i in range(5):
            up = abs(before["positive"][i] - before["negative"][i]) < 8
            ups += up
            moved = (0.02 if up else -0.02) / noise[i]
            assert after["levels"][i] == pytest.approx(before["levels"][i] + moved, rel=1e-5)
        assert after["levels"][5] == 0.7
    assert 0 < ups < 3 * 5
    # along a trajectory 6 evaluations, and 5 + 4 + 3 + 2 + 1 more of its twigs; 5 twigs' ends and its own are decoded
    costs = {"cost/model_evaluations": 3 * 24 * 21, "cost/decoded": 3 * 24 * 6}
    assert lines(run, "calibration") == [{"step": 0, "phase": "calibration", **costs}]
    steps = run.rollout(0, run.groups(0)).tree.trained_steps
    assert [kernel.level for kernel, *_ in steps] == kept["levels"][:5]


def test_a_calibration_draws_noise_that_no_iteration_draws_again(tmp_path):
    seen = []

    def watching(samples, prompts):
        seen.append(samples)
        return nearness(samples, prompts)

    trainer(tmp_path, CALIBRATED, watching, iterations=1).run()
    samples = torch.cat(seen)  # of three rounds and an iteration; the twigs of the starts know no level
    assert len(samples) == 4 * 24 * 6
    assert len(samples.unique(dim=0)) == len(samples)


@pytest.mark.parametrize("written", ['{"levels": [0.7', "[]", '{"levels": ["a"], "metrics": {}}', '{"levels": [0.7]}'])
def test_a_calibration_that_was_cut_off_is_one_sentence(tmp_path, written):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "calibration.json").write_text(written)
    with pytest.raises(InputError, match="calibration.json"):
        noise_calibration.read(tmp_path / "r", begun=False)


@pytest.mark.parametrize(("dies_at", "left"), [(3, 10), (7, 4), (10, 2)])
def test_a_calibrated_run_that_was_killed_resumes_bit_for_bit(tmp_path, calibrated, dies_at, left):
    """While it calibrates, by 6 calls, it calibrates anew; later the calibration is kept, with its line."""
    place, metrics = tmp_path / "r" / "calibration.json", tmp_path / "r" / "metrics.jsonl"
    with pytest.raises(Killed):
        trainer(tmp_path, CALIBRATED, judge(dies_at)).run()
    assert place.exists() == (dies_at > 6)
    written, told = (file.read_text() if dies_at > 6 else "" for file in (place, metrics))
    rest = trainer(tmp_path, CALIBRATED, judge(left + 1))  # enough for what is left and no other rollout
    rest.resume()
    assert rest.done == (dies_at > 8)
    rest.run()
    assert written in ("", place.read_text())
    place.rename(tmp_path / "away")
    more = trainer(tmp_path, CALIBRATED, iterations=3)
    more.resume()
    with pytest.raises(InputError, match=r"calibration\.json is missing, which holds the noise levels"):
        more.run()
    (tmp_path / "away").rename(place)
    again = metrics.read_text().splitlines()
    assert told.splitlines()[:1] in ([], again[:1])
    assert [json.loads(line)["phase"] for line in again] == ["calibration", "train", "train"]
    assert rest.levels == calibrated.levels == json.loads(place.read_text())["levels"]
    assert lines(rest, "calibration") == lines(calibrated, "calibration")
    assert lines(rest) == lines(calibrated)
    assert not differing(calibrated, rest)


def test_a_reward_that_draws_is_the_same_beside_a_calibration_and_after_one(tmp_path):
    """A run that is killed before its first checkpoint finds its calibration when it goes on, and draws none for it."""
    seen = []

    def whim(samples, prompts):
        seen.append(np.random.rand())
        return nearness(samples, prompts)

    for _ in range(2):
        np.random.seed(3)
        run = trainer(tmp_path, CALIBRATED, whim, iterations=1)
        run.resume()
        run.run()
        (tmp_path / "r" / "checkpoints").rename(tmp_path / f"gone-{len(seen)}")
    beside, after = seen[:-2], seen[-2:]
    assert len(beside) == 2 * 3 + 2
    assert beside[-2:] == after


@pytest.mark.parametrize(("kernel", "highest"), [("cps", 1.0), ("ddim_sde", 1.0), ("dance_sde", 1.03)])
def test_a_calibration_raises_no_level_that_is_at_most_1_above_it(tmp_path, kernel, highest):
    always = {"rounds": 2, "step": 0.02, "difference": 1000}  # that no counts are apart
    chosen = {"preset": "stepwise_flow_grpo", "kernel": {"name": kernel, "level": 0.99, "calibrate": always}}
    run = trainer(tmp_path, chosen, iterations=1)
    run.run()
    assert run.levels == pytest.approx([highest] * 5 + [0.99], abs=1e-8)
    assert [line["policy/max_abs_log_ratio"] for line in lines(run)] == [0.0]
