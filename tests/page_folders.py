"""The files and folders that the pages' commands name, made small."""

import contextlib
import io
import json
import re
import shutil
from pathlib import Path

import yaml
from PIL import Image

ROOT = Path(__file__).parents[1]
REWARDS = {
    "redness.py": "def redness(images, prompts):\n    return images[:, 0].mean((1, 2))\n",
    "warm.py": "def warmth(images, prompts):\n    return 100 * (images[:, 0] - images[:, 2]).mean((1, 2))\n",
}
TEXTS = """\
kind: mdlm
model: {path: digits, lora: {rank: 2, alpha: 4}}
prompts: {train: "countdown:train", eval: "countdown:eval"}
rewards: [{use: solved}]
algorithm: {preset: diffu_grpo, decoder: {name: left_to_right}}
train: {iterations: 1, groups: 2, group_size: 2, updates: 1, micro_batch: 8}
eval: {every: 1, prompts: 2, save: 2}
run: {name: mine, checkpoint: {every: 1}}
"""

# What lies in the folder of a page: its name there, and in the folder that `furnished` makes; "" is of every page.
MADE = {
    "": {
        **{name: name for name in REWARDS},
        **{name: name for name in ("configs", "my_reward.py", "sd35.yaml", "prompts.txt", "held_out.txt", "tiny.yaml")},
        "mine.py": "redness.py",
    },
    "docs/guides/looking.md": {"runs/bluer": "runs/t", "pictures": "pictures"},
    "docs/guides/editing.md": {"edit-model": "edit-model"},
    "docs/guides/evaluation.md": {"runs/redder": "runs/t", "prompts.jsonl": "kinds.jsonl"},
    "docs/guides/reward_hacking.md": {"runs/redder": "runs/t"},
    "docs/guides/votes.md": {"votes.jsonl": "votes.jsonl", "light.png": "light.png", "shown": "pictures"},
    "docs/guides/adapters.md": {"my_lora.safetensors": "own.safetensors"},
    "docs/research/engines.md": {"text.yaml": "texts.yaml"},
    "docs/guides/export.md": {"runs/lora": "runs/t"},
    "docs/guides/texts.md": {"mine.yaml": "texts.yaml", "runs/mine": "runs/mine", "eval.jsonl": "eval.jsonl"},
    "docs/research/methods/distillation.md": {"student.yaml": "sd35.yaml", "runs/teacher": "runs/t"},
    "docs/guides/offline.md": {
        **{name: name for name in ("offline.yaml", "pairs.parquet")},
        **{"prompts.txt": "two_prompts.txt", "tiny.yaml": "of_samples.yaml", "earlier": "groups"},
    },
    "docs/start/demo.md": {"runs/demo-1": "runs/t"},
    "docs/start/model.md": {"runs/flux1-24gb": "runs/t"},
    "docs/start/reward.md": {name: name for name in ("redder.yaml", "colours.py", "colours.jsonl")},
    "docs/reference/cli.md": {"runs/redder": "runs/t"},
    "docs/reference/rewards.md": {"runs/demo-1": "runs/t"},
}


def block(page, beside):
    """Return the block of a page that holds some words, without its indent or fence."""
    text = (ROOT / page).read_text()
    blocks = re.findall(r"^```\w*\n(.*?)^```|((?:^    [^\n]*\n)+)", text, re.MULTILINE | re.DOTALL)
    ((fenced, indented),) = [pair for pair in blocks if beside in "".join(pair)]
    return fenced or re.sub("^    ", "", indented, flags=re.MULTILINE)


def pairs(file):
    """Write two preferences in the columns of Pick-a-Pic."""
    import pyarrow
    from pyarrow import parquet

    picture = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(picture, "png")
    rows = [
        {"caption": caption, "jpg_0": picture.getvalue(), "jpg_1": picture.getvalue(), "label_0": 1, "label_1": 0}
        for caption in ("a red circle", "a blue square")
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)


def furnished(folder, finished):
    """Make all that `MADE` names in a folder; `finished` has a finished run of a tiny model."""
    from flowgrpo.cli import main

    shutil.copytree(ROOT / "configs", folder / "configs")
    for name in ("runs", "tiny.yaml", "prompts.txt"):
        (shutil.copytree if (finished / name).is_dir() else shutil.copy)(finished / name, folder / name)
    for name, text in REWARDS.items():
        (folder / name).write_text(text)
    shutil.copy(folder / "prompts.txt", folder / "held_out.txt")
    (folder / "two_prompts.txt").write_text("".join((folder / "prompts.txt").read_text().splitlines(True)[:2]))
    kinds = [{"prompt": f"a {word} circle", "kind": word} for word in ("red", "blue")]
    (folder / "kinds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kinds))
    (folder / "eval.jsonl").write_text('{"prompt": "3 4 5 -> 12"}\n')
    (folder / "texts.yaml").write_text(TEXTS)

    (folder / "my_reward.py").write_text(block("README.md", "# my_reward.py"))
    tiny = yaml.safe_load((folder / "tiny.yaml").read_text())
    read = yaml.safe_load(block("README.md", "# sd35.yaml"))
    read["model"] = {**tiny["model"], "call": {**tiny["model"]["call"], "num_inference_steps": 4}}  # 3 are stochastic
    read["train"] |= {"group_size": 4, "micro_batch": 4}
    (folder / "sd35.yaml").write_text(yaml.safe_dump(read))

    for name in ("redder.yaml", "colours.py"):
        (folder / name).write_text(block("docs/start/reward.md", f"# {name}"))
    (folder / "colours.jsonl").write_text(block("docs/start/reward.md", '"colour": "red"'))
    with contextlib.chdir(folder):
        exec(block("docs/guides/editing.md", "# make_edit_model.py"), {})

    offline = block("docs/guides/offline.md", "model: {path: shapes}")
    few = offline.replace("{path: shapes}", "{path: shapes, call: {num_inference_steps: 4}}")
    few = few.replace("group_size: 8", "group_size: 4")  # both as the groups sampled there
    (folder / "offline.yaml").write_text(few)
    call = [f"{key}={value}" for key, value in tiny["model"]["call"].items()]
    sample = ["sample", tiny["model"]["path"], "--prompt", "a red circle", "--out", str(folder / "pictures"), *call]
    assert main(sample) == 0
    tiny |= {"algorithm": {"preset": "gdro"}}
    (folder / "of_samples.yaml").write_text(yaml.safe_dump(tiny))
    pairs(folder / "pairs.parquet")
    export = ["export", str(folder / "runs" / "t"), "--out", str(folder / "lora")]
    assert main(export) == 0
    (file,) = (folder / "lora").glob("*.safetensors")
    shutil.copy(file, folder / "own.safetensors")
    shutil.copy(folder / "redness.py", folder / "mine.py")
    assert main(["sample", str(folder / "of_samples.yaml"), "--groups", str(folder / "groups")]) == 0
    picture = {"prompt": "a red circle", "a": "shown/0000.png", "b": "light.png"}
    Image.new("RGB", (16, 16), "white").save(folder / "light.png")
    (folder / "votes.jsonl").write_text("".join(json.dumps({**picture, "vote": vote}) + "\n" for vote in "aaaab"))
    assert main(["train", str(folder / "texts.yaml"), f"run.dir={folder / 'runs'}"]) == 0
    return folder
