"""Every built-in config for a real model, trained for two iterations on a tiny model of the same classes."""

import json
import re
from dataclasses import replace
from functools import cache, wraps
from pathlib import Path

import pytest
from diffusers import HunyuanVideo15Pipeline, QwenImageEditPlusPipeline, QwenImagePipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus
from released import released
from zoo import SPECIMENS

from flowgrpo import config
from flowgrpo.cli import main
from flowgrpo.data import configs
from flowgrpo.data.generators import compositions, drafts, edits, templates
from flowgrpo.flow.planning.plan import plan
from flowgrpo.training.run.run_files import read_metrics

FLOW = {
    "flux1-24gb": "FluxPipeline",
    "flux1-dev": "FluxPipeline",
    "flux2-dev": "Flux2Pipeline",
    "flux2-klein-4b": "Flux2KleinPipeline (edit)",
    "flux2-klein-4step": "Flux2KleinPipeline",
    "flux2-klein-9b": "Flux2KleinPipeline",
    "hunyuan-video-1.5": "HunyuanVideo15Pipeline",
    "ltx-2": "LTX2Pipeline",
    "qwen-image": "QwenImagePipeline",
    "qwen-image-edit": "QwenImageEditPlusPipeline",
    "sana": "SanaPipeline",
    "sd35-large": "StableDiffusion3Pipeline",
    "sd35-medium": "StableDiffusion3Pipeline",
    "stable-audio-3": "StableAudio3Pipeline (base)",
    "wan21-1.3b": "WanPipeline",
    "wan21-14b": "WanPipeline",
    "wan22-14b": "WanPipeline (2.2)",
    "wan22-5b": "WanPipeline (5B)",
    "z-image": "ZImagePipeline",
    "z-image-turbo": "ZImagePipeline",
}
TEXT = {"dream-7b": "dream", "llada-1.5": "llada15", "llada-8b": "llada", "llada2-mini": "llada2"}
# Of the same algorithm and classes as another: it differs in its model, its prompts and what is made small here.
ALIKE = {"dream-7b": "llada-8b", "llada-1.5": "llada-8b", "sd35-large": "sd35-medium", "wan21-14b": "wan21-1.3b"}
# In a plain run: adapters of int8 weights and of two networks, a shared start and pictures to edit, drafts, texts by a
# threshold. The others go the ways of these or of other tests.
PLAIN = ("flux1-24gb", "flux2-klein-4b", "llada2-mini", "sana", "wan22-14b")
PAGE = Path(__file__).parents[3] / "docs/research/configs.md"
HUB_ID = re.compile(r"(?<![\w/])(?!data/|diffusers/)[A-Za-z][\w.-]*/[\w.-]*\w")
# A verifiable reward of the same kind of sample: the config's own needs weights from the hub, or letters that can be read.
STAND_IN = dict.fromkeys(("geneval", "pickscore", "clip_score", "ocr", "shapes"), "jpeg_size")
STAND_IN |= {"video_ocr": "motion", "clap": "loudness"}
# Sana's instruction has a thousand letters.
SHORT = {
    "sana": {"complex_human_instruction": ["s"], "max_sequence_length": 32},
    "qwen-image-edit": {"height": 128, "width": 256},
    "z-image": {"max_sequence_length": 32},
}
SIZES = ("height", "width", "num_frames", "duration")
SMALL = ["train.groups=2", "train.group_size=2", "train.micro_batch=4", "eval.prompts=1", "model.lora.rank=2"]


def cases(names):
    return [pytest.param(name, marks=() if name in PLAIN else pytest.mark.zoo) for name in names]


def trained(name, *overrides):
    """The metrics of two iterations of a config, of which the second begins with other weights."""
    assert main(["train", name, *overrides, *SMALL, "train.iterations=2"]) == 0
    folder = Path("runs") / name
    lines = [line for line in read_metrics(folder) if line["phase"] == "train"]
    assert len(lines) == 2
    return lines


@pytest.fixture(scope="module")
def saved(short_conditions, tmp_path_factory):
    """Gives the folder of a specimen, which is built once."""

    @cache
    def folder(name):
        place = tmp_path_factory.mktemp("model")
        SPECIMENS[name].build().save_pretrained(place)
        return str(place)

    return folder


def with_attributes(patch, pipeline, values):
    """Each pipeline of a class has these values, which are in no file of a saved one."""
    init = pipeline.__init__

    @wraps(init)
    def made(self, *args, **kwargs):
        init(self, *args, **kwargs)
        vars(self).update(values)

    patch.setattr(pipeline, "__init__", made)


@pytest.fixture(scope="module")
def short_conditions():
    """Texts and pictures as short as the specimens have them, and few prompts, which larger sets begin with.

    HunyuanVideo 1.5 pads a text to some 2,000 tokens, Qwen-Image puts 200 letters around it, Qwen-Image-Edit enlarges
    pictures to a million pixels.
    """
    specimen = vars(SPECIMENS["HunyuanVideo15Pipeline"].build())
    rows = drafts.rows
    with pytest.MonkeyPatch.context() as patch:
        short = {name: value for name, value in specimen.items() if "max_length" in name or "semantic" in name}
        with_attributes(patch, HunyuanVideo15Pipeline, short)
        short = {"prompt_template_encode": "<|im_start|>{}", "prompt_template_encode_start_idx": 1}
        with_attributes(patch, QwenImagePipeline, short)
        with_attributes(patch, QwenImageEditPlusPipeline, short)
        patch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", 128 * 128)
        patch.setattr(edits, "SIDE", 64)
        for module in (drafts, compositions):
            patch.setattr(module, "rows", lambda name, one, split: rows(name, replace(one, train=8, eval=2), split))
        patch.setitem(templates.TEMPLATES, "d1", "<answer>{question}")
        yield


@pytest.mark.parametrize("name", cases(FLOW))
def test_a_config_of_pictures_or_videos_trains_as_written_but_for_sizes(name, saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    specimen = SPECIMENS[FLOW[name]]
    written = config.load(name)
    call = written.model.call
    small = [key for key in specimen.call if key in SIZES or not (key in call or "guidance" in key)]
    sizes = {key: specimen.call[key] for key in small}
    sizes |= {"num_inference_steps": min(call["num_inference_steps"], 3), **SHORT.get(name, {})}
    rewards = [
        {"use": STAND_IN[use.use], "weight": use.weight, "name": use.use, "frames": use.frames}
        for use in written.rewards
    ]
    changed = {"model.path": saved(FLOW[name]), "model.call": call | sizes, "rewards": rewards}
    changed["train.updates"] = min(written.train.updates, 2)
    tree = written.algorithm.tree
    if tree.steps and tree.steps[1] > 2:  # of more steps than there are here
        changed |= {"algorithm.tree.size": min(tree.size, 2), "algorithm.tree.steps": [min(tree.steps[0], 1), 2]}
    elif tree.name == "window":
        changed["algorithm.tree.size"] = min(tree.size, 2)
    overrides = [f"{key}={json.dumps(value)}" for key, value in changed.items()]
    # A call of evaluation that differs in its steps alone is that of training here, which has few.
    of_steps = set(written.eval.call) == {"num_inference_steps"}
    evaluated = "eval.call={}" if of_steps else "eval.call.num_inference_steps=2"
    taught = 0
    for line in trained(name, *overrides, evaluated):
        taught += line["groups/teaching"]  # the rewards of a group may be equal
        assert (line["policy/grad_norm"] > 0) == (line["groups/teaching"] > 0)
        assert line["policy/skipped_updates"] == 0
        assert line["policy/max_abs_log_ratio"] == (None if written.algorithm.likelihood.name == "elbo" else 0)
    assert taught


@pytest.mark.parametrize(("name", "guidance", "steps"), [("z-image-turbo", 0, 8), ("flux2-klein-4step", 1, 4)])
def test_a_distilled_model_is_trained_and_evaluated_as_it_is_deployed(name, guidance, steps):
    """By the steps and the guidance of its card, one evaluation each, and Euler's method."""
    written = config.load(name)
    call = written.model.call
    assert (call["guidance_scale"], call["num_inference_steps"]) == (guidance, steps)
    assert (written.algorithm.kernel.name, written.algorithm.kernel.solver) == ("ode", "euler")
    assert written.eval.call == {}
    assert written.model.guidance == "none"
    evaluations = plan(written)["model_evaluations"]
    assert evaluations == {"rollout": 32 * 8 * steps, "update": 32 * 8}


@pytest.mark.usefixtures("short_conditions")
@pytest.mark.parametrize("name", cases(TEXT))
def test_a_config_of_texts_trains_as_written_but_for_sizes(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    released(TEXT[name], tmp_path / "model")
    (tmp_path / "mine.py").write_text("def places(texts, prompts):\n    return list(map(float, range(len(texts))))\n")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "How many is 3 * 7?", "answer": "21"}) + "\n")
    mine = ["rewards=[./mine.py:places]", "eval_rewards=[]", "prompts.train=rows.jsonl", "prompts.eval=rows.jsonl"]
    if name == "llada2-mini":  # decodes by a threshold, in as many steps as it needs
        length = ["model.length=6"]
    else:
        length = ["model.length=32", "algorithm.decoder.steps=8", "eval.decoder.steps=8", "train.passes=2"]
    for line in trained(name, "model.path=model", *mine, *length):
        assert line["policy/grad_norm"] > 0
        assert line["policy/skipped_updates"] == 0


@pytest.mark.parametrize("name", ALIKE)
def test_what_is_trained_in_place_of_another_has_its_algorithm(name):
    one, other = config.load(name), config.load(ALIKE[name])
    assert one.algorithm == other.algorithm
    made_alike = {"path", "dtype"}  # in float16 and in bfloat16 others are trained
    assert one.model.model_dump(exclude=made_alike) == other.model.model_dump(exclude=made_alike)
    sizes = {"iterations", "groups", "group_size", "micro_batch", "rollout_batch", "decode_batch"}
    assert one.train.model_dump(exclude=sizes) == other.train.model_dump(exclude=sizes)
    assert one.eval.call == other.eval.call if hasattr(one.eval, "call") else one.eval.decoder == other.eval.decoder


def test_the_page_of_models_has_each_config_beside_its_gpu():
    page = (PAGE.parents[1] / "start/model.md").read_text()
    for name in configs.names():
        gpu = configs.head(name)["GPU"].removeprefix("one of ").partition(":")[0]
        (row,) = [line for line in page.splitlines() if line.startswith(f"| {gpu} | ")]
        assert f"`{name}`" in row


def test_every_config_is_trained_here_and_says_what_it_needs():
    assert sorted([*FLOW, *TEXT]) == configs.names()
    for name in configs.names():
        said = configs.head(name)
        assert list(said) == ["about", *configs.LABELS]
        assert all(said.values())
        settings = config.load(name)
        assert settings.run.name == name
        assert settings.model.path in said["Hub"]
        page = PAGE.read_text()
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` | {said['about']} | ")]
        assert set(HUB_ID.findall(said["Hub"])) == set(HUB_ID.findall(row.split(" | ")[2]))
        assert ("gated" in said["Hub"], "[ocr]" in said["Hub"]) == ("gated" in row, "`ocr`" in row)
        (checked,) = [line for line in page.splitlines() if line.endswith(f"| {said['Checked']} |")]
        assert f"`{name}`" in checked
