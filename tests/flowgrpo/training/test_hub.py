"""What a model that cannot be read is refused with."""

import httpx2 as httpx
import pytest
from huggingface_hub import constants, errors

from flowgrpo.cli import main
from flowgrpo.errors import InputError
from flowgrpo.training import hub


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
        (
            answer(errors.GatedRepoError, 403),
            "is gated: accept its licence on its page at the model hub, then log in with",
        ),
        (answer(errors.RepositoryNotFoundError, 404), "is not at the model hub, or is private: check the name"),
        (errors.LocalEntryNotFoundError("no"), "from the model hub: it cannot be reached, and the cache lacks it"),
        (
            httpx.ConnectError("no"),
            "cannot be reached, .* `hf download someone/something`, or set model.path to a folder",
        ),
        (ValueError("no"), r"could not be loaded from the model hub \(OSError: wrapped\)"),
    ],
)
def test_why_a_model_is_not_there_is_found_below_what_libraries_raise(below, said, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with (
        pytest.raises(InputError, match=f"^model.path: someone/something.*{said}"),
        hub.one_sentence("someone/something"),
    ):
        load(below)


def test_offline_the_sentence_says_so(monkeypatch, capsys):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main(["plan", "flux1-dev", "model.path=owner/FLUX.1-mine"]) == 2
    assert "FLUX.1-mine could not be loaded from the model hub: HF_HUB_OFFLINE is set, and" in capsys.readouterr().err
