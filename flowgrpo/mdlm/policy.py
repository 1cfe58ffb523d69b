"""The policy of texts: a model that answers prompts, with its tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding.decode import Decoder, Rollout, decode
from flowgrpo.mdlm.decoding.decoders import build
from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor
from flowgrpo.training.reports.samples import Text
from samplers.noise import Address

Tensor = torch.Tensor


@dataclass(frozen=True)
class Completions:
    """Decoded completions of B prompts, and their texts up to the end."""

    rollout: Rollout
    texts: list[str]


def tokenised(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], chat: bool) -> list[list[int]]:
    """Return the tokens of prompts; with `chat` in the tokenizer's chat template, as the user's turn."""
    if not chat:
        return tokenizer(list(texts)).input_ids
    turns = [[{"role": "user", "content": text}] for text in texts]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True).input_ids


def check_room(predictor: MaskPredictor, rows: Sequence[Sequence[int]], length: int, place: str) -> None:
    """Raise InputError, naming `place`, if the longest prompt and an answer do not fit into the model."""
    longest = max(map(len, rows))
    most = getattr(getattr(predictor.model, "config", None), "max_position_embeddings", None)
    if most is not None and longest + length > most:
        raise InputError(
            f"{place}: a prompt of {longest} tokens and {length} of an answer are more than the {most} positions of the "
            f"model, take at most {max(most - longest, 0)}"
        )


def padded(predictor: MaskPredictor, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return prompts (B, P), padded on the left, and their mask (B, P) bool."""
    width = max(map(len, rows))
    fill = predictor.mask_id if predictor.pad_id is None else predictor.pad_id  # without one there is no padding
    ids = torch.tensor([[fill] * (width - len(row)) + list(row) for row in rows], device=predictor.device)
    lengths = torch.tensor([len(row) for row in rows], device=predictor.device)
    return ids, torch.arange(width, device=predictor.device) >= width - lengths[:, None]


class TextPolicy:
    """A predictor of masked tokens that answers prompts with `length` tokens.

    With `chat` a prompt is put into the tokenizer's chat template, as the user's turn. Raises InputError if the tokenizer
    has no end of sequence, or no chat template where one is wanted.
    """

    def __init__(self, predictor: MaskPredictor, tokenizer: PreTrainedTokenizerBase, length: int, chat: bool = False):
        self.predictor, self.tokenizer, self.length, self.chat = predictor, tokenizer, length, chat
        if tokenizer.eos_token_id is None:
            raise InputError("model.path: its tokenizer has no end-of-sequence token")
        if chat and not tokenizer.chat_template:
            raise InputError("model.chat: the tokenizer has no chat template")

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.predictor.device

    @property
    def evaluations(self) -> int:
        """Rows that the model was called with so far."""
        return self.predictor.evaluations

    @evaluations.setter
    def evaluations(self, count: int) -> None:
        self.predictor.evaluations = count

    @property
    def eos_id(self) -> int:
        """The token that ends an answer and fills the rest of its canvas."""
        return self.tokenizer.eos_token_id

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text, without special ones."""
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def prompts(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return prompts (B, P) padded on the left, and their mask (B, P) bool.

        Raises InputError if one has no tokens, or leaves no room for its answer.
        """
        rows = tokenised(self.tokenizer, texts, self.chat)
        if not all(rows):
            raise InputError("prompts: one of them has no tokens")
        check_room(self.predictor, rows, self.length, "model.length")
        return padded(self.predictor, rows)

    def generate(
        self,
        texts: Sequence[str],
        decoder: Decoder,
        seeds: Sequence[Address],
        micro_batch: int,
        *,
        fixed: Tensor | None = None,
    ) -> Completions:
        """Complete prompts; arguments as of `flowgrpo.mdlm.decoding.decode.decode`."""
        ids, mask = self.prompts(texts)
        rollout = decode(self.predictor, ids, decoder, seeds, attention_mask=mask, fixed=fixed, micro_batch=micro_batch)
        return Completions(rollout, self.texts(rollout.completion))

    write = generate  # what model cards of earlier exports call

    def texts(self, completion: Tensor) -> list[str]:
        """Return the texts of completions (B, L), up to their first end and without special tokens."""
        rows = [row[: row.index(self.eos_id)] if self.eos_id in row else row for row in completion.tolist()]
        return self.tokenizer.batch_decode(rows, skip_special_tokens=True)

    def as_samples(self, completions: Completions) -> list[Text]:
        """Return completions as samples: their texts, tokens and the step of each token."""
        rollout = completions.rollout
        tokens = [[self.tokenizer.decode([token]) for token in row] for row in rollout.completion.tolist()]
        return [Text(*parts) for parts in zip(completions.texts, tokens, rollout.step_map.tolist(), strict=True)]

    def sample(self, prompts: Sequence[str], seed: int = 0, decoder: str | dict = "low_confidence") -> list[str]:
        """Answer prompts, prompt i with seed + i; `decoder` as of `flowgrpo.mdlm.decoding.decoders.build`."""
        built = build(decoder, self.length, self.eos_id, self.predictor)
        return self.generate(prompts, built, [(seed + i,) for i in range(len(prompts))], len(prompts)).texts
