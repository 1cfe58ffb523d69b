"""Prompts for videos that ask for a motion: subject, action, direction, place and camera.

The columns are `tag` (motion), `subject`, `action`, `direction` (or None) and `camera`. Combinations of subject and
action, of action and direction, and of subject and camera move are held out.
"""

from __future__ import annotations

import numpy as np

from flowgrpo.data.generators.drafts import Draft, Part, PromptSet, choose, row_functions

SIDEWAYS = ("from left to right", "from right to left", "towards the camera", "away from the camera")
TURNS = ("clockwise", "counterclockwise")
UPRIGHT = ("upwards", "downwards")
# Subjects, their actions with possible directions, and places.
KINDS = (
    (
        ("a red fox", "a brown horse", "a black dog", "a white rabbit", "a tabby cat", "a deer", "a wolf"),
        {"runs": SIDEWAYS, "walks slowly": SIDEWAYS, "leaps": SIDEWAYS, "sits down": (), "shakes its head": ()},
        ("in a snowy field", "on a sandy beach", "in tall grass", "on a forest path", "in shallow water"),
    ),
    (
        ("a yellow taxi", "a red tractor", "a blue van", "a motorcycle", "a toy car", "a race car"),
        {"drives": SIDEWAYS, "speeds up and passes": SIDEWAYS, "turns in a circle": TURNS, "brakes and stops": ()},
        ("on a wet street at night", "on a country road", "in a wide desert", "through a small town", "in heavy rain"),
    ),
    (
        ("a woman in a green coat", "an old man with a hat", "a child in a raincoat", "a dancer in white", "a chef"),
        {"walks": SIDEWAYS, "jogs": SIDEWAYS, "spins": TURNS, "waves with one hand": (), "jumps up and down": ()},
        ("in an empty hall", "on a bridge", "in a park in autumn", "on a rooftop at sunset", "in a busy square"),
    ),
    (
        ("a red balloon", "a paper plane", "a kite with a long tail", "a hot-air balloon", "a drone", "a soap bubble"),
        {"drifts": (*SIDEWAYS, *UPRIGHT), "floats": UPRIGHT, "circles": TURNS, "sways in the wind": (), "spins": TURNS},
        ("over a calm lake", "above a green valley", "between tall buildings", "in front of white clouds", "at dusk"),
    ),
    (
        ("a wooden ball", "a glass marble", "a coin", "a tin drum", "an orange", "a rubber tire"),
        {"rolls": SIDEWAYS, "spins": TURNS, "bounces": SIDEWAYS[:2], "comes to rest": (), "tips over": ()},
        ("on a wooden table", "on a tiled floor", "on a stone wall", "on a green carpet", "on a gentle slope"),
    ),
)  # fmt: skip
CAMERAS = ("stays still", "pans left", "pans right", "zooms in", "zooms out", "follows", "orbits slowly", "rises")


def motion(rng: np.random.Generator) -> Draft:
    """Draw a motion of a subject, seen by a camera."""
    subjects, actions, places = KINDS[rng.integers(len(KINDS))]
    (subject,), (action,), (place,), (camera,) = (choose(rng, s) for s in (subjects, list(actions), places, CAMERAS))
    direction = choose(rng, actions[action])[0] if actions[action] else None
    parts: list[Part] = [("move", subject, action), ("shot", subject, camera)]
    if direction:
        parts.append(("direction", action, direction))
    words = " ".join(part for part in (subject, action, direction, place) if part)
    columns = {"tag": "motion", "subject": subject, "action": action, "direction": direction, "camera": camera}
    return Draft(f"{words[0].upper()}{words[1:]}, the camera {camera}", tuple(parts), columns)


SETS = {"motion": PromptSet(motion, train=512, eval=64)}
BUILT_IN = row_functions(SETS)
