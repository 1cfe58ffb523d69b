"""Trees of latents, grown level by level over all prompts of a batch.

A *node* is a latent at a sigma. Every node but a root is reached by one *edge*, a step of a kernel, so an edge is named by
its node. A *plan* is a pure function (role, step) -> the moves from such a node. It may grow several kinds of children from
one state (an ODE child beside K stochastic ones), twigs that only measure a reward, and edges that are not trained. All
children of a state share one model *evaluation*, in the rollout and in the update.
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
from samplers.drawing import Ahead, Family, drawn, sent
from samplers.kernels import ODE, Kernel, State, log_prob, transition

TRUNK = "trunk"
TWIG = "twig"  # a node that only measures the state it left; its sample ends no trajectory


@dataclass(frozen=True)
class Move:
    """How a node grows: `count` children of `role`, each by a step of `kernel`.

    Attributes:
        trained: whether the edges take part in the update.
        ode_stops: None for one step of the schedule; else indices of the schedule, up to its end, that ODE steps lead to
            without asking the plan again.
        sibling_strength: None for independent noise of siblings; s for (xi_0 + s eta) / sqrt(1 + s^2), xi_0 shared and eta
            their own, so that each is standard normal and two have covariance 1 / (1 + s^2) (BranchGRPO, arXiv 2509.06040).
        noise_scale: factor on the drawn noise that the log-probability ignores; any but 1 breaks the marginals.
    """

    kernel: Kernel = ODE
    role: str = TRUNK
    count: int = 1
    trained: bool = False
    ode_stops: tuple[int, ...] | None = None
    sibling_strength: float | None = None
    noise_scale: float = 1.0


Plan = Callable[[str, int], Sequence[Move]]  # (role, step) -> moves; without moves a node is never decoded


class Evaluate(Protocol):
    """The model as a tree's growth needs it; a policy's `velocity` is one."""

    def __call__(self, state: State, sigma: float, rows: Sequence[Any]) -> State:
        """Return the velocity of each tensor of `state` (B, ...) at `sigma` under the B conditions `rows`."""


class Noise(Protocol):
    """The source of a step's noise; see `samplers.noise`."""

    def __call__(
        self, shape: Sequence[int], group: int, path: tuple[int, ...], step: int, component: int
    ) -> torch.Tensor:
        """Return standard normal numbers (shape,) for one tensor of the state, on the edge at an address."""


@dataclass(frozen=True)
class Root:
    """The start of one tree: its prompt group, its number there, its condition for the model, and its optimizer step."""

    group: int
    index: int
    row: Any
    part: int = 0


@dataclass(frozen=True)
class Node:
    """One latent of the tree; `step` and `remaining_stops`, the rest of its move, are indices of the schedule."""

    parent: int | None
    root: Root
    path: tuple[int, ...]
    role: str
    sigma: float
    step: int
    remaining_stops: tuple[int, ...] = ()


@dataclass
class Edges:
    """The edges that leave one evaluation by the same move; fields of untrained edges are None.

    Attributes:
        rows: (E,) row of the evaluation that each edge leaves.
        nodes: (E,) node that each edge leads to.
        next_state: tensors (E, ...) in the storage dtype.
        log_prob: (E,) in the rollout, float32 or, summed, float64; of all stochastic edges.
        mean: of the step, float32 tensors (E, ...), if requested.
    """

    move: Move
    sigma_next: float
    rows: torch.Tensor
    nodes: torch.Tensor
    next_state: State | None
    log_prob: torch.Tensor | None
    mean: State | None = None

    def gather(self, state: State) -> State:
        """Return the rows (E, ...) of a state (B, ...) that the edges leave; the state itself for one edge a row."""
        if torch.equal(self.rows, torch.arange(len(state[0]))):
            return state
        rows = sent(self.rows, state[0].device)
        return tuple(x[rows] for x in state)


@dataclass
class Evaluation:
    """One call of the model: B states at one sigma, and all edges that leave them.

    The state, tensors (B, ...), is kept if edges are trained; the velocity, with its graph, if requested.
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

    Attributes:
        sigmas: the schedule, float32 values, descending to 0.
        leaves: nodes at sigma 0.
        samples: tensors (len(leaves), ...), the states of the leaves.
    """

    sigmas: tuple[float, ...]
    nodes: list[Node]
    evaluations: list[Evaluation] = field(default_factory=list)
    leaves: list[int] = field(default_factory=list)
    samples: State = ()

    @property
    def sigma_cap(self) -> float:
        """Return the schedule's second value, which replaces sigma near 1 in 1 - sigma."""
        return self.sigmas[1]

    @property
    def trained_steps(self) -> list[tuple[Kernel, float, float]]:
        """Return each (kernel, sigma, sigma_next) of the trained edges once, from noise to data."""
        return list(
            dict.fromkeys(
                (edges.move.kernel, evaluation.sigma, edges.sigma_next)
                for evaluation in self.evaluations
                for edges in evaluation.trained
            )
        )

    def ancestry(self, node: int) -> list[int]:
        """Return the node and its ancestors without the root: the edges that led to it, last first."""
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
    held: dict[int, tuple[Move, State]] | None = None,
) -> Tree:
    """Grow the trees of a batch from its roots, sweeping sigma downwards so that all nodes at one sigma run together.

    States with trained edges and states without are never in one evaluation, so that an update replays only what it needs.

    Args:
        sigmas: the schedule, float32 values, descending to 0.
        start: states of the R roots, tensors (R, ...) in the storage dtype.
        noise: noise of an edge; a sample depends on nothing else of the batch.
        micro_batch: most rows of one evaluation.
        keep_means: whether trained edges keep the mean of their step.
        keep_graphs: parts whose trained evaluations keep the graph of their velocity.
        held: receives nodes that only ODE steps lead to the end, with their moves and states, instead of growing them.
    """
    tree = Tree(tuple(sigmas), [Node(None, root, (root.index,), TRUNK, sigmas[0], 0) for root in roots])
    states = {i: tuple(x[i] for x in start) for i in range(len(roots))}
    pending = defaultdict(list, {sigmas[0]: list(states)})
    device = start[0].device
    ahead = None if device.type == "cpu" else Ahead(noise, device)  # only a GPU leaves the host time to draw ahead
    draw = partial(drawn_noise, tree, noise=noise) if ahead is None else lambda edges, _, of: ahead((id(edges), of))
    while pending:
        sigma = max(pending)
        arrived = pending.pop(sigma)
        if sigma == 0:
            tree.leaves = arrived
            tree.samples = stacked([states.pop(i) for i in arrived]) if arrived else ()
            continue
        moves = {}
        for i in arrived:
            node = tree.nodes[i]
            if own := _moves(plan, node.role, node.step, node.remaining_stops):
                moves[i] = own
        if held is not None:
            ending = [i for i, own in moves.items() if _ends_by_ode(own, len(sigmas) - 1)]
            held.update((i, (moves.pop(i)[0], states[i])) for i in ending)
        for batch in _batches(moves, tree, micro_batch):
            state = stacked([states[i] for i in batch])
            kept = tree.nodes[batch[0]].root.part in keep_graphs and _trains(moves[batch[0]])
            evaluation = _record_evaluation(tree, batch, moves)
            if ahead is not None:
                _begin(ahead, tree, evaluation, state)
            with torch.enable_grad() if kept else nullcontext():
                velocity = evaluate(state, sigma, evaluation.rows)
            if kept:
                evaluation.velocity = velocity
            velocity = tuple(v.detach() for v in velocity)
            for edges in evaluation.edges:
                following, mean = _step(tree, edges, sigma, state, velocity, draw)
                if edges.move.trained:
                    evaluation.state, edges.next_state, edges.mean = state, following, mean if keep_means else None
                for child, *child_state in zip(edges.nodes.tolist(), *(x.unbind() for x in following), strict=True):
                    states[child] = tuple(child_state)
                    pending[tree.nodes[child].sigma].append(child)
        for i in arrived:
            del states[i]
    return tree


def trained_steps(plan: Plan, sigmas: Sequence[float]) -> list[tuple[Kernel, float, float]]:
    """Return `Tree.trained_steps` of a plan without growing a tree; those of one sigma in any order."""
    steps: dict[tuple[Kernel, float, float], None] = {}
    # The (role, remaining stops) of the nodes at each step.
    arrived: list[dict[tuple[str, tuple[int, ...]], None]] = [{} for _ in sigmas]
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
    """Return whether only ODE steps leave a node, up to the end of the schedule."""
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
    """Record the evaluation of some nodes, with its edges and the nodes they lead to, before their states are known."""
    nodes = [tree.nodes[i] for i in batch]
    leaving: dict[Move, list[tuple[int, int]]] = defaultdict(list)  # (row, ordinal among its siblings), rows in order
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
    tree: Tree, edges: Edges, sigma: float, state: State, velocity: State, draw: Callable[..., torch.Tensor]
) -> tuple[State, State]:
    """Return the children's states, rounded to the storage dtype before they are scored, and their means."""
    kernel = edges.move.kernel
    mean, std = edge_transition(edges, sigma, state, velocity, tree.sigma_cap)
    following = mean
    if kernel.stochastic:
        following = tuple(
            m + std * sent(draw(edges, m.shape[1:], component), m.device) for component, m in enumerate(mean)
        )
    following = tuple(new.to(old.dtype) for new, old in zip(following, state, strict=True))
    if kernel.stochastic:
        edges.log_prob = log_prob(following, mean, std, kernel.log_prob)
    return following, mean


def drawn_noise(tree: Tree, edges: Edges, shape: Sequence[int], component: int, noise: Noise) -> torch.Tensor:
    """Return the noise (E, ...) of some edges in one tensor of the state."""
    return drawn(_families(tree, edges, component), shape, noise)


def _begin(ahead: Ahead, tree: Tree, evaluation: Evaluation, state: State) -> None:
    """Begin to draw all noise of the edges of an evaluation."""
    for edges in evaluation.edges:
        for component, x in enumerate(state) if edges.move.kernel.stochastic else ():
            ahead.begin((id(edges), component), _families(tree, edges, component), x.shape[1:])


def _families(tree: Tree, edges: Edges, component: int) -> list[Family]:
    """Return the addresses of the edges' noise; siblings share noise at their parent's own path, which leads to no edge."""
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
    """Return mean (E, ...) and std of edges, from the states (B, ...) and velocities of the evaluation they leave.

    Rollout and update both call this on the same rows in the same order, so their ratio is exactly 1. Kernels are
    elementwise, so siblings take their parent's mean.
    """
    if len(edges.rows) <= len(state[0]):
        state, velocity = edges.gather(state), edges.gather(velocity)
        return transition(edges.move.kernel, state, velocity, sigma, edges.sigma_next, sigma_cap)
    mean, std = transition(edges.move.kernel, state, velocity, sigma, edges.sigma_next, sigma_cap)
    return edges.gather(mean), std


def stacked(states: Sequence[State]) -> State:
    """Return states as one batch."""
    return tuple(torch.stack(column) for column in zip(*states, strict=True))
