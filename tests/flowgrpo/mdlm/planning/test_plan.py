"""What a text run will cost, counted by hand and by the run itself."""

import json

import pytest
import torch

from flowgrpo import config
from flowgrpo.cli import main
from flowgrpo.commands.runs import train as run
from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding.decoders import build
from flowgrpo.mdlm.methods.presets import PRESETS
from flowgrpo.mdlm.methods.published import PUBLISHED
from flowgrpo.mdlm.models import memory_estimate
from flowgrpo.mdlm.planning.decoder_steps import count_decoder_steps
from flowgrpo.mdlm.planning.plan import AXES, plan, predict_cost, table
from flowgrpo.mdlm.setup import policy_and_weights

WALKS = [
    ("low_confidence", 8, {}, (8, 1, True)),
    ({"name": "low_confidence", "steps": 4}, 8, {}, (4, 1, True)),
    ({"name": "low_confidence", "steps": 6, "cfg_scale": 1.5}, 8, {}, (6, 2, True)),
    # two blocks of four in three steps each, though the last have fewer positions than the first
    ({"name": "random", "steps": 6, "region": {"block_length": 4}}, 8, {}, (6, 1, True)),
    # no more steps than positions
    ({"name": "low_confidence", "steps": 24, "region": {"block_length": 4}}, 8, {}, (8, 1, True)),
    ({"name": "low_confidence", "eos_early_stop": True}, 8, {}, (8, 1, False)),
    ("ass", 16, {}, (4, 1, True)),
    # Dream's code waits: of 3 masks none goes at the first of 8 steps
    ({"name": "entropy", "steps": 8}, 3, {}, (8, 1, True)),
    ({"name": "origin", "steps": 8}, 3, {}, (8, 1, False)),
    ("threshold", 8, {}, (8, 1, False)),
    ({"name": "block_refinement", "steps": 4}, 8, {}, (4, 1, False)),
    ("factor", 8, {}, (8, 1, False)),
    ("scheduled", 8, {}, (8, 1, True)),
]


@pytest.mark.parametrize(("spec", "length", "options", "expected"), WALKS)
def test_the_steps_of_a_decoder_are_counted_by_its_committer(spec, length, options, expected):
    walk = count_decoder_steps(build(spec, length, 2))
    assert (walk.steps, walk.branches, walk.fixed) == expected


def counted(settings):
    """The plan of a run, and the lines of its iterations."""
    return predict_cost(settings), [line for line in run.train_config(settings).metrics if line["phase"] == "train"]


SMALL = {"train__group_size": 4, "algorithm__likelihood__scope": "canvas", "eval__prompts": 1, "eval__save": 0}

# preset, overrides, and of one answer: evaluations of the rollout and of the update
FIXED = [
    ("diffu_grpo", {}, 4, 1 + 1 + 1),  # gradient, old, reference
    ("diffu_grpo", {"train__updates": 1}, 4, 2),
    ("diffu_grpo", {"train__passes": 3}, 4, 3 * 3),
    ("diffu_grpo", {"train__updates": 1, "algorithm__aggregation__shape": {"rule": "pivotal"}}, 4, 3),
    ("diffu_grpo", {"train__updates": 1, "algorithm__aggregation__shape": {"rule": "divergent"}}, 4, 3),
    ("diffu_grpo", {"algorithm__aggregation__shape": {"rule": "divergent"}}, 4, 4),
    ("diffu_grpo", {"algorithm__aggregation__shape": {"rule": "departed"}}, 4, 4),
    ("cj_grpo", {"algorithm__aggregation__shape": {"rule": "divergent"}}, 4, 4 * 3),
    ("cj_grpo", {"algorithm__aggregation__shape": {"rule": "departed"}}, 4, 4 * 4),
    ("diffu_grpo", {"algorithm__decoder__cfg_scale": 1.0, "algorithm__decoder__steps": 2}, 4, 3),
    ("gdpo", {}, 4, 2 * 3),
    ("gdpo", {"train__micro_batch": 2}, 4, 3 * 3),  # three views, in two passes
    ("gdpo", {"algorithm__objective": "regression"}, 4, 2 * 3),  # 8 answers of an optimizer step in one call
    ("gdpo", {"algorithm__objective": "regression", "train__micro_batch": 23}, 4, 3 * 3),
    ("bgpo", {"train__micro_batch": 5}, 4, 2 * 16),  # sixteen, each call by itself
    ("cj_grpo", {}, 4, 2 * 4),  # gradient and reference: the decoder recorded what the old policy is
    ("cj_grpo", {"train__micro_batch": 3}, 4, 2 * 4),  # disjoint views
    ("cj_grpo", {"algorithm__decoder__steps": 2}, 2, 2 * 2),
    ("cj_grpo", {"algorithm__objective__kl__level": "sequence", "train__micro_batch": 3}, 4, 3 * 4),
    # views that do not change: the old policy and the reference once, not once a pass
    ("cj_grpo", {"train__passes": 12}, 4, (12 + 1) * 4),
    ("cj_grpo", {"train__passes": 12, "algorithm__decoder__proposal": {"top_p": 0.9}}, 4, (12 + 1 + 1) * 4),
    ("cj_grpo", {"train__passes": 2, "algorithm__decoder__proposal": {"temperature": 0.5}}, 4, (2 + 1 + 1) * 4),
    ("cj_grpo", {"algorithm__decoder__suppressed": [3]}, 4, 3 * 4),
    ("cj_grpo", {"algorithm__decoder__cfg_scale": 1.0}, 8, 3 * 4),
    ("cj_grpo", {"algorithm__decoder__cache": "dual"}, 4, 3 * 4),
    ("cj_grpo", {"algorithm__likelihood__shrink": 2}, 4, 3 * 2),
    ("cj_grpo", {"algorithm__aggregation__shape": {"rule": "uncertain"}}, 4, 3 * 4),  # entropies are not recorded
    ("diffu_grpo", {"train__updates": 1, "algorithm__aggregation__shape": {"rule": "largest"}}, 4, 3),
    ("diffu_grpo", {"train__updates": 1, "algorithm__aggregation__shape": {"rule": "conflict"}}, 4, 2),
    ("diffu_grpo", {"train__updates": 1, "algorithm__objective__covariance": {"rule": "clip"}}, 4, 3),
    ("cj_grpo", {"train__updates": 1, "algorithm__objective__covariance": {"rule": "kl"}}, 4, 2 * 4),  # recorded
    ("diffu_grpo", {"algorithm__objective__balance": {}}, 4, 3 + 1),  # the ratios of each step
    ("diffu_grpo", {"algorithm__objective__balance": {}, "train__updates": 1}, 4, 2),
    ("just_grpo", {"train__updates": 1}, 4, 4),
    ("just_grpo", {"train__passes": 3}, 4, (3 + 1) * 4),
    ("diffu_grpo_fast", {"train__passes": 3}, 4, 3 + 1),
    ("spg", {}, 4, 2 * 2),
    ("spg", {"algorithm__likelihood__size": 2, "algorithm__likelihood__draws": 3, "train__micro_batch": 2}, 4, 3 * 3),
    ("trace_rl", {"algorithm__likelihood__shrink": 2}, 4, 2 * 2),
    ("coupled_grpo", {"algorithm__likelihood__weights": "unbiased"}, 4, 3 * 3),
    ("co_grpo", {}, 4, 2 * 4),  # at temperatures of its own
    ("co_grpo", {"algorithm__schedule__start": {"selection_temperature": 0.5}}, 4, 4),
    ("co_grpo", {"algorithm__schedule__start": {"cfg_scale": 1.0}}, 8, 2 * 4),
]


FIRST = [next(case for case in FIXED if case[0] == preset) for preset in dict.fromkeys(case[0] for case in FIXED)]


@pytest.mark.parametrize(
    ("preset", "overrides", "rollout", "update"),
    [pytest.param(*case, marks=() if case in FIRST else pytest.mark.zoo) for case in FIXED],
)
def test_a_run_counts_what_was_predicted(settings, preset, overrides, rollout, update):
    cost, lines = counted(settings(algorithm__preset=preset, train__iterations=1, **SMALL, **overrides))
    assert (cost.rollout, cost.update) == (16 * rollout, 16 * update)
    assert (cost.rollout_fixed, cost.update_fixed) == (True, True)
    for line in lines:
        assert (line["cost/rollout_evaluations"], line["cost/update_evaluations"]) == (cost.rollout, cost.update)
        assert line["cost/backward_evaluations"] == cost.with_gradient


@pytest.mark.parametrize(("proposal", "update"), [({}, 16_640), ({"top_p": 0.9}, 17_920)])
def test_twelve_passes_over_64_answers_of_20_steps_evaluate_the_reference_once(settings, proposal, update):
    """64 x 20 x (12 + 1), or + 1 for the old policy; 64 x 20 x 12 x 3 = 46,080 were it both in every pass."""
    numbers = {"model__length": 20, "train__groups": 4, "train__group_size": 16, "train__passes": 12}
    cost = predict_cost(settings(algorithm__preset="cj_grpo", algorithm__decoder__proposal=proposal, **numbers))
    assert (cost.update, cost.update_fixed) == (update, True)  # of the whole canvas


LESS = [
    ("trace_rl", {"algorithm__decoder": "threshold"}),
    ("coupled_grpo", {}),
    ("just_grpo", {"algorithm__likelihood__scope": "eos"}),
    ("cj_grpo", {"algorithm__decoder": "origin"}),
    ("co_grpo", {"algorithm__schedule__start": {"ratio": 0.5}}),
    ("bgpo", {"algorithm__likelihood__antithetic": True}),
    ("gdpo", {"algorithm__likelihood__masks": "bernoulli"}),
    ("igpo", {}),
    ("diffu_grpo", {"algorithm__baseline": "leave_one_out", "algorithm__decoder__eos_early_stop": True}),
]


@pytest.mark.parametrize(("preset", "overrides"), LESS)
def test_a_run_whose_cost_depends_on_its_answers_counts_at_most_what_was_predicted(settings, preset, overrides):
    chosen = {"algorithm__hints__tail": 0, "algorithm__hints__chunk": [1, 2]} if preset == "igpo" else {}
    cost, lines = counted(settings(algorithm__preset=preset, train__iterations=1, **SMALL | chosen | overrides))
    assert not (cost.rollout_fixed and cost.update_fixed)
    for line in lines:
        assert line["cost/rollout_evaluations"] <= cost.rollout
        assert line["cost/update_evaluations"] <= cost.update
        assert not cost.rollout_fixed or line["cost/rollout_evaluations"] == cost.rollout


def test_a_run_behind_its_policy_counts_at_most_what_was_predicted(settings):
    """Only its first iteration has answers of the trained policy, and needs no other's log-probabilities."""
    cost, lines = counted(settings(algorithm__preset="diffu_grpo", run__staleness=1, train__updates=1, **SMALL))
    assert not cost.update_fixed
    assert lines[0]["cost/update_evaluations"] < lines[1]["cost/update_evaluations"] == cost.update


def test_a_selection_of_answers_is_counted(settings):
    cost, lines = counted(settings(train__select={"fraction": 0.5}, **SMALL))
    assert cost.update == 3 * 4 * 2
    assert [line["cost/update_evaluations"] for line in lines] == [cost.update] * 2


def test_the_evaluation_is_counted(settings):
    chosen = settings(eval__decoder={"steps": 2, "cfg_scale": 0.5}, train__iterations=1)
    planned = plan(chosen)
    assert planned["evaluation"] == {"model_evaluations": 4 * 2 * 2, "at_most": False, "decoded": 4}
    assert planned["evaluation_branches"] == 2
    held_out = [line for line in run.train_config(chosen).metrics if line["phase"] == "eval"]
    assert {line["cost/model_evaluations"] for line in held_out} == {16}


@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 4.0}])
def test_memory_counts_the_reference_of_a_rule_for_tokens(settings, lora):
    chosen = {"model__lora": lora, "algorithm__objective__kl__beta": 0.0}
    plain, departed = (memory_estimate.policy_copies(settings(**chosen, algorithm__aggregation__shape=shape))
                       for shape in (None, {"rule": "departed"}))  # fmt: skip
    assert (plain, departed) == (0, int(lora is None))


@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 4.0}])
def test_memory_counts_every_copy(settings, lora):
    chosen = settings(model__lora=lora, model__dtype="bfloat16")
    _, weights = policy_and_weights(chosen, torch.device("cpu"))
    trained = sum(p.numel() for p in weights.parameters)
    whole = sum(p.numel() for n, p in weights.modules["model"].named_parameters() if "lora_" not in n)
    # weight, gradient, two moments, average; and the reference of diffu_grpo's KL, which adapters do not need
    assert memory_estimate.memory_estimate(chosen) == {
        "gpu_bytes": 4 * 6 * trained if lora is None else 2 * whole + 4 * 5 * trained,
        "reward_bytes": 0,
        "host_bytes": 0,
    }


@pytest.mark.parametrize("preset", PRESETS)
def test_every_method_is_planned_by_the_command(settings, tmp_path, capsys, preset):
    arguments = ["plan", str(tmp_path / "run.yaml"), f"algorithm.preset={preset}", "algorithm.hints={tail: 0}"]
    arguments = arguments if preset == "igpo" else arguments[:3]
    assert main([*arguments, "--format", "json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["preset"] == preset
    assert planned["axes"] == {axis: PRESETS[preset][axis]["name"] for axis in AXES}
    assert {key: both["source"] for key, both in planned["published"].items()} == PUBLISHED[preset]
    assert planned["decoded"] == 32
    assert planned["reward_calls"] == (64 if preset == "igpo" else 32)
    assert planned["geometry"]["length"] == 4
    assert planned["memory"]["gpu_bytes"] > 0
    assert config.validate(planned["config"]) == config.load(arguments[1], arguments[2:])
    assert main(arguments) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "4 groups x 8 = 32 answers of 4 tokens; 2 optimizer steps, split by groups" in shown
    assert ("published" in shown) == bool(PUBLISHED[preset])
    further = planned["second_stage"]
    assert ("at most" in shown) == (True in planned["at_most"].values() or further["decoded"] > 0)
    assert further["decoded"] == (96 if preset == "dars" else 0)
    assert not (tmp_path / "runs").exists()


def test_the_optimizer_steps_of_all_passes_are_counted(settings):
    batch = dict(table(plan(settings(train__passes=3))))["batch"]
    assert batch.endswith("; 6 optimizer steps (3 passes of 2), split by groups")


def test_published_numbers_stand_beside_those_of_the_run(settings):
    planned = plan(settings(algorithm__preset="coupled_grpo", train__learning_rate=1e-6))
    assert planned["published"]["train.learning_rate"] == {"source": 1e-6, "run": 1e-6}
    assert planned["published"]["algorithm.decoder.steps"] == {"source": 256, "run": None}
    shown = dict(table(planned))["published"]
    assert shown.startswith("of coupled_grpo's source, for DiffuCoder-7B: lora none, ema none (here ")
    assert "updates 1 (here 2), length 256 (here 4), decoder.steps 256 (here none), groups 8 (here 4)" in shown
    assert "learning_rate 1e-06, schedule.name cosine (here constant), schedule.floor 0.1 (here 0.0)" in shown
    d1 = plan(settings(algorithm__preset="diffu_grpo"))["published"]
    assert d1["model.lora.rank"] == {"source": 128, "run": None}  # of a run without adapters


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            {"algorithm__decoder__committer": {"name": "threshold", "threshold": "abc"}},
            r"^algorithm\.decoder\.committer\.threshold: 'abc' is wrong",
        ),
        ({"model__path": "./nowhere"}, r"^model\.path: './nowhere' holds no model"),
        (
            {"model__path": "digit"},
            r"^model\.path: there is no folder 'digit' and no built-in model of that name, did you mean 'digits'\?",
        ),
        (
            {"model__path": "shapes"},
            r"^model\.path: shapes is a flow model, not a language model: its runs have kind: flow$",
        ),
        ({"prompts__eval": "no.txt"}, r"^prompts\.eval: there is no file no\.txt"),
        ({"algorithm__preset": "igpo", "algorithm__hints__column": "way"}, "no training prompt has 'way'"),
        ({"algorithm__preset": "co_grpo", "algorithm__schedule__start": {"heat": 1.0}}, "'heat'|heat: unknown action"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(settings, overrides, sentence):
    with pytest.raises(InputError, match=sentence):
        plan(settings(**({"algorithm__hints__tail": 0} if "igpo" in overrides.values() else {}), **overrides))


def test_a_flow_config_of_a_language_model_is_told_its_kind(settings, tmp_path, capsys):
    assert main(["plan", str(tmp_path / "run.yaml"), "kind=flow", "model={path: digits}", "algorithm={}"]) == 2
    assert main(["plan", str(tmp_path / "run.yaml"), "kind=flow", "model={path: digits}", "rewards=[{use: tags}]"]) == 2
    assert "model.path: digits is a language model, set kind: mdlm" in capsys.readouterr().err
