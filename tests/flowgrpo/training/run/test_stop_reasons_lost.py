"""A process that has lost another says so, and blames nothing else for it."""

import pytest
import tiny

from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.flow.pipeline.batching import Capabilities
from flowgrpo.flow.pipeline.policy import DiffusersPolicy
from flowgrpo.flow.pipeline.slice_probe import probe
from flowgrpo.training.run.stop_reasons import is_lost

SAID = "[/gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:2996"


def test_only_one_of_several_processes_loses_another(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert not is_lost(RuntimeError(SAID))  # of the hub, say
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not is_lost(RuntimeError(SAID))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert is_lost(RuntimeError(SAID))
    assert not is_lost(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_lost(ValueError(SAID))


@pytest.mark.parametrize("calls", [0, 12], ids=["alone", "of rows together"])
def test_a_pipeline_whose_network_waits_for_a_process_that_has_gone_is_not_blamed(monkeypatch, calls):
    monkeypatch.setenv("WORLD_SIZE", "2")
    pipe = tiny.sd3()
    made = pipe.transformer.forward
    done = []

    def forward(*args, **kwargs):
        done.append(0)
        if len(done) > calls:
            raise RuntimeError(SAID)
        return made(*args, **kwargs)

    pipe.transformer.forward = forward
    policy = DiffusersPolicy(pipe, tiny.CALLS["sd3"])
    rows = [Row("a red circle", 0), Row("a blue square", 1)]
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        probe(policy.walk, rows, "model.call", Capabilities())
    monkeypatch.delenv("WORLD_SIZE")
    done.clear()
    if calls == 0:
        with pytest.raises(InputError, match="refuses {.*}: RuntimeError"):
            probe(policy.walk, rows, "model.call", Capabilities())
