"""Shares of two of four processes, for `test_collectives`."""

import torch
from accelerate import Accelerator

from flowgrpo.data.prompts import Row
from flowgrpo.training.distributed.assignment import Assignment
from flowgrpo.training.distributed.collectives import Collectives
from flowgrpo.training.distributed.data_shard import data_shards
from flowgrpo.training.distributed.fsdp_lockstep import Lockstep
from flowgrpo.training.distributed.worker_roles import Roles
from flowgrpo.training.scoring.group_scores import Piece, score_pieces
from rewards import Reward


def of_pairs():
    accelerator = Accelerator(cpu=True)
    return accelerator, *data_shards(accelerator, 2, Roles(accelerator.num_processes))


def told(rank):
    """Return this process's share, what it is told, and the scores of two groups, one of them on both shares.

    One reward differs by process and call, the other compares all samples of a group.
    """
    accelerator, share = of_pairs()
    collectives, asked = Collectives(accelerator, share, Lockstep(), count=accelerator.num_processes), []

    def luck(samples, prompts):
        asked.append(len(samples))
        return torch.rand(len(samples)) + rank

    def place(samples, prompts):
        return samples.flatten(1).mean(1).argsort().argsort()

    torch.manual_seed(rank)
    hands = [[(0, 0), (0, 1), (1, 0)], [(1, 1), (1, 2)]]
    assignment, pieces = Assignment(hands, share.index), []
    for group in (0, 1):
        places = [index for other, index in assignment.own if other == group]
        samples = torch.stack([torch.full((3, 2, 2), -float(index)) for index in places]) if places else None
        if places:
            pieces.append(Piece(group, places, samples, [Row("a", index) for index in places]))
    rewards = [Reward("luck", luck), Reward("place", place, group_wise=True)]
    scores = score_pieces(rewards, pieces, assignment, collectives.gather_shards, shard=share)
    return (share.index, share.count, share.leads), share.broadcast(f"from {rank}"), scores.values, asked


def exchanged(rank):
    """Return sums and lists over processes and over shares."""
    accelerator, share = of_pairs()
    collectives = Collectives(accelerator, share, Lockstep(), count=accelerator.num_processes)
    number = torch.tensor([10.0**rank])
    return {
        "sum": collectives.sum(number.clone()).tolist(),
        "sum_shards": collectives.sum_shards(number).tolist(),
        "kept": number.tolist(),
        "gather": collectives.gather([rank] * (1 + rank)),
        "gather_shards": collectives.gather_shards([rank] * (1 + rank)),
        "totals": collectives.totals({"a": 1 + rank, "b": 5}),
    }
