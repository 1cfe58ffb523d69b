"""`flowgrpo sample` on language models."""

import json
from pathlib import Path

import pytest
from diffusers import BlockRefinementScheduler, LLaDA2Pipeline
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from flowgrpo.cli import main
from flowgrpo.commands.model_kinds import detect_kind
from flowgrpo.commands.runs import train as run
from flowgrpo.errors import InputError
from flowgrpo.mdlm.models.load import load_predictor
from flowgrpo.mdlm.policy import TextPolicy


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_answers_are_written_with_a_manifest(model, capsys):
    decoder = "{name: random, proposal: {temperature: 1.0}}"
    arguments = ["--prompt", "ab", "--prompt", "c", "--seed", "5", "--out", "o", "length=6", f"decoder={decoder}"]
    assert main(["sample", str(model), *arguments, "--format", "json"]) == 0
    printed = json.loads(capsys.readouterr().out)["samples"]
    lines = [json.loads(line) for line in Path("o/manifest.jsonl").read_text().splitlines()]
    assert lines == printed
    assert [(line["file"], line["prompt"], line["seed"], line["sampler"]) for line in lines] == [
        ("0000.json", "ab", 5, "decoder"),
        ("0001.json", "c", 6, "decoder"),
    ]
    policy = TextPolicy(*load_predictor(str(model)), 6)
    expected = policy.sample(["ab", "c"], 5, {"name": "random", "proposal": {"temperature": 1.0}})
    written = [json.loads(Path(f"o/000{i}.json").read_text()) for i in range(2)]
    assert [text["text"] for text in written] == expected
    assert all(sorted(text["steps"]) == list(range(6)) and len(text["tokens"]) == 6 for text in written)
    assert main(["gallery", "o", "--out", "page.html"]) == 0
    assert "step 1 of 6" in Path("page.html").read_text()


def test_prompts_come_from_a_file_and_many_are_batched(settings, model):
    Path("many.txt").write_text("\n".join("abcdefgh"[i % 8] * (1 + i % 3) for i in range(20)))
    assert main(["sample", str(model), "--prompts", "many.txt", "--out", "o", "length=3"]) == 0
    alone = load_predictor(str(model))
    policy = TextPolicy(*alone, 3)
    for i, line in enumerate(Path("many.txt").read_text().splitlines()):
        assert json.loads(Path(f"o/{i:04d}.json").read_text())["text"] == policy.sample([line], i)[0]


def test_a_batch_has_the_size_that_is_asked_for_and_the_answers_are_the_same(model, monkeypatch):
    sizes, generate = [], TextPolicy.generate
    monkeypatch.setattr(
        TextPolicy, "generate", lambda self, asked, *a: sizes.append(len(asked)) or generate(self, asked, *a)
    )
    asked = ["sample", str(model), "--prompt", "ab", "--prompt", "c", "--prompt", "abc", "length=4"]
    assert main([*asked, "--out", "o", "--batch-size", "2"]) == main([*asked, "--out", "p"]) == 0
    assert sizes == [2, 1, 3]
    assert [Path(f"o/000{i}.json").read_text() == Path(f"p/000{i}.json").read_text() for i in range(3)] == [True] * 3


def test_an_adapter_changes_the_answers_and_one_of_another_model_is_refused(settings, model, capsys):
    done = run.train_config(settings(model__lora={"rank": 2, "alpha": 4.0}, train__learning_rate=0.1))
    assert main(["export", str(done.folder), "--out", "lora"]) == 0
    asked = ["--prompt", "ab", "--prompt", "bcd", "length=4"]
    assert main(["sample", str(model), *asked, "--out", "with", "--adapter", "lora"]) == 0
    assert main(["sample", str(model), *asked, "--out", "without"]) == 0
    found, plain = ([json.loads(Path(f"{o}/000{i}.json").read_text()) for i in range(2)] for o in ("with", "without"))
    assert found != plain
    assert found == [json.loads(Path(f"lora/sample-{i}.json").read_text()) for i in range(2)]

    sizes = AutoModelForCausalLM.from_pretrained(model).config
    sizes.update({"hidden_size": 64, "head_dim": 16})
    LlamaForCausalLM(sizes).save_pretrained("wider")
    AutoTokenizer.from_pretrained(model).save_pretrained("wider")
    capsys.readouterr()
    assert main(["sample", "wider", *asked, "--out", "other", "--adapter", "lora"]) == 2
    said = "flowgrpo: --adapter: lora is of another model, its adapter of "
    assert capsys.readouterr().err.startswith(said)
    assert not Path("other").exists()


def test_the_kind_of_a_model_is_read_off_its_folder(model, tiny_model, tmp_path):
    assert [detect_kind(path) for path in (str(model), str(tiny_model), "shapes", "digits")] == [
        "mdlm", "flow", "flow", "mdlm",
    ]  # fmt: skip
    LLaDA2Pipeline(
        AutoModelForCausalLM.from_pretrained(model), BlockRefinementScheduler(), AutoTokenizer.from_pretrained(model)
    ).save_pretrained("llada2")
    assert detect_kind("llada2") == "mdlm"
    with pytest.raises(InputError, match="holds no model, neither a pipeline's model_index.json nor a config.json"):
        detect_kind(str(tmp_path))
    with pytest.raises(InputError, match="did you mean 'digits'"):
        detect_kind("digit")
    with pytest.raises(InputError, match="someone/something could not be loaded from the model hub"):
        detect_kind("someone/something")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lenght=4"], "lenght: a language model has no such argument, did you mean 'length'?"),
        (["guidance_scale=3"], "guidance_scale: a language model has no such argument, choose one of length, chat"),
        (["length=four"], "length: 'four' is wrong"),
        (["length=0"], "length: 0 is wrong"),
        (["decoder=thresold"], "decoder.name: 'thresold' is unknown, did you mean 'threshold'?"),
        (["decoder={step: 3}"], "decoder.step: unknown key, did you mean 'steps'?"),
        (["decoder=3"], "decoder: 3 is not a map of keys"),
        (["decoder={region: {block_length: 5}}"], "decoder.region.block_length: 5 does not divide the length 256"),
        (["decoder={suppressed: [99999]}"], "decoder.suppressed: 99999 is outside the vocabulary of 11 tokens"),
        (["chat=true"], "model.chat: the tokenizer has no chat template"),
        (["mask_id=0"], "model.mask_id: 0 is the padding token too"),
        (["--dtype", "float16"], "dtype: 'float16' is not allowed"),
        (["--adapter", "nowhere"], "--adapter: there is no file or folder 'nowhere'"),
        (["--vae-tiling"], "--vae-tiling: pipelines have that, "),
        (["--text-encoders", "free"], "--text-encoders: pipelines have that, "),
        (["--attention", "block"], "is a language model, write attention=block without the dashes"),
        (["--prompts", "no.txt"], "give either --prompt TEXT"),
    ],
)
def test_wrong_arguments_are_one_sentence(model, capsys, arguments, said):
    assert main(["sample", str(model), "--prompt", "ab", "--out", "o", *arguments]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert not Path("o").exists()


def test_rewards_meet_the_texts_and_the_columns_of_the_prompts_of_a_file(model, capsys):
    rows = [{"prompt": "ab", "wanted": 3, "seed": 70, "rewards": 1}, {"prompt": "c", "file": "x.png", "wanted": None}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["sample", str(model), "--prompts", "rows.jsonl", "--out", "o", "length=4"]) == 0
    own = {"step": 0, "sampler": "decoder", "rewards": {}}  # the manifest's keys win
    assert [json.loads(line) for line in Path("o/manifest.jsonl").read_text().splitlines()] == [
        {"file": "0000.json", "prompt": "ab", "seed": 0, **own, "wanted": 3},
        {"file": "0001.json", "prompt": "c", "seed": 1, **own, "wanted": None},
    ]
    letters = "def letters(texts, prompts):\n    return [float(len(text)) for text in texts]\n"
    Path("mine.py").write_text(letters + "def wanted(texts, prompts, wanted):\n    return wanted\n")
    lengths = [len(json.loads(Path(f"o/000{i}.json").read_text())["text"]) for i in range(2)]
    for name, values in (("letters", lengths), ("wanted", [3, None])):
        capsys.readouterr()
        assert main(["score", f"./mine.py:{name}", "--samples", "o", "--format", "json"]) == 0
        assert [line["rewards"][name] for line in json.loads(capsys.readouterr().out)] == values


def test_a_reward_that_cannot_score_a_text_is_refused_in_a_sentence(model, capsys):
    assert main(["sample", str(model), "--prompt", "ab", "--out", "o", "length=4"]) == 0
    capsys.readouterr()
    for reward in ("jpeg_size", "countdown"):
        assert main(["score", reward, "--samples", "o"]) == 2
        assert capsys.readouterr().err.startswith(f"flowgrpo: the reward '{reward}'")
    Path("o/0000.json").write_text("{}")
    for reward in ("jpeg_size", "countdown"):
        assert main(["score", reward, "--samples", "o"]) == 2
        assert "0000.json is not a text as flowgrpo sample writes them" in capsys.readouterr().err


def test_a_model_is_evaluated_by_categories(model, capsys):
    rows = [{"prompt": text, "kind": kind} for text, kind in (("ab", "x"), ("c", "x"), ("abc", "y"))]
    Path("set.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("mine.py").write_text("def length(texts, prompts):\n    return [len(text) for text in texts]\n")
    words = ["--set", "set.jsonl", "--by", "kind", "--reward", "./mine.py:length", "model.length=4", "--format", "json"]
    capsys.readouterr()
    assert main(["evaluate", str(model), *words]) == 0
    found = json.loads(capsys.readouterr().out)
    expected = [len(text) for text in TextPolicy(*load_predictor(str(model)), 4).sample(["ab", "c", "abc"], 0)]
    assert found["mean"] == pytest.approx(sum(expected) / 3)
    assert [(each["name"], each["n"], each["mean"]) for each in found["categories"]] == [
        ("x", 2, sum(expected[:2]) / 2),
        ("y", 1, expected[2]),
    ]
