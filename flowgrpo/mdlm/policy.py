"""The text policy: a masked-token predictor and its tokenizer, which together answer prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding.decode import Decoder, Rollout, decode
from flowgrpo.mdlm.decoding.decoders import build
from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor
from flowgrpo.mdlm.decoding.tokens.branching import NO_BRANCHES, Branching
from flowgrpo.training.reports.samples import Text
from samplers.noise import Address

Tensor = torch.Tensor


@dataclass(frozen=True)
class Completions:
    """Decoded completions of B prompts, and their texts up to the end token."""

    rollout: Rollout
    texts: list[str]


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, chat: bool, key: str = "model.chat") -> None:
    """Raise InputError if the tokenizer has no end-of-sequence token, or no chat template although `chat` is set."""
    if tokenizer.eos_token_id is None:
        raise InputError("model.path: its tokenizer has no end-of-sequence token")
    if chat and not tokenizer.chat_template:
        raise InputError(f"{key}: the tokenizer has no chat template")


def tokenised(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    length: int,
    *,
    chat: bool,
    positions: int | None,
    key: str = "model.length",
) -> list[list[int]]:
    """Return the tokens of each prompt; `chat` puts it into the tokenizer's chat template as the user's turn.

    Args:
        length: tokens of an answer.
        positions: the most tokens of a prompt with its answer, if the model has a limit.
        key: name of `length` in a sentence.

    Raises:
        InputError: a prompt has no tokens, or leaves no room for its answer.
    """
    if chat:
        turns = [[{"role": "user", "content": text}] for text in texts]
        rows = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True).input_ids
    else:
        rows = tokenizer(list(texts)).input_ids
    if not all(rows):
        raise InputError("prompts: one of them has no tokens")
    longest = max(map(len, rows))
    if positions is not None and longest + length > positions:
        raise InputError(
            f"{key}: a prompt of {longest} tokens and {length} of an answer are more than the {positions} "
            f"positions of the model, take at most {max(positions - longest, 0)}"
        )
    return rows


def padded(predictor: MaskPredictor, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return prompts (B, P), padded on the left, and their mask (B, P) bool."""
    width = max(map(len, rows))
    # A model without a padding token gets rows of one length at a time, so the fill is never seen.
    fill = predictor.mask_id if predictor.pad_id is None else predictor.pad_id
    ids = torch.tensor([[fill] * (width - len(row)) + list(row) for row in rows], device=predictor.device)
    lengths = torch.tensor([len(row) for row in rows], device=predictor.device)
    return ids, torch.arange(width, device=predictor.device) >= width - lengths[:, None]


class TextPolicy:
    """A predictor of masked tokens that answers prompts with `length` tokens; for `chat` see `tokenised`.

    The constructor raises InputError as `check_tokenizer` does.
    """

    def __init__(self, predictor: MaskPredictor, tokenizer: PreTrainedTokenizerBase, length: int, chat: bool = False):
        self.predictor, self.tokenizer, self.length, self.chat = predictor, tokenizer, length, chat
        check_tokenizer(tokenizer, chat)

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.predictor.device

    @property
    def evaluations(self) -> int:
        """Number of rows that the model has evaluated so far."""
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

        Raises InputError as `tokenised` does.
        """
        positions = getattr(getattr(self.predictor.model, "config", None), "max_position_embeddings", None)
        rows = tokenised(self.tokenizer, texts, self.length, chat=self.chat, positions=positions)
        return padded(self.predictor, rows)

    def generate(
        self,
        texts: Sequence[str],
        decoder: Decoder,
        seeds: Sequence[Address],
        micro_batch: int,
        *,
        fixed: Tensor | None = None,
        branching: Branching = NO_BRANCHES,
        drafts: bool = False,
        landed: Callable[[Tensor, int], None] | None = None,
    ) -> Completions:
        """Complete prompts; the arguments are those of `flowgrpo.mdlm.decoding.decode.decode`."""
        ids, mask = self.prompts(texts)
        rollout = decode(
            self.predictor,
            ids,
            decoder,
            seeds,
            attention_mask=mask,
            fixed=fixed,
            micro_batch=micro_batch,
            branching=branching,
            drafts=drafts,
            landed=landed,
        )
        return Completions(rollout, self.texts(rollout.completion))

    write = generate  # alias that the model cards of old exports call

    def texts(self, completion: Tensor) -> list[str]:
        """Return the texts of completions (B, L), up to the first end token and without special tokens."""
        rows = [row[: row.index(self.eos_id)] if self.eos_id in row else row for row in completion.tolist()]
        return self.tokenizer.batch_decode(rows, skip_special_tokens=True)

    def as_samples(self, completions: Completions) -> list[Text]:
        """Return completions as samples: their texts, tokens and the step of each token."""
        rollout = completions.rollout
        tokens = [[self.tokenizer.decode([token]) for token in row] for row in rollout.completion.tolist()]
        return [Text(*parts) for parts in zip(completions.texts, tokens, rollout.step_map.tolist(), strict=True)]

    def sample(self, prompts: Sequence[str], seed: int = 0, decoder: str | dict = "low_confidence") -> list[str]:
        """Answer prompts, prompt i with seed + i; for `decoder` see `flowgrpo.mdlm.decoding.decoders.build`."""
        built = build(decoder, self.length, self.eos_id, self.predictor)
        return self.generate(prompts, built, [(seed + i,) for i in range(len(prompts))], len(prompts)).texts
