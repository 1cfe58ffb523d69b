import json

import pytest
import torch
from diffusers import BlockRefinementScheduler, LLaDA2Pipeline
from predictors import llama
from tokenizers import Tokenizer, models
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast, T5Config

from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor
from flowgrpo.mdlm.models.load import load_predictor

IDS = torch.tensor([[3, 1, 15, 1, 5]])


@pytest.fixture
def folder(tmp_path):
    vocabulary = {**{chr(97 + i): i for i in range(14)}, "<pad>": 14, "<mask>": 15}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", mask_token="<mask>").save_pretrained(tmp_path)
    return tmp_path


def changed(folder, **keys):
    config = json.loads((folder / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps(config))


def test_a_causal_model_is_loaded_as_a_predictor_and_dream_is_shifted(folder):
    model = llama()
    model.save_pretrained(folder)
    predictor, tokenizer = load_predictor(str(folder), torch.float64)
    assert (predictor.mask_id, predictor.pad_id, predictor.shift) == (15, 14, False)
    assert tokenizer.mask_token == "<mask>"
    zero = torch.zeros(1, 1, 5, 5, dtype=torch.float64)
    expected = model(IDS, attention_mask=zero, use_cache=False).logits
    torch.testing.assert_close(predictor.logits(IDS)[..., :15], expected[..., :15])
    assert load_predictor(str(folder), mask_id=13, shift=True)[0].shift
    changed(folder, mask_token_id=None)  # leaves it to the tokenizer
    assert load_predictor(str(folder), torch.float64)[0].mask_id == 15


def test_a_masked_model_is_loaded_too(folder):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    BertForMaskedLM(BertConfig(vocab_size=16, pad_token_id=14, **sizes)).save_pretrained(folder)
    assert isinstance(load_predictor(str(folder))[0].model, BertForMaskedLM)


def test_the_folder_of_a_diffusers_pipeline_is_loaded(folder, tmp_path_factory):
    saved = tmp_path_factory.mktemp("llada2")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    LLaDA2Pipeline(llama(), BlockRefinementScheduler(), tokenizer).save_pretrained(saved)
    tokenizer.save_pretrained(saved / "tokenizer")  # diffusers 0.42 leaves it out
    predictor, _ = load_predictor(str(saved), torch.float64)
    torch.testing.assert_close(predictor.logits(IDS), MaskPredictor(llama(), 15).logits(IDS))


def test_what_is_missing_is_said_in_a_sentence(folder, tmp_path_factory):
    def refused(place, said):
        with pytest.raises(InputError, match=said):
            load_predictor(str(place))

    refused(folder, "holds no model")
    bare = tmp_path_factory.mktemp("bare")
    for place in (folder, bare):
        llama().save_pretrained(place)
    refused(bare, "no tokenizer")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    refused(folder, "names no mask token")
    changed(folder, model_type="mystery")
    refused(folder, "transformers does not know")
    changed(folder, auto_map={"AutoModel": "modeling_dream.DreamModel"})
    refused(folder, r"model\.trust_remote_code")
    T5Config(d_model=8).save_pretrained(folder)
    refused(folder, "predicts no tokens")
