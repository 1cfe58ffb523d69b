"""A base that torchao or bitsandbytes quantises: sizes, gradients, language models, and what is refused in a sentence.

What needs these libraries runs where they are installed.
"""

import json
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import tiny
import torch
from released import released
from transformers import LlamaConfig, LlamaForCausalLM

from flowgrpo import config
from flowgrpo.cli import main
from flowgrpo.commands import sampling
from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.flow.pipeline.loading.load import load_policy
from flowgrpo.mdlm.models.load import load_predictor
from flowgrpo.schema.lora import Quantised
from flowgrpo.training.weights import library_quantisation
from flowgrpo.training.weights.library_quantisation import LIBRARY_FORMS, library_config
from flowgrpo.training.weights.quantisation import FORMS, quantise, refuse_dynamic, size
from flowgrpo.training.weights.trained_weights import Weights, lora_config

DTYPE = torch.float32
TORCHAO = ("torchao_int8", "torchao_fp8")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder with a tiny Llama, whose layers' rows are of 64 and more."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llama")
    sizes = {"vocab_size": 16, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).save_pretrained(folder)
    return folder


def kept(tensor):
    """Bytes of a tensor, of a library's with all its parts."""
    if not hasattr(tensor, "__tensor_flatten__"):
        state = getattr(tensor, "quant_state", None)
        return tensor.nbytes + (0 if state is None else state.absmax.nbytes)
    parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return sum(part.nbytes for part in parts if part is not None)


def loaded(llama, word):
    pytest.importorskip(LIBRARY_FORMS[word].library)
    options = library_quantisation.model_options(word, DTYPE)
    return LlamaForCausalLM.from_pretrained(llama, dtype=DTYPE, **options)


@pytest.mark.parametrize("word", LIBRARY_FORMS)
def test_the_size_is_that_of_what_a_library_keeps(llama, word):
    model, whole = loaded(llama, word), LlamaForCausalLM.from_pretrained(llama, dtype=DTYPE)
    shapes = {name: tuple(p.shape) for name, p in whole.named_parameters()}
    assert size(shapes, 4, word) == sum(kept(p) for p in model.parameters())
    assert size(shapes, 4, word) < size(shapes, 4, None)


@pytest.mark.parametrize("word", LIBRARY_FORMS)
def test_it_computes_nearly_what_our_own_form_does(llama, word):
    model, own = loaded(llama, word), LlamaForCausalLM.from_pretrained(llama, dtype=DTYPE)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        whole = own(ids).logits
        quantise(own, LIBRARY_FORMS[word].like)
        ours, theirs = own(ids).logits, model(ids).logits
    assert not torch.equal(theirs, whole)
    assert (theirs - ours).norm() < 0.1 * (ours - whole).norm() + 0.01 * whole.norm()


@pytest.mark.parametrize("word", LIBRARY_FORMS)
def test_every_adapter_learns_on_it_and_the_reference_is_the_quantised_base(llama, word):
    model, ids = loaded(llama, word).requires_grad_(False), torch.arange(8)[None]
    refuse_dynamic(model)
    with torch.no_grad():
        base = model(ids).logits
    weights = Weights({"model": model}, lora_config(2, 4, "all-linear", {"model": model}), reference="fixed")
    for p in weights.parameters:
        torch.nn.init.normal_(p, std=0.2)
    out = model(ids).logits
    assert not torch.equal(out, base)
    out.square().sum().backward()
    assert len(weights.parameters) == 2 * 2 * 7  # two halves on each of the seven layers of both blocks
    assert all(p.grad.abs().sum() > 0 for p in weights.parameters)
    with torch.no_grad(), weights.reference():
        assert torch.equal(model(ids).logits, base)


def test_files_that_are_quantised_already_are_refused(llama, tmp_path):
    loaded(llama, "bnb_nf4").save_pretrained(tmp_path)
    model = loaded(tmp_path, "bnb_nf4")
    with pytest.raises(InputError, match="^model.quantise: the model's weights are quantised already in its files"):
        library_quantisation.refuse_quantised(model, "bnb_nf4")
    library_quantisation.refuse_quantised(model, None)


@pytest.mark.parametrize("word", LIBRARY_FORMS)
def test_without_its_library_it_is_refused_in_a_sentence(workplace, capsys, monkeypatch, word):
    monkeypatch.setattr(library_quantisation, "find_spec", lambda name: None)
    form = LIBRARY_FORMS[word]
    said = f"model.quantise: {word} needs the package {form.library}, pip install 'flowgrpo[8bit]', or take {form.like}"
    assert main(["train", "tiny.yaml", f"model.quantise={word}"]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not Path("runs").exists()
    assert main(["sample", "shapes", "--prompt", "a red circle", "--quantise", word, "--out", "out"]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    with pytest.raises(InputError, match="needs the package"):
        load_predictor("digits", quantise=word)
    assert main(["plan", "tiny.yaml", f"model.quantise={word}"]) == 0


def test_layers_that_are_split_while_they_are_loaded_are_refused_by_torchao(tmp_path):
    pytest.importorskip("torchao")
    place = str(released("llada2", tmp_path / "llada2"))
    with pytest.raises(InputError, match="^model.quantise: files of a llada2_moe hold several layers in one"):
        load_predictor(place, quantise="torchao_int8")
    load_predictor(place, quantise="int8")


def test_bitsandbytes_through_diffusers_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(library_quantisation, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(
        InputError, match="^model.quantise: diffusers lets bitsandbytes quantise on a GPU only, take nf4"
    ):
        library_config("bnb_nf4", "diffusers", DTYPE)
    library_quantisation.check("bnb_nf4", diffuses=False)
    library_quantisation.check("torchao_int8", diffuses=True)
    assert library_config("nf4", "diffusers", DTYPE) is library_config(None, "transformers", DTYPE) is None


def test_the_words_are_those_of_the_config_and_of_the_command():
    words = {*FORMS, *LIBRARY_FORMS}
    assert set(get_args(Quantised)) == words
    option, _ = get_args(get_type_hints(sampling.sample)["quantise"])
    assert set(get_args(option)) == words
    asked = {"model": {"path": "shapes", "lora": None, "quantise": "torchao_int8"}}
    with pytest.raises(InputError, match=r"model\.quantise: only a frozen base can be quantised"):
        config.validated(asked)


@pytest.mark.parametrize("word", TORCHAO)
def test_the_gradient_of_a_pipeline_reaches_every_adapter_without_drift(tmp_path, word):
    pytest.importorskip("torchao")
    tiny.flux().save_pretrained(tmp_path / "flux")
    policy = load_policy(str(tmp_path / "flux"), "bfloat16", tiny.CALLS["flux"], "cpu", quantise=word)
    weights = Weights(policy.modules, lora_config(4, 8, "all-linear", policy.modules))
    for p in weights.parameters:
        torch.nn.init.normal_(p, std=0.2)
    rows = [Row("a red circle", 3)]
    state = policy.start(rows)
    with torch.no_grad():
        (rolled_out,) = policy.velocity(state, policy.sigmas[1], rows)
    (replayed,) = policy.velocity(state, policy.sigmas[1], rows)
    assert torch.equal(replayed, rolled_out)
    replayed.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in weights.parameters)


def test_a_plan_counts_what_torchaos_graphs_keep_and_small_moments(workplace, capsys):
    phases = []
    for options in (["model.quantise=int8"], ["model.quantise=torchao_int8", "train.optimizer=adamw8bit"]):
        assert main(["plan", "tiny.yaml", *options, "--gpu-memory", "24", "--format", "json"]) == 0
        found = json.loads(capsys.readouterr().out)
        phases.append({phase["phase"]: phase for phase in found["gpu"]["phases"]})
    own, theirs = (each["update"] for each in phases)
    assert own["optimizer"] * 2.03125 / 8 == pytest.approx(theirs["optimizer"], abs=1)
    assert theirs["activations"] > own["activations"]
    assert phases[1]["rollout"]["activations"] < theirs["activations"]
