"""What leaves a run is the run's network, in every format that can hold it, for every kind of adapter."""

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import DiffusionPipeline
from fuzzing.loras import effective
from zoo import SPECIMENS

from flowgrpo.cli import main
from flowgrpo.flow.model import initial_lora
from flowgrpo.flow.outputs import comfyui_names
from flowgrpo.flow.outputs.export import write_weights
from flowgrpo.training.weights.lora_adapters import Adapter, Matrices
from flowgrpo.training.weights.trained_weights import Weights

PIPELINES = ("WanPipeline", "FluxPipeline", "StableDiffusion3Pipeline", "HunyuanVideoPipeline", "ZImagePipeline")


@pytest.fixture(scope="module")
def specimen(tmp_path_factory):
    """From a name to the folder of a tiny pipeline and its network."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("model"), SPECIMENS[name].build()
            made[name][1].save_pretrained(made[name][0])
        return made[name][0], made[name][1].transformer

    return get


def chosen(network):
    """Some attention layers, and the first layer outside of the blocks that is one for adapters."""
    outline = initial_lora.Outline.of(network)
    return [path for path in outline.layers if path.endswith(("to_q", "to_v", "to_out.0")) and ".0." in path]


def adapter(network, kind):
    """An adapter of a kind, nowhere zero."""
    generator = torch.Generator().manual_seed(0)
    outline = initial_lora.Outline.of(network)
    layers = {}
    for i, path in enumerate(chosen(network)):
        rank, alpha = (2 + i % 3, 3.0 + i % 2) if kind == "ranks and alphas" else (3, 4.5)
        biased = kind == "biases" and f"{path}.bias" in outline.parameters
        layers[path] = Matrices(
            down=torch.randn(rank, outline.layers[path][1], generator=generator),
            up=torch.randn(outline.layers[path][0], rank, generator=generator),
            bias=torch.randn(outline.layers[path][0], generator=generator) if biased else None,
            alpha=alpha,
        )
    if kind == "convolution":
        out, *rest = outline.layers["patch_embedding"]
        down = torch.randn(3, *rest, generator=generator)
        up = torch.randn(out, 3, *[1] * (len(rest) - 1), generator=generator)
        layers["patch_embedding"] = Matrices(down=down, up=up, bias=None, alpha=4.5)
    shifts = {"blocks.0.norm2.weight", "blocks.0.scale_shift_table"} if kind == "shifts" else set()
    shifts = {path: torch.randn(outline.parameters[path], generator=generator) for path in sorted(shifts)}
    return Adapter(layers, kind == "rslora", shifts)


KINDS = ("plain", "ranks and alphas", "rslora", "biases")
CASES = [(name, kind) for name in PIPELINES for kind in KINDS]
CASES += [("WanPipeline", "convolution"), ("WanPipeline", "shifts")]
PLAIN = {("WanPipeline", kind) for kind in (*KINDS, "convolution", "shifts")} | {("FluxPipeline", "biases")}


@pytest.mark.parametrize(
    ("name", "kind"), [pytest.param(*case, marks=() if case in PLAIN else pytest.mark.zoo) for case in CASES]
)
def test_every_export_gives_the_network_back(specimen, tmp_path, name, kind):
    folder, plain = specimen(name)
    network = copy.deepcopy(plain)
    weights = Weights({"transformer": network}, {"transformer": adapter(plain, kind)})
    expected = effective(network)
    files = comfyui_names.write(weights, tmp_path, "t")
    read = {"ComfyUI": lambda pipe: initial_lora.load_lora(pipe, folder, str(tmp_path / files[0]))}
    if kind != "shifts":  # which no file of diffusers can hold
        write_weights(SimpleNamespace(pipe=None), weights, tmp_path)
        read["diffusers"] = lambda pipe: initial_lora.load_lora(pipe, folder, str(tmp_path))
        read["diffusers' own loader"] = lambda pipe: pipe.load_lora_weights(str(tmp_path))
    for form, load in read.items():
        pipe = DiffusionPipeline.from_pretrained(folder)
        load(pipe)
        found = effective(pipe.transformer)
        assert found.keys() == expected.keys()
        for path, p in expected.items():
            torch.testing.assert_close(found[path].float(), p.float(), atol=1e-5, rtol=1e-5, msg=f"{form}: {path}")


def test_a_run_with_shifts_is_exported_for_comfyui_and_refused_for_diffusers(specimen, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder, plain = specimen("WanPipeline")
    from flowgrpo.training.weights import lora_adapters

    lora_adapters.save(tmp_path / "start.safetensors", {"transformer": adapter(plain, "shifts")})
    (tmp_path / "p.txt").write_text("a cat\na dog\n")
    (tmp_path / "r.py").write_text("def r(images, prompts):\n    return images.mean((1, 2, 3, 4))\n")
    call = "{num_inference_steps: 3, guidance_scale: 1.0, height: 16, width: 16, num_frames: 5, max_sequence_length: 8}"
    (tmp_path / "c.yaml").write_text(
        f"model: {{path: {folder}, lora: {{path: start.safetensors}}, call: {call}}}\n"
        "prompts: {train: p.txt, eval: p.txt}\nrewards: [{use: './r.py:r'}]\nalgorithm: {preset: flow_grpo}\n"
        "train: {iterations: 1, groups: 1, group_size: 2, updates: 1, learning_rate: 0.01}\n"
        "eval: {prompts: 1}\nrun: {name: t}\n"
    )
    off = "shifts transformer.blocks.0.norm2.weight, which cannot be switched off"
    assert main(["train", "c.yaml", "eval.adapter_steps=0:0.6"]) == 2
    assert f"eval.adapter_steps: the LoRA {off}" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    assert main(["plan", "c.yaml", "eval.adapter_steps=0:0.6"]) == 2
    assert f"eval.adapter_steps: the LoRA {off}" in capsys.readouterr().err
    monkeypatch.setattr("flowgrpo.flow.model.initial_lora.sharding.applies", lambda form: form != "none")
    base = ["algorithm.objective.kl.reference=base", "algorithm.objective.kl.beta=0.01", "run.sharding=fsdp2"]
    assert main(["train", "c.yaml", *base]) == 2
    assert f"kl.reference=base with run.sharding: the LoRA {off}" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert main(["train", "c.yaml"]) == 0
    (tmp_path / "start.safetensors").unlink()  # the run has its own copy
    capsys.readouterr()
    assert main(["export", "runs/t", "--out", "lora"]) == 2
    said = capsys.readouterr().err
    assert (
        "shifts 2 parameters, transformer.blocks.0.norm2.weight first, which no LoRA file of diffusers can hold" in said
    )
    assert not (tmp_path / "lora").exists()
    assert main(["export", "runs/t", "--out", "lora", "--comfyui"]) == 0
    assert sorted(path.name for path in (tmp_path / "lora").iterdir() if path.suffix == ".safetensors") == []
    card = (tmp_path / "lora" / "README.md").read_text()
    assert f"flowgrpo sample {folder} --adapter comfyui/t.safetensors --prompt 'a cat'" in card
    assert f"load_lora(pipe, '{folder}', 'comfyui/t.safetensors')" in card
    exported = next(path for path in (tmp_path / "lora").iterdir() if path.stem == "sample-0")
    asked = ["sample", str(folder), "--adapter", "lora/comfyui/t.safetensors", "--prompt", "a cat", "--out", "again"]
    assert main([*asked, "--adapter-steps", "0:0.6"]) == 2
    assert f"--adapter-steps: the LoRA {off}" in capsys.readouterr().err
    for out, place in enumerate(("lora/comfyui/t.safetensors", "lora", "runs/t")):
        asked[3], asked[-1] = place, f"again-{out}"
        assert main([*asked, *(part.replace(": ", "=") for part in call.strip("{}").split(", "))]) == 0
        again = next(path for path in Path(asked[-1]).iterdir() if path.stem == "0000")
        assert again.read_bytes() == exported.read_bytes()
