"""Prompts for pictures with text, for the rewards `ocr` and `video_ocr`.

The prompt quotes the text, which is also the column `text`; `tag` is ocr. Texts consist of words and numbers in upper,
title or lower case. Each text of `eval` has a word or number that no text of `train` has.
"""

from __future__ import annotations

import numpy as np

from flowgrpo.data.generators.drafts import Draft, Part, PromptSet, choose, row_functions

NOUNS = """
anchor apple arrow autumn bakery barley basket beacon bicycle blossom bottle breeze bridge bronze butter cabin candle
canyon castle cedar ceiling cheese cherry chimney cider circle cloud clover coffee compass copper coral cottage cotton
cricket crystal curtain desert dolphin dragon eagle ember engine falcon feather fiddle flower forest fountain garden
ginger glacier granite guitar hammer harbor harvest hazel honey horizon island ivory jasmine journey jungle kettle
kitchen ladder lagoon lantern laundry lemon library lighthouse lily lobster lumber maple marble market meadow melody
mill mirror monsoon morning mountain museum mustard needle night novel oak ocean olive orchard otter oyster palace
paper parade pepper piano pillow pioneer planet pocket postcard pottery prairie pumpkin quarry quill rabbit rainbow
ribbon river robin rocket saddle saffron sailor salmon school shadow silver sparrow spring station stone summer
sunrise tailor tango teapot temple theater thunder tiger timber tower travel tulip tunnel valley velvet village violet
violin voyage walnut whisper willow window winter wonder workshop yellow zeppelin
"""
ADJECTIVES = """
ancient big blue brave bright calm clever cold cosy crooked daily early electric famous fast final first free fresh
gentle giant golden good grand green happy hidden hot hungry icy jolly kind last late little lost lucky magic merry
mild modern narrow new noble old open perfect pink plain polite proud quick quiet rare red royal secret sharp silent
simple sleepy slow small smart soft sour spicy strong sunny sweet tall tiny true twin upper urban vivid warm wild wise
wooden young
"""
NUMBERED = (
    "Aisle", "Bay", "Box", "Bus", "Chapter", "Dock", "Exit", "Flight", "Gate", "Lane", "Level", "Line", "Lot", "No.", "Pier",
    "Platform", "Room", "Route", "Seat", "Stage", "Table", "Terminal", "Track", "Volume", "Zone",
)  # fmt: skip
CASES = (str.upper, str.title, str.lower)

SURFACES = (
    "a wooden sign", "a neon sign", "a road sign", "a chalkboard", "a shop window", "a cinema marquee", "a paper cup",
    "a coffee mug", "a T-shirt", "a baseball cap", "a tote bag", "a poster", "a book cover", "a newspaper headline",
    "a birthday cake", "a greeting card", "a postage stamp", "a train ticket", "a banner", "a billboard",
    "a brick wall with graffiti", "a brass plaque", "a door plate", "a laptop screen", "a phone screen",
    "a scoreboard", "a wine label", "a jam jar label", "a matchbox", "a park bench with a plate", "a hot-air balloon",
    "a delivery van", "a surfboard", "a chocolate bar wrapper", "a tin can", "a sticky note", "a flag",
    "a stone archway", "a museum label", "an embroidered pillow",
)  # fmt: skip
PLACES = (
    "on a rainy street at night", "in a sunlit kitchen", "at a busy market", "in a quiet library", "on a beach at sunset",
    "in a snowy village", "in a small workshop", "at a train station", "in a city park in autumn", "on a wooden table",
    "in a school classroom", "at a harbor in the fog", "in a museum hall", "on a mountain trail", "in a greenhouse",
    "under warm lamp light", "in front of a plain white wall", "at a country fair",
)  # fmt: skip
STYLES = (
    "a photo of", "a close-up photo of", "a watercolor of", "a film still of", "a cartoon of", "an oil painting of",
)  # fmt: skip
VERBS = ("that says", "that reads", "with the words", "with the text")


def writing(rng: np.random.Generator) -> Draft:
    """Draw an object that bears a text of one to three words or a number."""
    words, parts = _text(rng)
    (case,) = choose(rng, CASES)
    text = case(words)
    (style,), (surface,), (verb,), (place,) = (choose(rng, some) for some in (STYLES, SURFACES, VERBS, PLACES))
    return Draft(f'{style} {surface} {verb} "{text}", {place}', parts, {"tag": "ocr", "text": text})


def _text(rng: np.random.Generator) -> tuple[str, tuple[Part, ...]]:
    """Draw a text, with its words and numbers that can be held out."""
    kind = rng.integers(5)
    adjective, (noun, other) = choose(rng, ADJECTIVES.split())[0], choose(rng, NOUNS.split(), 2)
    if kind == 0:
        return noun, (("word", noun),)
    if kind == 1:
        return f"{adjective} {noun}", (("word", adjective), ("word", noun))
    if kind == 2:
        return f"{noun} & {other}", (("word", noun), ("word", other))
    if kind == 3:
        return f"the {adjective} {noun}", (("word", adjective), ("word", noun))
    number = int(rng.integers(2, 1000))
    return f"{choose(rng, NUMBERED)[0]} {number}", (("number", number),)


SETS = {"ocr": PromptSet(writing, train=1024, eval=128)}
BUILT_IN = row_functions(SETS)
