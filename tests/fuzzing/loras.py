"""LoRA files in the layouts of six programs, with further tensors or fewer: each is refused, or acts with all that it holds.

A case is a pipeline, a layout, and what is put into the file beside the adapters of its first block, or taken out. Names of
the makers and of ComfyUI come from `comfyui_names.json`, which was recorded from ComfyUI and from diffusers' own converters.
"""

import copy
import json
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from zoo import SPECIMENS

from flowgrpo.errors import InputError
from flowgrpo.flow.config import Model
from flowgrpo.flow.model import initial_lora
from fuzzing.runner import Summary, run

DATA = Path(__file__).parents[1] / "data"
RECORDED = json.loads((DATA / "comfyui_names.json").read_text())
PIPELINES = {  # with a shift of the first block each: the makers' key, and the parameter of diffusers
    "WanPipeline": [
        ("blocks.0.norm3.diff", "blocks.0.norm2.weight"),
        ("blocks.0.norm3.diff_b", "blocks.0.norm2.bias"),
        ("blocks.0.diff_m", "blocks.0.scale_shift_table"),
        ("blocks.0.self_attn.norm_q.diff", "blocks.0.attn1.norm_q.weight"),
        ("head.modulation.diff", "scale_shift_table"),
        ("patch_embedding.diff", "patch_embedding.weight"),
        ("time_embedding.0.diff_b", "condition_embedder.time_embedder.linear_1.bias"),
    ],
    "FluxPipeline": [
        ("double_blocks.0.img_attn.norm.key_norm.scale.diff", "transformer_blocks.0.attn.norm_k.weight"),
        ("single_blocks.0.norm.query_norm.scale.diff", "single_transformer_blocks.0.attn.norm_q.weight"),
        ("time_in.in_layer.diff_b", "time_text_embed.timestep_embedder.linear_1.bias"),
        ("img_in.diff", "x_embedder.weight"),
    ],
    "HunyuanVideoPipeline": [
        ("double_blocks.0.txt_attn.norm.key_norm.scale.diff", "transformer_blocks.0.attn.norm_added_k.weight")
    ],
    "StableDiffusion3Pipeline": [("context_embedder.diff", "context_embedder.weight")],
}
LAYOUTS = {  # before a name, whether it is diffusers', whether it is flat, and the endings of its two matrices
    "diffusers": ("transformer.", True, False, ("lora_A.weight", "lora_B.weight")),
    "peft": ("base_model.model.", True, False, ("lora_A.weight", "lora_B.weight")),
    "ComfyUI": ("diffusion_model.", False, False, ("lora_down.weight", "lora_up.weight")),
    "kohya": ("lora_unet_", False, True, ("lora_down.weight", "lora_up.weight")),
    "DiffSynth": ("", False, False, ("lora_A.default.weight", "lora_B.default.weight")),
    "OneTrainer": ("lora_transformer_", True, True, ("lora_down.weight", "lora_up.weight")),
}
CHANGES = (
    "shift", "shift", "bias", "bias", "zeros", "unknown shift", "unknown layer", "alpha", "half", "middle", "twice",
    "shape",
)  # fmt: skip
RANK, ALPHA = 3, 4.5
State = dict[str, torch.Tensor]
Case = tuple[str, str, tuple[tuple[str, int], ...]]


@cache
def network(name: str) -> tuple[str, torch.nn.Module]:
    pipe, folder = SPECIMENS[name].build(), tempfile.mkdtemp()
    pipe.save_pretrained(folder)
    return folder, pipe.transformer


@cache
def layers(name: str) -> dict[str, list[str]]:
    """Map the makers' names of the first block's layers to those of diffusers."""
    found = network(name)[1]
    every = RECORDED[type(found).__name__]["layers"]
    there = dict(found.named_modules())
    return {key: parts for key, parts in every.items() if all(part in there for part in parts) and "block" in key}


class File:
    """Build a file, and note what it adds to the parameters of the network."""

    def __init__(self, name: str, layout: str, seed: int):
        self.folder, self.network = network(name)
        self.prefix, self.own, self.flat, self.ends = LAYOUTS[layout]
        self.generator = torch.Generator().manual_seed(seed)
        self.tensors: State = {}
        self.effect: State = {}
        self.names: list[tuple[str, list[str]]] = []  # of the adapters, in this layout
        self.known = True  # whether the network has a place for all of it

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def named(self, name: str) -> str:
        return self.prefix + (name.replace(".", "_") if self.flat else name)

    def add(self, path: str, change: torch.Tensor) -> None:
        self.effect[path] = self.effect.get(path, 0) + change

    def put_layer(self, name: str, parts: list[str]) -> None:
        sizes = [self.network.get_submodule(part).weight.shape for part in parts]
        down, up = self.random(RANK, sizes[0][1]), self.random(sum(size[0] for size in sizes), RANK)
        self.names.append((name, parts))
        self.tensors |= {f"{self.named(name)}.{end}": half for end, half in zip(self.ends, (down, up), strict=True)}
        self.tensors[f"{self.named(name)}.alpha"] = torch.tensor(ALPHA)
        changes = (ALPHA / RANK * up @ down).split([size[0] for size in sizes])
        for part, change in zip(parts, changes, strict=True):
            self.add(f"{part}.weight", change)

    def change(self, change: str, number: int, shifts: list[tuple[str, str]]) -> None:
        makers, path = shifts[number % len(shifts)]
        name, parts = self.names[number % len(self.names)]
        unknown = self.named(f"blocks.0.no{number}")
        shape = self.network.get_parameter(path).shape
        self.known &= change in ("shift", "shape", "bias", "zeros")
        match change:
            case "shift" | "shape":
                key = self._key(makers, path)
                value = self.random(*shape) if change == "shift" else self.random(*shape, 1)
                if key not in self.tensors:
                    self.tensors[key] = value
                    self.add(path, value if change == "shift" else 0)
                    self.known &= change == "shift"
            case "bias":
                layers = [self.network.get_submodule(part) for part in parts]
                key = f"{self.named(name)}.diff_b"
                if key in self.tensors or any(layer.bias is None for layer in layers):
                    return
                value = self.random(sum(len(layer.bias) for layer in layers))
                self.tensors[key] = value
                for part, own in zip(parts, value.split([len(layer.bias) for layer in layers]), strict=True):
                    self.add(f"{part}.bias", own)
            case "zeros" | "unknown shift":
                self.tensors[f"{unknown}.diff"] = torch.zeros(2) if change == "zeros" else self.random(2)
            case "unknown layer":
                self.tensors |= {f"{unknown}.{end}": self.random(RANK, RANK) for end in self.ends}
            case "alpha":
                self.tensors[f"{self.named('blocks.0.none')}.alpha"] = torch.tensor(2.0)
            case "half":
                self.tensors.pop(f"{self.named(name)}.{self.ends[number % 2]}", None)
            case "middle":
                self.tensors[f"{self.named(name)}.lora_mid.weight"] = self.random(RANK, RANK)
            case "twice":
                other = "lora_down.weight" if self.ends[0] == "lora_A.weight" else "lora_A.weight"
                self.tensors[f"{self.named(name)}.{other}"] = self.random(RANK, RANK)

    def _key(self, makers: str, path: str) -> str:
        """Return a shift's key in this layout."""
        layer, _, own = path.rpartition(".")
        if self.own:
            end = {"weight": "diff", "bias": "diff_b"}.get(own)
            return f"{self.named(layer)}.{end}" if end else f"{self.named(path)}.diff"
        name, _, end = makers.rpartition(".")
        return f"{self.named(name)}.{end}"


def cases() -> st.SearchStrategy[Case]:
    """Draw every pipeline in every layout, with up to three changes."""
    change = st.tuples(st.sampled_from(CHANGES), st.integers(0, 20))
    every = st.lists(change, max_size=3).map(tuple)
    return st.tuples(st.sampled_from(sorted(PIPELINES)), st.sampled_from(sorted(LAYOUTS)), every)


def written(case: Case) -> File:
    name, layout, changes = case
    file = File(name, layout, len(changes))
    for own, parts in layers(name).items():
        for each in [(part, [part]) for part in parts] if file.own else [(own, parts)]:
            file.put_layer(*each)
    for change, number in changes:
        file.change(change, number, PIPELINES[name])
    return file


def effective(found: torch.nn.Module) -> State:
    """Return a network's parameters with its adapters merged, by their names without adapters."""
    state = {path.replace(".base_layer", ""): p.detach().clone() for path, p in found.named_parameters()}
    state = {path: p for path, p in state.items() if ".lora_" not in path}
    for path, layer in found.named_modules():
        if isinstance(layer, LoraLayer):
            (own,) = layer.lora_B  # the name that its loader has given to the adapter
            state[f"{path}.weight"] += layer.get_delta_weight(own)
            if (bias := layer.lora_B[own].bias) is not None:
                state[f"{path}.bias"] += bias * layer.scaling[own]
    return state


def attempt(case: Case) -> str | None:
    """Start from a file; fail where the network is not what the file says."""
    file = written(case)
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(place) / ("adapter_model.safetensors" if case[1] == "peft" else "lora.safetensors")
        save_file({key: tensor.contiguous() for key, tensor in file.tensors.items()}, path)
        options: dict[str, Any] = {"peft_type": "LORA", "lora_alpha": ALPHA}
        (Path(place) / "adapter_config.json").write_text(json.dumps(options))
        model = Model.model_validate({"path": file.folder, "lora": {"path": str(path)}})
        try:
            adapters = initial_lora.adapters(model)
        except InputError as error:
            return str(error).replace(place, "")
    assert file.known, "it was read with a tensor that it has no place for"
    found = copy.deepcopy(file.network)
    adapters["transformer"].inject(found)
    for name, p in effective(found).items():
        expected = file.network.get_parameter(name) + file.effect.get(name, 0)
        torch.testing.assert_close(p, expected, atol=1e-4, rtol=1e-4, msg=lambda said, at=name: f"{at}: {said}")
    return None


def fuzz(seed: int, count: int) -> Summary:
    for name in PIPELINES:  # before a case is timed
        network(name)
    return run("loras", cases(), attempt, seed, count)
