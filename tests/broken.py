"""Folders of models, made as users have them: other layouts of weights, and files that are not whole."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'5' * 64}\nsize 4625424\n"


def copied(source, folder):
    """A copy of a model's folder, with links to its files, which `write` and the functions here replace."""
    return Path(shutil.copytree(source, folder, copy_function=lambda file, to: Path(to).hardlink_to(file)))


def write(file, content):
    """Put another file in the place of one that may be a link."""
    file.unlink(missing_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())


def point(file):
    """Leave a Git LFS pointer in a file's place."""
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
    """Put shards and their index in the place of a file of weights; return the shards."""
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
    """Put a pickle in the place of a file of weights; return it."""
    stem = file.stem if file.stem.startswith("diffusion") else "pytorch_model"
    torch.save(load_file(file), file.with_name(f"{stem}.bin"), _use_new_zipfile_serialization=zipped)
    file.unlink()
    return file.with_name(f"{stem}.bin")


def empty(folder):
    """Take everything out of a folder."""
    shutil.rmtree(folder)
    folder.mkdir()


def keep_network(folder, name="transformer"):
    """Leave of a pipeline's folder what one network's folder holds."""
    network = folder.with_name(f"{folder.name}-{name}")
    (folder / name).rename(network)
    shutil.rmtree(folder)
    network.rename(folder)
