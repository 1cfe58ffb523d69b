"""The families of rows of `oracle_effects` that are rolled out by the policy they train."""

import json
import math
from pathlib import Path
from typing import Any

from gaussian_flow import expected, moments
from oracle_variants import STEPS, Family, Variant, chain_of

KNOWN = json.loads((Path(__file__).parent / "data" / "baseline_factors.json").read_text())
SIZE = 5  # of a group where baselines are compared: odd, so that a median is a sample's own


def _baseline(name: str, **options: Any) -> dict[str, Any]:
    return {"algorithm.baseline": {"name": name, **options}}


def comparisons() -> Family:
    """Baselines, spreads, selection and losses, of the quadratic reward."""
    chain = chain_of("flow_sde", 0.7)
    mean, variance = moments(chain)
    spread = math.sqrt(2 * variance**2 + 4 * variance * (mean - 2) ** 2)
    share, known = 1 - 1 / SIZE, {name: each["value"] for name, each in KNOWN["quadratic"].items()}
    select = {"train.select": {"rule": "extremes", "fraction": 2 / SIZE}}
    variance = {"train.select": {"rule": "max_variance", "fraction": 3 / SIZE, "statistics": "all"}}
    variants = [
        Variant("mean of the group"),
        Variant("leave_one_out", _baseline("leave_one_out"), 1 / share),
        Variant("absolute", _baseline("absolute", value=expected(chain, "quadratic")), 1 / share),
        Variant("tracker", _baseline("tracker", std="none"), 1 / share),
        Variant("cumulative", _baseline("cumulative"), None),
        Variant("quantile", _baseline("quantile", std="none"), None),
        Variant("median, no spread", _baseline("median", std="none"), known["median"] / share**2),
        Variant("median, over mad, cut at 5", _baseline("median", clip=5.0, eps=1e-4), known["median_mad"] / share**2),
        Variant("std of the group", {"algorithm.baseline.std": "group"}, known["std0"] / share),
        Variant("std of the batch", {"algorithm.baseline.std": "global"}, 1 / spread),
        Variant(
            "select the 2 extremes, std of the group",
            {"algorithm.baseline.std": "group", **select},
            known["best_minus_worst"] * SIZE / 2 / share,
        ),
        Variant("select 3 of max_variance", variance, None),
        Variant("soft_gate, or any clip", {"algorithm.objective": {"name": "soft_gate"}}),
        Variant("prefix_ratio", {"algorithm.objective": {"name": "prefix_ratio"}}),
        Variant("trajectory_ratio", {"algorithm.objective": {"name": "trajectory_ratio"}}),
        Variant("step weights noise_aware", {"algorithm.objective.step_weights": "noise_aware"}),
        Variant("step weights equalised", {"algorithm.objective.step_weights": "equalised"}),
    ]
    return Family("flow_grpo", "quadratic", variants, batches=12, groups=12, base={"train.group_size": SIZE})


def successes() -> Family:
    """Baselines of a reward of 0 and 1, where groups may agree."""
    chain = chain_of("flow_sde", 0.7)
    p, share = expected(chain, "success"), 1 - 1 / SIZE
    differ = 1 - p**SIZE - (1 - p) ** SIZE
    counts = [math.comb(SIZE, k) * p**k * (1 - p) ** (SIZE - k) for k in range(SIZE + 1)]
    spread = sum(chance * math.sqrt(k * (SIZE - k)) for k, chance in enumerate(counts)) / SIZE
    scaled = spread / (p * (1 - p)) / share
    variants = [
        Variant("mean, of successes"),
        Variant("beta, of successes", _baseline("beta"), None),
        Variant("beta, of successes, no bound", _baseline("beta", bound=None), None),
        Variant("drop_zero, of successes", {"algorithm.baseline.drop_zero": True}, 1 / differ),
        Variant("std of the group, of successes", {"algorithm.baseline.std": "group"}, scaled),
    ]
    return Family("flow_grpo", "success", variants, batches=12, groups=12, base={"train.group_size": SIZE})


def starts() -> Family:
    """A draft, of the linear reward: where it leads depends on no start, and so the shifts' part is exact."""
    draft = {"train.draft": {"pool": 4, "call": {}}}
    variants = [Variant("no draft"), Variant("draft of 4 times as many", draft)]
    return Family("flow_grpo", "linear", variants, batches=14, groups=8, shared=False)


def gains() -> Family:
    """Gains of steps, compared at each step or jointly, of the linear reward."""
    size, chain, ode = 8, chain_of("flow_sde", 0.7), chain_of("ode", 0.0)
    after = [math.prod(each.slope for each in ode[i + 1 :]) for i in range(STEPS)]
    spread = [
        abs(after[i]) * math.sqrt((each.slope - ode[i].slope) ** 2 * moments(chain[:i])[1] + each.noise**2)
        for i, each in enumerate(chain)
    ]
    scaled = math.sqrt(2 / size) * math.gamma(size / 2) / math.gamma((size - 1) / 2)
    factors = {i: scaled / each / (1 - 1 / size) for i, each in enumerate(spread[:-1])}
    joint = {"algorithm.credit.compare": "joint"}
    variants = [
        Variant("gains by step"),
        Variant("gains by step, over their std", {"algorithm.baseline.std": "group"}, factors),
        Variant("gains jointly", joint),
        Variant("gains jointly, over their std", {**joint, "algorithm.baseline.std": "group"}, None),
    ]
    return Family("dense_grpo", "linear", variants, batches=12, groups=5)


def twigs() -> Family:
    """Vary the ODE steps of the values of states."""
    lengths = [Variant(f"twigs of {n}", {"algorithm.tree.length": n}) for n in (5, 1)]
    return Family("dense_grpo", "quadratic", lengths, batches=12, groups=5, shared=False)


def finishes() -> Family:
    """Branches of a brush that fewer ODE steps finish."""
    ends = [Variant(f"branches finished in {n}", {"algorithm.tree.finish": n}) for n in (9, 1)]
    plain = {"algorithm.objective.step_weights": "none"}
    return Family("tempflow", "quadratic", ends, batches=10, groups=2, base=plain, shared=False)


def siblings() -> Family:
    """Noises of siblings other than the preset's, and steps that are not trained."""
    variants = [Variant(f"siblings {kind}", {"algorithm.tree.siblings": kind}) for kind in ("own", "hot")]
    depth = Variant("prune depth", {"algorithm.tree.prune": {"rule": "depth", "size": 2}})
    return Family("branch_grpo", "quadratic", [*variants, depth], batches=14, groups=4, shared=False)


def pruned() -> Family:
    """Chains that leave the update by their rewards."""
    rules = [
        Variant(f"prune {rule}", {"algorithm.tree.prune": {"rule": rule}}, None) for rule in ("parent_top1", "extremes")
    ]
    return Family("branch_grpo", "quadratic", [Variant("siblings correlated"), *rules], batches=14, groups=4)


FAMILIES = (comparisons, successes, starts, gains, twigs, finishes, siblings, pruned)
