"""What the page of one sample tells, of an explanation that was written by hand."""

import pytest
from planted_explanation import SEVERAL, explained, step


def test_its_numbers_are_those_that_were_found():
    told = explained(*SEVERAL).document
    assert (told["run"], told["checkpoint"], told["prompt"], told["seed"]) == ("mine", 20, "a cat", 7)
    assert (told["reward"], told["reward_without_noise"], told["total_variance"]) == (0.5, 0.4, 0.04)
    assert told["shares"] == [
        {"step": 0, "share": 0.625, "error": 0.125},
        {"step": 1, "share": -0.0625, "error": 0.125},
        {"step": 2, "share": 0.25, "error": 0.125},
    ]
    assert told["sum"] == {"share": 0.9, "error": 0.05}
    assert [each["advantage"] for each in told["credit"]] == [1.5, -0.25, None]
    assert told["redraws"][1] == {"step": 1, "rewards": [0.6, None, 0.4]}


def test_a_step_s_row_orders_its_redraws_and_counts_the_better_ones():
    first, second, third = explained(*SEVERAL).rows
    assert [tile.look.reward for tile in first.tiles] == [0.2, 0.5, 0.5, 0.9]
    assert [tile.own for tile in first.tiles] == [False, False, True, False]
    assert [tile.look.reward for tile in second.tiles] == [None, 0.4, 0.5, 0.6]
    assert (first.better, second.better, third.better) == (1, 1, 0)
    assert first.share == "62% ± 12"
    assert explained(step(0, [0.4], share=-0.004)).rows[0].share == "0% ± 12"
    assert second.share == "−6% ± 12"
    assert (first.advantage, second.advantage, third.advantage) == ("+1.5", "−0.25", "–")
    assert (first.spread, second.spread) == ("0.35", "0.14")  # sqrt(0.37 / 3) and 0.2 / sqrt(2)
    assert (first.bar, second.bar) == (62.5, 0.0)
    assert first.whisker == (50.0, 75.0)
    assert second.whisker == (0.0, 6.25)


def test_sentences_name_the_step_that_decides_and_the_best_redraw():
    decides, best = explained(*SEVERAL).sentences
    assert decides == "The noise of step 0 has the largest share of the reward's variance from this start: 62% ± 12."
    assert best == "The best redraw (new noise in step 0 only) has reward 0.900 instead of 0.500."
    (_, none) = explained(step(0, [0.1, 0.2], share=1.0)).sentences
    assert none == "No redraw of a single step is better than this sample, of reward 0.500."
    assert explained(step(0, [0.1, 0.2], share=0.2)).sentences[0].startswith("No step stands out: ")
    same = explained(step(0, [0.5, 0.5]), variance=0.0, residual=None)
    assert same.sentences == ["Other noise changes nothing: all samples from this start have the same reward."]
    lost = explained(step(0, [None, None]), variance=0.0, residual=None, lost=9)
    assert lost.sentences == ["9 samples have no reward, so that the steps cannot be told apart."]
    assert same.document["sum"] is None
    assert same.document["shares"] == []


def test_the_page_needs_nothing_beside_itself_and_shows_what_there_is():
    page = explained(*SEVERAL).page()
    assert page.count('class="tile') == 12
    assert page.count('class="tile own"') == 3
    assert "the shares add up to 0.90 ± 0.05" in page
    assert "Noise and advantages are those of method flow_grpo: of the first edge" in page
    assert "http" not in page
    lent = explained(*SEVERAL, lent=True).page()
    assert "Method flow_grpo draws no noise" in lent
    assert explained(step(0, [0.1, 0.2], share=0.2)).sentences[0].startswith("No step stands out: ")
    same = explained(step(0, [0.5, 0.5]), variance=0.0, residual=None).page()
    assert "add up" not in same


@pytest.mark.parametrize("prompt", ["<script>alert(1)</script>", "&amp;" * 900])
def test_a_prompt_stays_text(prompt):
    page = explained(*SEVERAL, prompt=prompt).page()
    assert prompt not in page
    assert "&lt;script" in page or "&amp;amp;" in page
