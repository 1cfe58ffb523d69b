"""What states look like on their way: through real pipelines, and of every kind of sample."""

import copy

import numpy as np
import pytest
import tiny
import torch
from field import settings

from flowgrpo.data.prompts import Row
from flowgrpo.flow.pipeline.policy import DiffusersPolicy
from flowgrpo.flow.rollouts.rollout import rollout
from flowgrpo.flow.rollouts.state_preview import FRAMES, GREY, StatePreviews, small
from rewards import Reward
from samplers.kernels import Kernel
from samplers.plans import chain
from samplers.trees import Root


@pytest.mark.parametrize("name", ["sd3_guided", "flux"])  # guided, and of packed latents
def test_the_last_state_foretells_the_sample_that_its_ode_step_leads_to(tmp_path, name):
    policy = DiffusersPolicy(tiny.PIPELINES[name](), tiny.CALLS[name])
    chosen = settings(tmp_path, run__trees={"prompts": 1}, train__micro_batch=3)
    asked = []

    def mean(images, prompts):
        asked.append(len(images))
        return images.mean((1, 2, 3)).tolist()

    rewards = [Reward("mean", mean)]
    roots = [Root(g, i, Row(prompt, 7 * g + i)) for g, prompt in enumerate(("a red circle", "a")) for i in range(2)]
    previews = StatePreviews(chosen, policy, rewards)
    watched = previews.watch(0, roots)
    policy.start([roots[0].row])
    steps = len(policy.sigmas) - 1
    plan = chain([Kernel("flow_sde", 0.7)] * steps, range(steps - 1), ())
    made = {"rewards": rewards, "micro_batch": 3, "seed": 0, "iteration": 0}
    tree, scores = rollout(policy, plan, roots, **made, evaluate=watched)
    plain, _ = rollout(policy, plan, roots, **made)
    assert all(torch.equal(x, y) for x, y in zip(tree.samples, plain.samples, strict=True))
    asked.clear()
    again, again_too = copy.copy(watched), copy.copy(watched)
    again.by_call, again_too.by_call = list(watched.by_call), list(watched.by_call)
    seen = previews.of(tree, scores, watched)
    assert watched.by_call == []  # nothing of it is held any longer
    assert sum(asked) == 2 * steps  # the leaves have been scored
    assert {each.root.group for each in seen} == {0}
    assert len(seen) == 2 * (steps + 1)
    ends = [each for each in seen if not each.estimated]
    assert [each.step for each in ends] == [steps] * 2
    for end in ends:
        last = seen[end.parent]
        assert last.step == steps - 1
        assert np.abs(last.picture.astype(int) - end.picture.astype(int)).max() <= 1
        assert float(last.rewards[0]) == pytest.approx(float(end.rewards[0]), abs=1e-5)
    assert (seen[0].picture != ends[0].picture).any()
    for unasked in (
        previews.of(tree, scores, again_too, leads=False),
        StatePreviews(chosen, policy, [Reward("mean", mean, group_wise=True)]).of(tree, scores, again),
    ):
        assert [each.rewards is None for each in unasked] == [each.estimated for each in unasked]
        assert all(each.picture is not None for each in unasked)
    assert sum(asked) == 2 * steps


def test_nothing_is_watched_that_is_not_due(tmp_path):
    roots = [Root(0, 0, Row("a", 0))]
    policy = DiffusersPolicy(tiny.sd3(), tiny.CALLS["sd3"])
    never = StatePreviews(settings(tmp_path), policy, [])
    assert never.watch(0, roots) is None
    assert never.of(None, None, None) == []
    some = StatePreviews(settings(tmp_path, run__trees={"every": 4}), policy, [])
    assert [iteration for iteration in (-4, 0, 1, 4, 5) if some.watch(iteration, roots) is not None] == [0, 4, 5]


def test_a_picture_is_made_small_and_a_small_one_stays():
    generator = torch.Generator().manual_seed(0)
    assert small(torch.rand(3, 40, 80, generator=generator), 20).shape == (1, 10, 20, 4)
    tiny_one = torch.rand(3, 4, 6, generator=generator)
    assert np.array_equal(small(tiny_one, 20)[0, ..., :3], (tiny_one * 255).round().byte().movedim(0, -1).numpy())
    assert small(torch.full((3, 2, 2), torch.nan), 20)[..., :3].max() == 0


def test_a_video_is_shown_by_frames_from_its_first_to_its_last():
    frames = torch.linspace(0, 1, 40)[:, None, None, None].expand(40, 3, 4, 4)
    shown = small(frames, 8)
    assert shown.shape == (FRAMES, 4, 4, 4)
    assert (shown[0, ..., :3].max(), shown[-1].min()) == (0, 255)
    assert small(frames[:3], 8).shape == (3, 4, 4, 4)


def test_a_sound_is_shown_by_its_loudness():
    sound = torch.cat([torch.zeros(2, 500), torch.ones(2, 500)], dim=1)
    (shown,) = small(sound, 80)
    assert shown.shape == (40, 80, 4)
    heights = (shown[..., 3] > 0).sum(0)
    assert heights[0] == 2
    assert heights[78] == 40
    assert shown[20, 0].tolist() == list(GREY)
