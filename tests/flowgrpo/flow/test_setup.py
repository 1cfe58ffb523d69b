"""What does not work here is refused before a run begins."""

import pytest
import torch
from packaging.version import Version

from flowgrpo import config
from flowgrpo.errors import InputError
from flowgrpo.flow import setup
from flowgrpo.flow.pipeline import attention

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
    monkeypatch.setattr("flowgrpo.flow.pipeline.attention.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"xformers is not installed here: pip install 'flowgrpo\[xformers\]'$"):
        attention.try_attention("xformers", "float32", torch.device("cuda"))  # nothing touches it


def test_a_lossy_attention_of_the_environment_is_refused(workplace, monkeypatch):
    monkeypatch.setattr(setup, "DIFFUSERS_ATTN_BACKEND", "sage")
    with pytest.raises(InputError, match="DIFFUSERS_ATTN_BACKEND: 'sage' quantises"):
        setup.policy_and_weights(config.load("tiny.yaml"), CPU)
