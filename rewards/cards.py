"""The rewards that have a name here: what they look at, what weights they need, and under which licence."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Card:
    """What `flowgrpo rewards` says of a built-in reward.

    Attributes:
        target: where it lives.
        options: of its class, where the name stands for one of its uses; a user's own options go over them.
    """

    target: str
    inputs: str
    range: str
    weights: str | None
    licence: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The lowest and the highest value that `range` names, the last pair of them; None where it names none."""
        pairs = re.findall(r"(-?[\d.]+)(?:, [\d.]+)* (?:to|or) (-?[\d.]+)", self.range)
        return (float(pairs[-1][0]), float(pairs[-1][1])) if pairs else None

    @property
    def size(self) -> int:
        """Bytes of the weights that `weights` names a size of."""
        units = {"GB": 10**9, "MB": 10**6}
        return int(sum(float(n) * units[unit] for n, unit in re.findall(r"([\d.]+) (GB|MB)", self.weights or "")))


_PICKSCORE = (
    "yuvalkirstain/PickScore_v1 (3.9 GB)",
    "none found for the weights (code, and the CLIP it starts from: MIT)",
)
_OCR = "PP-OCRv6 (30 MB), part of rapidocr, extra `ocr`"
_SERVED = ("your endpoint, for example of Qwen/Qwen3-VL-8B-Instruct", "Apache-2.0 (that model)")

BUILT_IN: dict[str, Card] = {
    "shapes": Card("rewards.shapes:shapes", "image, prompt or caption", "0 to 1", None, "Apache-2.0"),
    "jpeg_size": Card("rewards.image:jpeg_size", "image", "below 0 (minus kilobytes)", None, "Apache-2.0"),
    "ocr": Card("rewards.objects.ocr:Ocr", "image, quoted part of prompt or text", "0 to 1", _OCR, "Apache-2.0"),
    "geneval": Card(
        "rewards.objects.geneval:GenEval",
        "image, include, exclude, tag",
        "up to 1 (partial credit); 0 or 1",
        "facebook/mask2former-swin-small-coco-instance (0.3 GB), openai/clip-vit-large-patch14 (1.7 GB)",
        "`other` on the hub (MIT in its repository), MIT",
    ),
    "motion": Card("rewards.video:motion", "video", "0 to 1", None, "Apache-2.0"),
    "temporal_consistency": Card(
        "rewards.video:temporal_consistency", "video", "-1 to 1 (a still)", None, "Apache-2.0"
    ),
    "video_ocr": Card(
        "rewards.objects.ocr:VideoOcr", "video, quoted part of prompt or text", "0 to 1", _OCR, "Apache-2.0"
    ),
    "loudness": Card("rewards.audio:loudness", "audio", "0 to 1 (root mean square, linear)", None, "Apache-2.0"),
    "clip_score": Card(
        "rewards.models.clip:ClipScore",
        "image, prompt",
        "0 to 2.5",
        "openai/clip-vit-large-patch14 (1.7 GB)",
        "MIT (of its code; the model card states none)",
    ),
    "pickscore": Card("rewards.models.clip:PickScore", "image, prompt", "about 16 to 26", *_PICKSCORE),
    "video_pickscore": Card("rewards.models.clip:VideoPickScore", "video, prompt", "about 16 to 26", *_PICKSCORE),
    "hpsv2": Card(
        "rewards.models.openclip:HPSv2",
        "image, prompt",
        "-1 to 1",
        "xswu/HPSv2, HPS_v2.1_compressed.pt (about 4 GB)",
        "Apache-2.0",
    ),
    "aesthetic": Card(
        "rewards.models.openclip:Aesthetic",
        "image",
        "about 1 to 10",
        "trl-lib/ddpo-aesthetic-predictor (4 MB) and open_clip's ViT-L-14 openai (1.7 GB)",
        "Apache-2.0 (head), MIT (CLIP)",
    ),
    "image_reward": Card(
        "rewards.models.image_reward:ImageReward",
        "image, prompt",
        "about -2.3 to 2",
        "THUDM/ImageReward (1.8 GB) and the tokenizer of google-bert/bert-base-uncased",
        "Apache-2.0",
    ),
    "image_similarity": Card(
        "rewards.models.similarity:ImageSimilarity",
        "image, column image",
        "-1 to 1",
        "facebook/dinov2-base (0.35 GB)",
        "Apache-2.0",
    ),
    "diversity": Card(
        "rewards.models.similarity:Diversity",
        "image, group-wise",
        "0 to 2",
        "facebook/dinov2-base (0.35 GB)",
        "Apache-2.0",
    ),
    "clap": Card(
        "rewards.models.clap:Clap",
        "audio, prompt, column sampling_rate",
        "-1 to 1",
        "laion/clap-htsat-unfused (0.6 GB)",
        "Apache-2.0",
    ),
    "judge": Card("rewards.served.judge:Judge", "image or video, prompt", "0 to 1", *_SERVED),
    "qwen_vl": Card("rewards.served.judge:Judge", "image or video, prompt", "0 to 1", *_SERVED, {"style": "qwen_vl"}),
    "unified_reward": Card(
        "rewards.served.judge:Judge",
        "image, prompt",
        "0 to 1",
        "your endpoint of CodeGoat24/UnifiedReward-2.0-qwen-7b",
        "MIT (that model)",
        {"style": "unified_reward"},
    ),
    "hpsv3_style": Card("rewards.served.judge:Judge", "image, prompt", "0 to 1", *_SERVED, {"style": "hpsv3_style"}),
    "deqa_style": Card("rewards.served.judge:Judge", "image", "0 to 1", *_SERVED, {"style": "deqa_style"}),
    "video_align_style": Card(
        "rewards.served.judge:Judge", "video, prompt", "0 to 1", *_SERVED, {"style": "video_align_style"}
    ),
    "preference": Card("rewards.preference:Preference", "group, prompt", "0 to 1 (win rate)", *_SERVED),
    "votes": Card(
        "rewards.models.votes:Votes",
        "image, prompt",
        "log-odds, 0 is as good as the mean",
        "those of the features",
        "Apache-2.0",
    ),
    "countdown": Card("rewards.texts.text:countdown", "text, numbers, target", "0, 0.1 or 1", None, "Apache-2.0"),
    "sudoku": Card("rewards.texts.text:sudoku", "text, puzzle, solution", "0 to 1", None, "Apache-2.0"),
    "arithmetic": Card("rewards.texts.text:arithmetic", "text, answer", "0 or 1", None, "Apache-2.0"),
    "solved": Card("rewards.texts.text:solved", "text, columns of those three", "0 or 1", None, "Apache-2.0"),
    "tags": Card("rewards.texts.text:tags", "text", "0 to 0.5", None, "Apache-2.0"),
    "gsm8k": Card("rewards.texts.text:gsm8k", "text, answer", "0 to 4", None, "Apache-2.0"),
    "gsm8k_accuracy": Card("rewards.texts.text:gsm8k_accuracy", "text, answer", "0 or 1", None, "Apache-2.0"),
    "math_answer": Card("rewards.texts.text:math_answer", "text, answer", "0 to 3", None, "Apache-2.0"),
    "math_accuracy": Card("rewards.texts.text:math_accuracy", "text, answer", "0 or 1", None, "Apache-2.0"),
    "math_verify": Card(
        "rewards.texts.algebra:MathVerify", "text, answer", "0 or 1", None, "Apache-2.0 (math-verify too)"
    ),
    "code": Card("rewards.texts.code:code", "text, tests", "0 to 1", None, "Apache-2.0"),
    "code_format": Card("rewards.texts.code:code_format", "text", "0, 0.5 or 1", None, "Apache-2.0"),
}
