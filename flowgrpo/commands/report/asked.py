"""Settings of a run for its report: model, method, rewards, seeds, and the versions that it ran with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowgrpo.commands.page_parts.folder import trained_weights
from flowgrpo.commands.page_parts.totals import name_of, watched_names
from flowgrpo.data import tables
from flowgrpo.errors import InputError
from flowgrpo.schema.readable import counted

Facts = list[tuple[str, str]]

AXES = ("tree", "kernel", "likelihood", "decoder", "credit", "baseline", "objective")


def describe_settings(config: Mapping[str, Any]) -> Facts:
    """Return the labelled main settings of a config.yaml; raise KeyError if it is not of a run."""
    if not config:
        return []
    model, train, algorithm, run = (config[key] for key in ("model", "train", "algorithm", "run"))
    axes = [f"{axis} {algorithm[axis]['name']}" for axis in AXES if "name" in algorithm.get(axis, {})]
    call = [f"{name} {value}" for name, value in model.get("call", {}).items()]
    evaluation = config["eval"]
    facts = [
        ("model", f"{model['path']}, {model['dtype']}"),
        ("weights", trained_weights(model["lora"])),
        ("call", ", ".join(call)),
        ("method", algorithm["preset"]),
        ("axes", ", ".join(axes)),
        ("clip and KL", _objective(algorithm.get("objective", {}))),
        ("rewards", ", ".join(f"{name_of(use)} × {use['weight']:g}" for use in config["rewards"])),
        ("watched only", ", ".join(watched_names(config))),
        ("prompts", f"{config['prompts']['train']}; held out {config['prompts']['eval']}"),
        ("iterations", str(train["iterations"])),
        ("batch", f"{train['groups']} prompts × {train['group_size']} samples, {counted(train['updates'], 'update')}"),
        ("learning rate", f"{train['learning_rate']:g}, {train['optimizer']['name']}"),
        (
            "held out",
            f"at most {counted(evaluation['prompts'], 'prompt')}, every {counted(evaluation['every'], 'iteration')}",
        ),
        ("seeds", f"run {run['seed']}; held-out prompt i starts from seed i"),
    ]
    return [(label, text) for label, text in facts if text]


def clips(config: Mapping[str, Any]) -> bool:
    """Return whether the objective of a run clips a ratio."""
    return "clip_range" in config.get("algorithm", {}).get("objective", {})


def _objective(objective: Mapping[str, Any]) -> str:
    kl = objective.get("kl") or {}
    parts = [f"clip range {objective['clip_range']}"] if "clip_range" in objective else []
    parts += [f"KL {kl.get('form', '')} × {kl['beta']:g}".replace("  ", " ")] if kl.get("beta") else []
    return ", ".join(parts)


def describe_environment(run: Path) -> Facts:
    """Return labelled facts of environment.json, if it exists; raise InputError if it is damaged."""
    file = run / "environment.json"
    if not file.is_file():
        return []
    environment = tables.document(file)
    try:
        commit = environment["git"]
        if commit:
            commit = commit[:12] + ", with changes that were not committed" * bool(environment["git_dirty"])
        facts = [
            ("device", f"{environment['device']}, {counted(environment['processes'], 'process')}"),
            ("python", f"{environment['python']} on {environment['platform']}"),
            ("packages", ", ".join(f"{name} {version}" for name, version in environment["versions"].items())),
            ("commit", commit),
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{file}: it is not of a run ({error!r})") from error
    return [(label, text) for label, text in facts if text]
