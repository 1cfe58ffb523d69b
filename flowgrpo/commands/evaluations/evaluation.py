"""One evaluation: sample the prompts of a set, score the samples, and write means by category."""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flowgrpo.commands.evaluations.planning import Plan, Request
from flowgrpo.commands.evaluations.results import ASKED, SCORES, SUMMARY, Results, Scored, read_asked, read_line
from flowgrpo.commands.evaluations.scoring import score_samples
from flowgrpo.commands.evaluations.statistics import TOTAL, summarise
from flowgrpo.commands.samples.sample import write_samples
from flowgrpo.commands.terminal import say
from flowgrpo.data import tables
from flowgrpo.data.evaluation.sets import QUESTIONS, question_categories
from flowgrpo.training.reports.progress import open_display
from flowgrpo.training.run import run_folder
from flowgrpo.training.run.phases import phase
from flowgrpo.training.run.run_files import read_manifest
from rewards import Reward, load
from rewards.base import NoAnswer, RewardError
from rewards.compute import default_device


def evaluate(plan: Plan) -> Results:
    """Sample what is not sampled yet, score what is not scored yet, and write the results.

    Rewards are tried on the first samples, before the others are made. Those whose server does not answer are left for the
    end; a line on stderr says so.

    Raises:
        InputError: the model cannot be sampled.
        RewardError: a reward cannot be loaded, or fails; the samples, and the scores before, are kept.
    """
    request, folder = plan.request, plan.folder
    scored = _read_scores(plan)
    names = request.rewards.keys()
    complete = len(scored) == len(plan.rows) and all(names <= one.rewards.keys() for one in scored.values())
    rewards = [] if complete else _load_rewards(request)
    folder.mkdir(parents=True, exist_ok=True)
    _write_lines(folder / SCORES, [sample.document for sample in scored.values()])
    run_folder.replace_text(folder / ASKED, json.dumps(plan.asked, indent=1) + "\n")
    if complete:
        return _write(plan, list(scored.values()))
    (folder / SUMMARY).unlink(missing_ok=True)
    files = _sample(plan, rewards, begun=bool(scored))
    gc.collect()  # the model, before the rewards are loaded
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    scored = _read_scores(plan)
    samples = [scored.get(file) or replace(sample, file=file) for file, sample in zip(files, plan.samples, strict=True)]
    return _write(plan, _score(plan, rewards or _load_rewards(request, last=True), samples))


def _load_rewards(request: Request, *, last: bool = False) -> list[Reward]:
    """Return the rewards, not yet on a device; none if a server does not answer, unless this is the `last` time."""
    try:
        return [
            replace(load(use.use, options=use.options, name=name, frames=use.frames, of=use.of), only=use.only)
            for name, use in request.rewards.items()
        ]
    except NoAnswer as error:
        if last:
            raise
        say(f"flowgrpo: {error}; samples are made first, and the same command scores them once it answers")
        return []
    except RewardError as error:
        if "'endpoint'" not in str(error):
            raise
        use = next(use.use for use in request.rewards.values())
        raise RewardError(
            f"--reward: {request.chosen.name} is scored by a vision-language model behind an OpenAI-compatible endpoint; "
            f"give its URL, --reward '{{use: {use}, options: {{endpoint: \"http://127.0.0.1:8000/v1\"}}}}'"
        ) from error


def _sample(plan: Plan, rewards: Sequence[Reward], *, begun: bool) -> list[str]:
    """Sample the rows that have no file yet, and return the files of all; try the rewards unless scoring has `begun`."""
    lines = read_manifest(plan.folder)
    lines = lines[: next((i for i, x in enumerate(lines) if not (plan.folder / x["file"]).is_file()), len(lines))]
    files, size = [line["file"] for line in lines], plan.request.batch_size
    if len(files) == len(plan.rows):
        return files
    _write_lines(plan.folder / "manifest.jsonl", lines)
    with open_display(), phase("loading"):
        sampler = plan.target.sampler(plan.rows)

    def sample(end: int | None) -> None:
        new = write_samples(sampler, sampler.rows[len(files) : end], plan.folder, size, done=len(files))
        files.extend(line["file"] for line in new)

    if rewards and not begun:
        each = plan.request.samples
        first = -(-size // each) * each  # whole groups, for rewards that compare them
        sample(max(len(files), first))
        _score(plan, rewards, [replace(one, file=file) for one, file in zip(plan.samples[:first], files, strict=False)])
        for reward in rewards:
            reward.to("cpu")
    sample(None)
    return files


def _score(plan: Plan, rewards: Sequence[Reward], samples: Sequence[Scored]) -> list[Scored]:
    for reward in rewards:
        reward.to(default_device())
    return score_samples(plan.folder, samples, rewards, plan.request.batch_size, by_questions=plan.by_questions)


def _read_scores(plan: Plan) -> dict[str, Scored]:
    """Return the scores on disk by file, of rewards whose options have not changed, in the plan's categories.

    Rewards of an earlier command that scored all of these samples join those of the plan.
    """
    before = read_asked(plan.folder)["rewards"] if (plan.folder / ASKED).is_file() else {}
    now = plan.asked["rewards"]
    kept = {name for name in before if name not in now or now[name] == before[name]}
    planned = {(one.index, one.sample): (one, row) for one, row in zip(plan.samples, plan.rows, strict=True)}
    found = {}
    for place, line in tables.log(plan.folder / SCORES):
        scored = read_line(line, place)
        if (scored.index, scored.sample) in planned:
            sample, row = planned[scored.index, scored.sample]
            asked = row.columns.get(QUESTIONS) or ()
            names = [question_categories(question) if plan.by_questions else [] for question in asked]
            found[scored.file] = replace(
                scored,
                categories=sample.categories,
                rewards={name: value for name, value in scored.rewards.items() if name in kept},
                answers={
                    name: [(own, grade) for own, (_, grade) in zip(names, each, strict=False)]
                    for name, each in scored.answers.items()
                    if name in kept
                },
            )
    whole = len(found) == len(plan.samples)
    others = [name for name in kept if name not in now and whole and all(name in one.rewards for one in found.values())]
    plan.asked["rewards"] |= {name: before[name] for name in before if name in others}
    return found


def _write(plan: Plan, samples: Sequence[Scored]) -> Results:
    """Write scores, manifest and summary of an evaluation that is complete."""
    lines = [
        line | {"rewards": sample.rewards} for line, sample in zip(read_manifest(plan.folder), samples, strict=True)
    ]
    _write_lines(plan.folder / "manifest.jsonl", lines)
    _write_lines(plan.folder / SCORES, [sample.document for sample in samples])
    results = Results(plan.folder, plan.asked, list(samples))
    run_folder.replace_text(plan.folder / SUMMARY, json.dumps(summary(results), indent=1) + "\n")
    return results


def _write_lines(file: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    run_folder.replace_text(file, "".join(json.dumps(line) + "\n" for line in lines))


def summary(results: Results) -> dict[str, Any]:
    """Return the summary of an evaluation for JSON: the score's numbers, and in `rewards` those of each reward."""
    by_reward = {name: numbers(results, name) for name in results.rewards}
    asked = {key: results.asked[key] for key in ("set", "name", "prompts", "samples")}
    return {**asked, **by_reward[results.rewards[0]], "rewards": by_reward}


def numbers(results: Results, reward: str) -> dict[str, Any]:
    """Return the numbers of one reward for JSON: its mean and error, its categories, and how many samples it left out."""
    found = summarise(results.samples, reward, results.asked["total"])
    whole = found.total.document if found.total else {"name": TOTAL, "n": 0, "mean": None, "error": None}
    del whole["name"]
    return {**whole, "unscored": found.unscored, "categories": [each.document for each in found.categories]}
