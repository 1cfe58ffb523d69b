"""Compare the credit units of all processes: advantages, which units are trained on, and metrics of the rewards."""

from __future__ import annotations

import torch

from flowgrpo.training.advantages import unit_selection
from flowgrpo.training.advantages.baseline import weighted_sum, zero_std_fraction
from flowgrpo.training.advantages.credit_units import CreditUnits
from flowgrpo.training.reports import learning_signal, metrics
from flowgrpo.training.scoring.rollout_batch import Batch
from flowgrpo.training.state import RunState
from flowgrpo.training.wing import Compared, Wing


def compare(run: RunState, wing: Wing, units: CreditUnits, batch: Batch) -> Compared:
    """Return the advantages of this process's units, compared with those of all processes."""
    algorithm, groups = run.config.algorithm, batch.groups
    everyone = run.collectives.gather_shares([(units, *batch.outcomes, batch.scores.lost)])
    together, places = CreditUnits.joined([each[0] for each in everyone])
    prompts = torch.tensor(groups.prompts)[together.comparison[:, 0]].tolist()
    expected = run.prompt_stats.expected(prompts, run.done)
    weights, select = run.credited.weights, run.config.train.select
    advantages, trained = unit_selection.normalize_advantages(
        together, weights, expected=expected, baseline=algorithm.baseline, select=select
    )
    rewards = torch.cat([each[1] for each in everyone])
    total = run.credited.total(rewards)
    run.prompt_stats.add([groups.prompts[group] for each in everyone for group in each[2]], total, run.done)
    teaching = trained & together.values.isfinite().any(1) & learning_signal.teaches(algorithm.objective, advantages)
    own = wing.observe(together, batch)
    line = {
        **metrics.of_totals(total),
        **{f"reward/{name}/mean": metrics.mean(rewards[:, k]) for k, name in enumerate(run.reward_names)},
        "reward/lost": int(sum(each[3].sum() for each in everyone)),
        "groups/zero_std_fraction": zero_std_fraction(weighted_sum(together.values, weights), together.comparison),
        "groups/left_out_fraction": float((~trained).double().mean()),
        "groups/teaching": len(together.comparison[teaching, 0].unique()),
        **own,
    }
    mine = places[run.share.index]
    return Compared(units, advantages[mine], trained[mine], line)
