"""What is exported of a text run is what was trained, in the formats of peft and transformers, and the card tells how."""

import json
import os
import shlex
from pathlib import Path

import pytest
import torch
from diffusers import BlockRefinementScheduler, LLaDA2Pipeline
from peft import PeftModel
from read_card import HOSTILE, as_shown, blocks, table, words
from transformers import AutoModelForCausalLM, AutoTokenizer

from flowgrpo.cli import main
from flowgrpo.commands.runs import push
from flowgrpo.commands.runs import train as run
from flowgrpo.data import prompts
from flowgrpo.data.prompts import Row
from flowgrpo.mdlm.models.load import load_predictor
from flowgrpo.mdlm.outputs.sampling import run_sampler
from flowgrpo.mdlm.setup import policy_and_weights
from flowgrpo.training.checkpoints import checkpoint

IDS = torch.tensor([[3, 4, 1, 1, 1, 1]])
LORA = {"rank": 2, "alpha": 4.0}


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


RUNS = {}


@pytest.fixture
def trained(settings):
    """The settings of a run and what became of it, by whether it trains adapters; each is trained once."""

    def get(lora):
        if (key := lora is None) not in RUNS:
            chosen = settings(model__lora=lora)
            RUNS[key] = chosen, run.train_config(chosen)
        return RUNS[key]

    return get


def trained_logits(settings, folder):
    """The logits of a run's last checkpoint with its average in place."""
    policy, weights = policy_and_weights(settings, torch.device("cpu"))
    checkpoint.load_weights(checkpoint.find(folder / "checkpoints"), weights)
    with torch.no_grad(), weights.averaged():
        averaged = policy.predictor.logits(IDS)
    with torch.no_grad():
        return averaged, policy.predictor.logits(IDS)


def exported(folder, capsys, *options):
    capsys.readouterr()
    assert main(["export", str(folder), "--out", "out", "--format", "json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def held_out_answers(folder, step):
    """What the run's own evaluation wrote."""
    lines = [json.loads(line) for line in (folder / "samples" / "manifest.jsonl").read_text().splitlines()]
    files = [folder / "samples" / line["file"] for line in lines if line["step"] == step]
    return [json.loads(file.read_text())["text"] for file in files]


def run_card(place="out"):
    """What the lines of a card leave in their names."""
    code = (Path(place) / "README.md").read_text().split("```python\n")[1].split("```")[0]
    names, here = {}, Path.cwd()
    os.chdir(place)
    try:
        exec(code, names)
    finally:
        os.chdir(here)
    return names


def first_answer(place="out"):
    return json.loads((Path(place) / "sample-0.json").read_text())["text"]


@pytest.mark.parametrize("lora", [None, LORA])
def test_the_sampler_of_a_run_gives_the_answers_of_its_export(trained, capsys, lora):
    chosen, done = trained(lora)
    exported(done.folder, capsys)
    (prompt, *_) = prompts.load_split(chosen.prompts, "eval")
    rows = [Row(prompt.text, 0, prompt.columns)]
    found = checkpoint.find(done.folder / "checkpoints")
    (answer,) = run_sampler(chosen, done.folder, found, rows).generate(rows)
    assert answer.decoded.text == first_answer()


@pytest.mark.parametrize("lora", [None, LORA])
def test_an_export_is_the_trained_model_with_its_average(trained, model, capsys, lora):
    chosen, done = trained(lora)
    printed = exported(done.folder, capsys)
    assert printed == {
        "folder": "out",
        "step": 2,
        "kind": "lora" if lora else "full",
        "samples": [f"sample-{i}.json" for i in range(4)],
        "comfyui": [],
        "url": None,
    }
    averaged, live = trained_logits(chosen, done.folder)
    assert not torch.equal(averaged, live)
    plain = AutoModelForCausalLM.from_pretrained(model if lora else "out")
    network = PeftModel.from_pretrained(plain, "out") if lora else plain
    with torch.no_grad():
        found = network(IDS, attention_mask=torch.zeros(1, 1, 6, 6), use_cache=False).logits
    known = torch.arange(averaged.shape[-1]) != 1  # the mask token
    torch.testing.assert_close(found[..., known], averaged[..., known], rtol=0, atol=1e-6)
    if not lora:
        assert AutoTokenizer.from_pretrained("out").mask_token == "<mask>"
    answers = [json.loads(Path(f"out/{name}").read_text())["text"] for name in printed["samples"]]
    assert answers[:2] == held_out_answers(done.folder, 2)


def test_comfyui_is_refused_before_a_repository_is_made(trained, capsys, monkeypatch):
    _, done = trained(LORA)
    monkeypatch.setattr(push, "open_repository", lambda *a, **k: pytest.fail("a repository was made"))
    options = ["--out", "out", "--comfyui", "--push-to-hub", "me/sums"]
    assert main(["export", str(done.folder), *options]) == 2
    assert "--comfyui: ComfyUI runs no masked-diffusion language models" in capsys.readouterr().err
    assert not Path("out").exists()


@pytest.mark.parametrize("lora", [pytest.param(None, marks=pytest.mark.zoo), LORA])
def test_the_cards_lines_give_the_cards_answer(settings, capsys, lora):
    decoder = {"name": "random", "proposal": {"temperature": 1}}
    done = run.train_config(settings(model__lora=lora, eval__decoder=decoder))
    exported(done.folder, capsys)
    told = run_card()
    assert told["answer"] == first_answer()
    assert told["policy"].write == told["policy"].generate  # cards of earlier exports say write
    card = Path("out/README.md").read_text()
    assert "preset `diffu_grpo`, 4 prompts x 8 samples" in card
    assert f"library_name: {'peft' if lora else 'transformers'}" in card
    before, after = (line["reward/mean"] for line in done.metrics if line["phase"] == "eval")
    assert f"Held-out reward: {before:.3f} before training, {after:.3f} at step 2." in card
    os.chdir("out")
    assert main(shlex.split(card.split("```sh\n")[1].split("```")[0])[1:]) == 0
    assert Path("samples/0000.json").read_text() == Path("sample-0.json").read_text()


@pytest.mark.parametrize("lora", [None, pytest.param(LORA, marks=pytest.mark.zoo)])
def test_a_learned_schedule_comes_along(settings, capsys, lora):
    decoder = {"name": "scheduled", "modifiers": []}
    chosen = settings(
        model__lora=lora,
        algorithm__preset="co_grpo",
        algorithm__schedule__start={"ratio": 0.3},
        algorithm__schedule__learning_rate=0.5,
        eval__decoder=decoder,
    )
    done = run.train_config(chosen)
    exported(done.folder, capsys)
    assert run_card()["answer"] == first_answer()
    answers = [json.loads(Path(f"out/sample-{i}.json").read_text()) for i in range(2)]
    assert [answer["text"] for answer in answers] == held_out_answers(done.folder, 2)
    model = [chosen.model.path, "--adapter", "out"] if lora else ["out"]
    asked = ["--prompt", "ab", "--prompt", "bcd", "--out", "o", "length=4", f"decoder={json.dumps(decoder)}"]
    assert main(["sample", *model, *asked]) == 0
    assert [json.loads(Path(f"o/{i:04d}.json").read_text()) for i in range(2)] == answers


def test_a_pipeline_is_exported_as_the_pipeline_it_was(settings, model, tmp_path, capsys):
    tokenizer = AutoTokenizer.from_pretrained(model)
    pipe = LLaDA2Pipeline(AutoModelForCausalLM.from_pretrained(model), BlockRefinementScheduler(), tokenizer)
    pipe.save_pretrained("llada2")
    tokenizer.save_pretrained("llada2/tokenizer")
    chosen = settings(model__path=str(tmp_path / "llada2"), train__iterations=1)
    done = run.train_config(chosen)
    exported(done.folder, capsys)
    assert {path.name for path in Path("out").iterdir()} >= {"model", "tokenizer", "scheduler", "model_index.json"}
    averaged, _ = trained_logits(chosen, done.folder)
    with torch.no_grad():
        torch.testing.assert_close(load_predictor("out")[0].logits(IDS), averaged, rtol=0, atol=1e-6)


def test_an_earlier_step_is_exported_and_what_is_wrong_is_said(trained, capsys):
    _, done = trained(None)
    assert exported(done.folder, capsys, "--step", "1")["step"] == 1
    assert main(["export", str(done.folder), "--out", "out"]) == 2
    assert "--out out: exists and is not an empty folder" in capsys.readouterr().err
    assert main(["export", str(done.folder), "--out", "new", "--step", "7"]) == 2
    assert "there is no checkpoint of step 7, there are 1, 2" in capsys.readouterr().err


def test_a_card_holds_hostile_prompts_as_they_are(settings, tmp_path, capsys):
    chosen = [HOSTILE[at] for at in (1, 0, 2, 3)]
    rows = tmp_path / "hostile.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"ab {prompt}"[:80]}) + "\n" for prompt in chosen))
    done = run.train_config(settings(prompts__eval=str(rows), train__iterations=1, eval__save=0))
    exported(done.folder, capsys)
    page = Path("out/README.md").read_text()
    assert "library_name: transformers" in page
    answers = [json.loads(Path(f"out/sample-{i}.json").read_text())["text"] for i in range(4)]
    shown = [as_shown(f"ab {prompt}"[:80]) for prompt in chosen]
    assert [[row[0], row[2]] for row in table(page)] == [[a, b] for a, b in zip(shown, answers, strict=True)]
    names = {}
    os.chdir("out")
    exec(blocks(page)["python"], names)
    assert names["answer"] == answers[0]
    assert main(words(blocks(page)["sh"])) == 0
    assert Path("samples/0000.json").read_text() == Path("sample-0.json").read_text()
