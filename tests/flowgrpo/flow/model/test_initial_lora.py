"""LoRA files of diffusers, peft, ComfyUI and kohya become the adapters that a flow model's training starts from."""

import copy
import shutil
from types import SimpleNamespace

import diffusers
import peft
import pytest
import torch
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from zoo import SPECIMENS

from flowgrpo.errors import InputError
from flowgrpo.flow.config import Model
from flowgrpo.flow.model import initial_lora
from flowgrpo.training.weights.trained_weights import Weights

NAMES = ("FluxPipeline", "StableDiffusion3Pipeline", "WanPipeline", "QwenImagePipeline")
TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A function of a specimen's name: its folder, and its pipeline with a random LoRA of rank 3 and alpha 5.

    Also its network without the LoRA, of which tests take copies.
    """
    made = {}

    def build(name):
        if name not in made:
            folder = tmp_path_factory.mktemp("model")
            pipe = SPECIMENS[name].build()
            pipe.save_pretrained(folder)
            plain = copy.deepcopy(pipe.transformer)
            pipe.transformer.add_adapter(config())
            made[name] = SimpleNamespace(folder=folder, pipe=pipe, network=pipe.transformer, plain=plain)
        return made[name]

    return build


def config(**options):
    torch.manual_seed(1)
    given = {"r": 3, "lora_alpha": 5, "target_modules": TARGETS, "init_lora_weights": False}
    return peft.LoraConfig(**{**given, **options})


def matrices(network):
    """What each layer's adapter adds to its weight, by the layer's path."""
    layers = {path: m for path, m in network.named_modules() if isinstance(m, peft.tuners.lora.Linear)}
    assert layers
    return {path: layer.get_delta_weight("default").detach() for path, layer in layers.items()}


def started(made, file, **lora):
    """The network of a specimen with the adapters of a file, as a run puts them there."""
    model = Model(path=str(made.folder), lora={"path": str(file), **lora})
    fresh = copy.deepcopy(made.plain)
    weights = Weights({"transformer": fresh}, initial_lora.adapters(model))
    assert {p.dtype for p in weights.parameters} == {torch.float32}
    return fresh


def assert_same(found, expected, exact=True):
    assert found.keys() == expected.keys()
    for path, change in expected.items():
        torch.testing.assert_close(found[path], change, **({"rtol": 0, "atol": 0} if exact else {}))


@pytest.mark.parametrize("with_header", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_diffusers(trained, tmp_path, name, with_header):
    made = trained(name)
    header = made.network.peft_config["default"].to_dict() if with_header else None
    header = header and {key: sorted(v) if isinstance(v, set) else v for key, v in header.items()}
    made.pipe.save_lora_weights(
        tmp_path, get_peft_model_state_dict(made.network), transformer_lora_adapter_metadata=header
    )
    found = matrices(started(made, tmp_path))
    scale = 1 if with_header else 3 / 5  # without a header diffusers takes the rank for alpha
    assert_same(found, {path: change * scale for path, change in matrices(made.network).items()}, with_header)


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_of_peft(trained, tmp_path, name):
    made = trained(name)
    other = copy.deepcopy(made.plain)
    model = peft.get_peft_model(other, config(rank_pattern={"to_k": 2}, alpha_pattern={"to_q": 7}))
    model.save_pretrained(tmp_path)
    network = started(made, tmp_path)
    assert_same(matrices(network), matrices(other))
    ranks = {path: m.lora_A["default"].weight.shape[0] for path, m in network.named_modules() if hasattr(m, "lora_A")}
    assert {rank for path, rank in ranks.items() if path.endswith("to_k")} == {2}
    assert {rank for path, rank in ranks.items() if path.endswith("to_v")} == {3}


@pytest.mark.parametrize("name", NAMES)
def test_diffusers_names_with_the_prefix_of_comfyui(trained, tmp_path, name):
    made = trained(name)
    state = get_peft_model_state_dict(made.network)
    alphas = {f"{key.partition('.lora_')[0]}.alpha": torch.tensor(5.0) for key in state}
    save_file(
        {f"diffusion_model.{key}": t.contiguous() for key, t in (state | alphas).items()}, tmp_path / "a.safetensors"
    )
    assert_same(matrices(started(made, tmp_path / "a.safetensors")), matrices(made.network))


def of_flux(network):
    """The LoRA of a FLUX transformer's double blocks under its makers' names, where queries, keys and values are one."""
    written = {}
    for i, block in enumerate(network.transformer_blocks):
        halves = [getattr(block.attn, name) for name in ("to_q", "to_k", "to_v")]
        downs, ups = ([getattr(h, f"lora_{x}")["default"].weight.detach() for h in halves] for x in "AB")
        written[f"double_blocks.{i}.img_attn.qkv"] = torch.cat(downs), torch.block_diag(*ups)
        out = block.attn.to_out[0]
        written[f"double_blocks.{i}.img_attn.proj"] = [out.lora_A["default"].weight, out.lora_B["default"].weight]
    return {path: [half.detach().contiguous() for half in halves] for path, halves in written.items()}


@pytest.mark.parametrize("names", ["kohya", "comfyui", "comfyui, peft's halves"])
def test_fused_names_of_flux(trained, tmp_path, names):
    made = trained("FluxPipeline")
    down, up = ("lora_A", "lora_B") if "peft" in names else ("lora_down", "lora_up")
    written = {}
    for path, halves in of_flux(made.network).items():
        name = "lora_unet_" + path.replace(".", "_") if names == "kohya" else f"diffusion_model.{path}"
        written |= {f"{name}.{down}.weight": halves[0], f"{name}.{up}.weight": halves[1]}
        written[f"{name}.alpha"] = torch.tensor(5 / 3 * len(halves[0]))  # alpha / rank stays
    if "peft" in names:  # which have no alphas
        written = {key: t for key, t in written.items() if not key.endswith("alpha")}
    save_file(written, tmp_path / "a.safetensors")
    network = started(made, tmp_path / "a.safetensors")
    expected = {
        path: change for path, change in matrices(made.network).items() if path.startswith("transformer_blocks")
    }
    scale = 3 / 5 if "peft" in names else 1
    assert_same(matrices(network), {path: change * scale for path, change in expected.items()}, exact=False)
    queries, keys = (
        getattr(network.transformer_blocks[0].attn, name).lora_A["default"].weight for name in ("to_q", "to_k")
    )
    assert queries.data_ptr() != keys.data_ptr()  # trained apart, whatever the file shares


LAYERS_OF_FLUX2 = {"linear1": "attn.to_qkv_mlp_proj", "linear2": "attn.to_out"}


@pytest.mark.parametrize(
    "options", [{}, {"use_rslora": True}, {"rank_pattern": {"linear2": 2}}, {"alpha_pattern": {"linear2": 7}}]
)
def test_pefts_options_hold_for_the_original_names_of_flux2(trained, tmp_path, options):
    made = trained("Flux2KleinPipeline")
    given = {"r": 4, "lora_alpha": 16}
    patterns = {key: {LAYERS_OF_FLUX2[at]: v for at, v in own.items()} for key, own in options.items() if "_p" in key}
    other = copy.deepcopy(made.plain)
    layers = r"single_transformer_blocks\..*\.(to_qkv_mlp_proj|to_out)"
    model = peft.get_peft_model(other, config(**{**given, **options, **patterns, "target_modules": layers}))
    written = {}
    for key, tensor in get_peft_model_state_dict(model).items():
        for theirs, ours in LAYERS_OF_FLUX2.items():
            key = key.replace(f".{ours}.", f".{theirs}.")
        written[key.replace("single_transformer_blocks", "single_blocks")] = tensor.contiguous()
    assert "base_model.model.single_blocks.0.linear1.lora_A.weight" in written
    save_file(written, tmp_path / "adapter_model.safetensors")
    peft.LoraConfig(**given, **options, target_modules=["linear1", "linear2"]).save_pretrained(tmp_path)
    (found,) = initial_lora.adapters(Model(path=str(made.folder), lora={"path": str(tmp_path)})).values()
    assert {layer.alpha for layer in found.layers.values()} == {16, *options.get("alpha_pattern", {}).values()}
    assert found.rslora is ("use_rslora" in options)
    assert_same(matrices(started(made, tmp_path)), matrices(other), exact=True)


@pytest.mark.parametrize("before", ["base_model.model", "diffusion_model"])
@pytest.mark.parametrize("options", [{"lora_alpha": 12}, {"lora_alpha": 12, "use_rslora": True}])
def test_pefts_options_hold_for_fused_names_of_flux(trained, tmp_path, before, options):
    made, written = trained("FluxPipeline"), {}
    for path, halves in of_flux(made.network).items():
        written |= {f"{before}.{path}.lora_{x}.weight": half for x, half in zip("AB", halves, strict=True)}
    save_file(written, tmp_path / "adapter_model.safetensors")
    peft.LoraConfig(r=9, rank_pattern={"proj": 3}, **options).save_pretrained(tmp_path)
    found = matrices(started(made, tmp_path))
    for path, change in matrices(made.network).items():
        if path.startswith("transformer_blocks"):
            rank = 3 if "to_out" in path else 9  # of the fused layer
            scale = 12 / (rank**0.5 if "use_rslora" in options else rank)
            torch.testing.assert_close(found[path], change * scale * 3 / 5)


def test_original_names_of_wan(trained, tmp_path):
    made = trained("WanPipeline")
    names = {"attn1": "self_attn", "attn2": "cross_attn", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o"}
    written = {}
    for key, tensor in get_peft_model_state_dict(made.network).items():
        path, _, matrix = key.partition(".lora_")
        _, block, attention, layer = path.split(".", 3)
        name = f"diffusion_model.blocks.{block}.{names[attention]}.{names[layer]}"
        written |= {f"{name}.lora_{matrix}": tensor.contiguous(), f"{name}.alpha": torch.tensor(5.0)}
    save_file(written, tmp_path / "a.safetensors")
    found = matrices(started(made, tmp_path / "a.safetensors"))
    assert_same(found, matrices(made.network), exact=False)


def test_a_sample_is_that_of_the_pipelines_own_loader(trained, tmp_path):
    made, specimen = trained("FluxPipeline"), SPECIMENS["FluxPipeline"]
    names = {key: t.contiguous() for key, t in get_peft_model_state_dict(made.network).items()}
    save_file({f"transformer.{key}": t for key, t in names.items()}, tmp_path / "pytorch_lora_weights.safetensors")
    pipes = [diffusers.DiffusionPipeline.from_pretrained(made.folder) for _ in range(2)]
    pipes[0].load_lora_weights(tmp_path)
    model = Model(path=str(made.folder), lora={"path": str(tmp_path)})
    Weights({"transformer": pipes[1].transformer}, initial_lora.adapters(model))
    call = {**specimen.call, "output_type": "pt", "return_dict": False}
    theirs, ours = (
        pipe(prompt=specimen.prompts[0], generator=torch.Generator().manual_seed(5), **call)[0] for pipe in pipes
    )
    assert torch.equal(ours, theirs)


def test_adapters_with_biases(trained, tmp_path):
    made = trained("StableDiffusion3Pipeline")
    other = copy.deepcopy(made.plain)
    model = peft.get_peft_model(other, config(lora_bias=True))
    model.save_pretrained(tmp_path)
    layer = started(made, tmp_path).transformer_blocks[0].attn.to_q
    x = torch.randn(2, layer.in_features)
    expected = other.transformer_blocks[0].attn.to_q
    assert expected.lora_B["default"].bias.abs().max() > 0
    torch.testing.assert_close(layer(x), expected(x), rtol=0, atol=0)


def test_a_network_without_adapters_in_the_file_gets_new_ones_on_the_same_layers(trained, tmp_path):
    made = trained("WanPipeline (2.2)")
    assert made.pipe.transformer_2 is not None
    made.pipe.save_lora_weights(tmp_path / "lora", get_peft_model_state_dict(made.network))
    found = initial_lora.adapters(Model(path=str(made.folder), lora={"path": str(tmp_path / "lora")}))
    assert list(found) == ["transformer", "transformer_2"]
    assert found["transformer"].layers.keys() == found["transformer_2"].layers.keys()
    assert all(not layer.up.any() and layer.down.std() > 0.1 for layer in found["transformer_2"].layers.values())


def test_each_network_may_have_a_file_of_its_own(trained, tmp_path):
    """Both name it `transformer`, as ComfyUI's and kohya's names do not tell them apart."""
    made = trained("WanPipeline (2.2)")
    paths = {"transformer": str(tmp_path / "high"), "transformer_2": str(tmp_path / "low")}
    for name, path in paths.items():
        network = copy.deepcopy(made.plain)  # both are of the same shapes
        network.add_adapter(config(r=2 if name == "transformer" else 4))
        made.pipe.save_lora_weights(path, get_peft_model_state_dict(network))
    found = initial_lora.adapters(Model(path=str(made.folder), lora={"path": paths}))
    assert {name: {layer.rank for layer in each.layers.values()} for name, each in found.items()} == {
        "transformer": {2}, "transformer_2": {4},
    }  # fmt: skip
    with pytest.raises(InputError, match=r"model\.lora\.path: \S+ has no network 'transformer_3', "):
        initial_lora.adapters(Model(path=str(made.folder), lora={"path": {"transformer_3": paths["transformer"]}}))


def damaged(state, kind):
    first = min(key for key in state if "to_k.lora_A" in key)
    layer = first.partition(".lora_")[0]
    others = {
        "dora": {f"{layer}.lora_magnitude_vector": torch.ones(3)},
        "kohya's dora": {f"{layer}.dora_scale": torch.ones(3)},
        "half": {},
        "norm": {"transformer.norm_out.weight": torch.ones(3)},
        "ranks": {first.replace("lora_A", "lora_B"): torch.ones(32, 2)},
        "nan": {first: torch.full_like(state[first], torch.nan)},
    }
    kept = {key: t for key, t in state.items() if not (kind == "half" and key == first)}
    return kept | others[kind]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            "dora",
            "is a DoRA (transformer.single_transformer_blocks.0.attn.to_k.lora_magnitude_vector), only plain LoRA",
        ),
        ("kohya's dora", "is a DoRA (transformer.single_transformer_blocks.0.attn.to_k.dora_scale)"),
        ("half", "has one matrix of the two for transformer.single_transformer_blocks.0.attn.to_k"),
        ("norm", "holds transformer.norm_out.weight, which is no matrix of a LoRA"),
        ("ranks", "has matrices of different ranks for transformer.single_transformer_blocks.0.attn.to_k"),
        (
            "nan",
            "holds numbers that are not finite, in transformer.single_transformer_blocks.0.attn.to_k.lora_A.weight",
        ),
    ],
)
def test_what_is_no_plain_lora_is_refused(trained, tmp_path, kind, said):
    made = trained("FluxPipeline")
    state = {f"transformer.{key}": t.contiguous() for key, t in get_peft_model_state_dict(made.network).items()}
    save_file(damaged(state, kind), tmp_path / "a.safetensors")
    with pytest.raises(InputError) as refused:
        initial_lora.adapters(Model(path=str(made.folder), lora={"path": str(tmp_path / "a.safetensors")}))
    assert str(refused.value).startswith("model.lora.path: ")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["transformer.blocks.0.lokr_w1"], "is a LoKr"),
        (["lora_unet_double_blocks_0_img_attn_proj.hada_w1_a"], "is a LoHa"),
        (["text_encoder.a.lora_A.weight", "text_encoder.a.lora_B.weight"], "has adapters for text encoders only"),
        (["lora_te1_a.lora_down.weight"], "has adapters for text encoders only"),
        (
            ["model.layers.0.weight"],
            "is no LoRA, it holds model.layers.0.weight; weights of a whole model go to model.path",
        ),
        (["transformer.up.lora_A.weight", "transformer.up.lora_B.weight"], "has an adapter for transformer.up, and "),
    ],
)
def test_what_has_nothing_for_the_model_is_refused(trained, tmp_path, keys, said):
    save_file({key: torch.ones(1, 1) for key in keys}, tmp_path / "a.safetensors")
    with pytest.raises(InputError) as refused:
        initial_lora.adapters(
            Model(path=str(trained("FluxPipeline").folder), lora={"path": str(tmp_path / "a.safetensors")})
        )
    assert said in str(refused.value)


def test_a_lora_of_a_wider_model_is_refused_by_its_shapes(trained, tmp_path):
    made = trained("FluxPipeline")
    state = {f"transformer.{key}": t.contiguous() for key, t in get_peft_model_state_dict(made.network).items()}
    wider = {key: torch.cat([t, t], 1 if "lora_A" in key else 0) for key, t in state.items()}
    save_file(wider, tmp_path / "a.safetensors")
    with pytest.raises(
        InputError, match=r"is of another model, its adapter of \S+ is for a weight of 64 x 64, in \S+ it has 32 x 32"
    ):
        initial_lora.adapters(Model(path=str(made.folder), lora={"path": str(tmp_path / "a.safetensors")}))


def test_text_encoders_are_left_out_with_a_warning(trained, tmp_path):
    made = trained("FluxPipeline")
    state = {f"transformer.{key}": t.contiguous() for key, t in get_peft_model_state_dict(made.network).items()}
    save_file(state | {"text_encoder.a.lora_A.weight": torch.ones(2, 2)}, tmp_path / "a.safetensors")
    with pytest.warns(UserWarning, match="a.safetensors has adapters for text encoders too, they are left out"):
        found = initial_lora.adapters(Model(path=str(made.folder), lora={"path": str(tmp_path / "a.safetensors")}))
    assert found["transformer"].layers.keys() == matrices(made.network).keys()


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"rank": 16}, r"model\.lora\.rank: 16 is asked for, and model\.lora\.path has 3 at "),
        ({"alpha": 8.0}, r"model\.lora\.alpha: 8 is asked for, and model\.lora\.path has 5 at "),
        ({"targets": "auto"}, r"model\.lora\.targets: auto chooses layers, and model\.lora\.path has chosen its "),
        ({"targets": ["to_q"]}, r"model\.lora\.targets: to_q are asked for, and model\.lora\.path has \S+ too"),
        ({"targets": [*TARGETS, "proj_out"]}, r"are asked for, and model\.lora\.path has none of proj_out"),
    ],
)
def test_what_the_config_says_otherwise_is_refused(trained, tmp_path, lora, said):
    made = trained("FluxPipeline")
    made.pipe.save_lora_weights(
        tmp_path, get_peft_model_state_dict(made.network), transformer_lora_adapter_metadata={"r": 3, "lora_alpha": 5}
    )
    with pytest.raises(InputError, match=said):
        initial_lora.adapters(Model(path=str(made.folder), lora={"path": str(tmp_path), **lora}))
    equal = {"rank": 3, "alpha": 5.0, "targets": TARGETS}
    assert initial_lora.adapters(Model(path=str(made.folder), lora={"path": str(tmp_path), **equal}))


def test_layers_are_known_without_weights(trained, tmp_path):
    folder = trained("StableDiffusion3Pipeline").folder
    stored = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    for file in ("model_index.json", "transformer/config.json"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(folder / file, tmp_path / file)
    outline = initial_lora.outlines(str(tmp_path))["transformer"]
    shapes = outline.layers
    assert outline.kind == "SD3Transformer2DModel"
    assert outline.parameters == {path: tuple(stored[path].shape) for path in stored if path != "pos_embed.pos_embed"}
    assert {path: tuple(stored[f"{path}.weight"].shape) for path in shapes} == shapes
    assert {path.rpartition(".")[2] for path in shapes} >= {"to_q", "add_k_proj", "proj_out"}
