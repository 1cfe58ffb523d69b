"""Prompts for sounds: source, sound, place and background, for the reward `clap` or custom ones.

The columns are `tag` (sound), `source`, `sound` and `background` (or None). Combinations of source and sound, and of
sound and background, are held out.
"""

from __future__ import annotations

import numpy as np

from flowgrpo.data.generators.drafts import Draft, Part, PromptSet, choose, row_functions

# Sources with their sounds, and places.
KINDS = (
    (
        {
            "a small dog": ("barks twice", "whines", "pants"),
            "a tabby cat": ("meows", "purrs", "hisses"),
            "a rooster": ("crows", "clucks", "flaps its wings"),
            "a horse": ("neighs", "snorts", "trots past"),
            "a flock of geese": ("honks", "takes off", "hisses"),
            "a frog": ("croaks", "jumps into a pond", "croaks far away"),
        },
        ("in a farmyard", "in an empty barn", "in a quiet garden", "at the edge of a forest", "under a porch"),
    ),
    (
        {
            "a steam train": ("whistles", "rolls past", "comes to a halt"),
            "an old motorcycle": ("starts up", "speeds away", "idles"),
            "a lawn mower": ("hums", "is switched off", "starts up"),
            "a helicopter": ("hovers", "flies over", "takes off"),
            "a circular saw": ("cuts a board", "spins up", "slows down"),
            "a truck": ("honks", "reverses with a beep", "brakes hard"),
        },
        ("in a narrow street", "in a tunnel", "in an open field", "behind a closed window", "in a large hall"),
    ),
    (
        {
            "a child": ("laughs", "claps twice", "runs over gravel"),
            "an old man": ("coughs", "snores", "hums a tune"),
            "a woman": ("sings one long note", "whispers", "walks in high heels"),
            "an audience": ("applauds", "laughs", "falls silent"),
            "a choir": ("holds a low chord", "sings without words", "takes a breath"),
        },
        ("in a stairwell", "in a small room with carpets", "in a church", "in a theater", "in a schoolyard"),
    ),
    (
        {
            "a glass bottle": ("breaks on stone", "is filled with water", "rolls away"),
            "a wooden door": ("creaks open", "slams", "is knocked at three times"),
            "a kettle": ("boils", "whistles", "is set down"),
            "a typewriter": ("clatters", "rings at the end of a line", "is struck once"),
            "a bunch of keys": ("jingles", "falls to the floor", "turns in a lock"),
            "a paper bag": ("rustles", "is torn", "bursts"),
        },
        ("in a kitchen", "in a bare room", "in a cellar", "close to the microphone", "in a long corridor"),
    ),
    (
        {
            "a grand piano": ("plays a slow melody", "plays one low note", "plays a fast run upwards"),
            "an acoustic guitar": ("is strummed", "is picked softly", "is tuned"),
            "a snare drum": ("plays a march", "plays a roll", "is struck once"),
            "a violin": ("plays a long high note", "plays a waltz", "is plucked"),
            "a church bell": ("rings three times", "rings far away", "fades"),
            "a synthesizer": ("plays a deep bass line", "plays a bright arpeggio", "holds a chord"),
        },
        ("in a concert hall", "in a dry studio", "in a chapel", "in the room next door", "on an open square"),
    ),
)  # fmt: skip
BACKGROUNDS = (
    "rain falls on a tin roof", "a strong wind blows", "a crowd murmurs", "waves break on a shore", "a clock ticks",
    "traffic passes", "birds sing", "a fire crackles", "a brook runs", "thunder rolls far away",
)  # fmt: skip


def sound(rng: np.random.Generator) -> Draft:
    """Draw a source with a sound, and in half of the draws a background sound."""
    sources, places = KINDS[rng.integers(len(KINDS))]
    (source,), (place,), (behind,) = (choose(rng, some) for some in (list(sources), places, BACKGROUNDS))
    (heard,) = choose(rng, sources[source])
    background = behind if rng.random() < 0.5 else None
    parts: list[Part] = [("sound", source, heard)]
    if background:
        parts.append(("background", heard, background))
    words = f"{source} {heard} {place}" + (f", while {background}" if background else "")
    columns = {"tag": "sound", "source": source, "sound": heard, "background": background}
    return Draft(f"{words[0].upper()}{words[1:]}", tuple(parts), columns)


SETS = {"sounds": PromptSet(sound, train=512, eval=64)}
BUILT_IN = row_functions(SETS)
