"""Measure the certificate of every pipeline of the zoo, and write flowgrpo/data/models.json and docs/models.md.

    python scripts/certify_models.py [NAME ...]

With names, only those rows are measured. All take about 6 minutes on 2 cores. A pipeline that fails is listed with the
reason.
"""

from __future__ import annotations

import argparse
import json
import logging
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

TABLE, PAGE = ROOT / "flowgrpo" / "data" / "models.json", ROOT / "docs" / "models.md"


def row(name: str, specimen: Specimen) -> dict[str, Any]:
    """Measure one row of the table."""
    pipeline, _, variant = name.removesuffix(")").partition(" (")
    started = time.perf_counter()
    try:
        checks = certify(specimen.build, specimen.call, specimen.rows)
    except Exception as error:  # whatever a class raises is why it is not certified
        reason = " ".join(str(error).split())[:200]
        checks = [Check("runs", False, reason if "model." in reason else f"{type(error).__name__}: {reason}")]
    values = {check.name: check.value for check in checks}
    failed = [
        f"{check.name}: {check.value}" + (f" ({check.advice})" if check.advice else "")
        for check in checks
        if not check.ok
    ]
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


def page(rows: list[dict[str, Any]]) -> str:
    """docs/models.md."""
    certified = [r for r in rows if r["certified"]]
    classes = sorted({r["class"] for r in certified})
    lines = [
        "# Pipelines",
        "",
        f"{len(classes)} pipeline classes of diffusers {version('diffusers')} carry the whole certificate, measured on tiny "
        "pipelines with random weights",
        "by `python scripts/certify_models.py`, on the CPU. None of them has an adapter here; the rows of",
        "`flowgrpo/flow/pipeline/networks/traits.py` say the little that some need to be told.",
        "",
        "Every line of a certificate holds for every class of the first table:",
        "",
        "- **encoded once**: after preparation no text encoder runs again.",
        "- **equals stock**: our `ode`, in one go and step by step, decodes to the stock pipeline's sample (1e-4 of a",
        "  standard deviation), with flow-Euler in the stock pipeline where it ships another solver.",
        "- **decoded**: a stochastic sample is finite and of the stock shape.",
        "- **any micro-batch**: a stochastic sample is the same alone and among others (1e-4 of a standard deviation).",
        "  Where rows of unequal prompts, or any rows, cannot share a call without changing each other, they get calls of",
        "  their own.",
        "- **drift**: replayed log-probabilities equal those of the rollout exactly in float32, and in bfloat16.",
        "- **gradients**: reach every tensor of the transformers that ran and that has any influence on the velocity.",
        "- **LoRA**: saved, and loaded by a fresh stock pipeline, it gives the trained sample bit for bit.",
        "",
        "Pipelines that begin from a noised picture cut their schedule by `strength`; a run walks the steps that are left",
        "(`flowgrpo plan` counts all that `num_inference_steps` asks for). Those that paint in a mask put the noised",
        "picture back around it after each step. The model sees what they put back, as in their own runs, and the velocity",
        "there counts as 0: it has no part in ratios, divergences and gradients. A log-probability is still the mean over",
        "the whole latents, so a mask of a tenth of the picture scales its log-ratios by a tenth.",
        "A mask that leaves nothing to paint is refused; where its row is not looked at before a run, the run names it.",
        "",
        "| class | task | bfloat16 drift | rows | gradients reach | LoRA loads by |",
        "|---|---|---|---|---|---|",
    ]
    for r in certified:
        c = r["checks"]
        name = r["class"] + (f" ({r['variant']})" if r["variant"] else "")
        cells = [
            f"`{name}`",
            r["task"],
            c["drift_bfloat16"],
            c["any_micro_batch"].partition(", ")[2],
            c["gradients"],
            f"`{c['lora_reload'].split(':')[0]}`",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "## Not certified",
        "",
        "These were tried as well. They do not count, and the reason is what was measured:",
        "",
        "| class | task | reason |",
        "|---|---|---|",
    ]
    for r in rows:
        if not r["certified"]:
            name = r["class"] + (f" ({r['variant']})" if r["variant"] else "")
            lines.append(f"| `{name}` | {r['task']} | {r['note'].replace('|', '/')} |")
    lines += [
        "",
        "## Other inputs",
        "",
        "`make test-all` measures all of it again on a second call of every class: one more step, twice the height, twice",
        "the frames behind the first, another strength, mask and picture, guidance where there was none and none where",
        "there was some. It holds there, too. Not certified are:",
        "",
        "| class | what |",
        "|---|---|",
        *(f"| `{name}` | {limit} |" for name, limit in sorted(LIMITS.items())),
    ]
    lines += ["", "## Traits", "", "| class | why |", "|---|---|"]
    lines += [f"| `{name}` | {trait.why} |" for name, trait in TRAITS.items()]
    return "\n".join(lines) + "\n"


def main(names: list[str]) -> None:
    """Measure, and write both files."""
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
        rows.append(kept if kept and name not in names else row(name, specimen))
    TABLE.write_text(json.dumps(rows, indent=1) + "\n")
    PAGE.write_text(page(rows))
    print(f"{len({r['class'] for r in rows if r['certified']})} classes certified")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a specimen of tests/zoo; all without one")
    main(parser.parse_args().names)
