"""Trees of latents, grown from noise to data for all prompts of a batch together.

A *node* is a latent at a sigma. Every node but a root is reached by one *edge*, a step of a kernel, so an edge is named
by the node it leads to. A *plan* is a pure function (role, step) -> moves of a node with this role at this step. From
one state it may grow several kinds of children (an ODE child and K stochastic ones), twigs that only measure a reward,
and edges that are not trained. All children of a state share one model *evaluation*, in the rollout and in the update.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, Protocol

import torch

from samplers.batches import batched
from samplers.drawing import Ahead, Family, draw, to_device
from samplers.kernels import ODE, Kernel, State, log_prob, transition
from samplers.second_order import SecondOrder

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


def grow(
    plan: Plan,
    sigmas: Sequence[float],
    roots: Sequence[Root],
    start: State,
    evaluate: Evaluate,
    noise: Noise,
    micro_batch: int,
    keep_means: bool = False,
    keep_graphs: Container[int] = (),
    keep_shared: bool = False,
    held: dict[int, tuple[Move, State]] | None = None,
    gate: Gate | None = None,
) -> Tree:
    """Grow the trees of a batch from its roots, from noise to data, with all nodes at one sigma together.

    An evaluation has only states with trained edges, or only states without, so the update replays no untrained ones.

    Args:
        sigmas: the schedule, float32 values, descending to 0.
        start: states of the R roots, tensors (R, ...) in the storage dtype, each at its `Root.step`.
        micro_batch: largest number of rows of one evaluation.
        keep_graphs: values of `Root.part` whose trained evaluations keep the autograd graph of their velocity.
        keep_shared: whether to keep the states of nodes below sigma 1 with several children.
        held: if given, receives the move and the state of each node whose only move is untrained, with `ode_stops` to
            the schedule's end; such nodes are not grown.
        gate: chooses which nodes at each sigma grow; None: all.
    """
    tree = Tree(tuple(sigmas), [Node(None, r, (r.index,), TRUNK, sigmas[r.step], r.step) for r in roots])
    states = {i: tuple(x[i] for x in start) for i in range(len(roots))}
    pending = defaultdict(list)
    for i, node in enumerate(tree.nodes):
        pending[node.sigma].append(i)
    second = SecondOrder()
    ahead = None if start[0].device.type == "cpu" else Ahead(noise, start[0].device)  # only then is the CPU free
    draw = partial(draw_noise, tree, noise=noise) if ahead is None else lambda edges, _, of: ahead((id(edges), of))
    while pending:
        sigma = max(pending)
        arrived = pending.pop(sigma)
        if sigma == 0:
            tree.leaves = arrived
            tree.samples = stack_states([states.pop(i) for i in arrived]) if arrived else ()
            continue
        growing = [(i, tree.nodes[i]) for i in (arrived if gate is None else gate(tree, arrived))]
        moves = {i: own for i, n in growing if (own := _moves(plan, n.role, n.step, n.remaining_stops))}
        if held is not None:
            ending = [i for i, own in moves.items() if _ends_by_ode(own, len(sigmas) - 1)]
            held.update((i, (moves.pop(i)[0], states[i])) for i in ending)
        for batch in _batches(moves, tree, micro_batch):
            state = stack_states([states[i] for i in batch])
            if keep_shared and sigma < 1:
                tree.shared |= {i: states[i] for i in batch if sum(move.count for move in moves[i]) > 1}
            kept = tree.nodes[batch[0]].root.part in keep_graphs and _trains(moves[batch[0]])
            evaluation = _record_evaluation(tree, batch, moves)
            if ahead is not None:
                _begin(ahead, tree, evaluation, state)
            with torch.enable_grad() if kept else nullcontext():
                velocity = evaluate(state, sigma, evaluation.rows)
            evaluation.velocity = velocity if kept else None
            velocity = tuple(v.detach() for v in velocity)
            for edges in evaluation.edges:
                added = None
                if edges.move.kernel.order == 2 and edges.sigma_next > 0:
                    own, moved = edges.gather(state), edges.gather(velocity)
                    leaving, children = [batch[row] for row in edges.rows.tolist()], edges.nodes.tolist()
                    added = second.correction(own, moved, sigma, edges.sigma_next, leaving, children)
                following, mean = _step(tree, edges, sigma, state, velocity, draw, added)
                if edges.move.trained:
                    evaluation.state, edges.next_state, edges.mean = state, following, mean if keep_means else None
                for child, *child_state in zip(edges.nodes.tolist(), *(x.unbind() for x in following), strict=True):
                    states[child] = tuple(child_state)
                    pending[tree.nodes[child].sigma].append(child)
        for i in arrived:
            del states[i]
            second.forget(i)
    return tree


def trained_steps(plan: Plan, sigmas: Sequence[float]) -> list[tuple[Kernel, float, float]]:
    """Return `Tree.trained_steps` of a plan without growing a tree; steps at one sigma are in any order."""
    steps: dict[tuple[Kernel, float, float], None] = {}
    arrived: list[dict[tuple[str, tuple[int, ...]], None]] = [{} for _ in sigmas]  # by step: role, remaining stops
    arrived[0][TRUNK, ()] = None
    for step, sigma in enumerate(sigmas[:-1]):
        for role, stops in arrived[step]:
            for move in _moves(plan, role, step, stops):
                following, *remaining = move.ode_stops or (step + 1,)
                arrived[following][move.role, tuple(remaining)] = None
                if move.trained:
                    steps[move.kernel, sigma, sigmas[following]] = None
    return list(steps)


def _moves(plan: Plan, role: str, step: int, stops: tuple[int, ...]) -> Sequence[Move]:
    return (Move(role=role, ode_stops=stops),) if stops else plan(role, step)


def _ends_by_ode(moves: Sequence[Move], end: int) -> bool:
    first, *others = moves
    lone = not others and first.count == 1 and not first.trained
    return lone and first.kernel == ODE and first.ode_stops is not None and first.ode_stops[-1] == end


def _batches(moves: dict[int, Sequence[Move]], tree: Tree, size: int) -> list[list[int]]:
    together = defaultdict(list)
    for i, moves_of_node in moves.items():
        together[tree.nodes[i].root.part, _trains(moves_of_node)].append(i)
    return [batch for _, alike in sorted(together.items()) for batch in batched(alike, size)]


def _trains(moves: Sequence[Move]) -> bool:
    return any(move.trained for move in moves)


def _record_evaluation(tree: Tree, batch: Sequence[int], moves: dict[int, Sequence[Move]]) -> Evaluation:
    """Add the evaluation of the nodes in `batch` to the tree, with edges and child nodes, before states are known."""
    nodes = [tree.nodes[i] for i in batch]
    leaving: dict[Move, list[tuple[int, int]]] = defaultdict(list)  # (row, ordinal among siblings), sorted by row
    siblings = [sum(move.count for move in moves[i]) for i in batch]
    for row, i in enumerate(batch):
        ordinals = iter(range(siblings[row]))
        for move in moves[i]:
            leaving[move].extend((row, next(ordinals)) for _ in range(move.count))
    evaluation = Evaluation(nodes[0].sigma, [node.root.row for node in nodes], nodes[0].root.part, None, [])
    tree.evaluations.append(evaluation)
    for move, origins in leaving.items():
        ids = range(len(tree.nodes), len(tree.nodes) + len(origins))
        for row, ordinal in origins:
            tree.nodes.append(_child(tree, batch[row], move, ordinal if siblings[row] > 1 else None))
        rows = torch.tensor([row for row, _ in origins])
        evaluation.edges.append(Edges(move, tree.nodes[ids[0]].sigma, rows, torch.tensor(ids), None, None))
    return evaluation


def _child(tree: Tree, parent: int, move: Move, ordinal: int | None) -> Node:
    node = tree.nodes[parent]
    path = node.path if ordinal is None else (*node.path, ordinal)
    step, *remaining = move.ode_stops or (node.step + 1,)
    return Node(parent, node.root, path, move.role, tree.sigmas[step], step, tuple(remaining))


def _step(
    tree: Tree,
    edges: Edges,
    sigma: float,
    state: State,
    velocity: State,
    draw: Callable[..., torch.Tensor],
    added: State | None,
) -> tuple[State, State]:
    """Return states and means of the children, second order `added`; set `edges.log_prob`, of states as they are stored."""
    kernel = edges.move.kernel
    mean, std = edge_transition(edges, sigma, state, velocity, tree.sigma_cap)
    if added is not None:
        mean = tuple(m + a for m, a in zip(mean, added, strict=True))
    following = mean
    if kernel.stochastic:
        following = tuple(
            m + std * to_device(draw(edges, m.shape[1:], component), m.device) for component, m in enumerate(mean)
        )
    following = tuple(new.to(old.dtype) for new, old in zip(following, state, strict=True))
    if kernel.stochastic:
        edges.log_prob = log_prob(following, mean, std, kernel.log_prob)
    return following, mean


def draw_noise(tree: Tree, edges: Edges, shape: Sequence[int], component: int, noise: Noise) -> torch.Tensor:
    """Return the noise (E, ...) of the edges for one tensor of the state."""
    return draw(_families(tree, edges, component), shape, noise)


def _begin(ahead: Ahead, tree: Tree, evaluation: Evaluation, state: State) -> None:
    for edges in evaluation.edges:
        for component, x in enumerate(state) if edges.move.kernel.stochastic else ():
            ahead.begin((id(edges), component), _families(tree, edges, component), x.shape[1:])


def _families(tree: Tree, edges: Edges, component: int) -> list[Family]:
    """Return the edges' noise addresses; noise that siblings share is at their parent's path, unused by any edge."""
    move = edges.move
    families: list[Family] = []
    strength = move.sibling_strength if move.count > 1 else None
    children = [tree.nodes[i] for i in edges.nodes.tolist()]
    for parent, siblings in groupby(children, key=lambda node: node.parent):
        above = tree.nodes[parent]
        group, step = above.root.group, above.step
        own = [(group, node.path, step, component) for node in siblings]
        if strength is not None:
            families.append(Family(own, (group, above.path, step, component), strength, move.noise_scale))
        else:
            families += [Family([address], None, 1.0, move.noise_scale) for address in own]
    return families


def edge_transition(
    edges: Edges, sigma: float, state: State, velocity: State, sigma_cap: float
) -> tuple[State, torch.Tensor]:
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
