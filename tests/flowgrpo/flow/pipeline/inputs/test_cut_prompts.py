"""Prompts that a text encoder cuts are counted in one line, and the pages of libraries are not printed."""

import logging

import pytest
from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

from flowgrpo.cli import main
from flowgrpo.flow.diagnostics import spectrum
from flowgrpo.flow.pipeline.inputs.cut_prompts import CutPrompts

LONG = "a red circle and a blue square and a green circle and two red squares and a blue circle"
CALL = ["num_inference_steps=2", "height=16", "width=16", "max_sequence_length=8", "guidance_scale=3.0"]


@pytest.fixture
def prompts(workplace):
    (workplace / "p.txt").write_text(f"{LONG}\na red circle\n{LONG} too\n")


@pytest.fixture
def said(caplog):
    """What libraries print, of which their own handlers write to the stderr that they were imported with."""
    heard, handler = [], logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    for name in ("diffusers", "transformers"):
        logging.getLogger(name).addHandler(handler)
    yield heard
    for name in ("diffusers", "transformers"):
        logging.getLogger(name).removeHandler(handler)


@pytest.mark.usefixtures("prompts")
@pytest.mark.parametrize("command", ["sample", "train", "doctor"])
def test_every_command_says_it_in_one_line(tiny_model, caplog, said, command, monkeypatch):
    monkeypatch.setattr(spectrum, "EVALUATIONS", 60)
    of_config = ["tiny.yaml", "prompts={train: p.txt, eval: p.txt}", "model.call.max_sequence_length=8"]
    asked = {
        "sample": ["sample", str(tiny_model), "--prompts", "p.txt", "--out", "out", *CALL],
        "train": ["train", *of_config, "train.iterations=1", "train.group_size=2", "train.updates=1"],
        "doctor": ["doctor", *of_config],
    }
    main(asked[command])
    lines = [record.getMessage() for record in caplog.records if "longer than a text" in record.getMessage()]
    cut, among = (1, 2) if command == "train" else (2, 3)  # the longest and the shortest; the others are encoded later
    assert lines == [
        f"{cut} of the {among} prompts encoded so far are longer than a text encoder reads, and cut: {cut} at 8 tokens"
    ]
    assert not [line for line in said if "truncated" in line or "Token indices" in line]


def test_what_libraries_say_otherwise_is_heard(said):
    own, other = (
        diffusers_logging.get_logger("diffusers.somewhere"),
        transformers_logging.get_logger("transformers.there"),
    )
    cut = CutPrompts()
    with cut.counted(["a cat"]):
        own.warning(
            "The following part of your input was truncated because `max_sequence_length` is set to  256 tokens: x"
        )
        own.warning("something else")
        other.warning("Token indices sequence length is longer than the specified maximum sequence length")
        other.warning("and another thing")
    own.warning("was truncated because CLIP can only handle sequences up to 77 tokens: x")
    assert [line.split()[0] for line in said] == ["something", "and", "was"]


def test_prompts_are_counted_once_and_told_once(caplog):
    own, cut = diffusers_logging.get_logger("diffusers.somewhere"), CutPrompts()
    for text in ("a", "a", "b"):
        for limit in (77, 256) if text == "a" else (77,):
            with cut.counted([text]):
                own.warning(f"was truncated because CLIP can only handle sequences up to {limit} tokens: x")
    cut.tell(5)
    cut.tell(5)
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("flowgrpo")]
    assert line == (
        "2 of the 5 prompts encoded so far are longer than a text encoder reads, and cut: 2 at 77 tokens, 1 at 256 tokens"
    )
