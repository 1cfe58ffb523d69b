"""Rewards of written text: `ocr` reads pictures, `video_ocr` reads frames of videos.

The reward is 1 minus the edit distance between recognised and requested text, divided by the length of the requested text,
and at least 0 (Flow-GRPO, arXiv 2505.05470). As in its code, white space and case do not count, and requested text that
appears whole among other text earns 1. Differences: all quoted parts are requested, not only the first; PP-OCRv6 of
`rapidocr` on onnxruntime replaces PaddleOCR; similar signs are equal; tilted lines are put in order; frames without
text count 0.
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
from rewards.files.frames import choose
from rewards.image import check_images
from rewards.video import check_videos

Scores = list[float | None]
LONGEST = 10_000  # characters that are compared
_OPENING = re.compile('["„“«「]')
_CLOSING = {
    '"': re.compile('"'),
    "„": re.compile("[“”]"),
    "“": re.compile("”"),
    "«": re.compile("»"),
    "「": re.compile("」"),
}
_ALIKE = str.maketrans("‘’‛`´“”„«»‐‑‒–—−", "'''''" + '"""""' + "------")


def asked_text(prompt: str, text: Any = None) -> str | None:
    """Return the column `text`, else all quoted parts of the prompt; None if empty. Single quotes do not count."""
    if text is None:
        text = " ".join(_quoted(prompt))
    return str(text) if normalise(str(text)) else None


def _quoted(prompt: str) -> Iterator[str]:
    """Yield the quoted parts in one pass; an opening sign that was once found unclosed is not searched for again."""
    at, unclosed = 0, set()
    while opening := _OPENING.search(prompt, at):
        sign, at = opening[0], opening.end()
        closing = None if sign in unclosed else _CLOSING[sign].search(prompt, at)
        if closing is None:
            unclosed.add(sign)
        elif closing.start() > at:
            yield prompt[at : closing.start()]
            at = closing.end()


def normalise(text: str) -> str:
    """Return the first `LONGEST` characters as they are compared: no white space, no case, similar signs equal."""
    return "".join(unicodedata.normalize("NFKC", text[:LONGEST].translate(_ALIKE)).casefold().split())


def similarity(read: str, asked: str, substring: bool = True) -> float:
    """Return max(0, 1 - edit distance / len(asked)) of normalised texts; 1 if `substring` and `asked` is in `read`."""
    read, asked = normalise(read), normalise(asked)
    if substring and asked in read:
        return 1.0
    return max(0.0, 1 - edit_distance(read, asked) / len(asked))


def edit_distance(a: str, b: str) -> int:
    """Return the Levenshtein distance of two texts.

    The bits of integers hold the differences within a column of the dynamic-programming table (Myers 1999, Hyyrö 2003),
    which takes 30 ms for `LONGEST` letters.
    """
    a, b = sorted((a, b), key=len)
    whole, places = (1 << len(b)) - 1, dict.fromkeys(b, 0)
    for i, letter in enumerate(b):
        places[letter] |= 1 << i
    distance, more, less = len(b), whole, 0  # bits where the next letter of `b` costs one more, one less
    for letter in a:
        equal = places.get(letter, 0)
        diagonal = (((equal & more) + more) ^ more) | equal | less
        right_more, right_less = less | (whole & ~(diagonal | more)), diagonal & more
        distance += (right_more >> (len(b) - 1)) - (right_less >> (len(b) - 1))
        right_more, right_less = right_more << 1 | 1, right_less << 1
        more, less = whole & (right_less | ~(diagonal | right_more)), whole & right_more & diagonal
    return distance


def reading_order(boxes: np.ndarray) -> np.ndarray:
    """Return the reading order (N,) of text boxes with a common tilt: lines from top to bottom, each from left to right.

    Boxes are float (N, 4, 2), N >= 1, corners (x, y) clockwise from the upper left one.
    """
    along = (boxes[:, 1] - boxes[:, 0]).sum(0)
    along = along / np.linalg.norm(along)
    centres, heights = boxes.mean(1), np.linalg.norm(boxes[:, 3] - boxes[:, 0], axis=1)
    x, y = centres @ along, centres @ np.array([-along[1], along[0]])
    down = y.argsort()
    next_line = np.diff(y[down]) > np.minimum(heights[down][1:], heights[down][:-1]) / 2
    return down[np.lexsort((x[down], np.concatenate([[0], next_line.cumsum()])))]


class Ocr:
    """Similarity of the text in a picture to the text that its prompt quotes, 0 to 1; None if the prompt asks for no text.

    The text is the column `text` or all parts of the prompt in double quotes. White space and case do not count, punctuation
    does. Text repeated all over the picture earns 1 as well, unless `substring` is false. Upside-down text mostly earns 1,
    too, since the recogniser can read it.

    Options:
        substring: requested text among other text earns 1; if false, other text costs.
        min_confidence: lines recognised with less confidence are ignored.
        batch_size: lines of one picture recognised at once.
        threads: pictures read at once, by default torch's number of threads (OMP_NUM_THREADS).
    """

    def __init__(
        self, substring: bool = True, min_confidence: float = 0.5, batch_size: int = 6, threads: int | None = None
    ):
        self.substring, self.min_confidence = substring, min_confidence
        self.batch_size = _check_positive("batch_size", batch_size)
        self.threads = _check_positive("threads", torch.get_num_threads() if threads is None else threads)

    def __call__(self, images: torch.Tensor, prompts: Sequence[str], text: Sequence | None = None) -> Scores:
        """Return one value per picture, float (B, 3, H, W) in [0, 1]."""
        check_images("ocr", images)
        asked = _asked_texts(prompts, text)
        read = self.read(images[[i for i, words in enumerate(asked) if words]])
        return [similarity(next(read), words, self.substring) if words else None for words in asked]

    def read(self, images: torch.Tensor) -> Iterator[str]:
        """Yield the text of each picture, float (N, 3, H, W) in [0, 1], its lines joined by spaces."""
        bgr = images.flip(1)
        pixels = bgr.mul(255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
        engine = self._engine

        def read_lines(image: np.ndarray) -> str:
            result = engine(image)
            if result.txts is None:
                return ""
            return " ".join(result.txts[i] for i in reading_order(np.asarray(result.boxes, float)))

        with ThreadPoolExecutor(self.threads) as pool:
            return pool.map(read_lines, pixels)

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
                "Global.use_cls": False,  # it rotates lines that are upside down
                "Det.limit_type": "max",  # as in PaddleOCR; rapidocr's default enlarges small pictures and reads no better
                "Det.limit_side_len": 960,
                "Rec.rec_batch_num": self.batch_size,
                "EngineConfig.onnxruntime.intra_op_num_threads": 1,
            }
        )


class VideoOcr(Ocr):
    """Mean over a video's frames of the similarity that `ocr` measures, 0 to 1; None if the prompt asks for no text.

    Options:
        frames: number of evenly spaced frames that are read.
        best: take the best frame, not the mean. Then text that flashes up once earns as much as text that stays.

    Further options are those of `ocr`.
    """

    def __init__(self, frames: int = 8, best: bool = False, **options: Any):
        super().__init__(**options)
        self.frames = _check_positive("frames", frames)
        self.best = best

    def __call__(self, videos: torch.Tensor, prompts: Sequence[str], text: Sequence | None = None) -> Scores:
        """Return one value per video, float (B, F, 3, H, W) in [0, 1]."""
        check_videos("video_ocr", videos)
        asked = _asked_texts(prompts, text)
        chosen = choose(self.frames, videos.shape[1])
        read = self.read(videos[[i for i, words in enumerate(asked) if words]][:, chosen].flatten(0, 1))

        def score(words: str) -> float:
            values = [similarity(next(read), words, self.substring) for _ in chosen]
            return max(values) if self.best else sum(values) / len(values)

        return [score(words) if words else None for words in asked]


def _asked_texts(prompts: Sequence[str], column: Sequence[Any] | None) -> list[str | None]:
    return [asked_text(prompt, text) for prompt, text in zip(prompts, column or [None] * len(prompts), strict=True)]


def _check_positive(option: str, value: int) -> int:
    if value < 1:
        raise RewardError(f"the OCR rewards read with {option} of 1 or more, not {value}")
    return value
