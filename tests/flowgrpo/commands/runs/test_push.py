"""An export goes to the hub as it lies in its folder, and what would stop it is said before a model is loaded.

The hub is played by an object that records what it is asked; of the real one only what needs no answer is run.
"""

import re
from pathlib import Path
from types import SimpleNamespace

import httpx2 as httpx
import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from flowgrpo.cli import main
from flowgrpo.flow.outputs import comfyui_names


class Hub:
    """What `huggingface_hub.HfApi()` gives; `refusals` maps a method's name to what it raises."""

    endpoint = "https://hub"

    def __init__(self, refusals=None, private=True):
        self.calls, self.refusals, self.private = [], refusals or {}, private

    def __getattr__(self, name):
        def call(*args, **options):
            self.calls.append((name, args, options))
            if name in self.refusals:
                raise self.refusals[name]
            return SimpleNamespace(private=self.private)

        return call


@pytest.fixture
def hub(monkeypatch):
    def play(refusals=None, private=True):
        played = Hub(refusals, private)
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: played)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        return played

    return play


def answer(status, kind=errors.HfHubHTTPError):
    return kind("no", response=httpx.Response(status, request=httpx.Request("POST", "https://hub/api")))


EXPORT = ["export", "runs/t", "--out", "out"]
PUSH = [*EXPORT, "--push-to-hub", "me/redder"]


def test_the_folder_is_uploaded_once_it_is_written(trained, hub, printed):
    played = hub()
    assert printed(*PUSH, "--private", "--format", "json")["url"] == "https://hub/me/redder"
    names = [name for name, _, _ in played.calls]
    assert names == ["whoami", "create_repo", "auth_check", "model_info", "upload_folder"]
    assert played.calls[1][1:] == (("me/redder",), {"private": True, "exist_ok": True})
    assert played.calls[2][1:] == (("me/redder",), {"write": True})
    assert played.calls[4][2] == {"repo_id": "me/redder", "folder_path": Path("out"), "commit_message": "t, step 2"}
    assert Path("out/README.md").is_file()


@pytest.mark.parametrize(
    ("refusals", "said"),
    [
        ({"whoami": errors.LocalTokenNotFoundError("no")}, "nobody is logged in to the model hub; log in with `hf"),
        ({"whoami": answer(401)}, "the model hub does not know this token; log in with"),
        ({"create_repo": answer(403)}, "this user or token has no right to write there"),
        ({"auth_check": answer(404, errors.RepositoryNotFoundError)}, "this user or token has no right to write there"),
        ({"auth_check": answer(500)}, "the model hub refused (no)"),
        ({"whoami": httpx.ConnectError("no")}, "the model hub cannot be reached (ConnectError); export without it"),
    ],
)
def test_what_stops_an_upload_is_said_before_the_model_is_loaded(trained, hub, unloaded, refused, refusals, said):
    played = hub(refusals)
    assert refused(*PUSH).startswith(f"--push-to-hub me/redder: {said}")
    assert not Path("out").exists()
    assert "upload_folder" not in [name for name, _, _ in played.calls]


@pytest.mark.parametrize("cause", ["comfyui", "prompts", "model"])
def test_an_export_that_is_refused_makes_no_repository(trained, hub, refused, monkeypatch, cause):
    played, options = hub(), []
    if cause == "comfyui":
        monkeypatch.delitem(comfyui_names.NAMES, "SD3Transformer2DModel")
        options, said = ["--comfyui"], "--comfyui: which names ComfyUI has for the layers of SD3Transformer2DModel"
    elif cause == "prompts":
        Path("prompts.txt").unlink()
        said = "prompts.eval"
    else:
        file = Path("runs/t/config.yaml")
        file.write_text(re.sub(r"path: /.*", "path: gone", file.read_text(), count=1))
        said = "model.path: there is no folder 'gone'"
    assert said in refused(*PUSH, *options)
    assert played.calls == []
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--push-to-hub", "a b"], "--push-to-hub a b: a repository is named OWNER/NAME, such as your-name/a-b"),
        (["--private"], "--private: it is for --push-to-hub"),
    ],
)
def test_wrong_options_are_refused(trained, refused, options, said):
    assert refused(*EXPORT, *options) == said


def test_a_public_repository_does_not_get_what_should_be_private(trained, hub, printed, refused):
    played = hub(private=False)
    assert refused(*PUSH, "--private").startswith("--private: me/redder is there and is public")
    assert not Path("out").exists()
    printed(*PUSH)
    assert played.calls[-1][0] == "upload_folder"


def test_an_upload_that_fails_leaves_the_export_and_says_how_to_go_on(trained, hub, capsys):
    hub({"upload_folder": httpx.ReadTimeout("slow")})
    capsys.readouterr()
    assert main(PUSH) == 1
    printed = capsys.readouterr().err
    assert "the export is whole in out, but its upload failed (ReadTimeout: slow)" in printed
    assert "hf upload me/redder out" in printed
    assert Path("out/pytorch_lora_weights.safetensors").is_file()


def test_without_the_hub_the_real_library_is_refused_in_one_sentence(trained, refused, monkeypatch):
    assert refused(*PUSH).startswith("--push-to-hub me/redder: HF_HUB_OFFLINE is set")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.hf_api.get_token", lambda: None)
    assert refused(*PUSH).startswith("--push-to-hub me/redder: nobody is logged in")
