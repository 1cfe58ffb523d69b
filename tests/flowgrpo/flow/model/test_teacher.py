"""On-policy distillation: the update is that of the KL from the teacher, and what a teacher may be."""

import math
import shutil
from itertools import pairwise

import broken
import field
import pytest
import tiny
import torch
from conftest import copy_run, furnished
from cut_back import cut_back
from field import TARGET, GaussianFlow, credit, lines, settings, step_in_place
from runs import metrics, weights

from flowgrpo import config
from flowgrpo.cli import main
from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.flow.model import memory_estimate, teacher
from flowgrpo.flow.pipeline.policy import DiffusersPolicy
from flowgrpo.training.planning import memory_advice
from flowgrpo.training.weights.lora_adapters import Adapter, Matrices
from flowgrpo.training.weights.trained_weights import Weights, lora_config

SMALL = {"train__groups": 2, "train__group_size": 6, "train__updates": 1, "eval__every": 99}
QUICK = ["train.micro_batch=8", "eval={every: 9, prompts: 1, save: 0}"]  # one sample, at the start and at the end
OPD = ["algorithm={preset: opd, tree: {size: 2}}", "train.iterations=1", *QUICK]


def settings_of(words):
    return config.load("tiny.yaml", ["model.lora={rank: 4, alpha: 8}", *words])


def equal(samples, prompts):
    return torch.zeros(len(samples))


def towards(mean):
    return lambda weight: torch.as_tensor(mean).to(weight).expand_as(weight)


def begun(folder, algorithm=(), mean=TARGET, **changes):
    chosen = settings(folder, algorithm={"preset": "opd", **dict(algorithm)}, **{**SMALL, **changes})
    return field.trainer(chosen, GaussianFlow(), reward=equal, held_out=0, teacher=towards(mean))


def cps_kl(run, tree, mean):
    """By hand: the mean over the trained edges of Q^2 (v - v_teacher)^2 / (2 S^2), at a mean of the student's flow."""
    angle, total, count = 0.8 * math.pi / 2, 0.0, 0
    following = dict(pairwise(run.policy.sigmas))
    flows = []
    for value in (mean, TARGET):
        flow = GaussianFlow().double()
        flow.mean.data = value.double()
        flows.append(flow)
    for evaluation in tree.evaluations:
        s, t = evaluation.sigma, following[evaluation.sigma]
        q = -s * (1 - t) + t * (1 - s) * math.cos(angle)
        for edges in evaluation.trained:
            x = evaluation.state[0][edges.rows].double()
            v, aim = (flow(x, torch.full((len(x),), s).double(), None).detach() for flow in flows)
            total += float((q * (v - aim) / (t * math.sin(angle))).square().mean(1).sum()) / 2
            count += len(x)
    return total / count


def test_the_gradient_is_that_of_the_kl_by_finite_differences(tmp_path):
    run = begun(tmp_path)
    credited = credit(run, run.rollout(0, run.groups(0)))
    stats = step_in_place(run, credited)
    here, width = torch.zeros(2), 0.5  # the KL is a parabola in the mean, so any width will do
    expected = [
        (cps_kl(run, credited.tree, here + way) - cps_kl(run, credited.tree, here - way)) / (2 * width)
        for way in torch.eye(2) * width
    ]
    (mean,) = run.weights.parameters
    assert mean.grad.tolist() == pytest.approx(expected, rel=1e-4)
    assert stats.kl / stats.edges == pytest.approx(cps_kl(run, credited.tree, here), rel=1e-4)


@pytest.mark.parametrize("kernel", ["cps", "flow_sde", "dance_sde", "manifold"])
def test_a_student_that_is_its_teacher_has_no_gradient(tmp_path, kernel):
    run = begun(tmp_path, {"kernel": {"name": kernel}}, mean=(0.0, 0.0))
    stats = step_in_place(run, credit(run, run.rollout(0, run.groups(0))))
    (mean,) = run.weights.parameters
    assert (stats.kl, mean.grad.abs().max()) == (0, 0)


@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        pytest.param({"tree": "chain", "kernel": {"name": "flow_sde", "level": 0.7}}, marks=pytest.mark.zoo),
        {
            "tree": "chain",
            "kernel": {"name": "ode"},
            "likelihood": {"name": "elbo", "anchor": "live"},
            "objective": {"kl": {"form": "velocity"}},
        },
    ],
    ids=["window of cps", "chain of flow_sde", "samples of an ode"],
)
def test_a_flow_in_the_plane_learns_its_teacher_from_rewards_that_are_all_equal(tmp_path, algorithm):
    fast = {"train__learning_rate": 0.1, "train__optimizer": {"betas": [0.5, 0.9]}}  # with little momentum
    run = begun(tmp_path, algorithm, train__iterations=30, run__patience=2, run__checkpoint__every=99, **fast)
    run.run()
    (mean,) = run.weights.parameters
    assert (mean.detach() - TARGET).norm() < 0.1
    for line in lines(run):
        assert (line["groups/teaching"], line["groups/zero_std_fraction"]) == (2, 1)


def test_a_teacher_is_in_the_checkpoints_and_a_resume_goes_on_with_it(tmp_path):
    whole = begun(tmp_path / "whole", train__iterations=3)
    whole.run()
    begun(tmp_path / "parts", train__iterations=1).run()
    parts = begun(tmp_path / "parts", mean=(9.0, 9.0), train__iterations=3)  # whatever its file says by now
    parts.resume()
    parts.run()
    assert lines(whole) == lines(parts)


def adapted(rank, alpha, network):
    """A tiny SD3 whose student has adapters of a rank, with a teacher's place."""
    policy = DiffusersPolicy(network, tiny.CALLS["sd3"])
    return policy, Weights(policy.modules, lora_config(rank, alpha, "auto", policy.modules), reference="teacher")


def some_adapter(network, *, rank, alpha, rslora=False, seed=3, only=""):
    """Adapters of a teacher on the layers of a network that have some."""
    generator = torch.Generator().manual_seed(seed)
    layers = {}
    for path, module in network.named_modules():
        if hasattr(module, "lora_A") and path.endswith(only):
            out, width = module.base_layer.weight.shape
            down, up = (torch.randn(size, generator=generator) for size in ((rank, width), (out, rank)))
            layers[path] = Matrices(down=down, up=up, bias=None, alpha=alpha)
    return Adapter(layers, rslora)


@pytest.mark.parametrize("rslora", [False, True])
def test_a_teacher_of_another_rank_and_alpha_is_met_exactly(rslora):
    policy, student = adapted(4, 3.0, tiny.sd3())
    taught = some_adapter(policy.modules["transformer"], rank=2, alpha=8.0, rslora=rslora, only="to_q")
    teacher.put(student, {"transformer": taught})
    rows = [Row("a red circle", 0), Row("a red circle", 1)]
    state = policy.start(rows)
    with torch.no_grad():
        before = policy.velocity(state, policy.sigmas[0], rows)[0]
        with student.reference():
            found = policy.velocity(state, policy.sigmas[0], rows)[0]
    alone = DiffusersPolicy(tiny.sd3(), tiny.CALLS["sd3"])
    Weights(alone.modules, {"transformer": taught})
    alone.start(rows)
    with torch.no_grad():
        expected = alone.velocity(state, policy.sigmas[0], rows)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert (expected - before).abs().max() > 0.01


@pytest.mark.parametrize(
    ("rank", "only", "sentence"),
    [
        (
            5,
            "to_q",
            "model.teacher: its adapter of transformer.transformer_blocks.0.attn.to_q has rank 5, the student's 4; ",
        ),
        (2, "", "where the student has none; add it to model.lora.targets"),
    ],
)
def test_a_teacher_that_the_student_s_adapters_cannot_hold_is_refused(rank, only, sentence):
    policy = DiffusersPolicy(tiny.sd3(), tiny.CALLS["sd3"])
    student = Weights(policy.modules, lora_config(4, 4.0, ["to_q"], policy.modules), reference="teacher")
    everywhere, _ = adapted(2, 2.0, tiny.sd3())
    taught = some_adapter(everywhere.modules["transformer"], rank=rank, alpha=1.0, only=only)
    with pytest.raises(InputError, match=sentence):
        teacher.put(student, {"transformer": taught})


def test_a_run_teaches_another_by_command(trained):
    assert main(["train", "tiny.yaml", "run.name=second", "model.teacher=runs/t", *OPD, "train.updates=2"]) == 0
    (line,) = metrics(trained / "runs" / "second")
    assert line["policy/kl"] > 0
    assert line["policy/grad_norm"] > 0
    kept = weights(trained / "runs" / "second", 1)
    first = weights(trained / "runs" / "t", 2)
    assert any(name.startswith("reference.") for name in kept)
    assert any(name.startswith("average.") for name in first)
    for name, tensor in first.items():  # whose average teaches
        if name.startswith("average."):
            assert torch.allclose(kept[name.replace("average.", "reference.")], tensor)


def another(pipe):
    """A pipeline with a transformer of the same shapes and other weights."""
    generator = torch.Generator().manual_seed(5)
    for p in pipe.transformer.parameters():
        p.data += 0.1 * torch.randn(p.shape, generator=generator)
    return pipe


@pytest.mark.parametrize(("full", "variant"), [(False, None), (True, None), (False, "fp16")])
def test_the_reference_is_the_pipeline_that_teaches(tmp_path, full, variant):
    policy = DiffusersPolicy(tiny.sd3(), tiny.CALLS["sd3"])
    lora = None if full else lora_config(4, 4.0, "auto", policy.modules)
    student = Weights(policy.modules, lora, reference="teacher")
    if not full:  # which the teacher has none of
        for p in student.parameters:
            p.data += 0.1
    another(tiny.sd3()).save_pretrained(tmp_path / "teacher", variant=variant)
    teacher.put_pipeline(student, str(tmp_path / "teacher"), variant)
    rows = [Row("a red circle", 0), Row("a red circle", 1)]
    state = policy.start(rows)
    with torch.no_grad():
        before = policy.velocity(state, policy.sigmas[0], rows)[0]
        with student.reference():
            found = policy.velocity(state, policy.sigmas[0], rows)[0]
        after = policy.velocity(state, policy.sigmas[0], rows)[0]
    alone = DiffusersPolicy(another(tiny.sd3()), tiny.CALLS["sd3"])
    alone.start(rows)
    with torch.no_grad():
        assert torch.equal(found, alone.velocity(state, policy.sigmas[0], rows)[0])
        with pytest.raises(ZeroDivisionError), student.reference():
            raise ZeroDivisionError
        assert torch.equal(policy.velocity(state, policy.sigmas[0], rows)[0], before)
    assert torch.equal(before, after)
    assert (found - before).abs().max() > 0.01
    assert any(name.startswith("reference.") for name in student.tensors()) == full  # else it is loaded again


ADAPTERS, ALL_WEIGHTS = "model.lora={rank: 4}", "model.lora=null"
TAUGHT = ["train", "tiny.yaml", "model.teacher=other", *OPD]
RESUMED = [*TAUGHT, ADAPTERS, "run.checkpoint.every=1", "train.iterations=2"]


@pytest.fixture(scope="module")
def taught(tiny_model, tmp_path_factory):
    """A folder with the pipeline `other` and the run `runs/t` of two iterations by adapters that it taught."""
    with furnished(tmp_path_factory.mktemp("taught"), tiny_model) as folder:
        another(tiny.sd3()).save_pretrained("other")
        assert main(RESUMED) == 0
    return folder


@pytest.mark.parametrize("lora", [ADAPTERS, ALL_WEIGHTS])
def test_a_pipeline_teaches_by_command(taught, tmp_path, monkeypatch, lora):
    if lora == ALL_WEIGHTS:
        monkeypatch.chdir(taught)
        assert main([*TAUGHT, lora, f"run.dir={tmp_path}", "run.name=t"]) == 0
    told = metrics((taught / "runs" if lora == ADAPTERS else tmp_path) / "t")
    assert told
    for line in told:
        assert line["policy/kl"] > 0
        assert line["policy/grad_norm"] > 0


def test_a_pipeline_samples_candidates_for_hints_by_command(taught, tmp_path, monkeypatch):
    monkeypatch.chdir(taught)
    hints = "{name: noised, source: teacher, success: 1000000000}"
    chosen = f"algorithm={{preset: flow_grpo, objective: {{kl: {{beta: 0}}}}, hints: {hints}}}"
    assert main(["train", "tiny.yaml", "model.teacher=other", chosen, f"run.dir={tmp_path}", "run.patience=null"]) == 0
    assert all(line["hints/searched"] > 0 for line in metrics(next(tmp_path.iterdir())))


@pytest.mark.parametrize("lora", [ADAPTERS, pytest.param(ALL_WEIGHTS, marks=pytest.mark.zoo)])
def test_a_student_that_is_the_pipeline_that_teaches_has_nothing_to_learn(workplace, lora):
    words = [*OPD, lora, "train.optimizer={weight_decay: 0}"]
    same = f"model.teacher={settings_of(()).model.path}"
    assert main(["train", "tiny.yaml", "run.name=same", same, *words, "train.iterations=2"]) == 1
    assert (
        "step 2: nothing to learn, the gradient of every update is 0"
        in (workplace / "runs" / "same" / "log.txt").read_text()
    )
    for line in metrics(workplace / "runs" / "same"):
        assert (line["policy/kl"], line["policy/grad_norm"]) == (0, 0)


@pytest.mark.parametrize(
    ("path", "words", "sentence"),
    [
        ("shapes", [], "the transformer of shapes is not built as that of .*: its .* is .*, the student's"),
        ("nowhere", ["model.lora=null"], "there is no folder 'nowhere' and no built-in model of that name"),
        (None, ["model.quantise=int8"], "but model.quantise=int8 has changed those; set it to null, or name a LoRA"),
        (None, ["run.processes=2", "run.sharding=fsdp2"], "is in shards; set run.sharding=none, or name a LoRA"),
    ],
    ids=["of other shapes", "that is not there", "of a quantised student", "of a student in shards"],
)
def test_a_pipeline_that_cannot_teach_is_refused_in_a_sentence(workplace, path, words, sentence):
    chosen = settings_of([f"model.teacher={path or settings_of(()).model.path}", *OPD, *words])
    with pytest.raises(InputError, match=f"^model.teacher: .*{sentence}"):
        teacher.check(chosen)


def test_a_teacher_s_files_are_of_the_variant_where_it_has_such(workplace, taught, tiny_model):
    student, other = (
        broken.copied(source, workplace / name) for source, name in ((tiny_model, "m"), (taught / "other", "o"))
    )
    broken.name_variant(student)
    words = ["model.path=m", "model.teacher=o", *OPD]
    teacher.check(settings_of([*words, "model.variant=fp16"]))  # by its plain files
    broken.name_variant(other)
    teacher.check(settings_of([*words, "model.variant=fp16"]))
    with pytest.raises(
        InputError, match="^model.teacher: o/text_encoder holds fp16 weights only, set model.variant=fp16"
    ):
        teacher.check(settings_of(words))


def test_a_resume_learns_from_the_pipeline_as_the_whole_run_does(workplace, taught):
    shutil.copytree(taught / "other", "other")
    copy_run(taught, workplace)
    whole = weights(workplace / "runs" / "t", 2)
    cut_back(workplace / "runs" / "t", 1)
    assert main([*RESUMED, "run.resume=true"]) == 0
    parts = weights(workplace / "runs" / "t", 2)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(tensor, parts[name]) for name, tensor in whole.items())


def test_the_estimate_counts_the_networks_of_a_pipeline_that_teaches(workplace):
    own = settings_of(()).model.path
    teachers = [settings_of([f"model.teacher={name}", *OPD]) for name in (own, "runs/t")]
    whole, lora = (memory_estimate.memory_estimate(chosen)["gpu_bytes"] for chosen in teachers)
    shapes = memory_estimate.component_shapes(own)["transformer"].values()
    adapters = sum(p.numel() for p in adapted(4, 8.0, tiny.sd3())[1].parameters)
    assert whole - lora == 4 * (sum(math.prod(shape) for shape in shapes) - adapters)


def test_a_run_that_keeps_other_policies_and_no_average_teaches_what_it_has_learnt(workplace):
    kept_beside = "likelihood: {draws: 2, sampler: bank, bank: {every: 2, keep: 2}, anchor: old}"
    first = [f"algorithm={{preset: nft, {kept_beside}}}", "train.ema=null", "train.iterations=1", *QUICK]
    assert main(["train", "tiny.yaml", "run.name=first", *first]) == 0
    assert main(["train", "tiny.yaml", "run.name=second", "model.teacher=runs/first", *OPD]) == 0
    learnt, kept = (weights(workplace / "runs" / name, 1) for name in ("first", "second"))
    assert {"old", "bank"} <= {name.partition(".")[0] for name in learnt}
    for name, tensor in learnt.items():
        if ".lora_" in name and not name.startswith(("old.", "bank.", "reference.")):
            assert torch.allclose(kept[f"reference.{name}"], tensor)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (OPD, "model.teacher: algorithm.objective.kl.reference=teacher needs one"),
        ([*OPD, "model.teacher=nowhere"], "model.teacher: there is no file or folder 'nowhere'"),
        (
            [*OPD, "model.teacher=nowhere", "model.lora=null"],
            "model.teacher: there is no folder 'nowhere' and no built-in",
        ),
        (["model.teacher=nowhere"], "model.teacher: nothing uses it; set"),
        (
            [OPD[0].replace("}}", "}, objective: {kl: {reference: fixed}}}")],
            "algorithm.objective.kl.reference: distill learns from a teacher, but fixed is the student",
        ),
        (
            [OPD[0].replace("}}", "}, objective: {kl: {beta: 0, reference: fixed}}}")],
            "algorithm.objective.kl.beta: the divergence is the only loss of distill; take a value above 0",
        ),
    ],
)
def test_what_is_no_distillation_is_refused_in_a_sentence(workplace, capsys, options, sentence):
    assert main(["train", "tiny.yaml", *options]) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())
    assert not (workplace / "runs").exists()


def test_other_objectives_may_be_held_by_a_teacher(tmp_path):
    kl = {"beta": 0.1, "reference": "teacher"}
    chosen = config.validate(
        {"model": {"path": "shapes", "teacher": "x"}, "algorithm": {"preset": "flow_grpo", "objective": {"kl": kl}}}
    )
    assert chosen.algorithm.reference == "teacher"


def test_advice_names_nothing_that_a_pipeline_that_teaches_refuses(workplace):
    own = settings_of(()).model.path
    for path, quantises in ((own, False), ("runs/t", True)):
        chosen = settings_of([f"model.teacher={path}", *OPD, "run.processes=2"])
        named = {key for key, _ in memory_estimate.smaller(chosen)}
        assert ("model.quantise=int8" in named) == quantises
        assert ("run.sharding=fsdp2" in named) == quantises
        values = memory_advice._values(chosen, on_gpu=True)
        assert (values["quantise"] is not None) == (values["sharding"] is not None) == quantises


def test_a_pipeline_of_another_head_layout_is_refused_though_its_shapes_are_the_same(workplace):
    other = tiny.sd3()
    other.transformer.register_to_config(num_attention_heads=4, attention_head_dim=4)
    other.save_pretrained("other")
    with pytest.raises(
        InputError, match=r"^model.teacher: the transformer of other is not built .*: its .*attention_head"
    ):
        teacher.check(settings_of(["model.teacher=other", *OPD]))
