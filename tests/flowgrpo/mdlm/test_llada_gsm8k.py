"""The built-in config llada-8b through the command, on a shrunk LLaDA and a handful of problems."""

import json
from pathlib import Path

import pytest
from released import released
from released_configs import VOCABULARY
from runs import metrics
from transformers import AutoTokenizer

from flowgrpo import config
from flowgrpo.cli import main
from flowgrpo.data.generators.templates import TEMPLATES

CONFIG = "llada-8b"
PROBLEMS = [
    {"question": f"A hen lays {n} eggs a day. How many is that a week?", "answer": f"{n} * 7 = {7 * n}\n#### {7 * n}"}
    for n in (2, 3, 6)
]
TAGS = ["<reasoning>", "</reasoning>", "<answer>", "</answer>"]
SENTENCES = [TEMPLATES["d1"].partition("\n")[0], "the answer alone", " eggs a day. How many is that a week?"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """LLaDA's released files, of one small layer; its tokenizer has whole tags, which the model writes by chance.

    It has whole sentences, too, so that prompts have few tokens.
    """
    small = {"n_layers": 1, "d_model": 16, "mlp_hidden_size": 8, "n_heads": 2, "n_kv_heads": 2}
    folder = released("llada", tmp_path_factory.mktemp("llada"), **small)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([*TAGS, *SENTENCES])
    assert len(tokenizer) <= VOCABULARY
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(*splits):
    Path("data/gsm8k").mkdir(parents=True)
    for split in splits:
        Path(f"data/gsm8k/{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROBLEMS))


def test_it_plans_the_numbers_of_the_release(model, workplace, capsys):
    write("train", "test")
    assert main(["plan", CONFIG, f"model.path={model}", "--format", "json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["geometry"] | {"samples": 96, "passes": 12, "updates": 1, "steps": 128} == planned["geometry"]
    assert planned["model_evaluations"]["rollout"] == 96 * 128
    assert planned["evaluation"]["decoded"] == 3
    assert main(["plan", CONFIG, f"model.path={model}", "algorithm.preset=igpo"]) == 0  # the solutions are its hints


def test_it_trains_as_written_but_for_sizes(model, workplace):
    write("train", "test")
    sizes = "model.length=32 model.lora.rank=4 model.lora.alpha=2 train.iterations=1 train.groups=1 train.micro_batch=6"
    assert main(["train", CONFIG, f"model.path={model}", *sizes.split()]) == 0
    (trained,) = metrics(workplace / "runs/llada-8b")
    assert trained["cost/rollout_evaluations"] == 6 * 32
    assert trained["policy/max_abs_log_ratio"] == 0.0
    assert trained["policy/skipped_updates"] == 0
    assert trained["policy/grad_norm"] > 0  # tags that stand once pay, so groups have something to learn from
    evaluated = metrics(workplace / "runs/llada-8b", "eval")
    assert [line["reward/gsm8k_accuracy/mean"] for line in evaluated] == [0.0, 0.0]
    samples = [json.loads(line) for line in Path("runs/llada-8b/samples/manifest.jsonl").read_text().splitlines()]
    asked = {row["prompt"].split("\n\n")[1] for row in samples if "<reasoning>" in row["prompt"]}
    assert asked == {row["question"] for row in PROBLEMS}


def test_its_former_path_is_the_same_config():
    assert config.load(Path(__file__).parents[3] / "configs/llada_gsm8k.yaml") == config.load(CONFIG)


def test_without_data_it_ends_in_one_sentence_before_a_model_is_loaded(workplace, monkeypatch, capsys):
    monkeypatch.setattr("flowgrpo.mdlm.setup.load_predictor", lambda *_, **__: pytest.fail("a model was loaded"))
    assert main(["train", CONFIG]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "prompts.train: gsm8k:train looks in data/gsm8k for train.jsonl" in said.replace("\n", " ")
    assert not (workplace / "runs").exists()


def test_any_model_is_asked_in_the_same_words_and_scored(model, workplace, capsys):
    write("test")
    sampled = ["sample", str(model), "--prompts", "gsm8k:test", "--out", "answers", "chat=true", "length=8"]
    assert main([*sampled, "template=d3"]) == 2
    assert "template: 'd3' is unknown, choose one of d1, boxed, d1_boxed" in capsys.readouterr().err.replace("\n", " ")
    assert main([*sampled, "template=d1"]) == 0
    lines = [json.loads(line) for line in Path("answers/manifest.jsonl").read_text().splitlines()]
    assert [line["answer"] for line in lines] == ["14", "21", "42"]
    assert [line["prompt"].split("\n\n")[1] for line in lines] == [row["question"] for row in PROBLEMS]
    Path("answers/0002.json").write_text(json.dumps({"text": "<answer>42", "tokens": [], "steps": []}))
    capsys.readouterr()
    assert main(["score", "gsm8k_accuracy", "--samples", "answers", "--format", "json"]) == 0
    scored = json.loads(capsys.readouterr().out)
    assert [row["rewards"]["gsm8k_accuracy"] for row in scored] == [0.0, 0.0, 1.0]
