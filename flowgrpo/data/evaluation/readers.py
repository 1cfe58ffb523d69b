"""Conversion of the official files of published evaluation sets to rows of prompts.

Rows of sets that ask questions about a sample have the column `questions`, as the reward `questions` reads it: a list of
maps with `question`, and where the set has them `answer`, `category` (a text, or several) and `needs`, the places of
questions whose failure makes this one fail.

    geneval2        GenEval 2 (2512.16853)          one .jsonl: prompt, atom_count, vqa_list, skills
    unigenbench     UniGenBench++ (2510.18701)      one table for each language and length: prompt_en, sub_dims_en
    dpg_bench       DPG-Bench (2403.05135)          one table with a line for each question
    t2i_compbench   T2I-CompBench++ (2307.06350)    a .txt file for each category
    oneig           OneIG-Bench (2506.07977)        a table of prompts, and for three classes a JSON file of questions
    vbench          VBench (2311.17982)             one JSON array: prompt_en, dimension
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowgrpo.data import tables
from flowgrpo.data.tables import Row
from flowgrpo.errors import InputError

SHIPPED = Path(__file__).with_name("shipped")  # a folder for each set that comes with the package; see NOTICE.md there

ASPECTS = {  # T2I-CompBench++: the category of a file's name, and what the judge looks at
    "color": "the colours of the objects",
    "shape": "the shapes of the objects",
    "texture": "the materials and textures of the objects",
    "spatial": "where the objects lie beside, above or below each other",
    "3d_spatial": "which objects lie in front of, behind or hidden by others",
    "numeracy": "the number of each kind of object",
    "non_spatial": "what the people and objects do, and how they act on each other",
    "complex": "all objects with their attributes, places and actions together",
}
ONEIG_CLASSES = {"Anime_Stylization": "anime", "Portrait": "human", "General_Object": "object"}


def convert_geneval2(row: Row, place: str) -> Row:
    """Convert a row of GenEval 2, or raise InputError."""
    pairs, skills = row.get("vqa_list"), row.get("skills")
    if not isinstance(pairs, list) or not isinstance(skills, list) or len(pairs) != len(skills):
        raise InputError(f"{place}: GenEval 2 has lists vqa_list and skills of one length")
    if not all(isinstance(pair, list) and len(pair) == 2 and all(isinstance(x, str) for x in pair) for pair in pairs):
        raise InputError(f"{place}: vqa_list is no list of pairs, a question and its answer")
    questions = [
        {"question": question, "answer": answer.lower(), "category": skill}
        for (question, answer), skill in zip(pairs, skills, strict=True)
    ]
    return {"prompt": tables.text(row, "prompt", place), "atoms": row.get("atom_count"), "questions": questions}


def convert_unigenbench(row: Row, place: str) -> Row:
    """Convert a row of UniGenBench++ in English or Chinese, or raise InputError.

    Each test point is a question; its categories are its primary dimension and, if it has one, its sub-dimension.
    """
    language = "zh" if "prompt_zh" in row else "en"
    points, words = ("考点", "考点对应描述") if language == "zh" else ("Testpoints", "Testpoint Description")
    described = row.get(f"sub_dims_{language}")
    if isinstance(described, str):
        described = tables.value(described, place)
    if not isinstance(described, dict) or not all(isinstance(described.get(key), list) for key in (points, words)):
        raise InputError(f"{place}: sub_dims_{language} is no object with the lists {points} and {words}")
    if len(described[points]) != len(described[words]):
        raise InputError(f"{place}: {points} and {words} have different lengths")
    questions = [
        {"question": text, "category": _with_primary(point)}
        for point, text in zip(described[points], described[words], strict=True)
    ]
    return {"prompt": tables.text(row, f"prompt_{language}", place), "questions": questions}


def _with_primary(point: str) -> list[str]:
    """Return a test point's dimensions: ["Attribute", "Attribute - Color"], or ["Style"]."""
    return list(dict.fromkeys((point.partition("-")[0].strip(), point.strip())))


def convert_vbench(row: Row, place: str) -> Row:
    """Convert an entry of VBench: its prompt, and the list of dimensions that it is for; or raise InputError."""
    if not isinstance(row.get("dimension"), list):
        raise InputError(f"{place}: dimension is {row.get('dimension')!r}, VBench's is a list of names")
    return {"prompt": tables.text(row, "prompt_en", place), "dimension": row["dimension"]}


def gather_t2i_compbench(files: Sequence[Path], key: str) -> list[Row]:
    """Return the prompts of T2I-CompBench++, category after category; raise InputError if a file is missing."""
    by_category = {file.stem.rpartition("_")[0]: file for file in files}
    if missing := [category for category in ASPECTS if category not in by_category]:
        raise InputError(f"{key}: {files[0].parent} holds no {missing[0]}_{files[0].stem.rpartition('_')[2]}.txt")
    return [
        {"prompt": prompt, "category": category, "aspect": aspect}
        for category, aspect in ASPECTS.items()
        for _, prompt in tables.lines(by_category[category], key)
    ]


def gather_dpg_bench(files: Sequence[Path], key: str) -> list[Row]:
    """Return the prompts of DPG-Bench with their questions, or raise InputError.

    A question's category is the first part of its tuple, as in "attribute - color (cabbage, green)". Its `needs` are all
    earlier questions on which it depends, directly or through others: the official script zeroes a question's descendants
    in order. That script skips the first line of the table; here no question is left out.
    """
    rows: dict[str, Row] = {}
    for place, row in tables.rows(files[0], key):
        item = rows.setdefault(
            tables.text(row, "item_id", place), {"prompt": tables.text(row, "text", place).strip(), "questions": []}
        )
        own, parents = _numbers(row, "proposition_id", place), _numbers(row, "dependency", place)
        questions: list[dict[str, Any]] = item["questions"]
        if own != [len(questions) + 1] or any(not 0 <= parent <= len(questions) for parent in parents):
            raise InputError(f"{place}: proposition_id or dependency does not follow the lines before it")
        direct = [parent - 1 for parent in parents if parent]
        every = {*direct, *(far for parent in direct for far in questions[parent]["needs"])}
        questions.append(
            {
                "question": tables.text(row, "question_natural_language", place),
                "category": tables.text(row, "tuple", place).partition("(")[0].partition("-")[0].strip(),
                "needs": sorted(every),
            }
        )
    return list(rows.values())


def _numbers(row: Row, column: str, place: str) -> list[int]:
    """Return the whole numbers of a cell such as "1, 2"."""
    parts = [part.strip() for part in tables.text(row, column, place).split(",")]
    if not all(part.isdecimal() for part in parts):
        raise InputError(f"{place}: {column} is {row[column]!r}, not whole numbers")
    return [int(part) for part in parts]


def gather_oneig(files: Sequence[Path], key: str) -> list[Row]:
    """Return the English prompts of OneIG-Bench that have questions of alignment, or raise InputError.

    The questions lie beside the table, in scripts/alignment/Q_D. Prompts of text rendering and of reasoning, which the
    benchmark scores by other models, are left out.
    """
    folder = files[0].parent / "scripts" / "alignment" / "Q_D"
    asked = {name: _oneig_questions(folder / f"{name}.json", key) for name in ONEIG_CLASSES.values()}
    rows = []
    for place, row in tables.rows(files[0], key):
        name, number = ONEIG_CLASSES.get(tables.text(row, "category", place)), tables.text(row, "id", place)
        if name is None:
            continue
        if number not in asked[name]:
            raise InputError(f"{place}: {folder / name}.json has no questions of the prompt {number}")
        prompt = tables.text(row, "prompt_en", place)
        rows.append({"prompt": prompt, "category": row["category"], "questions": asked[name][number]})
    return rows


def _oneig_questions(file: Path, key: str) -> dict[str, list[dict[str, Any]]]:
    """Return the questions of each prompt in a file; `needs` are the direct parents, whatever their place."""
    if not file.is_file():
        raise InputError(f"{key}: there is no file {file}, which has the questions of OneIG-Bench; copy the repository")
    try:
        return {number: _oneig_prompt(entry, f"{file}: {number}") for number, entry in tables.document(file).items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise InputError(f"{file}: it does not hold questions and dependencies of OneIG-Bench ({error!r})") from error


def _oneig_prompt(entry: Row, place: str) -> list[dict[str, Any]]:
    texts, parents = (
        tables.value(part, place) if isinstance(part := entry[name], str) else part
        for name in ("question", "dependency")
    )
    places = {identity: at for at, identity in enumerate(texts)}
    return [
        {"question": text, "needs": [places[str(parent)] for parent in parents[identity] if parent]}
        for identity, text in texts.items()
    ]
