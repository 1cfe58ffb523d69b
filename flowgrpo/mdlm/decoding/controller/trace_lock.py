"""Learned commitment: a small controller that judges, from hidden states, which proposals of a frozen model will last.

TraceLock (arXiv 2605.24697 and its code). Our readings, where the release is silent, since it lacks the controller's class:

 1. The frozen autoencoder of the hidden states is a linear map for each layer, and one for each difference of two layers,
    trained with the controller.
 2. The summary token's threshold is one linear map of its last state.
 3. What a controller sees ends with the last mask of the window.
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
    """A bidirectional transformer over the features of every position, with a summary token that sets the threshold.

    The sizes of the paper are 384 wide, 5 layers, 8 heads and 256 positions for a model of 7 billion parameters.

    Attributes:
        sizes: the arguments that it was made with.
        hidden_layers: hidden states that it takes.
        end_ids: tokens that end or fill up an answer, which it is told of.
    """

    def __init__(self, hidden_size: int, *, hidden_layers: int = 3, width: int = 64, layers: int = 2, heads: int = 4,
                 positions: int = 256, end_ids: Sequence[int] = ()):  # fmt: skip
        super().__init__()
        self.sizes = {"hidden_size": hidden_size, "hidden_layers": hidden_layers, "width": width, "layers": layers,
                      "heads": heads, "positions": positions, "end_ids": list(end_ids)}  # fmt: skip
        self.hidden_layers, self.end_ids = hidden_layers, tuple(end_ids)
        part, change = width, max(width // 8, 1)
        self.parts = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.LayerNorm(hidden_size), torch.nn.Linear(hidden_size, part))
            for _ in range(hidden_layers)
        )
        self.changes = torch.nn.ModuleList(torch.nn.Linear(hidden_size, change) for _ in range(hidden_layers - 1))
        self.embed = torch.nn.Linear(hidden_layers * part + (hidden_layers - 1) * change + 1, width)
        self.state = torch.nn.Embedding(4, width)
        self.position = torch.nn.Embedding(positions, width)
        self.summary = torch.nn.Parameter(torch.zeros(width))
        layer = torch.nn.TransformerEncoderLayer(width, heads, 2 * width, 0.1, batch_first=True, norm_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.judge, self.threshold = torch.nn.Linear(width, 1), torch.nn.Linear(width, 1)

    def forward(self, scene: Scene) -> tuple[Tensor, Tensor]:
        """Logits (B, T) of each position's proposal being final, above a threshold (B,) that is returned too."""
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
        seen = torch.cat([torch.ones_like(scene.visible[:, :1]), scene.visible], dim=1)
        x = self.encoder(x, src_key_padding_mask=~seen)
        threshold = self.threshold(x[:, 0])[:, 0]
        return self.judge(x[:, 1:])[..., 0] - threshold[:, None], threshold

    def check_fit(self, hidden_size: int, place: str) -> None:
        """Nothing, where a model's hidden states have the width that this controller takes.

        Raises:
            InputError: they have another.
        """
        own = self.sizes["hidden_size"]
        if own != hidden_size:
            raise InputError(
                f"{place}: it was trained on hidden states of width {own}, "
                f"those of this model have {hidden_size}; flowgrpo mdlm tracelock trains one for it"
            )


@dataclass(frozen=True)
class Learned:
    """The scorer of a trained controller: `scorer: {name: learned, controller: folder}` of a decoder.

    Proposals are to be the likeliest tokens, as they were in training.
    """

    controller: Controller
    probability: ClassVar[bool] = True

    @property
    def hidden_layers(self) -> int:
        """Hidden states that the controller takes."""
        return self.controller.hidden_layers

    def __call__(self, step: DecodeStep, proposed: Proposed) -> Tensor:
        """Probability (N,) that each open proposal is final.

        Raises:
            InputError: the controller was trained for another model.
        """
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
        ends = self.controller.end_ids
        made = scene(
            step.ids,
            step.attention_mask,
            step.prompt,
            masked=masked,
            proposal=proposal,
            confidence=confidence,
            hidden=step.hidden,
            end_ids=ends,
        )
        last = torch.zeros_like(step.row).scatter_reduce(0, step.owner, column, "amax")  # as `window` has it
        within = torch.arange(step.ids.shape[1], device=column.device) <= last[:, None]
        logits, _ = self.controller(replace(made, visible=made.visible & within))
        return logits[at].sigmoid()


def loss(controller: Controller, trace: Trace, length: Tensor) -> Tensor:
    """Weighted binary cross-entropy of the labels within a window, plus 1e-3 times the mean square of the thresholds.

    Negatives weigh 2; positives from 1 at the window's begin to 1/2 at its end; all proposals of the end in a row together
    weigh 1.

    Args:
        length: (B,) of each row's window.
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
    """Train a controller in place, one trace a step, in an order and with windows that the seed decides; its losses.

    Windows are cut to a quarter up to the whole of their length. AdamW with weight decay 0.01.

    Args:
        after: told of each step, how many are done and its loss, while the controller is in evaluation mode.
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
    """F-score with beta 1/2, where precision weighs twice, of accepting what scores at least a threshold.

    By it TraceLock chooses among checkpoints. 0 where nothing is accepted.
    """
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
    """Write `controller.safetensors`, and `controller.json` with its sizes and what is said `about` it."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: t.cpu().contiguous() for name, t in controller.state_dict().items()}, folder / WEIGHTS)
    (folder / SIZES).write_text(json.dumps({"sizes": controller.sizes, **about}, indent=1) + "\n")


def load_controller(
    folder: str | Path, hidden_size: int | None = None, place: str = "decoder.scorer.controller"
) -> Controller:
    """A controller that `save_controller` wrote, in evaluation mode.

    Args:
        hidden_size: width of the model's hidden states; None where it is not known yet, and the first step of a decode
            finds out whether it fits.
        place: the dotted key where the folder was written, for errors.

    Raises:
        InputError: there is none, it is not whole, or it does not fit the model.
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
