from functools import reduce
from pathlib import Path

import pytest
import yaml

from flowgrpo import config
from flowgrpo.data import yaml_maps
from flowgrpo.errors import InputError
from flowgrpo.flow.methods import CHOICES
from flowgrpo.flow.methods.presets import PRESETS
from flowgrpo.flow.methods.published import PUBLISHED

ROOT = Path(__file__).parents[2]


def rows_of(table):
    """The cells of a table, of which an indented line continues the one above."""
    return [line.split(" | ") for line in table.strip().replace("\n    ", " ").splitlines()]


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: {path: shapes}\nalgorithm: {preset: mix_grpo}\n")
    return file


WRONG = rows_of("""
train.iteration=3 | train.iteration: unknown key, did you mean 'iterations'?
modle.path=3 | modle: unknown key, did you mean 'model'?
model.lora.rnk=3 | model.lora.rnk: unknown key, did you mean 'rank'?
rewards=[{us: shapes}] | rewards.0.us: unknown key, did you mean 'use'?
train.iterations=ten | train.iterations: 'ten' is wrong, input should be a valid integer
train.iterations=true | train.iterations: True is wrong, input should be a valid integer
train.iterations=0 | train.iterations: 0 is wrong, input should be greater than or equal to 1
train=3 | train: 3 is not a map of keys
kind=[flow] | kind: ['flow'] is unknown, did you mean 'flow'?
algorithm.preset={a: b} | algorithm.preset: {'a': 'b'} is unknown, choose one of
algorithm.kernel.name=[x] | algorithm.kernel: ['x'] is unknown, choose one of
algorithm={1: cps} | algorithm.1: unknown key, choose one of preset,
train={'a[b]': 3} | train.a[b]: unknown key, choose one of
train={'': 3} | train.'': unknown key, choose one of
model.dtype=float23 | model.dtype: 'float23' is not allowed, did you mean 'float32'?
algorithm.preset=flowgrpo | algorithm.preset: 'flowgrpo' is unknown, did you mean 'flow_grpo'?
algorithm.kernal=cps | algorithm.kernal: unknown key, did you mean 'kernel'?
algorithm.kernel=cpss | algorithm.kernel: 'cpss' is unknown, did you mean 'cps'?
algorithm.kernel={name: cps, size: 3} | algorithm.kernel.size: unknown key of cps, which has solver, log_prob
algorithm.kernel.level=-1 | algorithm.kernel.level: -1 is wrong, input should be greater than 0
algorithm.kernel.level=[0.7, -1] | algorithm.kernel.level.1: -1 is wrong, input should be greater than 0
algorithm.kernel.level=[0.7, x] | algorithm.kernel.level.1: 'x' is wrong, input should be a valid number
algorithm.kernel.level=x | algorithm.kernel.level: 'x' is wrong, input should be a valid number
algorithm.kernel={name: cps, level: [0.5, 1.5]} | algorithm.kernel.level.1: 1.5 is wrong, input should be less than
    or equal to 1
algorithm.objective.clip_range=[1e-4, 1e-4, 1e-4] | algorithm.objective.clip_range: [0.0001, 0.0001, 0.0001] is
    wrong, list should have at most 2 items
algorithm.objective.clip_range=-1 | algorithm.objective.clip_range: -1 is wrong, input should be greater than 0
algorithm.objective.kl.form=exactly | algorithm.objective.kl.form: 'exactly' is not allowed, did you mean 'exact'?
algorithm={preset: grpo_guard, kernel: {log_prob: sum}} | algorithm.kernel.log_prob: normalised_ratio needs the form mean,
    not sum; take mean
algorithm={preset: branch_grpo, objective: prefix_ratio, tree: {prune: {rule: depth}}} | algorithm.tree.prune.rule:
    depth removes steps of paths, but prefix_ratio needs whole paths; take parent_top1
algorithm={preset: branch_grpo, objective: prefix_ratio, baseline: {drop_zero: true}} |
    algorithm.baseline.drop_zero: with depthwise it removes single steps of paths
algorithm={preset: ctpo, kernel: cps} | algorithm.kernel.log_prob: prefix_ratio sums log ratios over
    steps, but constant_free omits
algorithm={objective: trajectory_ratio, kernel: cps} | algorithm.kernel.log_prob: trajectory_ratio sums log ratios
algorithm={objective: trajectory_ratio} && train={split: edges} | train.split: edges spreads the steps of a path over
algorithm={preset: ctpo, objective: {power: -0.5}} | algorithm.objective.power: -0.5 is wrong, input should be
    greater than or equal to 0
algorithm.objective.kl={beta: 0.1, target: 0.01} | algorithm.objective.kl: to adapt the coefficient give target and
    max_beta, with 0 < beta <= max_beta
algorithm.objective.kl={beta: 0.1, target: 0.01, max_beta: 0.05} | algorithm.objective.kl: to adapt the coefficient
    give target and max_beta, with 0 < beta <= max_beta
algorithm.objective.kl.max_beta=0.1 | algorithm.objective.kl: to adapt the coefficient give target and
algorithm.objective.kl={target: 0.01, max_beta: 0.1} | algorithm.objective.kl.beta: previous and target need a value above 0
algorithm.objective.kl.previous=0.1 | algorithm.objective.kl.beta: previous and target need a value above 0
algorithm.objective.kl.reference=moving | algorithm.objective.kl.beta: a base or moving
algorithm={preset: branch_grpo, tree: {prune: {rule: top1}}} | algorithm.tree.prune.rule: 'top1' is not allowed,
algorithm={preset: branch_grpo, tree: {prune: {fraction: 0.2}}} | algorithm.tree.prune.rule: required, but not given
algorithm={preset: dense_grpo, kernel: {calibrate: {round: 3}}} | algorithm.kernel.calibrate.round: unknown key, did
    you mean 'rounds'?
algorithm.preset=tempflow | train.group_size: 16 does not divide by the 6 algorithm.tree.branches children
algorithm={preset: branch_grpo, tree: {splits: [0, 1, 2, 3, 4]}} | train.group_size: 16 does not divide by the 32
    leaves of a tree with algorithm.tree.factor 2, take 32
train.groups=7 | train.groups: 7 groups do not divide into train.updates = 2 parts on 1 process, take 6 or 8
train.groups=1000000000000 | train.groups: 1000000000000 groups of train.group_size = 16 samples are more than
train.group_size=1000000000 | train.groups: 8 groups of train.group_size = 1000000000 samples are more than
run.name=a/b | run.name: 'a/b' may hold only letters, digits, '.', '_' and '-'
run.name=.. | run.name: '..' may hold only
train.optimizer.betas=[0.9, 1.5] | train.optimizer.betas.1: 1.5 is wrong, input should be less than 1
train.learning_rate=.inf | train.learning_rate: inf is wrong, input should be a finite number
train.learning_rate=1e38 | train.learning_rate: 1e+38 is wrong, input should be less than or equal to 1
train.optimizer.eps=1e39 | train.optimizer.eps: 1e+39 is wrong, input should be less than or equal to 1
train.optimizer.weight_decay=1e20 | train.optimizer.weight_decay: 1e+20 is wrong, input should be less
rewards=[{use: shapes, weight: .nan}] | rewards.0.weight: nan is wrong, input should be a finite number
rewards=[3] | rewards.0: 3 is not a map of keys
run.patience=0 | run.patience: 0 is wrong, input should be greater than or equal to 1
rewards=[{use: a, use: b}] | rewards: not valid YAML (the key 'use' is given twice)
iterations | 'iterations': an override is written key=value, for example train.iterations=4
rewards=[{ | rewards: not valid YAML
train.ema=1.5 | train.ema.decay: 1.5 is wrong, input should be less than 1
train.schedule=cosin | train.schedule.name: 'cosin' is not allowed, did you mean 'cosine'
train.schedule={warm: 3} | train.schedule.warm: unknown key
train.memory=4 | train.memory: it is called train.half_life now
train={memory: 4.0} | train.memory: it is called train.half_life now
algorithm={preset: tempflow, kernel: cps} && train.group_size=24 | algorithm.objective.step_weights: noise_aware
    removes a factor 1 / std
algorithm={preset: ctpo} && train={split: edges} | train.split: edges spreads the steps of a path
    over several optimizer steps, but
algorithm={preset: branch_grpo, objective: prefix_ratio} && train={select: {fraction: 0.5}} | train.select: with
    depthwise it removes single steps of paths, but prefix_ratio needs whole paths; take null
""")


@pytest.mark.parametrize(("override", "said"), WRONG)
def test_whatever_is_wrong_is_said_in_one_sentence(path, override, said):
    with pytest.raises(InputError) as caught:
        config.load(path, override.split(" && "))
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_a_missing_or_broken_file_is_named(path, tmp_path):
    with pytest.raises(InputError, match="no such config file, did you mean '.*/run.yaml'"):
        config.load(tmp_path / "rum.yaml")
    for text, said in {
        "model:\n  path: [\n": r"run.yaml:\d+: not valid YAML",
        "- 3\n": "a config is a map of keys",
        "{}\n": "model: required, but not given",
    }.items():
        path.write_text(text)
        with pytest.raises(InputError, match=said):
            config.load(path)


def test_a_word_replaces_an_axis_and_an_option_replaces_an_option(path):
    plain = {"name": "flow_sde", "solver": "euler", "log_prob": "mean", "calibrate": None, "level": 0.7}
    assert config.load(path).algorithm.kernel.model_dump() == plain
    word = config.load(path, ["algorithm.kernel=cps"]).algorithm
    assert (word.kernel.name, word.kernel.level, word.tree.size) == ("cps", 0.8, 4)
    option = config.load(path, ["algorithm.tree.size=2"]).algorithm.tree
    assert (option.name, option.size, option.move) == ("window", 2, "sliding")
    named = config.load(path, ["algorithm.tree={name: window, size: 2}"]).algorithm.tree
    assert (named.size, named.move) == (2, "sliding")
    inner = config.load(path, ["algorithm.preset=flow_grpo", "algorithm.objective.kl.beta=0.1"]).algorithm.objective
    assert (inner.clip_range, inner.kl.form, inner.kl.beta) == (1e-4, "flow_grpo", 0.1)
    both = config.load(path, ["algorithm.kernel=cps", "algorithm.kernel.level=0.5"]).algorithm.kernel
    assert (both.name, both.level) == ("cps", 0.5)


def test_an_answer_whose_blocks_fill_the_memory_is_refused():
    with pytest.raises(InputError, match=r"^model\.length: 1000000000000 is wrong, .* less than or equal to 131072$"):
        config.validate({"kind": "mdlm", "model": {"path": "digits", "length": 10**12}})


def test_numbers_are_read_as_people_write_them(path):
    assert config.load(path, ["train.learning_rate=3e-4"]).train.learning_rate == 3e-4
    assert config.load(path, ["model.lora=null"]).model.lora is None
    assert config.load(path, {"train.ema": None, "train.groups": 4}).train.ema is None


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_six_words_and_resolves_to_itself(path, preset):
    options = [f"algorithm.preset={preset}", "train.group_size=24"]
    if "clip_range" in PRESETS[preset]["objective"]:
        options.append("algorithm.objective.clip_range=[1e-4, 2e-4]")
    resolved = config.load(path, options)
    assert config.validate(yaml.safe_load(config.dump(resolved))) == resolved
    words = {axis: getattr(resolved.algorithm, axis).name for axis in CHOICES}
    assert words == {axis: row["name"] for axis, row in PRESETS[preset].items()}


def test_a_number_is_short_for_an_average_and_a_word_for_a_schedule(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: shapes}\ntrain: {ema: 0.8, schedule: cosine}\n")
    short = config.load(path).train
    assert (short.ema.decay, short.ema.every, short.schedule.name, short.schedule.warmup) == (0.8, 1, "cosine", 0)
    long = config.load(path, ["train.ema={decay: 0.8, every: 8}", "train.schedule.warmup=5"]).train
    assert (long.ema.every, long.schedule.name, long.schedule.warmup) == (8, "cosine", 5)
    key = "prompts.pick.second_stage"
    stage = config.load(path, [f"{key}=hardness", f"{key}.most=8", "train.group_size=4"]).prompts.pick.second_stage
    assert (stage.form, stage.most) == ("hardness", 8.0)
    dotted = config.load(path, ["train.ema.every=8"]).train.ema
    assert (dotted.decay, dotted.every) == (0.8, 8)


@pytest.mark.parametrize("preset", PRESETS)
def test_what_a_source_says_of_the_loop_can_be_asked_for(preset):
    written = yaml.safe_load((ROOT / "configs" / "shapes.yaml").read_text()) | {"algorithm": {"preset": preset}}
    written["train"]["group_size"] = 24  # which all trees divide
    chosen = config.apply_override(written, PUBLISHED[preset]).model_dump(mode="json")
    for key, value in PUBLISHED[preset].items():
        found = reduce(lambda at, name: at[name], key.split("."), chosen)
        assert found == value or (isinstance(value, dict) and found == found | value)


def laughs(link):
    """Nine of nine of nine ... : 9^9 values in a few hundred letters."""
    lines = ["a: &a {k: 1}"]
    for before, name in zip("abcdefgh", "bcdefghi", strict=True):
        lines.append(f"{name}: &{name} {link.format(', '.join([f'*{before}'] * 9))}")
    return "\n".join(lines)


MANY = "place:6: not valid YAML (holds more than 131072 values where its aliases are followed)"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (laughs("[{}]"), MANY),
        (laughs("{{<<: [{}]}}"), MANY),
        ("&a [*a]", "place: not valid YAML (*a stands in what it stands for)"),
        ("a: &a {b: 1, <<: *a}", "place: not valid YAML (*a stands in what it stands for)"),
        ("[" * 100_000, "place: not valid YAML (lists and maps are nested deeper than 64)"),
        ("{a: " * 1000, "place: not valid YAML (lists and maps are nested deeper than 64)"),
        ("x" * 300_000, "place: has 300000 characters, at most 262144 are read"),
        ("day: 2024-99-99", "place: not valid YAML (a value is not of its kind: month must be in 1..12)"),
        ("a: !!int x", "place: not valid YAML (a value is not of its kind: invalid literal"),
        ("a: !!bool x", "place: not valid YAML (a value is not of its kind"),
        ("a: !!timestamp x", "place: not valid YAML (a value is not of its kind"),
        ("a: " + "9" * 5000, "place: not valid YAML (a value is not of its kind: Exceeds the limit"),
        (r'a: "\ud800"', r"place: the text '\ud800' has half a character"),
        ("a: \udc80", "place: not valid YAML (unacceptable character #xdc80"),
        ("a: 0x" + "f" * 5000, "place: a whole number of 20000 bits is more than Python writes down"),
        ("a: \x00", "place: not valid YAML (unacceptable character #x0000"),
    ],
)
def test_hostile_yaml_is_one_sentence(text, said):
    with pytest.raises(InputError) as error:
        yaml_maps.parse_yaml(text, "place")
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


def test_aliases_and_merged_maps_still_serve_and_a_key_of_a_long_map_is_found_twice():
    written = yaml_maps.parse_yaml("a: &a {x: 1}\nb: {<<: *a, y: 3e-4}\nc: [*a, *a]", "place")
    assert written == {"a": {"x": 1}, "b": {"x": 1, "y": 0.0003}, "c": [{"x": 1}] * 2}
    with pytest.raises(InputError, match="place:3001: not valid YAML .the key 'k7' is given twice"):
        yaml_maps.parse_yaml("".join(f"k{i}: 1\n" for i in range(3000)) + "k7: 1\n", "place")


def test_configs_that_cannot_be_read_and_endless_keys_are_one_sentence(path):
    with pytest.raises(InputError, match="/proc/self/mem: cannot be read"):
        config.load("/proc/self/mem")
    path.write_text("a" * 300_000)
    with pytest.raises(InputError, match="run.yaml: has 262145 characters, at most 262144 are read"):
        config.load(path)
    path.write_text("model: {path: shapes}\n")
    with pytest.raises(InputError, match="has 100000 dots, at most 64 are read"):
        config.load(path, ["model.call" + ".a" * 99_999 + "=1"])


@pytest.mark.parametrize(
    ("algorithm", "train"),
    [
        ("{preset: tempflow, kernel: {name: cps, log_prob: mean}}", "{group_size: 24}"),  # noise_aware with a std
        ("{preset: ctpo}", "{select: {fraction: 0.5}}"),  # whole chains leave
        ("{preset: ctpo, baseline: median}", "{split: samples}"),
        ("{preset: tempflow}", "{split: edges, group_size: 24}"),
    ],
)
def test_ratios_of_paths_and_weights_of_steps_are_taken_where_the_update_has_what_they_need(path, algorithm, train):
    objective = config.load(path, [f"algorithm={algorithm}", f"train={train}"]).algorithm.objective
    assert "tempflow" not in algorithm or objective.step_weights == "noise_aware"


def test_a_text_among_rewards_is_a_use(path):
    short = config.load(path, ["rewards=[./my_reward.py:redness, {use: shapes}]", "eval_rewards=[jpeg_size]"])
    uses = "rewards=[{use: './my_reward.py:redness'}, {use: shapes}]", "eval_rewards=[{use: jpeg_size}]"
    assert short == config.load(path, uses)


@pytest.mark.parametrize("key", ["rewards", "eval_rewards"])
@pytest.mark.parametrize("one", ["ocr", "[ocr]", "{use: ocr}", "[{use: ocr}]"])
def test_one_reward_needs_neither_a_list_nor_a_map(path, key, one):
    assert [use.use for use in getattr(config.load(path, [f"{key}={one}"]), key)] == ["ocr"]


def test_overrides_apply_to_what_was_written_and_not_to_what_followed(path):
    written = {"model": {"path": "shapes"}, "rewards": [{"use": "shapes"}]}
    chosen = ["algorithm.preset=mix_grpo", "train.groups=4", "rewards=[jpeg_size]"]
    expected = {**written, "algorithm": {"preset": "mix_grpo"}, "train": {"groups": 4}, "rewards": ["jpeg_size"]}
    assert config.apply_override(written, chosen) == config.validate(expected)


@pytest.mark.parametrize(("kept", "file"), [("shapes", "shapes.yaml"), ("digits", "mdlm.yaml")])
def test_a_run_that_was_begun_under_old_names_goes_on(kept, file):
    """What a run of each kind had written down when train.half_life was train.memory and decoders held nulls."""
    begun = config.of_run(ROOT / "tests" / "data" / "begun" / kept)
    since = [  # what has changed in the config
        "algorithm={preset: tempflow_fast, objective: {clip_range: 1.0e-3}}",
        "train={iterations: 48, groups: 4, group_size: 24, updates: 2, learning_rate: 7.0e-5, micro_batch: 32, ema: 0.9}",
        "train.schedule=constant",
        "run.trees=null",
    ]
    assert begun == config.load(ROOT / "configs" / file, [*(since if kept == "shapes" else []), "train.half_life=5.0"])


def test_where_there_is_no_run(tmp_path):
    with pytest.raises(InputError, match="there is no run here"):
        config.of_run(tmp_path)


def test_calls_of_a_language_model_are_not_shared():
    run = {"processes": 2, "context_parallel": 2}
    with pytest.raises(
        InputError,
        match="run.context_parallel: calls of a language model cannot be split",
    ):
        config.validate({"kind": "mdlm", "model": {"path": "digits"}, "run": run})


def test_a_text_that_is_read_again_gives_a_value_of_its_own(monkeypatch):
    """It is parsed once, which takes long."""
    text = "a: {b: [1, 2]}  # of this test"
    first = yaml_maps.parse_yaml(text, "here")
    first["a"]["b"].append(3)
    monkeypatch.setattr(yaml_maps.yaml, "load", lambda *_: pytest.fail("parsed again"))
    assert yaml_maps.parse_yaml(text, "there") == {"a": {"b": [1, 2]}}
