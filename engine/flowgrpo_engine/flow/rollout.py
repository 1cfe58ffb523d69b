"""Rollouts by engines: request chains, check them, and score them with the trained policy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import ModelMixin

from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.flow.pipeline.inputs.modality import expected_shape, modality_of
from flowgrpo.flow.pipeline.policy import DiffusersPolicy
from flowgrpo.schema.engine import Engine
from flowgrpo.training.run.phases import phase
from flowgrpo_engine.flow import request, wire
from flowgrpo_engine.flow.adapters import Adapters
from flowgrpo_engine.flow.request import Steps
from flowgrpo_engine.flow.trajectory import chains_of
from flowgrpo_engine.service import KEY, EngineError, naming
from samplers.kernels import State
from samplers.trees import Plan, Root, Tree

SIGMA_GAP = 1e-5  # largest difference between tables of sigmas, from rounding in another order
HEADERS = 2**20  # bytes of an answer besides its tensors, per sample


@dataclass(frozen=True, kw_only=True)
class Rolled:
    """A rollout by engines, scored by the trained policy.

    Attributes:
        tree: the chains, with old log-probabilities of the trained policy.
        samples: (leaves, ...) decoded samples in the order of `tree.leaves`.
        engine: (nodes,) log-probability of each trained edge under the engine, in the form of its kernel; NaN elsewhere.
    """

    tree: Tree
    samples: torch.Tensor
    engine: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Sent:
    """The checked samples of some requests, on the host.

    Attributes:
        states: step -> states (R, ...).
        samples: (R, ...) decoded samples.
        log_probs: (R, steps) in the engine's form: means over the dimensions.
    """

    states: dict[int, torch.Tensor]
    samples: torch.Tensor
    log_probs: torch.Tensor


class EngineRollout:
    """Rollouts of a policy by engines.

    Args:
        section: `run.engine`.
        policy: the trained policy, which scores the engines' chains.
        adapters: pushes the policy's adapters.
    """

    def __init__(self, section: Engine, policy: DiffusersPolicy, adapters: Adapters):
        self.section, self.policy, self.adapters, self.client = section, policy, adapters, adapters.client
        networks: Iterable[ModelMixin] = policy.modules.values()
        self._distilled = any(network.config.get("guidance_embeds") for network in networks)
        self._like: State | None = None  # our own initial state of one row: the states' shape, dtype and device

    def try_out(self, plan: Plan, row: Row) -> None:
        """Request one sample without adapters, to check that states, sigmas and pictures fit the policy.

        Raises:
            InputError: they do not, or the engine does not answer as it should.
        """
        try:
            self.adapters.release()
            self.roll_out(plan, [Root(0, 0, row)], micro_batch=1)
        except EngineError as error:
            raise InputError(f"{KEY}: {error}") from None

    def roll_out(self, plan: Plan, roots: Sequence[Root], *, micro_batch: int, keep_means: bool = False) -> Rolled:
        """Let the engines sample chains from `roots`, and score them with the policy.

        Args:
            plan: plan of the iteration.
            roots: their rows have the seeds of the samples; see `flowgrpo_engine.asking`.
            micro_batch: largest number of rows in one call of our model.
            keep_means: see `samplers.growth.grow`.

        Raises:
            EngineError: an engine did not answer, or sent something else than was requested.
            InputError: an engine cannot sample this plan.
        """
        sigmas = self.policy.sigmas
        steps = request.steps_of(plan, len(sigmas) - 1)
        request.check_sigmas(steps, sigmas)
        if self._like is None:
            self._like = self.policy.start([roots[0].row])
        if len(self._like) != 1:
            raise InputError(
                f"{KEY}: an engine sends a state as one tensor, but this model's has {len(self._like)}; set it to null"
            )
        (like,) = self._like
        sent = self._request_chains(roots, steps, like)
        states = {step: state.to(like.device) for step, state in sent.states.items()}
        with phase("scoring"):
            chains = chains_of(
                plan,
                sigmas,
                roots,
                states,
                velocity=self.policy.velocity,
                dtype=like.dtype,
                micro_batch=micro_batch,
                keep_means=keep_means,
            )
        engine = _edge_log_probs(chains.tree, chains.root_of, sent.log_probs, like[0].numel())
        return Rolled(tree=chains.tree, samples=sent.samples[chains.leaves], engine=engine)

    def _request_chains(self, roots: Sequence[Root], steps: Steps, like: torch.Tensor) -> Sent:
        """Request the chains of `roots`, and check the answers."""
        requests = request.requests_of(roots, steps, self._call, self.section)
        shape = expected_shape(type(self.policy.pipe), self.policy.call)
        numbers = (len(steps.returned) * like[0].numel() + math.prod(shape) + 4 * len(self.policy.sigmas)) * 4
        with phase("engine", len(roots)) as asking:
            answers = self.client.rollouts([each for _, each in requests], 2 * numbers + HEADERS)
            asking.advance(len(roots))
        states: dict[int, dict[int, torch.Tensor]] = {step: {} for step in steps.returned}  # step -> root -> state
        samples: dict[int, torch.Tensor] = {}
        log_probs: dict[int, torch.Tensor] = {}
        for (indices, asked), answer in zip(requests, answers, strict=True):
            for i, sample in zip(indices, answer, strict=True):
                with naming(self.client.place):
                    if sample.get("prompt") != asked["prompt"] or sample.get("seed") != asked["seed"]:
                        raise EngineError("answered for another prompt or seed than the request's")
                    latents = self._states(sample, steps, like)
                    for step, state in zip(steps.returned, latents, strict=True):
                        states[step][i] = state
                    samples[i] = _picture(sample.get("generated_output"), type(self.policy.pipe), shape)
                    count = len(self.policy.sigmas) - 1
                    log_probs[i] = wire.tensor(sample.get("rollout_log_probs"), "rollout_log_probs", [count]).double()
        return Sent(
            states={step: _stack(column) for step, column in states.items()},
            samples=_stack(samples),
            log_probs=_stack(log_probs),
        )

    def _states(self, sample: Mapping[str, Any], steps: Steps, like: torch.Tensor) -> torch.Tensor:
        """Return the states (K, ...) of one sample at the requested steps, after checks of its sigmas and steps."""
        walked = sample.get("dit_trajectory")
        if not isinstance(walked, dict):
            raise EngineError("sent no trajectory; it may be too old for rollout_return_dit_trajectory")
        sigmas = torch.tensor(self.policy.sigmas)
        sent = wire.tensor(walked.get("sigmas"), "sigmas", [len(sigmas)]).float()
        if not torch.allclose(sent, sigmas, rtol=0, atol=SIGMA_GAP):
            step = int((sent - sigmas).abs().argmax())
            raise EngineError(
                f"used other sigmas than the pipeline, {sent[step]:.6g} instead of {sigmas[step]:.6g} at step "
                f"{step}; start it with the same shift"
            )
        if walked.get("latent_step_indices") is not None:
            named = wire.tensor(walked["latent_step_indices"], "latent_step_indices", [None], [torch.int64])
            if named.tolist() != steps.returned:
                raise EngineError(f"sent the states of steps {named.tolist()}, not of {steps.returned}")
        return wire.tensor(walked.get("latents"), "latents", [len(steps.returned), *like.shape[1:]])

    def _call(self, row: Row) -> dict[str, Any]:
        """Return the sampling parameters of a row."""
        call = dict(self.policy.call)
        if row.columns.get("negative_prompt") is not None:
            call["negative_prompt"] = row.columns["negative_prompt"]
        pipeline, untold = type(self.policy.pipe), self.section.untold
        return request.call_of(pipeline, call, distilled=self._distilled, untold=untold)


def _stack(by_root: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Stack the tensors of all roots in the order of their indices."""
    return torch.stack([by_root[i] for i in range(len(by_root))])


def _picture(written: Any, pipeline: type, shape: Sequence[int]) -> torch.Tensor:
    """Return a decoded sample as rewards take it: float32 in [0, 1], a picture (3, H, W) or a video (F, 3, H, W).

    An engine sends videos as (3, F, H, W), and some pictures as videos of one frame.
    """
    kinds = (*wire.FLOATS, torch.uint8)
    if modality_of(pipeline) == "video":
        frames, channels, *size = shape
        sent = wire.tensor(written, "generated_output", [channels, frames, *size], kinds).transpose(0, 1)
    elif isinstance(written, dict) and isinstance(written.get("shape"), list) and len(written["shape"]) == 4:
        channels, *size = shape
        sent = wire.tensor(written, "generated_output", [channels, 1, *size], kinds).squeeze(1)
    else:
        sent = wire.tensor(written, "generated_output", shape, kinds)
    picture = sent.float() / (255 if sent.dtype == torch.uint8 else 1)
    if not bool(((picture > -0.01) & (picture < 1.01)).all()):  # NaN fails, too
        raise EngineError("sent a generated_output with values outside 0 to 1")
    return picture.clamp(0, 1)


def _edge_log_probs(tree: Tree, root_of: Sequence[int], log_probs: torch.Tensor, dimensions: int) -> torch.Tensor:
    """Return the engine's log-probability (nodes,) of each trained edge, in the form of its kernel; NaN for other nodes.

    Where the engine's is not finite, the policy's becomes NaN as well, so that the edge leaves the update.

    Args:
        log_probs: (R, steps) means over the dimensions.
        dimensions: number of dimensions of a state.
    """
    engine = torch.full((len(tree.nodes),), torch.nan, dtype=torch.float64)
    for evaluation in tree.evaluations:
        for edges in evaluation.trained:
            nodes = edges.nodes.tolist()
            sent = torch.stack([log_probs[root_of[node], tree.nodes[node].step - 1] for node in nodes])
            assert edges.log_prob is not None
            engine[edges.nodes] = sent * (dimensions if edges.move.kernel.log_prob == "sum" else 1)
            edges.log_prob = edges.log_prob.masked_fill(~sent.isfinite().to(edges.log_prob.device), torch.nan)
    return engine
