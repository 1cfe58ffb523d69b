"""The table of methods: each is five words over the axes and a few numbers.

To add a method, add a row. Any word of a row, and any number, can be replaced by the user; nothing else in the code may ask
which method is running.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowgrpo.axes import CHOICES, Choice
from flowgrpo.errors import InputError, nearest

Row = dict[str, dict[str, Any]]

_GROUP_STD = {"name": "group_mean", "std": "group", "eps": 1e-8, "ddof": 1}
_GLOBAL_STD = {"name": "group_mean", "std": "global", "eps": 1e-4, "ddof": 0}
_TERMINAL = {"name": "terminal"}

PRESETS: dict[str, Row] = {
    "flow_grpo": {  # arXiv 2505.05470 and its code
        "tree": {"name": "chain"},
        "kernel": {"name": "flow_sde", "level": 0.7},
        "credit": _TERMINAL,
        "baseline": _GLOBAL_STD,
        "objective": {"name": "clip", "clip_range": 1e-4, "kl": {"form": "flow_grpo", "beta": 0.04}},
    },
    "flow_grpo_fast": {  # the same code's fast form: a random window in the noisy half, a small clip, no KL
        "tree": {"name": "window", "size": 3, "move": "random"},
        "kernel": {"name": "flow_sde", "level": 0.8},
        "credit": _TERMINAL,
        "baseline": _GLOBAL_STD,
        "objective": {"name": "clip", "clip_range": 1e-5},
    },
    "mix_grpo": {  # arXiv 2507.21802
        "tree": {"name": "window", "size": 4, "move": "sliding", "every": 25, "stride": 1, "start": "shared"},
        "kernel": {"name": "flow_sde", "level": 0.7},
        "credit": _TERMINAL,
        "baseline": _GROUP_STD,
        "objective": {"name": "clip", "clip_range": 1e-4},
    },
    "dance_grpo": {  # arXiv 2505.07818
        "tree": {"name": "chain", "start": "shared", "train_fraction": 0.6},
        "kernel": {"name": "dance_sde", "level": 0.3},
        "credit": _TERMINAL,
        "baseline": _GROUP_STD,
        "objective": {"name": "clip", "clip_range": 1e-4},
    },
}


def resolved(algorithm: Mapping[str, Any]) -> dict[str, Any]:
    """`algorithm` as written by a user, with its preset's row filled in: each axis a map with a name.

    A word, or a map that names another choice than the preset's, replaces the axis; a map without a name, or with the
    same one, replaces single options.

    Raises:
        InputError: the preset, an axis or a choice is unknown.
    """
    name = algorithm.get("preset", "flow_grpo")
    if name not in PRESETS:
        raise InputError(f"algorithm.preset: {name!r} is unknown, {nearest(str(name), PRESETS)}")
    row: dict[str, Any] = {"preset": name, **PRESETS[name]}
    for axis, chosen in algorithm.items():
        if axis == "preset":
            continue
        if axis not in CHOICES:
            raise InputError(f"algorithm.{axis}: unknown key, {nearest(axis, ['preset', *CHOICES])}")
        if not isinstance(chosen, (str, Mapping)):
            raise InputError(f"algorithm.{axis}: {chosen!r} is neither a name nor a map with a name")
        options = {"name": chosen} if isinstance(chosen, str) else dict(chosen)
        word = options.get("name", row[axis]["name"])
        if word not in CHOICES[axis]:
            raise InputError(f"algorithm.{axis}: {word!r} is unknown, {nearest(str(word), CHOICES[axis])}")
        row[axis] = _merged(
            row[axis] if word == row[axis]["name"] and not isinstance(chosen, str) else {}, options, word
        )
    return row


def _merged(row: Mapping[str, Any], options: Mapping[str, Any], word: str) -> dict[str, Any]:
    merged = {**row, **options, "name": word}
    for key, value in row.items():
        if isinstance(value, Mapping) and isinstance(options.get(key), Mapping):
            merged[key] = {**value, **options[key]}
    return merged


def build(axis: str, options: Mapping[str, Any]) -> Choice:
    """The choice of an axis from a map that `resolved` returned; pydantic's error if an option is wrong."""
    return CHOICES[axis][options["name"]].model_validate(dict(options))
