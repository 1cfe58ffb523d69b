"""Seeds of samples that an engine draws: addressed, though what an engine draws from them is its own."""

from __future__ import annotations

from samplers import noise

SEEDS = 2**48  # so that a seed with the number of a sample stays a small integer in any language


def seed_of(seed: int, iteration: int, group: int) -> int:
    """The seed of the first sample of a group; sample i has it plus i, whatever request it is in.

    Args:
        seed: of the run.
    """
    return int(noise.generator(seed, "engine", iteration, group).integers(SEEDS))
