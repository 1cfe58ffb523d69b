import itertools
import json
import re

import pytest
import torch

from flowgrpo.errors import InputError
from flowgrpo.evaluate import save_image
from flowgrpo.gallery import write_gallery
from flowgrpo.gallery.curve import _ticks, curve


def folder_of_samples(path, rewards_by_step):
    path.mkdir()
    lines = []
    for step, rewards in rewards_by_step.items():
        for index, reward in enumerate(rewards):
            file = f"{step}-{index}.png"
            save_image(torch.rand(3, 8, 8), path / file)
            line = {"file": file, "prompt": f"<b> & {index}", "seed": index, "step": step, "sampler": "ode"}
            lines.append({**line, "rewards": {"mine": reward}})
    (path / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_page_is_self_contained_and_escapes_prompts(tmp_path):
    page = write_gallery(
        [folder_of_samples(tmp_path / "s", {0: [0.2, 0.5], 4: [0.9, 0.1]})], tmp_path / "g.html"
    ).read_text()
    assert "<b> &" not in page
    assert "&lt;b&gt; &amp; 1" in page
    assert not re.findall(r'(?:src|href)="(?!data:)', page)
    assert "http" not in page
    assert len(re.findall(r'<img src="data:image/webp', page)) == 4


def test_pairs_are_before_and_after_and_know_their_gain(tmp_path):
    page = write_gallery(
        [folder_of_samples(tmp_path / "s", {0: [0.2, 0.5], 4: [0.9, 0.1]})], tmp_path / "g.html"
    ).read_text()
    first, second = page.split("<figure")[1:3]
    assert 'class="up"' in first
    assert "0.20" in first
    assert "0.90" in first
    assert 'class="down"' in second


def test_steps_between_can_be_scrubbed_to(tmp_path):
    folder = folder_of_samples(tmp_path / "s", {0: [0.2], 4: [0.4], 8: [None]})
    page = write_gallery([folder], tmp_path / "g.html").read_text()
    frames = json.loads(re.search(r'<script type="application/json">(.*?)</script>', page).group(1))
    assert [(frame["step"], frame["reward"]) for frame in frames] == [(0, 0.2), (4, 0.4), (8, None)]
    assert 'type="range"' in page


def test_several_folders_share_a_page_and_an_empty_one_is_refused(tmp_path):
    folders = [folder_of_samples(tmp_path / name, {0: [0.2]}) for name in ("a", "b")]
    page = write_gallery(folders, tmp_path / "g.html").read_text()
    assert page.count("<section>") == 2
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="there are no samples to show"):
        write_gallery([tmp_path / "empty"], tmp_path / "g.html")


@pytest.mark.parametrize(("low", "high"), [(0.4, 0.66), (0.0, 1.0), (-17.3, -2.1), (0.5, 0.5), (1e-4, 3e-4)])
def test_ticks_are_round_enclose_the_data_and_are_few(low, high):
    ticks = _ticks(low, high, 5)
    assert ticks[0] <= low + 1e-9
    assert ticks[-1] >= high - 1e-9
    assert 2 <= len(ticks) <= 8
    steps = {round(b - a, 12) for a, b in itertools.pairwise(ticks)}
    assert len(steps) == 1


def test_the_curve_places_its_points_inside_the_frame():
    svg = curve([(0, 0.4), (10, 0.6)], [(i, 0.4 + i / 50) for i in range(1, 11)])
    numbers = [
        tuple(map(float, pair.split(","))) for pair in re.search(r'train" points="([^"]*)"', svg).group(1).split()
    ]
    assert len(numbers) == 10
    assert all(0 <= x <= 640 and 0 <= y <= 240 for x, y in numbers)
    assert [y for _, y in numbers] == sorted((y for _, y in numbers), reverse=True)  # rising rewards go up the page
