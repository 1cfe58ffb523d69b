import itertools
import json
import os
import re
import statistics
import wave

import numpy as np
import pytest
import torch
import yaml
from data_urls import embedded
from PIL import Image
from planted_run import written

from flowgrpo.commands.inspect.gallery import write_gallery
from flowgrpo.commands.page_parts import cards, media
from flowgrpo.commands.page_parts.curve import _ticks, curve
from flowgrpo.commands.page_parts.media import data_url, outline
from flowgrpo.commands.page_parts.numbers import Mean, difference, number
from flowgrpo.training.reports import video_files
from flowgrpo.training.reports.samples import save_sample
from rewards import BUILT_IN


def folder_of_samples(path, rewards_by_step, shape=(3, 8, 8)):
    path.mkdir()
    lines = []
    for step, rewards in rewards_by_step.items():
        for index, reward in enumerate(rewards):
            file = save_sample(torch.rand(shape), path / f"{step}-{index}").name
            line = {"file": file, "prompt": f"<b> & {index}", "seed": index, "step": step, "sampler": "ode"}
            lines.append({**line, "rewards": {"mine": reward}})
    (path / "manifest.jsonl").write_text(written(lines))
    return path


def lines_of(folder):
    return [json.loads(line) for line in (folder / "manifest.jsonl").read_text().splitlines()]


def page_of(folder):
    return write_gallery([folder], folder.parent / "g.html").read_text()


def frames(page):
    return json.loads(re.search(r'<script type="application/json">(.*?)</script>', page).group(1))


def test_pairs_are_before_and_after_on_a_self_contained_page_that_escapes_prompts(tmp_path):
    page = page_of(folder_of_samples(tmp_path / "s", {0: [0.2, 0.5], 4: [0.9, 0.1]}))
    assert "<b> &" not in page
    assert "&lt;b&gt; &amp; 1" in page
    assert not re.findall(r'(?:src|href)="(?!data:)', page)
    assert "http" not in page
    assert len(re.findall(r'<img src="data:image/webp', page)) == 4
    first, second = page.split("<figure")[1:3]
    assert 'class="up"' in first
    assert 'class="down"' in second
    assert re.findall(r"<b>([^<]*)</b>", first) == ["0.200", "0.900"]
    assert [re.findall(r'class="gain">([^<]*)<', card) for card in (first, second)] == [["+0.700"], ["−0.400"]]


def test_a_run_s_warnings_are_counted_and_the_last_is_shown(tmp_path):
    folder = folder_of_samples(tmp_path / "s", {0: [0.2]})
    assert "warnings" not in page_of(folder)
    (folder / "log.txt").write_text("12:00 the reward failed\n12:01 <b>again</b>\x1b[2J\n")
    said = "<dt>warnings</dt><dd>2 in log.txt, the last: 12:01 &lt;b&gt;again&lt;/b&gt; [2J</dd>"
    assert said in page_of(folder)


def test_videos_move_on_the_page(tmp_path):
    folder = folder_of_samples(tmp_path / "s", {0: [0.2], 4: [0.9]}, (5, 3, 8, 12))
    page = page_of(folder)
    found = re.findall(r'<video src="([^"]*)" aria-label="[^"]*" autoplay loop muted playsinline>', page)
    assert [embedded(url)[0] for url in found] == ["video/mp4"] * 2
    assert embedded(found[0])[1].getvalue() == (folder / "0-0.mp4").read_bytes()
    assert "<audio" not in page
    assert "<img" not in page


def test_without_ffmpeg_videos_move_as_webp(tmp_path, monkeypatch):
    monkeypatch.setattr(video_files, "ffmpeg", lambda: None)
    page = page_of(folder_of_samples(tmp_path / "s", {0: [0.2], 4: [0.9]}, (5, 3, 8, 12)))
    found = [embedded(url) for url in re.findall(r'<img src="([^"]*)"', page)]
    assert [(kind, Image.open(data).n_frames) for kind, data in found] == [("image/webp", 5)] * 2


def test_audio_is_heard_on_the_page_and_a_step_between_can_be_scrubbed_to(tmp_path):
    folder = folder_of_samples(tmp_path / "s", {0: [0.2], 4: [0.4], 8: [0.9]}, (2, 500))
    page = page_of(folder)
    urls = re.findall(r'<audio controls preload="metadata" src="([^"]*)"', page)
    assert len(urls) == 2
    kind, data = embedded(urls[0])
    assert kind == "audio/wav"
    with wave.open(data) as sound:
        assert (sound.getframerate(), sound.getnchannels(), sound.getnframes()) == (24000, 2, 273)  # of 44.1 kHz
    assert [frame["url"] for frame in (frames(page)[0], frames(page)[-1])] == urls
    assert all(frame["outline"] for frame in frames(page))
    assert "<img" not in page


def test_long_audio_is_cut_and_thinned_and_does_not_wrap_around_and_short_audio_is_as_it_is(tmp_path):
    square = torch.tensor([1.0, -1.0]).repeat_interleave(50).repeat(16 * 480).unsqueeze(0)  # 16 s at 48 kHz, full scale
    _, data = embedded(data_url(save_sample(square, tmp_path / "a", sampling_rate=48000)))
    with wave.open(data) as sound:
        assert (sound.getframerate(), sound.getnchannels(), sound.getnframes()) == (24000, 1, 15 * 24000)
        values = np.frombuffer(sound.readframes(-1), "<i2")
    up, down = values[10000:10050].reshape(2, 25)  # one period, its edges smoothed
    assert (up[2:-2] > 0).all()
    assert (down[2:-2] < 0).all()
    short = save_sample(torch.rand(1, 500), tmp_path / "b", sampling_rate=8000)
    assert embedded(data_url(short))[1].getvalue() == short.read_bytes()


def test_the_outline_of_a_sound_follows_its_peaks(tmp_path):
    sound = torch.zeros(2, 720)
    sound[1, 360:] = -0.5
    path = outline(save_sample(sound, tmp_path / "a", sampling_rate=8000))
    bars = [float(b) - float(a) for a, b in re.findall(r"M\S+ (\S+?)V(\S+?)(?=M|$)", path)]
    assert bars == pytest.approx([1.0] * 36 + [18.0] * 36)  # a dot for silence, half of 36 for half of full scale
    assert outline(save_sample(torch.rand(3, 8, 8), tmp_path / "b")) is None


def test_of_heavy_samples_only_the_first_and_the_last_step_are_shown(tmp_path, monkeypatch):
    folder = folder_of_samples(tmp_path / "s", {0: [0.2], 4: [0.4], 8: [0.9]}, (2, 500))
    monkeypatch.setattr(cards, "LARGEST_MEDIA", 3 * 2000)  # 500 moments of two channels of 2 bytes, and headers
    page = page_of(folder)
    assert page.count("<audio controls") == 2
    assert 'type="range"' not in page


@pytest.mark.parametrize(("low", "high"), [(0.4, 0.66), (0.0, 1.0), (-17.3, -2.1), (0.5, 0.5), (1e-4, 3e-4)])
def test_ticks_are_round_enclose_the_data_and_are_few(low, high):
    ticks = _ticks(low, high, 5)
    assert ticks[0] <= low + 1e-9
    assert ticks[-1] >= high - 1e-9
    assert 2 <= len(ticks) <= 8
    assert len({round(b - a, 12) for a, b in itertools.pairwise(ticks)}) == 1


def test_the_curve_places_its_points_inside_the_frame_that_it_fills():
    svg = curve([(0, 0.4), (10, 0.6)], [(i, 0.4 + i / 50) for i in range(1, 11)])
    points = re.search(r'train" points="([^"]*)"', svg).group(1).split()
    numbers = [tuple(map(float, pair.split(","))) for pair in points]
    assert len(numbers) == 10
    assert all(0 <= x <= 640 and 0 <= y <= 240 for x, y in numbers)
    assert [y for _, y in numbers] == sorted((y for _, y in numbers), reverse=True)  # rising rewards go up the page
    small = curve([(0, 0.0), (10, 1.0)], [], (300, 150))
    assert 'viewBox="0 0 300 150"' in small
    assert max(map(float, re.findall(r'cx="([\d.]*)"', small))) == pytest.approx(300 - 12)  # the margin on the right


def test_several_rewards_are_told_apart_on_the_card_and_follow_the_slider(tmp_path):
    folder = folder_of_samples(tmp_path / "s", {0: [0.2], 4: [0.4], 6: [None], 8: [0.9]})
    lines = [{**line, "rewards": line["rewards"] | {"other": line["step"] / 10}} for line in lines_of(folder)]
    (folder / "manifest.jsonl").write_text(written(lines))
    page = page_of(folder)
    rows = re.findall(
        r'<th scope="row">(.*?)</th><td>(.*?)</td><td class="now">(.*?)</td><td class="more">(.*?)<', page
    )
    assert rows == [("mine", "0.200", "0.900", "+0.700"), ("other", "0.00", "0.800", "+0.800")]
    assert 'type="range"' in page
    told = [(frame["step"], frame["reward"]) for frame in frames(page)]
    assert told == [(0, 0.2), (4, pytest.approx(0.8)), (6, 0.6), (8, pytest.approx(1.7))]  # one of two is known at 6
    between = frames(page)[1]
    assert between["parts"] == {"mine": ["0.400", "+0.200"], "other": ["0.400", "+0.400"]}
    assert between["total"] == ["0.800", "+0.600"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.27341, "0.273"), (0.0, "0.00"), (-0.0, "0.00"), (1.0, "1.00"), (21.449, "21.4"), (-17.35, "−17.4"),
        (123.4, "123"), (999.4, "999"), (999.7, "1000"), (54321.0, "54321"), (0.000123, "0.000123"), (None, "–"),
    ],
)  # fmt: skip
def test_numbers_have_three_significant_digits_and_no_powers_of_ten(value, shown):
    assert number(value) == shown


def test_a_change_that_two_decimals_hide_is_told(tmp_path):
    page = page_of(folder_of_samples(tmp_path / "s", {0: [0.2734], 4: [0.2741]}))
    assert re.findall(r"<b>([^<]*)</b>", page) == ["0.273", "0.274"]
    assert 'class="gain">+0.000700<' in page
    assert [difference(*pair) for pair in ((0.5, 0.5), (None, 0.5), (0.5, None))] == ["±0", "", ""]


def run_of_pictures(path, uses, rewards_by_step):
    """A run with the samples of two prompts, whose rewards are given by name."""
    path.mkdir()
    samples = path / "samples"
    folder_of_samples(samples, {step: [0, 0] for step in rewards_by_step})
    lines = lines_of(samples)
    for line in lines:
        line["rewards"] = {name: values[line["seed"]] for name, values in rewards_by_step[line["step"]].items()}
    (samples / "manifest.jsonl").write_text(written(lines))
    config = {
        "kind": "flow",
        "model": {"path": "tiny", "lora": None},
        "algorithm": {"preset": "flow_grpo"},
        "rewards": [{"use": use, "name": None, "weight": weight} for use, weight in uses.items()],
        "train": {"groups": 2, "group_size": 6, "updates": 3},
    }
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    return path


@pytest.mark.parametrize(
    ("uses", "rewards", "expected"),
    [
        ({"gsm8k": 1.0}, {0: {"gsm8k": [1, 3]}, 4: {"gsm8k": [4, 2]}}, [25, 100, 75, 50]),  # 0 to 4
        ({"clap": 1.0}, {0: {"clap": [-1, 0]}, 4: {"clap": [0.5, 1]}}, [0, 75, 50, 100]),  # -1 to 1
        (  # from 16 - 2 to 26 + 0: a weight below 0 turns a range around
            {"pickscore": 1.0, "shapes": -2.0},
            {0: {"pickscore": [17, 20], "shapes": [1, 1]}, 4: {"pickscore": [26, 20], "shapes": [0, None]}},
            [8, 100, 33, 40],
        ),
        ({"jpeg_size": 1.0}, {0: {"jpeg_size": [-30, -20]}, 4: {"jpeg_size": [-10, -15]}}, [0, 100, 50, 75]),  # as seen
        ({"./mine.py:own": 1.0}, {0: {"own": [7, 7]}, 4: {"own": [7, 7]}}, []),  # all alike: nothing to draw
    ],
)
def test_bars_lie_in_the_rewards_own_range(tmp_path, uses, rewards, expected):
    page = page_of(run_of_pictures(tmp_path / "run", uses, rewards))
    assert [int(width) for width in re.findall(r'style="width:(\d+)%"', page)] == expected


def test_the_bounds_of_every_built_in_reward():
    """Read off the ranges that `flowgrpo rewards` prints."""
    others = {
        "jpeg_size": None, "votes": None, "temporal_consistency": (-1, 1), "clip_score": (0, 2.5), "pickscore": (16, 26),
        "hpsv2": (-1, 1), "hpsv3": (-1, 12), "hpsv3_plus": None, "video_align": (-6, 6),
        "aesthetic_v25": (1, 10), "deqa": (1, 5),
        "aesthetic": (1, 10), "image_reward": (-2.3, 2), "image_similarity": (-1, 1), "diversity": (0, 2), "clap": (-1, 1),
        "tags": (0, 0.5), "gsm8k": (0, 4), "math_answer": (0, 3),
    }  # fmt: skip
    assert {name: card.bounds for name, card in BUILT_IN.items()} == {
        name: others.get(name, (0, 1)) for name in BUILT_IN
    }


def test_the_headline_tells_how_many_and_how_sure(tmp_path):
    run = run_of_pictures(tmp_path / "run", {"shapes": 1.0}, {0: {"shapes": [0, 1]}, 4: {"shapes": [1, 1]}})
    metrics = [
        {"step": step, "phase": "eval", "reward/mean": mean, "reward/std": std, "reward/count": 65}
        for step, mean, std in ((0, 0.25, 0.48), (4, 0.75, 0.32))
    ]
    (run / "metrics.jsonl").write_text(written(metrics))
    headline = re.search(r'<p class="headline">(.*?)</p>\s*<p class="caption">(.*?)</p>', page_of(run))
    words = [" ".join(re.sub("<[^>]*>", "", part).split()) for part in headline.groups()]
    assert words == [
        "0.250 → 0.750 +0.500",
        "mean held-out reward, before and after training; n = 65, standard errors 0.060 and 0.040",  # std / sqrt(65 - 1)
    ]


def test_the_standard_error_of_a_mean_is_the_unbiased_one():
    values = [0.1, 0.4, 0.4, 0.9]
    line = {"reward/mean": 0.45, "reward/std": statistics.pstdev(values), "reward/count": 4}
    assert Mean.of(line).error == pytest.approx(statistics.stdev(values) / 2)
    assert Mean.of({**line, "reward/count": 1}).error is None
    before = {"reward/mean": 0.45, "reward/std": 0.1}  # a run from before they were counted
    assert Mean.of(before) == Mean(0.45, None, None)


def test_a_picture_is_encoded_once_until_it_changes(tmp_path, monkeypatch):
    file = save_sample(torch.zeros(3, 8, 8), tmp_path / "a")
    first = data_url(file)
    monkeypatch.setattr(media, "_picture", lambda path: b"other")
    assert data_url(file) == first
    os.utime(file, ns=(1, 1))
    assert embedded(data_url(file))[1].read() == b"other"


def test_a_page_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    folder = folder_of_samples(tmp_path / "s", {0: [0.2]})
    before = page_of(folder)

    def full(*words, **options):
        raise OSError("no space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    with pytest.raises(OSError, match="no space"):
        page_of(folder)
    assert (tmp_path / "g.html").read_text() == before


def test_nothing_on_the_page_insists_on_more_than_a_phones_width(tmp_path):
    """Columns may shrink to the width there is, and words break anywhere."""
    page = page_of(folder_of_samples(tmp_path / "s", {0: [0.2]}))
    style = page.split("<style>")[1].split("</style>")[0]
    least = re.findall(r"minmax\((min\([^)]*\)|[^,]*),", style)
    assert len(least) > 6
    assert all(width == "0" or re.fullmatch(r"min\(100%, \d+px\)", width) for width in least)
    assert "overflow-wrap: anywhere" in re.search(r"^body {.*?}", style, re.MULTILINE).group()
    assert style.count("white-space: nowrap") == 2  # of numbers


def test_a_click_on_a_picture_enlarges_it(tmp_path):
    page = page_of(folder_of_samples(tmp_path / "s", {0: [0.2], 1: [0.4]}))
    pictures = re.findall(r"<img [^>]*>", page.split("<script>")[0])
    buttons = re.findall(r'<button type="button" class="picture" title="enlarge"><img [^>]*></button>', page)
    assert len(pictures) == len(buttons) == 2
    assert page.count("<dialog ") == 1
    assert "dialog.showModal()" in page.split("<script>")[1]


def test_a_gallery_replaces_a_file_and_no_folder_and_is_not_of_an_empty_one(tmp_path, monkeypatch, printed, refused):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "gallery.html").mkdir(parents=True)
    (tmp_path / "run" / "metrics.jsonl").touch()
    for arguments in ([], ["--out", "run"], ["--out", ""]):
        said = "is there and no ordinary file; name one, such as gallery.html"
        assert refused("gallery", "run", *arguments).endswith(said)
    assert {path.name for path in tmp_path.rglob("*")} == {"run", "gallery.html", "metrics.jsonl"}
    (tmp_path / "empty").mkdir()
    assert "there are no samples to show" in refused("gallery", "empty")
    (tmp_path / "page.html").write_text("old")
    printed("gallery", "run", "--out", "page.html")
    assert (tmp_path / "page.html").read_text() != "old"


def test_the_pairs_tell_their_mean_gain_with_its_error(tmp_path):
    """Gains 0.1 and 0.3 have the mean 0.2 and the standard deviation 0.2 / sqrt(2)."""
    rewards = {0: {"shapes": [0.5, 0.2]}, 4: {"shapes": [0.6, 0.5]}}
    page = page_of(run_of_pictures(tmp_path / "run", {"shapes": 1.0}, rewards))
    assert "; their mean gain after step 4 is +0.200 ± 0.10</span>" in page
    rewards = {0: {"shapes": [0.5, None]}, 4: {"shapes": [0.6, 0.5]}}
    assert "mean gain" not in page_of(run_of_pictures(tmp_path / "lost", {"shapes": 1.0}, rewards))
