"""The page that compares runs."""

import html
import json
import re

import pytest
import torch
from planted import sampled, trained_run
from planted_run import written

from flowgrpo.commands.inspect.gallery import write_gallery
from flowgrpo.commands.page_parts import cards
from flowgrpo.training.reports.samples import save_sample


def samples(*lasts, prompt="cat"):
    """A base of reward 0.5, and samples of some rewards at steps 2, 4, ..."""
    lines = [{"prompt": prompt, "seed": 1, "step": 0, "shade": 50, "rewards": {"r": 0.5}}]
    return lines + [
        {"prompt": prompt, "seed": 1, "step": 2 * i, "shade": 50 + i, "rewards": {"r": last}}
        for i, last in enumerate(lasts, start=1)
    ]


def evaluated(*means):
    return {2 * i: {"reward/mean": mean, "reward/std": 0.6, "reward/count": 37} for i, mean in enumerate(means)}


def page_of(tmp_path, *folders):
    return write_gallery(folders, tmp_path / "page.html").read_text()


def plain(text):
    return " ".join(html.unescape(re.sub("<[^>]*>", " ", text)).split())


def notes(page):
    found = re.search(r'<ul class="notes">(.*?)</ul>', page)
    return plain(found.group(1)) if found else ""


@pytest.fixture
def page(tmp_path):
    """Of a run of four iterations and one of two."""
    a = trained_run(tmp_path / "a", samples(0.7, 0.9), evaluated(0.25, 0.5, 0.75))
    return page_of(tmp_path, a, trained_run(tmp_path / "b", samples(0.4), evaluated(0.25, 0.125)))


def test_the_head_tells_of_each_run_what_it_reached_and_took(page):
    """The standard error is 0.6 / sqrt(37 - 1); four iterations take 100 evaluations and 2.5 seconds each."""
    first, second = re.findall(r"<li><span class=\"badge.*?</li>", page, re.DOTALL)
    method = "flow_grpo · standard errors 0.10 and 0.10"
    assert plain(first) == f"A a 0.250 → 0.750 +0.500 {method} · 400 model evaluations · 0 min 10 s"
    assert plain(second) == f"B b 0.250 → 0.125 −0.125 {method} · 200 model evaluations · 0 min 5 s"


def test_samples_stand_side_by_side_with_what_they_gained(page):
    (card,) = re.findall("<figure.*?</figure>", page, re.DOTALL)
    assert plain(card.split('class="column run"')[0].split('class="row">')[1]).startswith("before step 0 0.500")
    views = re.findall(r'<div class="view" data-step="(\d+)"( hidden)?>(.*?)</div>\s*</div>', card, re.DOTALL)
    assert [(step, bool(hidden)) for step, hidden, _ in views] == [("2", True), ("4", False), ("2", False)]
    assert [plain(view) for *_, view in views] == [
        "step 2 0.700 +0.200", "step 4 0.900 +0.400", "step 2 0.400 −0.100"
    ]  # fmt: skip
    words = html.unescape(re.search(r'data-words="([^"]*)"', card).group(1))
    assert json.loads(words) == ["B − A: −0.300", "B − A: −0.500"]
    assert "B − A: −0.500" in plain(card)
    assert 'data-disagreement="0.25"' in card
    assert float(re.search(r'data-change="([^"]*)"', card).group(1)) == pytest.approx(0.4)


def test_curves_can_be_had_over_steps_evaluations_and_seconds(page):
    assert re.findall(r'type="radio" name="axis" value="(\w+)"', page) == ["step", "evaluations", "seconds"]
    assert re.findall(r"<title>B, ([^<]*)</title>", page) == [
        "step 0: 0.250", "step 2: 0.125",
        "0 evaluations: 0.250", "200 evaluations: 0.125",
        "0 seconds: 0.250", "5 seconds: 0.125",
    ]  # fmt: skip


def test_rewards_that_differ_are_said_and_drawn_one_by_one(tmp_path):
    def use(name, weight):
        return {"use": name, "name": None, "weight": weight, "offset": 0.0, "options": {}}

    def means(*names):
        return {step: {f"reward/{name}/mean": 0.5 for name in names} | {"reward/mean": 1.0} for step in (0, 2)}

    watching = {"rewards": [use("r", 1.0)], "eval_rewards": [use("s", 1.0)]}
    a = trained_run(tmp_path / "a", samples(0.7), means("r", "s"), config=watching)
    b = trained_run(tmp_path / "b", [], means("r", "s"), config={"rewards": [use("r", 1.0), use("s", 0.5)]})
    page = page_of(tmp_path, a, b)
    assert notes(page) == (
        "The totals are of different rewards and cannot be compared (A: r; B: r, 0.500 × s); rewards of the same name can. "
        "No samples were kept of B. No prompt and seed is in two of the folders, so no samples stand side by side."
    )
    legends = [plain(each) for each in re.findall(r'<p class="legend">(.*?)</p>', page)]
    assert legends == ["held-out reward of each run, its own total", "r", "s , watched only by A"]
    assert "B − A" not in page


def test_a_card_has_no_totals_that_cannot_be_compared(tmp_path):
    """B's total is 0.3 × r + s; what its sample gained in r is 0.25 - 0.5."""
    weights = {"a": {"r": 1.0}, "b": {"r": 0.3, "s": 1.0}}
    configs = {
        run: {"rewards": [{"use": name, "name": None, "weight": weight} for name, weight in uses.items()]}
        for run, uses in weights.items()
    }
    lasts = {"a": {"r": 0.75}, "b": {"r": 0.25, "s": 0.125}}
    base = {"prompt": "cat", "seed": 1, "step": 0, "shade": 50, "rewards": {"r": 0.5, "s": 0.0}}
    a, b = (
        trained_run(tmp_path / run, [base, {**base, "step": 2, "rewards": last}], evaluated(0.1), config=configs[run])
        for run, last in lasts.items()
    )
    page = page_of(tmp_path, a, b)
    shown = plain(re.search('<div class="row">.*?</figure>', page, re.DOTALL).group())
    assert shown.startswith("before step 0 r 0.500 s 0.00 A step 2 r 0.750 +0.250")
    assert "B step 2 r 0.250 −0.250 s 0.125 +0.125" in shown


def test_a_reward_that_differs_has_one_row_of_settings(tmp_path):
    def use(name, **fields):
        return {
            "use": f"./m.py:{name}",
            "weight": 1.0,
            "offset": 0.0,
            "options": {},
            "name": None,
            "of": None,
            **fields,
        }

    watching = {"rewards": [use("r")], "eval_rewards": [use("s", options={"size": 3})]}
    a = trained_run(tmp_path / "a", samples(0.7), {}, config=watching)
    b = trained_run(
        tmp_path / "b", samples(0.7), {}, config={"rewards": [use("s"), use("r", weight=0.3)], "eval_rewards": []}
    )
    (table,) = re.findall("<details.*?</details>", page_of(tmp_path, a, b), re.DOTALL)
    rows = [plain(row) for row in re.findall("<tr>.*?</tr>", table)[1:]]
    assert rows == [
        'eval_rewards.s ./m.py:s, options {"size": 3}, weight 1.0 –',
        "rewards.r ./m.py:r, weight 1.0 ./m.py:r, weight 0.3",
        "rewards.s – ./m.py:s, weight 1.0",
    ]


def test_settings_that_differ_are_listed_and_the_others_counted(tmp_path):
    """Kind, preset, seed and the reward agree; of the environment Python."""
    configs = [{"train": {"rate": rate}, "run": {"name": name, "seed": 7}} for rate, name in ((0.1, "a"), (0.25, "b"))]
    a, b = (
        trained_run(tmp_path / name, samples(0.7), evaluated(0.1, 0.2), config=config)
        for name, config in zip("ab", configs, strict=True)
    )
    alone = sampled(tmp_path / "alone", samples(0.7))
    page = page_of(tmp_path, a, alone, b)
    (table,) = re.findall("<details.*?</details>", page, re.DOTALL)
    assert plain(table) == "1 setting differs , 4 agree, in A, C A C train.rate 0.1 0.25"
    agree = plain(re.search(r'<p class="agree">.*?</p>', page).group())
    assert agree == "No facts of the environment differ, 1 agrees, in A, C."


def test_held_out_prompts_that_differ_are_said(tmp_path):
    a, b = (
        trained_run(tmp_path / name, samples(0.7), evaluated(0.1, 0.2), config={"eval": {"prompts": count}})
        for name, count in (("a", 8), ("b", 16))
    )
    assert notes(page_of(tmp_path, a, b)).startswith("The runs were evaluated on different prompts")


def test_what_training_took_may_be_unknown(tmp_path):
    a, b = (trained_run(tmp_path / name, samples(0.7), evaluated(0.1, 0.2)) for name in "ab")
    lines = [line for line in (b / "metrics.jsonl").read_text().splitlines() if '"train"' not in line]
    (b / "metrics.jsonl").write_text("\n".join(lines))
    page = page_of(tmp_path, a, b)
    assert notes(page) == "What training took is not known of B, so curves are drawn by step only."
    assert 'type="radio"' not in page


def test_folders_without_a_common_prompt_are_told_so(tmp_path):
    a, b = (sampled(tmp_path / name, samples(0.7, prompt=name)) for name in "ab")
    page = page_of(tmp_path, a, b)
    assert notes(page) == "No prompt and seed is in two of the folders, so no samples stand side by side."
    assert re.findall(r'<p class="lacking">([^<]*)</p>', page) == ["not in B", "not in A"]
    assert "2 prompts, 2 not in every run" in page
    assert "<details" not in page
    assert 'class="by ' not in page


def test_markup_in_prompts_names_and_settings_is_text(tmp_path):
    wild = "<script>alert(1)</script>\"'&" + 4000 * "w"
    a, b = (
        trained_run(tmp_path / f"<i>{name}", samples(0.7, prompt=wild), evaluated(0.1, 0.2), config={wild: name})
        for name in "ab"
    )
    page = page_of(tmp_path, a, b)
    assert "<script>alert" not in page
    assert "<i>a" not in page
    assert wild in html.unescape(page)
    assert not re.findall(r'(?:src|href)="(?!data:)', page)


def test_sounds_and_texts_are_compared_too(tmp_path):
    for name, last in (("a", "1"), ("b", "2")):
        folder = tmp_path / name
        folder.mkdir()
        save_sample(torch.rand(1, 500), folder / "sound", sampling_rate=8000)
        (folder / "text.json").write_text(json.dumps({"text": last, "tokens": [last], "steps": [0]}))
        lines = [{"file": "sound.wav", "prompt": "bark", "seed": 0}, {"file": "text.json", "prompt": "add", "seed": 0}]
        (folder / "manifest.jsonl").write_text(written(lines))
    page = page_of(tmp_path, tmp_path / "a", tmp_path / "b")
    assert page.count("<audio controls") == 2
    assert re.findall(r'<p class="text">(.)</p>', page) == ["1", "2"]


def test_runs_share_what_a_page_may_hold(tmp_path, monkeypatch):
    """Three sounds of 1,044 bytes a folder: two folders may have half of the page each, which is less."""
    for name in "ab":
        folder = tmp_path / name
        folder.mkdir()
        files = [save_sample(torch.rand(1, 500), folder / f"{step}", sampling_rate=8000) for step in (0, 2, 4)]
        lines = [{"file": file.name, "prompt": "bark", "seed": 0, "step": int(file.stem)} for file in files]
        (folder / "manifest.jsonl").write_text(written(lines))
    monkeypatch.setattr(cards, "LARGEST_MEDIA", 2 * 3 * 1044)
    assert page_of(tmp_path, tmp_path / "a", tmp_path / "b").count("<audio controls") == 2 * 3
    monkeypatch.setattr(cards, "LARGEST_MEDIA", 2 * 3 * 1044 - 1)
    assert page_of(tmp_path, tmp_path / "a", tmp_path / "b").count("<audio controls") == 2 * 2


def test_the_command_writes_beside_the_first_run_s_own_gallery(tmp_path, printed, refused):
    a, b = (sampled(tmp_path / name, samples(0.7)) for name in "ab")
    assert printed("gallery", a, b).strip() == str(a / "compare.html")
    assert refused("gallery", a, f"{b}/../a") == f"{b}/../a: this folder is named twice; name each run once"
    (b / "manifest.jsonl").write_text("{}\n")
    assert "a line needs a file and a prompt" in refused("gallery", a, b)
