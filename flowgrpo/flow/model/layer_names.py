"""Tables, one per network class, from the layer names of ComfyUI, kohya and a model's makers to those of diffusers.

ComfyUI names the layers of some networks as diffusers does, with a prefix. For other networks it keeps the names of the
model's release, where one matrix may hold several of diffusers' layers (q, k and v). The tables are used to write files
for ComfyUI and to read LoRA files from other programs. The names that ComfyUI reads come from its `comfy/lora.py`;
docs/research/comfyui.md lists what was tried with it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from itertools import chain, zip_longest

Table = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Names:
    """Names that other programs give to the layers of a diffusers network.

    Attributes:
        prefix: prefix of each name in ComfyUI.
        same: regular expression of the layers that keep diffusers' names.
        table: other name -> its layers in diffusers, in order; `*` stands for a number.
        parameters: the same for parameters outside linear and convolutional layers.
        swapped: names in `table` whose outputs, a shift and a scale, have the opposite order in diffusers.
        spellings: (part of a name, another program's spelling of it).
        makers: the names of the model's release; given if ComfyUI reads diffusers' names, but not their biases.
        kohya: whether ComfyUI reads kohya's names, with `_` for each dot, `lora_down` and `lora_up`.
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
        """Return the other name of a diffusers layer, and all diffusers layers with this name; None if it has none."""
        if self.same is not None and re.match(self.same, layer):
            return layer, (layer,)
        return _find(self.table, layer)

    def find_parameter(self, path: str) -> str | None:
        """Return the other name of a diffusers parameter, from `parameters` or its layer's name; None if it has none."""
        layer, _, last = path.rpartition(".")
        parameter = _find(self.parameters, path)
        if parameter is not None:
            return parameter[0]
        whole = self.find(layer)
        return f"{whole[0]}.{last}" if whole is not None and len(whole[1]) == 1 else None

    def read_layers(self, layers: Collection[str]) -> dict[str, tuple[str, ...]]:
        """Return all other names of a network's layers: name -> its layers in diffusers."""
        names = {} if self.makers is None else self.makers.read_layers(layers)
        return names | self._spell(self.table, layers)

    def read_parameters(self, paths: Collection[str]) -> dict[str, tuple[str, ...]]:
        """Return all other names of parameters outside linear and convolutional layers: name -> diffusers' parameters."""
        names = {} if self.makers is None else self.makers.read_parameters(paths)
        return names | self._spell(self.parameters, paths)

    def _spell(self, table: Table, paths: Collection[str]) -> dict[str, tuple[str, ...]]:
        names = dict(filter(None, (_find(table, path) for path in paths)))
        for ours, other in self.spellings:
            names |= {name.replace(ours, other): parts for name, parts in names.items() if ours in name}
        return names

    def swaps(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether the halves of a layer's outputs have the opposite order; `shape` (out, in) is its weight's."""
        here = re.sub(r"\.\d+\.", ".*.", name, count=1) in self.swapped and shape[0] == 2 * shape[1]
        return here or (self.makers is not None and self.makers.swaps(name, shape))

    def keys(self, name: str) -> Iterator[str]:
        """Yield ComfyUI's keys of a layer's down and up matrices, alpha and bias."""
        whole = self.prefix + (name.replace(".", "_") if self.kohya else name)
        matrices = ("lora_down", "lora_up") if self.kohya else ("lora_A", "lora_B")
        yield from (f"{whole}.{end}" for end in (*(f"{each}.weight" for each in matrices), "alpha", "diff_b"))


def _find(table: Table, path: str) -> tuple[str, tuple[str, ...]] | None:
    """Return the name whose layers include `path`, and these layers, with `*` replaced by the number in `path`."""
    pattern, numbers = re.sub(r"\.\d+\.", ".*.", path, count=1), re.findall(r"\.(\d+)\.", path)[:1]
    for name, parts in table.items():
        for part in parts:
            if part == path or (part == pattern and numbers):
                number = numbers[0] if part != path else "*"
                return name.replace("*", number), tuple(each.replace("*", number) for each in parts)
    return None


def _table(text: str) -> Table:
    """Parse lines `name=layers`; the i-th choices of all `{}` in a line make an entry, `[]` and `+` join its layers."""
    table: dict[str, tuple[str, ...]] = {}
    for line in text.split():
        fixed, choices = re.split(r"\{.*?\}", line), re.findall(r"\{(.*?)\}", line)
        for chosen in zip(*(choice.split(",") for choice in choices), strict=True) if choices else [()]:
            whole = "".join(chain.from_iterable(zip_longest(fixed, chosen, fillvalue="")))
            name, layers = whole.split("=")
            table[name] = tuple(chain.from_iterable(map(_expand_list, layers.split("+"))))
    return table


def _expand_list(layer: str) -> list[str]:
    if "[" not in layer:
        return [layer]
    before, choices, after = re.split(r"[\[\]]", layer)
    return [f"{before}{choice}{after}" for choice in choices.split(",")]


_WAN_BLOCKS = """
blocks.*.self_attn.{q,k,v,o}=blocks.*.attn1.{to_q,to_k,to_v,to_out.0}
blocks.*.cross_attn.{q,k,v,o}=blocks.*.attn2.{to_q,to_k,to_v,to_out.0}
blocks.*.cross_attn.{k,v}_img=blocks.*.attn2.add_{k,v}_proj
blocks.*.ffn.{0,2}=blocks.*.ffn.net.{0.proj,2}
"""
_WAN_PARAMETERS = """
blocks.*.modulation=blocks.*.scale_shift_table
blocks.*.norm3.{weight,bias}=blocks.*.norm2.{weight,bias}
blocks.*.self_attn.norm_{q,k}.weight=blocks.*.attn1.norm_{q,k}.weight
blocks.*.cross_attn.norm_{q,k}.weight=blocks.*.attn2.norm_{q,k}.weight
blocks.*.cross_attn.norm_k_img.weight=blocks.*.attn2.norm_added_k.weight
"""
WAN = Names(
    table=_table(
        _WAN_BLOCKS
        + _WAN_BLOCKS.replace("blocks", "vace_blocks")
        + """
vace_blocks.*.{before_proj,after_proj}=vace_blocks.*.{proj_in,proj_out}
text_embedding.{0,2}=condition_embedder.text_embedder.linear_{1,2}
time_embedding.{0,2}=condition_embedder.time_embedder.linear_{1,2}
time_projection.1=condition_embedder.time_proj
img_emb.proj.{1,3}=condition_embedder.image_embedder.ff.net.{0.proj,2}
patch_embedding=patch_embedding
vace_patch_embedding=vace_patch_embedding
head.head=proj_out
"""
    ),
    parameters=_table(
        _WAN_PARAMETERS
        + _WAN_PARAMETERS.replace("blocks", "vace_blocks")
        + """
img_emb.proj.0.{weight,bias}=condition_embedder.image_embedder.norm1.{weight,bias}
img_emb.proj.4.{weight,bias}=condition_embedder.image_embedder.norm2.{weight,bias}
head.modulation=scale_shift_table
"""
    ),
)

_ATTENTION = """
double_blocks.*.img_attn.qkv=transformer_blocks.*.attn.to_[q,k,v]
double_blocks.*.txt_attn.qkv=transformer_blocks.*.attn.add_[q,k,v]_proj
double_blocks.*.{img,txt}_attn.proj=transformer_blocks.*.attn.{to_out.0,to_add_out}
"""
STREAMS_NORMS = _table("""
double_blocks.*.img_attn.norm.{query,key}_norm.scale=transformer_blocks.*.attn.norm_{q,k}.weight
double_blocks.*.txt_attn.norm.{query,key}_norm.scale=transformer_blocks.*.attn.norm_added_{q,k}.weight
single_blocks.*.norm.{query,key}_norm.scale=single_transformer_blocks.*.attn.norm_{q,k}.weight
""")
_STREAMS = (
    _ATTENTION
    + """
double_blocks.*.img_mlp.{0,2}=transformer_blocks.*.ff.net.{0.proj,2}
double_blocks.*.txt_mlp.{0,2}=transformer_blocks.*.ff_context.net.{0.proj,2}
double_blocks.*.{img,txt}_mod.lin=transformer_blocks.*.{norm1,norm1_context}.linear
single_blocks.*.linear1=single_transformer_blocks.*.attn.to_[q,k,v]+single_transformer_blocks.*.proj_mlp
single_blocks.*.linear2=single_transformer_blocks.*.proj_out
single_blocks.*.modulation.lin=single_transformer_blocks.*.norm.linear
final_layer.{linear,adaLN_modulation.1}={proj_out,norm_out.linear}
time_in.{in_layer,out_layer}=time_text_embed.timestep_embedder.linear_{1,2}
vector_in.{in_layer,out_layer}=time_text_embed.text_embedder.linear_{1,2}
guidance_in.{in_layer,out_layer}=time_text_embed.guidance_embedder.linear_{1,2}
"""
)  # FLUX.1 and HunyuanVideo
SWAPPED = ("final_layer.adaLN_modulation.1",)  # its outputs are scale and shift

FLUX = Names(
    table=_table(_STREAMS + "{img_in,txt_in}={x_embedder,context_embedder}"), parameters=STREAMS_NORMS, swapped=SWAPPED
)

FLUX2 = Names(
    prefix="lora_unet_",
    kohya=True,
    table=_table(
        _ATTENTION
        + """
double_blocks.*.img_mlp.{0,2}=transformer_blocks.*.ff.{linear_in,linear_out}
double_blocks.*.txt_mlp.{0,2}=transformer_blocks.*.ff_context.{linear_in,linear_out}
single_blocks.*.{linear1,linear2}=single_transformer_blocks.*.attn.{to_qkv_mlp_proj,to_out}
{img_in,txt_in}={x_embedder,context_embedder}
time_in.{in_layer,out_layer}=time_guidance_embed.timestep_embedder.linear_{1,2}
guidance_in.{in_layer,out_layer}=time_guidance_embed.guidance_embedder.linear_{1,2}
single_stream_modulation.lin=single_stream_modulation.linear
double_stream_modulation_{img,txt}.lin=double_stream_modulation_{img,txt}.linear
final_layer.linear=proj_out
"""
    ),
    parameters=STREAMS_NORMS,
)

HUNYUAN_VIDEO = Names(
    table=_table(
        _STREAMS
        + """
img_in.proj=x_embedder.proj
txt_in.individual_token_refiner.blocks.*.self_attn.qkv=context_embedder.token_refiner.refiner_blocks.*.attn.to_[q,k,v]
txt_in.individual_token_refiner.blocks.*.self_attn.proj=context_embedder.token_refiner.refiner_blocks.*.attn.to_out.0
txt_in.individual_token_refiner.blocks.*.mlp.{0,2}=context_embedder.token_refiner.refiner_blocks.*.ff.net.{0.proj,2}
txt_in.individual_token_refiner.blocks.*.adaLN_modulation.1=context_embedder.token_refiner.refiner_blocks.*.norm_out.linear
txt_in.input_embedder=context_embedder.proj_in
txt_in.t_embedder.{in_layer,out_layer}=context_embedder.time_text_embed.timestep_embedder.linear_{1,2}
txt_in.c_embedder.{in_layer,out_layer}=context_embedder.time_text_embed.text_embedder.linear_{1,2}
"""
    ),
    parameters=STREAMS_NORMS,
    swapped=SWAPPED,
    spellings=(
        *(("_attn.qkv", "_attn_qkv"), ("_attn.proj", "_attn_proj"), ("mlp.0", "mlp.fc1"), ("mlp.2", "mlp.fc2")),
        *(("_mod.lin", "_mod.linear"), ("modulation.lin", "modulation.linear")),
    ),
)

SD3 = Names(
    table=_table("""
joint_blocks.*.x_block.attn.qkv=transformer_blocks.*.attn.to_[q,k,v]
joint_blocks.*.x_block.attn.proj=transformer_blocks.*.attn.to_out.0
joint_blocks.*.x_block.mlp.{fc1,fc2}=transformer_blocks.*.ff.net.{0.proj,2}
joint_blocks.*.context_block.attn.qkv=transformer_blocks.*.attn.add_[q,k,v]_proj
joint_blocks.*.context_block.attn.proj=transformer_blocks.*.attn.to_add_out
joint_blocks.*.context_block.mlp.{fc1,fc2}=transformer_blocks.*.ff_context.net.{0.proj,2}
joint_blocks.*.x_block.attn2.qkv=transformer_blocks.*.attn2.to_[q,k,v]
joint_blocks.*.x_block.attn2.proj=transformer_blocks.*.attn2.to_out.0
joint_blocks.*.{x_block,context_block}.adaLN_modulation.1=transformer_blocks.*.{norm1,norm1_context}.linear
context_embedder=context_embedder
x_embedder.proj=pos_embed.proj
t_embedder.mlp.{0,2}=time_text_embed.timestep_embedder.linear_{1,2}
y_embedder.mlp.{0,2}=time_text_embed.text_embedder.linear_{1,2}
final_layer.{linear,adaLN_modulation.1}={proj_out,norm_out.linear}
"""),
    swapped=(
        *SWAPPED,
        "joint_blocks.*.context_block.adaLN_modulation.1",
    ),  # the last block, which ends the text stream
)

LTX = Names(
    same=r"transformer_blocks\.|caption_projection\.|proj_out$|audio_proj_out$",
    table=_table("""
{patchify_proj,audio_patchify_proj}={proj_in,audio_proj_in}
{adaln_single,audio_adaln_single}.linear={time_embed,audio_time_embed}.linear
adaln_single.emb.timestep_embedder.linear_{1,2}=time_embed.emb.timestep_embedder.linear_{1,2}
audio_adaln_single.emb.timestep_embedder.linear_{1,2}=audio_time_embed.emb.timestep_embedder.linear_{1,2}
"""),
)

Z_IMAGE = Names(
    table=_table("""
{layers,noise_refiner,context_refiner}.*.attention.qkv={layers,noise_refiner,context_refiner}.*.attention.to_[q,k,v]
{layers,noise_refiner,context_refiner}.*.attention.out={layers,noise_refiner,context_refiner}.*.attention.to_out.0
x_embedder=all_x_embedder.2-1
final_layer.{linear,adaLN_modulation.1}=all_final_layer.2-1.{linear,adaLN_modulation.1}
""")
)

_KREA2_BLOCKS = """
NAMES.*.attn.{wq,wk,wv,wo,gate}=LAYERS.*.attn.{to_q,to_k,to_v,to_out.0,to_gate}
NAMES.*.mlp.{gate,up,down}=LAYERS.*.ff.{gate,up,down}
"""
KREA2 = Names(
    table=_table(
        "".join(
            _KREA2_BLOCKS.replace("NAMES", names).replace("LAYERS", layers)
            for names, layers in (
                ("blocks", "transformer_blocks"),
                ("txtfusion.layerwise_blocks", "text_fusion.layerwise_blocks"),
                ("txtfusion.refiner_blocks", "text_fusion.refiner_blocks"),
            )
        )
        + """
first=img_in
last.linear=final_layer.linear
tmlp.{0,2}=time_embed.linear_{1,2}
tproj.1=time_mod_proj
txtmlp.{1,3}=txt_in.linear_{1,2}
txtfusion.projector=text_fusion.projector
"""
    )
)

ACE_STEP = Names(
    table=_table("""
decoder.layers.*.self_attn.{q,k,v,o}_proj=layers.*.self_attn.{to_q,to_k,to_v,to_out.0}
decoder.layers.*.cross_attn.{q,k,v,o}_proj=layers.*.cross_attn.{to_q,to_k,to_v,to_out.0}
"""),
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
