"""The custom tree: a user's function returns its plan."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field
from typing_extensions import override

from flowgrpo.errors import InputError
from flowgrpo.flow.methods.credit.rules import trunk_ends
from flowgrpo.flow.methods.trees.tree import Rooted
from flowgrpo.schema.imports.lazy import lazy
from flowgrpo.training.distributed.minibatches import count_roots
from rewards.base import locate, nearest
from rewards.process_state import preserve

if TYPE_CHECKING:
    from samplers import kernels as formulas
    from samplers import trees
    from samplers.kernels import Kernel
    from samplers.trees import Move, Plan, Tree
else:
    formulas = lazy("samplers.kernels")
    trees = lazy("samplers.trees")


class Custom(Rooted):
    """A tree of your own: a function returns the plan of an iteration.

    The call is function(kernels, **options), with one kernel for each step. The last kernel is ODE unless `last_step`
    is sde. The function returns a `samplers.trees.Plan`, a function (role, step) -> moves.
    """

    name: Literal["custom"] = "custom"
    function: str
    """./file.py:name or pkg.module:name of the function, which takes one kernel for each step and returns a plan."""
    options: dict[str, Any] = {}
    """Keyword arguments of the function."""
    trajectories: int = Field(1, ge=1)
    """Number of trajectories that each root ends in, without twigs."""

    @override
    def roots(self, group_size: int) -> int:
        return count_roots(group_size, self.trajectories, "algorithm.tree.trajectories of each root")

    @override
    def check(self, tree: Tree) -> None:
        ends = len(trunk_ends(tree)) / sum(node.parent is None for node in tree.nodes)
        if ends != self.trajectories:
            raise InputError(
                f"algorithm.tree.trajectories: the plan of a root has {ends:g} ends, not {self.trajectories}"
            )

    @override
    def plan(self, kernels: Sequence[Kernel], group_size: int, seed: int, iteration: int) -> Plan:
        end, function = self._end(kernels), _load_function(self.function, Path.cwd())
        if not callable(function):
            raise InputError(f"algorithm.tree.function: {self.function} is {type(function).__name__}, not a function")
        arguments = [*kernels[:end], *[formulas.ODE] * (len(kernels) - end)]
        try:
            inspect.signature(function).bind(arguments, **self.options)
        except TypeError as error:
            takes = ", ".join(list(inspect.signature(function).parameters)[1:]) or "none"
            raise InputError(f"algorithm.tree.options: {error}; {self.function} has the options {takes}") from None
        with _check_move_fields(self.function), preserve("algorithm.tree.function", function, calls=True):
            plan = function(arguments, **self.options)
        if not callable(plan):
            raise InputError(
                f"algorithm.tree.function: {self.function} returned {type(plan).__name__}, not a plan (role, step) -> moves"
            )

        def moves(role: str, step: int) -> Sequence[Move]:
            with _check_move_fields(self.function), preserve("algorithm.tree.function", function, calls=True):
                planned = plan(role, step)
            if not isinstance(planned, Sequence) or not all(isinstance(move, trees.Move) for move in planned):
                kind = type(planned).__name__
                raise InputError(
                    f"algorithm.tree.function: the plan of {self.function} returned {kind} at step {step}, not a tuple of "
                    "Moves such as (Move(),)"
                )
            return planned

        return moves


@contextmanager
def _check_move_fields(function: str) -> Iterator[None]:
    """Turn a TypeError about an unknown field of `samplers.trees.Move` in a user's function into an InputError."""
    try:
        yield
    except TypeError as error:
        unknown = re.fullmatch(r"Move\.__init__\(\) got an unexpected keyword argument '(\w+)'.*", str(error))
        if unknown is None:
            raise
        choice = nearest(unknown[1], [field.name for field in fields(trees.Move)])
        raise InputError(f"algorithm.tree.function: {function}: a Move has no {unknown[1]!r}, {choice}") from error


@cache
def _load_function(function: str, folder: Path) -> Callable[..., Plan]:
    """Load the user's function; `folder` is in the cache's key because relative file names start there."""
    if ":" not in function:
        raise InputError(
            f"algorithm.tree.function: {function!r} names no function, write ./file.py:name or pkg.module:name"
        )
    return locate(function, f"algorithm.tree.function {function!r}")
