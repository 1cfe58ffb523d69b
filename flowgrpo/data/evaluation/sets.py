"""The table of evaluation sets: prompts, rewards, categories, samples of a prompt, and how the total is made.

The prompts are any source that `flowgrpo.data.prompts.load` takes. A name with another split or a file after a colon, such
as `unigenbench:zh`, has the rules of its set. `note` says in what the numbers depart from published ones. A set of the
user's own has the same form (`own_set`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flowgrpo.errors import InputError
from rewards.base import nearest

QUESTIONS = "questions"  # the column whose entries have categories of their own
By = str | Callable[[str], list[str]] | None


@dataclass(frozen=True, kw_only=True)
class EvaluationSet:
    """A row of the table."""

    name: str
    prompts: str  # source of prompts
    rewards: Sequence[Mapping[str, Any]]  # as a config has them; the first one is the score
    by: By = (
        None  # column that holds a prompt's category or categories, or a function of the prompt; None: no categories
    )
    total: Literal["prompts", "categories"] = "prompts"  # mean over prompts, or over the categories' means
    samples: int = 1  # of a prompt
    paper: str = ""
    licence: str = ""  # of the prompts
    note: str = ""

    def categories(self, text: str, columns: Mapping[str, Any]) -> list[str]:
        """Return the categories of a prompt, without repeats; raise InputError if it has no such column."""
        if self.by is None:
            return []
        if callable(self.by):
            return self.by(text)
        if self.by not in columns:
            has = ", ".join(columns) or "none"
            raise InputError(f"--by: the prompts of {self.prompts} have no column {self.by!r}, they have {has}")
        cell = columns[self.by]
        if self.by == QUESTIONS:
            return list(dict.fromkeys(name for question in cell or () for name in question_categories(question)))
        return names_in(cell)


def question_categories(question: Mapping[str, Any]) -> list[str]:
    """Return the categories of an entry of the column `questions`."""
    return names_in(question.get("category"))


def names_in(cell: Any) -> list[str]:
    """Return the names that a cell holds: none, one or a list of several."""
    cells = cell if isinstance(cell, list) else [] if cell is None else [cell]
    return list(dict.fromkeys(str(name) for name in cells))


def _of_shapes(text: str) -> list[str]:
    from flowgrpo.data.generators import scenes
    from rewards.shapes import parse

    caption = parse(text)
    kind = "relation" if caption.relation else "two kinds" if len(caption.objects) > 1 else "one kind"
    return [kind, "unseen kind"] if scenes.names_unseen(text) else [kind]


def _of_patterns(text: str) -> list[str]:
    from flowgrpo.data.generators import patterned
    from rewards.patterns import parse

    caption = parse(text)
    kind = "relation" if caption.relation else "two objects" if len(caption.kinds) > 1 else "one object"
    return [kind, "unseen kind"] if patterned.names_unseen(caption) else [kind]


def _of_clips(text: str) -> list[str]:
    from flowgrpo.data.generators import clips
    from rewards.moves import parse

    caption = parse(text)
    kind = "two objects" if len(caption.kinds) > 1 else "one object"
    return [kind, "unseen kind"] if clips.names_unseen(caption) else [kind]


_POINT = (
    "This picture was generated for the prompt between the lines.\n---\n{prompt}\n---\n"
    "Look at one point of it alone, {category}: {question}\nDoes the picture show this point, whole and without mistakes?"
)
_ASPECT = (
    "This picture was generated for the prompt between the lines.\n---\n{prompt}\n---\n"
    "Grade from {low} (none right) to {high} (all right) how far it follows the prompt in one aspect alone: {aspect}."
)

SETS = {
    one.name: one
    for one in (
        EvaluationSet(
            name="shapes:eval",
            prompts="shapes:eval",
            rewards=[{"use": "shapes"}],
            by=_of_shapes,
            paper="held-out captions of the embedded model",
        ),
        EvaluationSet(
            name="patterns:eval",
            prompts="patterns:eval",
            rewards=[{"use": "patterns"}],
            by=_of_patterns,
            paper="held-out captions of the embedded model",
        ),
        EvaluationSet(
            name="clips:eval",
            prompts="clips:eval",
            rewards=[{"use": "moves"}],
            by=_of_clips,
            paper="held-out captions of the embedded model",
        ),
        EvaluationSet(
            name="geneval",
            prompts="geneval:evaluation",
            rewards=[{"use": "geneval", "options": {"credit": "official"}}],
            by="tag",
            total="categories",
            samples=4,
            paper="GenEval, arXiv 2310.11513",
            licence="MIT",
            note="Counted as GenEval's script does, on detectors of transformers in place of mmdet's.",
        ),
        EvaluationSet(
            name="geneval2",
            prompts="geneval2:test",
            rewards=[
                {"use": "questions", "options": {"soft": True, "mean": "geometric", "closing": "Answer in one word."}}
            ],
            by=QUESTIONS,
            paper="GenEval 2, arXiv 2512.16853",
            licence="CC BY-NC 4.0",
            note="The total is Soft-TIFA GM, categories are the means over questions of a skill (AM); the paper's judge is "
            "Qwen3-VL-8B-Instruct. A probability is taken among the possible answers, not among all tokens.",
        ),
        EvaluationSet(
            name="unigenbench",
            prompts="unigenbench:en",
            rewards=[{"use": "questions", "options": {"template": _POINT}}],
            by=QUESTIONS,
            total="categories",
            samples=4,
            paper="UniGenBench++, arXiv 2510.18701",
            licence="CC BY 4.0",
            note="The total is the mean of the primary dimensions. Each test point is asked by itself, in our words; the "
            "official judge, Gemini 2.5 Pro or a model tuned for it, reasons about all points of a picture at once.",
        ),
        EvaluationSet(
            name="dpg_bench",
            prompts="dpg_bench:test",
            rewards=[{"use": "questions"}],
            by=QUESTIONS,
            samples=4,
            paper="DPG-Bench (ELLA), arXiv 2403.05135",
            licence="Apache-2.0",
            note="Answered by the endpoint's model in place of mPLUG-large. Categories count answers before dependencies.",
        ),
        EvaluationSet(
            name="t2i_compbench",
            prompts="t2i_compbench:val",
            rewards=[{"use": "judge", "options": {"template": _ASPECT}}],
            by="category",
            total="categories",
            samples=10,
            paper="T2I-CompBench++, arXiv 2307.06350",
            licence="MIT",
            note="Graded by the endpoint's model in our words; the paper has BLIP-VQA, UniDet and CLIPScore, and no total.",
        ),
        EvaluationSet(
            name="oneig",
            prompts="oneig:en",
            rewards=[{"use": "questions"}],
            by="category",
            samples=4,
            paper="OneIG-Bench, arXiv 2506.07977",
            licence="CC BY-NC 4.0",
            note="Of its five scores the alignment alone; the paper's judge is Qwen2.5-VL-7B-Instruct.",
        ),
        EvaluationSet(
            name="vbench",
            prompts="vbench:full",
            rewards=[{"use": "video_align_style"}],
            by="dimension",
            total="categories",
            samples=5,
            paper="VBench, arXiv 2311.17982",
            licence="Apache-2.0",
            note="VBench's prompts and dimensions, not its scores, each of which needs a model of its own.",
        ),
        EvaluationSet(
            name="drawbench",
            prompts="drawbench:test",
            rewards=[{"use": "pickscore"}, {"use": "image_reward"}, {"use": "aesthetic"}],
            by="category",
            paper="DrawBench (Imagen), arXiv 2205.11487",
            licence="none stated",
            note="People compared pictures in the paper; reward models score them here, as in Flow-GRPO.",
        ),
    )
}


def find_set(name: str) -> EvaluationSet | None:
    """Return the set of a name, perhaps with another split or file after a colon; None for other sources of prompts."""
    corpus, colon, rest = name.partition(":")
    if name in SETS:
        return SETS[name]
    if not colon or corpus not in SETS:
        return None
    row = SETS[corpus]
    return EvaluationSet(**{**vars(row), "name": name, "prompts": f"{row.prompts.partition(':')[0]}:{rest}"})


def own_set(source: str, by: str | None, rewards: Sequence[Mapping[str, Any]]) -> EvaluationSet:
    """Return a set of the user's own; raise InputError if no reward is named."""
    if not rewards and Path(source).is_file():
        raise InputError(f"--reward: name a reward for the prompts of {source}")
    if not rewards:
        hint = nearest(source, SETS)
        hint += "" if hint.endswith("?") else "; to score prompts of your own, name --reward"
        raise InputError(f"--set: {source} is no evaluation set, {hint}")
    return EvaluationSet(name=source, prompts=source, rewards=rewards, by=by)
