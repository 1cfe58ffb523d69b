"""What an engine rolled out, scored again: equal where it computes as the policy does, and refused where it is nonsense."""

import diffusers
import fake_engine
import pytest
import tiny
import torch
from replayed import adapted
from safetensors.torch import load

from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.flow.pipeline.loading.load import load_policy
from flowgrpo.flow.pipeline.policy import DiffusersPolicy
from flowgrpo.schema.engine import Engine
from flowgrpo_engine.flow import correction
from flowgrpo_engine.flow import rollout as rollouts
from flowgrpo_engine.flow.adapters import Adapters
from flowgrpo_engine.flow.client import Client
from flowgrpo_engine.flow.rollout import EngineRollout
from flowgrpo_engine.service import EngineError
from samplers.kernels import Kernel
from samplers.plans import chain
from samplers.trees import Root

PLAN = chain([Kernel("flow_sde", 0.7)] * 4, range(3), [1, 2])
ROOTS = [Root(0, i, Row("a red circle", 40 + i)) for i in range(3)] + [Root(1, 0, Row("two blue square", 7))]


@pytest.fixture(scope="module")
def policy():
    """The model as a policy that calls have been made of."""
    made = DiffusersPolicy(tiny.sd3(), tiny.CALLS["sd3"])
    assert made.sigmas
    return made


@pytest.fixture(scope="module")
def weights(policy):
    """Adapters of it that change what it computes; no test moves them."""
    return adapted(policy, alpha=6, size=0.1)


@pytest.fixture(scope="module")
def served():
    """An engine of the same model, and its address."""
    made = fake_engine.FakeEngine(DiffusersPolicy(tiny.sd3(), tiny.CALLS["sd3"]))
    with fake_engine.serving(made) as (address, _):
        yield made, address


@pytest.fixture
def engine(served):
    """The engine, as if it had just been started."""
    made, _ = served
    made.unmerge()
    made.as_started()
    return made


@pytest.fixture
def url(served, engine):
    return served[1]


@pytest.fixture
def rollout(url, policy, weights, tmp_path):
    section = Engine(url=url, retries=0, timeout=20, untold=["max_sequence_length"], samples=2)
    return EngineRollout(section, policy, Adapters(Client(section), weights, tmp_path / "pushed", "run"))


def gaps(rolled):
    told = correction.mismatch(rolled.tree, rolled.engine, 2.0)
    return told.each.abs()


FORMS = [
    Kernel("flow_sde", 0.7, "mean"),
    Kernel("flow_sde", 0.7, "sum"),
    Kernel("cps", 0.8, "constant_free"),
    Kernel("cps", 0.8, "mean"),
]


@pytest.mark.parametrize(
    ("kernel", "stochastic"),
    [
        *((kernel, range(3)) for kernel in FORMS),
        (FORMS[0], [1]),
        *(pytest.param(kernel, [1], marks=pytest.mark.zoo) for kernel in FORMS[1:]),
    ],
)
def test_with_equal_weights_the_engine_and_the_replay_agree_in_every_form(rollout, kernel, stochastic):
    rollout.adapters.push()
    rolled = rollout.roll_out(chain([kernel] * 4, stochastic, stochastic), ROOTS, micro_batch=3)
    assert len(gaps(rolled)) == len(ROOTS) * len(stochastic)
    assert gaps(rolled).max() < 2e-6
    assert rolled.samples.shape == (4, 3, 16, 16)


@pytest.mark.parametrize("name", ["flux", "sd3_guided"])
def test_packed_latents_embedded_guidance_and_branches_agree_too(name, tmp_path):
    tiny.PIPELINES[name]().save_pretrained(tmp_path / name)
    engine = fake_engine.FakeEngine(tmp_path / name, **tiny.CALLS[name])
    policy = load_policy(str(tmp_path / name), "float32", tiny.CALLS[name], torch.device("cpu"))
    weights = adapted(policy, alpha=6, size=0.1)
    with fake_engine.serving(engine) as (url, _):
        section = Engine(url=url, retries=0, timeout=20, untold=["max_sequence_length"])
        made = EngineRollout(section, policy, Adapters(Client(section), weights, tmp_path / "pushed", "run"))
        rows = [Row("a red circle", 4), Row("a red circle", 5), Row("two blue square", 6, {"negative_prompt": "a"})]
        made.adapters.push()
        rolled = made.roll_out(PLAN, [Root(i // 2, i % 2, row) for i, row in enumerate(rows)], micro_batch=3)
    assert gaps(rolled).max() < 5e-6
    told = [body for path, body in engine.asked if path == "/rollout/generate"]
    assert [body["guidance_scale"] for body in told] == [{"flux": 1.0, "sd3_guided": 3.0}[name]] * 2
    negative = {body["prompt"]: body.get("negative_prompt") for body in told}  # the requests are under way side by side
    expected = {"flux": (None, None), "sd3_guided": ("", "a")}[name]
    assert negative == dict(zip(("a red circle", "two blue square"), expected, strict=True))


def test_samples_are_those_of_their_leaves(rollout, engine):
    rollout.adapters.push()
    parts = [Root(root.group, root.index, root.row, part) for root, part in zip(ROOTS, (1, 0, 1, 0), strict=True)]
    rolled = rollout.roll_out(PLAN, parts, micro_batch=2)
    body = next(body for path, body in reversed(engine.asked) if path == "/rollout/generate")
    with torch.no_grad():
        for leaf, sample in zip(rolled.tree.leaves, rolled.samples, strict=True):
            row = rolled.tree.nodes[leaf].root.row
            with engine.policy.call_overrides(guidance_scale=1.0):
                expected = engine.sample({**body, "prompt": row.prompt, "seed": row.seed}, 0)["generated_output"]
            assert torch.equal(sample, load(expected["data"])["t"])


def test_without_a_push_the_mismatch_is_that_of_the_adapters(rollout):
    rolled = rollout.roll_out(PLAN, ROOTS, micro_batch=4)
    assert gaps(rolled).max() > 1e-3


def test_states_in_half_precision_are_taken_and_their_rounding_is_told(rollout, engine):
    rollout.adapters.push()
    engine.dtype = torch.bfloat16
    rolled = rollout.roll_out(PLAN, ROOTS, micro_batch=4)
    assert 1e-6 < gaps(rolled).max() < 0.01
    assert {edges.next_state[0].dtype for e in rolled.tree.evaluations for edges in e.trained} == {torch.bfloat16}
    assert {e.state[0].dtype for e in rolled.tree.evaluations if e.trained} == {torch.float32}


def test_an_edge_whose_number_is_not_finite_leaves_the_update(rollout, engine):
    def edit(samples):
        if samples[0]["prompt"] == ROOTS[3].row.prompt:
            scored = torch.tensor([0.0, torch.nan, 0.0, 0.0])
            samples[0]["rollout_log_probs"] = fake_engine.serialized(scored)

    engine.edit = edit
    rolled = rollout.roll_out(PLAN, ROOTS, micro_batch=4)
    kept = [edges.log_prob.isfinite().tolist() for e in rolled.tree.evaluations for edges in e.trained]
    assert kept == [[True, True, True, False], [True] * 4]


def changed(**fields):
    def edit(samples):
        for name, value in fields.items():
            place = (
                samples[-1]["dit_trajectory"] if name in ("latents", "sigmas", "latent_step_indices") else samples[-1]
            )
            place[name] = value

    return edit


def sent(*shape, value=0.5, dtype=torch.float32):
    return fake_engine.serialized(torch.full(shape, value, dtype=dtype))


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (changed(prompt="another"), "answered for another prompt or seed than the request's"),
        (changed(seed=1), "answered for another prompt or seed than the request's"),
        (changed(dit_trajectory=None), "sent no trajectory; it may be too old for rollout_return_dit_trajectory"),
        (changed(latents=sent(5, 4, 8, 8)), "sent latents of 5 x 4 x 8 x 8 in float32, not 3 x 4 x 8 x 8 in float32"),
        (changed(latents=sent(3, 64, 4)), "sent latents of 3 x 64 x 4 in float32, not 3 x 4 x 8 x 8"),
        (changed(sigmas=sent(5)), r"used other sigmas than the pipeline, 0.5 instead of .* at step \d; start it with"),
        (changed(sigmas=sent(4)), "sent sigmas of 4 in float32, not 5"),
        (changed(latent_step_indices=sent(3, value=1, dtype=torch.int64)), r"sent the states of steps \[1, 1, 1\], not"),
        (changed(rollout_log_probs=sent(3)), "sent rollout_log_probs of 3 in float32, not 4"),
        (changed(rollout_log_probs=None), "sent no tensor as rollout_log_probs"),
        (changed(generated_output=sent(3, 8, 8)), "sent generated_output of 3 x 8 x 8 in float32, not 3 x 16 x 16"),
        (changed(generated_output=sent(3, 16, 16, value=-1.0)), "sent a generated_output with values outside 0 to 1"),
    ],
)  # fmt: skip
def test_an_answer_that_is_not_of_this_model_is_refused_in_a_sentence(rollout, engine, edit, why):
    engine.edit = edit
    with pytest.raises(EngineError, match=rf"^http://127.0.0.1:\d+ at /rollout/generate {why}"):
        rollout.roll_out(PLAN, ROOTS[:1], micro_batch=4)
    with pytest.raises(InputError, match=r"^run.engine: http://127.0.0.1:\d+ at /rollout/generate "):
        rollout.try_out(PLAN, ROOTS[0].row)


@pytest.mark.parametrize(
    "value", [sent(3, 1, 16, 16, value=0.25), sent(3, 16, 16, value=0.25), sent(3, 16, 16, value=64, dtype=torch.uint8)]
)
def test_pictures_may_come_as_films_of_one_frame_and_in_bytes(rollout, engine, value):
    engine.edit = changed(generated_output=value, latent_step_indices=fake_engine.serialized(torch.tensor([1, 2, 3])))
    rolled = rollout.roll_out(PLAN, ROOTS[:1], micro_batch=4)
    torch.testing.assert_close(rolled.samples, torch.full((1, 3, 16, 16), 0.25), rtol=0, atol=1e-2)


def test_a_video_comes_with_its_channels_first_and_goes_to_rewards_frame_by_frame():
    film = torch.rand(3, 5, 4, 8)
    taken = rollouts._picture(fake_engine.serialized(film), diffusers.WanPipeline, (5, 3, 4, 8))
    assert torch.equal(taken, film.transpose(0, 1))
    with pytest.raises(EngineError, match="sent generated_output of 5 x 3 x 4 x 8 in float32, not 3 x 5 x 4 x 8"):
        rollouts._picture(fake_engine.serialized(taken), diffusers.WanPipeline, (5, 3, 4, 8))


def test_a_trial_takes_the_adapters_of_others_out(rollout, engine):
    engine.merged = "other"
    rollout.try_out(PLAN, ROOTS[0].row)
    assert engine.merged is None
