"""The bytes that a process sends by the rule, beside the messages that torch sends for a tiny model in shards."""

import collectives
import forked
import pytest
import torch
from in_turn import each_in_turn

from flowgrpo import config
from flowgrpo.training.distributed.gpu_layout import Layout
from flowgrpo.training.planning.collective_traffic import LINK, NETWORK, Message, build_messages, reward_bytes
from flowgrpo.training.planning.gpu_types import GPUS
from flowgrpo.training.weights import sharding


def ruled(shapes, processes, of_node, *, full, width=4, trained=0):
    """The messages of the rule."""
    form = "hsdp" if of_node < processes else "fsdp2"
    layout = Layout(processes=processes, of_node=of_node, sharding=form)
    model = {"path": "shapes", "lora": None if full else {}}
    return build_messages(config.validate({"model": model}), [shapes], width=width, trained=trained, layout=layout)


TRAINED = ("lora", "full", "full_in_half")
MANY = [(full, *size) for full in (False, True) for size in [(8, 8), (512, 512), (16, 8), (512, 8)]]


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    functions = {trains: getattr(collectives, trains) for trains in TRAINED}
    return each_in_turn(functions, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def of_many(tmp_path_factory):
    file = tmp_path_factory.mktemp("many") / "found"
    process = forked.process(collectives.of_many, MANY, file)
    process.join()
    return dict(zip(MANY, torch.load(file, weights_only=False), strict=True))


@pytest.mark.parametrize("trains", TRAINED)
def test_two_processes_send_what_the_rule_says(trains, of_two):
    found = of_two[trains]
    assert not isinstance(found[0], str), found[0]
    (sampled, learned, stepped), shapes, trained = found[0]
    half = trains == "full_in_half" and sharding.travels_in_half()
    full = trains != "lora"
    rule = ruled(shapes, 2, 2, full=full, width=2 if half else 4, trained=trained)
    assert sampled == {"gather": rule.gather.bytes}
    assert learned == {"gather": 2 * rule.gather.bytes} | ({"scatter": rule.scatter.bytes} if full else {})
    # Beside the gradients go four bytes of each tensor, which tell whether it has one.
    assert stepped.get("sum", 0) == pytest.approx(rule.step.bytes, rel=0.05)
    assert (rule.step.bytes > 0) == (not full)
    assert rule.spread.bytes == 0


@pytest.mark.parametrize(("full", "processes", "of_node"), MANY)
def test_many_processes_send_what_the_rule_says(full, processes, of_node, of_many):
    (sampled, learned), shapes = of_many[full, processes, of_node]
    rule = ruled(shapes, processes, of_node, full=full)
    assert sampled == {"gather": rule.gather.bytes}
    sums = {"scatter": rule.scatter.bytes, "sum": rule.spread.bytes} if full else {}
    expected = {"gather": 2 * rule.gather.bytes} | {name: size for name, size in sums.items() if size}
    assert learned == pytest.approx(expected, abs=8)  # each message is a whole number


def test_one_process_alone_sends_nothing():
    rule = ruled({"blocks.0.weight": (8, 8)}, 1, 1, full=True, trained=64)
    assert [each.bytes for each in (rule.gather, rule.scatter, rule.spread, rule.step)] == [0, 0, 0, 0]
    assert reward_bytes(100, 1) == 0


def test_what_lies_whole_on_each_is_summed_once_a_step():
    settings = config.validate({"model": {"path": "shapes", "lora": {}}})
    rule = build_messages(settings, [{"weight": (8, 8)}], width=2, trained=1000, layout=Layout(processes=16))
    assert rule.step == Message(bytes=round(2 * 4000 * 15 / 16), crosses=True)
    assert rule.gather.bytes == 0


def test_a_base_in_eight_bits_sends_its_codes_and_scales():
    whole, codes = (
        build_messages(
            config.validate({"model": {"path": "shapes", "lora": {}, "quantise": form}}),
            [{"blocks.0.up.weight": (64, 128), "head.weight": (16, 16)}],
            width=2,
            trained=0,
            layout=Layout(processes=8, sharding="fsdp2"),
        ).gather.bytes
        for form in (None, "int8")
    )
    assert whole == 7 * 2 * (8 * 128 + 2 * 16)
    assert codes == 7 * (8 * 128 + 2 * 8 + 2 * 2 * 16)


def test_messages_between_machines_go_at_the_rate_of_the_network():
    gpu = GPUS["h100"]
    assert Message(bytes=10**9).seconds(gpu) == pytest.approx(1 / (450 * LINK))
    assert Message(bytes=10**9, crosses=True).seconds(gpu) == pytest.approx(1 / (50 * NETWORK))
