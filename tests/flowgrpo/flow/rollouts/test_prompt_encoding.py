"""A run whose prompts are encoded before its networks are loaded is the run with everything loaded at once."""

import json
from pathlib import Path

import pytest
import torch
from cases import cases
from in_turn import after_first_step
from runs import metrics, weights
from transformers import PreTrainedModel
from zoo import SPECIMENS

from flowgrpo import config
from flowgrpo.cli import main
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import InputError
from flowgrpo.flow.pipeline.loading import weightless_networks
from flowgrpo.flow.pipeline.velocity_field import FieldPolicy
from flowgrpo.flow.rollouts import prompt_encoding
from flowgrpo.training.distributed.data_shard import DataShard

CPU = torch.device("cpu")
SMALL = [
    *("train.iterations=1", "train.groups=1", "train.group_size=2", "train.updates=1", "train.replay=always"),
    *("train.micro_batch=4", "train.learning_rate=0.01", "eval.prompts=1", "eval.save=0"),
]
DRAFT = "train.draft={pool: 2, call: {num_inference_steps: 3, max_sequence_length: 8}}"
DRAFTED = [DRAFT, "prompts.pick.by=variance", "train.iterations=2"]
# A class, and what is asked of its run: drafts, guidance that evaluation alone has, all weights of two networks, pictures.
RUNS = {
    "FluxPipeline": DRAFTED,
    "StableDiffusion3Pipeline": ["model.guidance=none", "eval.call={guidance_scale: 3.0}", *DRAFTED],
    "WanPipeline (2.2)": ["model.lora=null", "model.dtype=bfloat16"],
    "QwenImageEditPipeline": ["model.quantise=int8"],
    "OmniGenPipeline": [],
}
FURTHER = ("FluxPipeline", "OmniGenPipeline")  # in a plain run SD3 has drafts, too; the other encodes nothing


def written(folder, specimen):
    """Prompt rows of a specimen, their conditions as files beside them."""
    columns = {}
    for name, value in specimen.columns.items():
        if hasattr(value, "save"):
            value.save(folder / f"{name}.png")
            value = f"{name}.png"
        columns[name] = value
    rows = [{"prompt": prompt, **columns} for prompt in (*specimen.prompts, f"{specimen.prompts[1]} again")]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def trained(name, *options):
    """The metrics of a run of the model in this folder, but for times, and its last weights."""
    rows = ["prompts.train=rows.jsonl", "prompts.eval=rows.jsonl"]
    Path("a.yaml").write_text("model: {path: model}\nrewards: [{use: REWARD}]\n".replace("REWARD", options[0]))
    assert main(["train", "a.yaml", f"run.name={name}", *rows, *SMALL, *options[1:]]) == 0
    folder = Path("runs", name)
    lines = [{k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))} for line in metrics(folder)]
    return lines, metrics(folder, "eval")[-1]["reward/mean"], weights(folder, len(lines))


@pytest.mark.usefixtures("small_pictures")
@pytest.mark.parametrize("name", cases(RUNS, {*RUNS} - {*FURTHER}))
def test_a_run_is_the_same_to_the_digit(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    specimen = SPECIMENS[name]
    specimen.build().save_pretrained("model")
    written(tmp_path, specimen)
    reward = "motion" if "video" in specimen.task else "jpeg_size"
    call = {**specimen.call, "num_inference_steps": 2}
    options = [reward, f"model.call={json.dumps(call)}", *RUNS[name]]
    kept = trained("kept", *options, "model.text_encoders=keep")
    loaded = []
    fill = weightless_networks.fill
    monkeypatch.setattr(
        weightless_networks, "fill", lambda pipe, *a, **o: (loaded.append(encoders(pipe)), fill(pipe, *a, **o))
    )
    freed = trained("freed", *options, "model.text_encoders=free")
    assert loaded == ([] if name == "OmniGenPipeline" else [[]])
    assert kept[:2] == freed[:2]
    assert kept[2].keys() == freed[2].keys()
    assert all(torch.equal(value, freed[2][key]) for key, value in kept[2].items())


def encoders(pipe):
    return [name for name, module in pipe.components.items() if isinstance(module, PreTrainedModel)]


def test_a_run_that_goes_on_encodes_what_is_ahead_of_it(workplace, monkeypatch):
    small = ["train.iterations=2", "train.group_size=2", "train.updates=1"]
    small += ["model.text_encoders=free", "eval={every: 9, prompts: 1, save: 0}"]
    assert main(["train", "tiny.yaml", "run.name=whole", *small]) == 0
    after_first_step(Path("runs"), "whole", "parts")
    asked = []
    real = prompt_encoding.indices_ahead
    monkeypatch.setattr(
        prompt_encoding, "indices_ahead", lambda *a, **k: asked.append((k["done"], real(*a, **k))) or asked[-1][1]
    )
    assert main(["train", "tiny.yaml", "run.name=parts", *small, "run.resume=true"]) == 0
    assert [done for done, _ in asked] == [1, 1]
    assert asked[0] == asked[1]
    whole, parts = (weights(Path("runs", name), 2) for name in ("whole", "parts"))
    assert all(torch.equal(value, parts[key]) for key, value in whole.items())


def test_what_is_ahead_is_what_the_iterations_draw(workplace):
    chosen = config.load("tiny.yaml", {"train.groups": 4, "train.iterations": 5})

    def ahead(done, process, processes):
        return set(prompt_encoding.indices_ahead(chosen, 100, done=done, shards=[DataShard(process, processes)]))

    assert ahead(2, 0, 2) | ahead(2, 1, 2) == ahead(2, 0, 1)
    assert len(ahead(2, 0, 1)) <= 12
    assert ahead(2, 0, 2) < ahead(0, 0, 2)
    whole = ahead(2, 0, 1)
    chosen = config.load("tiny.yaml", {"train.groups": 4, "train.iterations": 5, "prompts.pick.second_stage": "equal"})
    assert ahead(2, 0, 2) == ahead(2, 1, 2) == whole  # further samples of any group
    chosen = config.load("tiny.yaml", {"prompts.pick.by": "variance"})
    assert ahead(0, 1, 2) == set(range(100))


def test_a_refusal_while_encoding_names_the_place(workplace, capsys):
    options = {"model.call": "height=17", "eval.call": "height=17", "train.draft": "{pool: 2, call: {height: 17}}"}
    for place, value in options.items():
        assert main(["train", "tiny.yaml", f"{place}{'=' if value[0] == '{' else '.'}{value}"]) == 2
        said = " ".join(capsys.readouterr().err.split())
        place = place if place.endswith("call") else f"{place}.call"
        assert f"{place}.height: 17 is not a multiple of 4; take 16 or 20" in said
    assert not (workplace / "runs").exists()


def test_a_field_has_nothing_to_encode(workplace):
    policy = FieldPolicy(torch.nn.Linear(1, 1), (1,), [1.0, 0.0])
    chosen = config.load("tiny.yaml")
    prompt_encoding.encode_run(policy, chosen, [Prompt("a")], [], device=CPU)
    with pytest.raises(InputError, match="a velocity field takes no call arguments"):
        prompt_encoding.encode_run(
            policy, config.load("tiny.yaml", {"eval.call.height": 16}), [Prompt("a")], [], device=CPU
        )


@pytest.mark.parametrize(
    ("after", "device", "stay"),
    [("keep", "cuda", True), ("offload", "cpu", True), ("offload", "cuda", False), ("free", "cpu", False)],
)
def test_texts_wait_for_their_first_sample_if_the_encoders_stay(after, device, stay, workplace):
    encoded = []

    class Taking(FieldPolicy):
        def prepare(self, rows, key="model.call"):
            encoded.extend(row.prompt for row in rows)

    policy = Taking(torch.nn.Linear(1, 1), (1,), [1.0, 0.0])
    policy.takes = {"image"}
    chosen = config.load("tiny.yaml", {"model.text_encoders": after, "train.groups": 6, "train.iterations": 1})
    prompts = [Prompt("x" * length) for length in (1, 2, 3, 4, 5)] + [Prompt("pictured", columns={"image": "a.png"})]
    prompt_encoding.encode_run(policy, chosen, prompts, prompts[:3], device=torch.device(device))
    always = {"x", "xxx", "pictured"}  # the shortest and the longest of each set, and what has a picture
    assert set(encoded) == (always if stay else {prompt.text for prompt in prompts})
