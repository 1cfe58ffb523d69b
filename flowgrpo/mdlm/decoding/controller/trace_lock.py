"""TraceLock (arXiv 2605.24697 and its code): a small network judges from hidden states which proposals are final.

Our readings, since the release lacks the controller's class:

 1. The frozen autoencoder of hidden states is a linear map for each layer and each difference of two layers, trained
    with the controller.
 2. The summary token's threshold is one linear map of its last state.
 3. The controller sees columns up to the last mask of the window.
 4. The decay along the window is linear in the position, and weights are normalised over the batch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding.controller.controller_files import SIZES, WEIGHTS, check_there
from flowgrpo.mdlm.decoding.controller.traces import END, OPEN, Scene, Trace, Traces, scene, window
from flowgrpo.mdlm.decoding.tokens.step import DecodeStep
from flowgrpo.mdlm.decoding.tokens.token_proposals import Proposed
from samplers.noise import generator, seed

Tensor = torch.Tensor


class Controller(torch.nn.Module):
    """A bidirectional transformer over the features of all positions, with a summary token that sets the threshold.

    For a model of 7 billion parameters the paper has width 384, 5 layers, 8 heads and 256 positions. `end_ids` are the
    tokens that end or pad an answer; `sizes` holds the constructor's arguments.
    """

    def __init__(self, hidden_size: int, *, hidden_layers: int = 3, width: int = 64, layers: int = 2, heads: int = 4,
                 positions: int = 256, end_ids: Sequence[int] = ()):  # fmt: skip
        super().__init__()
        self.sizes = {"hidden_size": hidden_size, "hidden_layers": hidden_layers, "width": width, "layers": layers,
                      "heads": heads, "positions": positions, "end_ids": list(end_ids)}  # fmt: skip
        self.hidden_layers, self.end_ids = hidden_layers, tuple(end_ids)
        change = max(width // 8, 1)
        self.parts = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.LayerNorm(hidden_size), torch.nn.Linear(hidden_size, width))
            for _ in range(hidden_layers)
        )
        self.changes = torch.nn.ModuleList(torch.nn.Linear(hidden_size, change) for _ in range(hidden_layers - 1))
        self.embed = torch.nn.Linear(hidden_layers * width + (hidden_layers - 1) * change + 1, width)
        self.state = torch.nn.Embedding(4, width)
        self.position = torch.nn.Embedding(positions, width)
        self.summary = torch.nn.Parameter(torch.zeros(width))
        layer = torch.nn.TransformerEncoderLayer(width, heads, 2 * width, 0.1, batch_first=True, norm_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.judge, self.threshold = torch.nn.Linear(width, 1), torch.nn.Linear(width, 1)

    def forward(self, scene: Scene) -> tuple[Tensor, Tensor]:
        """Return logits (B, T) that each proposal is final, relative to a threshold (B,), and the threshold."""
        hidden = [state.to(self.summary.dtype) for state in scene.hidden]
        parts = [part(state) for part, state in zip(self.parts, hidden, strict=True)]
        changes = [
            change(after - before) for change, before, after in zip(self.changes, hidden[:-1], hidden[1:], strict=True)
        ]
        features = torch.cat([*parts, *changes, scene.confidence.to(self.summary.dtype)[..., None]], dim=-1)
        generated = (scene.state > 0)[..., None]
        positions = self.position(scene.position.clamp(max=self.position.num_embeddings - 1))
        x = self.embed(features) + self.state(scene.state) + positions * generated
        x = torch.cat([self.summary.expand(len(x), 1, -1), x], dim=1)
        visible = torch.cat([torch.ones_like(scene.visible[:, :1]), scene.visible], dim=1)
        x = self.encoder(x, src_key_padding_mask=~visible)
        threshold = self.threshold(x[:, 0])[:, 0]
        return self.judge(x[:, 1:])[..., 0] - threshold[:, None], threshold

    def check_fit(self, hidden_size: int, place: str) -> None:
        """Raise InputError for a model with hidden states of another width."""
        width = self.sizes["hidden_size"]
        if width != hidden_size:
            raise InputError(
                f"{place}: it was trained on hidden states of width {width}, "
                f"those of this model have {hidden_size}; flowgrpo mdlm tracelock trains one for it"
            )


@dataclass(frozen=True)
class Learned:
    """Scorer of a trained controller; it expects greedy proposals, as in training."""

    controller: Controller
    probability: ClassVar[bool] = True

    @property
    def hidden_layers(self) -> int:
        """Number of hidden states the controller reads."""
        return self.controller.hidden_layers

    def __call__(self, step: DecodeStep, proposed: Proposed) -> Tensor:
        """Return the probability (N,) that each open proposal is final."""
        self.controller.check_fit(step.hidden[0].shape[-1], f"{step.frame.place}.scorer.controller")
        self.controller.to(step.ids.device)
        column = step.prompt + step.position
        at = step.owner, column
        proposal = step.ids.clone()
        proposal[at] = proposed.tokens
        masked = torch.zeros_like(step.attention_mask)
        masked[at] = True
        confidence = torch.ones(step.ids.shape, dtype=proposed.logits.dtype, device=step.ids.device)
        confidence[at] = proposed.logits.softmax(-1).amax(-1)
        current = scene(
            step.ids,
            step.attention_mask,
            step.prompt,
            masked=masked,
            proposal=proposal,
            confidence=confidence,
            hidden=step.hidden,
            end_ids=self.controller.end_ids,
        )
        last = torch.zeros_like(step.row).scatter_reduce(0, step.owner, column, "amax")  # as in `window`
        within = torch.arange(step.ids.shape[1], device=column.device) <= last[:, None]
        logits, _ = self.controller(replace(current, visible=current.visible & within))
        return logits[at].sigmoid()


def loss(controller: Controller, trace: Trace, length: Tensor) -> Tensor:
    """Return the weighted binary cross-entropy of the labels in a window plus 1e-3 times the mean square of the thresholds.

    `length` (B,) is the number of columns in each row's window. A negative has weight 2; the weight of a positive falls from
    1 at the start of the window to 1/2 at its end; all end proposals of a row together weigh 1.
    """
    within = window(trace.scene, length) & trace.scene.visible
    logits, threshold = controller(replace(trace.scene, visible=within))
    judged = within & (trace.scene.state >= OPEN)
    ending = judged & (trace.scene.state == END)
    first = judged.int().argmax(1, keepdim=True)
    along = (torch.arange(judged.shape[1], device=judged.device) - first).clamp(min=0) / length[:, None]
    weight = torch.where(trace.label, 1 - 0.5 * along.clamp(max=1), 2.0)
    weight = torch.where(ending, weight / ending.sum(1, keepdim=True).clamp(min=1), weight) * judged
    each = torch.nn.functional.binary_cross_entropy_with_logits(logits, trace.label.to(logits.dtype), reduction="none")
    return (weight * each).sum() / weight.sum().clamp(min=1e-8) + 1e-3 * threshold.square().mean()


def train_controller(
    controller: Controller,
    traces: Traces,
    steps: int,
    *,
    run_seed: int = 0,
    window_length: int = 128,
    learning_rate: float = 1e-4,
    after: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Train a controller in place, one trace a step, and return the losses. AdamW with weight decay 0.01.

    `run_seed` decides the order of the traces and the length of each window, drawn from a quarter of `window_length` to all
    of it. `after` is called after each step with the number of steps and the loss, with the controller in evaluation mode.
    """
    optimizer = torch.optim.AdamW(controller.parameters(), learning_rate, weight_decay=0.01)
    losses = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed(run_seed, "trace_lock", "dropout"))
        for step in range(steps):
            random = generator(run_seed, "trace_lock", step)
            trace = traces[int(random.integers(len(traces)))]
            crop = torch.from_numpy(random.uniform(0.25, 1.0, len(trace.label)))
            length = (window_length * crop).ceil().long().to(trace.label.device)
            controller.train()
            value = loss(controller, trace, length)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            losses.append(value.item())
            controller.eval()
            if after is not None:
                after(step + 1, losses[-1])
    return losses


@torch.no_grad()
def f_half(controller: Controller, traces: Traces, threshold: float = 0.99, window_length: int = 128) -> float:
    """Return the F-score with beta 1/2 of accepting proposals that score >= `threshold`; 0 if none is accepted."""
    hit = accepted = wanted = 0
    for trace in traces:
        length = torch.full((len(trace.label),), window_length, device=trace.label.device)
        within = window(trace.scene, length) & trace.scene.visible
        logits, _ = controller(replace(trace.scene, visible=within))
        judged = within & (trace.scene.state >= OPEN)
        yes = judged & (logits.sigmoid() >= threshold)
        hit += int((yes & trace.label).sum())
        accepted += int(yes.sum())
        wanted += int((judged & trace.label).sum())
    return 1.25 * hit / (accepted + 0.25 * wanted) if accepted else 0.0


def save_controller(controller: Controller, folder: Path, about: Mapping[str, Any]) -> None:
    """Write `controller.safetensors`, and `controller.json` with the sizes and `about`."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: t.cpu().contiguous() for name, t in controller.state_dict().items()}, folder / WEIGHTS)
    (folder / SIZES).write_text(json.dumps({"sizes": controller.sizes, **about}, indent=1) + "\n")


def load_controller(
    folder: str | Path, hidden_size: int | None = None, place: str = "decoder.scorer.controller"
) -> Controller:
    """Load a controller that `save_controller` wrote, in evaluation mode.

    `hidden_size` is the width of the model's hidden states; None checks it at the first step of a decode. `place` is the
    dotted key of the folder. Raises InputError if the folder holds no complete controller, or it does not fit the model.
    """
    folder = Path(folder)
    check_there(folder, place)
    try:
        controller = Controller(**json.loads((folder / SIZES).read_text())["sizes"])
        controller.load_state_dict(load_file(folder / WEIGHTS))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, AssertionError, SafetensorError) as error:
        said = " ".join(str(error).split())[:200]
        raise InputError(f"{place}: {folder} does not hold what flowgrpo mdlm tracelock writes ({said})") from None
    if hidden_size is not None:
        controller.check_fit(hidden_size, place)
    return controller.eval()
