"""The built-in rewards: inputs, range, weights and licence; and the name of a reward in metrics."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # of a number


def default_name(use: str) -> str:
    """Return the default name of a reward: the last part of `use`, without .py."""
    return re.split("[:/]", use)[-1].removesuffix(".py")


@dataclass(frozen=True)
class Card:
    """A row of `flowgrpo rewards`."""

    target: str  # `module:object`
    measures: str
    inputs: str
    range: str
    weights: str | None = None
    licence: str = "Apache-2.0"
    options: Mapping[str, Any] = field(default_factory=dict)  # that the name fixes; the user's options override them
    dtype: str | None = "float32"  # of the weights' sizes, and of the model by default; None: not on the device

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Lowest and highest value in the last "A to B" or "A or B" of `range`; None if there is none."""
        pairs = re.findall(r"(-?[\d.]+)(?:, [\d.]+)* (?:to|or) (-?[\d.]+)", self.range)
        return (float(pairs[-1][0]), float(pairs[-1][1])) if pairs else None

    @property
    def size(self) -> int:
        """Bytes of the weights in `dtype`, as far as `weights` names sizes."""
        units = {"GB": 10**9, "MB": 10**6}
        return round(sum(float(n) * units[unit] for n, unit in re.findall(r"([\d.]+) (GB|MB)", self.weights or "")))

    @property
    def weights_id(self) -> str | None:
        """The hub id that `weights` begins with, the default of the option `path`."""
        return self.weights and re.split("[ ,]", self.weights)[0]

    def memory(self, dtype: str | None = None) -> int:
        """Return the bytes of the weights on the device, loaded in `dtype` (None: as by default)."""
        if self.dtype is None:
            return 0
        return self.size * BYTES[dtype or self.dtype] // BYTES[self.dtype]


# Weights, or weights, licence and options. Sizes are of what is loaded.
_AESTHETIC = (
    "trl-lib/ddpo-aesthetic-predictor (4 MB) and open_clip's ViT-L-14 openai (its vision network, 1.2 GB)",
    "Apache-2.0 (head), MIT (CLIP)",
)
_AESTHETIC_V25 = (
    "google/siglip-so400m-patch14-384 (its vision network, 1.7 GB), and a head from the author's repository (3 MB)",
    "Apache-2.0 (SigLIP), AGPL-3.0 (head)",
)
_CLAP = "laion/clap-htsat-unfused (0.6 GB)"
_CLIP = "openai/clip-vit-large-patch14 (1.7 GB)"
_DEQA = "zhiyuanyou/DeQA-Score-Mix3 (16.4 GB)", "MIT; its language model is a Llama 2 (Llama 2 Community License)"
_DINO = "facebook/dinov2-base (0.35 GB)"
_GENEVAL = (
    f"facebook/mask2former-swin-small-coco-instance (0.3 GB), {_CLIP}",
    "Mask2Former: MIT, `other` on the hub; CLIP: MIT",
)
_HPSV3 = (
    "MizzenAI/HPSv3 (16.6 GB) and the config and processors of Qwen/Qwen2-VL-7B-Instruct",
    "Apache-2.0 (its code: MIT)",
)
_HPSV3_PLUS = (
    "Junjun2333/HPSv3-PlusPlus (17.6 GB) and the config and processors of Qwen/Qwen3-VL-8B-Instruct",
    "Apache-2.0 (its code has no licence)",
)
_HPS = "xswu/HPSv2, HPS_v2.1_compressed.pt (about 4 GB)"
_IMAGE_REWARD = "THUDM/ImageReward (1.8 GB) and the tokenizer of google-bert/bert-base-uncased"
_JUDGE_LOCAL = "Qwen/Qwen3-VL-8B-Instruct (17.5 GB)", "Apache-2.0 (that model)"
_OCR = "PP-OCRv6 (30 MB), part of rapidocr, extra `ocr`"
_PICKSCORE = (
    "yuvalkirstain/PickScore_v1 (3.9 GB)",
    "no licence found for the weights; MIT for its code and its CLIP",
)
_SERVED = "your endpoint, for example of Qwen/Qwen3-VL-8B-Instruct", "Apache-2.0 (that model)"
_VIDEO_ALIGN = (
    "KwaiVGI/VideoReward (5.0 GB) and the config and processors of Qwen/Qwen2-VL-2B-Instruct",
    "Apache-2.0 (its code: MIT)",
)
_UNIFIED_REWARD = (
    "your endpoint of CodeGoat24/UnifiedReward-2.0-qwen-7b",
    "MIT (that model)",
    {"style": "unified_reward"},
)
_UNIFIED_REWARD_LOCAL = "CodeGoat24/UnifiedReward-2.0-qwen-7b (16.6 GB)", _UNIFIED_REWARD[1]
_VQA_SCORE = "Qwen/Qwen2.5-VL-7B-Instruct (16.6 GB)", "Apache-2.0 (that model)"

_JUDGE = "rewards.served.judge:Judge"
_VISION_LANGUAGE = "rewards.models.vision_language"
BUILT_IN: dict[str, Card] = {
    "shapes": Card("rewards.shapes:shapes", "share of the caption shown", "image, prompt or caption", "0 to 1"),
    "patterns": Card("rewards.patterns:patterns", "share of the caption shown, with layout", "image, prompt", "0 to 1"),
    "moves": Card("rewards.moves:moves", "share of the caption shown, with motions", "video, prompt", "0 to 1"),
    "jpeg_size": Card("rewards.image:jpeg_size", "size as a JPEG, in negative kilobytes", "image", "below 0"),
    "ocr": Card(
        "rewards.objects.ocr:Ocr",
        "similarity of the written text",
        "image, quoted part of prompt or text",
        "0 to 1",
        _OCR,
        dtype=None,
    ),
    "geneval": Card(
        "rewards.objects.geneval:GenEval",
        "objects, counts, colours, places shown (GenEval)",
        "image, include, exclude, tag",
        "up to 1 (partial credit); 0 or 1",
        *_GENEVAL,
    ),
    "motion": Card("rewards.video:motion", "difference of neighbouring frames", "video", "0 to 1"),
    "temporal_consistency": Card(
        "rewards.video:temporal_consistency", "similarity to the previous and first frame", "video", "-1 to 1 (a still)"
    ),
    "video_ocr": Card(
        "rewards.objects.ocr:VideoOcr",
        "`ocr`, mean over frames",
        "video, quoted part of prompt or text",
        "0 to 1",
        _OCR,
        dtype=None,
    ),
    "loudness": Card("rewards.audio:loudness", "root mean square", "audio", "0 to 1 (root mean square, linear)"),
    "clip_score": Card(
        "rewards.models.clip:ClipScore",
        "agreement (CLIPScore)",
        "image, prompt",
        "0 to 2.5",
        _CLIP,
        "no licence found for the weights; MIT for the code",
    ),
    "pickscore": Card(
        "rewards.models.clip:PickScore", "preference (PickScore)", "image, prompt", "about 16 to 26", *_PICKSCORE
    ),
    "hpsv2": Card("rewards.models.openclip:HPSv2", "preference (HPSv2)", "image, prompt", "-1 to 1", _HPS),
    "hpsv3": Card(
        f"{_VISION_LANGUAGE}.hpsv3:HPSv3",
        "preference (HPSv3)",
        "image, prompt",
        "unbounded, mostly -1 to 12",
        *_HPSV3,
        dtype="bfloat16",
    ),
    "hpsv3_plus": Card(
        f"{_VISION_LANGUAGE}.hpsv3:HPSv3Plus",
        "preference, given training progress (HPSv3++)",
        "image, prompt",
        "unbounded",
        *_HPSV3_PLUS,
        dtype="bfloat16",
    ),
    "aesthetic": Card(
        "rewards.models.openclip:Aesthetic",
        "aesthetic rating (LAION, version 2)",
        "image",
        "about 1 to 10",
        *_AESTHETIC,
    ),
    "aesthetic_v25": Card(
        "rewards.models.aesthetic_v25:AestheticV25",
        "aesthetic rating (Aesthetic Predictor V2.5)",
        "image",
        "about 1 to 10",
        *_AESTHETIC_V25,
    ),
    "deqa": Card(
        f"{_VISION_LANGUAGE}.deqa:DeQA", "technical quality (DeQA-Score)", "image", "1 to 5", *_DEQA, dtype="float16"
    ),
    "vqa_score": Card(
        f"{_VISION_LANGUAGE}.vqa_score:VqaScore",
        'agreement: probability of "Yes" (VQAScore)',
        "image, prompt",
        "0 to 1",
        *_VQA_SCORE,
        dtype="bfloat16",
    ),
    "image_reward": Card(
        "rewards.models.image_reward:ImageReward",
        "preference (ImageReward)",
        "image, prompt",
        "about -2.3 to 2",
        _IMAGE_REWARD,
    ),
    "video_align": Card(
        f"{_VISION_LANGUAGE}.video_align:VideoAlign",
        "quality, motion, agreement (VideoAlign)",
        "video, prompt",
        "sum of three z-scores, mostly -6 to 6",
        *_VIDEO_ALIGN,
        dtype="bfloat16",
    ),
    "image_similarity": Card(
        "rewards.models.similarity:ImageSimilarity",
        "similarity to a reference picture (DINOv2)",
        "image, column image",
        "-1 to 1",
        _DINO,
    ),
    "diversity": Card(
        "rewards.models.similarity:Diversity",
        "distance from the rest of the group",
        "image, group-wise",
        "0 to 2",
        _DINO,
    ),
    "clap": Card(
        "rewards.models.clap:Clap", "agreement (CLAP)", "audio, prompt, column sampling_rate", "-1 to 1", _CLAP
    ),
    "judge": Card(_JUDGE, "agreement and quality, graded", "image or video, prompt", "0 to 1", *_SERVED),
    "qwen_vl": Card(_JUDGE, "the same as `judge`", "image or video, prompt", "0 to 1", *_SERVED, {"style": "qwen_vl"}),
    "unified_reward": Card(
        _JUDGE, "agreement and quality (UnifiedReward 2.0)", "image, prompt", "0 to 1", *_UNIFIED_REWARD
    ),
    "judge_local": Card(
        f"{_VISION_LANGUAGE}.local_judge:LocalJudge",
        "`judge` in the training process",
        "image or video, prompt",
        "0 to 1",
        *_JUDGE_LOCAL,
        dtype="bfloat16",
    ),
    "unified_reward_local": Card(
        f"{_VISION_LANGUAGE}.local_judge:UnifiedRewardLocal",
        "`unified_reward` in the training process",
        "image, prompt",
        "0 to 1",
        *_UNIFIED_REWARD_LOCAL,
        dtype="bfloat16",
    ),
    "hpsv3_style": Card(_JUDGE, "preference, graded", "image, prompt", "0 to 1", *_SERVED, {"style": "hpsv3_style"}),
    "deqa_style": Card(_JUDGE, "technical quality, graded", "image", "0 to 1", *_SERVED, {"style": "deqa_style"}),
    "video_align_style": Card(
        _JUDGE,
        "quality, motion, agreement, graded",
        "video, prompt",
        "0 to 1",
        *_SERVED,
        {"style": "video_align_style"},
    ),
    "questions": Card(
        "rewards.served.questions:Questions",
        "share of right answers",
        "image or video, prompt, column questions",
        "0 to 1",
        *_SERVED,
    ),
    "preference": Card(
        "rewards.preference:Preference",
        "win rate against the group",
        "group, prompt",
        "0 to 1 (win rate)",
        *_SERVED,
    ),
    "votes": Card(
        "rewards.models.votes:Votes",
        "preference learned from your votes",
        "image, prompt",
        "log-odds, 0 is as good as the mean",
        "those of its features",
    ),
    "countdown": Card(
        "rewards.texts.text:countdown", "an expression that reaches the target", "text, numbers, target", "0, 0.1 or 1"
    ),
    "sudoku": Card("rewards.texts.text:sudoku", "share of cells filled correctly", "text, puzzle, solution", "0 to 1"),
    "arithmetic": Card("rewards.texts.text:arithmetic", "right result", "text, answer", "0 or 1"),
    "solved": Card(
        "rewards.texts.text:solved",
        "right answer to `countdown`, `sudoku` or `arithmetic`",
        "text, the columns of the task",
        "0 or 1",
    ),
    "tags": Card("rewards.texts.text:tags", "tags of d1's answer format", "text", "0 to 0.5"),
    "gsm8k": Card("rewards.texts.text:gsm8k", "right number, and format, as d1", "text, answer", "0 to 4"),
    "gsm8k_accuracy": Card("rewards.texts.text:gsm8k_accuracy", "right number", "text, answer", "0 or 1"),
    "math_answer": Card("rewards.texts.text:math_answer", "right answer, and format, as d1", "text, answer", "0 to 3"),
    "math_accuracy": Card(
        "rewards.texts.text:math_accuracy", "right answer up to LaTeX spelling", "text, answer", "0 or 1"
    ),
    "math_verify": Card(
        "rewards.texts.algebra:MathVerify",
        "right answer by computer algebra (math-verify)",
        "text, answer",
        "0 or 1",
        licence="Apache-2.0 (math-verify too)",
    ),
    "code": Card("rewards.texts.code:code", "share of tests passed", "text, tests", "0 to 1"),
    "code_format": Card("rewards.texts.code:code_format", "a program that parses", "text", "0, 0.5 or 1"),
}
