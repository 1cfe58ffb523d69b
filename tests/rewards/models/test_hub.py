"""What is said of a reward's model, a language model or a data set that the hub does not give."""

import sys
from types import SimpleNamespace

import httpx2 as httpx
import huggingface_hub
import pytest
from huggingface_hub import constants, errors

import rewards
from flowgrpo.data import prompts
from flowgrpo.errors import InputError
from flowgrpo.mdlm.models import load as loading
from rewards import RewardError
from rewards.models import hub


def answer(kind, status):
    response = httpx.Response(status, request=httpx.Request("GET", "http://127.0.0.1/someone/something"))
    return kind("no", response=response)


UNREACHED = "could not be loaded from the model hub: it cannot be reached, and the cache lacks it"
REASONS = [
    (
        answer(errors.GatedRepoError, 403),
        "is gated: accept its {terms} on its page at the model hub, then log in with `hf ",
    ),
    (answer(errors.RepositoryNotFoundError, 404), "is not at the model hub, or is private: check the name, or log in"),
    (errors.LocalEntryNotFoundError("no"), UNREACHED),
    (httpx.ConnectError("no"), UNREACHED),
]


def raising(below):
    def load(*arguments, **options):
        try:
            raise below
        except Exception as error:
            raise OSError("wrapped") from error

    return load


@pytest.fixture(autouse=True)
def online(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.mark.parametrize(("below", "said"), REASONS)
def test_whatever_needs_the_hub_says_why_it_has_nothing(monkeypatch, below, said):
    """A reward, GenEval, a language model and its tokenizer, and prompts of a data set."""
    from rewards.objects import detectors

    reward = rewards.load("clip_score", options={"path": "someone/something"}).function
    geneval = rewards.load("geneval", options={"detector": "someone/something", "device": "cpu"}).function
    monkeypatch.setattr(reward, "_load", raising(below), raising=False)
    monkeypatch.setattr(detectors, "load_detector", raising(below))
    monkeypatch.setattr(loading, "config_of", raising(below))
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=raising(below)))

    def load_tokenizer():
        with loading._one_sentence("someone/something", "no tokenizer", {}, trust_remote_code=False):
            raising(below)()

    for kind, named, load in (
        (RewardError, "clip_score: someone/something", lambda: reward.to("cpu")),
        (RewardError, "geneval's detector: 'someone/something'", lambda: geneval._detect),
        (InputError, "model.path: 'someone/something'", lambda: loading.model_paths("someone/something")),
        (InputError, "model.path: 'someone/something'", load_tokenizer),
    ):
        with pytest.raises(kind, match=f"^{named} {said.format(terms='licence')}"):
            load()
    with pytest.raises(InputError, match=f"^prompts.train: hub:owner/name:train {said.format(terms='terms')}"):
        prompts.load("hub:owner/name:train", "prompts.train")


def test_a_data_set_is_downloaded_by_another_command_a_tag_by_none_and_other_reasons_are_not_the_hub_s():
    said = hub.explain_failure(ConnectionError("no"), "owner/name", "set prompts.train to a file", dataset=True)
    assert said.endswith("once with `hf download --repo-type dataset owner/name`, or set prompts.train to a file")
    assert hub.explain_failure(ConnectionError("no"), "openai", "give a file").endswith("or a part of it; give a file")
    assert hub.explain_failure(ValueError("no"), "owner/name", "") is None


def test_the_hub_is_asked_once_whether_it_answers(monkeypatch):
    asked = []

    def head(place, timeout):
        asked.append(place)
        raise httpx.ConnectError("no")

    monkeypatch.setattr(httpx, "head", head)
    hub.is_reachable.cache_clear()
    try:
        assert not hub.can_load("someone/something", "config.json")
        assert not hub.can_load("someone/else", "config.json")
        assert asked == [constants.ENDPOINT]
    finally:
        hub.is_reachable.cache_clear()
    monkeypatch.setattr(hub, "is_reachable", lambda: True)
    assert hub.can_load("someone/something", "config.json")


def test_what_is_in_the_cache_may_be_given_without_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: str(tmp_path / name / file))
    monkeypatch.setattr(hub, "is_reachable", lambda: False)
    assert hub.can_load("someone/something", "config.json")
