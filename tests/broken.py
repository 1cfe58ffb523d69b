"""Folders of models with other layouts of weights, and with files that are not whole."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'5' * 64}\nsize 4625424\n"


def copied(source, folder):
    """Copy a model's folder as hard links, which `write` and the functions here replace."""
    return Path(shutil.copytree(source, folder, copy_function=lambda file, to: Path(to).hardlink_to(file)))


def write(file, content):
    """Replace a file that may be a link."""
    file.unlink(missing_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())


def point(file):
    """Replace a file by a Git LFS pointer."""
    write(file, POINTER)


def cut(file, left=0.5):
    """Keep the first part of a file."""
    content = file.read_bytes()
    write(file, content[: int(left * len(content))])


def name_variant(folder, variant="fp16"):
    """Give all weights below a folder the names of a variant."""
    for file in list(folder.rglob("*.safetensors")):
        file.rename(file.with_name(f"{file.stem}.{variant}.safetensors"))


def shard(file, count=3, variant=None, *, form="safetensors"):
    """Replace a file of weights by shards and their index, and return the shards."""
    own = form == "safetensors" or file.stem.startswith("diffusion")
    tensors, stem = load_file(file), file.stem if own else "pytorch_model"
    word = "" if variant is None else f".{variant}"
    shards = [file.with_name(f"{stem}{word}-{i + 1:05d}-of-{count:05d}.{form}") for i in range(count)]
    parts = [sorted(tensors)[i::count] for i in range(count)]
    for own, names in zip(shards, parts, strict=True):
        held = {name: tensors[name] for name in names}
        save_file(held, own, {"format": "pt"}) if form == "safetensors" else torch.save(held, own)
    where = {name: own.name for own, names in zip(shards, parts, strict=True) for name in names}
    index = file.with_name(f"{stem}.{form}.index{word}.json")
    index.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": where}))
    file.unlink()
    return shards


def pickle(file, *, zipped=True):
    """Replace a file of weights by a pickle, and return it."""
    stem = file.stem if file.stem.startswith("diffusion") else "pytorch_model"
    torch.save(load_file(file), file.with_name(f"{stem}.bin"), _use_new_zipfile_serialization=zipped)
    file.unlink()
    return file.with_name(f"{stem}.bin")


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def keep_network(folder, name="transformer"):
    """Keep only the files of one network in a pipeline's folder."""
    network = folder.with_name(f"{folder.name}-{name}")
    (folder / name).rename(network)
    shutil.rmtree(folder)
    network.rename(folder)
