"""Preference pairs, read from files with Pick-a-Pic's columns and stored as groups of two latents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from flowgrpo.data import stored
from flowgrpo.data.prompts import Prompt, Row
from flowgrpo.errors import InputError
from flowgrpo.flow import setup
from flowgrpo.flow.config import Config
from flowgrpo.flow.outputs.group_sampling import of_model
from flowgrpo.flow.pipeline.vae_encoder import encoder, fit
from flowgrpo.training.run.phases import phase
from rewards.compute import default_device

LABEL = "label"
COLUMNS = ("caption", "jpg_0", "jpg_1", "label_0", "label_1")
KEY = "--pairs"


@dataclass(frozen=True)
class Pair:
    """A preference pair: two images of a caption as file contents, their labels, and its place (FILE:ROW) for errors."""

    caption: str
    pictures: Sequence[bytes]
    labels: Sequence[float]
    place: str


def store_pairs(config: Config, source: Path, folder: Path) -> dict[str, Any]:
    """Encode pairs with a model's VAE and store them as groups of two with the reward `label`; return the manifest.

    An image is scaled and center-cropped to the model's size. Its latent is the mode of the VAE's posterior;
    Diffusion-DPO's code draws a sample instead. A folder of an interrupted call is continued. `source` is a .parquet
    file, or a folder of such files, read in the order of their names. Raise InputError if a file lacks columns, a row
    lacks an image, or the model cannot encode images.
    """
    files = files_of(source)
    listed = [{"name": file.name, "bytes": file.stat().st_size} for file in files]
    writer = stored.Writer(folder, {"kind": "pairs", **of_model(config), "source": listed}, [LABEL])
    device = torch.device(default_device())
    policy, _ = setup.policy_and_weights(config, device, lambda policy: policy.prepare([Row("", 0)]), learns=False)
    vae = encoder(policy, Row("", 0))
    left = islice(pairs(files), writer.number, None)
    with phase("encoding") as encoding:
        while part := list(islice(left, max(1, config.train.rollout_rows // 2))):
            pictures = [picture(data, vae.size, pair.place) for pair in part for data in pair.pictures]
            (latents,) = vae.encode(torch.stack(pictures))
            writer.add([(_group(pair), (latents[2 * i : 2 * i + 2],)) for i, pair in enumerate(part)])
            encoding.advance(len(part))
    if not writer.number:
        raise InputError(f"{KEY}: {source} holds no pair")
    return writer.finish({"sigmas": policy.sigmas, "groups": writer.number, "group_size": 2})


def files_of(source: Path) -> list[Path]:
    """List the .parquet files of a source; raise InputError if there are none."""
    if not source.exists():
        raise InputError(f"{KEY}: there is no file {source}")
    files = sorted(source.glob("[!.]*.parquet")) if source.is_dir() else [source]
    if not files or not all(file.is_file() and file.suffix == ".parquet" for file in files):
        raise InputError(f"{KEY}: {source} is neither a .parquet file nor a folder with some")
    stored.check_parquet(KEY, source)
    return files


def pairs(files: Sequence[Path]) -> Iterator[Pair]:
    """Yield the pairs of all files; raise InputError for unreadable files, missing columns and rows that are no pair."""
    from pyarrow import ArrowException, parquet

    for file in files:
        try:
            opened = parquet.ParquetFile(file)
            if missing := [name for name in COLUMNS if name not in opened.schema_arrow.names]:
                has = ", ".join(opened.schema_arrow.names)
                raise InputError(f"{KEY}: {file} has no column {missing[0]!r}, which Pick-a-Pic has; it has {has}")
            number = 0
            for batch in opened.iter_batches(64, columns=list(COLUMNS)):
                for row in batch.to_pylist():
                    number += 1
                    yield _pair(row, f"{file}:{number}")
        except (ArrowException, OSError) as error:
            raise InputError(f"{KEY}: {file} cannot be read ({str(error).splitlines()[0]})") from None


def picture(data: bytes, size: tuple[int, int], place: str) -> torch.Tensor:
    """Decode an image file to (3, H, W) in [0, 1], scaled and center-cropped to `size` (H, W).

    Raises InputError with `place` if the data are no image.
    """
    try:
        opened = Image.open(BytesIO(data)).convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise InputError(f"{place}: not a picture ({error})") from None
    return fit(opened, size)


def _pair(row: Mapping[str, Any], place: str) -> Pair:
    pictures, labels = [row["jpg_0"], row["jpg_1"]], [row["label_0"], row["label_1"]]
    if not isinstance(row["caption"], str) or not row["caption"].strip():
        raise InputError(f"{place}: caption is {row['caption']!r}, not a text")
    if not all(isinstance(each, bytes) for each in pictures):
        raise InputError(f"{place}: jpg_0 and jpg_1 are not the bytes of pictures")
    if not all(isinstance(each, int | float) and each == each for each in labels):
        raise InputError(f"{place}: label_0 and label_1 are {labels}, not numbers")
    if sum(labels) != 1:
        raise InputError(f"{place}: label_0 and label_1 are {labels}; give 1 and 0, or 0.5 twice for a tie")
    return Pair(row["caption"], pictures, [float(each) for each in labels], place)


def _group(pair: Pair) -> stored.Group:
    return stored.Group(
        prompt=Prompt(pair.caption),
        seeds=[0, 0],
        rewards=torch.tensor(pair.labels, dtype=torch.float64)[:, None],
        lost=torch.zeros(2, dtype=torch.bool),
    )
