import json
import math
import random
import shutil
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from field import (
    TARGET,
    GaussianFlow,
    Network,
    closeness,
    credit,
    lines,
    nearness,
    step_in_place,
    trainer,
    weights_of,
)
from transformers import get_scheduler

from flowgrpo import config
from flowgrpo.flow.methods.presets import PRESETS
from flowgrpo.schema.sections import Schedule
from flowgrpo.training import optimize
from flowgrpo.training.weights import Weights
from rewards import Reward


def settings(folder, **overrides):
    written = {
        "model": {"path": "field", "lora": None},
        "algorithm": {"preset": "flow_grpo"},
        "train": {"iterations": 6, "groups": 4, "group_size": 8, "micro_batch": 16, "learning_rate": 0.05},
        "eval": {"every": 2, "prompts": 2, "save": 0},
        "run": {"name": "r", "dir": str(folder), "checkpoint": {"every": 1, "keep": 10}},
    }
    for key, value in overrides.items():
        config._set(written, key.replace("__", "."), value)
    return config.validated(written)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_flow_in_the_plane_learns_its_known_optimum(tmp_path, preset):
    """The expected reward -|x - target|^2 of N(mean, STD^2) is largest where mean = target."""
    held = PRESETS[preset]["objective"].get("kl", {})
    chosen = settings(
        tmp_path,
        algorithm={"preset": preset, "objective": {"clip_range": 0.2, "kl": {} if "target" in held else {"beta": 0.0}}},
        train__iterations=50,
        train__groups=2,
        train__group_size=12,
        eval__every=50,
        run__checkpoint__every=50,
    )
    run = trainer(chosen, GaussianFlow())
    if preset == "vgpo":
        run.rewards, run.eval_rewards = [Reward("nearness", nearness)], run.rewards
    run.run()
    learnt = run.policy.modules["field"].mean.detach()
    assert (learnt - TARGET).norm() < 0.25
    assert lines(run, "eval")[0]["reward/closeness/mean"] < -2
    assert lines(run, "eval")[-1]["reward/closeness/mean"] > -0.4
    assert all(line["policy/max_abs_log_ratio"] == 0 for line in lines(run))


def test_a_pull_to_the_reference_holds_the_policy_back(tmp_path):
    def distance(beta):
        kl = {"form": "velocity", "beta": beta}
        objective = {"name": "clip", "clip_range": 0.2, "kl": kl}
        chosen = settings(
            tmp_path / str(beta), algorithm={"preset": "flow_grpo", "objective": objective}, train__iterations=20
        )
        run = trainer(chosen, GaussianFlow())
        run.run()
        measured = [line["policy/kl"] for line in lines(run)]
        return run.policy.modules["field"].mean.norm().item(), measured

    free, none = distance(0.0)
    held, measured = distance(3.0)
    assert held < 0.7 * free
    assert none == [None] * 20
    assert measured[0] >= 0
    assert measured[-1] > 0


def judged_at_a_whim(samples, prompts):
    """A plug-in that draws from every global generator there is."""
    whim = torch.randn(len(prompts)) + torch.from_numpy(np.random.randn(len(prompts))).float() + random.random()
    return closeness(samples, prompts) + whim


def test_six_iterations_are_three_and_a_resume_and_three(tmp_path):
    def begin():
        torch.manual_seed(1), np.random.seed(1), random.seed(1)

    begin()
    whole = trainer(settings(tmp_path / "a"), reward=judged_at_a_whim)
    whole.run()
    begin()
    half = trainer(settings(tmp_path / "b", train__iterations=3, eval__every=2), reward=judged_at_a_whim)
    half.run()
    torch.manual_seed(99), np.random.seed(99), random.seed(99)
    rest = trainer(settings(tmp_path / "b"), reward=judged_at_a_whim)
    rest.resume()
    assert rest.done == 3
    rest.run()
    for name, tensor in weights_of(whole).items():
        assert torch.equal(tensor, weights_of(rest)[name]), name
    same = ("step", "reward/mean", "policy/grad_norm", "policy/mean_abs_log_ratio", "cost/model_evaluations")
    assert [[line[k] for k in same] for line in lines(whole)] == [[line[k] for k in same] for line in lines(rest)]


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 4])
def test_the_rate_of_every_step_is_transformers(name, warmup):
    dummy = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    word = "constant_with_warmup" if name == "constant" else name
    theirs = get_scheduler(word, dummy, warmup, 20)
    for step in range(20):
        assert Schedule(name=name, warmup=warmup).factor(step, 20) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        dummy.step(), theirs.step()


def test_a_floor_is_that_of_transformers():
    dummy = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = get_scheduler("cosine_with_min_lr", dummy, 3, 20, scheduler_specific_kwargs={"min_lr_rate": 0.1})
    for step in range(20):
        found = Schedule(name="cosine", warmup=3, floor=0.1).factor(step, 20)
        assert found == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        dummy.step(), theirs.step()


def test_the_rate_falls_over_the_run_and_goes_on_after_a_resume(tmp_path):
    chosen = {"train__schedule": "linear", "train__learning_rate": 0.06, "train__ema": {"decay": 0.9, "every": 4}}
    whole = trainer(settings(tmp_path, **chosen))
    whole.run()
    # 6 iterations of 2 steps; each line has the rate of its last step
    rates = [0.06 * (1 - step / 12) for step in (1, 3, 5, 7, 9, 11)]
    assert [line["policy/learning_rate"] for line in lines(whole)] == pytest.approx(rates)
    for step in (4, 5, 6):  # as if it had been killed
        shutil.rmtree(tmp_path / "r" / "checkpoints" / f"step-{step:06d}")
    rest = trainer(settings(tmp_path, **chosen))
    rest.resume()
    assert rest.done == 3
    rest.run()
    assert all(torch.equal(tensor, weights_of(rest)[name]) for name, tensor in weights_of(whole).items())


def test_a_resume_drops_what_came_after_its_checkpoint(tmp_path):
    first = trainer(settings(tmp_path, run__checkpoint={"every": 4, "keep": 2}))
    first.run()
    (tmp_path / "r" / "checkpoints" / "step-000006").rename(tmp_path / "gone")
    with (tmp_path / "r" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "pha')  # a crash in the middle of a line
    again = trainer(settings(tmp_path))
    again.resume()
    written = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["phase"]) for line in written] == [
        (0, "eval"), (1, "train"), (2, "train"), (2, "eval"), (3, "train"), (4, "train"), (4, "eval"),
    ]  # fmt: skip
    again.run()
    assert torch.equal(first.weights.parameters[0], again.weights.parameters[0])


def test_half_a_checkpoint_does_not_count(tmp_path):
    run = trainer(settings(tmp_path, train__iterations=2))
    run.run()
    folder = tmp_path / "r" / "checkpoints"
    (folder / "step-000002").rename(folder / ".step-000009.partial")
    again = trainer(settings(tmp_path, train__iterations=2))
    again.resume()
    assert again.done == 1


def test_the_last_checkpoints_are_kept(tmp_path):
    trainer(settings(tmp_path, run__checkpoint={"every": 2, "keep": 2})).run()
    assert sorted(p.name for p in (tmp_path / "r" / "checkpoints").iterdir()) == ["step-000004", "step-000006"]


def test_the_drift_metric_sees_a_wrong_state(tmp_path, monkeypatch):
    from flowgrpo.flow import trainer as module

    honest = module.rollout

    def shifted(*arguments, **options):
        tree, scores = honest(*arguments, **options)
        tree.evaluations[0].trained[0].next_state[0][0] += 1e-3
        return tree, scores

    monkeypatch.setattr(module, "rollout", shifted)
    run = trainer(settings(tmp_path, train__iterations=1))
    run.run()
    assert lines(run)[0]["policy/max_abs_log_ratio"] > 1e-4


def test_gradients_do_not_depend_on_the_micro_batch(tmp_path):
    def after(micro_batch):
        run = trainer(settings(tmp_path / str(micro_batch), train__iterations=2, train__micro_batch=micro_batch))
        run.run()
        return weights_of(run), [line["policy/max_abs_log_ratio"] for line in lines(run)]

    (reference, drift), others = after(32), [after(size) for size in (3, 7)]
    assert drift == [0, 0]
    for tensors, own_drift in others:
        assert own_drift == [0, 0]
        for name, tensor in reference.items():
            torch.testing.assert_close(tensors[name], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("rollout", "update"), [(7, 3), (3, 7), (5, 5)])
def test_a_rollout_has_batches_of_its_own(tmp_path, rollout, update):
    """Of 8 rows of a part: calls without a gradient have rollout_batch rows, those with one micro_batch."""
    sizes = {True: [], False: []}

    class Watched(Network):
        def forward(self, x, sigma, rows):
            sizes[torch.is_grad_enabled()].append(len(x))
            return super().forward(x, sigma, rows)

    def run(folder, **batches):
        chosen = settings(tmp_path / folder, **batches, train__updates=4, algorithm__objective__kl__beta=0.0)
        done = trainer(chosen, Watched(), held_out=0)
        done.run()
        return done

    reference, _ = run("reference", train__micro_batch=32), [own.clear() for own in sizes.values()]
    done = run("own", train__micro_batch=update, train__rollout_batch=rollout)
    full = {3: [3, 3, 2], 5: [5, 3], 7: [7, 1]}  # of 8
    for grad, size in ((False, rollout), (True, update)):
        calls = 6 * 4 * (5 if grad else 6)  # iterations, parts, steps
        assert sizes[grad] == full[size] * calls
    bound = 0.0 if rollout == update else 1e-6
    assert all(line["policy/max_abs_log_ratio"] <= bound for line in lines(done))
    for name, tensor in weights_of(reference).items():
        torch.testing.assert_close(weights_of(done)[name], tensor, rtol=1e-3, atol=1e-5)


def test_updates_split_the_groups_and_each_takes_one_step(tmp_path):
    run = trainer(settings(tmp_path, train__iterations=3, train__updates=4))
    run.run()
    assert run.weights.updates == 12
    line = lines(run)[0]
    # 4 groups x 8 samples, 6 steps of which the first 5 are trained; flow_grpo's KL adds a reference forward each
    assert line["cost/rollout_evaluations"] == 32 * 6
    assert line["cost/trained_edges"] == 32 * 5
    assert line["cost/update_evaluations"] == 2 * 32 * 5
    assert line["cost/model_evaluations"] == 32 * 6 + 2 * 32 * 5
    assert line["cost/decoded"] == 32


def test_a_revisited_prompt_gets_fresh_noise(tmp_path):
    run = trainer(settings(tmp_path, train__iterations=1), texts=("a",))
    first = {root.row.seed for root in run._roots(0, run.groups(0))}
    second = {root.row.seed for root in run._roots(1, run.groups(1))}
    assert len(first) == len(second) == 32
    assert not first & second


def test_a_shared_start_is_one_noise_per_group(tmp_path):
    run = trainer(settings(tmp_path, algorithm={"preset": "dance_grpo"}))
    seeds = {}
    for root in run._roots(0, run.groups(0)):
        seeds.setdefault(root.group, set()).add(root.row.seed)
    assert [len(own) for own in seeds.values()] == [1] * 4
    assert len(set.union(*seeds.values())) == 4


def test_group_wise_rewards_meet_one_group_at_a_time(tmp_path):
    met = []

    def ranked(samples, prompts):
        met.append(tuple(prompts))
        return [float(i) for i in range(len(prompts))]

    ranked.group_wise = True
    chosen = settings(tmp_path, train__iterations=1, eval__every=1)
    run = trainer(chosen, reward=ranked)
    run.rewards = [Reward("ranked", ranked, group_wise=True)]
    run.run()
    assert [len(call) for call in met] == [1, 1] + [8] * 4 + [1, 1]  # held-out, one sample a prompt; groups; held-out
    assert all(len(set(call)) == 1 for call in met)


class Breaking(Network):
    """Not a number below sigma 0.7 for one sample."""

    seed = None

    def forward(self, x, sigma, rows):
        broken = torch.tensor([row.seed == self.seed for row in rows]) & (sigma < 0.7)
        return super().forward(x, sigma, rows) * torch.ones(len(x), 1).masked_fill(broken[:, None], math.nan)


def lenient(samples, prompts):
    """A reward that makes a number of what is none, and a good one."""
    return closeness(samples, prompts).nan_to_num(100.0)


@pytest.mark.parametrize("reward", [closeness, lenient])
@pytest.mark.parametrize("preset", ["flow_grpo", "branch_grpo"])
def test_a_sample_that_is_not_a_number_costs_itself_and_not_the_step(tmp_path, preset, reward):
    """The update of 40 samples of which one breaks is that of the other 39 (of a tree's 20: the other trees')."""

    def begin(name):
        chosen = {"train__group_size": 10, "train__iterations": 1, "eval__every": 9}
        if preset == "branch_grpo":
            chosen["algorithm"] = {"preset": preset, "tree": {"factor": 5, "splits": [0]}}
        run = trainer(settings(tmp_path / name, **chosen), Breaking(), reward, held_out=0)
        start = run._roots(0, run.groups(0))
        return run, start[len(start) // 2]

    broken, root = begin("broken")
    broken.policy.modules["field"].seed = root.row.seed
    broken.run()
    without, root = begin("without")
    whole = without._roots
    without._roots = lambda *arguments: [r for r in whole(*arguments) if r != root]
    without.run()
    line = lines(broken)[0]
    assert line["policy/skipped_updates"] == 0
    assert line["reward/lost"] == (1 if preset == "flow_grpo" else 5)
    for name, tensor in weights_of(without).items():
        torch.testing.assert_close(weights_of(broken)[name], tensor, rtol=0, atol=1e-6)


class Diverging(Network):
    """Not a number for every sample, from the iteration `after` on."""

    run, after = None, 0

    def forward(self, x, sigma, rows):
        diverged = self.run is not None and self.run.done >= self.after
        return super().forward(x, sigma, rows) * (math.nan if diverged else 1.0)


def test_samples_that_are_not_finite_are_lost_without_asking_a_reward_and_good_checkpoints_stay(tmp_path):
    """A reward that takes NaN for black, as every one that makes 8-bit pictures does, saw nothing wrong."""
    asked = []

    def of_pictures(samples, prompts):
        asked.append(len(samples))
        assert samples.isfinite().all()
        return closeness(samples.nan_to_num(0.0), prompts)

    chosen = settings(tmp_path, eval__every=1, eval__save=2, run__checkpoint={"every": 1, "keep": 2})
    run = trainer(chosen, Diverging(), reward=of_pictures)
    run.policy.modules["field"].run, run.policy.modules["field"].after = run, 3
    run.samples = NoFiles()
    run.run()
    assert [line["reward/lost"] for line in lines(run)] == [0, 0, 0, 32, 32, 32]
    assert [line["reward/mean"] is None for line in lines(run)] == [False] * 3 + [True] * 3
    assert sum(asked) == 3 * (32 + 2)  # three iterations, and the evaluations before them
    assert run.samples.kept == {0: 2, 1: 2, 2: 2, 3: 0, 4: 0, 5: 0, 6: 0}
    kept = sorted(path.name for path in (tmp_path / "r" / "checkpoints").iterdir())
    assert kept == ["step-000001", "step-000002", "step-000005", "step-000006"]  # 3 gave nothing but NaN


class NoFiles:
    """Counts the samples that would have been written, by step."""

    def __init__(self):
        self.kept = {}

    def write(self, samples, step):
        self.kept[step] = sum(sample.decoded is not None for sample in samples)


class Poisoned(Network):
    """Not a number as soon as a gradient is asked for."""

    def forward(self, x, sigma, rows):
        return super().forward(x, sigma, rows) * (math.nan if torch.is_grad_enabled() else 1.0)


def test_a_gradient_that_is_not_finite_is_skipped_and_seen(tmp_path):
    run = trainer(settings(tmp_path, train__iterations=1), Poisoned())
    before = weights_of(run)
    run.run()
    assert all(torch.equal(before[name], t) for name, t in weights_of(run).items())
    assert lines(run)[0]["policy/skipped_updates"] == 2
    written = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert written[1]["policy/max_abs_log_ratio"] is None
    assert "NaN" not in (tmp_path / "r" / "metrics.jsonl").read_text()


def test_a_reward_that_fails_now_and_then_is_tried_again(tmp_path):
    calls = []

    def shaky(samples, prompts):
        calls.append(1)
        if len(calls) % 2:
            raise ConnectionError("busy")
        return closeness(samples, prompts)

    run = trainer(settings(tmp_path, train__iterations=1, eval__every=9), reward=shaky)
    run.run()
    assert lines(run)[0]["reward/lost"] == 0


def gradients(run, weights):
    """Of each part of the first iteration, where its groups weigh so much."""
    groups = replace(run.groups(0), weights=torch.tensor(weights, dtype=torch.float64))
    credited = credit(run, run.rollout(0, groups))
    found = []
    for part in range(run.config.train.updates):
        step_in_place(run, credited, part)
        found.append(torch.cat([p.grad.flatten() for p in run.weights.parameters]))
    return found


def test_the_weight_of_a_group_scales_its_part_of_the_loss(tmp_path):
    """With one group in each part the gradients are w_g g_g; with both in one part (w_0 g_0 + w_1 g_1) / 2."""
    apart, together = (
        trainer(settings(tmp_path / str(updates), train__groups=2, train__updates=updates)) for updates in (2, 1)
    )
    first, second = gradients(apart, [1.0, 1.0])
    weighted = gradients(apart, [0.5, 1.5])
    torch.testing.assert_close(weighted[0], 0.5 * first)
    torch.testing.assert_close(weighted[1], 1.5 * second)
    torch.testing.assert_close(gradients(together, [0.5, 1.5])[0], (0.5 * first + 1.5 * second) / 2)


class Meeting:
    """The sum over two processes that are threads."""

    def __init__(self):
        self.barrier, self.brought = threading.Barrier(2, timeout=20), [None, None]

    def reduce(self, process):
        def summed(tensor):
            self.brought[process] = tensor
            self.barrier.wait()
            total = self.brought[0] + self.brought[1]
            self.barrier.wait()
            return total

        return summed


def test_in_half_precision_a_process_without_a_loss_takes_part_in_the_step():
    """The first has a gradient of 2 for a loss of 2 w, the second has none; SGD takes both from 1 to 1 - 0.1 x 2."""
    meeting, found = Meeting(), {}

    def process(number):
        weights = Weights({"net": torch.nn.Linear(1, 1, bias=False)}, None)
        weights.parameters[0].data.fill_(1.0)
        optimizer, scaler = torch.optim.SGD(weights.parameters, lr=0.1), torch.amp.GradScaler("cpu")
        if number == 0:
            scaler.scale(2 * weights.parameters[0].sum()).backward()
        stats = optimize.UpdateStats()
        optimize.optimizer_step(
            weights, stats, optimizer=optimizer, scaler=scaler, max_grad_norm=9.0, reduce=meeting.reduce(number)
        )
        found[number] = weights.parameters[0].item(), stats.grad_norm, stats.skipped, scaler.state_dict()

    threads = [threading.Thread(target=process, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1]
    assert found[1][:3] == (pytest.approx(0.8), 2.0, 0)


def test_samples_whose_reward_is_lost_are_dropped_and_counted(tmp_path):
    def broken_for_a(samples, prompts):
        if prompts[0] == "a":
            raise ConnectionError("gone")
        values = closeness(samples, prompts).tolist()
        return [math.nan, *values[1:]]

    run = trainer(settings(tmp_path, train__iterations=5), reward=broken_for_a)
    run.run()
    lost = [line["reward/lost"] for line in lines(run)]
    assert sum(lost) == 4 * 8 + 16 * 1  # of 20 groups, "a" came 4 times and lost all 8; the others lost one each
    assert all(math.isfinite(line["reward/mean"]) for line in lines(run))
    assert all(t.isfinite().all() for t in weights_of(run).values())


def test_an_iteration_without_any_reward_changes_nothing(tmp_path):
    def gone(samples, prompts):
        raise ConnectionError("gone")

    run = trainer(settings(tmp_path, train__iterations=1, train__ema=None), reward=gone)
    before = weights_of(run)
    run.run()
    assert all(torch.equal(before[name], t) for name, t in weights_of(run).items())
    assert lines(run)[0]["reward/mean"] is None
    assert lines(run)[0]["reward/lost"] == 32


def test_equal_rewards_move_nothing_without_a_pull(tmp_path):
    chosen = settings(
        tmp_path, algorithm={"preset": "mix_grpo"}, train__iterations=1, train__optimizer={"weight_decay": 0.0}
    )
    run = trainer(chosen, reward=lambda samples, prompts: [0.1] * len(prompts))
    before = weights_of(run)
    run.run()
    assert lines(run)[0]["groups/zero_std_fraction"] == 1.0
    assert lines(run)[0]["policy/grad_norm"] == 0.0
    assert all(torch.equal(before[name], t) for name, t in weights_of(run).items())
