"""Rewards of written text: `ocr` reads pictures, `video_ocr` reads frames of videos.

1 minus the edit distance between what is read and what the prompt asks for, over the length of what is asked, not below 0
(Flow-GRPO, arXiv 2505.05470). As in its code, white space and case do not count and asked text that stands whole among other
text earns 1. Differences from that code: every quoted part is asked for, not only the first; PP-OCRv6 by `rapidocr` on
onnxruntime in place of PaddleOCR; signs that look alike are one sign; boxes are put in reading order whatever their tilt; a
video's frames without text count as 0.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from rewards.base import RewardError
from rewards.image import check_images
from rewards.video import check_videos

LONGEST = 10_000  # characters that are compared
_OPENING = re.compile('["„“«「]')
_CLOSING = {
    sign: re.compile(f"[{ends}]") for sign, ends in (('"', '"'), ("„", "“”"), ("“", "”"), ("«", "»"), ("「", "」"))
}
_ALIKE = str.maketrans("‘’‛`´“”„«»‐‑‒–—−", "'''''" + '"""""' + "------")


def asked_text(prompt: str, text: Any = None) -> str | None:
    """What a picture is asked to say: the column `text` if there is one, otherwise all quoted parts of the prompt in order.

    Quotes are "…", “…”, „…“, «…» and 「…」; single ones are not, they are apostrophes too often.

    Returns:
        None where nothing is asked for.
    """
    if text is None:
        text = " ".join(_quoted(prompt))
    return str(text) if normalised(str(text)) else None


def _quoted(prompt: str) -> Iterator[str]:
    """What stands in quotes, from left to right, in one pass: a sign that is closed nowhere is looked up once."""
    at, unclosed = 0, set()
    while opening := _OPENING.search(prompt, at):
        sign, at = opening[0], opening.end()
        closing = None if sign in unclosed else _CLOSING[sign].search(prompt, at)
        if closing is None:
            unclosed.add(sign)
        elif closing.start() > at:
            yield prompt[at : closing.start()]
            at = closing.end()


def normalised(text: str) -> str:
    """Text as it is compared: without white space and case, signs that look alike made one, punctuation kept.

    Of a text of more than `LONGEST` characters the rest does not count; no picture shows so many.
    """
    return "".join(unicodedata.normalize("NFKC", text[:LONGEST].translate(_ALIKE)).casefold().split())


def similarity(read: str, asked: str, substring: bool = True) -> float:
    """max(0, 1 - edit distance / length of what is asked), both normalised; in [0, 1].

    Args:
        substring: text that is asked for and stands whole among other text earns 1 (Flow-GRPO's code; its paper has the edit
            distance alone).
    """
    read, asked = normalised(read), normalised(asked)
    if substring and asked in read:
        return 1.0
    return max(0.0, 1 - edit_distance(read, asked) / len(asked))


def edit_distance(a: str, b: str) -> int:
    """The least number of letters to insert, delete or replace that makes `b` of `a` (Levenshtein).

    A column of the table at a time, as differences of neighbours in the bits of integers (Myers 1999, as Hyyrö 2003 has it):
    two texts of `LONGEST` characters take 30 ms.
    """
    a, b = sorted((a, b), key=len)
    whole, places = (1 << len(b)) - 1, dict.fromkeys(b, 0)
    for i, letter in enumerate(b):
        places[letter] |= 1 << i
    distance, more, less = len(b), whole, 0  # where the next letter of `b` costs one more, one less
    for letter in a:
        equal = places.get(letter, 0)
        diagonal = (((equal & more) + more) ^ more) | equal | less
        right_more, right_less = less | (whole & ~(diagonal | more)), diagonal & more
        distance += (right_more >> (len(b) - 1)) - (right_less >> (len(b) - 1))
        right_more, right_less = right_more << 1 | 1, right_less << 1
        more, less = whole & (right_less | ~(diagonal | right_more)), whole & right_more & diagonal
    return distance


def reading_order(boxes: np.ndarray) -> np.ndarray:
    """Order of boxes of text as one reads them: lines from top to bottom, each from left to right, their common tilt undone.

    Args:
        boxes: float (N, 4, 2), N >= 1, corners (x, y) clockwise from the upper left one.

    Returns:
        int (N,), a permutation.
    """
    along = (boxes[:, 1] - boxes[:, 0]).sum(0)
    along = along / np.linalg.norm(along)
    centres, heights = boxes.mean(1), np.linalg.norm(boxes[:, 3] - boxes[:, 0], axis=1)
    x, y = centres @ along, centres @ np.array([-along[1], along[0]])
    down = y.argsort()
    next_line = np.diff(y[down]) > np.minimum(heights[down][1:], heights[down][:-1]) / 2
    return down[np.lexsort((x[down], np.concatenate([[0], next_line.cumsum()])))]


class Ocr:
    """How well pictures say what their prompts quote, 0 to 1; None where a prompt asks for no text.

    The text is the column `text` or whatever stands in double quotes in the prompt. White space and case do not count,
    punctuation does. Traps: a text that is repeated all over the picture earns 1 as well (not with substring: false), and so
    does, mostly, one that stands on its head, which the recogniser reads too.

    Options:
        substring: asked text that stands whole among other text earns 1; if false, other text costs.
        min_confidence: lines that are read with less are not counted.
        batch_size: lines of one picture that are recognised at once.
        threads: pictures read at once, by default as many as torch has threads (OMP_NUM_THREADS).

    Raises:
        RewardError: an option is not positive; at the first call, the packages of the extra `ocr` are missing.
    """

    def __init__(
        self,
        substring: bool = True,
        min_confidence: float = 0.5,
        batch_size: int = 6,
        threads: int | None = None,
    ):
        self.substring = substring
        self.min_confidence = min_confidence
        self.batch_size = _positive("batch_size", batch_size)
        self.threads = _positive("threads", torch.get_num_threads() if threads is None else threads)

    def __call__(
        self, images: torch.Tensor, prompts: Sequence[str], text: Sequence[Any] | None = None
    ) -> list[float | None]:
        """One value per picture; `images` is float (B, 3, H, W) in [0, 1]."""
        check_images("ocr", images)
        asked = _asked(prompts, text)
        read = self.read(images[[i for i, words in enumerate(asked) if words]])
        return [similarity(next(read), words, self.substring) if words else None for words in asked]

    def read(self, images: torch.Tensor) -> Iterator[str]:
        """The text of each picture, float (N, 3, H, W) in [0, 1], its lines joined by spaces."""
        pixels = (
            images.flip(1).mul(255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
        )  # blue first, as OpenCV has it
        engine = self._engine
        with ThreadPoolExecutor(self.threads) as pool:
            return pool.map(lambda image: _lines(engine(image)), pixels)

    @cached_property
    def _engine(self) -> Any:
        for package in ("rapidocr", "onnxruntime"):
            if find_spec(package) is None:
                raise RewardError(f"the OCR rewards need the package {package}: pip install 'flowgrpo[ocr]'")
        from rapidocr import RapidOCR

        return RapidOCR(
            params={
                "Global.log_level": "error",
                "Global.text_score": self.min_confidence,
                "Global.use_cls": False,  # it turns lines that stand on their head
                "Det.limit_type": "max",  # as PaddleOCR does; rapidocr would enlarge small pictures and read no better
                "Det.limit_side_len": 960,
                "Rec.rec_batch_num": self.batch_size,
                "EngineConfig.onnxruntime.intra_op_num_threads": 1,
            }
        )


class VideoOcr(Ocr):
    """How well videos say what their prompts quote, 0 to 1: the mean over frames; None where a prompt asks for no text.

    Options:
        frames: read in each video, spaced evenly from the first to the last.
        best: take the best frame in place of the mean. Text that flashes up once then earns as much as text that stays.

    Further options are those of `ocr`.
    """

    def __init__(self, frames: int = 8, best: bool = False, **options: Any):
        super().__init__(**options)
        self.frames = _positive("frames", frames)
        self.best = best

    def __call__(
        self, videos: torch.Tensor, prompts: Sequence[str], text: Sequence[Any] | None = None
    ) -> list[float | None]:
        """One value per video; `videos` is float (B, F, 3, H, W) in [0, 1]."""
        check_videos("video_ocr", videos)
        asked = _asked(prompts, text)
        chosen = np.unique(np.linspace(0, videos.shape[1] - 1, self.frames).round().astype(int))
        read = self.read(videos[[i for i, words in enumerate(asked) if words]][:, chosen].flatten(0, 1))
        return [self._value(words, [next(read) for _ in chosen]) if words else None for words in asked]

    def _value(self, asked: str, read: list[str]) -> float:
        values = [similarity(words, asked, self.substring) for words in read]
        return max(values) if self.best else sum(values) / len(values)


def _asked(prompts: Sequence[str], column: Sequence[Any] | None) -> list[str | None]:
    return [asked_text(prompt, text) for prompt, text in zip(prompts, column or [None] * len(prompts), strict=True)]


def _lines(result: Any) -> str:
    if result.txts is None:
        return ""
    return " ".join(result.txts[i] for i in reading_order(np.asarray(result.boxes, float)))


def _positive(option: str, value: int) -> int:
    if value < 1:
        raise RewardError(f"the OCR rewards read with {option} of 1 or more, not {value}")
    return value
