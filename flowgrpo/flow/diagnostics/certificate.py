"""The certificate of a pipeline class: checks of all properties that training relies on.

`certify` builds pipelines and compares them with the stock one; `flowgrpo doctor` checks the model of a config.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler

from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.flow.outputs.export import write_weights
from flowgrpo.flow.pipeline.inputs.modality import read_output
from flowgrpo.flow.pipeline.loading.load import load_lora
from flowgrpo.flow.pipeline.networks import traits
from flowgrpo.flow.pipeline.policy import DiffusersPolicy
from flowgrpo.flow.pipeline.slice_probe import refusals
from flowgrpo.training.reports.doctor_checks import Check, gap_of
from flowgrpo.training.weights.trained_weights import Weights, lora_config
from rewards.audio import Films, join_samples, tensors
from samplers import noise
from samplers.growth import grow
from samplers.kernels import ODE, Kernel, log_prob
from samplers.plans import chain
from samplers.trees import Root, Tree, edge_transition

TOLERANCE = 1e-5  # difference of equivalent float32 samples, in standard deviations; the checks allow ten times this
BFLOAT16_DRIFT = 0.0  # equal calls give equal numbers in any dtype


def certify(build: Callable[[], DiffusionPipeline], call: dict[str, Any], rows: Sequence[Row]) -> list[Check]:
    """Run all checks of a pipeline class, in float32 except for the bfloat16 drift.

    `build` makes the same stock pipeline each time. `rows` are three or more: two share a prompt, and prompt lengths differ.
    """
    policy = DiffusersPolicy(build(), call, text_encoders="offload")
    policy.check(rows)
    stock = in_flow_euler(build())
    expected = [stock_sample(stock, call, row) for row in rows]
    whole = [check_encoding(policy, rows), equals_stock(policy, rows, expected)]
    weights = Weights(policy.modules, None)  # trainable from here on, which changes how some layers compute
    tree, ran = roll_out_stochastic(policy, rows)
    return [
        *whole,
        check_decoding(policy, tree, expected),
        any_micro_batch(policy, rows, tree),
        *drift_and_gradients(policy, weights, tree, ran),
        bfloat16_drift(build, call, rows),
        lora_reloads(build, call, rows[0], untrained=expected[0]),
    ]


def in_flow_euler(pipe: DiffusionPipeline) -> DiffusionPipeline:
    """Set a stock pipeline's scheduler to flow-Euler, which equals our kernel `ode`; return the pipeline."""
    pipe.set_progress_bar_config(disable=True)
    config = pipe.scheduler.config
    if type(pipe.scheduler) is not FlowMatchEulerDiscreteScheduler or config.stochastic_sampling:
        known = inspect.signature(FlowMatchEulerDiscreteScheduler.__init__).parameters
        options = {k: v for k, v in config.items() if k in known} | {"stochastic_sampling": False}
        options |= {"shift": config["flow_shift"]} if config.get("flow_shift") else {}
        pipe.scheduler = FlowMatchEulerDiscreteScheduler(**options)
    return pipe


@torch.no_grad()
def stock_sample(pipe: DiffusionPipeline, call: dict[str, Any], row: Row) -> torch.Tensor | Films:
    """Return the decoded sample of one row from an unmodified stock pipeline."""
    arguments = {"prompt": row.prompt, "output_type": "pt", "return_dict": False}
    generator = torch.Generator("cpu").manual_seed(row.seed)
    with torch.random.fork_rng():
        torch.manual_seed(0)  # some pipelines use the global generator
        return read_output(type(pipe), pipe(**arguments, generator=generator, **{**call, **row.columns}))


def check_encoding(policy: DiffusersPolicy, rows: Sequence[Row]) -> Check:
    """Check that sampling runs no text encoder after `policy.prepare`, even if the encoders are offloaded."""
    policy.prepare(rows)
    policy.offload()
    runs = []
    encoders = [part for name, part in policy.pipe.components.items() if name.startswith(traits.ENCODERS)]
    modules = [encoder for encoder in encoders if isinstance(encoder, torch.nn.Module)]
    handles = [module.register_forward_pre_hook(lambda *_: runs.append(1)) for module in modules]
    policy.generate(rows)
    for handle in handles:
        handle.remove()
    return Check("encoded_once", not runs, f"{len(runs)} runs of text encoders after preparation")


@torch.no_grad()
def equals_stock(policy: DiffusersPolicy, rows: Sequence[Row], expected: Sequence[torch.Tensor | Films]) -> Check:
    """Check that the kernel `ode` gives the stock pipeline's samples, in one whole ODE run and step by step."""
    tree = roll_out(policy, rows, ODE, len(rows))
    whole = policy.generate(rows)
    in_steps = policy.decode(tree.samples, [tree.nodes[i].root.row for i in tree.leaves])
    gaps = [gap_of(samples, join_samples(expected)) for samples in (whole, in_steps)]
    ok = all(gap <= 10 * TOLERANCE for gap in gaps)
    return Check("equals_stock", ok, f"whole {gaps[0]:.1e}, in steps {gaps[1]:.1e}")


def roll_out_stochastic(policy: DiffusersPolicy, rows: Sequence[Row]) -> tuple[Tree, set[str]]:
    """Roll out all rows together by a stochastic kernel; return the tree and the names of the modules that ran."""
    ran: set[str] = set()
    handles = [
        module.register_forward_pre_hook(lambda *_, name=name: ran.add(name)) for name, module in policy.modules.items()
    ]
    tree = roll_out(policy, rows, Kernel("flow_sde", 0.7), len(rows))
    for handle in handles:
        handle.remove()
    return tree, ran


@torch.no_grad()
def check_decoding(policy: DiffusersPolicy, tree: Tree, expected: Sequence[torch.Tensor | Films]) -> Check:
    """Check that decoded stochastic samples are finite and have the stock samples' shape."""
    samples = policy.decode(tree.samples, [tree.nodes[i].root.row for i in tree.leaves])
    shapes, stock = ([tuple(part.shape) for part in tensors(each)] for each in (samples, join_samples(expected)))
    finite = all(bool(part.isfinite().all()) for part in tensors(samples))
    told = " and ".join(" x ".join(map(str, shape[1:])) for shape in shapes)
    return Check("decoded", finite and shapes == stock, f"{told}, {'finite' if finite else 'not finite'}")


@torch.no_grad()
def any_micro_batch(policy: DiffusersPolicy, rows: Sequence[Row], together: Tree) -> Check:
    """Check that a stochastic sample is the same alone and in a batch; tell which rows share calls."""
    alone = roll_out(policy, rows, Kernel("flow_sde", 0.7), 1)
    gap = float(torch.tensor([gap_of(a, b) for a, b in zip(together.samples, alone.samples, strict=True)]).max())
    can = policy.capabilities
    how = "rows share calls" if can.max_batch is None else "one row a call"
    how += "" if can.pads_prompts or can.max_batch else " with equally long prompts"
    how += ", also at unequal noise levels" if _mixes_levels(policy, rows) else ""
    return Check("any_micro_batch", gap <= 10 * TOLERANCE, f"{gap:.1e}, {how}")


def _mixes_levels(policy: DiffusersPolicy, rows: Sequence[Row]) -> bool:
    """Return whether rows at unequal noise levels may share a call without guidance; False if it cannot be switched off."""
    try:
        with policy.call_overrides(**policy.unguided()), refusals(policy.walk, "model.call"):
            return policy.mixes_levels(rows)
    except InputError:
        return False


def drift_and_gradients(policy: DiffusersPolicy, weights: Weights, tree: Tree, ran: set[str]) -> list[Check]:
    """Check that a replay reproduces log-probabilities exactly, and that gradients reach all weights of modules in `ran`."""
    largest = replay(policy, tree)
    active = {name: p for name, p in weights.named.items() if name.split(".")[0] in ran}
    without = [name for name, p in active.items() if p.grad is None]
    missed = without if without and _have_influence(policy, tree, [active[name] for name in without]) else []
    broken = [name for name, p in active.items() if p.grad is not None and not p.grad.isfinite().all()]
    learns = any(p.grad is not None and bool(p.grad.any()) for p in active.values())
    advice = f"without gradient: {', '.join(missed[:3])}" if missed else ""
    advice = f"not finite: {', '.join(broken[:3])}" if broken else advice
    value = f"{len(active) - len(without) - len(broken)} of {len(active)} tensors of {', '.join(sorted(ran))}"
    if without and not missed:
        value += ", the others have no influence on the velocity"
    exact = largest == 0.0
    return [
        Check("drift", exact, f"{largest:.1e}", "" if exact else "the replay is not what was rolled out"),
        Check("gradients", not missed and not broken and learns, value, advice),
    ]


@torch.no_grad()
def _have_influence(policy: DiffusersPolicy, tree: Tree, parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Return whether `parameters` influence any velocity of the rollout; this leaves random values in them."""
    trained = [(e.state, e.sigma, e.rows) for e in tree.evaluations if e.state is not None]
    before = [policy.velocity(*each) for each in trained]
    for p in parameters:
        p.copy_(torch.randn(p.shape) + 1)
    after = [policy.velocity(*each) for each in trained]
    return any(not torch.equal(a, b) for x, y in zip(before, after, strict=True) for a, b in zip(x, y, strict=True))


def bfloat16_drift(build: Callable[[], DiffusionPipeline], call: dict[str, Any], rows: Sequence[Row]) -> Check:
    """Check that a replay in bfloat16 reproduces log-probabilities exactly.

    All modules are cast; if the pipeline then fails to run, all but the VAE are; if it fails again, autocast is used.
    """
    for how in ("all stored in it", "VAE in float32", "by autocast"):
        pipe = build()
        for name, component in pipe.components.items():
            if isinstance(component, torch.nn.Module) and how != "by autocast" and (name != "vae" or "VAE" not in how):
                _to_bfloat16(component)
        policy = DiffusersPolicy(pipe, call, autocast=torch.bfloat16 if how == "by autocast" else None)
        for module in policy.modules.values():
            module.requires_grad_(True)
        try:
            policy.check(rows[:1])
            tree = roll_out(policy, rows[:1], Kernel("flow_sde", 0.7), 1)
        except (RuntimeError, InputError) as error:
            refused = error
            continue
        largest = replay(policy, tree)
        return Check("drift_bfloat16", largest <= BFLOAT16_DRIFT, f"{largest:.1e}, {how}")
    return Check("drift_bfloat16", False, str(refused))


def _to_bfloat16(module: torch.nn.Module) -> None:
    """Cast a module as `from_pretrained(dtype=torch.bfloat16)` does, which keeps some submodules in float32."""
    module.to(torch.bfloat16)
    for path, part in module.named_modules():
        if any(name in path.split(".") for name in getattr(module, "_keep_in_fp32_modules", None) or ()):
            part.float()


def lora_reloads(
    build: Callable[[], DiffusionPipeline], call: dict[str, Any], row: Row, *, untrained: torch.Tensor | Films
) -> Check:
    """Check that a saved LoRA, loaded into a stock pipeline, gives the trained sample bit for bit."""
    policy = DiffusersPolicy(build(), call)
    weights = Weights(policy.modules, lora_config(2, 4, "auto", policy.modules))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in weights.parameters:
            p.copy_(0.1 * torch.randn(p.shape, generator=generator))
    trained = policy.generate([row])
    fresh = in_flow_euler(build())
    with tempfile.TemporaryDirectory() as folder:
        write_weights(policy, weights, Path(folder))
        load_lora(fresh, Path(folder))
    way = "pipe.load_lora_weights" if traits.loads_lora(fresh) else "transformer.load_lora_adapter"
    gap = gap_of(trained, stock_sample(fresh, call, row))
    moved = gap_of(trained, untrained)
    return Check("lora_reload", gap == 0 and moved > 0, f"{way}: {gap:.1e}, it moved the sample by {moved:.1e}")


def roll_out(policy: DiffusersPolicy, rows: Sequence[Row], kernel: Kernel | Sequence[Kernel], micro_batch: int) -> Tree:
    """Roll out one chain per row without gradients, by one kernel or one per step.

    If the first kernel is stochastic, all steps but the last are stochastic and trained.
    """
    roots = [Root(i, 0, row) for i, row in enumerate(rows)]
    states = [policy.start([row]) for row in rows]
    start = tuple(torch.cat(column) for column in zip(*states, strict=True))
    kernels = [kernel] * (len(policy.sigmas) - 1) if isinstance(kernel, Kernel) else kernel
    steps = range(len(kernels) - 1) if kernels[0].stochastic else ()

    def edge_noise(shape, *address):
        return noise.noise(shape, "certificate", *address)

    with torch.no_grad():
        growth: dict[str, Any] = {
            "evaluate": policy.velocity,
            "travel": policy.travel,
            "noise": edge_noise,
            "micro_batch": micro_batch,
        }
        return grow(chain(kernels, steps, steps), policy.sigmas, roots, start, **growth)


def replay(policy: DiffusersPolicy, tree: Tree) -> float:
    """Replay the trained steps of a rollout; return the largest |log ratio|, and leave the gradients in the weights."""
    gaps = [0.0]
    for evaluation in tree.evaluations:
        for edges in evaluation.trained:
            state = evaluation.state
            assert state is not None
            assert edges.next_state is not None
            assert edges.log_prob is not None
            velocity = policy.velocity(state, evaluation.sigma, evaluation.rows)
            mean, std = edge_transition(edges, evaluation.sigma, state, velocity, tree.sigma_cap)
            scored = log_prob(edges.next_state, mean, std, edges.move.kernel.log_prob)
            scored.sum().backward()
            gaps.append(float((scored.detach() - edges.log_prob).abs().max()))
    return float(torch.tensor(gaps).max())  # keeps NaN, unlike Python's max
