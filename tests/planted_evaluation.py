"""The folder of an evaluation as `flowgrpo evaluate` leaves it, with numbers that can be checked by hand."""

import json

import numpy as np
from browsing import WILD
from PIL import Image
from planted_run import written

from flowgrpo.commands.evaluations.results import ASKED, SCORES, SUMMARY, read_results


def planted(folder, values, name="shapes", rewards=("questions",)):
    """The folder of an evaluation: by prompt, its categories and the grades of its two questions, None without."""
    folder.mkdir(parents=True)
    manifest, scores = [], []
    for index, (prompt, categories, grades) in enumerate(values):
        file = f"{index:04d}.png"
        Image.new("RGB", (8, 8), (20 * index, 90, 200)).save(folder / file)
        questions = [{"question": f"Is it {word}?", "category": categories} for word in ("red", WILD)]
        manifest.append({"file": file, "prompt": prompt, "seed": index, "questions": questions})
        value = None if grades is None else float(np.mean(grades))
        answers = {} if grades is None else {"questions": [[categories, grade] for grade in grades]}
        scores.append(
            {"file": file, "prompt": prompt, "index": index, "sample": 0, "seed": index, "categories": categories,
             "rewards": dict.fromkeys(rewards, value), "answers": answers}
        )  # fmt: skip
    asked = {
        "set": "mine.jsonl", "prompts": len(values), "listed": 9, "samples": 1, "name": name, "total": "prompts",
        "rewards": {reward: {"use": reward} for reward in rewards}, "paper": "", "licence": "", "note": "Not as published.",
        "model": {"call": {"num_inference_steps": 4, "guidance_scale": None}},
    }  # fmt: skip
    (folder / "manifest.jsonl").write_text(written(manifest))
    (folder / SCORES).write_text(written(scores))
    (folder / ASKED).write_text(json.dumps(asked))
    (folder / SUMMARY).write_text("{}")
    return read_results(folder)


FIRST = [
    ("a red circle", ["A", "A - x"], [1.0, 0.0]),
    ("a blue circle", ["A"], [1.0, 1.0]),
    (WILD, ["B"], [0.0, 0.0]),
    ("an owl", ["B"], [0.0, 1.0]),
    ("a cat", ["B"], None),
]
GRADES = ([1.0, 1.0], [1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0])
SECOND = [(*row[:2], grades) for row, grades in zip(FIRST, GRADES, strict=True)]
