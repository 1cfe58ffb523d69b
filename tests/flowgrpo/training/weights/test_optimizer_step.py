"""An optimizer step on one process and on several, in half precision too, and what is counted of its edges, by hand."""

import math
import threading

import pytest
import torch
from runs import background, metrics, weights

from flowgrpo.training.weights import optimizer_step
from flowgrpo.training.weights.optimizer_step import UpdateStats
from flowgrpo.training.weights.trained_weights import Weights


def test_in_half_precision_two_processes_train_where_one_has_only_solved_prompts(workplace):
    """Of four prompts, one in each group, three are solved: in each update at least one process has nothing to train on."""
    (workplace / "mine.py").write_text(
        "def redness(images, prompts):\n"
        "    values = images[:, 0].mean((1, 2)).float().cpu().tolist()\n"
        "    return [v if p == 'a red circle' else 1.0 for v, p in zip(values, prompts)]\n"
    )
    choices = ["train.groups=4", "train.iterations=1", "eval.prompts=1", "eval.save=0", "run.processes=2"]
    choices += ["model.dtype=float16", "algorithm.baseline.drop_zero=true", "algorithm.objective.kl.beta=0"]
    process = background("train", "tiny.yaml", *choices)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    (line,) = metrics(workplace / "runs" / "t")
    assert line["policy/skipped_updates"] == 0
    assert 0 < line["policy/grad_norm"] < math.inf
    assert all(tensor.isfinite().all() for tensor in weights(workplace / "runs" / "t", 1).values())


def stepped(gradient, most, scaler=None, reduce=None):
    """Weights of 1 after a step of SGD of rate 0.1, its statistics, and the number of steps; without a gradient for None."""
    trained, stats = Weights({"net": torch.nn.Linear(len(gradient or "1"), 1, bias=False)}, None), UpdateStats()
    (p,) = trained.parameters
    p.data.fill_(1.0)
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    if gradient is not None:
        scaler.scale((torch.tensor([gradient]) * p).sum()).backward()
    optimizer = torch.optim.SGD([p], lr=0.1)
    optimizer_step.optimizer_step(trained, stats, optimizer=optimizer, scaler=scaler, max_grad_norm=most, reduce=reduce)
    return p.detach()[0].tolist(), stats, trained.updates


@pytest.mark.parametrize(("most", "part"), [(10.0, 1.0), (2.5, 0.5)])
def test_a_gradient_is_cut_to_its_largest_norm_and_a_process_alone_sends_nothing(most, part, monkeypatch):
    monkeypatch.setattr(optimizer_step, "_sum_gradients", None)
    moved, stats, updates = stepped([3.0, 4.0], most)
    assert moved == pytest.approx([1 - 0.3 * part, 1 - 0.4 * part], rel=1e-5)
    assert (stats.grad_norm, stats.taken, stats.skipped, updates) == (pytest.approx(5.0), 1, 0, 1)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_moves_nothing(broken):
    moved, stats, updates = stepped([3.0, broken], 1.0)
    assert moved == [1.0, 1.0]
    assert (stats.taken, stats.skipped, updates) == (0, 1, 0)


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
        scaler = torch.amp.GradScaler("cpu")
        moved, stats, _ = stepped([2.0] if number == 0 else None, 9.0, scaler, meeting.reduce(number))
        found[number] = moved, stats.grad_norm, stats.skipped, scaler.state_dict()

    threads = [threading.Thread(target=process, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1]
    assert found[1][:3] == ([pytest.approx(0.8)], 2.0, 0)


def test_gradients_are_summed_in_messages_of_a_bounded_size(monkeypatch):
    """Five of 16 bytes and one of 40, which lies in two messages of 36; sums are the same."""
    monkeypatch.setattr(optimizer_step, "MESSAGE", 36)
    sent, parameters = [], [torch.nn.Parameter(torch.zeros(n)) for n in (4, 4, 4, 10, 4, 4)]
    for value, p in enumerate(parameters[:-1], start=1):  # the last was not reached here, but elsewhere
        p.grad = torch.full_like(p, value)

    def reduce(tensor):
        sent.append(len(tensor))
        return 2 * tensor if len(sent) > 1 else torch.ones_like(tensor)

    optimizer_step._sum_gradients(parameters, reduce)
    assert sent == [6, 8, 4, 9, 9]
    assert [p.grad.tolist() for p in parameters] == [
        [2.0 * v] * len(p) for v, p in zip([1, 2, 3, 4, 5, 0], parameters, strict=True)
    ]


def test_a_tensor_without_numbers_may_come_first():
    empty, one = torch.zeros(0), torch.zeros(3)
    assert optimizer_step.messages([empty, one]) == [[empty, one]]


def test_edges_are_counted_over_calls():
    stats = UpdateStats()
    first, second = torch.tensor([0.5, -2.0, 0.0]), torch.tensor([0.25])
    stops, above = torch.tensor([True, True, False]), torch.tensor([True, False, True])
    stats.measure(first, stops, above, divergence=torch.tensor([1.0, 2.0, 0.5]), step=3)
    stats.measure(second, torch.tensor([False]), torch.tensor([True]), divergence=torch.tensor([0.5]), step=3)
    assert (stats.edges, stats.clipped, stats.clipped_high) == (4, 2, 1)
    assert (stats.max_abs_log_ratio, stats.sum_abs_log_ratio, stats.kl) == (2.0, 2.75, 4.0)
    assert stats.by_step == {3: (4, 2.75, 4.0)}


def test_a_ratio_that_is_not_a_number_stays_the_largest():
    stats, none = UpdateStats(), torch.tensor([False])
    for ratio in (0.5, math.nan, 0.25):
        stats.measure(torch.tensor([ratio]), none, none)
    assert math.isnan(stats.max_abs_log_ratio)
    stats.measure(torch.tensor([9.0]), none, none, exact=False)
    assert math.isnan(stats.max_abs_log_ratio)
