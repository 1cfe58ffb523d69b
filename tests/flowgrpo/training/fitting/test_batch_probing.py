"""Which sizes a probe tries, on a clock and a memory that are made up, and which it takes."""

import pytest
import torch

from flowgrpo.errors import InputError
from flowgrpo.training.fitting import batch_probing
from flowgrpo.training.fitting.batch_probing import Memory, Prober, Timed, Tried, best

GIB = 2**30
HOST = torch.device("cpu")


class Machine:
    """A host of 10 GiB, of which a process has taken 1, and a clock that runs only while something is called.

    Args:
        seconds: of a call, by rows.
        bytes_per_row: that a call takes.
        lowers: whether the most that was ever taken can be forgotten.
    """

    def __init__(self, monkeypatch, seconds, bytes_per_row=0, available=9 * GIB, lowers=True):
        self.now, self.taken, self.peak, self.called, self.cleared = 0.0, GIB, GIB, [], 0
        self.seconds, self.bytes_per_row, self.available = seconds, bytes_per_row, available
        monkeypatch.setattr(batch_probing, "clock", lambda: self.now)
        monkeypatch.setattr(batch_probing, "peak_bytes", lambda device: self.peak)
        monkeypatch.setattr(
            batch_probing, "lower_peak", lambda device: setattr(self, "peak", self.taken) if lowers else None
        )
        monkeypatch.setattr(batch_probing, "psutil", self)

    def Process(self):
        return self

    def memory_info(self):
        return type("Info", (), {"rss": self.taken})

    def virtual_memory(self):
        return type("Free", (), {"available": self.available})

    def call(self, rows):
        self.called.append(rows)
        self.now += self.seconds(rows)
        self.peak = max(self.peak, self.taken + rows * self.bytes_per_row)

    def clear(self):
        self.cleared += 1

    def prober(self, everyone=lambda own: [own], alone=True, reserved=0):
        return Prober(memory=Memory(HOST, reserved), everyone=everyone, clear=self.clear, alone=alone)

    def sizes(self, most, calls=1.0, **options):
        return self.prober(**options).sizes([Timed(calls, self.call)], most)


def rows_of(tried):
    return [each.rows for each in tried]


def test_powers_of_two_are_tried_up_to_the_rows_there_are(monkeypatch):
    machine = Machine(monkeypatch, lambda rows: 1.0)
    found = machine.sizes(24)
    assert rows_of(found) == [1, 2, 4, 8, 16]
    assert machine.called == [1, 1, 2, 2, 4, 4, 8, 8, 16, 16]
    assert best(found).rows == 16
    assert machine.cleared >= len(machine.called)


def test_the_smallest_size_is_taken_that_is_nearly_as_fast_as_the_fastest(monkeypatch):
    """A call of m rows takes 1 + m seconds: 8 rows reach 8/9 a second, 16 16/17, 32 32/33 and 64 64/65."""
    found = Machine(monkeypatch, lambda rows: 1.0 + rows).sizes(64)
    assert [each.rate for each in found] == pytest.approx([rows / (1 + rows) for rows in (1, 2, 4, 8, 16, 32, 64)])
    assert best(found).rows == 16  # of 64/65 32 have 0.985, 16 0.956 and 8 0.903


def test_sizes_that_are_no_faster_are_not_tried_further(monkeypatch):
    machine = Machine(monkeypatch, lambda rows: float(rows) if rows > 2 else 2.0)
    found = machine.sizes(1024)
    assert rows_of(found) == [1, 2, 4, 8]
    assert best(found).rows == 2


def test_what_a_sample_takes_part_in_is_weighed(monkeypatch):
    """Ten steps of which a larger batch makes nothing faster outweigh a decoding that it makes twice as fast."""
    machine = Machine(monkeypatch, None)

    def step(rows):
        machine.now += rows

    def decode(rows):
        machine.now += 1.0

    found = machine.prober().sizes([Timed(10, step), Timed(1, decode)], 4)
    assert [each.seconds for each in found] == [11.0, 21.0, 41.0]
    alone = machine.prober().sizes([Timed(1, decode)], 4)
    assert (best(found).rows, best(alone).rows) == (2, 4)  # 1/11, 2/21 and 4/41 a second


def test_the_first_call_warms_up(monkeypatch):
    calls = []
    machine = Machine(monkeypatch, lambda rows: 5.0 if len(calls) == 1 else 1.0)

    def call(rows):
        calls.append(rows)
        machine.call(rows)

    assert machine.prober().fits([Timed(1, call)], 1).seconds == 1.0


def test_a_size_that_would_not_leave_the_margin_is_not_called(monkeypatch):
    """Of 9 GiB that are free 8.1 may be taken: 8 rows take 8 GiB, and 16 are not tried."""
    machine = Machine(monkeypatch, lambda rows: 1.0, bytes_per_row=GIB)
    assert rows_of(machine.sizes(64)) == [1, 2, 4, 8]
    assert max(machine.called) == 8
    assert machine.peak == 9 * GIB


def test_what_is_still_to_come_is_left_free(monkeypatch):
    machine = Machine(monkeypatch, lambda rows: 1.0, bytes_per_row=GIB)
    assert rows_of(machine.sizes(64, reserved=5 * GIB)) == [1, 2]  # 3.1 GiB are left


def test_what_calls_take_whatever_their_rows_is_told_by_two_sizes(monkeypatch):
    """3 GiB and a quarter for each row: 16 rows take 7 of 8.1, and 32 would take 11; by one size 4 would be 13."""
    machine = Machine(monkeypatch, lambda rows: 1.0)

    def call(rows):
        machine.bytes_per_row = 3 * GIB / rows + GIB / 4
        machine.call(rows)

    assert rows_of(machine.prober().sizes([Timed(1, call)], 64)) == [1, 2, 4, 8, 16]


@pytest.mark.parametrize(("kind", "held"), [("cuda", True), ("cpu", False)])
def test_a_gpu_tries_two_rows_after_one(monkeypatch, kind, held):
    """Which took 6 GiB of 8.1; a host does not, where the system would end the run."""
    Machine(monkeypatch, None)
    memory = Memory(HOST)
    memory._device = torch.device(kind)
    memory._seen = [(1, 6 * GIB)]
    assert (memory.holds(2), memory.holds(4)) == (held, False)


def test_processes_of_one_host_share_its_memory(monkeypatch):
    Machine(monkeypatch, None)
    memory = Memory(HOST, processes=3)
    memory._seen = [(1, GIB)]
    assert (memory.holds(2), memory.holds(3)) == (True, False)  # of 2.7 GiB


def test_a_size_that_turns_out_to_take_more_is_left_out(monkeypatch):
    machine = Machine(monkeypatch, lambda rows: 1.0)

    def call(rows):
        machine.bytes_per_row = {1: GIB, 2: GIB, 4: 2.5 * GIB}[rows]
        machine.call(rows)

    assert rows_of(machine.prober().sizes([Timed(1, call)], 8)) == [1, 2]  # 10 GiB are more than 8.1


def test_calls_below_what_the_process_had_before_fit(monkeypatch):
    """A host may tell no more than the most ever: 3 GiB were taken before, of which 2 are given back."""
    machine = Machine(monkeypatch, lambda rows: 1.0, bytes_per_row=GIB // 2, lowers=False)
    machine.peak = 3 * GIB
    assert rows_of(machine.sizes(4)) == [1, 2, 4]
    assert machine.peak == 3 * GIB


def short_above(machine, most, error=torch.OutOfMemoryError):
    def call(rows):
        machine.call(rows)
        if rows > most:
            raise error("CUDA out of memory. Tried to allocate 2.00 GiB.")

    return call


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError, RuntimeError])
def test_a_call_without_memory_ends_the_search(monkeypatch, error):
    machine = Machine(monkeypatch, lambda rows: 1.0)
    assert rows_of(machine.prober().sizes([Timed(1, short_above(machine, 5, error))], 64)) == [1, 2, 4]


def test_another_error_is_raised(monkeypatch):
    machine = Machine(monkeypatch, lambda rows: 1.0)

    def call(rows):
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        machine.prober().sizes([Timed(1, call)], 64)
    assert machine.cleared == 1


def test_where_others_wait_in_a_call_memory_that_runs_out_is_raised(monkeypatch):
    machine = Machine(monkeypatch, lambda rows: 1.0)
    with pytest.raises(torch.OutOfMemoryError):
        machine.prober(alone=False).sizes([Timed(1, short_above(machine, 5))], 64)


def test_the_slowest_and_the_fullest_process_decide(monkeypatch):
    machine = Machine(monkeypatch, lambda rows: 1.0)
    others = {1: (3.0, GIB), 2: (2.0, 7 * GIB), 4: None}

    def everyone(own):
        return [own, own if isinstance(own, bool) else others[machine.called[-1]]]

    found = machine.sizes(64, everyone=everyone)
    assert found == [Tried(rows=1, seconds=3.0, peak=GIB), Tried(rows=2, seconds=2.0, peak=7 * GIB)]
    assert machine.called == [1, 1, 2, 2, 4, 4]


def test_none_is_tried_that_another_process_would_not_hold(monkeypatch):
    machine = Machine(monkeypatch, lambda rows: 1.0)

    def everyone(own):
        return [own, len(machine.called) < 4] if isinstance(own, bool) else [own]

    assert rows_of(machine.sizes(64, everyone=everyone)) == [1, 2]
    assert machine.called == [1, 1, 2, 2]


def test_one_row_that_does_not_fit_is_refused_with_what_to_do(monkeypatch):
    machine = Machine(monkeypatch, lambda rows: 1.0, bytes_per_row=20 * GIB)
    with pytest.raises(InputError, match=r"^train\.rollout_batch: not even one row .* or set train\.rollout_batch=1$"):
        best(machine.sizes(64), "train.rollout_batch")


def test_a_size_is_halved_until_it_fits(monkeypatch):
    machine = Machine(monkeypatch, lambda rows: 1.0)
    assert machine.prober().largest([Timed(1, short_above(machine, 5))], 16) == 4
    assert machine.called == [2, 2, 4, 4, 8]  # from the smallest on
    assert machine.prober().largest([Timed(1, short_above(machine, 0))], 16) == 1


def test_of_a_host_the_first_half_that_fits_is_taken(monkeypatch):
    """0.8 GiB a row: 16 rows take 12.8 GiB of 8.1, and 8 rows 6.4."""
    machine = Machine(monkeypatch, lambda rows: 1.0, bytes_per_row=0.8 * GIB)
    assert machine.prober().largest([Timed(1, machine.call)], 16) == 8


def test_this_host_forgets_the_most_that_was_taken():
    before = batch_probing.used_bytes(HOST)
    torch.ones(2**26).sum()  # 256 MiB
    assert batch_probing.peak_bytes(HOST) >= before + 2**27
    batch_probing.free(HOST)
    batch_probing.lower_peak(HOST)
    assert batch_probing.peak_bytes(HOST) < before + 2**27
