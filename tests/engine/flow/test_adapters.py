"""Pushes: an engine computes with the adapters of the run, and one that does not is found out."""

import pytest
import torch

from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.schema.engine import Engine
from flowgrpo.training.lora import lora_files, lora_layers
from flowgrpo_engine.flow.adapters import Adapters
from flowgrpo_engine.flow.client import Client
from flowgrpo_engine.service import EngineError

ROWS = [Row("a red circle", 1), Row("two blue square", 2)]


@pytest.fixture
def adapters(url, weights, tmp_path):
    return Adapters(Client(Engine(url=url, retries=0, timeout=20)), weights, tmp_path / "pushed", "run")


def velocities(*policies):
    state = policies[0].start(ROWS)
    with torch.no_grad():
        return [policy.velocity(state, 0.8, ROWS)[0] for policy in policies]


def test_a_push_makes_the_engine_compute_what_the_policy_computes(engine, policy, adapters):
    """The engine takes the rank for alpha, as its source does; ours is three times that."""
    ours, theirs = velocities(policy, engine.policy)
    assert (ours - theirs).abs().max() > 0.01
    adapters.push()
    ours, theirs = velocities(policy, engine.policy)
    torch.testing.assert_close(theirs, ours, rtol=0, atol=2e-6)


def test_what_is_pushed_is_a_lora_file_by_the_names_of_diffusers(adapters, weights):
    adapters.push()
    (file,) = adapters.folder.iterdir()
    layers = lora_layers.layers_of(lora_files.read(str(file)))
    assert set(layers) == {
        f"transformer.{key.removesuffix('.lora_A.weight')}"
        for key in weights.adapter_state("transformer")
        if key.endswith(".lora_A.weight")
    }
    assert {(matrices.rank, matrices.alpha) for matrices in layers.values()} == {(2, 2)}


def test_each_version_has_a_nickname_of_its_own_and_the_files_of_before_are_deleted(engine, adapters, weights):
    adapters.push()
    (first,) = adapters.folder.iterdir()
    asked = len(engine.asked)
    adapters.push()  # of what is there already
    assert [path for path, _ in engine.asked[asked:]] == ["/v1/list_loras"]
    with torch.no_grad():
        weights.parameters[0].add_(1.0)
    others = adapters.folder / f"other-{first.name}"
    others.touch()
    adapters.push()
    others.unlink()
    (second,) = adapters.folder.iterdir()
    assert first != second
    names = [body["lora_nickname"] for path, body in engine.asked if path == "/v1/set_lora"]
    assert names == [first.stem, first.stem, second.stem]  # the first twice, as layers are renamed once
    assert engine.merged == second.stem


def test_before_each_push_the_last_one_is_taken_out(engine, adapters):
    adapters.push()
    paths = [path.rpartition("/")[2] for path, _ in engine.asked]
    assert paths == [
        *("unmerge_lora_weights", "set_lora", "unmerge_lora_weights", "get_weights_checksum"),
        *("set_lora", "get_weights_checksum", "list_loras"),
    ]


def test_new_adapters_change_nothing_and_need_no_file(engine, adapters, weights):
    engine.merged = "somebody's"
    with torch.no_grad():
        for name, p in weights.named.items():
            if ".lora_B." in name:
                p.zero_()
    adapters.push()
    assert engine.merged is None
    assert not adapters.folder.exists()


@pytest.mark.parametrize("before", [False, True])
def test_a_push_that_was_skipped_without_a_word_is_an_error(engine, adapters, weights, before):
    if before:
        adapters.push()
        with torch.no_grad():
            weights.parameters[0].add_(1.0)
    engine.skips_pushes = True
    with pytest.raises(
        EngineError,
        match=r"answered that it merged run-transformer-\w+, but the checksum of its transformer did not change",
    ):
        adapters.push()


def test_adapters_of_which_the_engine_knows_no_layer_are_an_error(engine, adapters, weights, monkeypatch):
    real = weights.adapter_state
    monkeypatch.setattr(
        adapters, "_tensors", lambda: {"transformer": {f"other.{k}": t for k, t in real("transformer").items()}}
    )
    with pytest.raises(EngineError, match="it may have none of the layers of these adapters"):
        adapters.push()


def test_an_engine_that_somebody_else_gives_other_adapters_is_noticed(engine, adapters):
    adapters.push()
    name = engine.merged
    engine.merged = "other-run"
    with pytest.raises(
        EngineError,
        match=f"has the adapters transformer: other-run instead of the ones that the run sent, transformer: {name}",
    ):
        adapters.verify()
    adapters.release()
    assert engine.merged is None
    adapters.verify()
    adapters.push()  # of the same again, which is no push that was skipped
    assert engine.merged == name


def test_networks_and_biases_that_an_engine_leaves_out_are_refused(adapters, weights, monkeypatch):
    def again():
        return Adapters(adapters.client, weights, adapters.folder, "run")

    state = weights.adapter_state("transformer")
    monkeypatch.setattr(weights, "adapter_state", lambda network: {**state, "layer.lora_B.bias": torch.ones(2)})
    with pytest.raises(
        InputError,
        match=r"^model.lora.path: its adapters have biases, which an engine ignores; start from other adapters",
    ):
        again()
    monkeypatch.setattr(weights, "modules", {"unet": None})
    with pytest.raises(
        InputError, match=r"^run.engine: an engine takes adapters of transformer and transformer_2, not of unet"
    ):
        again()


class TwoNetworks:
    """An engine of two networks, as its client sees it."""

    urls = ("http://engine",)

    def __init__(self):
        self.merged = {}

    def remove_adapters(self, url):
        self.merged = {}

    def set_adapters(self, url, files):
        self.merged = {network: nickname for network, (nickname, _) in files.items()}

    def checksums(self, url, networks):
        return {network: f"{network} {self.merged.get(network)}" for network in networks}

    def active(self, url):
        return {network: [nickname] for network, nickname in self.merged.items()}


def test_of_two_networks_one_may_stay_as_it_was(adapters, monkeypatch):
    """Only the experts of a window's noise levels move in an iteration."""
    tensors = {network: {"layer.lora_B.weight": torch.ones(2, 2)} for network in ("transformer", "transformer_2")}
    monkeypatch.setattr(adapters, "_tensors", lambda: tensors)
    adapters.client = TwoNetworks()
    adapters.push()
    before = dict(adapters.client.merged)
    tensors["transformer"] = {"layer.lora_B.weight": torch.full((2, 2), 2.0)}
    adapters.push()
    after = adapters.client.merged
    assert before["transformer"] != after["transformer"]
    assert before["transformer_2"] == after["transformer_2"]
