"""A LoRA under the names that ComfyUI's loader knows, for each network whose names it is known to read.

ComfyUI adds `alpha / rank * up @ down` to a layer of its own model, and takes 1 for `alpha / rank` where a file has no
`alpha`; so each layer's is written. It names the layers in one of two ways. Of some networks it reads the names of
diffusers itself, behind a prefix. Others it keeps as they were released, where one matrix may hold what diffusers has in
parts, such as q, k and v; the LoRAs of the parts become one, whose rank is the sum of theirs, each in a block of its own.

Which names ComfyUI reads was looked up in its `comfy/lora.py`; what was tried with it: docs/export.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from flowgrpo.errors import InputError
from flowgrpo.flow.config import Config
from flowgrpo.flow.pipeline.loading import index_of
from flowgrpo.training.weights import AVERAGE, OTHER_POLICIES, Weights

FOLDER = "comfyui"  # of an export; diffusers looks for a LoRA at its top only
DOWN, UP = ".lora_A.weight", ".lora_B.weight"  # peft's endings


@dataclass(frozen=True)
class Names:
    """The names that ComfyUI has for the layers of a network of diffusers.

    Attributes:
        prefix: what stands before each name.
        same: a pattern of the layers whose names are those of diffusers.
        table: names of other layers, each with the layers of diffusers that it is made of, in order; `*` is a number.
        kohya: names with `_` for each dot, and `lora_down`, `lora_up`, as kohya's scripts write them.
    """

    prefix: str = "diffusion_model."
    same: str | None = None
    table: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    kohya: bool = False

    def find(self, layer: str) -> tuple[str, tuple[str, ...]] | None:
        """The name of a layer, with all layers of diffusers that the name is made of; None if it has none."""
        if self.same is not None and re.match(self.same, layer):
            return layer, (layer,)
        pattern, numbers = re.sub(r"\.\d+\.", ".*.", layer, count=1), re.findall(r"\.(\d+)\.", layer)[:1]
        for name, parts in self.table.items():
            for part in parts:
                if part == layer or (part == pattern and numbers):
                    number = numbers[0] if part != layer else "*"
                    return name.replace("*", number), tuple(each.replace("*", number) for each in parts)
        return None

    def keys(self, name: str) -> tuple[str, str, str]:
        """The keys of a layer's down and up matrices and of its alpha."""
        if self.kohya:
            whole = self.prefix + name.replace(".", "_")
            return f"{whole}.lora_down.weight", f"{whole}.lora_up.weight", f"{whole}.alpha"
        whole = self.prefix + name
        return f"{whole}.lora_A.weight", f"{whole}.lora_B.weight", f"{whole}.alpha"


def _attention(names: str, layers: str) -> dict[str, tuple[str, ...]]:
    """Names of four projections, `q k v o` below one name, for `to_q` and so on below another."""
    inner = ("to_q", "to_k", "to_v", "to_out.0")
    return {f"{names}.{name}": (f"{layers}.{layer}",) for name, layer in zip("qkvo", inner, strict=True)}


def _streams(fused: str, output: str, layers: str) -> dict[str, tuple[str, ...]]:
    """Names of the projections of an image and a text stream that attend to each other, q, k and v in one."""
    own, added = ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")
    return {
        fused.format("img"): tuple(f"{layers}.{part}" for part in own),
        fused.format("txt"): tuple(f"{layers}.{part}" for part in added),
        output.format("img"): (f"{layers}.to_out.0",),
        output.format("txt"): (f"{layers}.to_add_out",),
    }


def _wan(names: str, layers: str) -> dict[str, tuple[str, ...]]:
    return {
        **_attention(f"{names}.self_attn", f"{layers}.attn1"),
        **_attention(f"{names}.cross_attn", f"{layers}.attn2"),
        f"{names}.cross_attn.k_img": (f"{layers}.attn2.add_k_proj",),
        f"{names}.cross_attn.v_img": (f"{layers}.attn2.add_v_proj",),
        f"{names}.ffn.0": (f"{layers}.ffn.net.0.proj",),
        f"{names}.ffn.2": (f"{layers}.ffn.net.2",),
    }


def _embedder(name: str, first: str, second: str, layers: str) -> dict[str, tuple[str, ...]]:
    return {f"{name}.{first}": (f"{layers}.linear_1",), f"{name}.{second}": (f"{layers}.linear_2",)}


WAN = Names(
    table={
        **_wan("blocks.*", "blocks.*"),
        **_wan("vace_blocks.*", "vace_blocks.*"),
        "vace_blocks.*.before_proj": ("vace_blocks.*.proj_in",),
        "vace_blocks.*.after_proj": ("vace_blocks.*.proj_out",),
        **_embedder("text_embedding", "0", "2", "condition_embedder.text_embedder"),
        **_embedder("time_embedding", "0", "2", "condition_embedder.time_embedder"),
        "time_projection.1": ("condition_embedder.time_proj",),
        "img_emb.proj.1": ("condition_embedder.image_embedder.ff.net.0.proj",),
        "img_emb.proj.3": ("condition_embedder.image_embedder.ff.net.2",),
        "head.head": ("proj_out",),
    }
)

FLUX2 = Names(
    prefix="lora_unet_",
    kohya=True,
    table={
        **_streams("double_blocks.*.{}_attn.qkv", "double_blocks.*.{}_attn.proj", "transformer_blocks.*.attn"),
        "double_blocks.*.img_mlp.0": ("transformer_blocks.*.ff.linear_in",),
        "double_blocks.*.img_mlp.2": ("transformer_blocks.*.ff.linear_out",),
        "double_blocks.*.txt_mlp.0": ("transformer_blocks.*.ff_context.linear_in",),
        "double_blocks.*.txt_mlp.2": ("transformer_blocks.*.ff_context.linear_out",),
        "single_blocks.*.linear1": ("single_transformer_blocks.*.attn.to_qkv_mlp_proj",),
        "single_blocks.*.linear2": ("single_transformer_blocks.*.attn.to_out",),
        "img_in": ("x_embedder",),
        "txt_in": ("context_embedder",),
        **_embedder("time_in", "in_layer", "out_layer", "time_guidance_embed.timestep_embedder"),
        **_embedder("guidance_in", "in_layer", "out_layer", "time_guidance_embed.guidance_embedder"),
        "single_stream_modulation.lin": ("single_stream_modulation.linear",),
        "double_stream_modulation_img.lin": ("double_stream_modulation_img.linear",),
        "double_stream_modulation_txt.lin": ("double_stream_modulation_txt.linear",),
        "final_layer.linear": ("proj_out",),
    },
)

REFINER = "context_embedder.token_refiner.refiner_blocks.*"
HUNYUAN_VIDEO = Names(
    table={
        **_streams("double_blocks.*.{}_attn.qkv", "double_blocks.*.{}_attn.proj", "transformer_blocks.*.attn"),
        "double_blocks.*.img_mlp.0": ("transformer_blocks.*.ff.net.0.proj",),
        "double_blocks.*.img_mlp.2": ("transformer_blocks.*.ff.net.2",),
        "double_blocks.*.txt_mlp.0": ("transformer_blocks.*.ff_context.net.0.proj",),
        "double_blocks.*.txt_mlp.2": ("transformer_blocks.*.ff_context.net.2",),
        "double_blocks.*.img_mod.lin": ("transformer_blocks.*.norm1.linear",),
        "double_blocks.*.txt_mod.lin": ("transformer_blocks.*.norm1_context.linear",),
        "single_blocks.*.linear1": (
            *(f"single_transformer_blocks.*.attn.to_{part}" for part in "qkv"),
            "single_transformer_blocks.*.proj_mlp",
        ),
        "single_blocks.*.linear2": ("single_transformer_blocks.*.proj_out",),
        "single_blocks.*.modulation.lin": ("single_transformer_blocks.*.norm.linear",),
        "txt_in.individual_token_refiner.blocks.*.self_attn.qkv": tuple(f"{REFINER}.attn.to_{p}" for p in "qkv"),
        "txt_in.individual_token_refiner.blocks.*.self_attn.proj": (f"{REFINER}.attn.to_out.0",),
        "txt_in.individual_token_refiner.blocks.*.mlp.0": (f"{REFINER}.ff.net.0.proj",),
        "txt_in.individual_token_refiner.blocks.*.mlp.2": (f"{REFINER}.ff.net.2",),
        "final_layer.linear": ("proj_out",),
    }
)

LTX = Names(
    same=r"transformer_blocks\.|caption_projection\.|proj_out$|audio_proj_out$",
    table={
        "patchify_proj": ("proj_in",),
        "audio_patchify_proj": ("audio_proj_in",),
        "adaln_single.linear": ("time_embed.linear",),
        "audio_adaln_single.linear": ("audio_time_embed.linear",),
    },
)

BLOCKS = r"(single_)?transformer_blocks\."
NAMES = {
    "AuraFlowTransformer2DModel": Names("transformer.", r"(single_transformer|joint_transformer)_blocks\."),
    "ChromaTransformer2DModel": Names("transformer.", BLOCKS),
    "Flux2Transformer2DModel": FLUX2,
    "FluxTransformer2DModel": Names("transformer.", r"."),
    "HunyuanVideo15Transformer3DModel": HUNYUAN_VIDEO,
    "HunyuanVideoTransformer3DModel": HUNYUAN_VIDEO,
    "LTX2VideoTransformer3DModel": LTX,
    "LTXVideoTransformer3DModel": LTX,
    "QwenImageTransformer2DModel": Names(same=r"."),
    "SD3Transformer2DModel": Names("transformer.", r"."),
    "SkyReelsV2Transformer3DModel": WAN,
    "WanTransformer3DModel": WAN,
    "WanVACETransformer3DModel": WAN,
    "ZImageTransformer2DModel": Names(same=r"(layers|noise_refiner|context_refiner)\.|all_final_layer\.2-1\."),
}


def check(settings: Config, checkpoint: Path) -> None:
    """Refuse, before a model is loaded, to name layers that ComfyUI is not known to read.

    Raises:
        InputError: the run trained full weights, or a network or a layer has no name in ComfyUI.
    """
    if settings.model.lora is None:
        raise InputError("--comfyui: this run trained full weights (model.lora: null); ComfyUI's names are for a LoRA")
    index = index_of(settings.model.path)
    with safe_open(checkpoint / "weights.safetensors", "pt") as file:
        layers = {key.partition(".lora_")[0] for key in file.keys() if ".lora_A." in key}  # noqa: SIM118
    for path in sorted(layers):
        if path.startswith((AVERAGE, *OTHER_POLICIES)):
            continue
        network, _, layer = path.partition(".")
        _found(index[network][1], layer)


def names_of(kind: str) -> Names:
    """The names of a network by its class.

    Raises:
        InputError: they are not known.
    """
    if kind not in NAMES:
        known = ", ".join(sorted(name.removesuffix("Model") for name in NAMES))
        raise InputError(
            f"--comfyui: which names ComfyUI has for the layers of {kind} is not known, only of {known}; export without "
            "it, diffusers reads that"
        )
    return NAMES[kind]


def _found(kind: str, layer: str) -> tuple[str, tuple[str, ...]]:
    found = names_of(kind).find(layer)
    if found is None:
        raise InputError(
            f"--comfyui: the layer {layer} of {kind} has no name in ComfyUI that is known; train with "
            "model.lora.targets: auto, or export without it"
        )
    return found


def write(weights: Weights, out: Path, name: str) -> list[str]:
    """Write the LoRA of each network to a file of its own, float32, into a folder of the export.

    Args:
        weights: with the tensors that are to be written in place.
        name: of the file; of Wan 2.2, which has two networks, `-high_noise` and `-low_noise` are appended.

    Returns:
        the files, relative to `out`.
    """
    (out / FOLDER).mkdir()
    endings = [""] if len(weights.modules) == 1 else ["-high_noise", "-low_noise"]
    files = []
    for (module, network), ending in zip(weights.modules.items(), endings, strict=True):
        files.append(f"{FOLDER}/{name}{ending}.safetensors")
        save_file(renamed(network, weights.adapter_state(module)), out / files[-1], {"format": "pt"})
    return files


def renamed(network: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a network's adapter under ComfyUI's names, with an alpha for each layer.

    Args:
        state: under peft's names, `LAYER.lora_A.weight` (rank, in) and `LAYER.lora_B.weight` (out, rank).
    """
    kind = type(network).__name__
    names, layers = names_of(kind), [key.removesuffix(DOWN) for key in state if key.endswith(DOWN)]
    written = {}
    for name, parts in dict(_found(kind, layer) for layer in layers).items():
        trained = [network.get_submodule(part) for part in parts if part in layers]
        scale = trained[0].scaling["default"]  # alpha / rank
        rank, ups = 0, []
        for part in parts:
            layer, own = network.get_submodule(part), part in layers
            up = state[part + UP].float().cpu() if own else torch.zeros(layer.out_features, 0)
            ups.append(up * (layer.scaling["default"] / scale) if own else up)
            rank += up.shape[1]
        down, up, alpha = names.keys(name)
        written[down] = torch.cat([state[part + DOWN].float().cpu() for part in parts if part in layers]).contiguous()
        written[up] = torch.block_diag(*ups).contiguous()
        written[alpha] = torch.tensor(float(scale * rank))
    return written
