import json
import math
import re
import threading

import numpy as np
import pytest
import torch
from fakes import endpoint, http_server, pictures_of, words_of

import rewards
from rewards import RewardError

IMAGES = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def judge(url, use="judge", **options):
    return rewards.load(use, options={"endpoint": f"{url}/v1", **options})


def test_the_grade_is_the_mean_over_the_answers_probabilities():
    requests, top = [], [("4", 0.6), (" 2", 0.2), ("The", 0.15), ("5", 0.05)]
    with endpoint(lambda request: requests.append(request) or top) as url:
        values = judge(url, use="qwen_vl")(IMAGES[:1], ["a {red} cat"], {})
    assert values.item() == pytest.approx(((4 * 0.6 + 2 * 0.2 + 5 * 0.05) / 0.85 - 1) / 4)
    (request,) = requests
    assert (request["model"], request["max_tokens"], request["temperature"]) == ("vlm", 1, 0)
    assert (request["logprobs"], request["top_logprobs"]) == (True, 20)
    assert "a {red} cat" in words_of(request)
    assert "from 1 (worst) to 5 (best)" in words_of(request)
    (picture,) = pictures_of(request)
    np.testing.assert_array_equal(picture, IMAGES[0].mul(255).round().byte().permute(1, 2, 0).numpy())


@pytest.mark.parametrize(("method", "said", "field", "value"), [
    ("guided", '{"answer": 4}', "response_format", None),
    ("guided_choice", "4", "structured_outputs", {"choice": ["1", "2", "3", "4", "5"]}),
    ("guided_regex", "4", "regex", "(1|2|3|4|5)"), ("text", "It is fine.\n**Final Score:** 4", None, None),
])  # fmt: skip
def test_an_answer_is_confined_as_the_server_offers_it(method, said, field, value):
    requests = []
    with endpoint(lambda request: requests.append(request) or said) as url:
        reward = judge(url, method=method, extra={"seed": 7})
        assert reward(IMAGES, ["a", "b"], {}).tolist() == [0.75, 0.75]
        assert (reward.function.chat.asked, reward.function.chat.unread) == (2, 0)
    assert {"response_format", "structured_outputs", "regex"} & set(requests[0]) == ({field} if field else set())
    assert requests[0]["seed"] == 7
    if method == "guided":
        asked = requests[0]["response_format"]["json_schema"]["schema"]
        assert asked["properties"] == {"answer": {"type": "integer", "enum": [1, 2, 3, 4, 5]}}
    elif value:
        assert requests[0][field] == value


def test_what_cannot_be_read_is_asked_again_and_counted_and_then_not_applicable():
    temperatures, said = [], iter(["hm", "4", "hm", "hm"])
    with endpoint(lambda request: temperatures.append(request["temperature"]) or next(said)) as url:
        reward = judge(url, method="text", tries=2, concurrency=1)
        first, second = reward(IMAGES, ["a", "b"], {}).tolist()
    assert first == 0.75
    assert math.isnan(second)
    assert (reward.function.chat.asked, reward.function.chat.unread) == (4, 3)
    assert temperatures == [0, 1, 0, 1]


def test_a_video_is_shown_by_frames_and_graded_by_the_mean_of_its_questions():
    video = torch.arange(9).div(10).view(1, 9, 1, 1, 1).expand(1, 9, 3, 4, 4)
    shown, asked = [], []

    def answer(request):
        shown.append([int(picture[0, 0, 0]) for picture in pictures_of(request)])
        asked.append(words_of(request))
        grade = 5 if "motion" in asked[-1] else 2
        return [(str(grade), 1.0)]

    with endpoint(answer) as url:
        values = judge(url, use="video_align_style", frames=3)(video, ["a dog runs"], {})
    assert values.item() == pytest.approx((1 / 4 + 1 + 1 / 4) / 3)
    assert shown == [[0, 102, 204]] * 3  # frames 0, 4 and 8
    assert sum("a dog runs" in words for words in asked) == 1


def test_template_scale_and_columns_are_the_users():
    requests, top = [], [("yes", 0.75), ("no", 0.25)]
    with endpoint(lambda request: requests.append(request) or top) as url:
        asked = {"template": "Is {prompt} in the style of {artist}?", "scale": {"no": 0, "yes": 2}}
        reward = judge(url, closing="", concurrency=1, system="Be fair.", **asked)
        assert reward(IMAGES, ["it", "this"], {"artist": ["Klee", "Miro"]}).tolist() == [0.75, 0.75]
        with pytest.raises(RewardError, match="template: there is no 'artist' to fill in, there are prompt, low, high"):
            reward(IMAGES, ["it", "this"], {})
    words = [words_of(request) for request in requests]
    assert words == ["Is it in the style of Klee?", "Is this in the style of Miro?"]
    assert requests[0]["messages"][0] == {"role": "system", "content": "Be fair."}


def test_every_style_asks_and_reads_its_own_answers():
    def answer(request):
        if not request.get("logprobs"):
            return "Final Score: 5"
        return [("excellent", 1.0)] if "excellent" in words_of(request) else [("5", 1.0)]

    with endpoint(answer) as url:
        for name, card in rewards.BUILT_IN.items():
            if card.target == "rewards.served.judge:Judge":
                sample = torch.rand(1, 2, 3, 8, 8) if "video" in card.inputs else IMAGES[:1]
                assert judge(url, use=name)(sample, ["a cat"], {}).tolist() == [1.0], name


def test_questions_are_under_way_together():
    active, most, together = [], [], threading.Barrier(4, timeout=60)  # nobody is answered before four ask

    def answer(request):
        active.append(request)
        most.append(len(active))
        together.wait()
        active.pop()
        return [("3", 1.0)]

    with endpoint(answer) as url:
        judge(url, concurrency=4)(torch.rand(8, 3, 4, 4), ["a"] * 8, {})
    assert max(most) == 4


@pytest.mark.parametrize(("options", "said"), [
    ({"model": "vml"}, "model: http://.*/v1 serves no model 'vml', did you mean 'vlm'"),
    ({"style": "qwen"}, "style: there is no 'qwen', did you mean 'qwen_vl'"),
    ({"method": "guidd"}, "method: there is no 'guidd', did you mean 'guided'"),
    ({"scale": [0, 10]}, "'1' begins '10'; take guided"), ({"scale": [3, 3]}, "has no two different values"),
    ({"tries": 0}, "tries and concurrency must be at least 1, not 0 and 8"),
    ({"methd": "text"}, "could not be made \\(options: .*\\): TypeError: .*methd"),
    ({"endpoint": "localhost:8000"}, "'localhost:8000' is not an address"),
])  # fmt: skip
def test_an_option_that_does_not_fit_is_refused(options, said):
    with endpoint(lambda request: "4") as url, pytest.raises(RewardError, match=said):
        judge(url, **options)


def test_a_model_must_be_named_where_there_are_several():
    with (
        endpoint(lambda request: "4", models=("a", "b")) as url,
        pytest.raises(RewardError, match="None, choose one of a, b"),
    ):
        judge(url)
    for listed in ({"hello": 1}, ["data"], {"data": [1]}, b"[" * 100_000):
        with http_server(lambda _, it=listed: it) as url, pytest.raises(RewardError, match="lists no models"):
            judge(url)


def likely(token, log_prob):
    """A completion whose only token is this."""
    return {"choices": [{"logprobs": {"content": [{"top_logprobs": [{"token": token, "logprob": log_prob}]}]}}]}


@pytest.mark.parametrize(("answered", "said"), [
    ((400, {"error": {"message": "image too large", "code": 400}}), "answered 400: image too large"),
    ((404, {"object": "error", "message": "no such route"}), "answered 404: no such route"),
    ((200, b"garbage"), "answered with no chat completion: 'garbage'"),
    ((200, b"[" * 100_000), "answered with no chat completion"),
    ((200, {"choices": []}), "answered with no chat completion"),
    ((200, {"choices": {}}), "answered with no chat completion"),
    ((200, {"choices": ["words"]}), "answered with no chat completion"),
    ((200, likely(4, 0.0)), "answered with no chat completion"),
    ((200, likely("4", "0")), "answered with no chat completion"),
    ((200, likely("4", 1e9)), "answered with no chat completion"),
    ((200, {"choices": [{"message": {"content": "4"}}]}), "gives no logprobs: take the method guided"),
])  # fmt: skip
def test_an_endpoint_that_fails_is_one_clear_sentence(answered, said):
    models = {"data": [{"id": "vlm"}]}
    with http_server(lambda asked: models if asked.path.endswith("/models") else answered) as url:
        reward = judge(url)
        with pytest.raises(RewardError, match=said):
            reward(IMAGES, ["a", "b"], {})


def test_sounds_are_refused():
    with endpoint(lambda request: "4") as url, pytest.raises(ValueError, match="a judge looks at images"):
        judge(url)(torch.rand(2, 2, 100), ["a", "b"], {})


def test_a_token_is_sent(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    seen, models = [], {"data": [{"id": "vlm"}]}
    with http_server(lambda asked: seen.append(asked.headers.get("authorization")) or models) as url:
        judge(url, token_env="JUDGE_KEY")
    assert seen == ["Bearer secret"]


def test_a_judge_is_described_without_an_endpoint(capsys):
    from flowgrpo.cli import main

    assert main(["rewards", "deqa_style"]) == 0
    assert re.search(r"mapped to 0[\s\S]*style: deqa_style", capsys.readouterr().out)
    assert main(["rewards", "--format", "json"]) == 0
    assert {"judge", "preference", "qwen_vl"} <= {row["name"] for row in json.loads(capsys.readouterr().out)}
