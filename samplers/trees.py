"""Which latents are visited: a tree of states, grown level by level over all prompts of a batch.

A *node* is a latent at a sigma; every node but a root was reached by one *edge*, a step of a kernel, so an edge is named by
the node it leads to. A *plan* is pure: (role, step) -> the moves to make from such a node. It may grow several children of
different kinds from one state (a trunk's ODE child beside K stochastic ones), twigs that exist only for their reward, and
edges that are rolled out but not trained; all children of a state share one model *evaluation*, here and in the update.
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
TWIG = "twig"  # a node that exists only to measure the state it left: its sample is not the end of a trajectory


@dataclass(frozen=True)
class Move:
    """How a node grows: `count` children of `role`, each by a step of `kernel`.

    Attributes:
        trained: whether the edges take part in the update.
        ode_stops: None for one step along the schedule; otherwise the indices of the schedule that are walked to by ODE,
            up to its end, without asking the plan again.
        sibling_strength: None for siblings of independent noise; s for (xi_0 + s eta) / sqrt(1 + s^2), xi_0 shared and eta
            their own, so that each is standard normal and two have covariance 1 / (1 + s^2) (BranchGRPO, arXiv 2509.06040).
        noise_scale: factor on the drawn noise, of which the log-probability knows nothing; anything but 1 breaks the
            marginals.
    """

    kernel: Kernel = ODE
    role: str = TRUNK
    count: int = 1
    trained: bool = False
    ode_stops: tuple[int, ...] | None = None
    sibling_strength: float | None = None
    noise_scale: float = 1.0


Plan = Callable[[str, int], Sequence[Move]]  # (role, step) -> moves; none is a dead end, which is never decoded


class Evaluate(Protocol):
    """The model, as growth sees it; a policy's `velocity` satisfies it."""

    def __call__(self, state: State, sigma: float, rows: Sequence[Any]) -> State:
        """Velocity of each tensor of `state` (B, ...) at `sigma` under the B conditions `rows`."""


class Noise(Protocol):
    """The source of a step's noise; see `samplers.noise`."""

    def __call__(
        self, shape: Sequence[int], group: int, path: tuple[int, ...], step: int, component: int
    ) -> torch.Tensor:
        """Standard normal (shape,) for one tensor of the state, on the edge at an address."""


@dataclass(frozen=True)
class Root:
    """The start of one tree of the batch.

    Attributes:
        group: integer of the prompt group, unique in the iteration.
        index: which start of its group this is.
        row: the condition handed to the model (opaque here).
        part: the optimizer step it belongs to; an evaluation never mixes parts.
    """

    group: int
    index: int
    row: Any
    part: int = 0


@dataclass(frozen=True)
class Node:
    """One latent of the tree. `step` and `remaining_stops`, the rest of its move, are indices of the schedule."""

    parent: int | None
    root: Root
    path: tuple[int, ...]
    role: str
    sigma: float
    step: int
    remaining_stops: tuple[int, ...] = ()


@dataclass
class Edges:
    """The edges that leave one evaluation by the same move.

    Attributes:
        rows: (E,) row of the evaluation that each edge leaves.
        nodes: (E,) node that each edge leads to.
        next_state: tensors (E, ...) in the storage dtype; None unless trained.
        log_prob: (E,) as the rollout drew them, float32 or, summed, float64; None unless the kernel is stochastic.
        mean: of the step, float32 tensors (E, ...); None unless trained and asked for.
    """

    move: Move
    sigma_next: float
    rows: torch.Tensor
    nodes: torch.Tensor
    next_state: State | None
    log_prob: torch.Tensor | None
    mean: State | None = None

    def gather(self, state: State) -> State:
        """The part of a state (B, ...) that each edge leaves, (E, ...); the state itself where one edge leaves each row."""
        if torch.equal(self.rows, torch.arange(len(state[0]))):
            return state
        rows = sent(self.rows, state[0].device)
        return tuple(x[rows] for x in state)


@dataclass
class Evaluation:
    """One call of the model: B states at one sigma, and all edges that leave them.

    Attributes:
        state: tensors (B, ...); None when no edge is trained.
        velocity: of the states, with its graph; None unless growth was asked to keep it.
    """

    sigma: float
    rows: list[Any]
    part: int
    state: State | None
    edges: list[Edges]
    velocity: State | None = None

    @property
    def trained(self) -> list[Edges]:
        """The edges that take part in the update."""
        return [edges for edges in self.edges if edges.move.trained]


@dataclass
class Tree:
    """Everything a rollout visited.

    Attributes:
        sigmas: the schedule, float32 values, descending to 0.
        nodes: parents before children.
        evaluations: in the order in which they ran.
        leaves: nodes at sigma 0, the samples to decode, in order of growth.
        samples: tensors (len(leaves), ...), the states of the leaves.
    """

    sigmas: tuple[float, ...]
    nodes: list[Node]
    evaluations: list[Evaluation] = field(default_factory=list)
    leaves: list[int] = field(default_factory=list)
    samples: State = ()

    @property
    def sigma_cap(self) -> float:
        """What stands in for sigma near 1 in 1 - sigma: the schedule's second value."""
        return self.sigmas[1]

    @property
    def trained_steps(self) -> list[tuple[Kernel, float, float]]:
        """Each (kernel, sigma, sigma_next) that some trained edge took, once, from noise to data."""
        return list(
            dict.fromkeys(
                (edges.move.kernel, evaluation.sigma, edges.sigma_next)
                for evaluation in self.evaluations
                for edges in evaluation.trained
            )
        )

    def ancestry(self, node: int) -> list[int]:
        """The node and its ancestors, without the root: the edges that led to it, last first."""
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

    States with trained edges and states without share no evaluation, so that an update replays nothing in vain.

    Args:
        plan: moves of a (role, step).
        sigmas: the schedule, float32 values, descending to 0.
        roots: R roots.
        start: their states, tensors (R, ...), whose dtype is the storage dtype.
        evaluate: the model.
        noise: noise of an edge; a sample depends on it and on nothing else of the batch.
        micro_batch: most rows of one evaluation.
        keep_means: whether trained edges keep the mean of their step, for objectives that compare with it.
        keep_graphs: parts whose trained evaluations keep the graph of their velocity, for an update by the same weights.
        held: where nodes that ODE steps alone lead to the end are put instead of walking them, each with that move and its
            state (see `samplers.finishes`); None walks them.
    """
    tree = Tree(tuple(sigmas), [Node(None, root, (root.index,), TRUNK, sigmas[0], 0) for root in roots])
    states = {i: tuple(x[i] for x in start) for i in range(len(roots))}
    pending = defaultdict(list, {sigmas[0]: list(states)})
    device = start[0].device
    ahead = None if device.type == "cpu" else Ahead(noise, device)  # a host that computes itself has no time to spare
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
            evaluation = _branched(tree, batch, moves)
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
    """What `Tree.trained_steps` would be of any tree of a plan, without growing one; those of one sigma in any order."""
    found: dict[tuple[Kernel, float, float], None] = {}
    # By step, the (role, remaining stops) of nodes.
    arrived: list[dict[tuple[str, tuple[int, ...]], None]] = [{} for _ in sigmas]
    arrived[0][TRUNK, ()] = None
    for step, sigma in enumerate(sigmas[:-1]):
        for role, stops in arrived[step]:
            for move in _moves(plan, role, step, stops):
                following, *remaining = move.ode_stops or (step + 1,)
                arrived[following][move.role, tuple(remaining)] = None
                if move.trained:
                    found[move.kernel, sigma, sigmas[following]] = None
    return list(found)


def _moves(plan: Plan, role: str, step: int, stops: tuple[int, ...]) -> Sequence[Move]:
    return (Move(role=role, ode_stops=stops),) if stops else plan(role, step)


def _ends_by_ode(moves: Sequence[Move], end: int) -> bool:
    """Whether nothing but ODE steps leaves a node, up to the end of the schedule."""
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


def _branched(tree: Tree, batch: Sequence[int], moves: dict[int, Sequence[Move]]) -> Evaluation:
    """Record the evaluation of some nodes, with its edges and the nodes they lead to; their states are yet to come."""
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
    """The children's states, rounded to the storage dtype before their log-probability is recorded, and their means."""
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
    """The noise (E, ...) that some edges have in one tensor of the state."""
    return drawn(_families(tree, edges, component), shape, noise)


def _begin(ahead: Ahead, tree: Tree, evaluation: Evaluation, state: State) -> None:
    """Begin to draw all noise that the edges of an evaluation are about to have."""
    for edges in evaluation.edges:
        for component, x in enumerate(state) if edges.move.kernel.stochastic else ():
            ahead.begin((id(edges), component), _families(tree, edges, component), x.shape[1:])


def _families(tree: Tree, edges: Edges, component: int) -> list[Family]:
    """Where each edge's noise lies; what siblings share is drawn at their parent's own path, which leads to no edge."""
    move = edges.move
    found: list[Family] = []
    strength = move.sibling_strength if move.count > 1 else None
    children = [tree.nodes[i] for i in edges.nodes.tolist()]
    for parent, siblings in groupby(children, key=lambda node: node.parent):
        above = tree.nodes[parent]
        group, step = above.root.group, above.step
        own = [(group, node.path, step, component) for node in siblings]
        if strength is not None:
            found.append(Family(own, (group, above.path, step, component), strength, move.noise_scale))
        else:
            found += [Family([address], None, 1.0, move.noise_scale) for address in own]
    return found


def edge_transition(
    edges: Edges, sigma: float, state: State, velocity: State, sigma_cap: float
) -> tuple[State, torch.Tensor]:
    """Mean (E, ...) and std of edges, from the states (B, ...) and velocities of the evaluation they leave.

    Rollout and update both come through here, on the same rows in the same order: that is why their ratio is exactly 1.
    Every kernel moves each element by itself, so that siblings take their parent's mean.
    """
    if len(edges.rows) <= len(state[0]):
        state, velocity = edges.gather(state), edges.gather(velocity)
        return transition(edges.move.kernel, state, velocity, sigma, edges.sigma_next, sigma_cap)
    mean, std = transition(edges.move.kernel, state, velocity, sigma, edges.sigma_next, sigma_cap)
    return edges.gather(mean), std


def stacked(states: Sequence[State]) -> State:
    """States as one batch of them."""
    return tuple(torch.stack(column) for column in zip(*states, strict=True))
