"""Models whose files lack weights, or hold them under other names, or hold more: each is refused, or is exactly the model.

A case is a component of a tiny pipeline or a language model, and what is done to the tensors of its file.
"""

import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch
from hypothesis import strategies as st
from released import released
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, BertTokenizer
from zoo import SPECIMENS

from flowgrpo.errors import InputError
from flowgrpo.flow.pipeline.loading.load import load_pipeline
from flowgrpo.mdlm.models.load import load_predictor
from fuzzing.runner import Summary, run

PIPELINES = ("StableDiffusion3Pipeline", "FluxPipeline", "QwenImagePipeline", "WanPipeline", "LTXPipeline")
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh")
CHANGES = ("remove", "rename", "add", "add beside", "prefix", "strip", "reshape")
Tensors = dict[str, torch.Tensor]
Case = tuple[str, str, tuple[tuple[str, int], ...]]  # model, file, and changes with a number that says where


@cache
def models() -> dict[str, Path]:
    root = Path(tempfile.mkdtemp())
    for name in PIPELINES:
        SPECIMENS[name].build().save_pretrained(root / name)
    released("dream", root / "dream")
    bert(root / "bert")
    return {folder.name: folder for folder in sorted(root.iterdir())}


def bert(folder: Path) -> None:
    """Save a language model of transformers whose head is tied to its embeddings."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=len(WORDS), max_position_embeddings=32, **sizes)
    BertForMaskedLM(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)


@cache
def files() -> tuple[tuple[str, str], ...]:
    every = [(name, file.relative_to(f)) for name, f in models().items() for file in f.rglob("*.safetensors")]
    return tuple(sorted((name, str(file)) for name, file in every))


def networks(name: str, folder: Path) -> dict[str, Tensors]:
    """Load a model, and return its tensors by component."""
    if name in PIPELINES:
        components = load_pipeline(str(folder)).components.items()
        return {part: own.state_dict() for part, own in components if isinstance(own, torch.nn.Module)}
    return {"": load_predictor(str(folder))[0].model.state_dict()}


@cache
def whole(name: str) -> dict[str, Tensors]:
    return networks(name, models()[name])


def changed(tensors: Tensors, changes: tuple[tuple[str, int], ...]) -> Tensors:
    for change, number in changes:
        names = sorted(tensors)
        if not names:
            return tensors
        name = names[number % len(names)]
        first, _, rest = name.partition(".")
        match change:
            case "remove":
                del tensors[name]
            case "rename":
                tensors[f"{name[:-1]}_{name[-1]}"] = tensors.pop(name)
            case "add":
                tensors[f"further.{name}"] = tensors[name].clone()
            case "add beside":
                tensors[f"{name.rpartition('.')[0]}.further"] = tensors[name].clone()
            case "prefix":
                tensors = {f"model.{own}": tensor for own, tensor in tensors.items()}
            case "strip":
                tensors = {own.removeprefix(f"{first}.") if rest else own: t for own, t in tensors.items()}
            case "reshape":
                tensors[name] = tensors[name].flatten()[None]
    return tensors


def cases() -> st.SearchStrategy[Case]:
    """Draw a file with up to three changes; none leaves the model as it is."""
    change = st.tuples(st.sampled_from(CHANGES), st.integers(0, 200))
    return st.builds(lambda file, every: (*file, tuple(every)), st.sampled_from(files()), st.lists(change, max_size=3))


def attempt(case: Case) -> str | None:
    """Load a changed model; fail where one of its numbers differs from the model's."""
    name, file, changes = case
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        shutil.copytree(models()[name], folder)
        save_file(changed(load_file(folder / file), changes), folder / file, {"format": "pt"})
        try:
            found = networks(name, folder)
        except InputError as error:
            return str(error).replace(place, "")
    for part, tensors in whole(name).items():
        assert found[part].keys() == tensors.keys(), part
        for own, tensor in tensors.items():
            assert torch.equal(found[part][own], tensor), f"{part}: {own}"
    return None


def fuzz(seed: int, count: int) -> Summary:
    for name in models():  # before a case is timed
        whole(name)
    return run("weights", cases(), attempt, seed, count)
