"""Growth of trees: from noise to data, for all prompts of a batch together.

Nodes at one sigma are evaluated together, in batches. Where every node of a batch only goes on by one step, the batch is
followed alone, so that the model can take these steps in one open call (`Travel`). Noise has an address, so the order of
growth changes no sample.

If only ODE steps lead from a node to the end, no gradient and no log-probability is needed. A `Finish` takes these steps,
perhaps by a cheaper form of the model. It may keep state between steps, since all steps of a call have the same rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, Protocol

import torch

from samplers.batches import batched
from samplers.drawing import Ahead, Family, draw, to_device
from samplers.kernels import ODE, Kernel, State, log_prob
from samplers.second_order import SecondOrder
from samplers.trees import (
    TRUNK,
    Edges,
    Evaluate,
    Evaluation,
    Gate,
    Move,
    Node,
    Noise,
    Plan,
    Root,
    Tree,
    edge_transition,
    stack_states,
)


class Travel(Protocol):
    """The model as a function that takes several steps of the schedule in one call, such as a policy's `travel`."""

    def __call__(self, state: State, steps: range, rows: Sequence[Any], onward: Callable[[State], State]) -> None:
        """Call `onward(velocity)` at each of `steps`, first at `state` (B, ...); its result is the next state."""


class Finish(Protocol):
    """A function that takes the last ODE steps, such as a policy's `finish`."""

    def __call__(self, state: State, sigmas: Sequence[float], rows: Sequence[Any]) -> State:
        """Return the state (B, ...) after ODE steps along `sigmas`, for the B conditions `rows`."""


class Landed(Protocol):
    """A function that is called while trees grow, once there are leaves."""

    def __call__(self, tree: Tree, states: Mapping[int, State]) -> None:
        """Take the states of all nodes that have not been left: leaves in the order of `Tree.leaves`, and growing nodes."""


def grow(
    plan: Plan,
    sigmas: Sequence[float],
    roots: Sequence[Root],
    start: State,
    evaluate: Evaluate,
    noise: Noise,
    micro_batch: int,
    keep_means: bool = False,
    keep_graphs: Collection[tuple[int, float]] = (),
    keep_shared: bool = False,
    held: dict[int, tuple[Move, State]] | None = None,
    gate: Gate | None = None,
    travel: Travel | None = None,
    landed: Landed | None = None,
) -> Tree:
    """Grow the trees of a batch from its roots, from noise to data.

    An evaluation has only states with trained edges, or only states without, so the update replays no untrained ones.

    Args:
        sigmas: the schedule, float32 values, descending to 0.
        start: states of the R roots, tensors (R, ...) in the storage dtype, each at its `Root.step`.
        micro_batch: largest number of rows of one evaluation.
        keep_graphs: (`Root.part`, sigma) of the trained evaluations that keep the autograd graph of their velocity.
        keep_shared: whether to keep the states of nodes below sigma 1 with several children.
        held: if given, receives the move and the state of each node whose only move is untrained, with `ode_stops` to
            the schedule's end; such nodes are not grown.
        gate: chooses which nodes at each sigma grow; None: all.
        travel: takes the steps of a batch that goes straight on; None: `evaluate` takes each.
        landed: called after each batch once there are leaves.
    """
    tree = Tree(tuple(sigmas), [Node(None, r, (r.index,), TRUNK, sigmas[r.step], r.step) for r in roots])
    growth = _Growth(tree, plan, noise, start, keep_means=keep_means)
    pending, kept_sigmas = growth.pending, {kept for _, kept in keep_graphs}
    for i, node in enumerate(tree.nodes):
        pending[node.sigma].append(i)
    while pending:
        sigma = max(pending)
        arrived = pending.pop(sigma)
        if sigma == 0:
            tree.leaves = arrived
            tree.samples = stack_states([growth.states.pop(i) for i in arrived]) if arrived else ()
            continue
        growing = [(i, tree.nodes[i]) for i in (arrived if gate is None else gate(tree, arrived))]
        moves = {i: own for i, n in growing if (own := _moves(plan, n.role, n.step, n.remaining_stops))}
        if held is not None:
            ending = [i for i, own in moves.items() if _ends_by_ode(own, len(sigmas) - 1)]
            held.update((i, (moves.pop(i)[0], growth.states[i])) for i in ending)
        alone = travel is not None and gate is None and not pending  # no other node joins these on their way
        steps = growth.straight(moves, kept_sigmas) if alone else range(0)
        for batch in _batches(moves, tree, micro_batch):
            if keep_shared and sigma < 1:
                tree.shared |= {i: growth.states[i] for i in batch if sum(move.count for move in moves[i]) > 1}
            kept = (tree.nodes[batch[0]].root.part, sigma) in keep_graphs and _trains(moves[batch[0]])
            with torch.enable_grad() if kept else nullcontext():
                if travel is not None and len(steps) > 1:
                    growth.follow(batch, steps, travel, kept=kept)
                else:
                    growth.leave(batch, moves, evaluate, kept=kept)
            growth.forget(batch)
            if landed is not None and 0 in pending:
                landed(tree, growth.states)
        growth.forget([i for i in arrived if i in growth.states])
    tree.evaluations.sort(key=lambda evaluation: -evaluation.sigma)  # a batch that was followed is ahead of others
    return tree


def grow_and_finish(
    plan: Plan, sigmas: Sequence[float], roots: Sequence[Root], *, micro_batch: int, finish: Finish, **growth: Any
) -> Tree:
    """Grow trees as `grow` does, but take the last ODE steps with `finish`.

    The tree has a node and an evaluation for every index in `Move.ode_stops`, as after `grow`. Trained evaluations have
    the same rows as in `grow`. Untrained states may be batched differently, so their results may differ in the last
    bits.
    """
    held: dict[int, tuple[Move, State]] = {}
    tree = grow(plan, sigmas, roots, micro_batch=micro_batch, held=held, **growth)
    together = defaultdict(list)
    for i, (move, _) in held.items():
        together[tree.nodes[i].step, tree.nodes[i].root.part, move].append(i)
    finals = [tree.samples] if tree.leaves else []
    for (step, _, move), alike in together.items():
        assert move.ode_stops is not None  # `grow` holds only such moves
        stops = (step, *move.ode_stops)
        for batch in batched(alike, micro_batch):
            state = stack_states([held.pop(i)[1] for i in batch])
            rows = [tree.nodes[i].root.row for i in batch]
            finals.append(finish(state, [tree.sigmas[stop] for stop in stops], rows))
            tree.leaves += _record_finish(tree, batch, rows, move)
    tree.samples = tuple(torch.cat(column) for column in zip(*finals, strict=True))
    return tree


class _Growth:
    """A tree that grows: states of its nodes, and the nodes that have arrived at each sigma."""

    def __init__(self, tree: Tree, plan: Plan, noise: Noise, start: State, *, keep_means: bool):
        self.states: dict[int, State] = {i: tuple(x[i] for x in start) for i in range(len(tree.nodes))}
        self.pending: dict[float, list[int]] = defaultdict(list)
        self._tree, self._plan, self._keep_means = tree, plan, keep_means
        self._second = SecondOrder()
        # Threads draw noise ahead only where the model leaves the CPU free.
        self._ahead = None if start[0].device.type == "cpu" else Ahead(noise, start[0].device)
        self._draw = partial(draw_noise, tree, noise=noise)

    def straight(self, moves: dict[int, Sequence[Move]], kept_sigmas: Container[float]) -> range:
        """Return the steps, from that of `moves`, at which each node goes on by one step, so that batches stay whole.

        All of the steps are trained at one of `kept_sigmas`, or none.
        """
        roles = {self._tree.nodes[i].role for i in moves}
        if len(roles) != 1:
            return range(0)
        (role,), first = roles, self._tree.nodes[next(iter(moves))].step
        sigmas, own, last = self._tree.sigmas, next(iter(moves.values())), first
        keeps = _trains(own) and sigmas[first] in kept_sigmas
        while last < len(sigmas) - 1 and _goes_on(own) and (_trains(own) and sigmas[last] in kept_sigmas) == keeps:
            last, role = last + 1, own[0].role
            own = self._plan(role, last) if last < len(sigmas) - 1 else ()
        return range(first, last)

    def leave(self, batch: Sequence[int], moves: dict[int, Sequence[Move]], evaluate: Evaluate, *, kept: bool) -> None:
        """Evaluate the nodes of a batch, and take all steps from them."""
        state = stack_states([self.states[i] for i in batch])
        evaluation = self._record(batch, moves, state)
        velocity = evaluate(state, evaluation.sigma, evaluation.rows)
        for edges, following in self._take(evaluation, batch, state, velocity, kept=kept):
            self._arrive(edges, following)

    def follow(self, batch: Sequence[int], steps: range, travel: Travel, *, kept: bool) -> None:
        """Evaluate the nodes of a batch and of their children in turn, at each of `steps`; see `straight`."""
        state, done = stack_states([self.states[i] for i in batch]), iter(steps[1:])
        evaluation = self._record_one(batch, steps[0], state)

        def onward(velocity: State) -> State:
            nonlocal batch, evaluation, state
            ((edges, following),) = self._take(evaluation, batch, state, velocity, kept=kept)
            self._second.forget(batch)
            step = next(done, None)
            if step is None:
                self._arrive(edges, following)
                return following
            batch, state = edges.nodes.tolist(), following
            evaluation = self._record_one(batch, step, state)
            return state

        travel(state, steps, evaluation.rows, onward)

    def forget(self, nodes: Sequence[int]) -> None:
        """Drop the states of nodes that were grown."""
        for i in nodes:
            del self.states[i]
        self._second.forget(nodes)

    def _record_one(self, batch: Sequence[int], step: int, state: State) -> Evaluation:
        moves = self._plan(self._tree.nodes[batch[0]].role, step)
        return self._record(batch, dict.fromkeys(batch, moves), state)

    def _record(self, batch: Sequence[int], moves: dict[int, Sequence[Move]], state: State) -> Evaluation:
        """Add the evaluation of a batch to the tree, and begin to draw the noise of its edges where threads draw it."""
        evaluation = _record_evaluation(self._tree, batch, moves)
        for edges in evaluation.edges:
            if self._ahead is not None and edges.move.kernel.stochastic:
                for component, x in enumerate(state):
                    families = _families(self._tree, edges, component)
                    self._ahead.begin((id(edges), component), families, x.shape[1:])
        return evaluation

    def _take(
        self, evaluation: Evaluation, batch: Sequence[int], state: State, velocity: State, *, kept: bool
    ) -> list[tuple[Edges, State]]:
        """Take the steps of an evaluation's edges; return the edges with the states that they lead to."""
        evaluation.velocity = velocity if kept else None
        velocity, sigma, taken = tuple(v.detach() for v in velocity), evaluation.sigma, []
        for edges in evaluation.edges:
            added = None
            if edges.move.kernel.order == 2 and edges.sigma_next > 0:
                own, moved = edges.gather(state), edges.gather(velocity)
                leaving, children = [batch[row] for row in edges.rows.tolist()], edges.nodes.tolist()
                added = self._second.correction(own, moved, sigma, edges.sigma_next, leaving, children)
            following, mean = self._step(edges, sigma, state, velocity, added)
            if edges.move.trained:
                evaluation.state, edges.next_state, edges.mean = state, following, mean if self._keep_means else None
            taken.append((edges, following))
        return taken

    def _step(
        self, edges: Edges, sigma: float, state: State, velocity: State, added: State | None
    ) -> tuple[State, State]:
        """Return states and means of children, second order `added`; set `edges.log_prob`, of states as they are stored."""
        kernel = edges.move.kernel
        mean, std = edge_transition(edges, sigma, state, velocity, self._tree.sigma_cap)
        if added is not None:
            mean = tuple(m + a for m, a in zip(mean, added, strict=True))
        following = mean
        if kernel.stochastic:
            noises = (self._noise(edges, component, m) for component, m in enumerate(mean))
            following = tuple(m + std * each for m, each in zip(mean, noises, strict=True))
        following = tuple(new.to(old.dtype) for new, old in zip(following, state, strict=True))
        if kernel.stochastic:
            edges.log_prob = log_prob(following, mean, std, kernel.log_prob)
        return following, mean

    def _noise(self, edges: Edges, component: int, mean: torch.Tensor) -> torch.Tensor:
        if self._ahead is None:
            return self._draw(edges, mean.shape[1:], component)
        return to_device(self._ahead((id(edges), component)), mean.device)

    def _arrive(self, edges: Edges, following: State) -> None:
        for child, *child_state in zip(edges.nodes.tolist(), *(x.unbind() for x in following), strict=True):
            self.states[child] = tuple(child_state)
            self.pending[self._tree.nodes[child].sigma].append(child)


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


def _goes_on(moves: Sequence[Move]) -> bool:
    return len(moves) == 1 and moves[0].count == 1 and moves[0].ode_stops is None


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


def _record_finish(tree: Tree, batch: Sequence[int], rows: list[Any], move: Move) -> list[int]:
    """Add the nodes and evaluations of one call of `finish` to the tree; return the indices of its nodes at sigma 0."""
    nodes = list(batch)
    assert move.ode_stops is not None
    for place, stop in enumerate(move.ode_stops):
        first, before, sigma = len(tree.nodes), tree.nodes[nodes[0]], tree.sigmas[stop]
        for i in nodes:
            node = tree.nodes[i]
            tree.nodes.append(Node(i, node.root, node.path, move.role, sigma, stop, move.ode_stops[place + 1 :]))
        nodes = list(range(first, len(tree.nodes)))
        taken = replace(move, ode_stops=move.ode_stops[place:])
        edges = Edges(taken, sigma, torch.arange(len(nodes)), torch.tensor(nodes), None, None)
        tree.evaluations.append(Evaluation(before.sigma, rows, before.root.part, None, [edges]))
    return nodes


def draw_noise(tree: Tree, edges: Edges, shape: Sequence[int], component: int, noise: Noise) -> torch.Tensor:
    """Return the noise (E, ...) of the edges for one tensor of the state."""
    return draw(_families(tree, edges, component), shape, noise)


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
