"""Runs that start from a LoRA or from an export: where they begin, what they are held to, and how they go on."""

import contextlib
import json
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from runs import metrics, weights
from safetensors.torch import load_file
from zoo import SPECIMENS

from flowgrpo import config
from flowgrpo.cli import main
from flowgrpo.flow.planning import memory_budget
from flowgrpo.training.lora import lora_files

KL = ["algorithm.objective.kl={form: velocity, beta: 0.5}"]
START = "model.lora={path: out}"


@pytest.fixture(scope="module")
def export(finished):
    """The export of a finished run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(finished)
        assert main(["export", "runs/t", "--out", "out"]) == 0
    return finished / "out"


@pytest.fixture
def exported(trained, export):
    """A workplace with a finished run and its export, `out`."""
    shutil.copytree(export, trained / "out")
    return trained


def test_a_lora_is_read_to_refuse_it_early_and_once_more_to_train_on_it(exported, monkeypatch):
    read, real = [], lora_files.read
    monkeypatch.setattr(lora_files, "read", lambda path: read.append(path) or real(path))
    small = ["train.iterations=1", "train.updates=1", "eval.every=9", "eval.prompts=1", "eval.save=0"]
    assert main(["train", "tiny.yaml", START, "run.name=u", *small]) == 0
    assert read == ["out", "out"]


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Gives a folder with a specimen's finished run, `runs/t`, and its export, `out`; made once of each."""

    @cache
    def folder(name):
        place, specimen = tmp_path_factory.mktemp("begun"), SPECIMENS[name]
        specimen.build().save_pretrained(place / "model")
        (place / "prompts.txt").write_text("\n".join(specimen.prompts) + "\n")
        written = {
            "model": {"path": "model", "call": specimen.call, "lora": {"rank": 2, "alpha": 5}},
            "prompts": {"train": "prompts.txt", "eval": "prompts.txt"},
            "rewards": [{"use": "motion" if name.startswith("Wan") else "jpeg_size"}],
            "algorithm": {"preset": "flow_grpo_fast", "tree": {"size": 2}},
            "train": {
                "iterations": 1,
                "groups": 2,
                "group_size": 2,
                "updates": 1,
                "micro_batch": 2,
                "learning_rate": 0.1,
            },
            "eval": {"every": 1, "prompts": 1, "save": 1},
            "run": {"name": "t"},
        }
        (place / "tiny.yaml").write_text(yaml.safe_dump(written))
        with contextlib.chdir(place):
            assert main(["train", "tiny.yaml"]) == 0
            assert main(["export", "runs/t", "--out", "out"]) == 0
        return place

    return folder


@pytest.mark.parametrize(
    ("name", "place"),
    [
        pytest.param("FluxPipeline", "out", marks=pytest.mark.zoo),
        pytest.param("StableDiffusion3Pipeline", "out", marks=pytest.mark.zoo),
        pytest.param("StableDiffusion3Pipeline", "runs/t", marks=pytest.mark.zoo),
        pytest.param("WanPipeline (2.2)", "runs/t", marks=pytest.mark.zoo),
        ("WanPipeline (2.2)", "out"),
        pytest.param("QwenImagePipeline", "out", marks=pytest.mark.zoo),
    ],
)
def test_a_run_from_an_export_or_a_run_begins_where_that_ended(begun, monkeypatch, name, place):
    monkeypatch.chdir(begun(name))
    run = f"from-{place.replace('/', '-')}"
    assert main(["train", "tiny.yaml", f"model.lora={{path: {place}}}", f"run.name={run}"]) == 0
    before, after = (Path("runs") / each / "samples" for each in ("t", run))
    ended, first = shown(before, 1), shown(after, 0)
    assert first == ended != shown(before, 0)
    assert len(first) == 1


def shown(samples, step):
    """The rewards and pictures of a step."""
    return [(line["rewards"], (samples / line["file"]).read_bytes()) for line in lines(samples, step)]


def lines(samples, step):
    written = [json.loads(line) for line in (samples / "manifest.jsonl").read_text().splitlines()]
    return [line for line in written if line["step"] == step]


@pytest.mark.parametrize(("reference", "apart"), [([], False), (["algorithm.objective.kl.reference=base"], True)])
def test_the_reference_is_the_start_unless_the_base_is_asked_for(exported, reference, apart):
    small = ["train.updates=1", "train.iterations=1", "eval.every=9", "eval.prompts=1", "eval.save=0"]
    assert main(["train", "tiny.yaml", START, *KL, "run.name=u", *small, *reference]) == 0
    (line,) = metrics(exported / "runs" / "u")
    assert (line["policy/kl"] > 0) is apart  # before the first step a run is where it started
    assert line["policy/max_abs_log_ratio"] == 0


def test_a_resumed_run_needs_no_file_and_is_exact(exported):
    small = ["train.updates=1", "eval.prompts=1", "eval.save=1"]
    options = ["train", "tiny.yaml", START, *KL, "run.checkpoint.keep=9", *small]
    assert main([*options, "run.name=whole"]) == 0
    whole = exported / "runs" / "whole"
    shutil.copytree(whole, exported / "runs" / "half")
    shutil.rmtree(exported / "runs" / "half" / "checkpoints" / "step-000002")
    (exported / "out").rename("elsewhere")
    assert main([*options, "run.name=half", "run.resume=true"]) == 0
    resumed = weights(exported / "runs" / "half", 2)
    assert resumed.keys() == weights(whole, 2).keys()
    assert all(torch.equal(tensor, resumed[key]) for key, tensor in weights(whole, 2).items())
    kl = [[line["policy/kl"] for line in metrics(exported / "runs" / each)] for each in ("whole", "half")]
    assert kl[0] == kl[1]
    assert kl[0][-1] > 0
    assert main(["export", "runs/half", "--out", "again"]) == 0
    assert "Training started from the LoRA `out`, which is in these weights." in Path("again/README.md").read_text()
    assert main(["gallery", "runs/half"]) == 0
    assert "LoRA from out" in (exported / "runs" / "half" / "gallery.html").read_text()


def test_a_resume_without_the_runs_own_copy_is_refused(exported, unloaded, refused):
    (exported / "runs" / "u").mkdir()
    written = yaml.safe_load(Path("runs/t/config.yaml").read_text())
    written["model"]["lora"], written["run"]["name"] = {"path": "out"}, "u"
    Path("runs/u/config.yaml").write_text(yaml.safe_dump(written))
    said = refused("train", "tiny.yaml", START, "run.name=u", "run.resume=true")
    assert said.startswith("runs/u: start.safetensors is missing, the copy of what")


def test_the_average_and_the_copy_start_there(exported):
    assert main(["train", "tiny.yaml", START, "run.name=u", "train.iterations=1", "train.learning_rate=1e-30"]) == 0
    ended, begun = weights(exported / "runs" / "t", 2), weights(exported / "runs" / "u", 1)
    copy = load_file(exported / "runs" / "u" / "start.safetensors")
    for key in [key for key in ended if key.startswith("average.")]:
        assert torch.equal(begun[key], ended[key])
        assert torch.equal(copy[key.removeprefix("average.").replace(".default", "")], ended[key])


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("lora.path=out", "lora.alpha: 4 is asked for, and model.lora.path has 9 at "),
        ("lora={path: nowhere}", "lora.path: there is no file or folder 'nowhere'"),
        ("lora={path: mine.py}", "lora.path: mine.py is no .safetensors file"),
        ("lora={path: cut.safetensors}", "lora.path: cut.safetensors cannot be read"),
        ("lora={path: several}", "lora.path: several holds several files, name one of a.safetensors, b"),
        ("lora={path: runs/full}", "lora.path: the run runs/full trained every weight; export it"),
        ("lora={path: runs}", "lora.path: runs holds no .safetensors file and is no run's folder"),
        ("lora={path: whole}", "lora.path: whole is a whole pipeline, not a LoRA; give it as the model"),
        ("lora.rank=null", "lora.rank: null takes it from model.lora.path, but that is not set"),
        ("lora={path: none/of-them}", "lora.path: none/of-them could not be loaded from the model hub"),
    ],
)
def test_what_is_wrong_is_one_sentence_before_the_model(workplace, unloaded, refused, option, said):
    (workplace / "cut.safetensors").write_bytes(b"\x40\0\0\0\0\0\0\0{")
    for file in ("several/a.safetensors", "several/b.safetensors", "runs/full/config.yaml", "whole/model_index.json"):
        (workplace / file).parent.mkdir(parents=True, exist_ok=True)
        (workplace / file).write_text("model: {path: shapes, lora: null}")
    lora(workplace / "out", alpha=9)
    assert refused("train", "tiny.yaml", f"model.{option}").startswith(f"model.{said}")


def lora(folder, alpha):
    """An adapter of rank 2 of one layer of the tiny model, as peft saves it."""
    import peft
    import tiny

    options = peft.LoraConfig(r=2, lora_alpha=alpha, target_modules=["transformer_blocks.0.attn.to_q"])
    peft.get_peft_model(tiny.sd3().transformer, options).save_pretrained(folder)


@pytest.mark.usefixtures("few_objects", "kept_trials")
def test_a_plan_and_the_budget_of_a_gpu_count_the_kept_start(workplace, printed):
    lora(workplace / "out", alpha=4)
    start = 4 * 2 * 2 * 16  # bytes of rank 2 of one layer of 16 x 16
    plain, held, base = (
        printed("plan", "tiny.yaml", START, *options, "model.text_encoders=keep", "--format", "json")["memory"]
        for options in (["algorithm.objective.kl={beta: 0}"], KL, [*KL, "algorithm.objective.kl.reference=base"])
    )
    assert held["gpu_bytes"] - plain["gpu_bytes"] == start
    assert base["gpu_bytes"] == plain["gpu_bytes"]
    trained = []
    for reference in ("fixed", "base"):
        settings = config.load("tiny.yaml", [START, *KL, f"algorithm.objective.kl.reference={reference}"])
        found = memory_budget.fit(settings, 8 << 30)
        trained.append({phase["phase"]: phase["trained"] for phase in found["phases"] if phase.get("trained")})
    assert trained[0]
    assert {name: size - start for name, size in trained[0].items()} == trained[1]


@pytest.mark.zoo
def test_full_weights_go_on_from_a_full_export(workplace):
    full = ["model.lora=null", "train.learning_rate=0.001"]
    small = ["train.iterations=1", "train.updates=1", "eval.prompts=1", "eval.save=1"]
    assert main(["train", "tiny.yaml", *full, *small]) == 0
    assert main(["export", "runs/t", "--out", "out"]) == 0
    for run, options in (("u", full), ("v", [])):  # trained whole again, or with new adapters
        assert main(["train", "tiny.yaml", *options, *small, "model.path=out", f"run.name={run}"]) == 0
        before, after = (workplace / "runs" / each / "samples" for each in ("t", run))
        assert [line["rewards"] for line in lines(before, 1)] == [line["rewards"] for line in lines(after, 0)]


def test_a_network_alone_is_saved_into_its_pipeline_as_the_page_says(tmp_path, monkeypatch, printed, refused):
    monkeypatch.chdir(tmp_path)
    pipe = SPECIMENS["FluxPipeline"].build()
    pipe.save_pretrained("model")
    with torch.no_grad():
        pipe.transformer.x_embedder.weight.mul_(2)
    pipe.transformer.save_pretrained("alone")
    Path("alone/diffusion_pytorch_model.safetensors").rename("tuned.safetensors")
    (tmp_path / "flux.yaml").write_text("model: {path: tuned, call: {num_inference_steps: 4}}\nrewards: [jpeg_size]\n")
    of_a_network, of_a_file = "it has no model_index.json; to train", "is a file, not a model's"
    for path, said in (("alone", of_a_network), ("tuned.safetensors", of_a_file)):
        told = refused("plan", "flux.yaml", f"model.path={path}")
        assert said in told
        assert "docs/guides/adapters.md, Full weights that you have" in told
    page = (Path(__file__).parents[4] / "docs/guides/adapters.md").read_text()
    code = page.split("## Full weights that you have")[1].split("```python\n")[1].split("```")[0]
    exec(code.replace("black-forest-labs/FLUX.1-dev", "model"), {})
    tuned = load_file("tuned/transformer/diffusion_pytorch_model.safetensors")
    assert torch.equal(tuned["x_embedder.weight"], pipe.transformer.x_embedder.weight.to(torch.bfloat16))
    printed("plan", "flux.yaml")
