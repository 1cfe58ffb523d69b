"""What the sources set around their methods, and the page that tells it."""

from pathlib import Path

import pytest

from flowgrpo.flow.methods.presets import BESIDE, PRESETS
from flowgrpo.flow.methods.published import AROUND, NOT_SAID, PUBLISHED

PAGE = Path(__file__).parents[4] / "docs" / "methods.md"
OURS = {"flow_grpo_window", "tempflow_fast", "adaptive", "awm_fast"}
UNSAID = {  # what could not be read in any source, by hand
    "mc_grpo": {"model.guidance", "model.call.num_inference_steps", "train.groups"},  # of language models
    "ctpo": {"model.guidance", "model.call.num_inference_steps", "train.ema"},
    "tempflow": {"train.learning_rate"},
    "branch_grpo_mix": {"train.updates"},
    "dense_grpo": {"model.guidance", "train.groups", "train.updates", "train.ema"},
    "stepwise_flow_grpo": set(AROUND) - {"model.call.num_inference_steps"},
    "vgpo": set(AROUND) - {"model.call.num_inference_steps"},
    "sage_grpo": {"train.ema"},
    "elbo_grpo": {"train.groups", "train.group_size", "train.updates", "train.learning_rate"},
    "ram": {"train.groups", "train.group_size", "train.updates", "train.learning_rate"},
    "seppo": {"model.guidance", "model.call.num_inference_steps", "train.learning_rate", "train.ema"},
    "gdro": set(AROUND) - {"train.group_size", "train.learning_rate"},
}
HEAD = "| preset | guidance | steps | groups x size | optimizer steps | learning rate | average |"


def told(preset):
    """The cells of a preset on the page."""
    loop = PUBLISHED[preset]
    guidance = {"none": "none", "pipeline": "{}", "rollout": "{}, rollouts", None: "-"}[loop.get("model.guidance")]
    average = loop.get("train.ema", "-")
    if isinstance(average, dict):
        average = f"{average['decay']}" + (f", every {average['every']}" if average["every"] > 1 else "")
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
    assert (preset in OURS) == (not PUBLISHED[preset])
    assert set(NOT_SAID.get(preset, ())) == UNSAID.get(preset, set())


def test_the_page_has_what_the_sources_say():
    assert table() in PAGE.read_text()


def test_a_source_s_guidance_is_what_its_row_sets():
    for preset, beside in BESIDE.items():
        assert PUBLISHED[preset].get("model.guidance", beside["model.guidance"]) == beside["model.guidance"]
