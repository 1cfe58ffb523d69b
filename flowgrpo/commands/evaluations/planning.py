"""What an evaluation asks: a set, its rewards, and the samples that one model will be scored by."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flowgrpo.commands.evaluations.results import ASKED, Scored, read_asked
from flowgrpo.commands.evaluations.targets import Target
from flowgrpo.commands.scores.code import code_of
from flowgrpo.commands.scores.score import read_use
from flowgrpo.data import prompts
from flowgrpo.data.evaluation.sets import QUESTIONS, EvaluationSet, find_set, own_set
from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.schema.sections import RewardUse
from flowgrpo.schema.validation import checked
from flowgrpo.training.run import run_folder
from flowgrpo.training.run.run_files import read_manifest
from rewards.cards import default_name

STRIDE = 100_000  # between the seeds of a prompt's samples; the first sample of prompt i has seed i, as in training

FREE = ("name", "total", "rewards", "paper", "licence", "note")  # what may change while the samples stay


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is evaluated of each model: a set, by some rewards, with a number of samples of each prompt."""

    chosen: EvaluationSet
    rewards: Mapping[str, RewardUse]  # by name; the first one is the score
    samples: int
    limit: int | None  # prompts, spread evenly over the set; None for all
    batch_size: int


def read_request(
    name: str,
    *,
    by: str | None,
    uses: Sequence[str | RewardUse],
    samples: int | None,
    limit: int | None,
    batch_size: int,
) -> Request:
    """Return the request of command-line options, or of a run's rewards; raise InputError if a set or a reward is wrong.

    A reward of `uses` that the set has, too, keeps the options of the set that it does not name.
    """
    given = [use if isinstance(use, RewardUse) else read_use(use) for use in uses]
    chosen = find_set(name) or own_set(name, by, [use.model_dump(exclude_unset=True) for use in given])
    if by is not None:
        chosen = replace(chosen, by=by)
    own = {row["use"]: row for row in chosen.rewards}
    merged = [
        use.model_copy(update={"options": {**own.get(use.use, {}).get("options", {}), **use.options}}) for use in given
    ]
    rewards: dict[str, RewardUse] = {}
    for use in merged or [checked(RewardUse, dict(row), "--set") for row in chosen.rewards]:
        if (key := use.name or default_name(use.use)) in rewards:
            raise InputError(
                f"--reward: two rewards are named {key!r}, give one another name, '{{use: ..., name: ...}}'"
            )
        rewards[key] = use
    return Request(
        chosen=chosen, rewards=rewards, samples=samples or chosen.samples, limit=limit, batch_size=batch_size
    )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """An evaluation that can begin: the rows to sample, prompt by prompt, and the samples that they will become."""

    request: Request
    target: Target
    folder: Path
    rows: list[Row]
    samples: list[Scored]  # without files and scores
    asked: dict[str, Any]

    @property
    def by_questions(self) -> bool:
        """Whether the questions of a prompt have categories of their own."""
        return self.request.chosen.by == QUESTIONS


def plan_evaluation(request: Request, target: Target, folder: Path) -> Plan:
    """Load the prompts of a set for a model.

    Raise InputError if they cannot be read, or `folder` cannot be used or holds something else; RewardError if there is no
    such reward.
    """
    settings, chosen = target.model, request.chosen
    listed = prompts.load(chosen.prompts, "--set", **settings.prompts.load_options)
    count = len(listed) if request.limit is None else min(request.limit, len(listed))
    indices = [number * len(listed) // count for number in range(count)]
    rows, samples = [], []
    for index in indices:
        text, columns = listed[index].text, listed[index].columns
        categories = chosen.categories(text, columns)
        for sample in range(request.samples):
            seed = index + STRIDE * sample
            rows.append(Row(text, seed, columns))
            samples.append(Scored(file="", prompt=text, index=index, sample=sample, seed=seed, categories=categories))
    content = json.dumps([[row.prompt, row.seed, row.columns] for row in rows], default=str)
    asked = {
        "set": chosen.name,
        "prompts": count,
        "listed": len(listed),
        "samples": request.samples,
        "content": hashlib.sha256(content.encode()).hexdigest(),
        **target.describe(),
        "name": target.name,
        "total": chosen.total,
        "rewards": {name: use.model_dump(mode="json") | _code(use.use) for name, use in request.rewards.items()},
        "paper": chosen.paper,
        "licence": chosen.licence,
        "note": chosen.note if _is_scored_as_published(request) else "",
    }
    asked = json.loads(json.dumps(asked, default=str))
    _check_folder(folder, asked)
    return Plan(request=request, target=target, folder=folder, rows=rows, samples=samples, asked=asked)


def _code(use: str) -> dict[str, str]:
    """Return `code`, a digest of a user's own reward: one that was edited scores again."""
    code = code_of(use)
    return {} if code is None else {"code": hashlib.sha256(code).hexdigest()}


def _is_scored_as_published(request: Request) -> bool:
    """Return whether the score is that of the set, of which its note speaks."""
    first = next(iter(request.rewards.values()))
    return first.use == request.chosen.rewards[0]["use"]


def _check_folder(folder: Path, asked: Mapping[str, Any]) -> None:
    run_folder.check_writable(folder, str(folder))
    if not (folder / ASKED).is_file():
        if folder.exists() and any(folder.iterdir()):
            raise InputError(f"{folder}: holds something else than an evaluation; name another folder by --out")
        return
    if not read_manifest(folder):
        return
    before = read_asked(folder)
    for key in (key for key in asked if key not in FREE):
        if before.get(key) != asked[key]:
            names = {
                "content": "prompts",
                "prompts": "prompts or --limit",
                "samples": "--samples",
                "files": "model files",
            }
            word = names.get(key, key)
            raise InputError(
                f"{folder}: holds another evaluation (other {word}); delete it, or give this model alone another --out"
            )
