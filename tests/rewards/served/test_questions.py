import math

import pytest
import torch
from fakes import endpoint, words_of

import rewards
from rewards import RewardError
from rewards.served.questions import NUMBERS, possible_answers

IMAGES = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
CAR = [
    {"question": "Is there a car?"},
    {"question": "Is the car red?", "needs": [0]},
    {"question": "Is it night?", "answer": "no"},
]
COUNT = [{"question": "How many pigs?", "answer": "four"}, {"question": "Are there pigs?"}]


def questions(url, **options):
    return rewards.load("questions", options={"endpoint": f"{url}/v1", **options})


def saying(answers, requests=None):
    """Answer by the first key that is in the question."""

    def answer(request):
        if requests is not None:
            requests.append(request)
        return next(said for words, said in answers.items() if words in words_of(request))

    return endpoint(answer)


def test_a_question_counts_nothing_where_one_that_it_needs_is_answered_wrongly():
    answers = {"a car": [("no", 0.6), ("yes", 0.4)], "red": [("Yes", 0.9), ("no", 0.1)], "night": [("No", 1.0)]}
    with saying(answers) as url:
        reward = questions(url)
        values = reward(IMAGES, ["a red car", "an owl"], {"questions": [CAR, None]}).tolist()
    assert values[0] == pytest.approx(1 / 3)  # only the last: red is zeroed with the car
    assert math.isnan(values[1])
    assert reward.function.graded == [[0.0, 1.0, 1.0], None]


def test_probabilities_of_the_right_answers_are_averaged():
    top = {"How many": [("4", 0.5), (" four", 0.2), ("three", 0.3)], "Are there": [("yes", 0.9), ("no", 0.1)]}
    requests = []
    with saying(top, requests) as url:
        reward = questions(url, soft=True, mean="geometric", closing="Answer in one word.", concurrency=1)
        value = reward(IMAGES[:1], ["four pigs"], {"questions": [COUNT]}).item()
        assert questions(url, soft=True)(IMAGES[:1], ["four pigs"], {"questions": [COUNT]}).item() == pytest.approx(0.8)
    assert value == pytest.approx(math.sqrt(0.7 * 0.9))
    assert words_of(requests[0]) == "How many pigs?\nAnswer in one word."


def test_each_question_is_confined_to_its_own_answers():
    requests = []
    with saying({"How many": '{"answer": "four"}', "Are there": '{"answer": "no"}'}, requests) as url:
        reward = questions(url, method="guided", concurrency=1)
        assert reward(IMAGES[:1], ["four pigs"], {"questions": [COUNT]}).item() == 0.5
    schemas = [request["response_format"]["json_schema"]["schema"] for request in requests]
    assert [schema["properties"]["answer"]["enum"] for schema in schemas] == [
        [*NUMBERS, *"123456789"],
        ["yes", "no"],
    ]


def test_ten_is_told_by_its_first_digit():
    assert possible_answers("ten")["1"] == 1.0
    assert [answer for answer, value in possible_answers("One").items() if value] == ["one", "1"]


def test_a_template_has_the_keys_of_a_question_and_the_prompt():
    requests = []
    with saying({"": [("yes", 1.0)]}, requests) as url:
        reward = questions(url, template="{prompt}: {category}, {question}", closing="")
        reward(IMAGES[:1], ["a car"], {"questions": [[{"question": "red", "category": "colour"}]]})
    assert words_of(requests[0]) == "a car: colour, red"


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({}, "needs prompts with the column questions"),
        (
            {"questions": [["Is it red?"]]},
            "questions of the prompt 'a car': 'Is it red.' is no map with the key question",
        ),
        ({"questions": [[{"question": "Is it red?", "needs": [1]}]]}, r"needs is \[1\], not a list of places, 0 to 0"),
        ({"questions": [[{"question": "Is it red?", "needs": 0}, *CAR]]}, "needs is 0, not a list"),
        ({"questions": [[{"question": "Is it red?", "answer": "maybe"}]]}, "answer: 'maybe' is neither yes nor no"),
    ],
)
def test_what_is_no_question_is_named(columns, said):
    with saying({"": "yes"}) as url, pytest.raises(RewardError, match=said):
        questions(url)(IMAGES[:1], ["a car"], columns)


def test_an_unknown_mean_and_an_answer_that_cannot_be_read():
    with saying({"a car": [("hm", 1.0)], "": [("yes", 1.0)]}) as url:
        with pytest.raises(RewardError, match="mean: there is no 'geometrical', did you mean 'geometric'?"):
            questions(url, mean="geometrical")
        assert math.isnan(questions(url)(IMAGES[:1], ["x"], {"questions": [CAR]}).item())
