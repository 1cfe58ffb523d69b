import html
import json
import math
import re

import pytest
import yaml
from planted_run import written as lines_of

from flowgrpo.commands.inspect.gallery import write_gallery
from flowgrpo.commands.page_parts import cards
from flowgrpo.commands.page_parts.text import answer


class Reader:
    """What a browser would see of a page: answers by step and whether they are hidden, their text, their cells."""

    def __init__(self, page):
        self.answers = [
            (int(step), bool(hidden)) for step, hidden in re.findall(r'"answer" data-step="(\d+)"( hidden)?', page)
        ]
        self.paragraphs = self._texts('p class="text"', page)
        self.captions, self.rewards = self._texts("figcaption", page), self._texts("td[^>]*", page)
        self.cells = []
        for tag, title, style, inside in re.findall(r'<i([^>]*?) title="(.*?)"(.*?)>(.*?)</i>', page, re.DOTALL):
            heat, kinds = re.search(r"--t:(\d+)%", tag + style), re.search('class="([^"]*)"', tag)
            text = html.unescape(re.sub("<.*?>", "", inside))
            self.cells.append(
                [text, html.unescape(title), heat and int(heat[1]), set(kinds[1].split() if kinds else ())]
            )

    def _texts(self, tag, page):
        return [html.unescape(text) for text in re.findall(f"<{tag}>(.*?)</", page, re.DOTALL)]


def written(path, text, tokens, steps):
    path.write_text(json.dumps({"text": text, "tokens": tokens, "steps": steps}))
    return path


def test_a_strip_has_a_cell_per_token_that_tells_its_step_and_is_coloured_by_it(tmp_path):
    tokens = ["3", "<b>", "&", "\n", " x\t", "<end>", "<end>", "<end>"]
    strip = str(answer(written(tmp_path / "a.json", "3<b>&\n x\t", tokens, [-1, 0, 4, 2, 1, 3, 0, -1])))
    read = Reader(strip)
    assert read.paragraphs == ["3<b>&\n x\t"]
    assert read.cells == [
        ["3", "given", None, {"given"}],
        ["<b>", "step 1 of 5", 0, set()],
        ["&", "step 5 of 5", 100, set()],
        ["↵", "step 3 of 5", 50, set()],
        ["·x⇥", "step 2 of 5", 25, set()],
        ["", "<end>, step 4 of 5", 75, {"end"}],
        ["", "<end>, step 1 of 5", 0, {"end"}],
        ["", "<end>, given", None, {"given", "end"}],
    ]
    assert "<b>" not in strip
    assert re.findall("<br>", strip) == ["<br>"]  # after the line's end
    assert 'role="img" aria-label="order of decoding: 8 tokens in 5 steps"' in strip
    one = Reader(str(answer(written(tmp_path / "b.json", "ab", ["a", "b"], [0, 0]))))
    assert [cell[1:3] for cell in one.cells] == [["step 1 of 1", 0]] * 2  # one step for all is early


@pytest.mark.parametrize(
    ("text", "tokens", "muted"),
    [
        ("100", ["1", "0", "0"], 0),  # a full canvas: equal tokens, but the answer's
        ("7", ["7", "<end>", "4", "<end>", "<end>"], 2),  # an end inside stays readable
        ("", ["<|endoftext|>"] * 3, 3),
        ("", [], 0),
    ],
)
def test_only_the_ends_that_the_canvas_closes_with_are_muted(tmp_path, text, tokens, muted):
    cells = Reader(str(answer(written(tmp_path / "a.json", text, tokens, list(range(len(tokens))))))).cells
    assert ["end" in cell[3] for cell in cells] == [False] * (len(tokens) - muted) + [True] * muted


def run_of_texts(path):
    """A run of two prompts, evaluated at steps 0, 5 and 10."""
    (path / "samples").mkdir(parents=True)

    def use(name):
        return {"use": f"./mine.py:{name}", "name": None, "weight": 1.0, "options": {}}

    config = {
        "kind": "mdlm",
        "model": {"path": "tiny", "length": 4, "lora": {"rank": 8}},
        "algorithm": {"preset": "d1", "decoder": {"name": "low_confidence", "steps": 2}},
        "rewards": [use("exact"), use("brief")],
        "eval_rewards": [use("readable")],
        "train": {"groups": 2, "group_size": 6, "updates": 3},
    }
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    train = {"phase": "train", "time/rollout": 40.0, "time/update": 25.5, "cost/model_evaluations": 700}
    metrics = [
        {**train, "step": step, "reward/mean": 0.1, "policy/max_abs_log_ratio": drift}
        for step, drift in ((1, 0.0), (2, 3e-7))
    ]
    (path / "metrics.jsonl").write_text(lines_of(metrics))
    lines = []
    for step, exact in ((0, 0.0), (5, 0.25), (10, 0.5)):
        for seed in range(2):
            text = f"{step}+{seed}"
            file = written(path / "samples" / f"{step}-{seed}.json", text, [*text, "<end>"], list(range(len(text) + 1)))
            rewards = {"exact": exact, "brief": 0.125, "readable": 0.75 if seed == 0 else None}
            line = {"file": file.name, "prompt": f"make\n<{seed}>", "seed": seed, "step": step, "sampler": "decoder"}
            lines.append({**line, "rewards": rewards})
    (path / "samples" / "manifest.jsonl").write_text(lines_of(lines))
    return path


@pytest.fixture
def page(tmp_path):
    return page_of(run_of_texts(tmp_path / "run"))


def page_of(folder):
    return write_gallery([folder], folder.parent / "g.html").read_text()


def figures(page):
    return re.findall("<figure.*?</figure>", page, re.DOTALL)


def test_a_card_shows_the_answers_before_and_after_and_keeps_those_between_for_the_slider(page):
    read = Reader(page)
    assert read.captions == ["make\n<0>", "make\n<1>"]
    assert read.answers == [(0, False), (5, True), (10, False)] * 2
    assert read.paragraphs == ["0+0", "5+0", "10+0", "0+1", "5+1", "10+1"]
    first = figures(page)[0]
    assert 'class="up"' in first
    assert re.findall(r"<b>([\d.]+)</b>", first) == ["0.125", "0.625"]  # the sums of the trained rewards
    frames = json.loads(re.search(r'<script type="application/json">(.*?)</script>', first).group(1))
    assert [(frame["step"], frame["reward"]) for frame in frames] == [(0, 0.125), (5, 0.375), (10, 0.625)]
    assert frames[1]["parts"] == {"exact": ["0.250", "+0.250"], "brief": ["0.125", "±0"], "readable": ["0.750", "±0"]}


def test_each_reward_is_on_the_card_and_the_watched_one_is_told_apart(page):
    first, second = figures(page)
    shown = ["0.00", "0.500", "+0.500", "0.125", "0.125", "±0"]
    assert Reader(first).rewards == [*shown, "0.750", "0.750", "±0"]
    assert Reader(second).rewards == [*shown, "–", "–", ""]
    assert re.findall(r'<tr class="watched"[^>]*><th scope="row">(\w+)', first) == ["readable"]


def test_a_page_of_texts_explains_its_colours_and_has_nothing_of_noise_or_from_elsewhere(page):
    assert "committed early" in page
    assert "same noise" not in page
    assert "ODE" not in page
    assert "http" not in page
    assert not re.findall(r"<(?:img|audio|link|script src)", page)


def test_a_run_that_keeps_no_texts_still_tells_nothing_of_noise(tmp_path):
    run = run_of_texts(tmp_path / "run")
    (run / "samples" / "manifest.jsonl").unlink()
    page = page_of(run)
    assert "ODE" not in page
    assert "same noise" not in page


def test_the_facts_of_a_run_of_texts(page):
    assert dict(re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd>", page)) == {
        "model": "tiny",
        "method": "d1",
        "decoder": "low_confidence, 4 tokens",
        "weights": "LoRA rank 8",
        "batch": "2 prompts × 6 samples, 3 updates",
        "rewards": "./mine.py:exact, ./mine.py:brief",
        "iterations": "2",
        "training": "2 min 11 s",
        "model evaluations": "1,400",
        "largest drift": "3e-07",
    }


def test_of_too_many_texts_only_the_first_and_the_last_step_are_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(cards, "LARGEST_TEXTS", 200)
    assert Reader(page_of(run_of_texts(tmp_path / "run"))).answers == [(0, False), (10, False)] * 2


@pytest.mark.parametrize(
    "content", ['{"text": "ab", "tok', '{"text": "ab"}', "[]", '{"text": "ab", "tokens": ["a"], "steps": []}']
)
def test_a_file_that_is_no_text_is_named_in_a_sentence(tmp_path, refused, content):
    folder = run_of_texts(tmp_path / "run") / "samples"
    (folder / "5-1.json").write_text(content)
    said = "is not a text as flowgrpo sample writes them, an object with the keys text, tokens and steps"
    assert refused("gallery", folder) == f"{folder / '5-1.json'} {said}"


def test_a_manifest_may_name_files_and_prompts_only(tmp_path):
    for name in "abc":
        written(tmp_path / f"{name}.json", name, [name], [0])
    lines = [{"file": f"{name}.json", "prompt": prompt} for name, prompt in (("a", "x"), ("b", "y"), ("c", "x"))]
    (tmp_path / "manifest.jsonl").write_text(lines_of(lines))
    page = page_of(tmp_path)
    read = Reader(page)
    assert list(zip(read.captions, read.paragraphs, read.answers, strict=True)) == [
        ("x", "a", (0, False)), ("y", "b", (0, False)), ("x", "c", (0, False)),
    ]  # fmt: skip
    assert "<span>3 prompts</span>" in page
    assert not re.findall("seed (None|[0-9])", page)
    assert "each at its own fixed seed" in page_of(run_of_texts(tmp_path / "run"))


def linear(lightness, chroma, hue):
    """Linear sRGB of a colour of OKLCH (Ottosson 2020, https://bottosson.github.io/posts/oklab)."""
    a, b = chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    return (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )


def luminance(rgb):
    return sum(weight * min(max(value, 0), 1) for weight, value in zip((0.2126, 0.7152, 0.0722), rgb, strict=True))


def test_tokens_are_legible_on_both_ends_of_the_scale_in_both_themes(page):
    inks = re.findall(r"--ink: #(\w{6})", page)
    themes = re.findall(r"--early: oklch\(([^)]*)\); --late: oklch\(([^)]*)\)", page)
    assert len(inks) == len(themes) == 2
    for ink, ends in zip(inks, themes, strict=True):
        values = [int(ink[at : at + 2], 16) / 255 for at in (0, 2, 4)]
        text = luminance([v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values])
        for end in ends:
            low, high = sorted((text, luminance(linear(*map(float, end.split())))))
            assert (high + 0.05) / (low + 0.05) >= 4.5  # WCAG 2.2, 1.4.3
