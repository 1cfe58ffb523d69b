"""Hints from pictures of the prompts, starts at sigma 1, and trees for reports."""

from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from field import settings, trainer
from PIL import Image
from runs import CALL

from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.flow.methods.hints import noised
from flowgrpo.flow.pipeline.policy import DiffusersPolicy
from flowgrpo.flow.planning.plan import plan as planned
from flowgrpo.flow.planning.plan import table
from flowgrpo.flow.rollouts.hinted_rollout import Hints, _keep_previews, check_pictures
from flowgrpo.flow.rollouts.rollout import start_roots, walk
from flowgrpo.flow.rollouts.state_preview import StatePreview
from samplers.trees import Root

DATA = {"name": "noised", "source": "data"}


def picture(folder, name="a.png", value=200):
    path = folder / name
    Image.fromarray(np.full((20, 32, 3), value, dtype=np.uint8)).save(path)
    return str(path)


def test_a_start_at_sigma_1_is_a_plain_root_to_the_bit(tmp_path):
    run = trainer(settings(tmp_path, algorithm__hints="noised"))
    _, _, plan = run.wing._plan(0)
    roots = [Root(0, index, Row("a", index)) for index in range(4)]
    options = {"micro_batch": 3, "seed": 1, "iteration": 0}
    plain = walk(run.policy, plan, roots, **options)
    starts = start_roots(run.policy, roots, 3)
    again = walk(run.policy, plan, roots, start=noised((torch.full((4, 2), 9.0),), 1.0, starts), **options)
    assert torch.equal(plain.samples[0], again.samples[0])
    for one, other in zip(plain.evaluations, again.evaluations, strict=True):
        assert all(torch.equal(a.log_prob, b.log_prob) for a, b in zip(one.trained, other.trained, strict=True))
    other = walk(run.policy, plan, roots, start=starts, address="hinted edge", **options)
    assert not torch.isclose(plain.samples[0], other.samples[0]).any()  # the noise of hinted steps is fresh


def test_pictures_of_a_prompt_are_its_good_samples(tmp_path):
    policy = DiffusersPolicy(tiny.sd3(), CALL)
    hints = Hints(SimpleNamespace(config=settings(tmp_path, algorithm__hints=DATA), policy=policy))
    row = Row("a red circle", 0, {"picture": [picture(tmp_path), picture(tmp_path, "b.png", 30)]})
    hints.prepare(row)
    good = hints._good_samples(3, row)
    assert [state[0].shape for state in good] == [policy.start([row])[0][0].shape] * 2
    for (latents,), value in zip(good, (200, 30), strict=True):
        with torch.no_grad():
            pixels = torch.full((1, 3, 16, 16), 2 * value / 255 - 1)
            through = policy.pipe.vae(pixels).sample / 2 + 0.5
        decoded = policy.decode((latents[None],), [row])
        torch.testing.assert_close(decoded, through.clamp(0, 1), rtol=1e-4, atol=1e-4)
    assert hints._good_samples(3, Row("b", 0)) == []


def test_prompts_lend_pictures_that_can_be_read(tmp_path):
    chosen = settings(tmp_path, algorithm__hints=DATA)
    check_pictures(chosen, [{}, {"picture": picture(tmp_path)}])
    check_pictures(settings(tmp_path, algorithm__hints="noised"), [{}])
    film(tmp_path)
    for columns, sentence in (
        ([{"image": "a.png"}], "no training prompt has 'picture', they have image"),
        ([{"picture": str(tmp_path / "none.png")}], "none.png"),
        ([{"picture": 3}], "'picture' holds 3, which is not the file of a picture"),
        ([{"picture": str(tmp_path / "film.gif")}], "film.gif', which is not the file of a picture"),
    ):
        with pytest.raises(InputError) as error:
            check_pictures(chosen, columns)
        assert sentence in str(error.value)


def film(folder):
    frames = [Image.new("RGB", (8, 8), (value, 0, 0)) for value in (0, 90)]
    frames[0].save(folder / "film.gif", save_all=True, append_images=frames[1:])


def test_kept_trees_show_the_starts_that_were_not_replaced(tmp_path):
    """Parents are numbered among the previews of the group that are left."""

    def preview(node, parent, index, group=0):
        return StatePreview(node, parent, 0, Root(group, index, None), estimated=True)

    previews = [
        preview(0, None, 0),
        preview(1, None, 1),
        preview(2, None, 0, group=1),
        preview(3, 0, 0),
        preview(4, 1, 1),
    ]
    left = _keep_previews(previews, {(0, 0)})
    assert [(each.node, each.parent) for each in left] == [(1, None), (2, None), (4, 0)]


def test_the_plan_counts_the_most_that_hints_can_cost(tmp_path):
    """16 of 32 roots start anew, at step 1 of 10 at the earliest."""
    chosen = settings(tmp_path, model__path="shapes", algorithm__hints=DATA | {"source": "winner"}, rewards=["shapes"])
    plain = settings(tmp_path, model__path="shapes", rewards=["shapes"])
    assert planned(chosen)["hinted"] == {"model_evaluations": 16 * 9, "decoded": 16}
    assert planned(plain)["hinted"] == {"model_evaluations": 0, "decoded": 0}


@pytest.mark.parametrize(("search", "decodes"), [("best-of-n", 1), ("beam", 4)])
@pytest.mark.parametrize("source", ["search", "teacher"])
def test_the_plan_counts_the_candidates_of_every_group(tmp_path, source, search, decodes):
    """The 5 candidates of each of 4 groups take 10 steps; a beam also decodes them at its 3 comparisons."""
    hints = {"name": "noised", "source": source, "search": search, "width": 5}
    chosen = settings(
        tmp_path, model={"path": "shapes"}, algorithm={"preset": "flow_grpo", "hints": hints}, rewards=["shapes"],
        algorithm__objective__kl__beta=0.0,
    )  # fmt: skip
    found = planned(chosen)
    assert found["hinted"] == {"model_evaluations": 16 * 9 + 4 * 5 * 10, "decoded": 16 + 4 * 5 * decodes}
    assert dict(table(found))["with hints"].startswith("at most 344 model evaluations")
    assert dict(table(found))["with hints"].endswith("if all groups fail and get candidates")
