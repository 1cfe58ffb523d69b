"""`flowgrpo explain`: one sample of a run, what each step's noise decided of it, as a page and as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowgrpo import config
from flowgrpo.commands.endings import remedied
from flowgrpo.commands.inspect.explanation import Explained
from flowgrpo.errors import InputError
from flowgrpo.flow.diagnostics import explain_sample
from flowgrpo.training.checkpoints import checkpoint
from flowgrpo.training.fitting import batch_sizes
from flowgrpo.training.reports.progress import shown
from flowgrpo.training.run import run_folder


def explain(
    run: Path,
    out: Path | None,
    *,
    prompt: int,
    seed: int | None,
    step: int | None,
    redraws: int,
    chains: int,
) -> tuple[Explained, Path]:
    """Explain a sample of a run, write the page, and return what it tells and where it is.

    Args:
        out: the page; by default in the run's folder.
        step: the checkpoint's; by default the last.
        prompt, seed, redraws, chains: see `diagnostics.explain_sample.explain_sample`.

    Raises:
        InputError: there is no such run, checkpoint or prompt, it is a run of texts, or the page cannot be written.
    """
    settings = batch_sizes.settled(config.of_run(run), run)
    if not isinstance(settings, config.Config):
        raise InputError(f"explain: {run} is a run of texts; steps of noise are of pictures, videos and sounds")
    page = out or run / f"explain-{prompt:04d}{'' if seed is None else f'-seed-{seed}'}.html"
    if page.exists() and not page.is_file():  # a folder, or a device, which would be replaced
        raise InputError(f"--out: {page} is there and no ordinary file; name one, such as explain.html")
    run_folder.check_writable(page.parent, str(page))
    found = checkpoint.find(run / "checkpoints", step)
    checkpoint.check(found)
    smaller = {f"a smaller train.rollout_batch in {run / 'config.yaml'}": settings.train.rollout_rows > 1}
    with shown(), remedied(smaller):
        explanation = explain_sample.explain_sample(
            settings, run, found, prompt=prompt, seed=seed, redraws=redraws, chains=chains
        )
    told = Explained(
        explanation,
        run=run.resolve().name,
        step=int(found.name.removeprefix("step-")),
        method=settings.algorithm.preset,
    )
    page.parent.mkdir(parents=True, exist_ok=True)
    run_folder.replace_text(page, told.page())
    return told, page


def lines(told: Explained) -> list[dict[str, Any]]:
    """The steps as the rows of a table for people."""
    return [
        {
            "step": str(row.step.index + 1),
            "decides": row.share,
            "redraws": f"±{row.spread}",
            "advantage": row.advantage,
        }
        for row in told.rows
    ]
