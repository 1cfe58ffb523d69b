"""Aesthetic Predictor V2.5: a linear head on the vision network of a SigLIP."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.error import URLError

import torch
from torch import nn
from transformers import SiglipVisionModel

from rewards.base import RewardError
from rewards.models.model import PictureReward, aesthetic_head, load_weights, select_weights

HEAD = (
    "https://github.com/discus0434/aesthetic-predictor-v2-5/raw/c0e15567fa61252cbff43d70c49a8bd27202ca9a/"
    "models/aesthetic_predictor_v2_5.pth"
)
SHA256 = "a6caf256b3dc434273c98dcb12f6bf17c5d4fc647d8df11f038386923dd06220"


class AestheticV25(PictureReward):
    """Aesthetic Predictor V2.5 (discus0434): people's rating, 1 to 10; the author calls 5.5 and more great.

    head(f / |f|) of the picture's pooled SigLIP features f; the prompt does not count. Unlike `aesthetic` it was also
    trained on illustrations. The head comes from the author's repository, whose licence is AGPL-3.0: it is not part of this
    package, but downloaded on first use. The author scores in bfloat16.

        rewards: [{use: aesthetic_v25, options: {batch_size: 16, dtype: bfloat16}}]

    Args:
        path: a folder or a hub id of the SigLIP with its image processor.
        head: a file with the head's weights; by default the author's, which is kept in the cache of torch.hub.
        batch_size, dtype: of the SigLIP; dtype is float32, bfloat16 or float16. The head is float32.
    """

    called = "aesthetic_v25"
    weights = "google/siglip-so400m-patch14-384"

    def __init__(self, path: str | None = None, *, head: str | None = None, **options: Any) -> None:
        super().__init__(path, **options)
        self.head = None if head is None else str(head)

    def _load(self) -> nn.Module:
        file = self._head_file()
        with self.loading(str(file)):
            head = aesthetic_head(select_weights(load_weights(file), "scoring_head."), last=8)
        vision: Any = self.load_pretrained(SiglipVisionModel)
        if head[0].in_features != vision.config.hidden_size:
            raise RewardError(
                f"aesthetic_v25: the head in {file} reads {head[0].in_features} features, "
                f"but {self.path} gives {vision.config.hidden_size}"
            )
        return nn.ModuleDict({"vision": vision, "head": head})

    def _score(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        features = self.model["vision"](pixel_values=self.pixels(images)).pooler_output.float()
        return self.model["head"](nn.functional.normalize(features, dim=-1)).squeeze(-1)

    def _head_file(self) -> Path:
        if self.head is not None:
            if not Path(self.head).is_file():
                raise RewardError(f"aesthetic_v25: there is no file {self.head}, which should hold the head's weights")
            return Path(self.head)
        file = Path(torch.hub.get_dir()) / "checkpoints" / "aesthetic_predictor_v2_5.pth"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            try:
                torch.hub.download_url_to_file(HEAD, str(file), SHA256, progress=False)
            except (URLError, OSError, RuntimeError) as error:  # RuntimeError: another file than the released one
                raise RewardError(
                    f"aesthetic_v25: the head could not be downloaded from {HEAD} ({error}); give its file as `head`"
                ) from error
        return file
