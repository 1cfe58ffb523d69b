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
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="a")), pad_token="<pad>", mask_token="<mask>"
    )
    tokenizer.save_pretrained(tmp_path)
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


def test_a_config_whose_mask_token_is_null_leaves_it_to_the_tokenizer(folder):
    llama().save_pretrained(folder)
    changed(folder, mask_token_id=None)
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
    with pytest.raises(InputError, match="holds no model"):
        load_predictor(str(folder))
    llama().save_pretrained(folder)
    bare = tmp_path_factory.mktemp("bare")
    llama().save_pretrained(bare)
    with pytest.raises(InputError, match="no tokenizer"):
        load_predictor(str(bare))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(InputError, match="names no mask token"):
        load_predictor(str(folder))
    changed(folder, model_type="mystery")
    with pytest.raises(InputError, match="transformers does not know"):
        load_predictor(str(folder))
    changed(folder, auto_map={"AutoModel": "modeling_dream.DreamModel"})
    with pytest.raises(InputError, match=r"model\.trust_remote_code"):
        load_predictor(str(folder))
    T5Config(d_model=8).save_pretrained(folder)
    with pytest.raises(InputError, match="predicts no tokens"):
        load_predictor(str(folder))
