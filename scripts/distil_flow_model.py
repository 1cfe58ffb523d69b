"""Distil an embedded flow model to four Euler steps without guidance.

    python scripts/distil_flow_model.py shapes --out flowgrpo/models/shapes4

From noise, the guided teacher walks the student's four steps in `PARTS` Euler steps each. The student starts as a copy of
the teacher's transformer. Its velocity at the start of a step is fitted to the one that leads to where the teacher was at
the step's end, by least squares over stored trajectories. Captions that are held out are in none of them.

The student's schedule ends at the sigma `LAST`. With diffusers' own, which ends at 0.0089, the last of four steps would
remove no noise. Only transformer (float16) and scheduler are written; all other files are links to the teacher's. The
script takes about 20 minutes of one core.
"""

import argparse
import os
import shutil
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from make_flow_model import TASKS, Task, held_out_reward, muon, optimise

from flowgrpo.data.embedded import EMBEDDED

STEPS = 4
LAST = 0.5
PARTS = 3
GUIDANCE = 2.5
POOL = 4096
BATCH = 64
UPDATES = 1200
RATE = 2e-3

Texts = tuple[torch.Tensor, torch.Tensor]


def velocity(network: SD3Transformer2DModel, state: torch.Tensor, sigma: torch.Tensor, texts: Texts) -> torch.Tensor:
    """Return the velocity (B, 4, 16, 16) of states at sigmas (B,), given the prompts' embeddings and pooled embeddings."""
    embeds, pooled = texts
    return network(
        hidden_states=state,
        timestep=1000 * sigma,
        encoder_hidden_states=embeds,
        pooled_projections=pooled,
        return_dict=False,
    )[0]


def encode(pipe: StableDiffusion3Pipeline, prompts: list[str]) -> Texts:
    """Return the embeddings (B, 13, 128) and pooled embeddings (B, 128) of prompts."""
    embeds, _, pooled, _ = pipe.encode_prompt(
        prompts, None, None, do_classifier_free_guidance=False, max_sequence_length=1
    )
    return embeds, pooled


@torch.no_grad()
def walk(pipe: StableDiffusion3Pipeline, prompts: list[str], sigmas: list[float]) -> tuple[torch.Tensor, Texts]:
    """Return the guided teacher's states (B, STEPS + 1, 4, 16, 16) at the student's sigmas, and the prompts' texts."""
    texts, empty = encode(pipe, prompts), encode(pipe, [""] * len(prompts))
    both = tuple(torch.cat(pair) for pair in zip(empty, texts, strict=True))
    states = [torch.randn(len(prompts), 4, 16, 16)]
    for begin, end in pairwise(sigmas):
        state = states[-1]
        for sigma, after in pairwise(np.linspace(begin, end, PARTS + 1).tolist()):
            doubled = torch.cat([state, state])
            plain, asked = velocity(pipe.transformer, doubled, torch.full((len(doubled),), sigma), both).chunk(2)
            state = state + (after - sigma) * (plain + GUIDANCE * (asked - plain))
        states.append(state)
    return torch.stack(states, 1), texts


def trajectories(task: Task, pipe: StableDiffusion3Pipeline, sigmas: list[float], rng: np.random.Generator):
    """Return the states and texts of `POOL` trajectories, as `walk`."""
    started, walked = time.time(), []
    for _ in range(0, POOL, 128):
        walked.append(walk(pipe, [task.allowed[i] for i in rng.integers(0, len(task.allowed), 128)], sigmas))
        print(f"trajectories {128 * len(walked)}/{POOL} {time.time() - started:.0f} s", flush=True)
    states, texts = zip(*walked, strict=True)
    return torch.cat(states), tuple(torch.cat(each) for each in zip(*texts, strict=True))


def fit(student: SD3Transformer2DModel, states: torch.Tensor, texts: Texts, sigmas: list[float], rng) -> None:
    """Fit the student's velocity at a random step of random trajectories to the straight line to the step's end."""
    levels = torch.tensor(sigmas)

    def loss() -> torch.Tensor:
        rows, step = (torch.from_numpy(rng.integers(0, count, BATCH)) for count in (len(states), STEPS))
        begin, end = states[rows, step], states[rows, step + 1]
        line = (begin - end) / (levels[step] - levels[step + 1])[:, None, None, None]
        found = velocity(student, begin, levels[step], tuple(each[rows] for each in texts))
        return (found - line).square().mean()

    optimise(muon(student.transformer_blocks, list(student.parameters()), RATE), UPDATES, loss, "student")


def save(pipe: StableDiffusion3Pipeline, teacher: Path, out: Path) -> None:
    """Save transformer and scheduler, and link all other files to the teacher's."""
    shutil.rmtree(out, ignore_errors=True)
    pipe.transformer.register_to_config(_name_or_path=teacher.name)  # else the file names the teacher's folder
    pipe.transformer.to(torch.float16).save_pretrained(out / "transformer")
    pipe.scheduler.save_pretrained(out / "scheduler")
    for file in sorted(file.relative_to(teacher) for file in teacher.rglob("*") if file.is_file()):
        if file.parts[0] not in ("transformer", "scheduler"):
            place = out / file
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(os.path.relpath(teacher / file, place.parent))


def main() -> None:
    """Distil, save, reload and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", choices=TASKS)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rng = np.random.default_rng(0)

    task, folder = TASKS[arguments.teacher](), EMBEDDED[arguments.teacher].folder
    pipe = StableDiffusion3Pipeline.from_pretrained(folder)
    pipe.scheduler.register_to_config(shift_terminal=LAST)
    pipe.scheduler.set_timesteps(STEPS)
    sigmas = pipe.scheduler.sigmas.tolist()
    states, texts = trajectories(task, pipe, sigmas, rng)
    fit(pipe.transformer, states, texts, sigmas, rng)
    save(pipe, folder, arguments.out)
    pipe = StableDiffusion3Pipeline.from_pretrained(arguments.out)
    found = held_out_reward(arguments.teacher, task, pipe, num_inference_steps=STEPS)
    print(f"held-out reward in {STEPS} steps {found:.3f}")


if __name__ == "__main__":
    main()
