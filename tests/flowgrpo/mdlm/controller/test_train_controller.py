import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from predictors import MASK, PAD, llama
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from flowgrpo.cli import main
from flowgrpo.mdlm.controller import train_controller as teach
from flowgrpo.mdlm.decoding.controller.trace_lock import (
    Controller,
    f_half,
    load_controller,
    save_controller,
    train_controller,
)
from flowgrpo.mdlm.decoding.controller.traces import Replay
from flowgrpo.mdlm.decoding.decode import decode
from flowgrpo.mdlm.decoding.decoders import build
from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor
from flowgrpo.mdlm.models.load import load_predictor

LETTERS = "abcdefghijklmn"  # n is the end of sequence


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A place with a tiny model, `model`, and prompts of several lengths."""
    monkeypatch.chdir(tmp_path)
    vocabulary = {**{letter: i for i, letter in enumerate(LETTERS)}, "<pad>": PAD, "<mask>": MASK}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    names = {"pad_token": "<pad>", "mask_token": "<mask>", "eos_token": "n"}
    PreTrainedTokenizerFast(tokenizer_object=inner, **names).save_pretrained("model")
    llama().float().save_pretrained("model")
    lines = [LETTERS[i : i + 2 + i % 3] for i in range(9)] + ["ab"]
    (tmp_path / "p.txt").write_text("\n".join(lines))
    return tmp_path


COMMAND = ["mdlm", "tracelock", "model", "--prompts", "p.txt", "--length", "6", "--steps", "20"]
BRIEF = [*COMMAND[:-1], "4"]


def test_the_command_writes_a_controller_that_a_decoder_takes(folder, capsys):
    assert main([*COMMAND, "--out", "lock", "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["folder"], told["learned"], told["held_out"], told["threshold"]) == ("lock", 8, 1, 0.99)  # "ab" twice
    assert told["kept"]["step"] % 2 == 0
    teacher, threshold, lock = told["compared"]
    assert teacher == {"decoder": "teacher", "evaluations": 6.0, "same_tokens": 1.0, "same_answers": 1.0}
    assert (threshold["decoder"], lock["decoder"]) == ("threshold", "trace_lock")
    assert 1 <= lock["evaluations"] <= 6

    written = json.loads((folder / "lock" / "controller.json").read_text())
    assert written["model"] == "model"
    assert written["sizes"]["hidden_size"] == 32
    assert written["sizes"]["end_ids"] == [13, PAD]
    predictor, tokenizer = load_predictor("model")
    spec = {"name": "trace_lock", "scorer": {"name": "learned", "controller": "lock"}}
    rollout = decode(predictor, torch.tensor([[0, 1]]), build(spec, 6, tokenizer.eos_token_id, predictor))
    assert not (rollout.ids == MASK).any()


def test_the_same_seed_makes_the_same_controller_and_another_another(folder, capsys):
    for name, seed in (("one", 3), ("two", 3), ("three", 4)):
        assert main([*BRIEF, "--out", name, "--seed", str(seed), "--decoder", "{name: random, steps: 3}"]) == 0
    assert "in a config: decoder: {name: trace_lock, scorer: {controller: three}}" in capsys.readouterr().out
    one, two, three = (load_controller(name, 32).state_dict() for name in ("one", "two", "three"))
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert not all(torch.equal(one[key], three[key]) for key in one)


def test_the_best_state_is_kept_and_of_equals_the_last(folder, monkeypatch):
    values = iter([0.1, 0.5, 0.5, 0.2, 0.4, 0.0, 0.3, 0.3, 0.1, 0.2])
    monkeypatch.setattr(teach, "f_half", lambda *_: next(values))
    seen = []
    kept = teach.teach("model", "p.txt", Path("best"), length=6, steps=20, watch=seen.append).kept
    assert [(judged.step, judged.f_half) for judged in seen[:3]] == [(2, 0.1), (4, 0.5), (6, 0.5)]
    assert kept == seen[2]
    monkeypatch.setattr(teach, "f_half", lambda *_: 0.0)
    assert teach.teach("model", "p.txt", Path("short"), length=6, steps=6).kept.step == 6
    best, short = (load_controller(name).state_dict() for name in ("best", "short"))
    assert all(torch.equal(best[key], short[key]) for key in best)


def test_a_model_that_minds_padding_is_taught_prompts_of_one_length_at_a_time(folder, capsys):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = BertConfig(vocab_size=16, pad_token_id=PAD, max_position_embeddings=16, initializer_range=0.4, **sizes)
    BertForMaskedLM(config).save_pretrained("model")
    tokenizer = PreTrainedTokenizerFast.from_pretrained("model")
    tokenizer.pad_token = None
    tokenizer.save_pretrained("model")
    written = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps(written | {"pad_token_id": None}))
    assert load_predictor("model")[0].padded_form is None
    assert main([*BRIEF, "--out", "lock"]) == 0
    assert "learned from 8 prompts; on 1 others" in capsys.readouterr().out
    assert main([*COMMAND[:-4], "--length", "13", "--out", "long"]) == 2
    assert "are more than the 16 positions of the model, take at most 12" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["--prompts", "countdwn:train"], "--prompts: there is no file countdwn:train, did you mean 'countdown:train'?"),
        (["--prompts", "no.txt"], "--prompts: there is no file no.txt"),
        (["--prompts", "one.txt"], "--prompts: one.txt has only one prompt, at least two are needed"),
        (["--decoder", "low_confidense"], "decoder.name: 'low_confidense' is unknown, did you mean 'low_confidence'?"),
        (["--decoder", "{name: trace_lock, scorer: {controller: nowhere}}"], "decoder.scorer.controller: there is no"),
        (["--decoder", "[1]"], "decoder: [1] is neither a name nor a map"),
        (["--decoder", "{name: "], "--decoder: not valid YAML"),
        (["--out", "model"], "--out model: exists and is not an empty folder"),
        (["--prompt-count", "1"], "Invalid value for '--prompt-count'"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_sentence_and_status_2(folder, capsys, changes, said):
    (folder / "one.txt").write_text("ab\nab\n")
    assert main([*COMMAND, "--out", "lock", *changes]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert not (folder / "lock").exists()


def test_a_chat_model_is_asked_in_its_template(folder, capsys, monkeypatch):
    arguments = [*BRIEF, "--chat", "--out", "lock"]
    assert main(arguments) == 2
    assert "--chat: the tokenizer has no chat template" in capsys.readouterr().err
    tokenizer = PreTrainedTokenizerFast.from_pretrained("model")
    tokenizer.chat_template = "{% for message in messages %}m{{ message.content }}{% endfor %}l"
    tokenizer.save_pretrained("model")
    seen = []

    def watched(predictor, ids, *rest, **options):
        seen.append(ids)
        return decode(predictor, ids, *rest, **options)

    monkeypatch.setattr(teach, "decode", watched)
    assert main(arguments) == 0
    for row in torch.cat(seen[:1]).tolist():
        asked = [token for token in row if token != PAD]
        assert (asked[0], asked[-1]) == (LETTERS.index("m"), LETTERS.index("l"))
        assert "".join(LETTERS[token] for token in asked[1:-1]) in (folder / "p.txt").read_text().split()


def test_no_model_is_said_too(folder, capsys):
    assert main(["mdlm", "tracelock", "nowhere", "--prompts", "p.txt", "--out", "lock"]) == 2
    assert "model.path: there is no folder 'nowhere' and no built-in model of that name" in capsys.readouterr().err


class Followers(torch.nn.Module):
    """Every second token follows from its left neighbour; before that is known, token 0 is proposed, about as surely.

    So confidence cannot tell which proposals last, and hidden states, which hold the neighbour, can.
    """

    def forward(self, ids, output_hidden_states=False):
        column = torch.arange(ids.shape[1])
        left, follows = ids.roll(1, 1), column % 2 == 1
        known = torch.where(left == MASK, 0, (left + 1) % 8)
        token = torch.where(follows, known, (ids[:, :1] + column) % 8)
        sure = torch.where(follows, 8.0, 9.0)[:, None]  # 0.997 and 0.999
        logits = sure * torch.nn.functional.one_hot(token, 16) + ids.float().mean() * torch.arange(16) * 1e-4
        tokens = [torch.nn.functional.one_hot(x, 16) for x in (ids, left)]
        hidden = torch.cat([*tokens, follows.expand_as(ids)[..., None]], -1).float()
        return SimpleNamespace(logits=logits, hidden_states=(hidden,) * 3)


def test_a_controller_learns_what_confidence_cannot_tell(tmp_path):
    predictor, length = MaskPredictor(Followers(), MASK), 12
    prompts = torch.tensor([[i % 8, (i * 5 + 1) % 8] for i in range(24)])
    teacher = decode(predictor, prompts[:16], build("low_confidence", length))
    asked = (prompts[16:, :1] + torch.arange(2, 14)) % 8  # every second token is the one before it, plus 1
    expected = torch.where(torch.arange(12) % 2 == 1, (asked.roll(1, 1) + 1) % 8, asked)

    torch.manual_seed(0)
    controller = Controller(33, width=32)
    held_out = Replay(predictor, [decode(predictor, prompts[16:], build("low_confidence", length))], batch=16, layers=3)
    assert f_half(controller.eval(), held_out, 0.99, length) == 0
    lessons = Replay(predictor, [teacher], batch=16, layers=3)
    train_controller(controller, lessons, 80, window_length=length, learning_rate=6e-3)
    accepted = sum(int((trace.scene.state >= 2).sum()) for trace in held_out)
    right = sum(int(trace.label.sum()) for trace in held_out)
    precision = right / accepted  # of confidence, which is above 0.99 everywhere
    assert all((trace.scene.confidence >= 0.99).all() for trace in held_out)
    assert f_half(controller, held_out, 0.99, length) > 0.97 > 1.25 * right / (accepted + 0.25 * right) + 0.1
    assert precision < 0.85

    save_controller(controller, tmp_path, {})
    spec = {"name": "trace_lock", "scorer": {"controller": str(tmp_path)}, "modifiers": []}
    found = decode(predictor, prompts[16:], build(spec, length))
    assert torch.equal(found.completion, expected)
    assert found.nfe.double().mean() <= 6  # of 12; at most four tokens a step for the threshold's sake
    hasty = decode(predictor, prompts[16:], build("threshold", length))
    assert (hasty.completion == expected).double().mean() < 0.7
