"""`flowgrpo sample --search` on the tiny model, and what is refused before any model."""

import json
from pathlib import Path

import pytest
from runs import CALL

ARGUMENTS = [f"{key}={value}" for key, value in CALL.items()]  # of three steps
PROMPTS = ["--prompt", "a red circle", "--prompt", "two blue square", "--seed", "5"]
REWARD = ["--reward", "./mine.py:redness"]


@pytest.fixture
def sampled(workplace, tiny_model, printed):
    """Samples into a folder; returns what the command prints, the manifest's lines and the bytes of the pictures."""

    def command(out, *options):
        said = printed("sample", tiny_model, *options, *ARGUMENTS, "--out", out, "--format", "json")
        lines = [json.loads(line) for line in Path(out, "manifest.jsonl").read_text().splitlines()]
        assert said["samples"] == lines
        return said, lines, [Path(out, line["file"]).read_bytes() for line in lines]

    return command


def test_the_seed_of_the_best_gives_its_picture(sampled):
    _, (line, _), (picture, _) = sampled("best", *PROMPTS, "--search", "best-of-n", "--width", "4", *REWARD)
    _, (again,), (plain,) = sampled("plain", "--prompt", "a red circle", "--seed", line["seed"])
    assert plain == picture
    assert line.pop("rewards").keys() == {"redness"}
    rewards = [{"use": "./mine.py:redness"}]
    assert line.pop("search") == {"name": "best-of-n", "width": 4, "rewards": rewards, "seed": 5}
    assert line | {"rewards": {}} == again


@pytest.mark.parametrize(
    ("search", "said"),
    [
        (["beam", "--compare-at", "0.5"], {"name": "beam", "keep": 1, "level": 0.7, "compare_at": [0.5]}),
        (
            ["smc", "--temperature", "0.1", "--level", "0.3"],
            {"name": "smc", "level": 0.3, "compare_at": [0.25, 0.5, 0.75], "temperature": 0.1},
        ),
    ],
    ids=["beam", "smc"],
)
def test_the_manifest_tells_the_search_and_the_seeds_of_the_prompts(sampled, search, said):
    weighed = ["--reward", "{use: ./mine.py:redness, weight: 2}"]
    _, lines, _ = sampled("o", *PROMPTS, "--search", *search, "--width", "2", *weighed)
    rewards = [{"use": "./mine.py:redness", "weight": 2.0}]
    assert [line["search"] for line in lines] == [{**said, "width": 2, "rewards": rewards, "seed": i} for i in (5, 6)]


@pytest.mark.parametrize(
    "search", [["best-of-n"], ["beam"], ["smc", "--temperature", "0.01"]], ids=lambda each: each[0]
)
def test_a_search_gives_the_same_pictures_in_any_batch(sampled, search):
    options = [*PROMPTS, "--search", *search, "--width", "3", *REWARD]
    said, lines, pictures = sampled("whole", *options)
    single, others, found = sampled("single", *options, "--batch-size", "1")
    assert found == pictures
    assert [other["seed"] for other in others] == [line["seed"] for line in lines]
    rewards = [line["rewards"]["redness"] for line in lines]
    assert [other["rewards"]["redness"] for other in others] == pytest.approx(rewards, abs=1e-5)
    assert (single["cost"], single["plain_cost"]) == (said["cost"], said["plain_cost"])
    decodes = 1 if search == ["best-of-n"] else 2  # of three steps, candidates are compared at one
    counted = {"decoded": 2 * 3 * decodes, "reward_calls": 2 * 3 * decodes}
    assert said["cost"] == {"model_evaluations": 2 * 3 * 3, **counted}
    assert said["plain_cost"]["model_evaluations"] == 2 * 3
    assert {line["sampler"] for line in lines} == {"ode" if search == ["best-of-n"] else "sde"}


def test_the_cost_is_printed_beside_that_of_plain_samples(workplace, tiny_model, printed):
    said = printed(
        "sample", tiny_model, *PROMPTS, *ARGUMENTS, *REWARD, "--out", "o", "--search", "beam", "--width", "2"
    )
    assert said.splitlines() == [
        "2 samples in o",
        "12 model evaluations, 8 decoded, 8 reward calls; plain samples: 6 model evaluations, 2 decoded, 0 reward calls",
    ]


SMC = ["--search", "smc", *REWARD]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--search", "best-of-n"], "--reward: --search compares candidates by rewards, name a reward (once or more)"),
        (["--search", "best-of-n", *REWARD, "--width", "0"], "Invalid value for '--width': "),
        (["--search", "beam", *REWARD, "--width", "1"], "--width: one candidate is compared with no other; take 2 or"),
        (
            ["--search", "beam", "--reward", "{use: redness, weight: 0}"],
            "--reward: the weight 0 of redness chooses nothing",
        ),
        ([*SMC, "--temperature", "1e-310"], "--temperature: 1e-310 is not a number from 1e-09 on"),
        ([*SMC, "--temperature", "1", "--level", "1e30"], "--level: 1e+30 is not above 0 and at most 10, take 0.7"),
        (["--search", "best", *REWARD], "'best' is not one of 'best-of-n', 'beam', 'smc'"),
        (["--search", "beam", "--reward", "./mine.py:rednes"], "redness"),
        (["--search", "beam", *REWARD, *REWARD], "two rewards are named 'redness'"),
        (["--search", "beam", "--reward", "{use: redness, wight: 2}"], "weight"),
        (
            ["--search", "beam", "--reward", "{use: ./mine.py:redness, only: {kind: z}}"],
            "--reward: no reward applies to any of the prompts; change its map's `only`",
        ),
        (["--search", "best-of-n", *REWARD, "--level", "0.5"], "--level: best-of-n takes no stochastic steps"),
        (
            ["--search", "best-of-n", *REWARD, "--compare-at", "0.5"],
            "--compare-at: best-of-n takes no stochastic steps",
        ),
        (["--search", "beam", *REWARD, "--temperature", "1"], "--temperature: beam has none, it is for --search smc"),
        (["--search", "beam", *REWARD, "--keep", "9"], "--keep: 9 is more than the --width 8"),
        (["--search", "beam", *REWARD, "--level", "0"], "--level: 0 is not above 0 and at most 10"),
        (["--search", "beam", *REWARD, "--compare-at", "0.5,1"], "--compare-at: '0.5,1' are no fractions of the steps"),
        (
            ["--search", "beam", *REWARD, "num_inference_steps=2"],
            "num_inference_steps: beam compares candidates between",
        ),
        ([*SMC, "--keep", "1", "--temperature", "1"], "--keep: smc has none, it is for --search beam"),
        (SMC, "--temperature: smc samples by exp(reward / temperature), give one"),
        ([*SMC, "--temperature", "nan"], "--temperature: nan is not a number from"),
        (
            [*SMC, "--temperature", "1", "--adapter", "a", "--adapter-steps", "0:0.5"],
            "--adapter-steps: smc takes steps one",
        ),
        (["--width", "4"], "--width: it is for --search, say that too"),
        (REWARD, "--reward: it is for --groups DIR or --search, say that too"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_search_that_cannot_be_is_one_sentence_before_the_model(
    workplace, tiny_model, unloaded, refused, options, sentence
):
    assert sentence in refused("sample", tiny_model, "--prompt", "a red circle", *options, "--out", "o")
    assert not Path("o").exists()


def test_smc_refuses_rewards_that_compare_samples(workplace, tiny_model, unloaded, refused):
    Path("ranks.py").write_text(
        "def rank(images, prompts):\n    return images[:, 0].mean((1, 2)).argsort()\n\n\nrank.group_wise = True\n"
    )
    asked = ["--prompt", "a red circle", "--search", "smc", "--temperature", "1", "--reward", "./ranks.py:rank"]
    said = refused("sample", tiny_model, *asked, "--out", "o")
    assert said.startswith(
        "--reward: rank compares the candidates of a prompt, and smc weighs each by a reward of its own"
    )


def test_neither_texts_nor_groups_are_searched(workplace, tiny_model, unloaded, refused):
    asked = ["--prompt", "a red circle", "--search", "best-of-n", *REWARD]
    said = refused("sample", "digits", *asked, "--out", "o")
    assert said == "--search: samples of digits are texts, which are not searched; take a flow model"
    said = refused("sample", tiny_model, *asked, "--groups", "g")
    assert said == "--search: groups are not searched; give --out DIR in place of --groups"
