"""Decoding and scoring of a rollout's samples."""

import torch
from grown import SDE, SIGMAS, address_noise

from flowgrpo.data.prompts import Row
from flowgrpo.flow.rollouts.rollout import score_leaves
from rewards import Reward
from samplers.growth import grow
from samplers.plans import branch
from samplers.trees import Root

SPLIT = branch([SDE] * 4, {1}, 3, stochastic={1}, trained={1}, sibling_strength=None, noise_scale=1.0)


def test_groups_share_full_calls_of_the_decoder_and_are_scored_apart():
    roots = [Root(group, 0, Row(str(group), 0)) for group in range(4)]
    start = (torch.zeros(4, 2),)
    tree = grow(SPLIT, SIGMAS, roots, start, lambda x, *_: x, address_noise, 12)
    decoded, scored = [], []

    def decode(leaves, rows):
        decoded.append([row.prompt for row in rows])
        return torch.tensor(leaves, dtype=torch.float32).reshape(-1, 1, 1, 1).expand(-1, 3, 2, 2)

    def place(images, prompts):
        scored.append(prompts)
        return images[:, 0, 0, 0].tolist()

    scores = score_leaves(tree, decode, [Reward("place", place)], 5)
    assert ["".join(rows) for rows in decoded] == ["00011", "12223", "33"]
    assert scored == [[str(group)] * 3 for group in range(4)]
    assert scores.values[:, 0].tolist() == list(range(12))
