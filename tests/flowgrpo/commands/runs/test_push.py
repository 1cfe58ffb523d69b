"""An export goes to the hub as it lies in its folder, and what would stop it is said before a model is loaded.

The hub is played by an object that records what it is asked; of the real one only what needs no answer is run.
"""

import json
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


def test_the_folder_is_uploaded_once_it_is_written(trained, hub, capsys):
    played = hub()
    capsys.readouterr()
    command = ["export", "runs/t", "--out", "out", "--push-to-hub", "me/redder", "--private", "--format", "json"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["url"] == "https://hub/me/redder"
    assert [name for name, _, _ in played.calls] == [
        "whoami",
        "create_repo",
        "auth_check",
        "model_info",
        "upload_folder",
    ]
    assert played.calls[1][1:] == (("me/redder",), {"private": True, "exist_ok": True})
    assert played.calls[2][1:] == (("me/redder",), {"write": True})
    assert played.calls[4][2] == {"repo_id": "me/redder", "folder_path": Path("out"), "commit_message": "t, step 2"}
    assert Path("out/README.md").is_file()


@pytest.mark.parametrize(
    ("refusals", "said"),
    [
        (
            {"whoami": errors.LocalTokenNotFoundError("no")},
            "nobody is logged in to the model hub; log in with `hf auth",
        ),
        ({"whoami": answer(401)}, "the model hub does not know this token; log in with"),
        ({"create_repo": answer(403)}, "this user or token has no right to write there"),
        ({"auth_check": answer(404, errors.RepositoryNotFoundError)}, "this user or token has no right to write there"),
        ({"auth_check": answer(500)}, "the model hub refused (no)"),
        ({"whoami": httpx.ConnectError("no")}, "the model hub cannot be reached (ConnectError); export without it"),
    ],
)
def test_what_stops_an_upload_is_said_before_the_model_is_loaded(trained, hub, capsys, monkeypatch, refusals, said):
    played = hub(refusals)
    monkeypatch.setattr("flowgrpo.flow.setup.policy_and_weights", lambda *a: pytest.fail("the model was loaded"))
    capsys.readouterr()
    assert main(["export", "runs/t", "--out", "out", "--push-to-hub", "me/redder"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"flowgrpo: --push-to-hub me/redder: {said}")
    assert printed.count("\n") == 1
    assert not Path("out").exists()
    assert "upload_folder" not in [name for name, _, _ in played.calls]


@pytest.mark.parametrize("cause", ["comfyui", "prompts", "model"])
def test_an_export_that_is_refused_makes_no_repository(trained, hub, capsys, monkeypatch, cause):
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
    capsys.readouterr()
    assert main(["export", "runs/t", "--out", "out", *options, "--push-to-hub", "me/redder"]) == 2
    assert said in capsys.readouterr().err
    assert played.calls == []
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--push-to-hub", "redder lora"],
            "--push-to-hub redder lora: a repository is named OWNER/NAME, such as your-name/",
        ),
        (["--private"], "--private: it is for --push-to-hub"),
    ],
)
def test_wrong_options_are_refused(trained, capsys, options, said):
    capsys.readouterr()
    assert main(["export", "runs/t", "--out", "out", *options]) == 2
    assert capsys.readouterr().err.startswith(f"flowgrpo: {said}")


def test_a_public_repository_does_not_get_what_should_be_private(trained, hub, capsys):
    played = hub(private=False)
    capsys.readouterr()
    assert main(["export", "runs/t", "--out", "out", "--push-to-hub", "me/redder", "--private"]) == 2
    assert "--private: me/redder is there and is public" in capsys.readouterr().err
    assert not Path("out").exists()
    assert main(["export", "runs/t", "--out", "out", "--push-to-hub", "me/redder"]) == 0
    assert played.calls[-1][0] == "upload_folder"


def test_an_upload_that_fails_leaves_the_export_and_says_how_to_go_on(trained, hub, capsys):
    hub({"upload_folder": httpx.ReadTimeout("slow")})
    capsys.readouterr()
    assert main(["export", "runs/t", "--out", "out", "--push-to-hub", "me/redder"]) == 1
    printed = capsys.readouterr().err
    assert "the export is whole in out, but its upload failed (ReadTimeout: slow)" in printed
    assert "hf upload me/redder out" in printed
    assert Path("out/pytorch_lora_weights.safetensors").is_file()


def test_without_the_hub_the_real_library_is_refused_in_one_sentence(trained, capsys, monkeypatch):
    capsys.readouterr()
    assert main(["export", "runs/t", "--out", "out", "--push-to-hub", "me/redder"]) == 2
    assert "--push-to-hub me/redder: HF_HUB_OFFLINE is set" in capsys.readouterr().err
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.hf_api.get_token", lambda: None)
    assert main(["export", "runs/t", "--out", "out", "--push-to-hub", "me/redder"]) == 2
    assert "--push-to-hub me/redder: nobody is logged in" in capsys.readouterr().err
