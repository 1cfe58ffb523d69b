"""The report as Markdown: its tables, and that others' texts stay in their cells."""

from planted_run import CONFIG, LINES, WILD, run_of, use, with_samples, with_trees

from flowgrpo.commands.report import write_report


def sections(text):
    """The text below each heading."""
    parts = text.split("\n## ")
    return {part.partition("\n")[0]: part.partition("\n")[2] for part in parts[1:]}


def markdown(folder, run, name="r.md"):
    return write_report(run, folder / name).read_text()


def test_a_run_is_told_in_tables(tmp_path):
    run = with_trees(with_samples(run_of(tmp_path / "a run", warnings=["12:00 late"]), [0.1, 0.9]))
    text = markdown(tmp_path, run)
    assert text.startswith("# Report of a run\n\niteration 2 of 4, written 20")
    assert "Mean held-out reward: 0.200 ± 0.10 before training, **0.500 ± 0.10** now (+0.300)." in text
    found = sections(text)
    assert "| rollout | 8.0 | 40% | 200 | 40 |" in found["What it cost"]
    assert "| total | 20.0 | 100% | 380 | 60 |" in found["What it cost"]
    assert "| 2 | 0.500 ± 0.10 | 0.500 | 0.400 |" in found["Evaluations"]
    assert "| gradient norm | 1.00 | 2.00 | 3.00 | 3.00 |" in found["Groups and policy, by iteration"]
    assert "| watched | 1.00 | 0.400 | 1 |" in found["Watched rewards"]
    assert "| 1 | σ 1.00 | 0.35 |" in found["The spectrum of its trees"]
    best = found["Best samples of 2 after iteration 2"]
    assert "| ![sample](a%20run/samples/2-01.png) | prompt 1 | 1 | 0.900 | mine 0.900, watched 0.500 |" in best
    assert "1 in log.txt:\n\n```text\n12:00 late\n```" in found["Open warnings"]


def test_links_start_where_the_report_lies(tmp_path):
    run = with_samples(run_of(tmp_path / "r"), [0.1])
    assert "![sample](samples/2-00.png)" in markdown(run, run)
    assert "![sample](../r/samples/2-00.png)" in markdown(tmp_path, run, "docs/r.md")


def test_what_was_not_measured_is_left_out(tmp_path):
    text = markdown(tmp_path, run_of(tmp_path / "r", []))
    assert list(sections(text)) == ["What was asked", "Watched rewards", "The spectrum of its trees", "Open warnings"]
    assert "no iteration yet" in text
    assert "None in log.txt." in text


def test_texts_of_others_stay_in_their_cells(tmp_path):
    model = {**CONFIG["model"], "path": "a | b\n# c"}
    config = {**CONFIG, "eval_rewards": [{**use("a"), "name": WILD}], "model": model}
    lines = [{**line, f"reward/{WILD}/mean": 0.5} for line in LINES]
    run = run_of(tmp_path / "r", lines, config=config, warnings=["```\n# x"])
    text = markdown(tmp_path, with_samples(run, [0.1, 0.2], prompts=[WILD, "a\n| b"]))
    outside = "".join(part for i, part in enumerate(text.replace("````", "```").split("```")) if i % 2 == 0)
    assert not [words for words in ("<img", "<script", "\n# c") if words in outside]
    tables = [block.splitlines() for block in outside.split("\n\n") if block.startswith("|")]
    assert tables
    for rows in tables:
        assert len({row.count("|") for row in rows}) == 1
