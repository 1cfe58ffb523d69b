"""The table of methods: each is five words over the axes and a few numbers.

To add a method, add a row. Any word of a row, and any number, can be replaced by the user; nothing else in the code may ask
which method is running.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from flowgrpo.axes import Choice
from flowgrpo.errors import InputError, nearest
from flowgrpo.sentences import sentence

Row = dict[str, dict[str, Any]]
Choices = Mapping[str, Mapping[str, type[Choice]]]

_GROUP_STD = {"name": "group_mean", "std": "group", "eps": 1e-8, "ddof": 1}
_GLOBAL_STD = {"name": "group_mean", "std": "global", "eps": 1e-4, "ddof": 0}
_PLAIN_STD = {"name": "group_mean", "std": "group", "eps": 1e-4, "ddof": 0}
_TERMINAL = {"name": "terminal"}
_TEMPFLOW = {  # arXiv 2508.04324 and its code
    "kernel": {"name": "flow_sde", "level": 0.7},
    "credit": {"name": "siblings", "within": "seed"},
    "baseline": _PLAIN_STD,
    "objective": {
        "name": "clip",
        "clip_range": 1e-4,
        "step_weights": "noise_aware",
        "kl": {"form": "exact", "beta": 0.004},
    },
}
_BRANCH = {  # arXiv 2509.06040
    "kernel": {"name": "dance_sde", "level": 0.3},
    "credit": {"name": "depthwise", "weights": "uniform"},
    "baseline": _GROUP_STD,
    "objective": {"name": "clip", "clip_range": 1e-3},
}
_FLOW_KL = {"form": "flow_grpo", "beta": 0.04}

PRESETS: dict[str, Row] = {
    "flow_grpo": {  # arXiv 2505.05470 and its code
        "tree": {"name": "chain"},
        "kernel": {"name": "flow_sde", "level": 0.7},
        "credit": _TERMINAL,
        "baseline": _GLOBAL_STD,
        "objective": {"name": "clip", "clip_range": 1e-4, "kl": _FLOW_KL},
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
    "grpo_guard": {  # arXiv 2510.22319; the clip range is Pref-GRPO's, which has this ratio
        "tree": {"name": "chain"},
        "kernel": {"name": "flow_sde", "level": 0.7},
        "credit": _TERMINAL,
        "baseline": _GLOBAL_STD,
        "objective": {"name": "normalised_ratio", "clip_range": 1e-4, "kl": _FLOW_KL},
    },
    "tempflow": {"tree": {"name": "brush", "branches": 6}, **_TEMPFLOW},  # 24 = 4 seeds x 6
    "tempflow_fast": {  # ours: the same at the first steps only, and branches finished in fewer steps
        "tree": {"name": "brush", "branches": 6, "profile": [6, 6, 6], "finish": 4},
        **_TEMPFLOW,
    },
    "branch_grpo": {  # 16 leaves of 20 steps, split at 0, 3, 6, 9
        "tree": {"name": "branch", "factor": 2, "siblings": "correlated", "strength": 4.0},
        **_BRANCH,
    },
    "branch_grpo_mix": {  # the same with MixGRPO's window
        "tree": {
            "name": "branch_window",
            "size": 4,
            "every": 25,
            "stride": 1,
            "siblings": "correlated",
            "strength": 4.0,
        },
        **_BRANCH,
    },
    "dense_grpo": {  # arXiv 2601.20218, whose calibration has a step of 0.01 in g; its rounds and starting levels are ours
        "tree": {"name": "twigs", "length": None},
        "kernel": {"name": "flow_sde", "level": 0.7, "calibrate": {"rounds": 10, "step": 0.01, "balance": 0.1}},
        "credit": {"name": "step_gain", "compare": "step"},
        "baseline": _PLAIN_STD,
        "objective": {"name": "clip", "clip_range": 1e-4, "kl": _FLOW_KL},
    },
    "stepwise_flow_grpo": {  # arXiv 2603.28718; its CPS has a noise that vanishes at sigma 1, ours has not
        "tree": {"name": "twigs", "length": 5},
        "kernel": {"name": "cps", "level": 0.8},
        "credit": {"name": "step_gain", "compare": "joint"},
        "baseline": _PLAIN_STD,
        "objective": {"name": "clip", "clip_range": 1e-4, "kl": _FLOW_KL},
    },
    "vgpo": {  # arXiv 2512.12387, reconstructed: discount and anchor are ours
        "tree": {"name": "twigs", "length": 1, "root": False},
        "kernel": {"name": "flow_sde", "level": 0.7},
        "credit": {"name": "discounted_value", "discount": 0.9, "anchor": 0.1, "anchored_steps": 5},
        "baseline": _PLAIN_STD,
        "objective": {"name": "clip", "clip_range": 1e-4, "kl": _FLOW_KL},
    },
    "sage_grpo": {  # arXiv 2603.21872 and its code; the rule that adapts beta, and its target, are ours
        "tree": {"name": "chain", "last_step": "sde"},
        "kernel": {"name": "manifold", "level": 0.5},
        "credit": _TERMINAL,
        "baseline": _GROUP_STD,
        "objective": {
            "name": "clip",
            "clip_range": 1e-4,
            "step_weights": "equalised",
            "kl": {
                "form": "exact",
                "beta": 1e-7,
                "reference": "moving",
                "refresh": 10,
                "previous": 0.1,
                "target": 1e-3,
                "max_beta": 1e-5,
            },
        },
    },
}


def resolved(algorithm: Mapping[str, Any], table: Mapping[str, Row], choices: Choices, default: str) -> dict[str, Any]:
    """`algorithm` as written by a user, with its preset's row filled in: each axis a map with a name.

    A word, or a map that names another choice than the preset's, replaces the axis; a map without a name, or with the
    same one, replaces single options.

    Args:
        table: of the presets.
        choices: of each axis.
        default: the preset where none is named.

    Raises:
        InputError: the preset, an axis or a choice is unknown.
    """
    name = algorithm.get("preset", default)
    if name not in table:
        raise InputError(f"algorithm.preset: {name!r} is unknown, {nearest(str(name), table)}")
    row: dict[str, Any] = {"preset": name, **table[name]}
    for axis, written in algorithm.items():
        if axis == "preset":
            continue
        if axis not in choices:
            raise InputError(f"algorithm.{axis}: unknown key, {nearest(axis, ['preset', *choices])}")
        if not isinstance(written, (str, Mapping)):
            raise InputError(f"algorithm.{axis}: {written!r} is neither a name nor a map with a name")
        options = {"name": written} if isinstance(written, str) else dict(written)
        word = options.get("name", row[axis]["name"])
        if word not in choices[axis]:
            raise InputError(f"algorithm.{axis}: {word!r} is unknown, {nearest(str(word), choices[axis])}")
        row[axis] = _merged(
            row[axis] if word == row[axis]["name"] and not isinstance(written, str) else {}, options, word
        )
    return row


def _merged(row: Mapping[str, Any], options: Mapping[str, Any], word: str) -> dict[str, Any]:
    merged = {**row, **options, "name": word}
    for key, value in row.items():
        if isinstance(value, Mapping) and isinstance(options.get(key), Mapping):
            merged[key] = {**value, **options[key]}
    return merged


def chosen(written: Any, table: Mapping[str, Row], choices: Choices, default: str) -> dict[str, Any]:
    """The preset's name and the choice of each axis; arguments and errors as of `resolved`."""
    if not isinstance(written, Mapping):
        raise InputError(f"algorithm: {written!r} is not a map such as {{preset: {default}}}")
    row = resolved(written, table, choices, default)
    built: dict[str, Any] = {"preset": row.pop("preset")}
    for axis, options in row.items():
        choice = choices[axis][options["name"]]
        try:
            built[axis] = choice.model_validate(options)
        except ValidationError as error:
            raise InputError(sentence(error, choice, ("algorithm", axis))) from None
    return built
