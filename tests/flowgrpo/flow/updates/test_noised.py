"""Updates by final samples: addressed noise, ratios of 1, exact resumes, and what a rollout keeps."""

import math
import shutil

import pytest
import torch
from cases import cases
from cut_back import cut_back
from field import MANY_DRAWS, credit, lines, settings, step_in_place, trainer, weights_of

from flowgrpo.errors import InputError
from flowgrpo.flow.methods import sample_presets
from flowgrpo.flow.updates.noised import Matching, calls_of, select_samples
from flowgrpo.training.weights.old_policies import Bank

ROWS = sorted(sample_presets.PRESETS)
FEW = dict.fromkeys(MANY_DRAWS, 3)
KINDS = ("nft", "crd", "dpo", "seppo")  # each sampler and anchor; a plain run leaves the others out
HELD = (
    "nft",
    "awm",
    "awm_fast",
    "awm_split",
    "dpo",
)  # an old policy, none, trees, and a moving reference; snapshots have their own test


def run_of(folder, preset="nft", reward=None, likelihood=(), objective=(), held_out=0, **overrides):
    written = {"draws": FEW[preset]} if preset in FEW else {}
    algorithm = {"preset": preset, "likelihood": {**written, **dict(likelihood)}, "objective": dict(objective)}
    sizes = {"train__group_size": 6, "train__groups": 2, "train__updates": 1, "train__iterations": 3}
    chosen = settings(folder, **{"algorithm": algorithm, **sizes, **overrides})
    return trainer(chosen, held_out=held_out, **({} if reward is None else {"reward": reward}))


def rolled(run, iteration=0):
    """The run's noised samples of an iteration, and what is credited to them."""
    run.done = iteration
    batch = run.rollout(iteration, run.groups(iteration))
    return batch, credit(run, batch)


def draws_of(noised, calls):
    """Each draw of some calls with its sigma, state and target, and its noise."""
    for call in calls:
        (state,), target = noised.noised(call)
        for row, draw in enumerate(call.draws):
            noise = target[row] + noised.tree.samples[0][draw.leaf]
            yield draw, draw.sigma, state[row], target[row], noise


def resumed(folder, whole, done, preset, **options):
    """The rest of a run that was stopped, whose numbers and weights are those of the whole one."""
    shutil.copytree(whole.folder, folder / "r")
    cut_back(folder / "r", done)
    rest = run_of(folder, preset, **options)
    rest.resume()
    assert rest.done == done
    rest.run()
    assert lines(whole) == lines(rest)
    kept, held = weights_of(rest), weights_of(whole)
    assert kept.keys() == held.keys()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in held.items())
    return rest


def gradient(run, credited):
    step_in_place(run, credited)
    return torch.cat([p.grad.flatten() for p in run.weights.parameters])


@pytest.mark.parametrize("preset", cases(ROWS, KINDS))
def test_a_rollout_keeps_nothing_but_where_it_ended(tmp_path, preset):
    run = run_of(tmp_path, preset)
    batch, again = (rolled(run)[0] for _ in range(2))
    assert all(e.state is None and not e.trained for e in batch.tree.evaluations)
    assert all(edges.next_state is None and edges.mean is None for e in batch.tree.evaluations for edges in e.edges)
    assert torch.equal(batch.tree.samples[0], again.tree.samples[0])


@pytest.mark.parametrize("preset", ["epg", "elbo_grpo", "ram", "nft"])
@pytest.mark.parametrize(("micro_batch", "updates"), [(5, 1), (16, 2)])
def test_the_ratio_to_a_copied_old_policy_is_exactly_1_but_after_the_first_step(tmp_path, preset, micro_batch, updates):
    sizes = {"train__micro_batch": micro_batch, "train__group_size": 4, "train__iterations": 2}
    run = run_of(tmp_path, preset, likelihood={"old": {"slope": 0.0, "most": 0.0}}, train__updates=updates, **sizes)
    run.run()
    assert [line["policy/max_abs_log_ratio"] for line in lines(run)] == [0.0] * 2
    assert all((line["policy/mean_abs_log_ratio"] > 0) == (updates > 1) for line in lines(run))


def test_the_reward_that_ranks_good_samples_reaches_each_of_them(tmp_path):
    """It is the reward of the sample itself, and unequal ranks move the weights."""
    ranked = {"name": "contrast", "rank_by": "shapes", "rank_temperature": 1e-3}
    slopes = []
    for name, objective in (("plain", {"name": "contrast"}), ("ranked", ranked)):
        run = run_of(tmp_path / name, "dpo", objective=objective)
        run.reward_names = ["shapes"]
        batch, credited = rolled(run)
        expected = batch.scores.values[:, 0] if name == "ranked" else torch.zeros(12)
        assert credited.noised.ranks.tolist() == expected.tolist()
        slopes.append(gradient(run, credited))
    assert not torch.allclose(*slopes)


@pytest.mark.parametrize("preset", ["dpo", "seppo"])
def test_the_loss_of_a_pair_begins_at_the_logarithm_of_2(tmp_path, preset):
    run = run_of(tmp_path, preset, train__iterations=2, train__learning_rate=0.05)
    run.run()
    first, second = (line["policy/loss"] for line in lines(run))
    assert first == pytest.approx(math.log(2), rel=1e-6)
    assert second != first


def test_a_ratio_to_the_live_policy_is_null_and_the_loss_is_told(tmp_path):
    run = run_of(tmp_path, "awm_fast", train__iterations=1)
    run.run()
    (line,) = lines(run)
    assert line["policy/loss"] not in (0, None)
    keys = ("mean_abs_log_ratio", "clip_fraction", "max_abs_log_ratio")
    assert {line[f"policy/{key}"] for key in keys} == {None}


def test_noise_and_noise_levels_are_those_of_any_batch_and_states_lie_between_sample_and_noise(tmp_path):
    credited = rolled(run_of(tmp_path))[1]
    noised, every = credited.noised, torch.ones(12).bool()
    units, trained = credited.units, torch.ones(len(credited.units.values)).bool()
    alone = calls_of(
        noised.likelihood,
        noised.tree,
        units,
        keep=every,
        trained=trained,
        micro_batch=1,
        mixes_levels=True,
        address=noised.address,
    )
    assert len(alone) == 12 * 5
    whole, apart = (
        {draw: (sigma, state.tolist(), target.tolist()) for draw, sigma, state, target, _ in draws_of(noised, calls)}
        for calls in (noised.calls, alone)
    )
    assert whole == apart
    for draw, sigma, state, target, _ in draws_of(noised, noised.calls):
        torch.testing.assert_close(state, noised.tree.samples[0][draw.leaf] + sigma * target)


def test_a_group_may_share_its_noise_and_its_noise_levels(tmp_path):
    noised, seen = rolled(run_of(tmp_path, likelihood={"noise": "group"}))[1].noised, {}
    for draw, sigma, _, _, noise in draws_of(noised, noised.calls):
        seen.setdefault((noised.node(draw).root.group, draw.number), []).append((sigma, noise))
    assert len(seen) == 2 * 5
    for own in seen.values():
        assert len(own) == 6
        assert all(sigma == own[0][0] and torch.allclose(noise, own[0][1], atol=1e-6) for sigma, noise in own)
    assert len({own[0][1][0].item() for own in seen.values()}) == 10  # fresh at each noise level


def test_antithetic_draws_come_with_their_negatives(tmp_path):
    noised, seen = rolled(run_of(tmp_path, likelihood={"antithetic": True, "draws": 2}))[1].noised, {}
    for draw, sigma, _, _, noise in draws_of(noised, noised.calls):
        seen.setdefault((draw.leaf, draw.number), {})[draw.sign] = (sigma, noise)
    assert len(seen) == 12 * 2
    for own in seen.values():
        (sigma, noise), (other, opposite) = own[1], own[-1]
        assert sigma == other
        torch.testing.assert_close(noise, -opposite)


@pytest.mark.parametrize("preset", cases(("nft", "dgpo", "crd"), ("dgpo", "crd")))
def test_the_gradient_does_not_depend_on_the_micro_batch(tmp_path, preset):
    found = []
    for size in (5, 64):
        run = run_of(tmp_path / str(size), preset, train__micro_batch=size)
        with torch.no_grad():  # away from the anchor, so that coupled losses differ from plain ones
            batch = run.rollout(0, run.groups(0))
            for p in run.weights.parameters:
                p.mul_(1.02)
        found.append(gradient(run, credit(run, batch)))
    assert found[0].abs().max() > 1e-3
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("preset", cases(ROWS, HELD))
def test_a_resumed_run_is_the_run_that_was_never_stopped(tmp_path, preset):
    whole = run_of(tmp_path / "a", preset, held_out=2)
    whole.run()
    rest = resumed(tmp_path / "b", whole, 2, preset, held_out=2)
    assert any(name.startswith("old.") for name in weights_of(rest)) == (rest.config.algorithm.old is not None)


def test_the_old_policy_samples_and_follows(tmp_path):
    """d is 0.5 at once: half of the way after each iteration, and its samples are not the live policy's."""
    half = {"old": {"start": 0.5, "slope": 0.0, "most": 0.5}}
    run = run_of(tmp_path, likelihood=half)
    start = [p.clone() for p in run.weights.parameters]
    run.iterate()
    old = [tensor for name, tensor in weights_of(run).items() if name.startswith("old.")]
    for kept, begun, p in zip(old, start, run.weights.parameters, strict=True):
        torch.testing.assert_close(kept, (begun + p) / 2)
    by_old = run.rollout(1, run.groups(1)).tree.samples[0]
    run.config = run_of(tmp_path / "live", likelihood={**half, "sampler": "live"}).config
    by_live = run.rollout(1, run.groups(1)).tree.samples[0]
    assert not torch.equal(by_old, by_live)
    with run.weights.policy("old"):
        assert torch.equal(run.rollout(1, run.groups(1)).tree.samples[0], by_old)


SNAPSHOTS = {"bank": {"every": 2, "keep": 3}}


def test_an_iteration_is_sampled_by_the_snapshot_that_its_address_draws(tmp_path):
    run = run_of(tmp_path, "seppo", likelihood=SNAPSHOTS, train__iterations=9, train__group_size=2)
    stood, drawn = [[p.detach().clone() for p in run.weights.parameters]], []  # the weights of each iteration
    live = run_of(tmp_path / "live", "seppo", likelihood={"sampler": "live"}, train__group_size=2)
    for iteration in range(1, 10):
        run.iterate()
        run.done = iteration
        stood.append([p.detach().clone() for p in run.weights.parameters])
        drawn.append(Bank(every=2, keep=3).draw(iteration, run.config.run.seed, "bank", iteration))
        samples = run.rollout(iteration, run.groups(iteration)).tree.samples[0]
        live.weights.put(stood[2 * drawn[-1]])
        assert torch.equal(samples, live.rollout(iteration, live.groups(iteration)).tree.samples[0])
    assert len(set(drawn)) > 2


def test_a_run_killed_between_snapshots_goes_on_with_the_same_ones(tmp_path):
    """Whatever the bank has made or dropped by then, what it holds and draws and what is learned are as in the whole run."""
    options = {"likelihood": SNAPSHOTS, "train__iterations": 8, "train__group_size": 2}
    whole = run_of(tmp_path / "a", "seppo", **options)
    whole.run()
    for done in (3, 4, 7):
        kept = weights_of(resumed(tmp_path / str(done), whole, done, "seppo", **options))
        assert {name.split(".")[1] for name in kept if name.startswith("bank.")} == {"2", "3", "4"}


@pytest.mark.parametrize(("previous", "times"), [(0.0, 1), (0.5, 2)])
def test_an_anchor_that_was_looked_at_is_asked_again_only_for_its_velocity(tmp_path, previous, times, monkeypatch):
    """12 samples at 5 noise levels by crd, whose old policy anchors; `live` is without the calls that learn."""
    run = run_of(tmp_path, "crd", objective={"kl": {"previous": previous}})
    _, credited = rolled(run)
    drift, seen = [], {"live": 0, "old": 0, "reference": 0}
    error, inputs = Matching._error, Matching._inputs

    def counted(self, name, call, state, target):
        seen[name] += len(call.draws)
        return error(self, name, call, state, target)

    def compared(self, call):
        found = inputs(self, call)
        direct = self.noised.likelihood.log_prob(error(self, "old", call, *self.noised.noised(call)), call.sigma)
        drift.append(torch.equal(found.old_log_prob, direct))
        return found

    monkeypatch.setattr(Matching, "_error", counted)
    monkeypatch.setattr(Matching, "_inputs", compared)
    step_in_place(run, credited)
    assert seen == {"live": 60, "old": times * 60, "reference": 60}
    assert drift == [True] * len(credited.noised.calls)


def test_a_sample_whose_reward_was_lost_has_no_part(tmp_path):
    def lost(samples, prompts):
        value = -samples.square().sum(1)
        value[::3] = torch.nan
        return value

    run = run_of(tmp_path, "dgpo", reward=lost)
    _, credited = rolled(run)
    assert len({draw.leaf for call in credited.noised.calls for draw in call.draws}) == 8
    assert gradient(run, credited).isfinite().all()


def test_only_the_pair_is_scored(tmp_path):
    batch, credited = rolled(run_of(tmp_path, "dpo"))
    left = {draw.leaf for call in credited.noised.calls for draw in call.draws}
    assert len(left) == 4
    by_group = {}
    for leaf, node in enumerate(batch.tree.leaves):
        by_group.setdefault(batch.tree.nodes[node].root.group, []).append((float(batch.scores.values[leaf, 0]), leaf))
    assert left == {pick(own)[1] for own in by_group.values() for pick in (min, max)}


def test_groups_are_looked_at_one_by_one(tmp_path):
    run = run_of(tmp_path, "dpo")
    tree = run.rollout(0, run.groups(0)).tree
    keep = torch.ones(12).bool()
    keep[:2] = False
    advantages = torch.arange(12).double()
    groups = [tree.nodes[leaf].root.group for leaf in tree.leaves]
    kept = select_samples(run.config.algorithm.objective, tree, advantages, keep).nonzero().flatten().tolist()
    for group in set(groups):
        own = [leaf for leaf in range(12) if groups[leaf] == group and keep[leaf]]
        assert [leaf for leaf in kept if groups[leaf] == group] == [own[0], own[-1]]


def test_a_pipeline_with_pins_is_refused(tmp_path):
    run = run_of(tmp_path)
    run.policy.pins = True
    with pytest.raises(InputError, match=r"algorithm\.likelihood: the pipeline puts parts of its own"):
        run.run()


def test_a_model_of_one_step_learns_too(tmp_path):
    written = {"preset": "nft", "kernel": "ode"}
    run = trainer(settings(tmp_path, algorithm=written, train__iterations=1, train__updates=1), steps=1)
    run.run()
    assert lines(run)[0]["policy/grad_norm"] > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tree": "twigs"}, r"algorithm\.tree: elbo trains on the ends of chains and of trees that split, twigs"),
        ({"credit": "siblings"}, r"algorithm\.credit: elbo trains on final samples, siblings gives steps their own"),
        ({"tree": {"start": "shared"}}, r"algorithm\.tree\.start: shared gives a group one start"),
        ({"tree": "window"}, r"algorithm\.tree: which steps are stochastic says nothing of ode"),
        ({"objective": {"step_weights": "noise_aware"}}, r"algorithm\.objective\.step_weights: noise_aware weighs"),
        ({"objective": {"kl": {"form": "exact"}}}, r"algorithm\.objective\.kl\.form: exact is of a kernel's noise"),
        ({"objective": "normalised_ratio"}, r"algorithm\.objective: normalised_ratio needs algorithm\.likelihood=traj"),
        ({"objective": "plackett_luce"}, r"algorithm\.likelihood\.noise: plackett_luce compares samples"),
        ({"tree": {"train_fraction": 0.5}}, r"algorithm\.tree: which steps are stochastic says nothing of ode"),
        ({"objective": "kl_mask"}, r"algorithm\.objective: kl_mask needs algorithm\.likelihood=trajectory"),
        *(
            ({"objective": word, "likelihood": {"anchor": "live"}}, r"algorithm\.likelihood\.anchor: the ratio to the")
            for word in ("centred", "clip")
        ),
        ({"likelihood": {"bank": {"keep": 3}}}, r"algorithm\.likelihood\.bank: nobody asks for a snapshot"),
        ({"likelihood": {"power": 0.5}}, r"algorithm\.likelihood\.power: the weight adaptive has no power"),
        ({"likelihood": "trajectory"}, r"algorithm\.objective: two_branch needs algorithm\.likelihood=elbo"),
        ({"likelihood": "trajectory", "objective": "clip"}, r"algorithm\.kernel: steps of ode have no log-probability"),
    ],
)
def test_what_does_not_go_together_is_one_sentence(tmp_path, options, said):
    with pytest.raises(InputError, match=said):
        settings(tmp_path, algorithm={"preset": "nft", **options})


@pytest.mark.parametrize(
    ("preset", "overrides", "said"),
    [
        ("nft", {"train__split": "edges"}, r"train\.split: elbo trains on samples"),
        ("dpo", {"train__split": "samples", "train__updates": 2}, r"train\.split: pair_preference compares the samp"),
        (
            "seppo",
            {"train__updates": 4, "algorithm__likelihood__bank__every": 3},
            r"\.bank\.every: a snapshot is taken where an iteration ends, .* 4 optimizer steps; take 4",
        ),
        ("seppo", {"run__processes": 2, "run__sharding": "fsdp2"}, r"run\.sharding: .* no old policy or snapshot is"),
        ("nft", {"run__staleness": 1}, r"run\.staleness: .* its older policy from algorithm\.likelihood\.old"),
    ],
)
def test_runs_that_keep_steps_are_refused(tmp_path, preset, overrides, said):
    with pytest.raises(InputError, match=said):
        settings(tmp_path, algorithm={"preset": preset}, **overrides)
