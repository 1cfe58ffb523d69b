"""Mistakes of a first hour: each ends in one sentence, before the model is loaded, and the page of mistakes explains it.

`tests/data/first_mistakes.yaml` is the table; functions below change the machine for the mistakes that need it.
"""

import errno
import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import httpx2 as httpx
import pytest
import torch
import yaml
from conftest import ROOT, copy_run
from diffusers import DiffusionPipeline, SD3Transformer2DModel
from huggingface_hub import constants, errors

from flowgrpo.cli import main
from flowgrpo.commands import launch
from flowgrpo.training.reports import trackers
from flowgrpo.training.weights import optimizers
from rewards.models import hub
from rewards.served import endpoint

PAGE = "docs/reference/mistakes.md"
MISTAKES = yaml.safe_load((ROOT / "tests/data/first_mistakes.yaml").read_text())
ENTRY = re.compile(r"^- `([^`]+)`:", re.MULTILINE)


def trained(finished, patch):
    copy_run(finished, Path.cwd())


def no_checkpoints(finished, patch):
    trained(finished, patch)
    shutil.rmtree("runs/t/checkpoints")


def old_checkpoint(finished, patch):
    trained(finished, patch)
    for file in Path("runs/t/checkpoints").glob("*/state.json"):
        state = json.loads(file.read_text())
        file.write_text(json.dumps({key: state[key] for key in ("step", "updates", "beta")}))


def small_gpu(finished, patch):
    def forward(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    patch.setattr(SD3Transformer2DModel, "forward", forward)


def exported(finished, patch):
    assert main(["export", str(finished / "runs" / "t"), "--out", "lora"]) == 0


def impatient(finished, patch):
    patch.setattr(endpoint, "FIRST_PAUSE", 0)


def _of_hub(patch, error):
    def load(*arguments, **options):
        raise OSError("wrapped") from error

    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.setattr(hub, "is_reachable", lambda: True)
    patch.setattr(DiffusionPipeline, "load_config", load)


def _answer(kind, status):
    return kind("no", response=httpx.Response(status, request=httpx.Request("GET", "http://127.0.0.1/owner/model")))


def gated(finished, patch):
    _of_hub(patch, _answer(errors.GatedRepoError, 403))


def private(finished, patch):
    _of_hub(patch, _answer(errors.RepositoryNotFoundError, 401))


def unreachable(finished, patch):
    _of_hub(patch, httpx.ConnectError("no"))


def one_gpu(finished, patch):
    patch.setattr(torch.accelerator, "device_count", lambda: 1)


def no_cuda_build(finished, patch):
    patch.setattr(launch, "GPU", Path("tiny.yaml"))
    patch.setattr(torch.version, "cuda", None)
    patch.setattr(torch.accelerator, "is_available", lambda: False)
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def small_machine(finished, patch):
    patch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=2**10))


def no_bitsandbytes(finished, patch):
    patch.setattr(optimizers, "find_spec", lambda name: None)


def full_disk(finished, patch):
    def mkdir(path, *arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    patch.setattr(Path, "mkdir", mkdir)


def logged_out(finished, patch):
    patch.setattr(trackers, "get_available_trackers", lambda: [SimpleNamespace(value="wandb")])
    patch.setitem(sys.modules, "wandb", SimpleNamespace(login=lambda prompt=None: False))
    patch.delenv("WANDB_MODE", raising=False)


@pytest.mark.parametrize("made", MISTAKES, ids=lambda made: made["mistake"])
def test_a_first_mistake_ends_in_one_sentence(made, workplace, finished, monkeypatch, capsys, request):
    for name, text in made.get("files", {}).items():
        (workplace / name).parent.mkdir(parents=True, exist_ok=True)
        (workplace / name).write_text(text, encoding=made.get("encoding", "utf-8"))
    if "with" in made:
        globals()[made["with"]](finished, monkeypatch)
    if not made.get("loads"):
        request.getfixturevalue("unloaded")
    capsys.readouterr()
    status = made.get("status", 2)
    assert main(shlex.split(made["run"])) == status
    said = capsys.readouterr().err
    assert made["says"] in said
    assert "Traceback" not in said
    if status == 2:
        assert said.startswith("flowgrpo: ")
        assert said.count("\n") == 1


def test_the_page_has_an_entry_for_each_mistake():
    entries = ENTRY.findall((ROOT / PAGE).read_text())
    assert len(entries) == len(set(entries))
    assert set(entries) == {made["entry"] for made in MISTAKES}


def test_an_entry_stands_in_the_sentence_of_a_mistake():
    """Names are left out: in an entry they are written in capitals."""
    for entry in {made["entry"] for made in MISTAKES}:
        words = ".*".join(map(re.escape, re.split(r"[A-Z]{4,}", entry)))
        assert any(re.search(words, made["says"]) for made in MISTAKES if made["entry"] == entry), entry
