"""Write groups of samples, or of preferred pictures, to a folder that `data.groups` of a run names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowgrpo import config
from flowgrpo.data import prompts
from flowgrpo.data.prompts import Prompt, Row
from flowgrpo.errors import InputError
from flowgrpo.flow import setup
from flowgrpo.flow.outputs import group_sampling, preference_pairs
from flowgrpo.schema.sections import RunConfig
from flowgrpo.training.reports.progress import open_display
from flowgrpo.training.run import run_folder
from flowgrpo.training.run.phases import phase
from flowgrpo.training.scoring import scorer


def write(settings: RunConfig, rows: Sequence[Row] | None, folder: Path, pairs: Path | None) -> dict[str, Any]:
    """Write groups, or continue where writing was interrupted, and return the folder's manifest.

    The groups are samples of `rows`, by default of `prompts.train`. With a file of preference `pairs`, each pair is
    a group of two.

    Raises:
        InputError: the model is a language model, there is nothing to sample, or the folder holds something else.
        RewardError: a reward does not exist, or fails on synthetic samples.
    """
    if not config.is_flow(settings):
        raise InputError(
            f"--groups: samples of {settings.model.path} are texts, which have no latents; take a flow model"
        )
    run_folder.check_writable(folder, "--groups")
    setup.check_model(settings.model)
    with open_display(), phase("loading"):
        if pairs is not None:
            return preference_pairs.store_pairs(settings, pairs, folder)
        if rows is None:
            chosen = prompts.load_split(settings.prompts, "train")
        else:
            chosen = [Prompt(row.prompt, row.columns) for row in rows]
        rewards, _ = scorer.rewards(settings.rewards)
        return group_sampling.sample_groups(settings, chosen, rewards, folder)
