"""The pages in a real browser: light and dark, wide and on a phone, by keyboard, with what a prompt may hold."""

import numpy as np
import pytest
import torch
from browsing import LOOKS, WILD, opened
from PIL import Image
from planted import NODES, node, run_with, sampled, shade, tree
from planted_run import written

from flowgrpo.commands.inspect.gallery import write_gallery
from flowgrpo.commands.page_parts.trees import write_trees
from flowgrpo.training.reports.samples import save_sample


def trained(folder):
    """What a run leaves: samples at three steps, their rewards, two of them, and a curve."""
    samples = folder / "samples"
    samples.mkdir(parents=True)
    lines = []
    generator = torch.Generator().manual_seed(0)
    for step in (0, 4, 8):
        for index, prompt in enumerate(("a red circle", WILD)):
            picture = torch.rand((3, 16, 16), generator=generator)
            file = save_sample(picture, samples / f"{step}-{index}").name
            rewards = {"mine": step / 10 - index / 5, "yours": 0.5}
            lines.append({"file": file, "prompt": prompt, "seed": index, "step": step, "rewards": rewards})
    (samples / "manifest.jsonl").write_text(written(lines))
    told = [{"step": step, "phase": "eval", "reward/mean": step / 10} for step in (0, 4, 8)]
    (folder / "metrics.jsonl").write_text(written(told))
    return folder


def answer():
    """A chain of canvases, the last of them with markup."""
    earned = {"advantage": 0.5, "unit": 0, "compared": (0,), "weight": 1.0}
    return [
        node(None, 0, picture=shade(90), text="▢ ×9"),
        node(0, 1, picture=shade(90), text="a▢ ×8"),
        node(1, 3, 1.0, picture=shade(90), text=WILD, **earned),
    ]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    trees = (tree(), tree(group=1, prompt=WILD, names=(WILD,)), tree(step=9, prompt="a later tree"))
    return {
        "gallery": write_gallery([trained(folder / "run")], folder / "gallery.html"),
        "trees": write_trees(run_with(folder / "grown", *trees), folder / "trees.html"),
        "texts": write_trees(run_with(folder / "answered", tree(answer())), folder / "texts.html"),
    }


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
@pytest.mark.parametrize("name", ["gallery", "trees", "texts"])
def test_a_page_is_quiet_legible_and_not_wider_than_its_window(browser, pages, check_look, name, width, scheme):
    with opened(browser, pages[name], width, scheme) as page:
        check_look(page)
        assert page.locator("script[src], link").count() == 0


def test_arrow_keys_walk_a_tree(browser, pages):
    with opened(browser, pages["trees"]) as page:
        article = page.locator("article").first
        told = article.locator("dl")
        article.locator(".spot.now").focus()
        assert "0.900" in told.inner_text()  # the best sample, which is chosen first
        walked = []
        for key in ("ArrowLeft", "ArrowLeft", "ArrowDown", "ArrowRight", "ArrowDown"):
            page.keyboard.press(key)
            walked.append(int(page.evaluate("document.activeElement.dataset.n")))
        assert walked == [4, 1, 2, 6, 7]
        assert "none of its own" in told.inner_text()
        page.keyboard.press("ArrowRight")  # there is nothing beyond a sample
        assert int(page.evaluate("document.activeElement.dataset.n")) == 7
        on = article.locator(".spot.on").evaluate_all("spots => spots.map(spot => +spot.dataset.n)")
        assert sorted(on) == [0, 3, 7]
        assert page.told == []


def test_one_state_of_each_tree_is_reached_by_tab(browser, pages):
    with opened(browser, pages["trees"]) as page:
        reached = []
        for _ in range(5):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("document.activeElement.getAttribute('role')"))
        assert reached.count("treeitem") == 2, reached  # of two trees in the first iteration


def test_a_look_tells_a_state_and_the_step_that_earned_most(browser, pages):
    with opened(browser, pages["trees"]) as page:
        article = page.locator("article").first
        article.locator(".spot[data-n='1'] .frame").hover()
        facts = article.locator("dl").inner_text()
        for words in ("flow_sde 0.7, noise 0.30", "+1.00", "unit 0 and 2 others", "−1.250"):
            assert words in facts
        article.locator(".spot[data-n='5'] .frame").click()
        assert article.locator("tr.most").inner_text().split() == ["step", "2", "0.700", "+0.600"]
        assert article.locator(".spot[data-n='4'] .rise").count() == 1


@pytest.mark.parametrize(("name", "trained"), [("trees", 1), ("texts", 2)])
def test_the_trained_edge_is_in_view_where_the_tree_is_wider(browser, pages, name, trained):
    """A page opens at the last trained state on the way to the best sample: the first step of one, the last of the other."""
    with opened(browser, pages[name], width=300) as page:
        spot = page.locator(f".spot[data-n='{trained}']").first
        view, state = (each.bounding_box() for each in (page.locator(".view").first, spot))
        assert view["x"] < state["x"] < state["x"] + state["width"] < view["x"] + view["width"]


def test_the_slider_walks_the_iterations(browser, pages):
    with opened(browser, pages["trees"]) as page:
        assert page.locator("h2:visible").first.inner_text() == "a cat"
        page.locator("#when").focus()
        page.keyboard.press("ArrowRight")
        assert page.locator("nav output").inner_text() == "9"
        assert page.locator("h2:visible").all_inner_texts() == ["a later tree"]
        page.keyboard.press("ArrowLeft")
        assert page.locator("article:visible").count() == 2
        assert page.told == []


def test_the_gallery_s_slider_order_and_enlarged_pictures_work_by_keyboard(browser, pages):
    with opened(browser, pages["gallery"]) as page:
        page.locator(".scrub").focus()
        page.keyboard.press("ArrowLeft")
        assert page.locator("nav output").inner_text() == "4"
        page.locator(".order").select_option("loss")
        page.locator(".picture").first.focus()
        page.keyboard.press("Enter")
        assert page.locator("dialog[open] img").count() == 2
        page.keyboard.press("Escape")
        assert page.locator("dialog[open]").count() == 0
        assert page.told == []


@pytest.mark.parametrize("width", [390, 1300])
def test_names_of_rewards_are_whole_above_numbers_that_fit_their_card(browser, tmp_path, width):
    before = {
        "prompt": "cat",
        "seed": 0,
        "step": 0,
        "shade": 9,
        "rewards": {"greenness": -0.00259, "jpeg_size": -0.123},
    }
    after = {**before, "step": 2, "rewards": {"greenness": -0.00233, "jpeg_size": -0.0123}}
    folder = sampled(tmp_path / "samples", [{**line, "prompt": name} for name in "abc" for line in (before, after)])
    with opened(browser, write_gallery([folder], tmp_path / "page.html"), width) as page:
        names = page.locator(".rewards th")
        assert names.all_inner_texts() == 3 * ["greenness", "jpeg_size"]
        assert max(names.evaluate_all("all => all.map(each => each.clientHeight)")) < 25  # one line
        places = """all => all.map(row => {
            const [name, ...numbers] = [...row.cells].map(cell => cell.getBoundingClientRect());
            const card = row.closest("figure").getBoundingClientRect();
            return numbers.map(number => [number.top >= name.bottom, number.right < card.right]);
        })"""
        assert page.locator(".rewards tr").evaluate_all(places) == 6 * [3 * [[True, True]]]


def test_a_text_is_told_as_it_is(browser, pages):
    with opened(browser, pages["texts"]) as page:
        assert page.locator("aside pre").inner_text().startswith("<img src=x onerror=alert(1)>")
        page.locator(".spot.now").focus()
        page.keyboard.press("ArrowLeft")
        assert page.locator("aside pre").inner_text() == "a▢ ×8"
        assert page.told == []


def test_pictures_of_a_tree_are_drawn(browser, tmp_path):
    """The tile of each state, cut out of the sheet that its tree has once."""
    nodes = [each for each in NODES if each.picture is not None or each.parent is None][:3]
    folder = run_with(tmp_path / "r", tree(nodes))
    with opened(browser, write_trees(folder, tmp_path / "t.html")) as page:
        shades = []
        for spot in page.locator(".spot image").all():
            assert spot.screenshot(path=tmp_path / "spot.png")
            grey = np.asarray(Image.open(tmp_path / "spot.png").convert("L")).astype(int)
            shades.append(int(grey[20:30, 20:30].mean()))
        assert len(set(shades)) == len(shades) == 3
