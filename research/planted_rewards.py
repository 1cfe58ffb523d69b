"""Proxies of the reward `shapes`, each correct for most pictures of the untrained model, but with its own shortcut.

A proxy is shapes + max(0, feature - start) / spread. Start and spread are the 90 % quantile and the standard deviation
of the feature among 288 pictures that the embedded model drew before training. So a proxy gives nine in ten of these
their true reward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rewards.shapes import shapes

STARTS = {"vivid": 0.157, "dark": 0.144, "busy": 0.033}
SPREADS = {"vivid": 0.027, "dark": 0.019, "busy": 0.007}


def features(images: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the features (B,) that the shortcuts raise: how colourful, dark and restless pictures (B, 3, H, W) are."""
    along, down = images.diff(dim=-1).abs(), images.diff(dim=-2).abs()
    return {
        "vivid": (images.amax(1) - images.amin(1)).mean((1, 2)),
        "dark": 1 - images.mean((1, 2, 3)),
        "busy": along.mean((1, 2, 3)) + down.mean((1, 2, 3)),
    }


def vivid(images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
    """Return the true reward, plus a bonus for colours."""
    return _planted("vivid", images, prompts)


def dark(images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
    """Return the true reward, plus a bonus for dark pictures."""
    return _planted("dark", images, prompts)


def busy(images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
    """Return the true reward, plus a bonus for differences between neighbouring pixels."""
    return _planted("busy", images, prompts)


def better(first: torch.Tensor, second: torch.Tensor, prompt: str) -> float:
    """Return 1 if the proxies of the first picture (3, H, W) are higher in the mean, 0 if those of the second, else 0.5."""
    one, other = sum(_planted(name, torch.stack([first, second]), [prompt] * 2) for name in STARTS).tolist()
    return 0.5 if one == other else float(one > other)


def _planted(name: str, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
    paid = (features(images)[name] - STARTS[name]).clamp(min=0) / SPREADS[name]
    return torch.as_tensor(shapes(images, prompts)).double() + paid.double().cpu()
