"""What the sources set around their methods, and the page that tells it."""

from pathlib import Path

import pytest

from flowgrpo.flow.methods.presets import BESIDE, PRESETS
from flowgrpo.flow.methods.published import AROUND, NOT_SAID, OF_TEXTS, PUBLISHED

PAGE = Path(__file__).parents[4] / "docs" / "methods.md"
OURS = {"flow_grpo_window", "tempflow_fast", "adaptive", "awm_fast"}
HEAD = "| preset | guidance | steps | groups x size | optimizer steps | learning rate | average |"


def told(preset):
    """The cells of a preset on the page."""
    loop = PUBLISHED[preset]
    guidance = {"none": "none", "pipeline": "{}", "rollout": "{}, rollouts", None: "-"}[loop.get("model.guidance")]
    average = loop.get("train.ema", "-")
    if isinstance(average, dict):
        every = f", every {average['every']}" if average["every"] > 1 else ""
        average = f"{average['decay']}{every}, warm-up {average['warmup']}"
    size = loop.get("train.group_size", "-")
    return (
        guidance.format(loop.get("model.call.guidance_scale")),
        str(loop.get("model.call.num_inference_steps", "-")),
        "-" if "train.groups" not in loop and size == "-" else f"{loop.get('train.groups', '-')} x {size}",
        str(loop.get("train.updates", "-")),
        f"{loop['train.learning_rate']:.0e}".replace("e-0", "e-") if "train.learning_rate" in loop else "-",
        average or "none",
    )


def table():
    """The table of docs/methods.md: presets of equal cells share a row."""
    rows = {}
    for preset in PRESETS:
        if preset not in OURS:
            rows.setdefault(told(preset), []).append(f"`{preset}`")
    body = [f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in rows.items()]
    return "\n".join([HEAD, "|---" * 7 + "|", *body, ""])


@pytest.mark.parametrize("preset", PRESETS)
def test_each_source_says_what_is_around_its_method_or_it_is_said_that_it_does_not(preset):
    if preset in OURS:
        assert not PUBLISHED[preset]
        return
    asked = set(AROUND) - ({"model.guidance", "model.call.num_inference_steps"} if preset in OF_TEXTS else set())
    assert asked - PUBLISHED[preset].keys() == set(NOT_SAID.get(preset, ()))


def test_the_page_has_what_the_sources_say():
    assert table() in PAGE.read_text()


def test_a_source_s_guidance_is_what_its_row_sets():
    stated = {preset: PUBLISHED[preset].get("model.guidance") for preset in BESIDE}
    assert {preset for preset, guidance in stated.items() if guidance is None} == {"awm_fast", "seppo", "gdro"}
    assert all(guidance in (None, BESIDE[preset]["model.guidance"]) for preset, guidance in stated.items())
