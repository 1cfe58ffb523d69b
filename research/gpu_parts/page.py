"""The results of `scripts/gpu_check.py` as tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from flowgrpo.training.planning.gpu_types import GPUS

SPEED = ("lever", "rows", *("rollout s", "of peak", "/ plan", "update s", "of peak", "/ plan", "decode s", "of peak"))
SPEED += ("peak GiB", "/ plan", "log ratio")
LAUNCH = ("model, lever, rows", "forward ms", "host ms", "µs a launch", "with backward ms", "host ms", "decode host ms")
LAUNCH += ("decode beside forward / in turn", "warm-up s")
FINISH = ("model, rows", "layers", "finish s", "of the network's", "host s", "peak GiB", "drift")


def tables(parts: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page of a session's results: machine, checks, speed by model, launches, finishes, what failed.

    Shares of the peak and ratios to the plan need the part `plan` of the model, and a GPU that `flowgrpo plan` knows.
    """
    found = [each["found"] for each in parts.values() if "found" in each]
    of = {
        kind: [each for each in found if each["kind"] == kind]
        for kind in ("machine", "check", "speed", "finish", "plan")
    }
    machine = of["machine"][0] if of["machine"] else {}
    plans = {each["model"]: each for each in of["plan"]}
    lines = [", ".join(f"{key} {value}" for key, value in machine.items() if key != "kind"), ""] if machine else []
    if of["check"]:
        lines += [*_table(("model", "dtype", "check", "result"), map(_check, of["check"])), ""]
    for model in dict.fromkeys(each["model"] for each in of["speed"]):
        rows = (_speed(each, plans.get(model), machine.get("type")) for each in of["speed"] if each["model"] == model)
        lines += [f"{model}:", "", *_table(SPEED, rows), ""]
    if of["speed"]:
        rows = (_launch(each, plans.get(each["model"])) for each in of["speed"] if "forward" in each)
        lines += [*_table(LAUNCH, rows), ""]
    if of["finish"]:
        rows = (row for each in of["finish"] for row in _finish(each))
        lines += [*_table(FINISH, rows), ""]
    lines += [f"- {name}: {each['error']}" for name, each in parts.items() if "error" in each]
    return "\n".join(lines).strip()


def _table(heads: Sequence[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * len(heads)
    yield from (f"| {' | '.join(cells)} |" for cells in rows)


def _check(found: Mapping[str, Any]) -> list[str]:
    labels = ("model", "dtype", "check")
    told = {key.replace("_", " "): value for key, value in found.items() if key not in ("kind", *labels)}
    words = (f"{key} {value if isinstance(value, bool) else format(value, '.2g')}" for key, value in told.items())
    return [*(found[label] for label in labels), ", ".join(words)]


def _speed(found: Mapping[str, Any], plan: Mapping[str, Any] | None, gpu: str | None) -> list[str]:
    counted = plan and plan["rows"].get(str(found["rows"]))
    cells = [found["lever"], str(found["rows"])]
    for phase in ("rollout", "update", "decode"):
        seconds = found.get(phase, {}).get("seconds")
        known = bool(seconds and counted and gpu)
        cells.append(_number(seconds, ".3f"))
        cells.append(_number(_share(counted["operations"][phase], seconds, plan, gpu) if known else None, ".0%"))
        if phase != "decode":
            cells.append(_number(seconds / counted["seconds"][gpu][phase] if known else None, ".2f"))
    peaks = [found[phase]["gib"] for phase in ("rollout", "update") if found[phase]["gib"] is not None]
    peak = max(peaks) if peaks else None
    graphs = counted["graphs_gib"] if counted and found["lever"] == "kept graphs" else 0
    over = peak / (counted["gib"] + graphs) if peak and counted else None
    return [*cells, _number(peak, ".1f"), _number(over, ".2f"), _number(found["log_ratio"], ".1e")]


def _share(operations: float, seconds: float, plan: Mapping[str, Any], gpu: str) -> float:
    """Return the operations a second over the GPU's peak."""
    return operations / seconds / GPUS[gpu].peak(plan["dtype"])


def _launch(found: Mapping[str, Any], plan: Mapping[str, Any] | None) -> list[str]:
    forward, backward, decode = found["forward"], found["backward"], found.get("decode", {})
    launches = plan and plan["rows"].get(str(found["rows"]), {}).get("launches")
    return [
        f"{found['model']}, {found['lever']}, {found['rows']}",
        _number(1e3 * forward["seconds"], ".1f"),
        _number(1e3 * forward["host"], ".1f"),
        _number(1e6 * forward["host"] / launches if launches else None, ".1f"),
        _number(1e3 * backward["seconds"], ".1f"),
        _number(1e3 * backward["host"], ".1f"),
        _number(1e3 * decode["host"] if decode else None, ".1f"),
        _number(found["beside"]["seconds"] / (forward["seconds"] + decode["seconds"]) if decode else None, ".2f"),
        _number(found["warm_up"], ".1f"),
    ]


def _finish(found: Mapping[str, Any]) -> Iterator[list[str]]:
    name = f"{found['model']}, {found['rows']}" + ", compiled" * found["compiled"]
    own, *_ = found["layers"].values()
    for layers, each in found["layers"].items():
        if "error" in each:
            yield [name, layers, each["error"], "", "", "", ""]
            continue
        cells = [_number(each["seconds"], ".3f"), _number(each["seconds"] / own["seconds"], ".2f")]
        cells += [_number(each["host"], ".3f"), _number(each["gib"], ".1f"), _number(each["drift"], ".1e")]
        yield [name, layers, *cells]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
