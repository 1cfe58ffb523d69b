"""A language model that cannot fit is refused with what would make it smaller."""

from types import SimpleNamespace

import pytest
import torch

from flowgrpo import config
from flowgrpo.errors import InputError
from flowgrpo.mdlm.models import memory_estimate


def test_a_refusal_names_what_is_not_set_yet_and_what_it_spares(monkeypatch):
    monkeypatch.setattr(memory_estimate, "shapes", lambda place, **_: {"layers.0.q_proj.weight": (16_000, 1_000_000)})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=8 * 2**30))
    for quantise, said in (
        (None, "; 21.9 GiB less with model.quantise=nf4, 14.9 GiB less with model.quantise=int8"),
        ("int8", "; 7.0 GiB less with model.quantise=nf4"),
    ):
        model = {"path": "digits", "dtype": "bfloat16", "lora": {"rank": 1, "alpha": 1}, "quantise": quantise}
        with pytest.raises(InputError) as refused:
            memory_estimate.check(config.validate({"kind": "mdlm", "model": model}), torch.device("cuda"))
        assert said in str(refused.value)
        assert f"model.quantise={quantise}" not in str(refused.value)
        assert "model.dtype" not in str(refused.value)
