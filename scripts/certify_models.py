"""Certify every pipeline of tests/zoo by checks, and write flowgrpo/data/models.json and docs/reference/models.md.

    python scripts/certify_models.py [NAME ...]

With names, only these pipelines are certified again. All take about 6 minutes on 2 cores. Failed pipelines are listed with
reasons.
"""

import argparse
import json
import logging
import re
import sys
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]
sys.path.append(str(ROOT / "tests"))

from zoo import SPECIMENS, Specimen  # noqa: E402
from zoo.second import LIMITS  # noqa: E402

from flowgrpo.flow.diagnostics.certificate import certify  # noqa: E402
from flowgrpo.flow.pipeline.networks.traits import TRAITS  # noqa: E402
from flowgrpo.training.reports.doctor_checks import Check  # noqa: E402

TABLE, PAGE = ROOT / "flowgrpo" / "data" / "models.json", ROOT / "docs/reference/models.md"


def measure_row(name: str, specimen: Specimen) -> dict[str, Any]:
    """Certify one specimen, print the result, and return its row of the table."""
    pipeline, _, variant = name.removesuffix(")").partition(" (")
    started = time.perf_counter()
    try:
        checks = certify(specimen.build, specimen.call, specimen.rows)
    except Exception as error:  # any error of a class is the reason why it is not certified
        reason = " ".join(str(error).split())[:200]
        checks = [Check("runs", False, reason if "model." in reason else f"{type(error).__name__}: {reason}")]
    values = {check.name: check.value for check in checks}
    broken = [check for check in checks if not check.ok]
    failed = [f"{check.name}: {check.value}" + (f" ({check.advice})" if check.advice else "") for check in broken]
    note = "; ".join([*failed, *([TRAITS[pipeline].why] if pipeline in TRAITS else [])])
    print(
        f"{'certified' if not failed else 'FAILED':10} {time.perf_counter() - started:5.1f} s  {name}  {'; '.join(failed)}",
        flush=True,
    )
    return {
        "class": pipeline,
        "variant": variant or None,
        "task": specimen.task,
        "drift": float(values["drift"]) if "drift" in values else None,
        "certified": not failed,
        "note": note,
        "checks": values,
    }


def page(rows: list[dict[str, Any]], before: str) -> str:
    """Return `before`, the text of docs/reference/models.md, with its tables and its number of classes replaced."""
    certified = [r for r in rows if r["certified"]]
    tables = {
        "| task | calls | classes |": grouped(certified),
        "| class | task | reason |": [[name_of(r), r["task"], reason(r)] for r in rows if not r["certified"]],
        "| class | refused or different |": [[f"`{name}`", limit] for name, limit in sorted(LIMITS.items())],
    }
    text = re.sub(
        r"(?m)^\d+ pipeline classes of diffusers \S+ \(\d+ with variants\)",
        f"{len({r['class'] for r in certified})} pipeline classes of diffusers {version('diffusers')} "
        f"({len(certified)} with variants)",
        before,
    )
    for head, cells in tables.items():
        table = "".join(f"| {' | '.join(row)} |\n" for row in cells)
        above, below = re.search(rf"(?m)^{re.escape(head)}.*\n\|[-|]+\n((?:\|.*\n)*)", text).span(1)
        text = text[:above] + table + text[below:]
    return text


def name_of(row: dict[str, Any]) -> str:
    """Return the name of a row's pipeline as code."""
    return f"`{row['class']}" + (f" ({row['variant']})`" if row["variant"] else "`")


def grouped(certified: list[dict[str, Any]]) -> list[list[str]]:
    """Return the certified pipelines by task and by what shares a call; remarks follow a name."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in sorted(certified, key=lambda row: (row["task"], calls_of(row))):
        said = remarks(row)
        found.setdefault((row["task"], calls_of(row)), []).append(f"{name_of(row)} [{said}]" if said else name_of(row))
    return [[*group, ", ".join(names)] for group, names in found.items()]


def calls_of(row: dict[str, Any]) -> str:
    """Return in a word or two which rows share a call of a certified pipeline."""
    how = row["checks"]["any_micro_batch"].partition(", ")[2]
    shared = "mixed" if "unequal noise levels" in how else "alone" if how.startswith("one row") else "shared"
    return shared + (", equal lengths" if "equally long prompts" in how else "")


def remarks(row: dict[str, Any]) -> str:
    """Return how a certified pipeline differs from most: in its bfloat16, its tensors without gradient, its LoRA loader."""
    stored = row["checks"]["drift_bfloat16"].partition(", ")[2]
    reached, _, without = row["checks"]["gradients"].partition(", the others ")
    loader = row["checks"]["lora_reload"].partition(":")[0]
    parts = [] if stored == "all stored in it" else [f"bfloat16: {stored}"]
    parts += [reached.partition(" tensors")[0]] if without else []
    parts += [] if loader == "pipe.load_lora_weights" else [f"`{loader.partition('.')[2]}`"]
    return "; ".join(parts)


def reason(row: dict[str, Any]) -> str:
    """Return the reason of a refused pipeline without what each row repeats."""
    text = re.sub(r"^runs: (model\.path: )?", "", row["note"]).replace("|", "/")
    text = text.removeprefix(f"{row['class']} cannot be trained here: ").removesuffix(", so it cannot be trained here")
    text = text.replace(f"a step of {row['class']} alone", "a step alone")
    return text.replace(f"{row['class']} refuses it", "its call fails").replace(row["class"], "the pipeline")


def main(names: list[str]) -> None:
    """Certify the specimens of these names (all if empty), and write both files."""
    torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    unknown = [name for name in names if name not in SPECIMENS]
    if unknown:
        raise SystemExit(f"there is no specimen {unknown[0]!r}")
    before = {(r["class"], r["variant"]): r for r in json.loads(TABLE.read_text())} if names else {}
    rows = []
    for name, specimen in sorted(SPECIMENS.items()):
        pipeline, _, variant = name.removesuffix(")").partition(" (")
        kept = before.get((pipeline, variant or None))
        rows.append(kept if kept and name not in names else measure_row(name, specimen))
    TABLE.write_text(json.dumps(rows, indent=1) + "\n")
    PAGE.write_text(page(rows, PAGE.read_text()))
    print(f"{len({r['class'] for r in rows if r['certified']})} classes certified")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a specimen of tests/zoo; all without one")
    main(parser.parse_args().names)
