"""Parts of a schedule, as they are written and read."""

import pytest
import yaml

from flowgrpo import config
from flowgrpo.data.yaml_maps import parse_yaml
from flowgrpo.errors import InputError
from flowgrpo.schema.schedule import part_text, read_part


@pytest.mark.parametrize(
    ("written", "part"),
    [("0:0.6", [0, 0.6]), ("0.25:1", [0.25, 1]), ([0, 0.6], [0, 0.6]), (" .1 : 3e-1", [0.1, 0.3]), (None, None)],
)
def test_a_part_is_a_text_or_a_list(written, part):
    assert read_part(written) == part


@pytest.mark.parametrize(
    "written",
    [
        *("0.6", "a:b", "0:0.6:1", ":", "", "1:0", "0:1.1", "-0.1:1", "0:nan", "inf:inf"),
        *(0.6, 1, True, [0], [0, 0.5, 1], ["a", 1], [None, 1], [True, True], [[0], 1], {"0": 0.6}, {0, 1}),
    ],
)
def test_what_is_no_part_is_one_sentence(written):
    with pytest.raises(InputError, match=r"^eval\.adapter_steps: .*write first:end, fractions of the steps from the"):
        read_part(written)
    with pytest.raises(InputError, match="^--adapter-steps: "):
        read_part(written, "--adapter-steps")


@pytest.mark.parametrize("text", ["0:0.6", "0.1:0.7", "0:0", "1:1", "0.333333333:1", "0.5:0.5"])
def test_a_part_is_written_as_it_is_read(text):
    assert part_text(read_part(text)) == text


@pytest.mark.parametrize(
    "written", ["eval: {adapter_steps: 0:0.6}", "eval: {adapter_steps: '0:0.6'}", "eval:\n  adapter_steps: [0, 0.6]"]
)
def test_a_config_takes_a_part_in_every_spelling(written):
    settings = config.validate(parse_yaml(f"model: {{path: shapes}}\n{written}", "config.yaml"))
    assert settings.eval.adapter_steps == [0.0, 0.6]
    assert config.validate(yaml.safe_load(config.dump(settings))) == settings
