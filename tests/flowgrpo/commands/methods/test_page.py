"""Tables of docs beside the code, and stored costs beside those that are planned."""

import re
from pathlib import Path
from typing import get_args

import pytest

from flowgrpo import config
from flowgrpo.commands.methods.catalogue import FLOW, TEXTS, catalogue
from flowgrpo.commands.methods.page import tables
from flowgrpo.flow.planning.plan import plan
from flowgrpo.mdlm.methods.objectives.token_shapes import OPTIONS, Shape
from flowgrpo.mdlm.planning.plan import predict_cost
from flowgrpo.schema.explain import explain

DOCS = Path(__file__).parents[4] / "docs"
SHAPES = config.validate({"model": {"path": "shapes"}})


@pytest.mark.parametrize(
    ("wing", "pages"),
    [(FLOW, ["reference/presets.md", "research/papers.md"]), (TEXTS, ["reference/texts.md", "research/texts.md"])],
    ids=["flow", "texts"],
)
def test_the_tables_of_the_pages_are_those_of_the_code(wing, pages):
    written = "".join((DOCS / page).read_text() for page in pages)
    for table in tables(wing):
        assert f"\n{table}\n" in written, f"{pages}: put flowgrpo.commands.methods.page.tables there:\n{table}"


def test_presets_of_equal_loops_share_a_row_and_ours_have_none():
    loops = tables(FLOW)[2]
    assert "| `rwr`, `sft_best`, `dpo` | 4.5, rollouts | 40 | 1 x 24 | 1 | 3e-4 | 0.9, every 8, warm-up 10 |\n" in loops
    assert "| `dense_grpo` | - | 10 | - x 24 | - | 3e-4 | - |\n" in loops
    assert "awm_fast" not in loops
    assert "diffu_grpo_fast" not in tables(TEXTS)[2]


SIZES = {"mc_grpo": (9, 10), "branch_grpo": (16, 20), "branch_grpo_mix": (16, 20)}  # samples, steps


def test_the_stored_costs_are_those_of_a_plan():
    for preset, stored in FLOW.costs.COSTS.items():
        size, steps = SIZES.get(preset, (24, 10))
        planned = plan(
            config.validate(
                {
                    "model": {"path": "shapes", "call": {"num_inference_steps": steps}},
                    "algorithm": {"preset": preset},
                    "train": {"groups": 1, "group_size": size, "updates": 1},
                }
            )
        )
        evaluations = planned["model_evaluations"]
        counted = (evaluations["rollout"], evaluations["update"], planned["decoded"])
        assert (*counted, planned["geometry"]["trained_edges"]) == stored, preset


def test_the_stored_costs_of_texts_are_those_of_a_plan():
    for preset, stored in TEXTS.costs.COSTS.items():
        cost = predict_cost(
            config.validate(
                {
                    "kind": "mdlm",
                    "model": {"path": "digits", "length": 32},
                    "algorithm": {"preset": preset},
                    "train": {"groups": 1, "group_size": 8, "updates": 1},
                }
            )
        )
        assert (cost.rollout, cost.update) == stored, preset


@pytest.mark.parametrize("wing", [FLOW, TEXTS], ids=["flow", "texts"])
def test_every_preset_has_a_cost(wing):
    assert wing.costs.COSTS.keys() == wing.presets.keys()


def test_the_stored_gains_are_those_of_the_measurements():
    number = r"(-?[\d.]+) ± ([\d.]+)"
    rows = re.findall(
        rf"^\| `(\w+)` \| [\d.]+ \| {number} \|", (DOCS / "research/comparison.md").read_text(), re.MULTILINE
    )
    thousandths = {preset: (float(gain), float(error)) for preset, gain, error in rows}
    assert thousandths == {preset: tuple(round(1000 * x, 1) for x in gain) for preset, gain in FLOW.costs.GAINS.items()}
    rows = re.findall(
        rf"^\| `(\w+)` \| 3 \|.*\| {number} \| \d+ \|$", (DOCS / "research/texts.md").read_text(), re.MULTILINE
    )
    assert {preset: (float(gain), float(error)) for preset, gain, error in rows} == TEXTS.costs.GAINS


PAPERS = re.findall(r"^\| ([^|]*) \| ([^|]*) \| ([^|]*) \|$", (DOCS / "research/papers.md").read_text(), re.MULTILINE)
PAPERS = [row for row in PAPERS if row[0] != "paper"]


def test_the_page_of_papers_names_every_preset_and_every_word_with_a_paper():
    entries = catalogue()
    named = {name for _, _, here in PAPERS for name in re.findall(r"`(\w+)`", here)}
    assert named >= {entry.name for entry in entries if entry.axis == "preset"}
    for entry in entries:
        for paper in entry.source:
            carried = [here for _, number, here in PAPERS if paper in number]
            assert any(f"`{entry.name}`" in here for here in carried), (
                f"docs/research/papers.md: {entry.name} of {paper}"
            )


def test_every_name_on_the_page_of_papers_exists():
    entries = catalogue()
    known = {entry.name for entry in entries} | {option for entry in entries for option in entry.options}
    known |= set(get_args(Shape.model_fields["rule"].annotation))
    texts = config.validate({"kind": "mdlm", "model": {"path": "digits"}})
    for _, _, here in PAPERS:
        for name in re.findall(r"`([^`]+)`", here):
            if "." in name:
                of_texts = name.startswith(("model.", "algorithm.", "train.semantic"))
                explain(texts if of_texts else SHAPES, name)  # raises if unknown
            else:
                assert name in known, f"docs/research/papers.md: there is no {name}"


def test_the_table_of_token_weights_has_every_rule_with_its_defaults():
    page = (DOCS / "reference/texts.md").read_text()
    row = re.compile(r"^\| `(\w+)` \| (.*) \| .*arXiv \d{4}\.\d{5}.*\|$", re.MULTILINE)
    rows = dict(row.findall(page.partition("## Weights of tokens")[2]))
    assert set(get_args(Shape.model_fields["rule"].annotation)) <= set(rows)
    for option, rule in OPTIONS.items():
        default = Shape.model_fields[option].default
        assert f"`{option}` ({'null' if default is None else f'{default:g}'})" in rows[rule], option


def test_a_paper_is_carried_or_it_is_said_why_not():
    for paper, _, here in PAPERS:
        assert here.startswith(("`", "[", "not here: ")), paper
    numbers = [number for _, number, _ in PAPERS if number != "-"]
    assert len(numbers) == len(set(numbers))
    assert all(re.fullmatch(r"\d{4}\.\d{5}", number) for number in numbers)
