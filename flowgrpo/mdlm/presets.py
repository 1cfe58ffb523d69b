"""The table of methods for masked-diffusion language models: words over the axes of `flowgrpo.mdlm.axes`, and numbers.

To add a method, add a row. Numbers of the loop (passes, groups, learning rate) are no part of a method here; what the papers
took is in docs/mdlm.md.
"""

from __future__ import annotations

from typing import Any

from flowgrpo.presets import Row

Options = dict[str, Any]

_MEAN = {"name": "group_mean", "std": "none"}
_STD = {"name": "group_mean", "std": "group", "eps": 1e-4, "ddof": 0}
_LEAVE_ONE_OUT = {"name": "leave_one_out"}


def _row(
    likelihood: Options,
    objective: Options,
    aggregation: str,
    baseline: Options,
    decoder: str | Options = "low_confidence",
    schedule: Options | None = None,
    hints: Options | None = None,
) -> Row:
    return {
        "decoder": {"name": decoder} if isinstance(decoder, str) else decoder,
        "schedule": schedule or {"name": "none"},
        "hints": hints or {"name": "none"},
        "likelihood": likelihood,
        "baseline": baseline,
        "objective": objective,
        "aggregation": {"name": aggregation},
    }


PRESETS: dict[str, Row] = {
    "diffu_grpo": _row(  # arXiv 2504.12216
        {"name": "one_step", "prompt_rate": 0.15},
        {"name": "token_ratio", "clip_range": 0.5, "kl": {"form": "k3", "beta": 0.04}},
        "token_mean",
        _MEAN,
    ),
    "diffu_grpo_fast": _row(  # ours: the same without masks in the prompt and without a reference; one evaluation an answer
        {"name": "one_step", "prompt_rate": 0.0},
        {"name": "token_ratio", "clip_range": 0.5},
        "token_mean",
        _STD,
    ),
    "coupled_grpo": _row(  # arXiv 2506.20639, with the released weights
        {"name": "coupled"},
        {"name": "token_ratio", "clip_range": 0.5, "kl": {"form": "k3", "beta": 0.01}},
        "token_mean",
        _LEAVE_ONE_OUT,
        "entropy",
    ),
    "gdpo": _row(  # arXiv 2510.08554, at weight L / k and with the normalised ratio of NeMo-RL's recipe
        {"name": "quadrature", "nodes": 3},
        {"name": "sequence_ratio"},
        "sequence_mean",
        _MEAN,
    ),
    "bgpo": _row(  # arXiv 2510.11683, which has 16 draws
        {"name": "monte_carlo", "masks": "exact_k", "draws": 16},
        {"name": "linear_bound"},
        "sequence_mean",
        _STD,
    ),
    "cj_grpo": _row(  # arXiv 2509.23924
        {"name": "trajectory"},
        {"name": "token_ratio", "clip_range": 0.5, "kl": {"form": "k3", "beta": 0.04}},
        "step_mean",
        _MEAN,
    ),
    "just_grpo": _row(  # arXiv 2601.15165
        {"name": "autoregressive", "scope": "canvas"},
        {"name": "token_ratio", "clip_range": 0.2},
        "fixed_length",
        _STD,
        "left_to_right",
    ),
    "igpo": _row(  # arXiv 2509.10396
        {"name": "one_step", "prompt_rate": 0.0},
        {"name": "sequence_ratio", "clip_range": 0.2, "kl": {"form": "k3", "beta": 0.01}},
        "sequence_mean",
        _MEAN,
        hints={"name": "inpainting"},
    ),
    "spg": _row(  # arXiv 2510.09541
        {"name": "blocks", "draws": 2},
        {"name": "sandwich", "beta": 1.5, "mix": 0.5},
        "token_mean",
        _MEAN,
    ),
    "trace_rl": _row(  # arXiv 2509.06949, without its value model; the baseline is ours
        {"name": "trajectory", "shrink": 8},
        {"name": "token_ratio", "clip_range": 0.2, "kl": {"form": "k3", "beta": 0.01, "target": "old"}},
        "sequence_mean",
        _STD,
        {"name": "threshold", "committer": {"threshold": 0.95}},
    ),
    "co_grpo": _row(  # arXiv 2512.22288, reconstructed
        {"name": "trajectory"},
        {"name": "token_ratio", "clip_range": 0.2},
        "token_mean",
        _STD,
        "scheduled",
        schedule={"name": "learned"},
    ),
}
