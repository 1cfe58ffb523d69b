"""Held-out evaluation: fixed prompts are sampled from fixed seeds and scored."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from flowgrpo.data.prompts import Prompt, Row
from flowgrpo.training.distributed.data_shard import DataShard
from flowgrpo.training.reports.samples import Sample, Text, is_finite
from flowgrpo.training.run.phases import phase
from flowgrpo.training.scoring.scorer import Scorer
from rewards import Reward
from rewards.audio import Films
from samplers.batches import batched


def evaluate(
    generate: Callable[[Sequence[Row]], torch.Tensor | Films | Sequence[Text]],
    prompts: Sequence[Prompt],
    rewards: Sequence[Reward],
    *,
    micro_batch: int,
    shard: DataShard,
    gather: Callable[[list[Sample]], list[Sample]],
    keep: int = 0,
) -> list[Sample]:
    """Sample and score every prompt once, divided among processes. Prompt i always has seed i.

    All processes get all samples, in the order of the prompts. Those of the first `keep` prompts keep `decoded` (on the
    CPU) if it is finite. `gather` returns the samples of all processes, given those of this one.
    """
    own_indices = list(range(shard.index, len(prompts), shard.count))
    samples = []
    with phase("evaluating", len(prompts)) as evaluating, Scorer(rewards) as scorer:
        for indices in batched(own_indices, micro_batch):
            rows = [Row(prompts[i].text, i, prompts[i].columns) for i in indices]
            decoded = generate(rows)
            scored = decoded if isinstance(decoded, torch.Tensor | Films) else [one.text for one in decoded]
            evaluating.advance(len(rows) * shard.count)  # an estimate: other processes are about as far
            if not shard.leads:
                continue
            values = scorer.submit_apart(scored, rows)().tolist()
            for index, row, value, one in zip(indices, rows, values, decoded, strict=True):
                named = {r.name: None if v != v else v for r, v in zip(rewards, value, strict=True)}
                kept = one if isinstance(one, Text) else one.cpu()
                shown = index < keep and is_finite(kept)
                samples.append(Sample(index, row, named, kept if shown else None))
    return sorted(gather(samples), key=lambda sample: sample.index)
