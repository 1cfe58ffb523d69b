"""Trees of latents, grown from noise to data for all prompts of a batch together.

A *node* is a latent at a sigma. Every node but a root is reached by one *edge*, a step of a kernel, so an edge is named
by the node it leads to. A *plan* is a pure function (role, step) -> moves of a node with this role at this step. From
one state it may grow several kinds of children (an ODE child and K stochastic ones), twigs that only measure a reward,
and edges that are not trained. All children of a state share one model *evaluation*, in the rollout and in the update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from samplers.drawing import to_device
from samplers.kernels import ODE, Kernel, State, transition

TRUNK = "trunk"
TWIG = "twig"  # a node that only measures the state it left; its sample ends no trajectory


@dataclass(frozen=True)
class Move:
    """The growth of a node: `count` children of `role`, each by a step of `kernel`.

    Attributes:
        trained: whether the edges take part in the update.
        ode_stops: None for one step of the schedule. Otherwise the indices of the schedule at which successive ODE
            steps stop, up to the schedule's end; the plan is not called for them.
        sibling_strength: None if siblings have independent noise. A number s gives them (xi_0 + s eta) / sqrt(1 + s^2),
            where xi_0 is shared and each has its own eta (BranchGRPO, arXiv 2509.06040).
        noise_scale: factor of the drawn noise, which the log-probability ignores; a value other than 1 breaks the marginals.
    """

    kernel: Kernel = ODE
    role: str = TRUNK
    count: int = 1
    trained: bool = False
    ode_stops: tuple[int, ...] | None = None
    sibling_strength: float | None = None
    noise_scale: float = 1.0


Plan = Callable[[str, int], Sequence[Move]]  # (role, step) -> moves; a node without moves is never decoded
Gate = Callable[["Tree", list[int]], Sequence[int]]  # (tree, its nodes at one sigma) -> those of them that grow


class Evaluate(Protocol):
    """The model as a function that returns velocities, such as a policy's `velocity`."""

    def __call__(self, state: State, sigma: float, rows: Sequence[Any]) -> State:
        """Return the velocity of each tensor of `state` (B, ...) at `sigma`, for the B conditions `rows`."""


class Noise(Protocol):
    """The source of a step's noise; see `samplers.noise`."""

    def __call__(
        self, shape: Sequence[int], group: int, path: tuple[int, ...], step: int, component: int
    ) -> torch.Tensor:
        """Return standard normal numbers of `shape` for tensor `component` of the state, at the address of an edge."""


@dataclass(frozen=True)
class Root:
    """Latent `index` of a prompt group, at index `step` of the schedule; optimizer step `part` trains its tree."""

    group: int
    index: int
    row: Any  # the model's condition
    part: int = 0
    step: int = 0


@dataclass(frozen=True)
class Node:
    """One latent of the tree, at index `step` of the schedule; `parent` is an index of `Tree.nodes`.

    `path` is part of the noise address: the index of the root, then the ordinal among siblings at each branching.
    `remaining_stops` are indices of the schedule that its ODE move has still to reach.
    """

    parent: int | None
    root: Root
    path: tuple[int, ...]
    role: str
    sigma: float
    step: int
    remaining_stops: tuple[int, ...] = ()


@dataclass
class Edges:
    """The edges that leave one evaluation by the same move; next_state and mean are None for untrained edges.

    Attributes:
        rows: (E,) row of the evaluation that each edge leaves.
        nodes: (E,) node that each edge leads to.
        next_state: tensors (E, ...) in the storage dtype.
        log_prob: (E,) in the rollout, for stochastic edges; float32, or float64 for the form `sum`.
        mean: mean of the step, float32 tensors (E, ...), if requested.
    """

    move: Move
    sigma_next: float
    rows: torch.Tensor
    nodes: torch.Tensor
    next_state: State | None
    log_prob: torch.Tensor | None
    mean: State | None = None

    def gather(self, state: State) -> State:
        """Return for each edge the row of `state` that it leaves: (B, ...) -> (E, ...)."""
        if torch.equal(self.rows, torch.arange(len(state[0]))):
            return state
        rows = to_device(self.rows, state[0].device)
        return tuple(x[rows] for x in state)


@dataclass
class Evaluation:
    """One call of the model: B states at one sigma, and all edges that leave them.

    `state` has tensors (B, ...), or is None if no edge is trained. `velocity` has its autograd graph, or is None if
    `keep_graphs` of `grow` did not ask for it.
    """

    sigma: float
    rows: list[Any]
    part: int
    state: State | None
    edges: list[Edges]
    velocity: State | None = None

    @property
    def trained(self) -> list[Edges]:
        """Return the edges that take part in the update."""
        return [edges for edges in self.edges if edges.move.trained]


@dataclass
class Tree:
    """All nodes and evaluations of a rollout, in the order of growth, parents before children.

    `sigmas` is the schedule, float32 values. `leaves` are the nodes at sigma 0, `samples` (leaves, ...) their states.
    `shared` has the state of each node below sigma 1 with several children, if `grow` was asked for them.
    """

    sigmas: tuple[float, ...]
    nodes: list[Node]
    evaluations: list[Evaluation] = field(default_factory=list)
    leaves: list[int] = field(default_factory=list)
    samples: State = ()
    shared: dict[int, State] = field(default_factory=dict)

    @property
    def sigma_cap(self) -> float:
        """Return the schedule's second sigma, which kernels use for sigma in 1 - sigma if sigma is near 1."""
        return self.sigmas[1]

    @property
    def trained_steps(self) -> list[tuple[Kernel, float, float]]:
        """Return the different (kernel, sigma, sigma_next) of the trained edges, from noise to data."""
        return list(
            dict.fromkeys(
                (edges.move.kernel, evaluation.sigma, edges.sigma_next)
                for evaluation in self.evaluations
                for edges in evaluation.trained
            )
        )

    def ancestry(self, node: int) -> list[int]:
        """Return the node and its ancestors without the root: the edges that lead to the node, last first."""
        edges = []
        while (parent := self.nodes[node].parent) is not None:
            edges.append(node)
            node = parent
        return edges


def edge_transition(edges: Edges, sigma: float, state: State, velocity: State, sigma_cap: float) -> tuple[State, float]:
    """Return mean (E, ...) and std of edges, from states (B, ...) and velocities of the evaluation that they leave.

    Rollout and update both call this with the same rows in the same order, so the ratio is exactly 1. If there are more
    edges than states, the step is computed once for each state, and siblings share its mean.
    """
    if len(edges.rows) <= len(state[0]):
        state, velocity = edges.gather(state), edges.gather(velocity)
        return transition(edges.move.kernel, state, velocity, sigma, edges.sigma_next, sigma_cap)
    mean, std = transition(edges.move.kernel, state, velocity, sigma, edges.sigma_next, sigma_cap)
    return edges.gather(mean), std


def stack_states(states: Sequence[State]) -> State:
    """Return the states as one batched state."""
    return tuple(torch.stack(column) for column in zip(*states, strict=True))
