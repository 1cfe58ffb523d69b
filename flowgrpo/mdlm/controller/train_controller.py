"""Training of a TraceLock controller (arXiv 2605.24697) for a frozen model, from prompts to a folder for a decoder.

A teacher decodes the prompts. At any step of these decodes, the controller learns to tell which proposals the finished
answer holds. The state with the best F-half on held-out prompts, at the commitment threshold, is kept. To save time it
departs from the paper's 36,000 steps of 64 canvases: fewer steps of 16 canvases, a learning rate of 1e-3 instead of
1e-4, and a smaller controller for models narrower than 2,048.

    flowgrpo mdlm tracelock path/to/model --prompts prompts.txt --out controller
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from flowgrpo.data import prompts
from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding.controller.trace_lock import Controller, f_half, save_controller, train_controller
from flowgrpo.mdlm.decoding.controller.traces import Replay
from flowgrpo.mdlm.decoding.decode import Decoder, Rollout, decode
from flowgrpo.mdlm.decoding.decoders import DECODERS, build
from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor
from flowgrpo.mdlm.methods.likelihoods.answers import in_scope
from flowgrpo.mdlm.models.load import check_weights, load_positions, load_predictor, load_tokenizer
from flowgrpo.mdlm.policy import check_tokenizer, padded, tokenised
from flowgrpo.training.run.run_folder import check_writable
from rewards.compute import default_device
from samplers import noise

Tensor = torch.Tensor

BATCH = 16  # rows of a decode or a training step
HELD_OUT = 8  # one prompt in so many is held out
JUDGED = 32  # batches of held-out steps on which states of the controller are compared
JUDGEMENTS = 10  # states to compare, about
LEARNING_RATE = 1e-3
THRESHOLD = DECODERS["trace_lock"]["committer"]["threshold"]
WINDOW = DECODERS["trace_lock"]["region"]["window"]
HIDDEN_LAYERS = 3
WIDE = 2048  # models from this width on take a controller of the paper's sizes
PAPER = {"width": 384, "layers": 5, "heads": 8}
POSITIONS = 256


@dataclass(frozen=True)
class Judged:
    """F-half of a controller on held-out prompts after `step` steps; `loss` is that of the last step."""

    step: int
    loss: float
    f_half: float


@dataclass(frozen=True)
class Compared:
    """A decoder's answers to the held-out prompts, compared with the teacher's."""

    decoder: str
    evaluations: float  # mean model evaluations for an answer
    same_tokens: float  # share of the teacher's tokens, up to the end of sequence, that the decoder has too
    same_answers: float  # share of answers with all of these tokens


@dataclass(frozen=True, kw_only=True)
class Taught:
    """The result of `teach`."""

    folder: str  # of the controller
    learned: int  # number of training prompts
    held_out: int  # number of held-out prompts
    threshold: float  # score that commits a proposal
    kept: Judged  # the best state
    # Results of the teacher, of the decoder `threshold` (which learns nothing), and of `trace_lock` with this controller.
    compared: list[Compared]


def teach(
    model: str,
    source: str,
    out: Path,
    *,
    length: int = 64,
    decoder: str | Mapping[str, Any] = "low_confidence",
    prompt_count: int = 256,
    steps: int = 2000,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    variant: str | None = None,
    trust_remote_code: bool = False,
    chat: bool = False,
    watch: Callable[[Judged], None] | None = None,
) -> Taught:
    """Train a controller for a model and write it to `out`, a folder that must be empty or missing.

    Step maps give every canvas, so no hidden states are stored: each step evaluates the model on a batch of canvases.

    Args:
        source: source of the prompts, as `flowgrpo.data.prompts.load` takes it.
        length: tokens of an answer.
        decoder: decoder of the teacher.
        prompt_count: largest number of prompts; one in eight is held out.
        chat: put prompts into the tokenizer's chat template as the user's turn.
        watch: called after each evaluation of the controller, about ten times.

    Raises:
        InputError: a word, a file or a folder is wrong, or prompts and answers are too long for the model.
    """
    texts = list(dict.fromkeys(prompt.text for prompt in prompts.load(source, "--prompts")))[:prompt_count]
    if len(texts) < 2:
        raise InputError(f"--prompts: {source} has only one prompt, at least two are needed, one to judge by")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"--out {out}: exists and is not an empty folder")
    check_writable(out, "--out")
    build(decoder, length, 0)  # raises for a wrong decoder before the model is loaded
    order = [texts[i] for i in noise.generator(seed, "trace_lock", "held out").permutation(len(texts))]
    held_out = max(len(order) // HELD_OUT, 1)
    check_weights(model, variant)
    tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
    check_tokenizer(tokenizer, chat, "--chat")
    positions = load_positions(model, trust_remote_code=trust_remote_code)
    tokens = tokenised(tokenizer, order, length, chat=chat, positions=positions, key="--length")
    device, eos_id = default_device(), tokenizer.eos_token_id
    predictor, _ = load_predictor(model, dtype, device, variant=variant, trust_remote_code=trust_remote_code)
    teacher = build(decoder, length, eos_id, predictor)

    def decoded(part: str, rows: list[list[int]]) -> list[Rollout]:
        rollouts = []
        for k, (ids, mask) in enumerate(_canvases(predictor, rows)):
            addresses = [(seed, "trace_lock", part, k, row) for row in range(len(ids))]
            rollouts.append(decode(predictor, ids, teacher, addresses, attention_mask=mask, micro_batch=BATCH))
        return rollouts

    judging, learning = decoded("held out", tokens[:held_out]), decoded("learned", tokens[held_out:])
    end_ids = sorted({i for i in (eos_id, tokenizer.pad_token_id) if i is not None})
    controller, kept = _train(
        predictor, learning, judging, length=length, end_ids=end_ids, steps=steps, seed=seed, watch=watch
    )
    about = {"model": model, "decoder": decoder, "length": length, "prompts": source, "f_half": kept.f_half}
    save_controller(controller, out, about)

    spec: dict[str, Any] = {"name": "trace_lock", "scorer": {"name": "learned", "controller": str(out)}}
    if eos_id is None:
        spec["modifiers"] = []  # without an end token there is none to hold back
    others = (build(written, length, eos_id, predictor) for written in ("threshold", spec))
    compared = [
        _compare(name, predictor, judging, decoder=other, eos_id=eos_id)
        for name, other in zip(("teacher", "threshold", "trace_lock"), (None, *others), strict=True)
    ]
    learned = len(order) - held_out
    return Taught(
        folder=str(out), learned=learned, held_out=held_out, threshold=THRESHOLD, kept=kept, compared=compared
    )


def _canvases(predictor: MaskPredictor, rows: list[list[int]]) -> list[tuple[Tensor, Tensor]]:
    """Pad prompts on the left and return them with their masks; one batch per length if padding changes the logits."""
    rows = sorted(rows, key=len)
    alike = [rows] if predictor.padded_form is not None else [list(group) for _, group in groupby(rows, len)]
    return [padded(predictor, group) for group in alike]


def _train(
    predictor: MaskPredictor,
    learning: Sequence[Rollout],
    judging: Sequence[Rollout],
    *,
    length: int,
    end_ids: Sequence[int],
    steps: int,
    seed: int,
    watch: Callable[[Judged], None] | None,
) -> tuple[Controller, Judged]:
    """Train a controller; return it in its best state (the last of equals) with the result of that state."""
    lessons = Replay(predictor, learning, batch=BATCH, layers=HIDDEN_LAYERS, end_ids=end_ids, run_seed=seed)
    exam = Replay(predictor, judging, batch=BATCH, layers=HIDDEN_LAYERS, end_ids=end_ids, run_seed=seed, most=JUDGED)
    hidden_size = lessons[0].scene.hidden[0].shape[-1]
    window = min(WINDOW, length)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(noise.seed(seed, "trace_lock", "weights"))
        sizes = PAPER if hidden_size >= WIDE else {}
        controller = Controller(
            hidden_size, hidden_layers=HIDDEN_LAYERS, positions=max(POSITIONS, length), end_ids=end_ids, **sizes
        )
    controller.to(predictor.device)
    every = max(steps // JUDGEMENTS, 1)
    best: list[tuple[Judged, dict[str, Tensor]]] = []

    def judge(done: int, loss: float) -> None:
        if done % every and done != steps:
            return
        judged = Judged(done, loss, f_half(controller, exam, THRESHOLD, window))
        if not best or judged.f_half >= best[-1][0].f_half:
            best[:] = [(judged, copy.deepcopy(controller.state_dict()))]
        if watch is not None:
            watch(judged)

    train_controller(
        controller, lessons, steps, run_seed=seed, window_length=window, learning_rate=LEARNING_RATE, after=judge
    )
    kept, state = best[-1]
    controller.load_state_dict(state)
    return controller, kept


def _compare(
    name: str, predictor: MaskPredictor, teacher: Sequence[Rollout], *, decoder: Decoder | None, eos_id: int | None
) -> Compared:
    """Compare the answers of a decoder with the teacher's; None stands for the teacher itself."""
    evaluations, same_tokens, tokens, same_rows = 0, [], [], []
    for target in teacher:
        ids, mask = target.ids[:, : target.prompt], target.attention_mask[:, : target.prompt]
        other = target if decoder is None else decode(predictor, ids, decoder, attention_mask=mask, micro_batch=BATCH)
        scope = in_scope(target.completion, -1 if eos_id is None else eos_id, "eos")
        same = other.completion == target.completion
        evaluations += int(other.nfe.sum())
        same_tokens.append((same & scope).sum())
        tokens.append(scope.sum())
        same_rows.append((same | ~scope).all(1))
    rows = torch.cat(same_rows).double()
    return Compared(name, evaluations / len(rows), float(sum(same_tokens) / sum(tokens)), float(rows.mean()))
