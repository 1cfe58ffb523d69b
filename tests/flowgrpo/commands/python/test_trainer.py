"""`flowgrpo.Trainer`: a run from Python objects, with the numbers of the command."""

import json
import sys
import types
from pathlib import Path

import pytest
import tiny
import torch
import yaml
from cases import cases
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from peft import LoraConfig
from runs import metrics

import flowgrpo
from flowgrpo import config
from flowgrpo.cli import main
from flowgrpo.errors import InputError
from rewards import RewardError

SECTIONS = {
    "model": {"lora": None, "call": {"num_inference_steps": 4}},
    "train": {"groups": 2, "group_size": 4, "updates": 1, "learning_rate": 1.5e-4, "micro_batch": 8, "iterations": 2},
    "eval": {"every": 2, "prompts": 2, "save": 1},
}


def redness(images, prompts):
    """Mean red, less the mean of the other colours."""
    return (images[:, 0] - images[:, 1:].mean(1)).mean((1, 2)).tolist()


def blueness(images, prompts):
    """Mean blue, as a tensor."""
    return images[:, 2].mean((1, 2))


class Judge:
    """A reward that is an object."""

    def __call__(self, images, prompts):
        return images[:, 1].mean((1, 2)).tolist()


greenness = Judge()


TINY = {"call": {"num_inference_steps": 4, "height": 16, "width": 16, "max_sequence_length": 8, "guidance_scale": 1.0}}


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny.sd3().save_pretrained(folder)
    return folder


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def build(pipeline="shapes", **keywords):
        given = {
            "rewards": ["shapes"],
            "prompts": "shapes:train",
            "eval_prompts": "shapes:eval",
            "preset": "flow_grpo_fast",
        }
        return flowgrpo.Trainer(pipeline, **{**given, **SECTIONS, **keywords})

    return build


def measured(lines):
    """What was computed, without times and memory."""
    return [{key: x for key, x in line.items() if not key.startswith(("time/", "memory/"))} for line in lines]


DEMO = Path(__file__).parents[4] / "configs" / "shapes.yaml"


@pytest.mark.parametrize("groups", cases([12, 2], [2]))
def test_it_trains_the_demo_to_the_numbers_of_the_command(tmp_path, monkeypatch, groups):
    monkeypatch.chdir(tmp_path)
    written = yaml.safe_load(DEMO.read_text())
    written["train"] |= {"iterations": 4, "groups": groups}
    written["eval"] |= {"every": 4, "prompts": 8}
    changes = [f"{section}.{key}={value}" for section in ("train", "eval") for key, value in written[section].items()]
    door = flowgrpo.Trainer(written["model"].pop("path"), preset=written.pop("algorithm")["preset"], **written)
    lines = door.train()
    assert main(["train", str(DEMO), "run.name=command", *changes]) == 0
    for phase in ("train", "eval"):
        ours = [line for line in lines if line["phase"] == phase]
        assert measured(ours) == measured(metrics(tmp_path / "runs" / "command", phase)) != []
    assert door.metrics is lines


def test_a_config_file_gives_its_settings_and_is_kept(trainer, tmp_path, tiny_folder):
    written = {
        **SECTIONS,
        "rewards": [f"{__name__}:redness"],
        "model": {**TINY, "path": str(tiny_folder), "lora": None},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(written))
    door = flowgrpo.Trainer.from_config("run.yaml", {"train.iterations": 1})
    assert door.settings == config.load("run.yaml", {"train.iterations": 1})
    assert [line["step"] for line in door.train()] == [0, 1, 1]
    assert (door.folder / "inputs" / "run.yaml").is_file()


def test_a_function_a_list_of_prompts_and_all_that_follows(trainer, tmp_path, capsys, tiny_folder):
    prompts = ["a red circle", {"prompt": "a blue square", "colour": "blue"}]
    given = {"rewards": [redness, {"use": greenness, "weight": -0.5}], "prompts": prompts, "eval_prompts": None}
    door = trainer(tiny_folder, **given, eval_rewards=[blueness, "jpeg_size"], name="red", model=TINY)
    planned = door.plan()
    (source,) = {planned["config"]["prompts"][split] for split in ("train", "eval")}
    assert Path(source).parent == Path("runs/red-inputs")
    assert [json.loads(line)["prompt"] for line in Path(source).read_text().splitlines()] == [
        "a red circle",
        "a blue square",
    ]
    assert "model evaluations" in capsys.readouterr().out
    before = door.evaluate()
    assert before["name"] == "step-000000"
    assert list(before["rewards"]) == ["redness", "greenness", "blueness", "jpeg_size"]
    lines = door.train()
    assert {f"reward/{name}/mean" for name in before["rewards"]} <= lines[-1].keys()
    after = door.evaluate(samples=2)
    assert (after["name"], after["prompts"], after["samples"]) == ("step-000002", 2, 2)
    assert after["rewards"]["redness"]["mean"] != before["rewards"]["redness"]["mean"]
    assert (tmp_path / after["page"]).is_file()

    shown = door.sample(["a red circle", "a <b> square"], seed=3)
    assert [tuple(image.shape) for image in shown] == [(3, 16, 16)] * 2
    page = shown._repr_html_()
    assert page.count('<img alt="') == page.count('src="data:image/') == 2
    assert "a &lt;b&gt; square" in page
    assert [file.name for file in shown.save("pictures")] == ["0000.png", "0001.png"]
    assert (door.save_pretrained("exported") / "pytorch_lora_weights.safetensors").is_file()
    assert after["rewards"]["redness"]["mean"] - 0.5 * after["rewards"]["greenness"]["mean"] == pytest.approx(
        after["mean"]
    )
    assert before["mean"] == pytest.approx(lines[0]["reward/mean"], abs=1e-4)


def test_another_run_of_the_name_is_not_taken_for_this_one(trainer, monkeypatch):
    given = {"name": "red", "prompts": ["a red circle"], "eval_prompts": None, "rewards": [redness]}
    door = trainer(**given)
    with pytest.raises(InputError, match=r"^save_pretrained: nothing is trained yet, call train\(\) first$"):
        door.save_pretrained("exported")
    door.train()
    with pytest.raises(InputError, match="^run.name: runs/red exists already; set run.resume=true to continue it"):
        door.train()
    again = trainer(**given, eval_rewards=["jpeg_size"])
    assert again.evaluate()["name"] == "step-000002"  # the same run
    monkeypatch.setattr(
        "flowgrpo.commands.evaluations.targets.Target.sampler", lambda *_: pytest.fail("a model was loaded")
    )
    uses = (flowgrpo.Trainer.evaluate, lambda door: door.sample(["a"]), lambda door: door.save_pretrained("exported"))
    for other, keys in (
        ({"rewards": [blueness]}, "rewards"),
        ({"model": {}, "rewards": ["shapes"]}, "model.call, model.lora, rewards"),
        ({"preset": "awm_fast"}, "algorithm.preset, model.guidance"),
        ({"prompts": ["a blue square"]}, "prompts.eval, prompts.train"),
    ):
        stranger = trainer(**{**given, **other})
        said = f"^name: runs/red holds another run, which differs in {keys}; take another name$"
        for use in uses:
            with pytest.raises(InputError, match=said):
                use(stranger)


def test_a_run_goes_on_with_what_it_began_with(trainer, tiny_folder):
    prompts, once = ["a red circle", "a blue square"], {**SECTIONS["train"], "iterations": 1}

    def of(name, prompts=prompts, eval_prompts=prompts, **keywords):
        given = {"prompts": prompts, "eval_prompts": eval_prompts, "rewards": [redness], "model": TINY, "name": name}
        return trainer(tiny_folder, **{**given, **keywords})

    whole = of("whole").train()
    of("parts", train=once).train()
    assert measured(of("parts", run={"resume": True}).train())[-1] == measured(whole)[-1]
    with pytest.raises(
        InputError, match=r"^run.resume: prompts.train was 'runs/parts-inputs/prompts-\w+.jsonl' in runs/parts and is"
    ):
        of("parts", prompts=prompts[:1], run={"resume": True}).train()
    with pytest.raises(InputError, match="^run.resume: prompts.eval was"):
        of("parts", eval_prompts=prompts[:1], run={"resume": True}).train()


def kept_bias(folder):
    return SD3Transformer2DModel.from_pretrained(folder, subfolder="transformer").proj_out.bias


def test_a_changed_pipeline_is_what_the_run_trains(trainer, tmp_path):
    pipe = tiny.sd3()
    pipe("a", **TINY["call"])  # transformers hooks its modules when they are called
    pipe.transformer.proj_out.bias.data.fill_(0.25)
    small = {
        "call": {"num_inference_steps": 4, "height": 16, "width": 16, "max_sequence_length": 8, "guidance_scale": 1.0}
    }
    door = trainer(pipe, rewards=[redness], prompts=["a red circle"], eval_prompts=None, name="own",
                   model=small)  # fmt: skip
    assert door.settings.model.path == "runs/own-inputs/pipeline"
    folder = tmp_path / door.settings.model.path
    assert kept_bias(folder).eq(0.25).all()
    assert door.train()[-1]["reward/redness/mean"] is not None
    given = {"rewards": [redness], "prompts": ["a red circle"], "eval_prompts": None, "name": "own", "model": small}
    absent = {"text_encoder_3": None, "tokenizer_3": None}
    again = trainer(StableDiffusion3Pipeline.from_pretrained(folder, **absent), **given)  # in another session
    assert again.settings == door.settings
    pipe.transformer.proj_out.bias.data.fill_(0.5)
    with pytest.raises(
        InputError, match="^pipeline: the run 'own' began with other weights or another scheduler; take"
    ):
        trainer(pipe, **given, run={"resume": True})
    assert kept_bias(folder).eq(0.25).all()


def test_a_reward_that_changed_before_a_resume_is_told(trainer, monkeypatch, caplog):
    given = {"rewards": [redness], "prompts": ["a red circle"], "eval_prompts": None, "name": "red"}
    trainer(**given, train={**SECTIONS["train"], "iterations": 1}).train()
    assert Path("runs/red/inputs/redness.py").read_text().startswith("def redness(images, prompts):")
    blue = types.FunctionType(blueness.__code__, globals(), "redness")
    monkeypatch.setitem(globals(), "redness", blue)
    trainer(**{**given, "rewards": [blue]}, run={"resume": True}).train()
    said = f"rewards.0.use: {__name__}:redness has changed since the run began"
    assert said in caplog.text
    assert said in Path("runs/red/log.txt").read_text()


def test_an_edited_reward_scores_again(trainer, monkeypatch):
    given = {"name": "red", "prompts": ["a red circle"], "eval_prompts": None}
    source = "def tone(images, prompts):\n    return (images[:, 0] {} 0).mean((1, 2)).tolist()\n"
    Path("tone.py").write_text(source.format("+"))
    door = trainer(rewards=["./tone.py"], **given)
    plain = door.evaluate()["mean"]
    Path("tone.py").write_text(source.format("-") + "\n# the same, edited\n")
    monkeypatch.setattr("flowgrpo.commands.evaluations.targets.Target.sampler", lambda *_: pytest.fail("sampled again"))
    assert door.evaluate()["mean"] == plain
    Path("tone.py").write_text(source.format("*"))
    assert door.evaluate()["mean"] == 0


def test_a_single_reward_needs_no_list(trainer):
    for reward, use in (
        ("shapes", "shapes"),
        (redness, f"{__name__}:redness"),
        ({"use": greenness}, f"{__name__}:greenness"),
    ):
        assert [each.use for each in trainer(rewards=reward).settings.rewards] == [use]


def test_a_text_model(trainer):
    door = flowgrpo.Trainer(
        "digits", rewards=["arithmetic"], prompts=["1 + 1 ="], preset="diffu_grpo", name="text",
        train={"groups": 1, "group_size": 2, "updates": 1, "iterations": 1},
    )  # fmt: skip
    (text,) = door.sample(["1 + 1 ="])
    assert isinstance(text, str)


class Own(StableDiffusion3Pipeline):
    """A class that diffusers does not know."""


class Attending:
    """A processor of attention that diffusers does not know."""


def test_what_is_wrong_is_said(trainer, tmp_path, monkeypatch):
    adapted = tiny.sd3()
    adapted.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))
    own = Own(**tiny.sd3().components)
    patched, hooked, attending = tiny.sd3(), tiny.sd3(), tiny.sd3()
    patched.transformer.forward = lambda *_, **__: None
    hooked.vae.decoder.register_forward_hook(lambda *_: None)
    replaced, rounded, shifted = tiny.sd3(), tiny.sd3(), tiny.sd3()
    rounded.transformer.norm_out.norm.eps = 0.5
    replaced.vae.decoder.conv_act = torch.nn.Tanh()
    shifted.scheduler.set_shift(12.0)
    attending.transformer.transformer_blocks[0].attn.processor = Attending()
    for arguments, sentence in [
        ({"rewards": [lambda images, prompts: [0.0] * len(prompts)]}, "^rewards: '<lambda>' has no name in a module"),
        ({"rewards": [Judge()]}, "^rewards: an object of Judge has no name in a module"),
        ({"rewards": [3]}, "^rewards: 3 is neither a name nor a map nor a function"),
        ({"prompts": []}, "^prompts: the list is empty"),
        ({"prompts": ["a", 3]}, r'^prompts: entry 1 is 3, take a text or a map such as {"prompt"'),
        ({"eval_prompts": [{"prompt": "a", "image": object()}]}, "^eval_prompts: a column cannot be written to a table"),
        ({"train": {"iteratons": 3}}, "did you mean 'iterations'"),
        ({"trains": {}}, "^trains: there is no such section, did you mean 'train'"),
        ({"iterations": 4}, r"^iterations: there is no such section, it is a key of train, write train={'iterations': ...}"),
        ({"rewards": []}, "rewards"),
        ({"preset": "flow_grpo_fas"}, "flow_grpo_fas"),
        ({"pipeline": 3}, "^pipeline: int is no pipeline of diffusers"),
        ({"pipeline": own}, "^pipeline: Own is not diffusers' own"),
        ({"pipeline": adapted}, "^pipeline: its transformer has adapters; call fuse_lora"),
        ({"pipeline": patched}, "^pipeline: transformer has a forward of its own, which its folder would lose; change"),
        ({"pipeline": hooked}, "^pipeline: vae.decoder has a forward hook of its own"),
        ({"pipeline": replaced}, "^pipeline: vae.decoder.conv_act is a Tanh in place of a SiLU, which its"),
        ({"pipeline": rounded}, "^pipeline: transformer.norm_out.norm.eps is 0.5, and 1e-06 by its config, which its"),
        ({"pipeline": shifted}, "^pipeline: its scheduler has shift 12.0, and 3.0 in its config, which its"),
        ({"pipeline": attending}, "^pipeline: transformer.transformer_blocks.0.attn has a processor Attending of its own"),
        ({"pipeline": "shape"}, "did you mean 'shapes'"),
        ({"prompts": {"pick": {"by": "variance"}}}, "^prompts: the map has no 'train'"),
        ({"prompts": {"train": ["a"], "piks": {}}}, "^prompts.piks: unknown key, did you mean 'pick'"),
        ({"prompts": {"train": ["a"], "eval": ["b"]}, "eval_prompts": ["c"]}, "^prompts: its eval is an argument, too"),
        ({"preset": "nft", "algorithm": {"preset": "awm_fast"}}, "^algorithm: its preset is an argument, too; leave"),
        ({"name": "a", "run": {"name": "b"}}, "^run: its name is an argument, too"),
    ]:  # fmt: skip
        with pytest.raises(InputError, match=sentence):
            trainer(**{"prompts": ["a red circle"], "pipeline": tiny.sd3(), **arguments})
    for key in ("rewards", "eval_rewards"):
        with pytest.raises(RewardError, match="there is no reward 'shape'"):
            trainer(prompts=["a red circle"], **{key: ["shape"]})
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="^pipeline: several processes would save it"):
        trainer(tiny.sd3())
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(InputError, match="^sample: 'a red circle' is one text"):
        trainer().sample("a red circle")
    assert not (tmp_path / "runs" / "notebook" / "config.yaml").exists()


def test_the_door_imports_it_at_use():
    with pytest.raises(AttributeError, match="module 'flowgrpo' has no attribute 'Trainr'"):
        flowgrpo.Trainr  # noqa: B018
    assert sys.modules["flowgrpo.commands.python.trainer"].Trainer is flowgrpo.Trainer
