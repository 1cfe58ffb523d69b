"""Search for samples of high reward into a folder with a manifest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowgrpo.commands.model_kinds import detect_kind
from flowgrpo.commands.samples.sample import check_new, write_samples
from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.flow.outputs.search_sampling import search_sampler
from flowgrpo.schema.sections import RewardUse
from flowgrpo.schema.validation import checked
from flowgrpo.training.reports.progress import open_display
from flowgrpo.training.reports.samples import COMPARE_AT, ModelUse, SearchUse
from flowgrpo.training.run.phases import phase
from samplers.levels import DEFAULT_LEVELS

WALKS = ("beam", "smc")
WIDTH = 8
LEAST = 1e-9  # of --temperature; rewards divided by less may overflow
MOST = 10.0  # of --level; without noise copies stay equal, and of much noise the last step leaves too much


def search_to_folder(
    use: ModelUse, rows: Sequence[Row], search: SearchUse, *, out: Path, batch_size: int
) -> dict[str, Any]:
    """Search a sample for every row; return the manifest's lines, and what the search and plain samples cost.

    Raises:
        InputError: the model is a language model or cannot be sampled, or the folder holds samples already.
        RewardError: a reward does not exist, or fails on synthetic samples.
    """
    check_new(out)
    if detect_kind(use.path) != "flow":
        raise InputError(f"--search: samples of {use.path} are texts, which are not searched; take a flow model")
    with open_display(), phase("loading"):
        sampler, searcher = search_sampler(use, rows, search, batch_size)
    out.mkdir(parents=True, exist_ok=True)
    lines = write_samples(sampler, sampler.rows, out, max(1, batch_size // search.width))
    return {"samples": lines, "cost": searcher.cost, "plain_cost": searcher.plain_cost}


def read_search(
    name: str,
    width: int | None,
    rewards: Sequence[Any] | None,
    *,
    keep: int | None,
    level: float | None,
    compare_at: str | None,
    temperature: float | None,
) -> SearchUse:
    """Return the search that options ask for, None for those that are not given; raise InputError if one is wrong."""
    if not rewards:
        raise InputError("--reward: --search compares candidates by rewards, name a reward (once or more)")
    width = WIDTH if width is None else width
    if width < 2:
        raise InputError("--width: one candidate is compared with no other; take 2 or more, or leave --search away")
    of_walks = {"--level": level, "--compare-at": compare_at}
    if name not in WALKS and (given := [option for option, value in of_walks.items() if value is not None]):
        raise InputError(f"{given[0]}: best-of-n takes no stochastic steps, it is for --search beam or smc")
    if name != "beam" and keep is not None:
        raise InputError(f"--keep: {name} has none, it is for --search beam")
    if name != "smc" and temperature is not None:
        raise InputError(f"--temperature: {name} has none, it is for --search smc")
    if name == "smc" and temperature is None:
        raise InputError(
            "--temperature: smc samples by exp(reward / temperature), give one in units of the reward, such as 0.1 for "
            "rewards from 0 to 1"
        )
    if temperature is not None and not LEAST <= temperature < float("inf"):
        raise InputError(f"--temperature: {temperature:g} is not a number from {LEAST:g} on, take 0.1 say")
    if level is not None and not 0 < level <= MOST:
        raise InputError(
            f"--level: {level:g} is not above 0 and at most {MOST:g}, take {DEFAULT_LEVELS['flow_sde']} say"
        )
    if keep is not None and keep > width:
        raise InputError(f"--keep: {keep} is more than the --width {width}")
    uses = [checked(RewardUse, use, "REWARD") for use in rewards]
    if weightless := [use.use for use in uses if use.weight == 0]:
        raise InputError(
            f"--reward: the weight 0 of {weightless[0]} chooses nothing; leave the reward away, or weigh it"
        )
    return SearchUse(
        name=name,
        width=width,
        rewards=uses,
        keep=(width + 1) // 2 if keep is None else keep,
        level=DEFAULT_LEVELS["flow_sde"] if level is None else level,
        compare_at=COMPARE_AT if compare_at is None else _read_fractions(compare_at),
        temperature=temperature,
    )


def _read_fractions(written: str) -> tuple[float, ...]:
    try:
        parts = tuple(map(float, written.split(",")))
    except ValueError:
        parts = ()
    if not parts or not all(0 < part < 1 for part in parts):
        raise InputError(
            f"--compare-at: {written!r} are no fractions of the steps between 0 and 1, such as 0.25,0.5,0.75"
        )
    return parts
