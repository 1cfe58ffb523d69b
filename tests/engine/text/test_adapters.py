"""Pushes to an engine of texts: it computes with the adapters of the run, and one that has not got them is found out."""

import pytest
import torch

from flowgrpo.mdlm.models.lora_targets import write_adapter
from flowgrpo.schema.engine import Engine
from flowgrpo.training.lora import lora_files, lora_layers
from flowgrpo_engine.service import EngineError
from flowgrpo_engine.text.adapters import Adapters
from flowgrpo_engine.text.client import Client


@pytest.fixture
def adapters(url, settings, learner, tmp_path):
    policy, weights = learner

    def write(out):
        write_adapter(settings.model, policy.predictor.model, weights, out)

    client = Client(Engine(url=url, retries=0, timeout=20))
    return Adapters(client, weights, tmp_path / "pushed", "run", write=write)


def probabilities(*policies):
    ids, seen = policies[0].prompts(["1,2,3=6:"])
    canvas = torch.nn.functional.pad(ids, (0, 4), value=policies[0].predictor.mask_id)
    known = torch.nn.functional.pad(seen, (0, 4), value=True)
    with torch.no_grad():
        return [policy.predictor.logits(canvas, known).softmax(-1) for policy in policies]


def move(weights):
    with torch.no_grad():
        weights.parameters[0].add_(1.0)


def test_a_push_makes_the_engine_compute_what_the_policy_computes(engine, learner, adapters):
    ours, theirs = probabilities(learner[0], engine.policy)
    assert (ours - theirs).abs().max() > 0.01
    adapters.push()
    engine.compute_with(adapters.pushed)
    ours, theirs = probabilities(learner[0], engine.policy)
    torch.testing.assert_close(theirs, ours, rtol=0, atol=2e-5)


def test_what_is_pushed_is_a_folder_that_peft_loads(adapters, learner):
    adapters.push()
    (folder,) = adapters.folder.iterdir()
    assert {file.name for file in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    layers = lora_layers.layers_of(lora_files.read(str(folder)))
    assert {(matrices.rank, matrices.alpha) for matrices in layers.values()} == {(2, 6)}


def test_each_version_has_a_name_of_its_own_and_the_one_before_is_gone(engine, adapters, learner):
    adapters.push()
    (first,) = adapters.folder.iterdir()
    asked = len(engine.asked)
    adapters.push()  # of what is there already
    assert [path for path, _ in engine.asked[asked:]] == ["/v1/models"]
    move(learner[1])
    others = adapters.folder / f"other-{first.name}"
    others.mkdir()
    engine.loaded["other-run"] = {}, {"path": "elsewhere"}
    adapters.push()
    assert others.is_dir()
    (second,) = set(adapters.folder.iterdir()) - {others}
    assert first != second
    assert {*engine.loaded} == {second.name, "other-run"}
    assert adapters.pushed == second.name


def test_a_program_that_goes_on_takes_what_is_loaded_and_forgets_the_rest(engine, adapters, learner):
    adapters.push()
    first = adapters.pushed
    again = Adapters(adapters.client, learner[1], adapters.folder, "run", write=adapters.write_adapter)
    again.push()
    assert again.pushed == first
    assert [path for path, _ in engine.asked].count("/load_lora_adapter") == 1
    move(learner[1])
    later = Adapters(adapters.client, learner[1], adapters.folder, "run", write=adapters.write_adapter)
    later.push()
    assert {*engine.loaded} == {later.pushed} != {first}


def test_new_adapters_change_nothing_and_need_no_folder(engine, adapters, learner):
    with torch.no_grad():
        for name, p in learner[1].named.items():
            if ".lora_B." in name:
                p.zero_()
    adapters.push()
    assert (adapters.pushed, engine.loaded) == (None, {})
    assert not adapters.folder.exists()


def test_a_push_that_was_skipped_without_a_word_is_an_error(engine, adapters):
    engine.skips_pushes = True
    with pytest.raises(
        EngineError, match=r"has the adapters none instead of the ones that the run sent, model: run-model-\w+$"
    ):
        adapters.push()


def test_an_engine_that_forgot_an_adapter_or_took_another_file_is_noticed(engine, adapters):
    adapters.push()
    name = adapters.pushed
    engine.loaded[name][1]["path"] = "/elsewhere"
    adapters.named = None
    with pytest.raises(
        EngineError, match=rf"has {name} from /elsewhere, not from /.*{name}; check that it sees the same folder"
    ):
        adapters.push()
    adapters.release()
    assert engine.loaded == {}
    adapters.push()
    engine.loaded.clear()
    with pytest.raises(EngineError, match="has the adapters none instead of the ones that the run sent"):
        adapters.verify()


def test_a_load_that_fails_is_a_sentence_with_its_reason(engine, adapters, monkeypatch):
    monkeypatch.setattr(
        engine, "load", lambda body: {"success": False, "error_message": "LoRA is not enabled.\nPlease set"}
    )
    with pytest.raises(EngineError, match=r"/load_lora_adapter answered 400: .*LoRA is not enabled"):
        adapters.push()
