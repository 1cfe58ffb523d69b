"""`flowgrpo methods`: what it says of words and presets, beside the code."""

import re
from pathlib import Path

import pytest

from flowgrpo.flow.methods import CHOICES
from flowgrpo.flow.methods.presets import PRESETS
from flowgrpo.flow.methods.published import NOT_SAID, PUBLISHED
from flowgrpo.mdlm.methods import CHOICES as TEXT_CHOICES
from flowgrpo.mdlm.methods.presets import PRESETS as TEXT_PRESETS

ROOT = Path(__file__).parents[4]
KEYS = {"name", "kind", "axis", "source", "where", "cost", "measured"}


def test_every_word_and_preset_is_listed_once(printed):
    entries = printed("methods", "--format", "json")
    listed = [(entry["kind"], entry["axis"], entry["name"]) for entry in entries]
    for kind, choices, presets in (("flow", CHOICES, PRESETS), ("mdlm", TEXT_CHOICES, TEXT_PRESETS)):
        expected = {(kind, axis, word) for axis, words in choices.items() for word in words}
        expected |= {(kind, "preset", name) for name in presets}
        found = [entry for entry in listed if entry[0] == kind]
        assert len(found) == len(expected)
        assert set(found) == expected
    assert all(entry.keys() >= KEYS for entry in entries)
    assert all(entry["summary"].endswith((".", ".)")) for entry in entries), "a docstring or a comment is missing"


def test_a_place_is_where_the_word_or_the_preset_is_written(printed):
    for entry in printed("methods", "--format", "json"):
        file, _, line = entry["where"].partition(":")
        written = (ROOT / file).read_text().splitlines()[int(line) - 1]
        if entry["axis"] in ("preset", "decoder"):
            assert written.startswith(f'    "{entry["name"]}": ')
        else:
            assert written.startswith(("class ", "def "))


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("cps", "samplers/kernels.py"),  # not the options' file
        ("twigs", "samplers/plans.py"),
        ("discounted_value", "flowgrpo/flow/methods/credit/rules.py"),
        ("step_mean", "flowgrpo/mdlm/methods/objectives/aggregation.py"),
    ],
)
def test_the_place_is_that_of_the_formula(printed, name, where):
    (entry,) = printed("methods", name, "--format", "json")
    assert entry["where"].startswith(f"{where}:")


def test_a_preset_is_described(printed):
    told = printed("methods", "crd")
    assert "crd         a preset (flow models)\nsource      arXiv 2603.14128\n" in told
    assert "cost        rollout 240, update 864, decoded 24, trained edges 216, of one iteration\n" in told
    assert "published   num_inference_steps 10, groups 48, group_size 24, updates 2, learning_rate 0.0003" in told
    assert (
        "measured    0.023 ± 0.007 reward gained on `shapes` in 1,000 model evaluations, by updates at fixed weights\n"
        in told
    )
    assert "objective   {name: centred, beta: 1.0, adaptive_kl: 0.001, kl: {form: velocity, beta: 0.1}}\n" in told
    assert "            6. 1e-4 is added to the std; the port divides by max(std, 1e-6).\n" in told
    assert "not said: groups, group_size, updates, learning_rate\n" in printed("methods", "ram")


def test_a_word_of_both_wings_is_described_twice(printed):
    told = printed("methods", "trajectory")
    assert "likelihood: of what, the steps or the final sample? (flow models)" in told
    assert (
        "likelihood: which masked views estimate an answer's log-probability? (masked-diffusion language models)"
        in told
    )
    assert (
        "shrink (1): Number of consecutive decoder steps that are merged into one (TraceRL); branch: all between two"
        in told
    )


def test_an_option_without_a_default_is_required(printed):
    assert "function (required): " in printed("methods", "custom")
    (entry,) = printed("methods", "custom", "--format", "json")
    assert "default" not in entry["options"]["function"]
    assert entry["options"]["trajectories"]["default"] == 1


def test_no_such_word(refused):
    assert refused("methods", "tempflo") == "there is no preset, word or paper 'tempflo', did you mean 'tempflow'?"
    assert refused("methods", "xyz") == "there is no preset, word or paper 'xyz', flowgrpo methods lists them"


@pytest.mark.parametrize(
    ("asked", "found"), [("BranchGRPO-Mix", None), ("Flow-GRPO", "flow_grpo"), ("2608.23664", "rvm")]
)
def test_names_are_found_as_papers_write_them(printed, refused, asked, found):
    if found is None:
        assert "did you mean 'branch_grpo_mix'?" in refused("methods", asked)
    else:
        assert printed("methods", asked).splitlines()[0].split() == [found, "a", "preset", "(flow", "models)"]


@pytest.mark.parametrize(
    ("asked", "word", "option"),
    [
        ("HAPO", "token_mean", "shape.rule"),
        ("2505.24718", "token_mean", "shape.rule"),
        ("clamp", "sequence_ratio", "clamp"),
        ("target", "token_ratio", "balance.target"),
    ],
)
def test_a_rule_that_is_an_option_is_found_by_its_name_or_paper(printed, asked, word, option):
    entries = printed("methods", asked, "--format", "json")
    assert [entry["options"][option]["meaning"] for entry in entries if entry["name"] == word]
    assert len({(entry["kind"], entry["axis"]) for entry in entries}) == len(entries)


def test_a_long_name_stands_apart_from_what_it_is(printed):
    assert printed("methods", "leave_one_out").startswith("leave_one_out  baseline: ")


def test_the_list_has_both_wings(printed):
    told = printed("methods")
    for name in ("flow_grpo", "cps", "diffu_grpo", "linear_bound"):
        assert f"  {name} " in told


def test_departures_are_numbered_in_their_order(printed):
    for entry in printed("methods", "--format", "json"):
        numbers = [int(departure.partition(".")[0]) for departure in entry["departures"]]
        assert numbers == sorted(set(numbers))
        assert not numbers or numbers[0] == 1, entry["name"]


def test_a_preset_has_a_source_or_is_ours(printed):
    """A paper, the code of a project, or ours, which has no published loop."""
    for entry in printed("methods", "--format", "json"):
        if entry["axis"] == "preset":
            ours = entry["summary"].startswith("Ours")
            assert entry["source"] or ours or "code" in entry["summary"], entry["name"]
            assert not (ours and entry["published"])
    assert all(name in NOT_SAID or loop or "Ours" in printed("methods", name) for name, loop in PUBLISHED.items())


def test_a_departure_is_told_whole(printed):
    """Without pointing at the departures of another preset."""
    told = [departure for entry in printed("methods", "--format", "json") for departure in entry["departures"]]
    assert len(told) > 50
    assert not [each for each in told if re.search(r"as \d\. |\d\. to \d\. ", each)]
