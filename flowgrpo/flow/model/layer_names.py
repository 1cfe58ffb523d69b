"""What ComfyUI, kohya and the makers of a model call its layers: a table for each network, beside the names of diffusers.

ComfyUI names the layers of some networks as diffusers does, behind a prefix. Of others it keeps the released names, where
one matrix may hold what diffusers has in parts, such as q, k and v. Files for ComfyUI are written by these tables, and LoRA
files of others are read by them.

Which names ComfyUI reads was looked up in its `comfy/lora.py`; what was tried with it: docs/export.md.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field

Table = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Names:
    """The names that others have for the layers of a network of diffusers.

    Attributes:
        prefix: what ComfyUI has before each name.
        same: a pattern of the layers whose names are those of diffusers.
        table: names of other layers, each with the layers of diffusers that it is made of, in order; `*` is a number.
        parameters: the same of parameters that are of no linear or convolutional layer.
        swapped: names of the table whose outputs, where they are a shift and a scale, are in the other order.
        spellings: parts of names, each with how other programs spell it.
        makers: the released names, where ComfyUI reads those of diffusers, but not their biases.
        kohya: ComfyUI reads names with `_` for each dot, and `lora_down`, `lora_up`, as kohya's scripts write them.
    """

    prefix: str = "diffusion_model."
    same: str | None = None
    _: KW_ONLY
    table: Table = field(default_factory=dict)
    parameters: Table = field(default_factory=dict)
    swapped: tuple[str, ...] = ()
    spellings: tuple[tuple[str, str], ...] = ()
    makers: Names | None = None
    kohya: bool = False

    def find(self, layer: str) -> tuple[str, tuple[str, ...]] | None:
        """The name of a layer, with all layers of diffusers that the name is made of; None if it has none."""
        if self.same is not None and re.match(self.same, layer):
            return layer, (layer,)
        return _find(self.table, layer)

    def find_parameter(self, path: str) -> str | None:
        """The name of a parameter: of its layer, and weight or bias, or one of its own; None if it has none."""
        layer, _, own = path.rpartition(".")
        found = _find(self.parameters, path)
        if found is not None:
            return found[0]
        whole = self.find(layer)
        return f"{whole[0]}.{own}" if whole is not None and len(whole[1]) == 1 else None

    def read_layers(self, layers: Collection[str]) -> dict[str, tuple[str, ...]]:
        """The layers of a network by all names that they may have elsewhere; each with what the name is made of."""
        own = {} if self.makers is None else self.makers.read_layers(layers)
        return own | self._spelled(self.table, layers)

    def read_parameters(self, paths: Collection[str]) -> dict[str, tuple[str, ...]]:
        """The same of parameters that are of no layer."""
        own = {} if self.makers is None else self.makers.read_parameters(paths)
        return own | self._spelled(self.parameters, paths)

    def _spelled(self, table: Table, paths: Collection[str]) -> dict[str, tuple[str, ...]]:
        found = dict(filter(None, (_find(table, path) for path in paths)))
        for own, other in self.spellings:
            found |= {name.replace(own, other): parts for name, parts in found.items() if own in name}
        return found

    def swaps(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the two halves of the outputs of a layer, whose weight has a shape (out, in), are in the other order."""
        own = re.sub(r"\.\d+\.", ".*.", name, count=1) in self.swapped and shape[0] == 2 * shape[1]
        return own or (self.makers is not None and self.makers.swaps(name, shape))

    def keys(self, name: str) -> Iterator[str]:
        """Yield the keys of a layer's down and up matrices, of its alpha and of its bias."""
        whole = self.prefix + (name.replace(".", "_") if self.kohya else name)
        matrices = ("lora_down", "lora_up") if self.kohya else ("lora_A", "lora_B")
        yield from (f"{whole}.{end}" for end in (*(f"{each}.weight" for each in matrices), "alpha", "diff_b"))


def _find(table: Table, path: str) -> tuple[str, tuple[str, ...]] | None:
    """The name in a table whose parts a path is one of, and all its parts, with the path's number in them."""
    pattern, numbers = re.sub(r"\.\d+\.", ".*.", path, count=1), re.findall(r"\.(\d+)\.", path)[:1]
    for name, parts in table.items():
        for part in parts:
            if part == path or (part == pattern and numbers):
                number = numbers[0] if part != path else "*"
                return name.replace("*", number), tuple(each.replace("*", number) for each in parts)
    return None


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


def _norms(names: str, layers: str) -> dict[str, tuple[str, ...]]:
    """Names of the scales of the norms of queries and keys."""
    inner = {"query": "q", "key": "k"}
    return {f"{names}.{word}_norm.scale": (layers.format(letter),) for word, letter in inner.items()}


def _both(names: str, layers: str) -> dict[str, tuple[str, ...]]:
    """Names of a norm's weight and bias."""
    return {f"{names}.{end}": (f"{layers}.{end}",) for end in ("weight", "bias")}


def _wan_parameters(names: str, layers: str) -> dict[str, tuple[str, ...]]:
    found = {f"{names}.modulation": (f"{layers}.scale_shift_table",), **_both(f"{names}.norm3", f"{layers}.norm2")}
    for attention, own in (("self_attn", "attn1"), ("cross_attn", "attn2")):
        for norm in ("norm_q", "norm_k"):
            found[f"{names}.{attention}.{norm}.weight"] = (f"{layers}.{own}.{norm}.weight",)
    return found | {f"{names}.cross_attn.norm_k_img.weight": (f"{layers}.attn2.norm_added_k.weight",)}


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
        "patch_embedding": ("patch_embedding",),
        "vace_patch_embedding": ("vace_patch_embedding",),
        "head.head": ("proj_out",),
    },
    parameters={
        **_wan_parameters("blocks.*", "blocks.*"),
        **_wan_parameters("vace_blocks.*", "vace_blocks.*"),
        **_both("img_emb.proj.0", "condition_embedder.image_embedder.norm1"),
        **_both("img_emb.proj.4", "condition_embedder.image_embedder.norm2"),
        "head.modulation": ("scale_shift_table",),
    },
)

SINGLE = "single_transformer_blocks.*"
STREAMS_NORMS = {
    **_norms("double_blocks.*.img_attn.norm", "transformer_blocks.*.attn.norm_{}.weight"),
    **_norms("double_blocks.*.txt_attn.norm", "transformer_blocks.*.attn.norm_added_{}.weight"),
    **_norms("single_blocks.*.norm", f"{SINGLE}.attn.norm_{{}}.weight"),
}
STREAMS = {  # of FLUX.1 and HunyuanVideo
    **_streams("double_blocks.*.{}_attn.qkv", "double_blocks.*.{}_attn.proj", "transformer_blocks.*.attn"),
    "double_blocks.*.img_mlp.0": ("transformer_blocks.*.ff.net.0.proj",),
    "double_blocks.*.img_mlp.2": ("transformer_blocks.*.ff.net.2",),
    "double_blocks.*.txt_mlp.0": ("transformer_blocks.*.ff_context.net.0.proj",),
    "double_blocks.*.txt_mlp.2": ("transformer_blocks.*.ff_context.net.2",),
    "double_blocks.*.img_mod.lin": ("transformer_blocks.*.norm1.linear",),
    "double_blocks.*.txt_mod.lin": ("transformer_blocks.*.norm1_context.linear",),
    "single_blocks.*.linear1": (*(f"{SINGLE}.attn.to_{part}" for part in "qkv"), f"{SINGLE}.proj_mlp"),
    "single_blocks.*.linear2": (f"{SINGLE}.proj_out",),
    "single_blocks.*.modulation.lin": (f"{SINGLE}.norm.linear",),
    "final_layer.linear": ("proj_out",),
    "final_layer.adaLN_modulation.1": ("norm_out.linear",),
    **_embedder("time_in", "in_layer", "out_layer", "time_text_embed.timestep_embedder"),
    **_embedder("vector_in", "in_layer", "out_layer", "time_text_embed.text_embedder"),
    **_embedder("guidance_in", "in_layer", "out_layer", "time_text_embed.guidance_embedder"),
}
SWAPPED = ("final_layer.adaLN_modulation.1",)  # scale and shift

FLUX = Names(
    table={**STREAMS, "img_in": ("x_embedder",), "txt_in": ("context_embedder",)},
    parameters=STREAMS_NORMS,
    swapped=SWAPPED,
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
        "single_blocks.*.linear1": (f"{SINGLE}.attn.to_qkv_mlp_proj",),
        "single_blocks.*.linear2": (f"{SINGLE}.attn.to_out",),
        "img_in": ("x_embedder",),
        "txt_in": ("context_embedder",),
        **_embedder("time_in", "in_layer", "out_layer", "time_guidance_embed.timestep_embedder"),
        **_embedder("guidance_in", "in_layer", "out_layer", "time_guidance_embed.guidance_embedder"),
        "single_stream_modulation.lin": ("single_stream_modulation.linear",),
        "double_stream_modulation_img.lin": ("double_stream_modulation_img.linear",),
        "double_stream_modulation_txt.lin": ("double_stream_modulation_txt.linear",),
        "final_layer.linear": ("proj_out",),
    },
    parameters=STREAMS_NORMS,
)

REFINER = "context_embedder.token_refiner.refiner_blocks.*"
TOKENS = "txt_in.individual_token_refiner.blocks.*"
HUNYUAN_VIDEO = Names(
    table={
        **STREAMS,
        "img_in.proj": ("x_embedder.proj",),
        f"{TOKENS}.self_attn.qkv": tuple(f"{REFINER}.attn.to_{part}" for part in "qkv"),
        f"{TOKENS}.self_attn.proj": (f"{REFINER}.attn.to_out.0",),
        f"{TOKENS}.mlp.0": (f"{REFINER}.ff.net.0.proj",),
        f"{TOKENS}.mlp.2": (f"{REFINER}.ff.net.2",),
        f"{TOKENS}.adaLN_modulation.1": (f"{REFINER}.norm_out.linear",),
        "txt_in.input_embedder": ("context_embedder.proj_in",),
        **_embedder("txt_in.t_embedder", "in_layer", "out_layer", "context_embedder.time_text_embed.timestep_embedder"),
        **_embedder("txt_in.c_embedder", "in_layer", "out_layer", "context_embedder.time_text_embed.text_embedder"),
    },
    parameters=STREAMS_NORMS,
    swapped=SWAPPED,
    spellings=(
        *(("_attn.qkv", "_attn_qkv"), ("_attn.proj", "_attn_proj"), ("mlp.0", "mlp.fc1"), ("mlp.2", "mlp.fc2")),
        *(("_mod.lin", "_mod.linear"), ("modulation.lin", "modulation.linear")),
    ),
)

_JOINT = {"x_block": ("to_{}", "to_out.0", "ff"), "context_block": ("add_{}_proj", "to_add_out", "ff_context")}
SD3 = Names(
    table={
        name: tuple(f"transformer_blocks.*.{layer}" for layer in layers)
        for block, (inner, output, feed_forward) in _JOINT.items()
        for name, layers in {
            f"joint_blocks.*.{block}.attn.qkv": tuple(f"attn.{inner.format(letter)}" for letter in "qkv"),
            f"joint_blocks.*.{block}.attn.proj": (f"attn.{output}",),
            f"joint_blocks.*.{block}.mlp.fc1": (f"{feed_forward}.net.0.proj",),
            f"joint_blocks.*.{block}.mlp.fc2": (f"{feed_forward}.net.2",),
        }.items()
    }
    | {
        "joint_blocks.*.x_block.attn2.qkv": tuple(f"transformer_blocks.*.attn2.to_{letter}" for letter in "qkv"),
        "joint_blocks.*.x_block.attn2.proj": ("transformer_blocks.*.attn2.to_out.0",),
        "joint_blocks.*.x_block.adaLN_modulation.1": ("transformer_blocks.*.norm1.linear",),
        "joint_blocks.*.context_block.adaLN_modulation.1": ("transformer_blocks.*.norm1_context.linear",),
        "context_embedder": ("context_embedder",),
        "x_embedder.proj": ("pos_embed.proj",),
        **_embedder("t_embedder.mlp", "0", "2", "time_text_embed.timestep_embedder"),
        **_embedder("y_embedder.mlp", "0", "2", "time_text_embed.text_embedder"),
        "final_layer.linear": ("proj_out",),
        "final_layer.adaLN_modulation.1": ("norm_out.linear",),
    },
    swapped=(
        *SWAPPED,
        "joint_blocks.*.context_block.adaLN_modulation.1",
    ),  # in the last block, which ends the text's stream
)

LTX = Names(
    same=r"transformer_blocks\.|caption_projection\.|proj_out$|audio_proj_out$",
    table={
        "patchify_proj": ("proj_in",),
        "audio_patchify_proj": ("audio_proj_in",),
        "adaln_single.linear": ("time_embed.linear",),
        "audio_adaln_single.linear": ("audio_time_embed.linear",),
        **{
            f"{name}.emb.timestep_embedder.linear_{i}": (f"{layer}.emb.timestep_embedder.linear_{i}",)
            for name, layer in (("adaln_single", "time_embed"), ("audio_adaln_single", "audio_time_embed"))
            for i in (1, 2)
        },
    },
)

Z_IMAGE = Names(
    table={
        name: layers
        for blocks in ("layers.*", "noise_refiner.*", "context_refiner.*")
        for name, layers in {
            f"{blocks}.attention.qkv": tuple(f"{blocks}.attention.to_{letter}" for letter in "qkv"),
            f"{blocks}.attention.out": (f"{blocks}.attention.to_out.0",),
        }.items()
    }
    | {
        "x_embedder": ("all_x_embedder.2-1",),
        "final_layer.linear": ("all_final_layer.2-1.linear",),
        "final_layer.adaLN_modulation.1": ("all_final_layer.2-1.adaLN_modulation.1",),
    },
)

_KREA2 = {
    **{f"attn.w{letter}": f"attn.to_{letter}" for letter in "qkv"},
    **{"attn.wo": "attn.to_out.0", "attn.gate": "attn.to_gate"},
    **{f"mlp.{name}": f"ff.{name}" for name in ("gate", "up", "down")},
}
KREA2 = Names(
    table={
        f"{names}.*.{name}": (f"{layers}.*.{layer}",)
        for names, layers in (
            ("blocks", "transformer_blocks"),
            ("txtfusion.layerwise_blocks", "text_fusion.layerwise_blocks"),
            ("txtfusion.refiner_blocks", "text_fusion.refiner_blocks"),
        )
        for name, layer in _KREA2.items()
    }
    | {
        "first": ("img_in",),
        "last.linear": ("final_layer.linear",),
        **_embedder("tmlp", "0", "2", "time_embed"),
        "tproj.1": ("time_mod_proj",),
        **_embedder("txtmlp", "1", "3", "txt_in"),
        "txtfusion.projector": ("text_fusion.projector",),
    },
)

ACE_STEP = Names(
    table={
        f"decoder.layers.*.{attention}.{name}_proj": (f"layers.*.{attention}.{layer}",)
        for attention in ("self_attn", "cross_attn")
        for name, layer in {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0"}.items()
    },
    spellings=(("decoder.layers", "layers"),),
)

BLOCKS = r"(single_)?transformer_blocks\."
NAMES = {
    "AceStepTransformer1DModel": ACE_STEP,
    "AuraFlowTransformer2DModel": Names("transformer.", r"(single_transformer|joint_transformer)_blocks\."),
    "ChromaTransformer2DModel": Names("transformer.", BLOCKS, makers=FLUX),
    "ErnieImageTransformer2DModel": Names(same=r"."),
    "Flux2Transformer2DModel": FLUX2,
    "FluxTransformer2DModel": Names("transformer.", r".", makers=FLUX),
    "HunyuanVideo15Transformer3DModel": HUNYUAN_VIDEO,
    "HunyuanVideoTransformer3DModel": HUNYUAN_VIDEO,
    "Kandinsky5Transformer3DModel": Names(same=r"."),
    "Krea2Transformer2DModel": KREA2,
    "LTX2VideoTransformer3DModel": LTX,
    "LTXVideoTransformer3DModel": LTX,
    "QwenImageTransformer2DModel": Names(same=r"."),
    "SD3Transformer2DModel": Names("transformer.", r".", makers=SD3),
    "SkyReelsV2Transformer3DModel": WAN,
    "WanTransformer3DModel": WAN,
    "WanVACETransformer3DModel": WAN,
    "ZImageTransformer2DModel": Names(
        same=r"(layers|noise_refiner|context_refiner)\.|all_final_layer\.2-1\.", makers=Z_IMAGE
    ),
}
