"""VideoAlign (VideoReward): quality, motion and agreement of videos, by a vision-language model with a reward head."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as F
from transformers import Qwen2VLModel
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from rewards.base import RewardError, nearest
from rewards.models.model import load_weights
from rewards.models.preprocessing import to_bytes
from rewards.models.vision_language import wordings
from rewards.models.vision_language.heads import HeadReward, linear, merge_lora, rename
from rewards.video import check_videos

DIMENSIONS = ("VQ", "MQ", "TA")
LEAST_PIXELS = 128 * 28 * 28  # of a resized frame
FEWEST_FRAMES, MOST_FRAMES = 4, 768
KNOWN = {"prompt_template_type": "detailed_special", "sample_type": "uniform", "num_frames": None}  # as released


class VideoAlign(HeadReward):
    """VideoAlign's VideoReward: z-scores that a Qwen2-VL 2B gives a video and its prompt (Liu et al., 2501.13918).

    Visual quality (VQ), motion quality (MQ), agreement with the text (TA), or their sum (`overall`). Each is the head's
    output at a token of its own, minus the mean over the deviation that model_config.json holds. Frames are evenly spaced
    at the rate of model_config.json, 2 a second: at least 4, an even number. They are resized to at most about 448 x 448.

    Departures from the released code (KwaiVGI/VideoAlign, 219ab9d): (1) adapters are merged into the weights beforehand;
    (2) the head is float32, theirs has the dtype of the model; (3) videos come as frames, so that no decoder picks them;
    (4) files with only an adapter (adapter_model.safetensors) are not read, only those with all weights, as released.

        rewards: [{use: video_align, options: {fps: 16, score: overall, batch_size: 4, dtype: bfloat16}}]

    Args:
        fps: frames per second of the videos that are scored, 16 for Wan 2.1, 24 for most others. It must be given.
        score: overall, VQ, MQ or TA.
        path: a folder with model_config.json and checkpoint-*/model.pth, of which the last step is read; or a hub id.
        base: a folder or hub id of the Qwen2-VL for its config, tokenizer and processors; its weights are not read.
        batch_size, dtype: of the model; dtype is float32, bfloat16 or float16.
    """

    called = "video_align"
    weights = "KwaiVGI/VideoReward"
    filename = "checkpoint-11352/model.pth"
    base = "Qwen/Qwen2-VL-2B-Instruct"
    backbone = Qwen2VLModel
    question = wordings.VIDEO_ALIGN
    tokens = ("<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>")
    sequential = True

    def __init__(
        self,
        path: str | None = None,
        *,
        fps: float | None = None,
        score: str = "overall",
        batch_size: int = 4,
        **options: Any,
    ) -> None:
        if not isinstance(fps, (int, float)) or not 0 < fps < math.inf:
            raise RewardError(
                f"{self.called}: fps is {fps!r}, but must be above 0: name the frames a second of your videos"
            )
        if score not in ("overall", *DIMENSIONS):
            raise RewardError(f"{self.called}: there is no score {score!r}, {nearest(score, ('overall', *DIMENSIONS))}")
        super().__init__(path, batch_size=batch_size, **options)
        self.fps, self.score = float(fps), score

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The checkpoint's model_config.json."""
        with self.loading(self.path):
            settings = json.loads(self.file("model_config.json").read_text())
            for key, wanted in KNOWN.items():
                if (found := settings["data_config"].get(key, wanted)) != wanted:
                    raise RewardError(
                        f"{self.called}: {self.path} has the {key} {found!r}, but only {wanted!r} is known"
                    )
        return settings

    def __call__(self, videos: torch.Tensor, prompts: Sequence[str]) -> list[float]:
        """Return one score per video, float (B, F, 3, H, W) in [0, 1]."""
        check_videos(self.called, videos, frames=2)
        return self.score_batches(videos, list(prompts)).tolist()

    def _weights(self) -> dict[str, torch.Tensor]:
        adapters = self.settings["peft_lora_config"]
        rank = adapters["lora_r"] ** 0.5 if adapters.get("use_rslora") else adapters["lora_r"]
        steps = {int(file.parent.name.split("-")[-1]): file for file in Path(self.path).glob("checkpoint-*/model.pth")}
        file = steps[max(steps)] if steps else self.file(self.filename)
        return merge_lora(rename(load_weights(file)), adapters["lora_alpha"] / rank, self.dtype)

    def _heads(self, weights: Mapping[str, torch.Tensor]) -> dict[str, nn.Module]:
        return {"head": linear(weights, "rm_head.")}

    def _score(self, videos: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        data = self.settings["data_config"]
        frames = videos[:, choose_frames(videos.shape[1], self.fps, data["fps"])]
        size = smart_resize(*videos.shape[-2:], 28, LEAST_PIXELS, data["max_frame_pixels"])
        resized = [
            F.resize(to_bytes(video.to(self.device)), list(size), InterpolationMode.BICUBIC, antialias=True)
            for video in frames
        ]
        options = {"do_resize": False, "do_sample_frames": False, "cap_pixels_per_frame": False}  # done above
        states = self.states(prompts, "video", resized, **options)
        outputs = self.model["head"](states)  # (b, 3 tokens, 1), or (b, 3, 3): an output for each token
        scores = outputs.diagonal(dim1=1, dim2=2) if outputs.shape[2] == len(DIMENSIONS) else outputs[..., 0]
        if constants := self.settings.get("inference_config"):
            mean, std = (torch.tensor([constants[f"{d}_{name}"] for d in DIMENSIONS]) for name in ("mean", "std"))
            scores = (scores - mean.to(scores)) / std.to(scores)
        return scores.sum(1) if self.score == "overall" else scores[:, DIMENSIONS.index(self.score)]


def choose_frames(count: int, fps: float, rate: float) -> list[int]:
    """Return indices of evenly spaced frames: `rate` a second of a video of `count` frames at `fps`, an even number."""
    most = min(MOST_FRAMES, count) // 2 * 2
    chosen = 2 * round(min(max(count / fps * rate, FEWEST_FRAMES), most) / 2)
    return torch.linspace(0, count - 1, chosen).round().long().tolist()
