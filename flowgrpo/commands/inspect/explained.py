"""`flowgrpo explain`: how much the noise of each step decided about one sample of a run."""

from __future__ import annotations

from pathlib import Path

from flowgrpo import config
from flowgrpo.commands.exit_status import suggest_option
from flowgrpo.commands.inspect.explanation import Explained
from flowgrpo.commands.page_parts.pages import check_out, write_page
from flowgrpo.errors import InputError
from flowgrpo.flow.diagnostics import explain_sample
from flowgrpo.training.checkpoints import checkpoint
from flowgrpo.training.fitting import batch_sizes
from flowgrpo.training.reports.progress import open_display


def explain(
    run: Path, out: Path | None, *, prompt: int, seed: int | None, step: int | None, redraws: int, chains: int
) -> tuple[Explained, Path]:
    """Explain a sample of a run's checkpoint, by default the last; return the explanation and the page's path.

    Other arguments are those of `diagnostics.explain_sample.explain_sample`. Raises InputError if there is no such run,
    checkpoint or prompt, if it is a run of texts, or if the page cannot be written.
    """
    settings = batch_sizes.resolve_sizes(config.of_run(run), run)
    if not config.is_flow(settings):
        raise InputError(f"explain: {run} is a run of texts; steps of noise are of pictures, videos and sounds")
    page = out or run / f"explain-{prompt:04d}{'' if seed is None else f'-seed-{seed}'}.html"
    check_out(page, "explain.html")
    folder = checkpoint.find(run / "checkpoints", step)
    checkpoint.check(folder)
    smaller = {f"a smaller train.rollout_batch in {run / 'config.yaml'}": settings.train.rollout_rows > 1}
    with open_display(), suggest_option(smaller):
        explanation = explain_sample.explain_sample(
            settings, run, folder, prompt=prompt, seed=seed, redraws=redraws, chains=chains
        )
    explained = Explained(
        explanation,
        run=run.resolve().name,
        step=int(folder.name.removeprefix("step-")),
        method=settings.algorithm.preset,
    )
    return explained, write_page(page, explained.page())
