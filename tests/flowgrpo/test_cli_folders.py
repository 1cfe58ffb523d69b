"""Folders that hold no whole model: every command that takes one says the same sentence, and asks no hub."""

import shutil
import socket
from pathlib import Path

import broken
import pytest
import torch
import yaml
from huggingface_hub import constants
from runs import CALL
from safetensors.torch import load_file

import flowgrpo
from flowgrpo.cli import main
from flowgrpo.data.embedded import EMBEDDED
from flowgrpo.errors import InputError
from flowgrpo.mdlm.models.load import load_predictor

NETWORK = "transformer/diffusion_pytorch_model.safetensors"
ENCODER = "text_encoder_2/model.safetensors"
ALONE = "to train a network alone, save it into its pipeline: docs/guides/adapters.md, Full weights that you have"
POINTER = "is a Git LFS pointer, not the file itself; run git lfs pull in its folder"
FLOW = {
    "train": ["train", "tiny.yaml", "model.path=m", "run.name=u"],
    "plan": ["plan", "tiny.yaml", "model.path=m"],
    "doctor": ["doctor", "tiny.yaml", "model.path=m"],
    "doctor of a model": ["doctor", "m"],
    "sample": ["sample", "m", "--prompt", "a", "--out", "o"],
    "groups": ["sample", "tiny.yaml", "--groups", "g", "model.path=m", "algorithm.preset=rwr"],
    "export": ["export", "runs/t", "--out", "e"],
    "explain": ["explain", "runs/t"],
}
TEXT = {
    "train": ["train", "text.yaml", "run.name=u"],
    "plan": ["plan", "text.yaml"],
    "doctor": ["doctor", "m"],
    "sample": ["sample", "m", "--prompt", "1", "--out", "o"],
    "tracelock": ["mdlm", "tracelock", "m", "--prompts", "tasks:eval", "--out", "c"],
    "export": ["export", "runs/m", "--out", "e"],
}


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch):
    """Whoever asks a hub fails."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    real = socket.socket.connect

    def connect(self, address):
        return real(self, address) if self.family == socket.AF_UNIX else pytest.fail(f"{address} was asked")

    monkeypatch.setattr(socket.socket, "connect", connect)


def told(commands, capsys):
    """The sentences of commands that are refused, each once."""
    found = {}
    for name, words in commands.items():
        assert main(words) == 2, name
        said = capsys.readouterr().err
        assert said.count("\n") == 1, name
        found.setdefault(
            said.removeprefix("flowgrpo: ").removesuffix("\n").replace("--variant", "model.variant"), []
        ).append(name)
    return found


def aim(folder, run):
    """Let a finished run be of the model in the folder `m`."""
    written = yaml.safe_load((folder / run / "config.yaml").read_text())
    written["model"]["path"] = "m"
    (folder / run / "config.yaml").write_text(yaml.safe_dump(written))


@pytest.fixture
def flow(trained, tiny_model):
    """A workplace with a copy `m` of the tiny pipeline, of which its run is."""
    aim(trained, "runs/t")
    return broken.copied(tiny_model, trained / "m")


FLOW_FAULTS = {
    "a file of weights": (lambda m: _as_file(m), f"m is a file, not a model's folder; {ALONE}"),
    "a network alone": (
        lambda m: broken.keep_network(m),
        f"m is no diffusers pipeline, it has no model_index.json; {ALONE}",
    ),
    "another network alone": (lambda m: broken.keep_network(m, "vae"), f"it has no model_index.json; {ALONE}"),
    "fp16 only": (broken.name_variant, "m/text_encoder holds fp16 weights only, set model.variant=fp16"),
    "fp16 in one component": (
        lambda m: broken.name_variant(m / "vae"),
        "m/vae holds fp16 weights only, set model.variant=fp16",
    ),
    "ema only": (lambda m: broken.name_variant(m, "ema"), "holds ema weights only, set model.variant=ema"),
    "a pointer of weights": (lambda m: broken.point(m / NETWORK), f"m/{NETWORK} {POINTER}"),
    "a pointer of a tokenizer": (
        lambda m: broken.point(m / "tokenizer" / "tokenizer.json"),
        f"m/tokenizer/tokenizer.json {POINTER}",
    ),
    "a pointer of a config": (lambda m: broken.point(m / "vae" / "config.json"), f"m/vae/config.json {POINTER}"),
    "a pointer of the scheduler": (
        lambda m: broken.point(m / "scheduler" / "scheduler_config.json"),
        f"m/scheduler/scheduler_config.json {POINTER}",
    ),
    "a pointer of the index": (lambda m: broken.point(m / "model_index.json"), f"m/model_index.json {POINTER}"),
    "an empty folder": (broken.empty, "m is an empty folder"),
    "an empty component": (lambda m: broken.empty(m / "vae"), "m/vae is an empty folder"),
    "no component": (lambda m: shutil.rmtree(m / "vae"), "m has no folder vae, which its model_index.json names"),
    "no scheduler": (lambda m: shutil.rmtree(m / "scheduler"), "m has no folder scheduler, which its"),
    "no tokenizer": (lambda m: shutil.rmtree(m / "tokenizer_2"), "m has no folder tokenizer_2, which its"),
    "no weights": (lambda m: (m / NETWORK).unlink(), "m/transformer has no weights, neither safetensors nor .bin"),
    "no config": (lambda m: (m / "vae/config.json").unlink(), "m/vae has weights and no config.json"),
    "a lost shard": (
        lambda m: broken.shard(m / NETWORK)[1].unlink(),
        "m/transformer lacks diffusion_pytorch_model-00002-of-00003.safetensors, which "
        "diffusion_pytorch_model.safetensors.index.json names",
    ),
    "lost shards of a text encoder": (
        lambda m: [file.unlink() for file in broken.shard(m / ENCODER)[:2]],
        "m/text_encoder_2 lacks model-00001-of-00003.safetensors and 1 more, which model.safetensors.index.json names",
    ),
    "a cut file": (lambda m: broken.cut(m / NETWORK), f"m/{NETWORK} is cut off or damaged (Error while deserializing"),
    "an empty file": (lambda m: broken.cut(m / ENCODER, 0), f"m/{ENCODER} is cut off or damaged ("),
    "a cut pickle": (
        lambda m: broken.cut(broken.pickle(m / NETWORK)),
        "m/transformer/diffusion_pytorch_model.bin is cut",
    ),
    "sharded pickles of diffusers": (
        lambda m: broken.shard(m / NETWORK, form="bin"),
        "m/transformer has no weights",
    ),
    "weights under a name of transformers": (
        lambda m: (m / NETWORK).rename(m / "transformer" / "model.safetensors"),
        "m/transformer has no weights",
    ),
}


def _as_file(folder):
    content = (folder / NETWORK).read_bytes()
    shutil.rmtree(folder)
    folder.write_bytes(content)


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("fault", FLOW_FAULTS)
def test_a_pipeline_s_folder_is_refused_alike_by_every_command(flow, capsys, fault):
    spoil, said = FLOW_FAULTS[fault]
    spoil(flow)
    sentences = told(FLOW, capsys)
    assert len(sentences) == 1, sentences
    (sentence,) = sentences
    assert sentence.startswith("model.path: ")
    assert said in sentence
    assert not any(Path(name).exists() for name in ("o", "g", "e", "runs/u"))


def test_load_policy_says_the_same(flow):
    broken.name_variant(flow / "vae")
    with pytest.raises(InputError, match="^model.path: m/vae holds fp16 weights only, set model.variant=fp16$"):
        flowgrpo.load_policy("m")
    plain = flow / "vae" / "diffusion_pytorch_model.safetensors"
    plain.hardlink_to(plain.with_suffix(".fp16.safetensors"))
    with pytest.raises(InputError, match="^model.variant: m has no fp8 weights, there are fp16$"):
        flowgrpo.load_policy("m", variant="fp8")


@pytest.mark.parametrize("path", ["models/alone.safetensors", "models/alone.gguf", "models/alone.ckpt", "m.bin"])
@pytest.mark.usefixtures("unloaded")
def test_the_name_of_a_file_is_not_taken_for_a_hub_id(workplace, capsys, path):
    sentences = {f"model.path: there is no file {path}, and a file is not a model's folder; {ALONE}"}
    words = {"sample": ["sample", path, "--prompt", "a", "--out", "o"], "doctor": ["doctor", path]}
    words |= {name: [name, "tiny.yaml", f"model.path={path}"] for name in ("plan", "train")}
    assert told(words, capsys).keys() == sentences
    Path("models").mkdir()
    Path(path).write_bytes(b"GGUF")
    assert told(words, capsys).keys() == {f"model.path: {path} is a file, not a model's folder; {ALONE}"}


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """A finished run of the embedded language model."""
    folder = tmp_path_factory.mktemp("answered")
    (folder / "text.yaml").write_text(
        "kind: mdlm\nmodel: {path: digits, length: 8, lora: {rank: 2}}\n"
        "train: {iterations: 1, groups: 1, group_size: 2, updates: 1}\neval: {prompts: 1}\nrun: {name: m, patience: null}\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", "text.yaml"]) == 0
    return folder


@pytest.fixture
def text(answered, tmp_path, monkeypatch):
    """A workplace with a copy `m` of the embedded language model, of which its run is."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(answered / "runs", tmp_path / "runs")
    (tmp_path / "runs/m/environment.json").unlink()
    aim(tmp_path, "runs/m")
    (tmp_path / "text.yaml").write_text((answered / "text.yaml").read_text().replace("digits", "m"))
    return broken.copied(EMBEDDED["digits"].folder, tmp_path / "m")


TEXT_FAULTS = {
    "fp16 only": (broken.name_variant, "m holds fp16 weights only, set model.variant=fp16"),
    "bf16 shards only": (
        lambda m: broken.shard(m / "model.safetensors", 2, "bf16"),
        "m holds bf16 weights only, set model.variant=bf16",
    ),
    "a pointer of weights": (lambda m: broken.point(m / "model.safetensors"), f"m/model.safetensors {POINTER}"),
    "a pointer of a tokenizer": (lambda m: broken.point(m / "tokenizer.json"), f"m/tokenizer.json {POINTER}"),
    "a pointer of a config": (lambda m: broken.point(m / "config.json"), f"m/config.json {POINTER}"),
    "an empty folder": (broken.empty, "m is an empty folder"),
    "a lost shard": (
        lambda m: broken.shard(m / "model.safetensors")[2].unlink(),
        "m lacks model-00003-of-00003.safetensors, which model.safetensors.index.json names",
    ),
    "a lost shard of pickles": (
        lambda m: broken.shard(m / "model.safetensors", form="bin")[0].unlink(),
        "m lacks pytorch_model-00001-of-00003.bin, which pytorch_model.bin.index.json names",
    ),
    "a cut file": (lambda m: broken.cut(m / "model.safetensors"), "m/model.safetensors is cut off or damaged ("),
    "a cut pickle": (
        lambda m: broken.cut(broken.pickle(m / "model.safetensors")),
        "m/pytorch_model.bin is cut off or damaged (",
    ),
}


@pytest.mark.parametrize("fault", TEXT_FAULTS)
def test_a_language_model_s_folder_is_refused_alike_by_every_command(text, capsys, monkeypatch, fault):
    for place in ("architectures.load", "load.MaskPredictor"):
        monkeypatch.setattr(f"flowgrpo.mdlm.models.{place}", lambda *a, **k: pytest.fail("the model was loaded"))
    spoil, said = TEXT_FAULTS[fault]
    spoil(text)
    sentences = told(TEXT, capsys)
    assert len(sentences) == 1, sentences
    (sentence,) = sentences
    assert sentence.startswith("model.path: ")
    assert said in sentence


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda m: (m / "model.safetensors").unlink(), "m has no weights, neither safetensors nor .bin"),
        (lambda m: _as_network(m), f"m is a network of a pipeline alone, not a language model; {ALONE}"),
        (lambda m: _as_text_file(m), "m is a file, not a model's folder; a language model is the folder with"),
        (lambda m: _as_pipeline(m), "m is the folder of a pipeline; for a flow model set kind: flow"),
    ],
)
def test_a_config_for_texts_refuses_what_is_none_of_a_language_model(text, capsys, spoil, said):
    spoil(text)
    ((sentence, _),) = told({"train": TEXT["train"], "export": TEXT["export"]}, capsys).items()
    assert said in sentence


def _as_network(folder):
    broken.write(folder / "config.json", '{"_class_name": "SD3Transformer2DModel"}')


def _as_text_file(folder):
    shutil.rmtree(folder)
    folder.write_bytes(b"GGUF")


def _as_pipeline(folder):
    broken.write(folder / "model_index.json", '{"_class_name": "FluxPipeline"}')
    (folder / "config.json").unlink()


@pytest.mark.parametrize("spoil", [broken.name_variant, lambda m: broken.shard(m / "model.safetensors", 2, "fp16")])
def test_a_language_model_is_loaded_of_a_variant_s_files(text, spoil):
    content = {name: tensor.clone() for name, tensor in load_file(text / "model.safetensors").items()}
    spoil(text)
    loaded = load_predictor("m", variant="fp16")[0].model.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in content.items())
    with pytest.raises(InputError, match="^model.path: m holds fp16 weights only, set model.variant=fp16$"):
        load_predictor("m", variant="bf16")


def test_every_command_for_texts_takes_a_variant(text, capsys):
    broken.name_variant(text)
    option = ["--variant", "fp16"]
    for words in (
        [*TEXT["plan"], "model.variant=fp16"],
        [*TEXT["sample"], *option, "length=4"],
        [*TEXT["train"], "model.variant=fp16", "model.lora=null"],
        ["export", "runs/u", "--out", "full"],
    ):
        assert main(words) == 0, words
    assert sorted(file.name for file in Path("full").glob("model*")) == ["model.safetensors"]
    assert "variant" not in Path("full", "README.md").read_text()
    assert main(["sample", "full", "--prompt", "1", "--out", "again", "length=4"]) == 0


def test_every_command_for_pipelines_takes_a_variant(flow, tiny_model, capsys):
    broken.name_variant(flow)
    key, call = "model.variant=fp16", [f"{k}={v}" for k, v in CALL.items()]
    small = ["train.iterations=1", "train.updates=1", "eval={every: 1, prompts: 1, save: 1}"]
    for words in (
        [*FLOW["plan"], key],
        [*FLOW["sample"], "--variant", "fp16", *call],
        ["sample", str(tiny_model), "--prompt", "a", "--out", "plain", *call],
        [*FLOW["train"], key, *small],
        ["export", "runs/u", "--out", "lora"],
        [*FLOW["train"], key, *small, "model.lora=null", "run.name=w"],
        ["export", "runs/w", "--out", "full"],
        ["sample", "full", "--prompt", "a", "--out", "again", *call],
        [*FLOW["groups"], key, "train.group_size=2"],
    ):
        assert main(words) == 0, words
    assert Path("o/0000.png").read_bytes() == Path("plain/0000.png").read_bytes()
    assert not list(Path("full").rglob("*fp16*"))
    card = Path("lora", "README.md").read_text()
    assert "dtype=torch.float32, variant='fp16'" in card
    assert "--variant fp16" in card
    assert '"variant": "fp16"' in Path("lora", "sampler.json").read_text()
    assert "variant" not in Path("full", "README.md").read_text()
    capsys.readouterr()
    assert main(["train", "tiny.yaml", "model.path=m", "algorithm.preset=rwr", "data.groups=g", "run.name=v"]) == 2
    assert "holds fp16 weights only" in capsys.readouterr().err
