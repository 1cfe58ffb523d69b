"""Readers of public corpora in their original columns; the user supplies most files.

    gsm8k       GSM8K (2110.14168)          train, test
    math        MATH (2103.03874)           train, test
    geneval     GenEval (2310.11513)        evaluation; train, test: Flow-GRPO's files in that format
    pickapic    Pick-a-Pic (2305.01569)     train, validation(_unique), test(_unique): distinct prompts only
    drawbench   DrawBench (2205.11487)      test
    geneval2, unigenbench, dpg_bench, t2i_compbench, oneig, vbench: see `flowgrpo.data.evaluation.readers`

`gsm8k:train` is searched in a folder `gsm8k`, in the layouts of the published corpora; `gsm8k:some/file.jsonl` is that
.jsonl, .csv or .parquet file. A few sets come with the package and need no file of the user's.

Rows of GSM8K and MATH have the columns `prompt` (question), `answer` (final answer only, for rewards), `completion`
(worked solution before the final answer, for IGPO's hints; or None) and further ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from flowgrpo.data import tables
from flowgrpo.data.evaluation import readers
from flowgrpo.data.tables import Row
from flowgrpo.errors import InputError
from rewards.base import nearest
from rewards.texts import latex

_CALCULATION = re.compile(r"<<[^<>]*>>")  # GSM8K's calculator annotations, as in 6 * 7 = <<6*7=42>>42


def convert_gsm8k(row: Row, place: str) -> Row:
    """Convert a row of GSM8K: `question`, and `answer` ending in #### and the number, or raise InputError."""
    question, worked = tables.text(row, "question", place), tables.text(row, "answer", place)
    solution, mark, answer = worked.rpartition("####")
    if not mark:
        raise InputError(f"{place}: answer is {worked[-40:]!r}, GSM8K's end with #### and the number")
    completion = _CALCULATION.sub("", solution).strip() or None
    return _question_row(row, "question", question=question, answer=answer, completion=completion)


def convert_math(row: Row, place: str) -> Row:
    r"""Convert a row of MATH: `problem`, and `solution` with a \boxed answer (MATH-500: `answer`), or raise InputError."""
    problem = tables.text(row, "problem", place)
    if row.get("answer") is not None:
        solution, answer = row.get("solution"), tables.text(row, "answer", place)
    else:
        solution = tables.text(row, "solution", place)
        answer = latex.last_boxed(solution)
    if not answer:
        raise InputError(f"{place}: the solution has no \\boxed answer, and there is no column answer")
    completion = solution and re.split(r"\\(?:boxed|fbox)", solution)[0].strip()
    return _question_row(row, "problem", question=problem, answer=answer, completion=completion)


def _question_row(row: Row, asked: str, *, question: str, answer: str, completion: str | None) -> Row:
    further = {name: cell for name, cell in row.items() if name != asked}
    return {"prompt": question.strip(), **further, "answer": answer.strip(), "completion": completion or None}


def convert_geneval(row: Row, place: str) -> Row:
    """Convert a row of GenEval's metadata: `prompt`, `tag`, `include` and perhaps `exclude`, or raise InputError."""
    if not isinstance(row.get("include"), list):
        raise InputError(f"{place}: include is {row.get('include')!r}, GenEval's is a list of objects")
    return {"prompt": tables.text(row, "prompt", place), **row}


def convert_pickapic(row: Row, place: str) -> Row:
    """Convert a row of Pick-a-Pic: its `caption` is the prompt. Raises InputError if there is none."""
    return {"prompt": tables.text(row, "caption", place).strip()}


def convert_drawbench(row: Row, place: str) -> Row:
    """Convert a row of DrawBench: `Prompts` and `Category`, in any case, or raise InputError."""
    lower = {name.lower(): cell for name, cell in row.items()}
    return {"prompt": tables.text(lower, "prompts", place).strip(), "category": lower.get("category")}


@dataclass(frozen=True)
class Corpus:
    """A corpus: hub id or repository, file patterns (the first match is used), and row conversion.

    `columns` are those to read from .parquet files, by default all; `distinct` drops repeated prompts. `gather` reads all
    files at once, where a prompt is more than a row.
    """

    home: str
    patterns: tuple[str, ...]
    read: Callable[[Row, str], Row] = lambda row, place: row
    _: KW_ONLY
    gather: Callable[[Sequence[Path], str], list[Row]] | None = None
    splits: tuple[str, ...] = ("train", "test")
    columns: tuple[str, ...] | None = None
    distinct: bool = False


_ANYWHERE = ("{split}.jsonl", "{split}.csv", "{split}.parquet", "{split}-*.parquet")
CORPORA = {
    "gsm8k": Corpus(
        "openai/gsm8k", (*_ANYWHERE, "main/{split}-*.parquet", "grade_school_math/data/{split}.jsonl"), convert_gsm8k
    ),
    "math": Corpus(
        "EleutherAI/hendrycks_math",
        (*_ANYWHERE, "data/{split}-*.parquet", "*/{split}-*.parquet"),  # the last: a folder per subject
        convert_math,
    ),
    "geneval": Corpus(
        "djghosh13/geneval",
        (*_ANYWHERE, "{split}_metadata.jsonl", "prompts/{split}_metadata.jsonl"),
        convert_geneval,
        splits=("train", "test", "evaluation"),
    ),
    "pickapic": Corpus(
        "yuvalkirstain/pickapic_v1",
        (*_ANYWHERE, "data/{split}-*.parquet"),
        convert_pickapic,
        splits=("train", "validation", "validation_unique", "test", "test_unique"),
        columns=("caption",),
        distinct=True,
    ),
    "drawbench": Corpus(
        "sayakpaul/drawbench",
        (*_ANYWHERE, "*.csv", "*.parquet", "data/*.parquet"),  # one split, any file name
        convert_drawbench,
        splits=("test",),
    ),
    "geneval2": Corpus(
        "github.com/facebookresearch/GenEval2", ("geneval2_data.jsonl",), readers.convert_geneval2, splits=("test",)
    ),
    "unigenbench": Corpus(
        "github.com/CodeGoat24/UniGenBench",
        ("{split}.jsonl", "test_prompts_{split}.csv", "data/test_prompts_{split}.csv"),
        readers.convert_unigenbench,
        splits=("en", "en_long", "zh", "zh_long"),
    ),
    "dpg_bench": Corpus(
        "github.com/TencentQQGYLab/ELLA",
        ("dpg_bench.csv", "dpg_bench/dpg_bench.csv"),
        gather=readers.gather_dpg_bench,
        splits=("test",),
    ),
    "t2i_compbench": Corpus(
        "github.com/Karine-Huang/T2I-CompBench",
        ("*_{split}.txt", "examples/dataset/*_{split}.txt"),
        gather=readers.gather_t2i_compbench,
        splits=("train", "val"),
    ),
    "oneig": Corpus(
        "github.com/OneIG-Bench/OneIG-Benchmark", ("OneIG-Bench.csv",), gather=readers.gather_oneig, splits=("en",)
    ),
    "vbench": Corpus(
        "github.com/Vchitect/VBench",
        ("{split}.jsonl", "VBench_{split}_info.json", "vbench/VBench_{split}_info.json"),
        readers.convert_vbench,
        splits=("full",),
    ),
}
NAMES = tuple(f"{name}:{split}" for name, corpus in CORPORA.items() for split in corpus.splits)


def is_corpus(source: str) -> bool:
    """Return whether a source of prompts begins with the name of a corpus and a colon."""
    return source.partition(":")[0] in CORPORA and ":" in source


def load(source: str, folder: str, key: str) -> list[Row]:
    """Return the prompt rows of `source`: a corpus, a colon, and a split or a file; errors name the setting `key`.

    `folder` holds a folder for each corpus. Raises InputError if there is no such split or file, or a row is malformed.
    """
    corpus = CORPORA[source.partition(":")[0]]
    read = files(source, folder, key)
    if corpus.gather is not None:
        return corpus.gather(read, key)
    rows = [corpus.read(row, place) for file in read for place, row in tables.rows(file, key, corpus.columns)]
    return list({row["prompt"]: row for row in rows}.values()) if corpus.distinct else rows


def files(source: str, folder: str, key: str) -> list[Path]:
    """Return the files of a corpus; arguments and errors are those of `load`."""
    name, _, split = source.partition(":")
    corpus, copy = CORPORA[name], Path(folder) / name
    patterns = [pattern.format(split=split) for pattern in corpus.patterns]
    if Path(split).suffix in tables.SUFFIXES:
        paths = [Path(split)]
    elif split in corpus.splits:
        places = (place.glob(pattern) for place in (copy, readers.SHIPPED / name) for pattern in patterns)
        paths = next(filter(None, map(sorted, places)), [])
    else:
        *others, last = tables.SUFFIXES
        raise InputError(
            f"{key}: {source} is neither a split of {name} nor a {', '.join(others)} or {last} file, "
            f"{nearest(source, NAMES)}"
        )
    if not paths:
        raise InputError(
            f"{key}: {source} looks in {copy} for {patterns[0]} or a copy of {corpus.home} (its files), and there is "
            f"none; put it there, set prompts.folder, or name the file, {name}:path/to/{patterns[0]}"
        )
    for file in paths:
        if not file.is_file():
            raise InputError(f"{key}: there is no file {file}")
    return paths
