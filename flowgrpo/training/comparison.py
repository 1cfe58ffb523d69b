"""Comparison of the credit units of all processes: advantages, which units are trained on, and reward metrics."""

from __future__ import annotations

from dataclasses import replace

import torch

from flowgrpo.training.advantages import unit_selection
from flowgrpo.training.advantages.baseline import weighted_sum, zero_std_fraction
from flowgrpo.training.advantages.credit_units import CreditUnits
from flowgrpo.training.reports import learning_signal, metrics
from flowgrpo.training.scoring.rollout_batch import Batch
from flowgrpo.training.state import RunState
from flowgrpo.training.wing import Compared, Wing


def compare(run: RunState, wing: Wing, units: CreditUnits, batch: Batch) -> Compared:
    """Compare the units of all processes; return the advantages of this process's units and metrics over all units.

    All processes call this together. It also adds the rewards to the prompt statistics and to the
    baseline's memory.
    """
    algorithm, groups = run.config.algorithm, batch.groups
    gathered = run.collectives.gather_shards([(units, *batch.outcomes, batch.scores.lost)])
    all_units, indices = CreditUnits.concatenate([each[0] for each in gathered])
    prompts = torch.tensor(groups.prompts)[all_units.comparison[:, 0]].tolist()
    past = replace(run.prompt_stats.past(prompts, run.done), memory=run.memory)
    weights, select = run.credited.weights, run.config.train.select
    advantages, trained = unit_selection.normalize_advantages(
        all_units,
        weights,
        past=past,
        baseline=algorithm.baseline,
        select=select,
        done=run.config.train.done_at(run.done),
    )
    factors = wing.group_factors(batch)
    if factors is not None:
        advantages = advantages * factors[all_units.comparison[:, 0]]
    rewards, members = torch.cat([each[1] for each in gathered]), [member for each in gathered for member in each[2]]
    order = sorted(range(len(members)), key=members.__getitem__)  # sums round alike for any number of processes
    rewards = rewards[order]
    total = run.credited.total(rewards)
    run.prompt_stats.add([groups.prompts[members[i][0]] for i in order], total, run.done)
    run.memory = algorithm.baseline.remember(run.memory, total)
    teaching = trained & all_units.values.isfinite().any(1) & learning_signal.teaches(algorithm.objective, advantages)
    wing_metrics = wing.observe(all_units, batch)
    line = {
        **metrics.of_totals(total),
        **{f"reward/{name}/mean": metrics.mean(rewards[:, k]) for k, name in enumerate(run.reward_names)},
        "reward/lost": int(sum(each[3].sum() for each in gathered)),
        "groups/zero_std_fraction": zero_std_fraction(weighted_sum(all_units.values, weights), all_units.comparison),
        "groups/left_out_fraction": float((~trained).double().mean()),
        "groups/teaching": len(all_units.comparison[teaching, 0].unique()),
        **wing_metrics,
    }
    own = indices[run.shard.index]
    return Compared(units, advantages[own], trained[own], line)
