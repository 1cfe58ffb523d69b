"""`flowgrpo evaluate` on tiny models: numbers, pairs, what is kept when something fails, sets that ask an endpoint."""

import json
import re
import shutil
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import pytest
import yaml
from fakes import endpoint, words_of
from PIL import Image
from planted_run import written
from runs import CALL

from flowgrpo import config
from flowgrpo.cli import main
from flowgrpo.commands.evaluations import evaluating

OVERRIDES = [f"model.call.{key}={value}" for key, value in CALL.items()]
REDNESS = "./mine.py:redness"
TEXTS = ["a red circle", "two blue square", "a green circle", "a blue circle"]


def lines(file):
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def red(folder, file):
    """The mean of the red channel, which the reward of the tiny run returns."""
    return float(np.asarray(Image.open(Path(folder) / file))[..., 0].mean() / 255)


@pytest.fixture
def own(trained):
    rows = [{"prompt": text, "kind": "round" if "circle" in text else ["square", "blue"]} for text in TEXTS]
    Path("set.jsonl").write_text(written(rows))
    return trained


def test_a_run_and_its_model_are_compared_in_pairs(own, tiny_model, printed):
    words = [
        "evaluate",
        tiny_model,
        "runs/t",
        "--set",
        "set.jsonl",
        "--by",
        "kind",
        "--reward",
        REDNESS,
        "--samples",
        "2",
    ]
    found = printed(*words, *OVERRIDES, "--format", "json")
    before, after = found["evaluations"]
    values = []
    for one in (before, after):
        folder, by_prompt = Path(one["folder"]), defaultdict(list)
        for line in lines(folder / "scores.jsonl"):
            assert line["seed"] == line["index"] + 100_000 * line["sample"]
            assert line["rewards"]["redness"] == pytest.approx(red(folder, line["file"]), abs=1e-6)
            by_prompt[line["prompt"]].append(line["rewards"]["redness"])
        values.append([mean(by_prompt[text]) for text in TEXTS])
        assert (one["n"], one["set"], one["unscored"]) == (4, "set.jsonl", 0)
        assert (one["mean"], one["error"]) == pytest.approx((mean(values[-1]), stdev(values[-1]) / 2))
        round_, square, blue = one["categories"]
        assert [each["name"] for each in one["categories"]] == ["round", "square", "blue"]
        assert round_["mean"] == pytest.approx(mean([values[-1][i] for i in (0, 2, 3)]))
        assert (square["mean"], square["n"], square["error"]) == (pytest.approx(values[-1][1]), 1, None)
        assert blue["mean"] == square["mean"]
    gains = [b - a for a, b in zip(*values, strict=True)]
    (change,) = found["differences"]
    assert (change["mean"], change["error"]) == pytest.approx((mean(gains), stdev(gains) / 2))
    assert change["to"] == after["folder"] == "evaluations/set/t-step-000002"
    assert found["page"] == "evaluations/set/sd3/compare.html"
    for one, step in ((before, "000000"), (after, "000002")):  # the samples that the run itself was evaluated by
        assert Path(one["folder"], "0000.png").read_bytes() == Path(f"runs/t/samples/step-{step}/0000.png").read_bytes()
    again = printed("evaluate", before["folder"], after["folder"])
    assert re.search(r"total +4 .* [+−]\d\.\d+ ± \d", again)
    assert "\na prompt may be in several categories\n" in again  # a square is blue, too
    printed("gallery", before["folder"], after["folder"], "--out", "g.html")  # a folder of samples with rewards


def test_a_group_is_tried_whole_and_compared_whole(own, printed):
    """Three samples of a prompt in batches of two: a rank that saw parts of a group would repeat."""
    Path("rank.py").write_text(
        "def rank(images, prompts):\n    return images.mean((1, 2, 3)).argsort().argsort()\n\n\nrank.group_wise = True\n"
    )
    words = ["--set", "set.jsonl", "--reward", "./rank.py:rank", "--samples", "3", "--batch-size", "2"]
    printed("evaluate", "runs/t", *words, "--out", "e")
    ranks = defaultdict(list)
    for line in lines("e/scores.jsonl"):
        ranks[line["prompt"]].append(line["rewards"]["rank"])
    assert [sorted(ranks[text]) for text in TEXTS] == [[0, 1, 2]] * 4


def test_an_option_is_refused_where_all_is_done(own, printed, refused):
    printed("evaluate", "runs/t", "--set", "set.jsonl", "--reward", REDNESS, "--limit", "1", "--out", "e")
    said = refused("evaluate", "e", "--reward", "jpeg_size", "--limit", "2")
    assert said == "e: its evaluation is done, there is nothing to set; leave --reward and --limit out"
    shutil.copytree("e", "evaluations/x/t-000002")
    said = refused("evaluate", "evaluations/x/t-000002", "evaluations/x/t-000006")
    assert said == "evaluations/x/t-000006: there is no such folder, did you mean 'evaluations/x/t-000002'?"
    assert refused("evaluate", "e", "owner/t").startswith("--set: name an evaluation set")


FAILING = """
from pathlib import Path

def redness(images, prompts):
    with open("calls.txt", "a") as calls:
        calls.write("".join(f"{prompt}\\n" for prompt in prompts))
    if Path("broken").exists() and Path("broken").read_text() in prompts:
        raise OSError("the detector is gone")
    return images[:, 0].mean((1, 2))
"""


def test_what_is_sampled_and_scored_is_kept_when_a_reward_fails(own, printed, refused, request):
    Path("failing.py").write_text(FAILING)
    words = ["evaluate", "runs/t", "--set", "set.jsonl", "--reward", "./failing.py:redness", "--batch-size", "1"]
    Path("broken").write_text(TEXTS[0])
    refused(*words, "--out", "e")
    assert [line["file"] for line in lines("e/manifest.jsonl")] == ["0000.png"]  # tried before the others are made
    Path("broken").write_text(TEXTS[2])
    Path("calls.txt").unlink()
    said = refused(*words, "--out", "e")
    assert said == "the reward 'redness' failed on 0002.png: OSError: the detector is gone at failing.py:8"
    assert [line["file"] for line in lines("e/scores.jsonl")] == ["0000.png", "0001.png"]
    assert len(lines("e/manifest.jsonl")) == 4
    assert "its evaluation is not done" in refused("evaluate", "e")
    Path("broken").unlink()
    request.getfixturevalue("unloaded")
    found = printed(*words, "--out", "e", "--format", "json")
    assert found["n"] == 4
    assert Path("calls.txt").read_text().splitlines() == [*TEXTS[:3], *TEXTS[2:]]
    printed(*words, "--out", "e")  # all is there
    assert len(Path("calls.txt").read_text().splitlines()) == 5


def test_sampling_goes_on_where_it_was_interrupted(own, printed):
    words = ["evaluate", "runs/t", "--set", "set.jsonl", "--reward", REDNESS, "--out"]
    printed(*words, "whole")
    shutil.copytree("whole", "cut")
    for name in ("summary.json", "evaluation.html", "scores.jsonl", "0003.png"):
        Path("cut", name).unlink()
    manifest = Path("whole/manifest.jsonl").read_text().splitlines(True)
    Path("cut/manifest.jsonl").write_text("".join(manifest[:3]) + manifest[3][:9])
    with pytest.warns(UserWarning, match="it is the last line, cut off, and left out"):
        printed(*words, "cut")
    for name in ("manifest.jsonl", "scores.jsonl", "summary.json", "0003.png", "evaluation.html"):
        assert Path("cut", name).read_bytes() == Path("whole", name).read_bytes()


def test_further_rewards_and_other_categories_take_the_samples_that_are_there(own, printed, refused, request):
    words = ["evaluate", "runs/t", "--set", "set.jsonl", "--out", "e", "--reward"]
    first = printed(*words, REDNESS, "--format", "json")
    request.getfixturevalue("unloaded")
    both = printed(*words, "jpeg_size", "--by", "kind", "--format", "json")
    assert list(both["rewards"]) == ["jpeg_size", "redness"]
    assert both["rewards"]["redness"]["mean"] == first["mean"]
    assert both["mean"] == both["rewards"]["jpeg_size"]["mean"] < 0
    assert [each["name"] for each in both["categories"]] == ["round", "square", "blue"]
    for other, said in {
        "--samples=2": "--samples",
        "--limit=2": "prompts or --limit",
        "model.dtype=bfloat16": "model",
    }.items():
        assert f"e: holds another evaluation (other {said}); delete it, or give this model alone" in refused(
            *words, REDNESS, other
        )


def test_a_run_brings_its_own_prompts_and_rewards(own, printed, refused):
    words, form = ["evaluate", "runs/t"], ("--format", "json")
    found = printed(*words, *form)
    assert evaluating.OWN in printed(*words)
    assert evaluating.OWN not in printed(*words, "--set", "set.jsonl", "--out", "d")
    assert refused("evaluate", "runs/s") == "runs/s: there is no such folder, did you mean 'runs/t'?"
    assert (found["set"], list(found["rewards"])) == (config.of_run(Path("runs/t")).prompts.eval, ["redness"])
    ours = printed(*words, "--set", "set.jsonl", "--out", "e", *form)
    assert (ours["set"], ours["n"], list(ours["rewards"])) == ("set.jsonl", 4, ["redness"])
    other = printed(*words, "--reward", "jpeg_size", "--out", "f", *form)
    assert (other["set"], list(other["rewards"])) == (found["set"], ["jpeg_size"])
    Path("runs/graded").mkdir()
    Path("runs/graded/evaluation.json").touch()  # proposed only if its name is nearer than a run's
    missing = "runs/s: there is no such folder, did you mean 'runs/t'?"
    assert refused("evaluate", "shapes", "runs/s", "--set", "set.jsonl", "--by", "kind") == missing
    Path("runs/t").rename("runs/trained")
    missing = (
        "model.path: there is no folder 'trained' and no built-in model of that name, did you mean 'runs/trained'?"
    )
    assert refused("evaluate", "trained", "--set", "set.jsonl") == missing
    assert refused("evaluate", "trained", "--set", "set.jsonl", "--reward", "shapes") == missing
    said = refused("sample", "traind", "--prompt", "a", "--out", "s")  # which takes no run
    assert said.startswith("model.path: there is no folder 'traind' and no built-in model of that name, choose one of")
    assert refused("evaluate", "shapes", "--set", "set.jsonl").strip() == (
        "--reward: name a reward for the prompts of set.jsonl"
    )


def test_a_reward_of_a_run_scores_the_rows_that_it_is_for(own, printed):
    file = Path("runs/t/config.yaml")
    settings = yaml.safe_load(file.read_text())
    settings["rewards"][0]["only"] = {"kind": "round"}
    file.write_text(yaml.safe_dump(settings))
    found = printed("evaluate", "runs/t", "--set", "set.jsonl", "--out", "g", "--format", "json")
    values = {line["prompt"]: line["rewards"]["redness"] for line in lines("g/scores.jsonl")}
    assert [text for text, value in values.items() if value is None] == ["two blue square"]
    round_ones = [value for value in values.values() if value is not None]
    assert found["rewards"]["redness"]["mean"] == pytest.approx(np.mean(round_ones))


def ask_yes(request):
    """Answer no where the point is a style."""
    return [("no" if "style" in words_of(request).lower() else "yes", 1.0)]


def test_a_public_set_asks_an_endpoint_which_may_come_later(workplace, tiny_model, printed, refused, capsys, request):
    words = ["evaluate", tiny_model, "--set", "unigenbench", "--limit", "3", "--samples", "1", *OVERRIDES]
    assert "give its URL, --reward '{use: questions, options: {endpoint:" in refused(*words)
    assert not Path("evaluations").exists()
    options = "{{use: questions, options: {{endpoint: '{}/v1', retries: 0, concurrency: 1}}}}"
    with endpoint(ask_yes) as url:
        pass
    assert main([*map(str, words), "--reward", options.format(url)]) == 2
    early, late = [line for line in capsys.readouterr().err.splitlines() if "could not be reached" in line]
    assert "samples are made first, and the same command scores them once it answers" in early
    assert late.startswith(f"flowgrpo: {url}/v1/models could not be reached")
    assert len(list(Path("evaluations/unigenbench/sd3").glob("*.png"))) == 3
    request.getfixturevalue("unloaded")
    with endpoint(ask_yes) as url:
        found = printed(*words, "--reward", options.format(url), "--format", "json")
    by_name = {each["name"]: each["mean"] for each in found["categories"]}
    assert by_name["Style"] == 0.0
    again = printed(*words, "--reward", options.format(url), "--format", "json")  # without the endpoint
    assert again == found
    tops = [value for name, value in by_name.items() if "-" not in name]
    assert found["mean"] == pytest.approx(mean(tops))


def test_a_set_that_comes_with_the_package_and_an_embedded_model_print_tables(workplace, tiny_model, printed):
    shown = printed("evaluate", tiny_model, "--set", "geneval", "--limit", "12", "--reward", "jpeg_size", *OVERRIDES)
    for name in ("single_object", "two_object", "counting", "colors", "position", "color_attr"):
        assert re.search(rf"^ *{name} +2 +−\d\.\d+ ± \d\.\d+ *$", shown, re.MULTILINE)
    assert "12 of the 553 prompts of geneval were sampled" in shown
    assert len(lines("evaluations/geneval/sd3/manifest.jsonl")) == 48  # four of each
    shown = printed("evaluate", "shapes", "--set", "shapes:eval", "--limit", "8", "model.call.num_inference_steps=2")
    assert re.search(r"relation +\d", shown)
    assert "several categories" not in shown
    assert re.search(r"total +8 +\d\.\d+ ± \d\.\d+", shown)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["shapes"], "--set: name an evaluation set, choose one of shapes:eval, patterns:eval, clips:eval, geneval"),
        (["shapes", "--set", "genevl"], "--set: genevl is no evaluation set, did you mean 'geneval'?"),
        (["shapes", "--set", "mine.txt", "--reward", "jpeg_size"], "--set: there is no file mine.txt"),
        (
            ["shapes", "--set", "geneval", "--by", "kind"],
            "--by: the prompts of geneval:evaluation have no column 'kind'",
        ),
        (["shapes", "--set", "geneval", "--step", "4"], "--step: it is a run's, and shapes is none"),
        (
            ["shapes", "--set", "dpg_bench"],
            "--set: dpg_bench:test looks in data/dpg_bench for dpg_bench.csv or a copy of",
        ),
        (["shape", "--set", "geneval"], "there is no folder 'shape' and no built-in model of that name"),
        (["model.dtype=bfloat16", "--set", "geneval"], "name a model, a config, a run or the folder of an evaluation"),
        (["shapes", "patterns", "--set", "geneval", "--out", "e"], "--out: it is the folder of one model's evaluation"),
        (["shapes", "--set", "geneval", "--reward", "ocr", "--reward", "ocr"], "--reward: two rewards are named 'ocr'"),
        (["shapes", "--set", "geneval", "--out", "."], ".: holds something else than an evaluation"),
        (
            ["shapes", "shapes", "--set", "geneval"],
            "evaluations/geneval/shapes: two of the models would be evaluated there",
        ),
        (["shapes", "--set", "geneval", "model.cal.height=8"], "model.cal: unknown key, did you mean 'call'?"),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_loaded(workplace, unloaded, refused, words, said):
    assert said in refused("evaluate", *words)
