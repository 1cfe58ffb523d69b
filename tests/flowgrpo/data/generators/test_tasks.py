import ast
import re
from collections import Counter

import pytest

import rewards
from flowgrpo.data.generators import tasks
from samplers import noise

NAMES = tuple(tasks.TASKS)


@pytest.fixture(scope="module")
def sets():
    return {name: make() for name, make in tasks.BUILT_IN.items()}


def column(rows, name):
    return [row[name] for row in rows]


def score(reward, rows, texts):
    names = [name for name in rows[0] if name != "prompt"]
    return rewards.load(reward)(texts, column(rows, "prompt"), {name: column(rows, name) for name in names}).tolist()


@pytest.mark.parametrize("task", NAMES)
def test_the_built_in_sets_are_large_distinct_and_apart(sets, task):
    train, held_out = sets[f"{task}:train"], sets[f"{task}:eval"]
    assert len(set(column(train, "prompt"))) == len(train) == 1024
    assert len(set(column(held_out, "prompt"))) == len(held_out) == 512
    assert not set(column(train, "prompt")) & set(column(held_out, "prompt"))


@pytest.mark.parametrize("name", tasks.BUILT_IN)
def test_every_completion_solves_its_problem_and_keeps_to_the_lengths(sets, name):
    rows = sets[name]
    assert set(score("solved", rows, column(rows, "completion"))) == {1.0}
    assert {*"".join(column(rows, "prompt") + column(rows, "completion"))} <= {*tasks.ALPHABET}
    assert max(map(len, column(rows, "prompt"))) <= tasks.LONGEST_PROMPT
    assert max(map(len, column(rows, "completion"))) <= tasks.LONGEST_COMPLETION


def test_the_alphabet_has_no_character_to_spare(sets):
    rows = sets["tasks:train"]
    assert "".join(sorted({*"".join(column(rows, "prompt") + column(rows, "completion"))})) == tasks.ALPHABET


def test_a_mixed_set_takes_the_tasks_in_turn_and_each_reward_minds_its_own(sets):
    rows = sets["tasks:eval"]
    assert column(rows, "task") == list(NAMES) * 512
    assert {tuple(row) for row in rows} == {("prompt", *tasks.COLUMNS)}
    for task in NAMES:
        scores = score(task, rows, column(rows, "completion"))
        assert [s == s for s in scores] == [row["task"] == task for row in rows]  # NaN elsewhere


def test_a_set_of_two_tasks_has_their_problems_in_turn(sets):
    rows = sets["countdown+sudoku:eval"]
    assert rows[::2] == sets["countdown:eval"]
    assert rows[1::2] == sets["sudoku:eval"]


def test_countdown_is_what_its_prompt_says_and_its_numbers_suffice(sets):
    for row in sets["countdown:eval"]:
        target, *numbers = map(int, re.findall(r"\d+", row["prompt"]))
        assert (numbers, target) == (row["numbers"], row["target"])
        assert 1 <= target <= 100
        assert all(1 <= n <= 20 for n in numbers)
        assert eval(row["completion"]) == target
        assert Counter(map(int, re.findall(r"\d+", row["completion"]))) == Counter(numbers)


def test_countdown_writes_no_parentheses_without_need(sets):
    texts = column(sets["countdown:train"], "completion")
    for text in texts:
        if "(" in text:
            without = text.replace("(", "").replace(")", "")
            assert ast.dump(ast.parse(without)) != ast.dump(ast.parse(text))
    assert 0.1 < sum("(" in text for text in texts) / len(texts) < 0.5
    assert all(sum(sign in text for text in texts) > 50 for sign in "+-*/")


def solutions(puzzle):
    """How many ways a 4 x 4 puzzle can be filled, by plain search."""
    if "0" not in puzzle:
        return 1
    i = puzzle.index("0")
    row, col = divmod(i, 4)
    boxed = [j for j in range(16) if j // 8 == row // 2 and j % 4 // 2 == col // 2]
    seen = {puzzle[j] for j in range(16) if j // 4 == row or j % 4 == col or j in boxed}
    return sum(solutions(puzzle[:i] + digit + puzzle[i + 1 :]) for digit in "1234" if digit not in seen)


def test_there_are_288_grids_and_a_puzzle_has_one_solution(sets):
    assert len({tuple(grid) for grid in tasks.grids().tolist()}) == 288
    assert solutions("0" * 16) == 288
    for row in sets["sudoku:eval"][:60]:
        assert solutions(row["puzzle"]) == solutions(row["solution"]) == 1
        assert row["puzzle"].count("0") == 8
        assert all(asked in ("0", solved) for asked, solved in zip(row["puzzle"], row["solution"], strict=True))
        assert "".join(re.findall(r"[.\d]", row["prompt"])).replace(".", "0") == row["puzzle"]


def test_sudokus_are_split_by_their_solution(sets):
    train, held_out = (set(column(sets[f"sudoku:{split}"], "solution")) for split in tasks.SPLITS)
    assert not train & held_out
    assert len(train | held_out) > 275
    assert 25 <= len(held_out) <= 60


def test_sums_are_split_whatever_their_order(sets):
    def reordered(row):
        terms = re.findall(r"[+-]?[\d*]+", row["prompt"].removeprefix("compute "))
        return tuple(sorted((t[0] == "-", *sorted(t.strip("+-").split("*"))) for t in terms))

    train, held_out = ({reordered(row) for row in sets[f"arithmetic:{split}"]} for split in tasks.SPLITS)
    assert not train & held_out
    for row in sets["arithmetic:eval"]:
        assert eval(row["prompt"].removeprefix("compute ").rstrip(":")) == row["answer"] == int(row["completion"])


@pytest.mark.parametrize("task", NAMES)
def test_problems_are_addressed(task):
    first = tasks.problems(task, "train", 20)
    assert tasks.problems(task, "train", 10) == first[:10]
    assert tasks.problems(task, "train", 20, seed=1) != first
    rows = [tasks.draw(task, "eval", noise.generator(3, i)) for i in range(5)]
    assert rows == [tasks.draw(task, "eval", noise.generator(3, i)) for i in range(5)]
    train = {row["prompt"] for row in tasks.problems(task, "train", 500)}
    assert not train & {row["prompt"] for row in rows}


def test_who_changes_rows_changes_no_other_rows():
    problems = tasks.problems("countdown", "eval", 2)
    whole = repr(problems)
    problems[0]["numbers"].append(7)
    del problems[1]["task"]
    assert repr(tasks.problems("countdown", "eval", 2)) == whole
