"""What does not work here is refused before a run begins."""

import shutil
from pathlib import Path

import pytest
import torch
from in_turn import after_first_step
from packaging.version import Version
from runs import metrics, weights

from flowgrpo import config
from flowgrpo.cli import main
from flowgrpo.errors import InputError
from flowgrpo.flow import setup
from flowgrpo.flow.pipeline.networks import attention

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            {"model.attention": "flash"},
            "model.attention: flash cannot train in float32 on cpu here .*install `flash-attn",
        ),
        pytest.param(
            {"model.attention": "flex"},
            "model.attention: flex cannot train in float32 on cpu here .*backward on CPU",
            marks=pytest.mark.skipif(Version(torch.__version__) < Version("2.10"), reason="torch 2.9 trains with it"),
        ),
        ({"model.attention": "native"}, "SD3Transformer2DModel has its attention fixed to PyTorch's own"),
        (
            {"model.compile": True},
            "model.compile: PyTorch compiles for cpu with no-such-compiler, which is not installed",
        ),
    ],
)
def test_what_does_not_work_here_is_refused_at_load(workplace, monkeypatch, overrides, said):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(InputError, match=said):
        setup.policy_and_weights(config.load("tiny.yaml", overrides), CPU)


def test_an_attention_whose_package_is_missing_is_refused(monkeypatch):
    monkeypatch.setattr("flowgrpo.flow.pipeline.networks.attention.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"xformers is not installed here: pip install 'flowgrpo\[xformers\]'$"):
        attention.try_attention("xformers", "float32", torch.device("cuda"))  # nothing touches it


def test_a_lossy_attention_of_the_environment_is_refused(workplace, monkeypatch):
    monkeypatch.setattr(setup, "DIFFUSERS_ATTN_BACKEND", "sage")
    with pytest.raises(InputError, match="DIFFUSERS_ATTN_BACKEND: 'sage' quantises"):
        setup.policy_and_weights(config.load("tiny.yaml"), CPU)


def test_all_weights_may_be_trained_from_a_lora_that_is_merged(trained):
    """Its first held-out reward is that of the run whose LoRA it is, and a resume needs the run's own copy alone."""
    shutil.copytree(trained / "runs" / "t", "other")
    common = [
        "model.lora=null",
        "model.merge=other",
        "algorithm.objective.kl={form: exact, beta: 0.5}",
        "train.updates=1",
    ]
    assert main(["train", "tiny.yaml", *common, "run.name=whole"]) == 0
    whole = trained / "runs" / "whole"
    earned = [line["reward/mean"] for line in metrics(trained / "runs" / "t", "eval")]
    assert metrics(whole, "eval")[0]["reward/mean"] == pytest.approx(earned[-1], abs=1e-6)
    assert abs(earned[-1] - earned[0]) > 1e-4
    assert metrics(whole)[0]["policy/max_abs_log_ratio"] == 0
    assert metrics(whole)[0]["policy/kl"] == pytest.approx(0, abs=1e-9)  # from the merged start
    assert not any(".lora_" in name for name in weights(whole, 2))
    after_first_step(Path("runs"), "whole", "half")
    shutil.rmtree("other")
    assert main(["train", "tiny.yaml", *common, "run.name=half", "run.resume=true"]) == 0
    resumed = weights(trained / "runs" / "half", 2)
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in weights(whole, 2).items())
    assert main(["export", "runs/whole", "--out", "exported"]) == 0
    assert (
        "Training started from the LoRA `other`, which is in these weights." in Path("exported/README.md").read_text()
    )


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["model.merge=other"],
            "model.merge: it needs model.lora=null; adapters start from model.lora.path instead",
        ),
        (["model.lora=null", "model.merge=other"], "model.merge: there is no file or folder 'other'"),
    ],
)
def test_a_lora_that_cannot_be_merged_is_one_sentence(workplace, capsys, overrides, said):
    assert main(["train", "tiny.yaml", *overrides]) == 2
    assert said in capsys.readouterr().err
