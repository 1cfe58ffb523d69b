"""Model evaluations of one iteration of each preset, and the gain that was measured for 20,000 of them.

`COSTS` are the numbers of `flowgrpo plan` for one prompt: 8 answers of 32 tokens, written one token a step, in one pass
of one update. Those of igpo are the most, if its group fails; so are the updates of espo, whose views may be empty, and of
d_tree_rpo, whose answers may end at different tokens. Those of dars are of its first stage. `GAINS` are the gain of accuracy
and its error on the model `digits` (docs/research/texts.md).
"""

from __future__ import annotations

COLUMNS = ("rollout", "update")

COSTS: dict[str, tuple[int, ...]] = {
    "diffu_grpo": (256, 16),
    "diffu_grpo_fast": (256, 8),
    "coupled_grpo": (256, 48),
    "gdpo": (256, 24),
    "bgpo": (256, 128),
    "espo": (256, 64),
    "cj_grpo": (256, 512),
    "just_grpo": (256, 256),
    "igpo": (512, 20),
    "spg": (256, 16),
    "trace_rl": (256, 32),
    "ebpo": (256, 128),
    "co_grpo": (256, 256),
    "d_tree_rpo": (154, 32),
    "tempo": (170, 176),
    "spo_tree": (170, 176),
    "tree_po": (170, 176),
    "gigpo": (170, 176),
    "hgpo": (170, 176),
    "salt": (170, 176),
    "spo": (256, 8),
    "bnpo": (256, 8),
    "dcpo": (256, 8),
    "riskpo": (256, 8),
    "dars": (256, 8),
}

GAINED = "accuracy gained on `digits` in 20,000 model evaluations"
GAINS: dict[str, tuple[float, float]] = {
    "diffu_grpo": (0.190, 0.009),
    "diffu_grpo_fast": (0.205, 0.020),
    "coupled_grpo": (0.218, 0.013),
    "gdpo": (0.162, 0.025),
    "bgpo": (0.151, 0.042),
    "espo": (0.100, 0.041),
    "cj_grpo": (0.217, 0.007),
    "just_grpo": (0.208, 0.013),
    "igpo": (0.172, 0.036),
    "spg": (0.195, 0.005),
    "trace_rl": (0.233, 0.005),
    "co_grpo": (0.177, 0.009),
}
