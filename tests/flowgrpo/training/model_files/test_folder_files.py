"""Which files of a folder hold its weights, and what is wrong with them."""

import json
import pickle
from pathlib import Path

import broken
import pytest
import torch
from safetensors.torch import save_file

from flowgrpo.errors import InputError
from flowgrpo.training.model_files import folder_files
from flowgrpo.training.model_files.folder_files import Weights, shapes_of, variants_of, weights_of

DIFFUSERS, INDEX = "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors.index.json"
PAIR = {"one": "transformers", "two": "transformers"}
FIRST, SECOND = (f"diffusion_pytorch_model-0000{i}-of-00002.safetensors" for i in (1, 2))


PLAIN, FP16 = "model.safetensors", "diffusion_pytorch_model.fp16.safetensors"
OF_FP16, INDEX_OF_FP16 = "model.fp16-00001-of-00001.safetensors", "model.safetensors.index.fp16.json"
BF16 = "diffusion_pytorch_model-00001-of-00001.bf16.safetensors"
INDEX_OF_BF16 = "diffusion_pytorch_model.safetensors.bf16.index.json"


@pytest.mark.parametrize(
    ("names", "variant", "files", "index"),
    [
        ([DIFFUSERS], None, [DIFFUSERS], None),
        ([FP16], None, None, None),
        ([FP16, DIFFUSERS], "fp16", [FP16], None),
        (["model.non_ema.safetensors"], "non_ema", ["model.non_ema.safetensors"], None),
        ([FIRST, SECOND, INDEX], None, [FIRST, SECOND], INDEX),
        ([FIRST, SECOND, INDEX, DIFFUSERS], None, [FIRST, SECOND], INDEX),  # as diffusers chooses
        # as transformers chooses
        ([PLAIN, f"{PLAIN}.index.json", "model-00001-of-00001.safetensors"], None, [PLAIN], None),
        ([FIRST], None, [FIRST], None),
        ([OF_FP16, INDEX_OF_FP16], "fp16", [OF_FP16], INDEX_OF_FP16),
        ([BF16, INDEX_OF_BF16], "bf16", [BF16], INDEX_OF_BF16),
        (["pytorch_model.bin", PLAIN], None, [PLAIN], None),
        (["pytorch_model.bin"], None, ["pytorch_model.bin"], None),
        (["pytorch_model.bin.index.json"], None, [], "pytorch_model.bin.index.json"),
        (["diffusion_pytorch_model.bin.index.json"], None, None, None),  # diffusers does not look for it
        (["flax_model.msgpack", "model.onnx", "other.safetensors", "tokenizer.model"], None, None, None),
    ],
)
def test_the_weights_of_a_folder_are_those_that_its_library_reads(names, variant, files, index):
    found = None if files is None else Weights(variant, tuple(files), index)
    assert weights_of(names, variant) == weights_of(reversed(names), variant) == found


def test_without_files_of_a_variant_the_plain_ones_are_read():
    assert weights_of([DIFFUSERS, "config.json", "README"], "fp16") == Weights(None, (DIFFUSERS,), None)


def test_diffusers_and_transformers_take_the_files_that_are_chosen_here(tmp_path):
    import tiny
    from diffusers import SD3Transformer2DModel
    from transformers import CLIPTextModelWithProjection

    pipe = tiny.sd3()
    for network, loads in ((pipe.transformer, SD3Transformer2DModel), (pipe.text_encoder, CLIPTextModelWithProjection)):
        for size in ("1GB", "20KB"):
            for variant in (None, "fp16"):
                folder = tmp_path / f"{loads.__name__}-{size}-{variant}"
                network.save_pretrained(folder, max_shard_size=size, variant=variant)
                chosen = weights_of(folder_files.files_of(folder), variant)
                assert chosen.variant == variant
                assert chosen.sharded == (size == "20KB")
                names = {"config.json", *chosen.files, chosen.index or "config.json"}
                assert names == {file.name for file in folder.iterdir()}
                shapes = shapes_of(folder, chosen)
                loaded = loads.from_pretrained(folder, variant=variant).state_dict()
                assert shapes == {name: tuple(loaded[name].shape) for name in shapes}
                assert len(shapes) > 20


def test_the_variants_of_a_folder_are_listed_once():
    assert variants_of([PLAIN, "model.fp16.safetensors", OF_FP16, "model.bf16.safetensors"]) == ["bf16", "fp16"]
    assert variants_of([PLAIN, "pytorch_model.bin"]) == []


@pytest.fixture
def folder(tmp_path):
    """A component with one file of weights."""
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(4), "c": torch.zeros(1)}, tmp_path / "model.safetensors")
    return tmp_path


def check(folder, **options):
    folder_files.check(folder, {"": "transformers"}, **options)


def refused(folder, **options):
    """The sentence that refuses a folder."""
    with pytest.raises(InputError) as error:
        check(folder, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("rewrite", "variant"),
    [
        (lambda file: file, None),
        (lambda file: broken.shard(file, 2), None),
        (lambda file: broken.shard(file, 2, "fp16"), "fp16"),
        (lambda file: broken.shard(file, 2, form="bin"), None),
        (lambda file: broken.pickle(file), None),
        (lambda file: broken.pickle(file, zipped=False), None),
    ],
)
def test_a_whole_folder_is_taken_in_every_layout_and_its_shapes_are_read(folder, rewrite, variant):
    rewrite(folder / PLAIN)
    check(folder, variant=variant)
    weights = weights_of(folder_files.files_of(folder), variant)
    assert shapes_of(folder, weights) == {"a": (2, 3), "b": (4,), "c": (1,)}


class Harmful:
    """An object whose pickle calls a function when it is read."""

    def __reduce__(self):
        return Path.touch, (Path("harmed"),)


def test_a_pickle_that_calls_something_is_not_run(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / PLAIN).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": Harmful()}, protocol=2))
    with pytest.raises(pickle.UnpicklingError):
        shapes_of(folder, weights_of(folder_files.files_of(folder)))
    assert not (folder / "harmed").exists()


def shards(*files):
    return json.dumps({"weight_map": dict(zip("ab", files, strict=False))})


@pytest.mark.parametrize(
    ("index", "said"),
    [
        (None, "has shards such as model-00001-of-00002.safetensors and no index, which says what they hold"),
        ("{", "{}: not valid JSON"),
        ("[]", "{} is no index, which has a weight_map from tensors to files"),
        (shards(), "is no index"),
        (shards(3), "is no index"),
        (shards("../model.safetensors"), "names '../model.safetensors', which is not a file of its folder"),
        (shards("/etc/passwd"), "names '/etc/passwd', which is not a file of its folder"),
        (shards("model-00007-of-00009.safetensors"), " lacks model-00007-of-00009.safetensors, which {} names"),
        (shards("x.safetensors", "y.safetensors"), " lacks x.safetensors and 1 more, which {} names"),
        (broken.POINTER, "{} is a Git LFS pointer, not the file itself"),
    ],
)
def test_an_index_is_anybody_s_and_may_be_missing(folder, index, said):
    broken.shard(folder / PLAIN, 2)
    (folder / f"{PLAIN}.index.json").unlink()
    if index is not None:
        (folder / f"{PLAIN}.index.json").write_text(index)
    assert said.format(f"{PLAIN}.index.json") in refused(folder)


CUTS = [(False, True, left) for left in (0.0, 0.01, 0.5, 0.99)]
CUTS += [(True, True, left) for left in (0.0, 0.5, 0.99)] + [(True, False, 0.0)]


@pytest.mark.parametrize(("pickled", "zipped", "left"), CUTS)
def test_a_file_that_was_cut_off_is_named(folder, pickled, zipped, left):
    file = broken.pickle(folder / PLAIN, zipped=zipped) if pickled else folder / PLAIN
    broken.cut(file, left)
    assert refused(folder).startswith(f"model.path: {file} is cut off or damaged (")


def test_a_shard_that_was_cut_off_is_named(folder):
    first, second = broken.shard(folder / PLAIN, 2)
    broken.cut(second)
    assert refused(folder).startswith(f"model.path: {second} is cut off or damaged (")
    broken.point(first)
    assert refused(folder).startswith(f"model.path: {first} is a Git LFS pointer")


def test_a_link_to_nothing_is_named(folder):
    (folder / PLAIN).unlink()
    (folder / PLAIN).symlink_to(folder / "gone")
    assert refused(folder) == f"model.path: {folder}/model.safetensors is a link to nothing"


def test_pointers_of_files_that_nobody_reads_do_no_harm(folder):
    for name in ("model.onnx", "model.fp16.safetensors", "pytorch_model.bin", "flax_model.msgpack"):
        broken.point(folder / name)
    check(folder)
    assert "model.fp16.safetensors is a Git LFS pointer" in refused(folder, variant="fp16")


@pytest.mark.parametrize(
    ("there", "variant", "said"),
    [
        (["fp16"], None, "holds fp16 weights only, set model.variant=fp16"),
        (["fp16"], "fp8", "holds fp16 weights only, set model.variant=fp16"),
        (["bf16", "fp16"], None, "holds bf16 and fp16 weights only, set model.variant=bf16 or model.variant=fp16"),
        (["bf16", None], "fp16", "has no fp16 weights, there are bf16"),
        ([None], "ema", "has no ema weights, remove it, the weights are of no variant"),
        ([], None, "has no weights, neither safetensors nor .bin under a name that is read here"),
    ],
)
def test_a_variant_is_asked_for_where_there_are_no_plain_weights(folder, there, variant, said):
    content = (folder / PLAIN).read_bytes()
    (folder / PLAIN).unlink()
    for each in there:
        (folder / f"model{'' if each is None else f'.{each}'}.safetensors").write_bytes(content)
    assert said in refused(folder, variant=variant)


def test_a_component_without_the_variant_has_plain_weights(folder):
    for name in ("one", "two"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text("{}")
        (folder / name / "model.safetensors").write_bytes((folder / PLAIN).read_bytes())
    broken.name_variant(folder / "one")
    folder_files.check(folder, PAIR, variant="fp16")
    with pytest.raises(InputError, match="one holds fp16 weights only, set model.variant=fp16"):
        folder_files.check(folder, PAIR)
    broken.name_variant(folder / "two", "bf16")
    with pytest.raises(InputError, match="two holds bf16 weights only, set model.variant=bf16"):
        folder_files.check(folder, PAIR, variant="fp16")


def test_configs_alone_are_taken_where_no_weights_are_asked_for(folder):
    (folder / PLAIN).unlink()
    check(folder, or_configs=True)
    (folder / "half").mkdir()
    (folder / "half" / "config.json").write_text("{}")
    save_file({"a": torch.zeros(1)}, folder / PLAIN)
    with pytest.raises(InputError, match="half has no weights"):
        folder_files.check(folder, {"": "transformers", "half": "transformers"}, or_configs=True)
