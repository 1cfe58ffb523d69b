import json
import os
from pathlib import Path

import pytest
import yaml
from read_card import HOSTILE, as_shown, blocks, table, words

from flowgrpo import config
from flowgrpo.cli import main
from flowgrpo.data.prompts import Row
from flowgrpo.flow.config import Config
from flowgrpo.training.reports import markdown, model_card


@pytest.mark.parametrize("prompt", HOSTILE)
def test_a_prompt_is_itself_in_table_code_and_command(prompt, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    negative = f"negative_prompt={model_card.format_value(prompt)}"
    command = model_card.command(["flowgrpo", "sample", "--prompt", prompt, negative])
    samples = [model_card.Shown(Row(prompt, 3), markdown.escape(prompt))]
    snippet = f"prompt = {prompt!r}"
    page = model_card.text(["# a card", ""], snippet=snippet, command=command, made="answer", samples=samples)
    assert table(page) == [[as_shown(prompt), "3", as_shown(prompt)]]
    code, shell = blocks(page)["python"], blocks(page)["sh"]
    names = {}
    exec(code, names)
    assert names["prompt"] == prompt
    assert words(shell)[:3] == ["sample", "--prompt", prompt]
    assert config.override(words(shell)[3]) == ("negative_prompt", prompt)
    assert list(tmp_path.iterdir()) == []


def test_names_stand_in_the_head_as_they_are(tmp_path):
    for path in ("a: b # c", "`x``", "- [y]"):
        settings = Config.model_validate({"model": {"path": path}, "rewards": [{"use": "./my`reward.py:a_b"}]})
        head = "\n".join(model_card.heading(tmp_path, settings, library="diffusers", kind="lora", step=1, task="x"))
        front = yaml.safe_load(head.split("---\n")[1])
        assert front == {
            "library_name": "diffusers", "license": "other", "license_name": "as-the-base-model", "pipeline_tag": "x",
            "tags": ["flowgrpo", "reinforcement-learning", "lora"],
        }  # fmt: skip
        codes = [c.content for t in card_tokens(head) for c in t.children or [] if c.type == "code_inline"]
        assert codes == [path, "flow_grpo", "./my`reward.py:a_b"]


def card_tokens(text):
    from markdown_it import MarkdownIt

    return MarkdownIt().parse(text.split("---\n")[2])


def test_an_exported_card_reproduces_the_picture_of_a_hostile_prompt(workplace):
    Path("hostile.jsonl").write_text("".join(json.dumps({"prompt": f"a {p}"}) + "\n" for p in HOSTILE[1:5]))
    assert main(["train", "tiny.yaml", "prompts.eval=hostile.jsonl", "train.iterations=1", "eval.save=0"]) == 0
    assert main(["export", "runs/t", "--out", "out"]) == 0
    page = Path("out/README.md").read_text()
    assert [row[0] for row in table(page)] == [as_shown(f"a {prompt}") for prompt in HOSTILE[1:5]]
    os.chdir("out")
    names = {}
    exec(blocks(page)["python"], names)
    names["image"].save("mine.png")
    assert Path("mine.png").read_bytes() == Path("sample-0.png").read_bytes()
    assert main(words(blocks(page)["sh"])) == 0
    assert Path("samples/0000.png").read_bytes() == Path("sample-0.png").read_bytes()
    assert json.loads(Path("samples/manifest.jsonl").read_text())["prompt"] == f"a {HOSTILE[1]}"
