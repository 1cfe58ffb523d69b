"""`flowgrpo plan` beside `flowgrpo train`, which refuses the same, and `flowgrpo plan --gpus`."""

import dataclasses

import pytest

from flowgrpo.cli import main
from flowgrpo.training.planning import gpu_types, iteration_cost

pytestmark = pytest.mark.usefixtures("kept_trials")
DIVERGENCE = "algorithm.objective.kl.beta=0.01"  # in all plans, so that one trial serves them
FULL = ["model.lora=null", "train.groups=4", "run.processes=2", "run.sharding=fsdp2"]


@pytest.mark.parametrize(
    "options", [[*FULL, "model.dtype=float16"], ["run.sharding=hsdp", "model.offload_activations=true"]]
)
def test_what_cannot_be_cut_is_refused_with_the_words_of_a_run(workplace, monkeypatch, capsys, options):
    monkeypatch.setenv("WORLD_SIZE", "1")  # a process of several, which starts no others
    said = []
    for command in ("train", "plan"):
        assert main([command, "tiny.yaml", *options]) == 2
        said.append(capsys.readouterr().err)
    assert said[0].startswith("flowgrpo: run.sharding: ")
    assert said[0] == said[1]


@pytest.mark.parametrize("config", ["tiny.yaml", "digits"])
def test_a_column_that_a_reward_needs_is_missed_by_both(workplace, capsys, config):
    (workplace / "judge.py").write_text("def judged(samples, prompts, answers):\n    return [0.0] * len(prompts)\n")
    (workplace / "digits").write_text("{kind: mdlm, model: {path: digits}, rewards: [solved]}")
    said = []
    for command in ("train", "plan"):
        assert main([command, config, "rewards=[./judge.py:judged]"]) == 2
        said.append(capsys.readouterr().err)
    assert said[0].startswith("flowgrpo: the reward 'judged' needs a column 'answers', the prompt ")
    assert said[0] == said[1]


def test_what_can_be_cut_is_planned(workplace, printed):
    assert "model evaluations" in printed("plan", "tiny.yaml", *FULL, "model.dtype=bfloat16")


@pytest.fixture
def launched_at_once(monkeypatch):
    """Calls take as long as their operations, and no longer: those of the tiny model are launched longer than computed."""
    monkeypatch.setattr(iteration_cost, "LAUNCH", 0.0)


@pytest.fixture
def planned(workplace, printed):
    return lambda *options: printed("plan", "tiny.yaml", DIVERGENCE, *options, "--format", "json")


def test_seconds_follow_from_the_evaluations_that_are_counted(planned, launched_at_once):
    found = planned("--gpus", "3", "--fixed-seconds", "5")
    rows = {each["gpus"]: each for each in found["cost"]["costs"]}
    assert list(rows) == [1, 3, 8, 64, 512]
    alone = rows[1]["seconds"]
    counts, learnt = found["model_evaluations"], found["with_gradient"]
    assert 0 < learnt < counts["update"]  # the reference is evaluated too
    forwards = 2 * learnt + (counts["update"] - learnt)
    assert alone["update"] / alone["rollout"] == pytest.approx(forwards / counts["rollout"])
    assert alone["decode"] > 0
    assert (alone["fixed"], alone["traffic"]) == (5, 0)
    assert rows[8]["total"] == pytest.approx(sum(rows[8]["seconds"].values()))
    assert rows[8]["efficiency"] == pytest.approx(rows[1]["total"] / (8 * rows[8]["total"]))
    assert [rows[n]["samples"] for n in (1, 3, 8)] == [8, 3, 1]
    assert rows[3]["seconds"]["rollout"] == pytest.approx(alone["rollout"] * 3 / 8)
    assert found["config"]["run"]["processes"] == 3
    assert found["cost"]["limit"] == "fixed"
    assert found["cost"]["changes"] == []  # no iteration may have as many samples as would keep so small a model busy


def test_more_samples_are_advised_where_the_fixed_part_takes_the_most(planned, launched_at_once):
    alone = planned("--gpus", "1", "--fixed-seconds", "0")["cost"]["costs"][0]["total"]
    found = planned("--gpus", "3", "--fixed-seconds", str(alone))
    (change,) = (each for each in found["cost"]["changes"] if "train.groups" in each["set"])
    groups = change["set"]["train.groups"]
    assert groups % (2 * 3) == 0  # two parts of three processes
    assert change["efficiency"] > 0.69
    again = planned("--gpus", "3", "--fixed-seconds", str(alone), f"train.groups={groups}")["cost"]
    own = next(each for each in again["costs"] if each["gpus"] == 3)
    assert own["total"] == pytest.approx(change["total"])
    assert own["efficiency"] == pytest.approx(change["efficiency"])


def test_a_faster_gpu_takes_less_and_a_float32_run_is_not_priced_as_half_precision(planned, launched_at_once):
    def seconds(*options):
        return planned("--gpus", "1", *options)["cost"]["costs"][0]["seconds"]["rollout"]

    single = seconds()
    assert seconds("model.dtype=bfloat16") == pytest.approx(single * 67 / 989)
    assert seconds("model.dtype=bfloat16", "--gpu-type", "A100") == pytest.approx(single * 67 / 312)


def test_shards_within_a_machine_are_advised_where_waiting_takes_the_most(planned, launched_at_once):
    options = ["model.lora=null", "run.sharding=fsdp2", "--fixed-seconds", "0"]
    found = planned(*options, "--gpus", "64")["cost"]
    assert found["limit"] == "traffic"
    changed = {next(iter(change["set"].items())): change for change in found["changes"]}
    flat = next(each for each in found["costs"] if each["gpus"] == 64)
    assert changed["run.sharding", "hsdp"]["total"] < flat["total"]
    within = planned(*options, "run.sharding=hsdp", "--gpus", "64")["cost"]
    own = next(each for each in within["costs"] if each["gpus"] == 64)
    assert own["total"] == pytest.approx(changed["run.sharding", "hsdp"]["total"])
    assert own["sent"]["gathers"] < flat["sent"]["gathers"]
    assert own["peak"] > flat["peak"]  # an eighth of the weights lies on each, not a sixty-fourth
    four = planned(*options, "run.sharding=hsdp", "--gpus", "64", "--gpus-per-node", "4")["cost"]
    assert [each["gpus"] for each in four["costs"]] == [1, 4, 32, 64, 256]
    assert four["costs"][3]["machines"] == 16


def test_a_plan_on_gpus_reads_for_people_too(workplace, printed):
    said = printed("plan", "tiny.yaml", DIVERGENCE, "--gpus", "100")
    assert "on 100 GPUs the fixed part takes the most: 20.0 of 20." in said
    assert "92 of them have nothing to sample" in said
    no = "a run on 100 GPUs is refused: train.groups: 2 groups of 4 samples do not divide into train.updates = 2 parts"
    assert no in " ".join(said.split())


def test_more_rows_in_a_call_are_advised_where_a_core_launches_longer_than_a_gpu_computes(planned):
    options = ["train.rollout_batch=2", "train.micro_batch=2", "--fixed-seconds", "0", "--gpus", "1"]
    found = planned(*options)["cost"]
    more = {"train.rollout_batch": 4, "train.micro_batch": 4}
    (change,) = (each for each in found["changes"] if each["set"] == more)
    (alone,) = (each for each in found["costs"] if each["gpus"] == 1)
    again = planned(*options, *(f"{key}={value}" for key, value in more.items()))["cost"]["costs"][0]
    assert again["total"] == pytest.approx(change["total"])
    assert again["total"] < 0.7 * alone["total"]
    assert again["seconds"]["rollout"] == pytest.approx(alone["seconds"]["rollout"] / 2)


def test_cuda_graphs_are_advised_where_a_core_launches_longer_than_a_gpu_computes(planned):
    options = ["--fixed-seconds", "0", "--gpus", "1", "train.replay=always"]
    (change,) = (each for each in planned(*options)["cost"]["changes"] if each["set"] == {"model.cuda_graphs": True})
    again = planned(*options, "model.cuda_graphs=true")["cost"]["costs"][0]
    assert again["total"] == pytest.approx(change["total"])
    assert again["peak"] == change["peak"]
    assert again["seconds"]["rollout"] < 0.2 * planned(*options)["cost"]["costs"][0]["seconds"]["rollout"]


def test_as_many_groups_are_advised_as_keep_gpus_busy_where_their_calls_are_not_full_yet(planned):
    """A call of one row takes as long as one of four, so that seconds grow slower than groups at first."""
    found = planned("--gpus", "3", "--fixed-seconds", "0.3", "train.micro_batch=4")["cost"]
    (change,) = (each for each in found["changes"] if "train.groups" in each["set"])
    assert 0.68 < change["efficiency"] < 0.85


def test_rows_that_would_not_fit_the_gpu_are_not_advised(planned, monkeypatch):
    options = ["train.rollout_batch=2", "train.micro_batch=2", "--fixed-seconds", "0", "--gpus", "1"]
    assert any("train.micro_batch" in each["set"] for each in planned(*options)["cost"]["changes"])
    small = dataclasses.replace(gpu_types.GPUS["h100"], memory=0.5)
    monkeypatch.setitem(gpu_types.GPUS, "h100", small)
    assert not any("train.micro_batch" in each["set"] for each in planned(*options)["cost"]["changes"])


def test_a_language_model_is_priced(workplace, printed):
    (workplace / "digits.yaml").write_text("kind: mdlm\nmodel: {path: digits}\nrewards: [{use: solved}]\n")
    found = printed("plan", "digits.yaml", "--gpus", "2", "--format", "json")
    alone, counts = found["cost"]["costs"][0]["seconds"], found["model_evaluations"]
    assert alone["decode"] == 0
    assert min(alone["rollout"], alone["update"], alone["evaluate"]) > 0
    assert counts["update"] >= found["with_gradient"] > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpus", "8", "--gpu-type", "h1000"], "no numbers of 'h1000' are known here, did you mean 'h100'?"),
        (["--gpu-type", "h100"], "--gpu-type: it is for --gpus N, say that too"),
        (["--gpus-per-node", "4"], "--gpus-per-node: it is for --gpus N, say that too"),
        (["--gpus", "0"], "--gpus"),
        (["--gpu-memory", "24GB"], "Invalid value for '--gpu-memory': '24GB' is no number; give GiB, such as 23.6"),
        (["--gpu-memory", "0.5"], "Invalid value for '--gpu-memory': 0.5 is no size of a GPU; give GiB, such as 23.6"),
        (["--gpus", "8", "--fixed-seconds", "inf"], "--fixed-seconds: inf is not a number of seconds, take 20, say"),
        (["--gpus", "12", "run.sharding=hsdp"], "--gpus: hsdp needs as many on every machine, and 12 are not 8 on"),
    ],
)
def test_machines_that_are_none_are_refused(workplace, refused, options, said):
    assert said in " ".join(refused("plan", "tiny.yaml", *options).split())


def test_a_misspelt_run_or_config_is_answered_with_the_nearest(workplace, refused):
    (workplace / "runs" / "redder").mkdir(parents=True)
    (workplace / "runs" / "redder" / "config.yaml").touch()
    assert refused("plan", "runs/reder") == "runs/reder: there is no such config or run, did you mean 'runs/redder'?"
    assert refused("doctor", "tiny.ymal").endswith("no built-in model of that name, did you mean 'tiny.yaml'?")
    assert refused("doctor", "flux1-24g").endswith("no built-in model of that name, did you mean 'flux1-24gb'?")
