"""An optimizer step in half precision, of which one process has no loss."""

import json
import math
import threading

import pytest
import torch
from runs import background
from safetensors.torch import load_file

from flowgrpo.training.weights import optimizer_step
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
    run = workplace / "runs" / "t"
    line = next(
        line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if line["phase"] == "train"
    )
    assert line["policy/skipped_updates"] == 0
    assert 0 < line["policy/grad_norm"] < math.inf
    kept = load_file(run / "checkpoints" / "step-000001" / "weights.safetensors")
    assert all(tensor.isfinite().all() for tensor in kept.values())


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
        stats = optimizer_step.UpdateStats()
        optimizer_step.optimizer_step(
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


def test_a_process_alone_sends_nothing(monkeypatch):
    monkeypatch.setattr(optimizer_step, "_sum_gradients", None)
    weights = Weights({"net": torch.nn.Linear(1, 1, bias=False)}, None)
    weights.parameters[0].data.fill_(1.0)
    weights.parameters[0].grad = torch.full((1, 1), 2.0)
    optimizer = torch.optim.SGD(weights.parameters, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    stats = optimizer_step.UpdateStats()
    optimizer_step.optimizer_step(weights, stats, optimizer=optimizer, scaler=scaler, max_grad_norm=9.0, reduce=None)
    assert (weights.parameters[0].item(), stats.grad_norm) == (pytest.approx(0.8), 2.0)
