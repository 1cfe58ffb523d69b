import pytest
import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from predictors import MASK, PAD, VOCAB, llama, qwen, random_table
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, RobertaConfig, RobertaForMaskedLM

from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding.network.mask_probe import Form
from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor
from flowgrpo.mdlm.methods.likelihoods.answers import Answers
from flowgrpo.mdlm.methods.likelihoods.estimate import Call, log_probs
from flowgrpo.mdlm.methods.likelihoods.likelihood import autoregressive
from flowgrpo.training.fitting.saved_tensor_meter import SavedTensorMeter

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [MASK, 7, 1, MASK, 2, 8, MASK, 8]])


def encoder(kind, config):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    return kind(config(vocab_size=VOCAB, pad_token_id=PAD, initializer_range=0.4, **sizes)).double().eval()


@pytest.mark.parametrize("model", [llama(), llama(attn_implementation="eager"), qwen()])
def test_causal_classes_become_bidirectional_and_the_mask_token_is_never_predicted(model):
    plain = model(IDS, use_cache=False).logits
    changed = IDS.clone()
    changed[:, -1] = 0
    assert torch.equal(plain[:, 0], model(changed, use_cache=False).logits[:, 0])  # as the class is by itself
    predictor = MaskPredictor(model, MASK, PAD)
    assert predictor.form == Form("4d")
    first, second = predictor.logits(IDS), predictor.logits(changed)
    assert (first - second)[:, 0, :MASK].abs().max() > 1e-3
    assert (first[..., MASK] == -torch.inf).all()
    assert first[..., :MASK].isfinite().all()
    assert predictor.evaluations == 4


ENCODERS = [encoder(BertForMaskedLM, BertConfig), encoder(RobertaForMaskedLM, RobertaConfig)]


@pytest.mark.parametrize("model", [llama(), qwen(), *ENCODERS])
@pytest.mark.parametrize("shift", [False, True])
def test_padding_changes_no_logit(model, shift):
    predictor = MaskPredictor(model, MASK, PAD, shift=shift)
    padded = torch.cat([torch.full((2, 5), PAD), IDS], dim=1)
    mask = (torch.arange(13) >= 5).expand(2, -1)
    torch.testing.assert_close(predictor.logits(padded, mask, start=5), predictor.logits(IDS), rtol=0, atol=1e-9)


def test_a_model_that_begins_autoregressive_is_shifted_to_the_aligned_one():
    aligned = random_table(8)
    shifted = MaskPredictor(lambda ids: aligned.model(ids).roll(-1, 1), MASK, shift=True)
    assert torch.equal(shifted.logits(IDS)[:, 1:], aligned.logits(IDS)[:, 1:])
    assert torch.equal(shifted.logits(IDS)[:, 0], aligned.logits(IDS)[:, 1])  # the first output stands for two
    assert torch.equal(shifted.logits(IDS, start=3, stop=6), aligned.logits(IDS, start=3, stop=6))


def test_guidance_pushes_away_from_a_masked_prompt():
    predictor = MaskPredictor(llama(), MASK)
    blind = IDS.clone()
    blind[:, :3] = MASK
    c, u = predictor.logits(IDS)[..., :MASK], predictor.logits(blind)[..., :MASK]
    guided = predictor.guide(IDS, None, torch.tensor([0.0, 1.5]), prompt=3)
    torch.testing.assert_close(guided[0, :, :MASK], c[0])
    torch.testing.assert_close(guided[1, :, :MASK], (u + 2.5 * (c - u))[1])
    assert (guided[..., MASK] == -torch.inf).all()


def test_a_model_that_sees_no_later_token_is_refused():
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))
    with pytest.raises(InputError, match="first position sees no later token"):
        MaskPredictor(lambda ids: table[ids].cumsum(1), MASK)


def test_a_model_in_training_is_probed_without_its_dropout():
    model = llama(attention_dropout=0.5).train()
    assert MaskPredictor(model, MASK, PAD).padded_form == Form("4d", True)
    assert model.training


@pytest.mark.parametrize("make", [llama, lambda: random_table(12).model])
@pytest.mark.parametrize(("mask_id", "pad_id", "message"), [(PAD, PAD, "padding token"), (VOCAB, None, "outside")])
def test_a_wrong_mask_token_is_refused(make, mask_id, pad_id, message):
    with pytest.raises(InputError, match=message):
        MaskPredictor(make(), mask_id, pad_id)


def test_another_mask_token_than_the_config_names_is_refused():
    model = llama()
    model.config.mask_token_id = MASK
    MaskPredictor(model, MASK)
    with pytest.raises(InputError, match="13 is not 15"):
        MaskPredictor(model, 13)


class Ignorant(torch.nn.Module):
    """A model that ignores which tokens are padding, as the released LLaDA does."""

    def __init__(self):
        super().__init__()
        self.inner = llama()

    def forward(self, input_ids, attention_mask=None, output_hidden_states=False):
        seen = torch.zeros(len(input_ids), 1, input_ids.shape[1], input_ids.shape[1], dtype=torch.float64)
        return self.inner(input_ids, attention_mask=seen, output_hidden_states=output_hidden_states)


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("start", [0, 2, 5])
def test_a_model_that_minds_padding_never_sees_it(shift, start):
    predictor = MaskPredictor(Ignorant(), MASK, PAD, shift=shift)
    assert predictor.padded_form is None
    rows = [IDS[0], IDS[1, 3:], IDS[1], IDS[0, 3:]]
    padded = torch.stack([torch.nn.functional.pad(row, (8 - len(row), 0), value=PAD) for row in rows])
    mask = torch.stack([torch.arange(8) >= 8 - len(row) for row in rows])
    logits, hidden = predictor.logits_and_hidden(padded, mask, start=start, stop=None, layers=2)
    assert predictor.evaluations == 4
    assert logits.shape == (4, 8 - start, VOCAB)
    for i, row in enumerate(rows):
        alone, own = predictor.logits_and_hidden(row[None], None, start=0, stop=None, layers=2)
        tokens = min(len(row), 8 - start)
        torch.testing.assert_close(logits[i, -tokens:], alone[0, -tokens:], rtol=0, atol=1e-9)
        for one, other in zip(hidden, own, strict=True):
            torch.testing.assert_close(one[i, -len(row) :], other[0], rtol=0, atol=1e-9)


WHERE = torch.tensor([[0, 1, 0, 0, 1, 0, 0, 1], [1, 0, 0, 1, 0, 0, 1, 1]]) > 0


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("model", [llama(), llama(tie_word_embeddings=True), qwen(), *ENCODERS, Ignorant()])
def test_logits_of_some_tokens_are_theirs_of_the_whole_canvas(model, shift):
    predictor = MaskPredictor(model, MASK, PAD, shift=shift)
    assert predictor.selects != isinstance(model, Ignorant)
    longer, where = torch.nn.functional.pad(IDS, (3, 0), value=PAD), torch.nn.functional.pad(WHERE, (3, 0))
    seen = torch.tensor([[False] * 3 + [True] * 8, [True] * 11])
    padded = longer, seen, where
    for ids, mask, where in ((IDS, None, WHERE), padded, [tensor.flip(0) for tensor in padded]):
        predictor.evaluations = 0
        found = predictor.logits_at(ids, mask, where)
        assert predictor.evaluations == 2
        torch.testing.assert_close(found, predictor.logits(ids, mask)[where], rtol=0, atol=1e-9)


@pytest.mark.parametrize("shift", [False, True])
def test_the_head_computes_the_columns_that_are_asked_for(shift):
    predictor = MaskPredictor(llama(), MASK, PAD, shift=shift)
    ids = torch.cat([torch.full((2, 3), PAD), IDS], dim=1)
    seen = torch.ones_like(ids, dtype=torch.bool)
    seen[0, :3] = False
    columns = slice(3, 6)
    predictor.selects = False
    expected = predictor.logits(ids, seen)[:, columns]
    predictor.selects, made = True, []
    predictor.head().register_forward_hook(lambda _, given, out: made.append(out.shape[:2]))
    found = predictor.logits(ids, seen, columns.start, columns.stop)
    assert made == [(2, 3)]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def test_a_head_that_is_not_asked_for_itself_computes_all_tokens():
    class Centred(LlamaForCausalLM):
        """What it says of one token depends on its logits of the others."""

        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            return out.logits - out.logits.mean(1, keepdim=True)

    predictor = MaskPredictor(Centred(llama().config).double().eval(), MASK, PAD)
    assert not predictor.selects
    torch.testing.assert_close(predictor.logits_at(IDS, None, WHERE), predictor.logits(IDS)[WHERE])
    table = random_table(8)
    assert not table.selects
    torch.testing.assert_close(table.logits_at(IDS, None, WHERE), table.logits(IDS)[WHERE])


def test_adapters_around_the_head_are_no_hindrance():
    predictor = MaskPredictor(llama(), MASK, PAD)
    plain = predictor.logits_at(IDS, None, WHERE)
    inject_adapter_in_model(LoraConfig(target_modules=["lm_head"], init_lora_weights=False), predictor.model)
    predictor.model.double()
    found = predictor.logits_at(IDS, None, WHERE)
    torch.testing.assert_close(found, predictor.logits(IDS)[WHERE])
    assert (found - plain)[:, :MASK].abs().max() > 1e-3


class Largest(TorchDispatchMode):
    """Watches how large tensors of a vocabulary are made, in bytes, but for a weight's transposed."""

    def __init__(self, vocabulary, width):
        super().__init__()
        self.vocabulary, self.bytes, self.weight = vocabulary, 0, (width, vocabulary)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        if isinstance(out, torch.Tensor) and out.shape[-1:] == (self.vocabulary,) and out.shape != self.weight:
            self.bytes = max(self.bytes, out.numel() * out.element_size())
        return out


@pytest.mark.parametrize("selects", [True, False])
def test_a_log_probability_takes_the_memory_of_the_tokens_that_it_is_of(selects):
    """One of 64 tokens in each of 4 rows, of 5,000 that there are, in bfloat16; at most 4 are in float32."""
    rows, length, vocabulary = 4, 64, 5000
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **sizes)).bfloat16().eval().requires_grad_(False)
    model.model.norm.weight.requires_grad_(True)
    predictor = MaskPredictor(model, MASK)
    assert predictor.selects
    predictor.selects = selects
    ids = torch.randint(vocabulary, (rows, 4 + length), generator=torch.Generator().manual_seed(1))
    seen, addresses = torch.ones_like(ids, dtype=torch.bool), [("row", row) for row in range(rows)]
    answers = Answers(ids=ids, attention_mask=seen, scored=seen[:, 4:], addresses=addresses)
    call = Call(torch.tensor([3, 9, 20, 60]), torch.arange(rows))
    with Largest(vocabulary, 16) as largest, SavedTensorMeter(model.parameters()) as meter:
        found = log_probs(predictor, answers, autoregressive(answers), call)
        kept = meter.now
        found.sum().backward()
    assert (found != 0).sum() == rows
    assert largest.bytes == rows * vocabulary * (4 if selects else 2 * (4 + length))
    beside = 2 * 3 * rows * (4 + length) * 16  # hidden states
    assert kept < rows * vocabulary * 2 + 4 * beside


def test_gradients_are_finite_and_adapters_are_no_hindrance():
    model = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)).double()
    predictor = MaskPredictor(model, MASK, PAD)
    assert predictor.padded_form == Form("4d", True)
    log_probs = predictor.logits(IDS, start=2).log_softmax(-1)
    log_probs.gather(-1, IDS[:, 2:, None] % PAD).sum().backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    assert gradients
    assert all(g.isfinite().all() and g.abs().max() > 0 for g in gradients)


@pytest.mark.usefixtures("cudnn_attention")
def test_a_model_in_half_precision_gives_float32_without_attention_of_cudnn():
    predictor = MaskPredictor(llama().bfloat16(), MASK, PAD)
    assert predictor.padded_form is not None
    assert predictor.logits(IDS).dtype == torch.float32
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_a_block_ends_and_begins_where_a_row_s_padding_has_it():
    """Blocks of 4; without padding, and with 3 columns of it in the second row."""
    predictor, ids = MaskPredictor(qwen(), MASK, PAD, block_size=4), torch.zeros(2, 14, dtype=torch.long)
    full = torch.ones_like(ids, dtype=torch.bool)
    padded = torch.stack([full[0], torch.arange(14) >= 3])
    assert [predictor.block_end(ids, None, stop) for stop in (1, 4, 5, 12, 13)] == [4, 4, 8, 12, 14]
    assert [predictor.block_end(ids, padded, stop) for stop in (4, 5, 8, 12)] == [7, 8, 11, 14]
    assert [predictor.block_start(full, column) for column in (3, 4, 7, 8)] == [0, 4, 4, 8]
    assert [predictor.block_start(padded, column) for column in (4, 7, 8)] == [3, 4, 7]
