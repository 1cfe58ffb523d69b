"""`flowgrpo plan` on flow models, beside what a run counts."""

import json
from pathlib import Path

import pytest
import tiny
import yaml
from cases import cases
from diffusers import SD3Transformer2DModel
from runs import metrics

from flowgrpo import config
from flowgrpo.cli import main
from flowgrpo.flow.methods.presets import PRESETS
from flowgrpo.flow.methods.published import PUBLISHED
from flowgrpo.flow.planning.iteration_forecast import predict_cost
from flowgrpo.flow.planning.plan import plan, table


def test_a_plan_of_shared_calls_asks_whether_they_can_be(workplace, capsys):
    assert main(["plan", "tiny.yaml", "run.context_parallel=2"]) == 2
    assert (
        "run.context_parallel: diffusers has no plan by which calls of SD3Transformer2DModel" in capsys.readouterr().err
    )
    tiny.flux().save_pretrained("flux")
    call = "model.call={num_inference_steps: 4, height: 16, width: 16, max_sequence_length: 8}"
    assert main(["plan", "tiny.yaml", "model.path=./flux", call, "run.context_parallel=2", "run.processes=2"]) == 0


NO_EVAL = ["eval={every: 9, prompts: 1, save: 0}"]  # but of one sample, at the start and at the end


def test_plan_predicts_what_a_run_counts(workplace, capsys):
    for preset in ("flow_grpo", "mix_grpo"):  # all steps, a window
        options = [f"algorithm.preset={preset}", "algorithm.objective.kl.beta=0.01", "model.call.guidance_scale=2.0"]
        options += ["algorithm.tree.size=2"] if preset == "mix_grpo" else []
        assert main(["plan", "tiny.yaml", *options, "--format", "json"]) == 0
        planned = json.loads(capsys.readouterr().out)
        assert main(["train", "tiny.yaml", *options, f"run.name={preset}", "train.iterations=1", *NO_EVAL]) == 0
        capsys.readouterr()
        for line in metrics(workplace / "runs" / preset):
            assert planned["model_evaluations"]["rollout"] == line["cost/rollout_evaluations"]
            spared = planned["graphs"]  # there is room for them
            assert planned["model_evaluations"]["update"] - spared == line["cost/update_evaluations"]
            assert planned["with_gradient"] == line["cost/backward_evaluations"]
            assert sum(planned["model_evaluations"].values()) - spared == line["cost/model_evaluations"]
            assert spared > 0
            assert planned["geometry"]["trained_edges"] == line["cost/trained_edges"]
            assert planned["decoded"] == line["cost/decoded"]
        assert planned["preset"] == preset
        assert set(planned["axes"]) == {"tree", "kernel", "hints", "likelihood", "credit", "baseline", "objective"}
        assert planned["reward_calls"] == 8


FOUR = "model.call.num_inference_steps=4"
SEPPO = ("seppo", ["algorithm.likelihood.bank={every: 1, keep: 2}"])


@pytest.mark.parametrize(
    ("preset", "options"),
    cases(
        [
            ("nft", ["model.call.guidance_scale=2.0"]),
            ("dpo", []),
            ("awm", ["algorithm.likelihood.draws=1", FOUR]),
            SEPPO,
        ],
        [SEPPO],
    ),
)
def test_adapters_learn_from_final_samples_as_planned(workplace, capsys, preset, options):
    """Of a pipeline of diffusers, guided too: sigmas between the steps of its schedule, and adapters of an old policy."""
    options = [f"algorithm={{preset: {preset}}}", "train.updates=1", *options]
    assert main(["plan", "tiny.yaml", *options, "--format", "json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert main(["train", "tiny.yaml", *options, f"run.name={preset}", "train.iterations=2", *NO_EVAL]) == 0
    for line in metrics(workplace / "runs" / preset):
        assert planned["model_evaluations"]["rollout"] == line["cost/rollout_evaluations"]
        assert planned["model_evaluations"]["update"] == line["cost/update_evaluations"]
        assert line["policy/grad_norm"] > 0


SHAPES = Path(__file__).parents[4] / "configs" / "shapes.yaml"


@pytest.mark.parametrize("preset", PRESETS)
def test_every_method_can_be_planned_on_the_embedded_model(capsys, preset):
    # a map, without the clip range that the config has for its own method
    options = [f"algorithm={{preset: {preset}}}", "train.group_size=12", "train.groups=2", "--format", "json"]
    assert main(["plan", str(SHAPES), *options]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["preset"] == preset
    assert planned["axes"] == {axis: row["name"] for axis, row in PRESETS[preset].items()}
    cost = predict_cost(config.load(SHAPES, options[:3]), 10)
    drafts = 2 * 12 * 4 if preset == "sol_rl" else 0  # by six steps each
    assert planned["model_evaluations"] == {"rollout": cost.rollout + 6 * drafts, "update": cost.update}
    assert (planned["geometry"]["trained_edges"], planned["decoded"]) == (cost.trained_edges, cost.decoded + drafts)
    assert planned["reward_calls"] == planned["decoded"]
    assert planned["picture"][0].split() == [str(step) for step in range(11)]
    assert planned["picture"][1].startswith("o")
    # lines that end in a decode: one, or one for each step that branches or is measured
    several = {
        "tempflow": 9,
        "adaptive": 9,
        "tempflow_fast": 3,
        "awm_brush": 3,
        "dense_grpo": 10,
        "stepwise_flow_grpo": 10,
        "vgpo": 9,
    }
    assert sum(line.endswith("*") for line in planned["picture"]) == several.get(preset, 1)
    assert {key: both["source"] for key, both in planned["published"].items()} == PUBLISHED[preset]
    assert planned["warnings"] == []
    rounds = 10 if preset == "dense_grpo" else 0
    assert planned["calibration"] == {"model_evaluations": rounds * cost.rollout, "decoded": rounds * cost.decoded}


def test_plan_reads_for_people_too(workplace, capsys):
    assert main(["plan", "tiny.yaml"]) == 0
    shown = capsys.readouterr().out
    assert "flow_sde" in shown
    assert shown.startswith("  0   1   2   3\n  o~~~o~~~o---*\n")
    assert "* decoded   ~ stochastic, trained" in shown
    words = " ".join(shown.split())
    assert "2 groups x 4 = 8 trajectories, 4 roots a group; 2 optimizer steps, split by groups" in words
    stated = "num_inference_steps 10 (here 3), groups 48 (here 2), group_size 24 (here 4), updates 2"
    assert f"published of flow_grpo's source, for Stable Diffusion 3.5 medium: {stated}" in words
    assert "warning" not in words
    uneven = ["algorithm.kernel={name: cps, log_prob: mean}", "model.call.num_inference_steps=10"]
    assert main(["plan", "tiny.yaml", *uneven]) == 0
    assert "warning of the steps trained, that from sigma" in " ".join(capsys.readouterr().out.split())
    assert not (workplace / "runs").exists()


def test_a_plan_of_one_group_has_no_plural(workplace, capsys):
    assert main(["plan", "tiny.yaml", "train.groups=1", "train.updates=1"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "1 group x 4 = 4 trajectories, 4 roots a group; 1 optimizer step, split by groups" in words


def test_a_plan_fits_a_screen_and_the_config_is_asked_for(capsys):
    assert main(["plan", str(SHAPES)]) == 0
    summary = capsys.readouterr().out
    assert len(summary.splitlines()) <= 40
    assert "max_grad_norm" not in summary
    assert main(["plan", str(SHAPES), "--full"]) == 0
    full = capsys.readouterr().out
    assert full.startswith(summary)
    assert config.validate(yaml.safe_load(full[len(summary) :])) == config.load(SHAPES, [])


def test_a_model_that_reads_its_numbers_cannot_be_planned_and_says_so(workplace, monkeypatch, capsys):
    forward = SD3Transformer2DModel.forward

    def reading(self, hidden_states, *arguments, **options):
        float(self.proj_out.weight.sum())
        return forward(self, hidden_states, *arguments, **options)

    monkeypatch.setattr(SD3Transformer2DModel, "forward", reading)
    assert main(["plan", "tiny.yaml", "--gpu-memory", "24"]) == 2
    said = capsys.readouterr().err
    assert "cannot be planned without its weights: a value of () numbers that do not exist is read" in said


def test_the_memory_beside_the_devices_is_told_for_all_processes():
    planned = plan(config.validate({"model": {"path": "shapes", "call": {}}, "run": {"processes": 2}}))
    planned["memory"] = {"gpu_bytes": 5 << 30, "reward_bytes": 0, "host_bytes": 3 << 30}
    assert dict(table(planned))["memory"].startswith(
        "5.00 GiB on the device, 3.00 GiB in host memory (6.00 for 2 processes); "
    )
    planned["memory"]["reward_bytes"] = 2 << 30
    assert dict(table(planned))["memory"].startswith(
        "5.00 GiB on the device (2.00 of it weights of rewards), 3.00 GiB in"
    )


def test_a_plan_in_which_no_sample_is_left_to_learn_from_is_refused(workplace, capsys):
    assert main(["plan", "tiny.yaml", "algorithm={preset: dpo, baseline: best}", "train.updates=1"]) == 2
    assert "algorithm.baseline: best leaves no sample that pair_preference could learn from" in capsys.readouterr().err


def test_a_calibration_drafts_as_every_rollout_does():
    shapes = {"path": "shapes", "call": {"num_inference_steps": 3}}
    algorithm = {"preset": "dense_grpo", "kernel": {"calibrate": {"rounds": 2}}}
    train = {"groups": 2, "group_size": 4, "draft": {"pool": 2, "call": {"num_inference_steps": 2}}}
    told = plan(config.validate({"model": shapes, "algorithm": algorithm, "train": train}))
    assert told["drafted"] == 2 * 4 * 2
    calibration = told["calibration"]
    assert calibration["model_evaluations"] == 2 * (2 * 4 * (3 + 2 + 1) + 16 * 2) == 160
    assert calibration["decoded"] == 2 * (2 * 4 * 3 + 16) == 80


STEPS = {
    "p.jsonl": '{"prompt": "a", "num_inference_steps": 5}\n{"prompt": "b", "num_inference_steps": 5}\n',
    "p.csv": "prompt,num_inference_steps\na,5\nb, 5\n",
}


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ("a,3\nb,5", "num_inference_steps: 3 at 'a' and 5 at 'b', but rows of one run walk the same steps"),
        ("a,3\nb,", "num_inference_steps: 3 at 'a' and 4 at 'b', but rows"),
        ("a,x\nb,x", "num_inference_steps: 'x' is not a number of steps from 1 to"),
        (f"a,{'9' * 5000}", "num_inference_steps: '99999"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "train"])
def test_columns_that_a_run_cannot_walk_are_refused_by_value(workplace, capsys, command, cells, said):
    (workplace / "p.csv").write_text(f"prompt,num_inference_steps\n{cells}\n")
    assert main([command, "tiny.yaml", "prompts={train: p.csv, eval: p.csv}", FOUR]) == 2
    assert f"the prompts' columns.{said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cells", "said"), [("a,5\nb,", None), ("a,4\nb,", "num_inference_steps: 4 at 'a' and 5 at 'b', but rows")]
)
@pytest.mark.parametrize("command", ["plan", "train"])
def test_held_out_rows_without_steps_take_those_of_their_own_call(workplace, capsys, command, cells, said):
    (workplace / "e.csv").write_text(f"prompt,num_inference_steps\n{cells}\n")
    asked = ["prompts.eval=e.csv", "eval={prompts: 2, call: {num_inference_steps: 5}}"]
    asked += ["train.iterations=1", "train.groups=1", "train.updates=1"]
    assert main([command, "tiny.yaml", *asked]) == (0 if said is None else 2)
    assert said is None or f"the prompts' columns.{said}" in capsys.readouterr().err


def test_a_column_of_texts_in_the_place_of_a_number_is_refused(workplace, capsys):
    (workplace / "p.csv").write_text("prompt,guidance_scale\na,4.5\n")
    assert main(["plan", "tiny.yaml", "prompts={train: p.csv, eval: p.csv}"]) == 2
    assert "the prompts' columns.guidance_scale: '4.5' is no number, take 7.0" in capsys.readouterr().err


@pytest.mark.parametrize("name", cases(STEPS, ["p.csv"]))
def test_a_column_of_steps_is_counted_as_the_run_counts_it(workplace, capsys, name):
    (workplace / name).write_text(STEPS[name])
    asked = ["tiny.yaml", f"prompts={{train: {name}, eval: {name}}}", "train.iterations=1", "eval.prompts=2"]
    assert main(["plan", *asked, "--format", "json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["geometry"]["steps"] == 5
    assert main(["train", *asked]) == 0
    (line,), (held_out, _) = (metrics(workplace / "runs" / "t", phase) for phase in ("train", "eval"))
    assert line["cost/rollout_evaluations"] == planned["model_evaluations"]["rollout"] == 2 * 4 * 5
    assert line["cost/update_evaluations"] == planned["model_evaluations"]["update"] - planned["graphs"]
    assert held_out["cost/model_evaluations"] == planned["evaluation"]["model_evaluations"] == 2 * 5


def test_a_run_that_samples_guided_and_trains_unguided_costs_what_is_planned(workplace, capsys):
    asked = ["tiny.yaml", "algorithm.preset=rwr", "algorithm.likelihood.draws=2", "model.call.guidance_scale=4.5"]
    asked += ["train.iterations=1", "eval.prompts=2", "model.text_encoders=free"]
    assert main(["plan", *asked, "--format", "json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert (planned["config"]["model"]["guidance"], planned["warnings"]) == ("rollout", [])
    assert main(["train", *asked]) == 0
    (line,) = metrics(workplace / "runs" / "t", "train")
    rows = planned["geometry"]["samples"]
    assert line["cost/rollout_evaluations"] == planned["model_evaluations"]["rollout"]
    assert planned["model_evaluations"]["rollout"] == 2 * rows * planned["geometry"]["steps"]
    assert line["cost/update_evaluations"] == planned["model_evaluations"]["update"] == 2 * rows


def test_a_plan_for_a_gpu_without_room_for_graphs_does_not_promise_them(capsys):
    words = ["plan", "configs/shapes.yaml", "algorithm={preset: flow_grpo}", "model.call.num_inference_steps=4"]
    assert main(words) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "reuse the rollout's graphs" in printed
    assert "model.guidance pipeline" in printed  # a key; "guidance" alone reads as its scale
    assert main([*words, "--gpu-memory", "1.3"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "reuse the rollout's graphs" not in printed
    assert "the rollout keeps no graphs, so the first update computes" in printed
