"""The page of trees: where nodes stand, what is said of them, and that nothing of a run can break it."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from planted import FIRST, NODES, node, run_with, shade, tree

from flowgrpo.commands.inspect.gallery import check_readable, write_gallery
from flowgrpo.commands.page_parts.forest import Forest
from flowgrpo.commands.page_parts.trees import Drawing, shown_steps, write_trees
from flowgrpo.errors import InputError
from flowgrpo.training.reports.tree_store import KeptNode, TreeFolder, encode_picture


def page_of(folder, *trees):
    return write_trees(run_with(folder / "r", *trees), folder / "t.html").read_text()


def facts(page):
    """What the page tells of each node of its first tree."""
    told = json.loads(re.search(r'<script type="application/json">(.*?)</script>', page, re.DOTALL).group(1))
    return [dict(each["facts"]) for each in told]


def test_ends_have_rows_of_their_own_and_parents_stand_in_their_middle():
    rows = Forest(tree()).rows
    assert rows == [1.5, 0, 1, 2, 0, 0, 1, 2, 3]


def test_no_two_nodes_of_a_step_share_a_row():
    nodes = [node(None, 0), *[node(0, 1) for _ in range(4)], *[node(1 + i // 3, 2) for i in range(12)]]
    forest = Forest(tree(nodes))
    for step in range(3):
        rows = [forest.rows[i] for i, each in enumerate(nodes) if each.step == step]
        assert len(set(rows)) == len(rows)


def test_values_are_means_of_the_samples_beyond_and_of_the_sample_ode_leads_to():
    forest = Forest(tree())
    assert forest.values[0] == pytest.approx((0.9 + 0.3 + 0.3) / 3)  # without the twig
    assert forest.values[1] == 0.9
    assert Forest(tree(NODES[:3])).values == [None] * 3
    assert [forest.ode_values[i] for i in (0, 1, 4, 2)] == [0.6, 0.9, 0.9, 0.3]  # the twig's is the first's
    assert Forest(tree(NODES[:8])).ode_values[0] is None  # only noisy steps leave it


def test_the_best_end_is_no_twig_and_its_largest_rise_is_found():
    forest = Forest(tree())
    assert forest.best == 5
    rise = forest.largest_rise(5)
    assert (rise.node, rise.before, rise.after) == (4, 0.1, 0.7)
    falling = Forest(tree([node(None, 0, 0.9), node(0, 1, 0.4), node(1, 3, 0.1)]))
    assert falling.largest_rise(2) is None
    assert "rose" not in Drawing(falling).sentence


def test_the_spread_among_siblings_is_their_standard_deviation():
    (spread,) = Forest(tree()).spreads
    assert (spread.step, spread.parents) == (0, 1)
    assert spread.deviation == pytest.approx(np.std([0.9, 0.3, 0.3], ddof=1))
    assert Forest(tree([node(None, 0), node(0, 3, 0.5), node(None, 0), node(2, 3, 0.1)])).spreads == []


def test_the_page_tells_what_each_node_is_worth(tmp_path):
    page = page_of(tmp_path, tree())
    told = facts(page)
    assert told[0] == {
        "step": "0 of 3, σ 1.000",
        "starts from": "seed 5",
        "reward, predicted": "0.00",
        "value": "0.600, where ODE leads",
        "mean beyond": "0.500",
    }
    assert told[1].items() >= {
        ("came by", "flow_sde 0.7, noise 0.30"),
        ("advantage", "+1.00"),
        ("comparison set", "unit 0 and 2 others"),
        ("weight in the loss", "1.00"),
        ("log-probability", "−1.250"),
    }
    assert told[3]["weight in the loss"] == "not trained on"
    assert told[5] == {
        "step": "3 of 3, σ 0.000",
        "reward": "0.900",
        "came by": "ode, no noise",
        "credit": "none of its own",
    }
    assert "The best of 3 samples has reward 0.900, their mean is 0.500." in page
    assert "rose most in step 2: 0.100 → 0.700 (+0.600)" in page
    assert "the noise of step 1 decides most: the standard deviation of their rewards is 0.35." in page


def test_edges_have_the_sign_and_the_size_of_their_advantages(tmp_path):
    drawn = re.findall(r'"edge (\w+)" data-n="(\d)" stroke-width="([\d.]+)"', page_of(tmp_path, tree()))
    found = {n: (kind, float(width)) for kind, n, width in drawn}
    assert found["1"] == ("plus", 5.0)
    assert found["2"] == ("minus", 3.1)
    assert found["3"] == ("pruned", 1.2)
    assert {found[n] for n in "45678"} == {("plain", 1.2)}


def test_a_page_has_each_picture_once_and_the_trees_of_each_iteration(tmp_path):
    page = page_of(tmp_path, tree(), tree(step=5, group=0), tree(step=5, group=1))
    assert len(re.findall("data:image/webp;base64", page)) == 3 * 4
    assert 'data-steps="1,5"' in page
    assert re.findall(r'<section data-step="(\d)"( hidden)?', page) == [("1", ""), ("5", " hidden")]


def test_the_page_is_self_contained_and_escapes_what_it_is_told(tmp_path):
    wild = "</script><script>alert(1)</script>" + 4000 * "x"
    named = tree([replace(each, kernel=wild) for each in NODES], prompt=wild, names=(wild,))
    page = page_of(tmp_path, named)
    assert "alert(1)</script>" not in page
    assert not re.findall(r'(?:src|href)="(?!data:|#)', page)
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_canvases_of_texts_are_told_as_texts(tmp_path):
    answer = node(0, 3, 1.0, picture=shade(9), text="a ▢<i>", advantage=0.5, unit=0, compared=(0,))
    page = page_of(tmp_path, tree([node(None, 0, picture=shade(9), text="▢▢"), answer]))
    assert "a cell for each token" in page
    assert "model predicts" not in page
    assert "<i>" not in page.partition("<main>")[2].partition("</main>")[0]
    assert facts(page)[0]["step"] == "0 of 3, 100% masked"


def test_a_run_without_trees_says_how_to_keep_them(tmp_path, printed, refused):
    (tmp_path / "r").mkdir()
    said = refused("gallery", tmp_path / "r", "--trees")
    assert "it kept no trees; train again with run.trees='{every: 8}'" in said
    run_with(tmp_path / "s", tree())
    said = "--trees: the page is of one run, and 2 are named; name one"
    assert refused("gallery", tmp_path / "s", tmp_path / "r", "--trees") == said
    assert printed("gallery", tmp_path / "s", "--trees") == f"{tmp_path / 's/trees.html'}\n"


def test_the_gallery_leads_to_the_trees(tmp_path):
    folder = run_with(tmp_path / "a run", tree())
    (folder / "metrics.jsonl").write_text("")
    assert "How its trees grew" not in write_gallery([folder], folder / "gallery.html").read_text()
    write_trees(folder, folder / "trees.html")
    assert '<a href="trees.html">How its trees grew</a>' in write_gallery([folder], folder / "gallery.html").read_text()
    assert '<a href="a%20run/trees.html">' in write_gallery([folder], tmp_path / "g.html").read_text()


def test_a_page_of_many_iterations_has_as_many_as_it_can_hold():
    assert shown_steps({}) == set()
    assert shown_steps({1: 100 << 20}) == {1}
    assert shown_steps(dict.fromkeys(range(1, 13), 1 << 20)) == set(range(1, 13))
    many = shown_steps(dict.fromkeys(range(1, 101), 1 << 20))
    assert len(many) == 12
    assert {1, 100} < many
    assert max(np.diff(sorted(many))) <= 10
    assert shown_steps(dict.fromkeys(range(1, 101), 9 << 20)) == {1, 100}


def test_damaged_trees_are_told_before_a_run_goes_on(tmp_path):
    folder = run_with(tmp_path / "r", tree())
    (folder / "metrics.jsonl").write_text("")
    check_readable(folder)
    (folder / "trees/step-000001/0000.json").write_text("{")
    with pytest.raises(InputError, match=r"0000\.json: it is not a tree"):
        check_readable(folder)


def test_eight_trees_of_sixteen_chains_of_twenty_steps_stay_below_ten_megabytes(tmp_path):
    sigmas = tuple(1 - i / 20 for i in range(21))
    places = [(row, step) for row in range(16) for step in range(21)]
    edge = {"kernel": "flow_sde 0.7", "noise": 0.3, "trained": True, "updated": True, "log_prob": -1.23456789}
    edge |= {
        "compared": FIRST,
        "advantage": 0.123456789,
        "weight": 1.0,
        "rewards": (0.123456789,),
        "total": 0.123456789,
    }
    generator = np.random.default_rng(0)
    blocks = generator.integers(0, 256, (len(places), 10, 10, 4)).astype(np.uint8)
    pictures = [block.repeat(8, 0).repeat(8, 1) for block in blocks]
    for picture in pictures:
        picture[..., 3] = 255
    nodes = [
        KeptNode(
            parent=place - 1 if step else None,
            step=step,
            sigma=sigmas[step],
            estimated=step < 20,
            unit=row,
            picture=encode_picture(pictures[place][None]),
            **edge,
        )
        for place, (row, step) in enumerate(places)
    ]
    for group in range(8):
        TreeFolder(tmp_path / "r").write([tree(nodes, sigmas=sigmas, group=group)])
    assert write_trees(tmp_path / "r", tmp_path / "t.html").stat().st_size < 10e6
