"""What a model that cannot be read is refused with."""

from types import SimpleNamespace

import httpx2 as httpx
import huggingface_hub
import pytest
import torch
from huggingface_hub import constants, errors
from safetensors.torch import save_file

from flowgrpo.cli import main
from flowgrpo.errors import InputError
from flowgrpo.training.model_files import hub_files


def answer(kind, status):
    response = httpx.Response(status, request=httpx.Request("GET", "http://127.0.0.1/someone/something"))
    return kind("no", response=response)


def load(below):
    """Raise as diffusers does, which wraps what the hub's library raised."""
    try:
        raise below
    except Exception:
        raise OSError("wrapped")  # noqa: B904


@pytest.mark.parametrize(
    ("below", "said"),
    [
        (answer(errors.GatedRepoError, 403), "is gated: accept its licence on its page at the model hub, then log in"),
        (answer(errors.RepositoryNotFoundError, 404), "is not at the model hub, or is private: check the name"),
        (errors.LocalEntryNotFoundError("no"), "from the model hub: it cannot be reached, and the cache lacks it"),
        (httpx.ConnectError("no"), "cannot be reached, .* `hf download someone/something`, or set model.path to a fol"),
        (ValueError("no"), r"could not be loaded from the model hub \(OSError: wrapped\)"),
    ],
)
def test_why_a_model_is_not_there_is_found_below_what_libraries_raise(below, said, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("rewards.models.hub.is_reachable", lambda: True)
    with (
        pytest.raises(InputError, match=f"^model.path: someone/something.*{said}"),
        hub_files.one_sentence("someone/something"),
    ):
        load(below)


def test_offline_the_sentence_says_so(monkeypatch, capsys):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main(["plan", "flux1-dev", "model.path=owner/FLUX.1-mine"]) == 2
    assert "FLUX.1-mine could not be loaded from the model hub: HF_HUB_OFFLINE is set, and" in capsys.readouterr().err


FILES = [
    "model_index.json",
    "vae/config.json",
    "vae/diffusion_pytorch_model.safetensors",
    "vae/diffusion_pytorch_model.fp16.safetensors",
    "unet/config.json",
    "unet/diffusion_pytorch_model.fp16-00001-of-00002.safetensors",
    "unet/diffusion_pytorch_model.fp16-00002-of-00002.safetensors",
    "unet/diffusion_pytorch_model.safetensors.index.fp16.json",
    "text/model.safetensors",
    "text/deeper/model.fp16.safetensors",
]


@pytest.fixture
def repository(monkeypatch):
    """A repository at the hub; each file has one tensor of its name."""

    def head(_, place, file):
        return SimpleNamespace(tensors={file: SimpleNamespace(shape=[len(file)])})

    hub_files._hub_files.cache_clear()
    hub_files._hub_shapes.cache_clear()
    monkeypatch.setattr("rewards.models.hub.is_reachable", lambda: True)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda self, place: FILES)
    monkeypatch.setattr(huggingface_hub.HfApi, "parse_safetensors_file_metadata", head)
    return "owner/name"


@pytest.mark.parametrize(
    ("folder", "variant", "read", "of"),
    [
        ("vae", None, ["vae/diffusion_pytorch_model.safetensors"], None),
        ("vae", "fp16", ["vae/diffusion_pytorch_model.fp16.safetensors"], "fp16"),
        ("unet", "fp16", FILES[5:7], "fp16"),
        ("text", "fp16", ["text/model.safetensors"], None),
        ("text", None, ["text/model.safetensors"], None),
        ("nothing", "fp16", [], None),
    ],
)
def test_of_a_repository_the_files_of_the_variant_are_read(repository, folder, variant, read, of):
    assert hub_files.shapes(repository, folder, variant) == {file: (len(file),) for file in read}
    assert hub_files.variant_of(repository, folder, variant) == of


def test_where_the_hub_does_not_answer_the_cache_is_read(repository, tmp_path, monkeypatch):
    (tmp_path / "vae").mkdir()
    for word, size in (("", 2), (".fp16", 3)):
        save_file({"a": torch.zeros(size)}, tmp_path / "vae" / f"diffusion_pytorch_model{word}.safetensors")
    monkeypatch.setattr("rewards.models.hub.is_reachable", lambda: False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda place, local_files_only: str(tmp_path))
    assert hub_files.shapes(repository, "vae") == {"a": (2,)}
    assert hub_files.shapes(repository, "vae", "fp16") == {"a": (3,)}
    assert hub_files.file_names(repository, "unet") == []


def test_a_repository_without_plain_weights_asks_for_a_variant(repository, monkeypatch, capsys):
    with pytest.raises(InputError, match="owner/name/unet holds fp16 weights only, set model.variant=fp16"):
        hub_files.shapes(repository, "unet")
    index = {"vae": ["diffusers", "AutoencoderKL"], "unet": ["diffusers", "UNet"], "_class_name": "FluxPipeline"}
    monkeypatch.setattr("flowgrpo.flow.pipeline.loading.load.index_of", lambda path: index)
    assert main(["plan", "flux1-dev", "model.path=owner/name", "model.variant=bf16"]) == 2
    assert capsys.readouterr().err == "flowgrpo: model.variant: owner/name has no bf16 weights, there are fp16\n"
