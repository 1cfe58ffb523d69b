"""docs/reference/cli.md beside the commands."""

from pathlib import Path

import typer
from page_commands import commands

from flowgrpo import cli
from flowgrpo.commands.terminal import GROUPS

PAGE = "docs/reference/cli.md"
TEXT = (Path(__file__).parents[3] / PAGE).read_text()


def section(title):
    return TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_page_has_the_commands_of_each_group():
    lists = typer.main.get_command(cli.app).lists()
    assert list(lists) == list(GROUPS)
    for title, items in lists.items():
        assert f"\n{items}\n" in section(title), f"{PAGE}: put `Commands.lists` there, under {title}:\n{items}"


def test_the_page_has_an_example_of_each_command():
    for title, names in GROUPS.items():
        shown = [command.words[1] for command in commands(PAGE, section(title))]
        assert sorted(set(shown)) == sorted(names), title


def test_every_command_is_in_a_group():
    named = {name for names in GROUPS.values() for name in names}
    assert set(typer.main.get_command(cli.app).commands) == named
