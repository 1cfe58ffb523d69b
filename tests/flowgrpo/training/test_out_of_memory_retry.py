"""Work whose memory runs out is made again without graphs, or in calls of half the size; of several processes it is not."""

from functools import cache, partial

import in_batches
import pytest
import torch
from field import lines, weights_of
from in_batches import (
    AUTO,
    SAID,
    at,
    beside_a_generator,
    counting,
    equal,
    few,
    held,
    of_two_short_later,
    short,
    told,
)
from pair import pair

from flowgrpo.training.fitting import batch_probing
from flowgrpo.training.run.out_of_memory_error import OutOfMemory
from rewards import Reward

pytestmark = pytest.mark.usefixtures("counting_clock")


def begun(folder, net=None, **overrides):
    return in_batches.begun(folder, net, **{"train__group_size": 8, **overrides})


def said(run):
    return [line.partition(" step ")[2] for line in (run.folder / "log.txt").read_text().splitlines()]


def test_graphs_rest_once_rollouts_have_smaller_calls_than_updates(tmp_path):
    """As after an evaluation without room, during which there are no graphs: the update gathers its rows anew."""
    net = short()
    options = {"algorithm__objective__kl__beta": 0.0, "train__replay": "auto", "train__iterations": 4, "eval__every": 2}
    run = begun(tmp_path, net, **AUTO, **options)
    real = run.eval_samples

    def eval_samples():
        net.without = 1 if run.done == 2 else 1000
        try:
            return real()
        finally:
            net.without = 1000

    run.eval_samples = eval_samples
    run.run()
    assert [each[2] for each in held(run)] == [16, 8, 4, 2, 1]
    assert run.kept_graphs.steps == 5
    calls = [line["cost/update_evaluations"] for line in lines(run)]
    assert calls[0] == calls[1] < calls[2] == calls[3]
    assert all(line["policy/max_abs_log_ratio"] <= 1e-6 for line in lines(run))


def test_a_rollout_without_memory_is_made_again_in_smaller_calls(tmp_path):
    net = short()
    plain_loss = {"algorithm__objective__kl__beta": 0.0}  # or the update asks the reference without a gradient
    run = begun(tmp_path / "short", net, **AUTO, **plain_loss, train__iterations=4)
    at(run, 2, lambda: setattr(net, "without", 6))
    run.run()
    assert held(run) == [(0, 16, 16, "found"), (3, 16, 8, "out of memory"), (3, 16, 4, "out of memory")]
    end = "from here on, and the interrupted work is repeated"
    assert said(run) == [
        f"3: out of memory in the rollout phase; train.rollout_batch is 8 {end}",
        f"3: out of memory in the rollout phase; train.rollout_batch is 4 {end}",
    ]
    plain = begun(tmp_path / "plain", **plain_loss, train__micro_batch=16, train__iterations=4)
    plain.run()
    costs = ("cost/model_evaluations", "cost/rollout_evaluations", "cost/decoded", "policy/updates")
    assert [[line[key] for key in costs] for line in lines(run)] == [
        [line[key] for key in costs] for line in lines(plain)
    ]
    for name, tensor in weights_of(plain).items():
        torch.testing.assert_close(weights_of(run)[name], tensor, rtol=1e-3, atol=1e-5)


def test_with_one_size_for_both_a_rollout_halves_that(tmp_path):
    net = short()
    run = begun(tmp_path, net, train__micro_batch="auto", train__iterations=2)
    at(run, 1, lambda: setattr(net, "without", 8))
    run.run()
    assert held(run) == [(0, 16, None, "found"), (2, 8, None, "out of memory")]
    assert [line["policy/max_abs_log_ratio"] for line in lines(run)] == [0, 0]


def in_the_second_part(run, change):
    """Let something change before the second optimizer step of the second iteration."""
    real = run.take_step

    def update_part(credited, part):
        if (run.done, part) == (1, 1):
            change()
        return real(credited, part)

    run.take_step = update_part


def options_of(algorithm):
    size = 12 if algorithm == "tempflow" else 8
    return {"algorithm__preset": algorithm, "train__iterations": 3, "train__group_size": size, **few(algorithm)}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run of an algorithm that has enough memory, done; each is made once."""

    @cache
    def of(algorithm):
        run = begun(tmp_path_factory.mktemp("plain"), train__micro_batch=16, **options_of(algorithm))
        run.run()
        return run

    return of


@pytest.mark.parametrize("algorithm", ["flow_grpo", "tempflow", pytest.param("awm", marks=pytest.mark.zoo), "dgpo"])
def test_an_optimizer_step_without_memory_leaves_no_trace(tmp_path, plain, algorithm):
    net, most = short(), 3 if algorithm == "tempflow" else 5  # of whose states six edges each leave
    run = begun(tmp_path, net, **AUTO, **options_of(algorithm))
    in_the_second_part(run, lambda: setattr(net, "with_gradient", most))
    run.run()
    assert held(run)[1:] == [(2, rows, 16, "out of memory") for rows in (8, 4, 2) if 2 * rows > most]
    costs = ("cost/update_evaluations", "cost/backward_evaluations", "cost/trained_edges", "policy/updates")
    assert [[line[key] for key in costs] for line in lines(run)] == [
        [line[key] for key in costs] for line in lines(plain(algorithm))
    ]
    for name, tensor in weights_of(plain(algorithm)).items():
        torch.testing.assert_close(weights_of(run)[name], tensor, rtol=1e-3, atol=1e-4)


def test_backward_passes_of_a_step_that_is_made_again_count_once(tmp_path, plain):
    run, sent = begun(tmp_path, short(), **AUTO, **options_of("flow_grpo")), []
    real = run.weights.lockstep.backward

    def backward(loss):
        real(loss)
        if run.done == 1:
            sent.append(loss)
        if len(sent) == 2:
            sent.append(loss)
            raise torch.OutOfMemoryError(SAID)

    run.weights.lockstep.backward = backward
    run.run()
    assert [each[3] for each in held(run)] == ["found", "out of memory"]
    counts = [[line["cost/backward_evaluations"] for line in lines(each)] for each in (run, plain("flow_grpo"))]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("algorithm", ["flow_grpo", pytest.param("tempflow", marks=pytest.mark.zoo)])
def test_with_one_size_for_both_an_update_has_its_rows_in_smaller_calls(tmp_path, plain, algorithm):
    """Also those of the rollout that was made in larger ones."""
    net, most = short(), 3 if algorithm == "tempflow" else 5
    run = begun(tmp_path, net, train__micro_batch="auto", **options_of(algorithm))
    in_the_second_part(run, lambda: setattr(net, "with_gradient", most))
    run.run()
    assert held(run)[1:] == [(2, rows, None, "out of memory") for rows in (8, 4, 2) if 2 * rows > most]
    for name, tensor in weights_of(plain(algorithm)).items():
        torch.testing.assert_close(weights_of(run)[name], tensor, rtol=1e-3, atol=1e-4)


def scarce(folder, dying=None):
    """A run whose second steps have too little memory from the second iteration on; it dies before the one of `dying`."""
    net = short()
    run = begun(folder, net, **AUTO, run__checkpoint__every=2)
    real = run.take_step

    def update_part(credited, part):
        net.with_gradient = 5 if run.done > 1 or (run.done, part) == (1, 1) else 1000
        if run.done == dying and part == 1 and net.with_gradient == 5 and run.config.train.micro_batch == 4:
            raise KeyboardInterrupt
        return real(credited, part)

    run.take_step = update_part
    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Such a run that does not die, done."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_probing, "clock", counting())
        run = scarce(tmp_path_factory.mktemp("whole"))
        run.run()
    assert held(run)[-1] == (2, 4, 16, "out of memory")
    return run


@pytest.mark.parametrize("killed", [2, *(pytest.param(step, marks=pytest.mark.zoo) for step in (1, 4))])
def test_a_resume_is_the_run_that_ran_out_of_memory_and_was_not_killed(tmp_path, whole, killed):
    """Bit for bit, whether it is killed before, in or after the iteration whose second step had too little."""
    with pytest.raises(KeyboardInterrupt):
        scarce(tmp_path, dying={1: 1, 2: 3, 4: 5}[killed]).run()
    rest = scarce(tmp_path)
    rest.resume()
    rest.run()
    assert held(rest) == held(whole)
    equal(told(rest), told(whole))


def test_an_evaluation_and_a_decoding_are_made_again_too(tmp_path):
    net, most = short(), [1000]
    run = begun(tmp_path, net, **AUTO, train__iterations=2, eval__every=2)

    def decode(state):
        if len(state) > most[0]:
            raise torch.OutOfMemoryError(SAID)
        return state

    run.policy._decode = decode
    at(run, 1, lambda: most.__setitem__(0, 4))
    real = run.eval_samples

    def eval_samples():
        net.without = 1 if run.done == 2 else 1000
        return real()

    run.eval_samples = eval_samples
    run.run()
    assert held(run)[1:] == [
        (2, 16, 8, "out of memory"),
        (2, 16, 4, "out of memory"),
        (2, 16, 2, "out of memory"),
        (2, 16, 1, "out of memory"),
    ]
    assert len(lines(run, "eval")) == 2


def test_the_sentence_of_the_end_knows_the_sizes_of_the_process_that_says_it(tmp_path):
    run = begun(tmp_path, short(), **AUTO, train__iterations=2)
    at(run, 1, lambda: run.batch_sizes.use({"rollout_batch": 1}))  # as where it has halved them, and others do not know
    at(run, 1, lambda: setattr(run.policy.modules["field"], "without", 0))
    with pytest.raises(OutOfMemory) as ended:
        run.run()
    assert ended.value.sizes == {"micro_batch": 16, "rollout_batch": 1}


def test_memory_that_runs_out_within_an_optimizer_step_ends_the_run(tmp_path):
    run = begun(tmp_path, **AUTO, train__iterations=2)

    def step(*arguments, **options):
        raise torch.OutOfMemoryError(SAID)

    run.optimizer.step = step
    with pytest.raises(OutOfMemory, match="out of memory in the update phase"):
        run.run()
    assert held(run) == [(0, 16, 16, "found")]


def test_what_a_reward_takes_is_not_helped_by_smaller_calls(tmp_path):
    run = begun(tmp_path, **AUTO, train__iterations=2)

    def hungry(samples, prompts):
        raise torch.OutOfMemoryError(SAID)

    at(run, 1, lambda: run.rewards.__setitem__(0, Reward("closeness", hungry)))
    with pytest.raises(OutOfMemory, match="out of memory in the rewards phase"):
        run.run()
    assert held(run) == [(0, 16, 16, "found")]


def test_one_row_that_runs_out_of_memory_ends_the_run(tmp_path):
    net = short()
    run = begun(tmp_path, net, **AUTO, train__iterations=2)
    at(run, 1, lambda: setattr(net, "without", 0))
    with pytest.raises(OutOfMemory, match="out of memory in the rollout phase"):
        run.run()
    assert held(run)[-1] == (2, 16, 1, "out of memory")


def test_a_size_that_was_written_is_never_changed(tmp_path):
    net = short()
    run = begun(tmp_path, net, train__micro_batch="auto", train__rollout_batch=8, train__iterations=2)
    at(run, 1, lambda: setattr(net, "without", 4))
    with pytest.raises(OutOfMemory, match="out of memory in the rollout phase"):
        run.run()


def test_one_of_two_processes_without_memory_ends_the_run_in_one_sentence(tmp_path):
    (tmp_path / "pair").mkdir()
    first, second = pair(partial(of_two_short_later, folder=str(tmp_path)), tmp_path / "pair", seconds=10)
    assert second.startswith("OutOfMemory: out of memory in the rollout phase")
    assert isinstance(first, str)  # it ends when the other does


def test_a_generator_without_memory_ends_the_run_in_one_sentence(tmp_path):
    """It is not asked when those that train go on."""
    (tmp_path / "pair").mkdir()
    first, second = pair(partial(beside_a_generator, folder=str(tmp_path)), tmp_path / "pair", seconds=10)
    assert second.startswith("OutOfMemory: out of memory in the rollout phase")
    assert isinstance(first, str)  # whatever it says, it ends when the other does, or when it has waited long enough
