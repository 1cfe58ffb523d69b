"""Diagrams of trees in characters, drawn from their plans."""

from __future__ import annotations

from samplers.trees import TRUNK, TWIG, Move, Plan

SIGNS = {
    "o": "state",
    "*": "decoded",
    "~": "stochastic, trained",
    "=": "stochastic",
    "-": "ODE",
    ".": "twig, for its reward only",
}
WIDTH = 4  # characters for one step


def draw_tree(plan: Plan, num_steps: int) -> list[str]:
    """Draw the tree of one root from noise (left) to data (right); return its lines. Equal siblings share a line.

    `legend` explains the signs; a number in a step is the number of children.
    """
    header = "".join(str(step).ljust(WIDTH) for step in range(num_steps + 1)).rstrip()
    lines = [[" "] * (WIDTH * num_steps + 1)]
    _draw(plan, TRUNK, 0, remaining=(), end=num_steps, row=0, lines=lines)
    return [header, *("".join(line).rstrip() for line in lines)]


def legend(lines: list[str]) -> str:
    """Return what the signs in the lines of a diagram mean."""
    drawn = "".join(lines[1:])  # the first has the numbers of the steps
    words = [f"{sign} {meaning}" for sign, meaning in SIGNS.items() if sign in drawn]
    return "   ".join([*words, *(["number: children"] if any(map(str.isdigit, drawn)) else [])])


def _draw(
    plan: Plan, role: str, step: int, *, remaining: tuple[int, ...], end: int, row: int, lines: list[list[str]]
) -> None:
    """Draw the subtree of a node into `lines[row]` and the lines below; side branches of later steps come first."""
    sides: list[tuple[int, Move]] = []
    while step < end:
        lines[row][WIDTH * step] = "o"
        moves = (Move(role=role, ode_stops=remaining),) if remaining else tuple(plan(role, step))
        if not moves:
            break
        onward = next((move for move in moves if move.role == role), None)
        sides += [(step, move) for move in moves if move is not onward]
        if onward is None:
            break
        step, remaining = _edge(onward, step, row, lines)
    else:
        lines[row][WIDTH * end] = "*"
    for at, move in reversed(sides):
        lines.append([" "] * len(lines[0]))
        new = len(lines) - 1
        for above in range(row + 1, new):
            lines[above][WIDTH * at] = "|"
        lines[new][WIDTH * at] = "+"
        following, stops = _edge(move, at, new, lines)
        _draw(plan, move.role, following, remaining=stops, end=end, row=new, lines=lines)


def _edge(move: Move, step: int, row: int, lines: list[list[str]]) -> tuple[int, tuple[int, ...]]:
    """Draw one edge from `step`; return the step where it ends, and the remaining ODE stops of its move."""
    following, *remaining = move.ode_stops or (step + 1,)
    sign = "." if move.role == TWIG else "-" if not move.kernel.stochastic else "~" if move.trained else "="
    for column in range(WIDTH * step + 1, WIDTH * following):
        lines[row][column] = sign
    if move.count > 1:
        count = str(move.count)
        column = WIDTH * step + (2 if len(count) < WIDTH - 1 else 1)
        lines[row][column : column + len(count)] = count
    return following, tuple(remaining)
