"""What a run will cost, counted by hand and by the run itself; and the tree as `flowgrpo plan` draws it."""

import json
import re
from dataclasses import replace
from itertools import pairwise

import pytest
import yaml
from cases import cases
from field import MANY_DRAWS, nearness, trainer
from hypothesis import given, settings
from hypothesis import strategies as st

from flowgrpo import config
from flowgrpo.errors import InputError
from flowgrpo.flow.methods.presets import PRESETS
from flowgrpo.flow.planning.iteration_forecast import predict_cost
from flowgrpo.flow.planning.plan import picture, sigma_table, uneven
from flowgrpo.flow.planning.tree_diagram import draw_tree, legend
from samplers.kernels import Kernel
from samplers.trees import TRUNK, Move


def chosen(algorithm, folder="runs", **train):
    """One group, one optimizer step and one iteration, unless `train` says otherwise."""
    numbers = {"iterations": 1, "groups": 1, "updates": 1, "micro_batch": 7, "draft": None}
    model, run = {"path": "field", "lora": None}, {"name": "r", "dir": str(folder)}
    return config.validate({"model": model, "algorithm": algorithm, "train": {**numbers, **train}, "run": run})


# preset, options of its tree, group size, steps; and of one group: rollout, update, decoded, trained edges
LEDGER = [
    # 24 chains of 10 steps, the last of which is ODE; the update evaluates policy and reference
    ("flow_grpo", {}, 24, 10, (240, 2 * 216, 24, 216)),
    ("mix_grpo", {}, 24, 10, (240, 24 * 4, 24, 24 * 4)),
    ("flow_grpo_fast", {}, 24, 10, (240, 24 * 3, 24, 24 * 3)),
    ("flow_grpo_window", {}, 24, 10, (240, 24 * 3, 24, 24 * 3)),
    ("dance_grpo", {}, 24, 10, (240, 24 * 4, 24, 24 * 4)),  # int(0.6 * 8) of the stochastic steps
    ("dance_grpo", {"steps": None}, 24, 10, (240, 24 * 5, 24, 24 * 5)),
    ("dance_grpo", {"steps": [1, 4], "train_fraction": 1.0}, 24, 10, (240, 24 * 3, 24, 24 * 3)),
    *((name, {}, 24, 10, (240, 216, 24, 216)) for name in ("grpo_guard", "ctpo")),
    ("flow_dppo", {}, 24, 10, (240, 24 * 3, 24, 24 * 3)),
    ("opd", {}, 24, 10, (240, 2 * 24 * 3, 24, 24 * 3)),
    ("sage_grpo", {}, 24, 10, (240, 2 * 240, 24, 240)),
    # 4 trunks of 9 or 10 states, and 6 children of each that walk on alone: 6 x (9 + 8 + ... + 0)
    ("tempflow", {}, 24, 10, (4 * (9 + 6 * 45), 2 * 4 * 9, 4 * 6 * 9, 4 * 6 * 9)),
    ("tempflow", {"last_step": "sde"}, 24, 10, (4 * (10 + 6 * 45), 2 * 4 * 10, 4 * 6 * 10, 4 * 6 * 10)),
    ("tempflow", {"profile": [6, 6, 6, 6]}, 24, 10, (4 * (4 + 6 * (9 + 8 + 7 + 6)), 2 * 4 * 4, 96, 96)),
    # with at most 5 ODE steps to finish a branch: 5 for those of steps 0 to 4, then 4, 3, 2, 1
    ("tempflow", {"finish": 5}, 24, 10, (4 * (9 + 6 * (5 * 5 + 4 + 3 + 2 + 1)), 2 * 4 * 9, 4 * 6 * 9, 4 * 6 * 9)),
    # 3 states that branch, and branches of 4 ODE steps
    ("tempflow_fast", {}, 24, 10, (4 * (3 + 3 * 6 * 4), 2 * 4 * 3, 4 * 6 * 3, 4 * 6 * 3)),
    ("adaptive", {}, 24, 10, (4 * (9 + 6 * 45), 2 * 4 * 9, 4 * 6 * 9, 4 * 6 * 9)),
    # a tree that doubles after steps 0, 3, 6, 9: states 1, 2 x 3, 4 x 3, 8 x 3, 16 x 10; the last edges are ODE
    ("branch_grpo", {}, 16, 20, (203, 203 - 16, 16, 218 - 16)),
    ("branch_grpo", {"splits": [0, 4, 8, 12]}, 16, 20, (169, 169 - 16, 16, 184 - 16)),
    ("branch_grpo", {"splits": [0, 5, 10, 15]}, 16, 20, (135, 135 - 16, 16, 150 - 16)),
    # of 16 chains of 9 trained edges half stay; or a window of 4 steps leaves
    ("branch_grpo", {"prune": {"rule": "parent_top1"}}, 16, 20, (203, 187 - 72, 16, 202 - 72)),
    ("branch_grpo", {"prune": {"rule": "extremes"}}, 16, 20, (203, 187 - 72, 16, 202 - 72)),
    ("branch_grpo", {"prune": {"rule": "depth"}}, 16, 20, (203, 187 - 64, 16, 202 - 64)),
    # stochastic at 0, 1, 2, 3, and at the splits 6 and 9 beyond the window
    ("branch_grpo_mix", {}, 16, 20, (203, 1 + 2 + 2 + 2 + 4 + 8, 16, 2 + 2 + 2 + 4 + 8 + 16)),
    # a chain, and from each of its states the rest by ODE: 10 + 9 + ... + 1, whose first evaluation is shared
    ("dense_grpo", {}, 24, 10, (24 * 55, 2 * 216, 24 * 10, 216)),
    ("dense_grpo", {"last_step": "sde"}, 24, 10, (24 * 55, 2 * 240, 24 * 11, 240)),
    # twigs of 5 evaluations: 4 more at the states 0 to 5, then 3, 2, 1
    ("stepwise_flow_grpo", {}, 24, 10, (24 * (10 + 6 * 4 + 3 + 2 + 1), 216, 24 * 10, 216)),
    # jumps cost nothing
    ("vgpo", {}, 24, 10, (240, 2 * 216, 24 * 9, 216)),
    ("vgpo", {"last_step": "sde"}, 24, 10, (240, 2 * 240, 24 * 10, 240)),
    ("pref_grpo", {}, 24, 10, (240, 24 * 5, 24, 24 * 5)),  # 0.6 of nine steps
    ("mc_grpo", {}, 9, 10, (90, 8 * 3, 9, 8 * 3)),  # without the pivot
    # 24 samples at 9 of the 10 steps; the update evaluates policy, old policy and reference
    *((name, {}, 24, 10, (240, 3 * 216, 24, 216)) for name in ("epg", "pepg", "elbo_grpo", "nft", "ram")),
    *((name, {}, 24, 10, (240, 3 * 24 * 6, 24, 24 * 6)) for name in ("sol_rl", "awm")),
    ("awm_fast", {}, 24, 10, (240, 24 * 6, 24, 24 * 6)),
    ("awm_split", {}, 24, 10, (12 * (3 + 2 * 7), 24 * 6, 24, 24 * 6)),
    ("awm_late", {}, 24, 10, (6 * (3 + 4 * 7), 24 * 6, 24, 24 * 6)),
    # of 12 starts: a trunk of three steps and its last branching, and the rest of branches from 1, 2 and 3
    ("awm_brush", {}, 24, 10, (12 * (4 + 2 * (8 + 7 + 6)), 72 * 6, 72, 72 * 6)),
    ("awm_tree", {}, 16, 20, (203, 16 * 6, 16, 16 * 6)),
    ("rvm", {}, 24, 10, (240, 24, 24, 24)),  # one noise level, and no other policy
    ("crd", {}, 24, 10, (240, 4 * 216, 24, 216)),  # policy and old policy before, for the means
    ("rwr", {}, 24, 10, (240, 216, 24, 216)),
    ("sft_best", {}, 24, 10, (240, 9, 24, 9)),  # one sample
    # two samples; policy and reference before, for the coefficients
    ("dpo", {}, 24, 10, (240, 3 * 2 * 9, 24, 2 * 9)),
    ("seppo", {}, 24, 10, (240, 3 * 2 * 4, 24, 2 * 4)),  # and the snapshot for the reference
    # and old policy and reference, for the clip and the divergence
    ("dgpo", {}, 24, 10, (240, 5 * 24 * 4, 24, 24 * 4)),
    ("gdro", {}, 24, 10, (240, 3 * 24 * 4, 24, 24 * 4)),
]


@pytest.mark.parametrize(("preset", "tree", "group_size", "steps", "counted"), LEDGER)
def test_the_cost_of_a_group_is_the_ledger_s(preset, tree, group_size, steps, counted):
    cost = predict_cost(chosen({"preset": preset, "tree": tree}, group_size=group_size), steps)
    assert (cost.rollout, cost.update, cost.decoded, cost.trained_edges) == counted


# They cost what others do by the same calls of an update, or have axes that are drawn below; a plain run leaves them out.
WINDOWS = {"flow_grpo_window", "flow_grpo_fast", "mix_grpo", "branch_grpo_mix"}
ALIKE = {*WINDOWS, "tempflow_fast", "stepwise_flow_grpo", "pref_grpo", "grpo_guard", "ctpo"}
ALIKE |= {"epg", "pepg", "elbo_grpo", "ram", "sol_rl"}  # as nft


def test_the_ledger_holds_every_preset():
    assert {preset for preset, *_ in LEDGER} == set(PRESETS)


def counted(settings, steps):
    """What one iteration counts of itself."""
    run = trainer(settings, reward=nearness, held_out=0, steps=steps)
    run.run()
    return {line["phase"]: line for line in run.report.lines}


def assert_foreseen(settings, steps):
    """The run of `settings` costs what was predicted."""
    cost, line = predict_cost(settings, steps), counted(settings, steps)["train"]
    assert line["cost/rollout_evaluations"] == cost.rollout
    assert line["cost/update_evaluations"] == cost.update - cost.graphs
    assert line["cost/backward_evaluations"] == cost.with_gradient
    assert line["cost/trained_edges"] == cost.trained_edges
    assert line["cost/decoded"] == cost.decoded


@pytest.mark.parametrize("preset", cases(PRESETS, {*PRESETS} - ALIKE))
def test_a_run_of_every_preset_counts_what_was_predicted(tmp_path, preset):
    few = {"likelihood": {"draws": 2}} if preset in MANY_DRAWS else {}
    few |= {"kernel": {"calibrate": {"rounds": 1}}} if preset == "dense_grpo" else {}
    assert_foreseen(chosen({"preset": preset, **few}, tmp_path, groups=2, updates=2, group_size=12), 6)


@st.composite
def axes(draw):
    """Axes that fit each other, the size of a group that fits the tree, and a number of steps."""
    one = st.sampled_from
    steps = draw(st.integers(4, 7))
    tree = {"name": draw(one(["chain", "window", "brush", "branch", "branch_window", "twigs"]))}
    credit, size = {"name": "terminal"}, draw(st.integers(2, 5))
    match tree["name"]:
        case "chain":
            tree |= {"train_fraction": draw(one([1.0, 0.6, 0.3]))}
        case "window":
            tree |= {"size": draw(st.integers(1, steps - 1)), "move": draw(one(["random", "sliding"]))}
        case "brush":
            within = draw(one(["seed", "prompt"]))
            least = 2 if within == "seed" else 1  # or every edge is compared with itself alone
            profile = st.lists(st.integers(0, 3), min_size=1, max_size=steps - 1).filter(lambda p: max(p) >= least)
            tree |= {"branches": draw(st.integers(2, 3)), "profile": draw(st.none() | profile)}
            tree |= {"finish": draw(one([None, 1, 2]))}
            credit, size = {"name": "siblings", "within": within}, 2 * tree["branches"]
        case "branch" | "branch_window":
            rule = draw(one([None, "parent_top1", "extremes", "depth"]))
            last = steps - 3 if rule else steps - 2  # a stochastic step follows, or there is nothing to prune
            splits = draw(st.lists(st.integers(0, last), min_size=1, max_size=2, unique=True))
            tree |= {"splits": splits, "factor": draw(st.integers(2, 3)), "prune": rule and {"rule": rule, "size": 2}}
            tree |= {"siblings": draw(one(["correlated", "hot", "own"]))}
            credit, size = (
                {"name": "depthwise", "weights": draw(one(["uniform", "path"]))},
                tree["factor"] ** len(splits),
            )
            size *= draw(st.integers(1, 2))
        case "twigs":
            tree |= {"length": draw(one([None, 1, 2, 3]))}
            credit = {"name": draw(one(["step_gain", "discounted_value"]))}
            tree |= {"root": credit["name"] == "step_gain" or draw(st.booleans())}
    kernel = draw(one(["flow_sde", "dance_sde", "cps", "ddim_sde", "manifold"]))
    tree |= {"start": draw(one(["independent", "shared"]))}
    tree |= {"last_step": "ode" if kernel in ("cps", "ddim_sde") else draw(one(["ode", "sde"]))}
    thinned = (tree.get("prune") or {}).get("rule") == "depth"  # paths without some of their steps
    names = ["clip", "normalised_ratio", "soft_gate", *([] if thinned else ["prefix_ratio", "trajectory_ratio"])]
    objective = {"name": draw(one(names)), "kl": {"beta": draw(one([0.0, 0.1]))}}
    objective |= {"step_weights": draw(one(["none", "noise_aware", "equalised"]))}
    baseline = draw(one(["group_mean", "leave_one_out"]))
    kernel = {"name": kernel, "log_prob": "mean"}  # what some of the words below need
    words = {"tree": tree, "kernel": kernel, "credit": credit, "baseline": baseline, "objective": objective}
    return words, size, steps


@settings(max_examples=40, deadline=None, derandomize=True)
@given(axes(), st.integers(1, 2))
def test_any_axes_that_fit_cost_what_was_predicted(tmp_path_factory, drawn, updates):
    algorithm, size, steps = drawn
    folder = tmp_path_factory.mktemp("run")
    assert_foreseen(chosen(algorithm, folder, groups=2, updates=updates, group_size=size), steps)


ALONE = {"preset": "tempflow", "tree": {"profile": [1, 1]}}


def test_edges_that_are_all_compared_with_themselves_alone_are_refused():
    with pytest.raises(InputError, match=r"^algorithm\.credit: every edge would be compared with itself alone"):
        predict_cost(chosen(ALONE, group_size=24), 10)
    with_others = {**ALONE, "credit": {"within": "prompt"}}
    assert predict_cost(chosen(with_others, group_size=24), 10).trained_edges == 4 * 2


@pytest.mark.parametrize("rule", ["parent_top1", "extremes", "depth"])
def test_a_pruning_that_could_leave_nothing_out_is_refused(rule):
    def pruned(last_split, **options):
        return chosen(
            {"preset": "branch_grpo", "tree": {"splits": [0, last_split], "prune": {"rule": rule}, **options}}
        )

    with pytest.raises(InputError, match=r"^algorithm\.tree\.prune: no stochastic step follows the split at 4, so"):
        predict_cost(pruned(4), 6)
    # 4 trees of 4 leaves and their last step: half of the chains leave, or all trained edges of that step
    assert predict_cost(pruned(4, last_step="sde"), 6).trained_edges == 4 * (
        2 * 4 + 4 * 2 - (4 if rule == "depth" else 2)
    )


@pytest.mark.parametrize("preset", ["flow_grpo", "tempflow", "branch_grpo"])
def test_batches_of_a_rollout_and_of_an_update_are_counted_apart(tmp_path, preset):
    batches = {"rollout_batch": 10, "micro_batch": 4}
    settings = chosen({"preset": preset}, tmp_path, groups=2, updates=2, group_size=12, **batches)
    assert_foreseen(settings, 6)
    same = chosen({"preset": preset}, groups=2, updates=2, group_size=12, micro_batch=4)
    # The other has the same calls with a gradient, and may spare some.
    assert replace(predict_cost(same, 6), graph_rows=(), call_rows=0) == predict_cost(settings, 6)
    if preset == "flow_grpo":  # of each part 12 rows at 5 trained steps
        assert predict_cost(settings, 6).update_batches == 2 * 5 * 3


def test_a_calibration_costs_its_rounds_of_rollouts(tmp_path):
    settings = chosen({"preset": "dense_grpo", "kernel": {"calibrate": {"rounds": 2}}}, tmp_path, group_size=3)
    told = counted(settings, 5)["calibration"]
    assert told["cost/model_evaluations"] == 2 * 3 * (5 + 4 + 3 + 2 + 1)
    assert told["cost/decoded"] == 2 * 3 * 5


def test_a_later_iteration_costs_what_its_window_does():
    settings = chosen({"preset": "branch_grpo_mix", "tree": {"every": 2}}, group_size=16)
    # 20 steps, splits 0, 3, 6, 9; windows 0 to 3, and from iteration 2 on 1 to 4
    assert [predict_cost(settings, 20, iteration).trained_edges for iteration in (0, 1, 2)] == [34, 34, 34 + 4]


@pytest.mark.parametrize("steps", [[0, 10], [3, 3], [4, 2], [-1, 5], [0, -11], [9, -1]])
def test_steps_that_a_chain_does_not_have_are_refused(steps):
    with pytest.raises(
        InputError, match=r"^algorithm\.tree\.steps: .* among the 9 stochastic ones, take \[0, 9\] or less"
    ):
        predict_cost(chosen({"preset": "flow_grpo", "tree": {"steps": steps}}, group_size=24), 10)


PICTURES = """
{preset: dance_grpo, tree: {train_fraction: 1.0}}
0   1   2   3   4   5   6
o~~~o~~~o~~~o~~~o---o---*

{preset: tempflow}
0   1   2   3   4
o---o---o
|   |   +~6~o---*
|   +~6~o---o---*
+~6~o---o---o---*

{preset: tempflow, tree: {profile: [12, 0, 6], finish: 1}}
0   1   2   3   4
o---o---o
|       +~6~o---*
+~12o-----------*

{preset: branch_grpo}
0   1   2   3   4   5   6
o~2~o~2~o~2~o~~~o~~~o---*

{preset: branch_grpo, tree: {prune: {rule: depth, size: 1}}}
0   1   2   3   4   5   6
o~2~o~2~o~2~o===o~~~o---*

{preset: mix_grpo}
0   1   2   3   4   5   6
o~~~o~~~o~~~o~~~o---o---*

{preset: dense_grpo}
0   1   2   3   4
o~~~o~~~o~~~o---*
|   |   +...o...*
|   +...o...o...*
+...o...o...o...*

{preset: stepwise_flow_grpo, tree: {length: 2}}
0   1   2   3   4
o~~~o~~~o~~~o---*
|   |   +...o...*
|   +.......o...*
+.......o.......*

{preset: vgpo}
0   1   2   3   4
o~~~o~~~o~~~o---*
    |   +.......*
    +...........*

{preset: vgpo, tree: {last_step: sde, root: true}}
0   1   2
o~~~o~~~*
|   +...*
+.......*
"""


@pytest.mark.parametrize("case", PICTURES.strip("\n").split("\n\n"))
def test_a_tree_is_drawn_as_one_would_draw_it(case):
    algorithm, *lines = case.split("\n")
    steps = int(lines[0].split()[-1])
    assert picture(chosen(yaml.safe_load(algorithm), group_size=24), steps) == lines


def test_the_branches_of_a_trunk_that_ends_are_drawn():
    def plan(role, step):
        sides = (Move(Kernel("flow_sde", 0.7), "side", 2, trained=True),)
        return (Move(role=role),) if role != TRUNK else (Move(), *sides) if step < 2 else ()

    assert draw_tree(plan, 4) == [
        "0   1   2   3   4",
        "o---o---o",
        "|   +~2~o---o---*",
        "+~2~o---o---o---*",
    ]
    assert legend(draw_tree(plan, 4)) == "o state   * decoded   ~ stochastic, trained   - ODE   number: children"


# The table of SD3 and of the embedded model at 10 steps, written out: shift 3, and what diffusers appends before 0.
SD3 = [1.0, 0.9601, 0.9133, 0.8577, 0.7904, 0.7073, 0.6022, 0.4649, 0.2780, 0.0089, 0.0]


def test_the_table_is_the_scheduler_s_own():
    assert sigma_table("shapes", 10) == pytest.approx(SD3, abs=5e-5)


@pytest.mark.parametrize("name", ["UniPCMultistepScheduler", "FlowMatchEulerDiscreteScheduler"])
def test_a_table_that_a_pipeline_makes_while_it_runs_is_taken_for_one_of_shift_3(tmp_path, name):
    (tmp_path / "scheduler").mkdir()
    index = {"_class_name": "FluxPipeline", "scheduler": ["diffusers", name]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    written = json.dumps({"_class_name": name, "use_dynamic_shifting": True})
    (tmp_path / "scheduler" / "scheduler_config.json").write_text(written)
    assert sigma_table(str(tmp_path), 4) == pytest.approx([1, 9 / 10, 3 / 4, 1 / 2, 0])


def test_a_step_that_outweighs_all_others_is_told():
    """|d mean / d v| / std of cps: 0.0112 at the first step and 8.28 at the last one trained, each over the mean."""
    averaged = {"preset": "stepwise_flow_grpo", "kernel": {"log_prob": "mean"}}
    (said,) = uneven(chosen(averaged), SD3)
    assert "from sigma 0.278 to 0.0089 pulls" in said
    assert "as that from sigma 1 to 0.96 (cps, log_prob mean)" in said
    assert int(re.search(r"pulls (\d+) times", said)[1]) == pytest.approx(740, abs=10)
    assert uneven(chosen({**averaged, "objective": {"step_weights": "equalised"}}), SD3) == []


@pytest.mark.parametrize("seed", range(3))
def test_a_step_that_only_some_iterations_train_is_told_too(seed):
    drawn = {"preset": "flow_grpo", "tree": {"train_fraction": 0.5}, "kernel": {"name": "cps", "log_prob": "mean"}}
    settings = chosen(drawn, iterations=40)
    said = uneven(settings.model_copy(update={"run": settings.run.model_copy(update={"seed": seed})}), SD3)
    assert int(re.search(r"pulls (\d+) times", said[0])[1]) == pytest.approx(740, abs=10)


def test_a_divergence_that_holds_one_step_only_is_told():
    """(8.28 / 0.0112)^2, the squares of the same table: 544 thousand."""
    (said,) = uneven(chosen({"preset": "flow_grpo", "kernel": "cps"}), SD3)
    assert "the divergence flow_grpo holds the step from sigma 0.278 to 0.0089" in said
    assert int(re.search(r"0089 ([\d,]+) times", said)[1].replace(",", "")) == pytest.approx(544_000, rel=0.01)
    for cured in ({"form": "velocity"}, {"beta": 0.0}):
        assert uneven(chosen({"preset": "flow_grpo", "kernel": "cps", "objective": {"kl": cured}}), SD3) == []


def test_a_normalised_ratio_pulls_alike_at_every_step():
    """N std / h is 1 + level^2 / 2 at all steps of flow_sde but the first (the averaged form alone runs over 26)."""
    settings = chosen({"preset": "grpo_guard"})
    steps = [(kernel, *pair) for kernel, pair in zip(settings.algorithm.kernel.kernels(10), pairwise(SD3), strict=True)]
    found = settings.algorithm.objective.pulls(steps[1:9], SD3[1])
    assert found == pytest.approx([1 + 0.7**2 / 2] * 8, rel=1e-3)
