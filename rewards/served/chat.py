"""Closed questions about pictures to a vision-language model behind any OpenAI-compatible endpoint (vLLM, SGLang, ...)."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rewards.base import RewardError, nearest
from rewards.served.endpoint import Endpoint
from rewards.served.grading import (
    TOP,
    Part,
    Question,
    check_beginnings,
    closing_for,
    expected_value,
    is_numeric,
    read_answer,
    text,
)

METHODS = ("logprobs", "guided", "guided_choice", "guided_regex", "text")
RETRY_TEMPERATURE = 1.0


class Chat:
    """A model that is asked questions with few possible answers.

    `method` restricts its output to the possible answers:

    - `logprobs`: one token; the mean of the values, weighted with the probabilities of the answers' first tokens. It orders
      samples that would all get the same single answer. Not for models that think first.
    - `guided`: JSON of a schema, `response_format`, which most servers know.
    - `guided_choice`: `structured_outputs` of vLLM 0.12 and later.
    - `guided_regex`: `regex` of SGLang.
    - `text`: no restriction; the model may reason, and its last words are parsed (see `rewards.served.grading.read_answer`).

    Args:
        answers: possible answers and their values.
        endpoint: URL, mostly ending in /v1; several, separated by commas, are replicas.
        model: its name there; optional if there is only one.
        closing: text after each question that asks for the form of the answer; by default what `method` needs.
        timeout: seconds per question, with its retries.
        retries: after failures of the connection; see `rewards.served.endpoint.Endpoint`.
        tries: maximum number of times that a question is asked until its answer can be read.
        token_env: name of the environment variable with the API key.
        max_tokens: of an answer with its reasoning; not for `logprobs`.
        extra: further fields of each request.
    """

    def __init__(
        self,
        answers: Mapping[str, float],
        endpoint: str,
        *,
        model: str | None = None,
        method: str = "logprobs",
        system: str | None = None,
        closing: str | None = None,
        concurrency: int = 8,
        timeout: float = 120.0,
        retries: int = 4,
        tries: int = 1,
        token_env: str | None = None,
        max_tokens: int = 1024,
        extra: Mapping[str, Any] | None = None,
    ):
        if method not in METHODS:
            raise RewardError(f"method: there is no {method!r}, {nearest(method, METHODS)}")
        if tries < 1 or concurrency < 1:
            raise RewardError(f"tries and concurrency must be at least 1, not {tries} and {concurrency}")
        if method == "logprobs":
            check_beginnings(answers, instead="guided")
        self.answers, self.method, self.concurrency, self.tries = dict(answers), method, concurrency, tries
        self._endpoint = Endpoint(endpoint.split(","), timeout, retries, token_env)
        self._before = [] if system is None else [{"role": "system", "content": system}]
        self._closing, self._max_tokens, self._extra = closing, max_tokens, extra or {}
        self._model = self._find_model(model)
        self.asked = self.unread = 0  # questions sent, repeated ones included, and unreadable answers

    def ask(
        self, questions: Sequence[Question], answers: Sequence[Mapping[str, float]] | None = None
    ) -> list[float | None]:
        """Return the value of each answer, None if it cannot be read.

        `answers` are the possible answers of each question; None: those of the constructor for all.
        """
        parts = {id(part): part for question in questions for part in question}  # many questions share a picture
        sent = {key: _encode(part) for key, part in parts.items()}
        asked = [[sent[id(part)] for part in question] for question in questions]
        with ThreadPoolExecutor(self.concurrency) as pool:
            values_and_tries = list(pool.map(self._ask, asked, answers or [self.answers] * len(asked)))
        self.asked += sum(tries for _, tries in values_and_tries)
        self.unread += sum(tries - (value is not None) for value, tries in values_and_tries)
        return [value for value, _ in values_and_tries]

    def _ask(self, question: Question, answers: Mapping[str, float]) -> tuple[float | None, int]:
        closing = closing_for(self.method, answers) if self._closing is None else self._closing
        content = [*question, text(closing)] if closing else [*question]
        messages = [*self._before, {"role": "user", "content": content}]
        asked = {"model": self._model, **_restrict(self.method, answers, self._max_tokens), **self._extra}
        for tries in range(1, self.tries + 1):
            request = {"temperature": RETRY_TEMPERATURE if tries > 1 else 0.0, **asked, "messages": messages}
            response = self._endpoint.ask("POST", "/chat/completions", json=request)
            try:
                value = self._value(response.json()["choices"][0], answers)
            except RewardError:
                raise
            except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
                raise RewardError(f"{response.url} answered with no chat completion: {response.text[:100]!r}") from None
            if value is not None:
                break
        return value, tries

    def _value(self, choice: Mapping[str, Any], answers: Mapping[str, float]) -> float | None:
        if self.method != "logprobs":
            return read_answer(choice["message"]["content"] or "", answers)
        if not choice.get("logprobs"):
            raise RewardError(f"{self._endpoint.urls[0]} gives no logprobs: take the method guided")
        first = choice["logprobs"]["content"][0]
        return expected_value([(top["token"], top["logprob"]) for top in first["top_logprobs"]], answers)

    def _find_model(self, model: str | None) -> str:
        """Return the name of the model, which every replica must have."""
        for url in self._endpoint.urls:
            response = self._endpoint.ask("GET", "/models", only=url)
            try:
                names = [str(each["id"]) for each in response.json()["data"]]
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                raise RewardError(f"{response.url} lists no models, is {url} an OpenAI-compatible endpoint?") from None
            if model is None and len(names) == 1:
                model = names[0]
            if model not in names:
                raise RewardError(f"model: {url} serves no model {model!r}, {nearest(model or '', names)}")
        assert model is not None  # there is at least one replica
        return model


def _encode(part: Part) -> Part:
    """Return a part of a question as the endpoint takes it: pictures as PNG in a data URL."""
    if part["type"] != "image":
        return part
    buffer = io.BytesIO()
    part["image"].save(buffer, "PNG", compress_level=1)
    encoded = base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}


def _restrict(method: str, answers: Mapping[str, float], max_tokens: int) -> dict[str, Any]:
    """Return the fields of a request that restrict its answer."""
    whole = is_numeric(answers) and all(answer.isdecimal() for answer in answers)
    answer = {"type": "integer", "enum": [*map(int, answers)]} if whole else {"type": "string", "enum": [*answers]}
    schema = {"type": "object", "properties": {"answer": answer}, "required": ["answer"], "additionalProperties": False}
    named = {"name": "answer", "strict": True, "schema": schema}
    fields: dict[str, dict[str, Any]] = {
        "logprobs": {"max_tokens": 1, "logprobs": True, "top_logprobs": TOP},
        "guided": {"response_format": {"type": "json_schema", "json_schema": named}},
        "guided_choice": {"structured_outputs": {"choice": [*answers]}},
        "guided_regex": {"regex": f"({'|'.join(map(re.escape, answers))})"},
        "text": {},
    }
    return {"max_tokens": max_tokens, **fields[method]}
