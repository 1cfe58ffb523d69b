import json
import signal

import pytest

from flowgrpo.commands import launch

TALK = """
import json, os, psutil, torch
from torch import distributed
distributed.init_process_group("gloo")
total = torch.tensor([1.0 + distributed.get_rank()])
distributed.all_reduce(total)
listening = [
    (c.laddr.ip, c.type.name)
    for process in (psutil.Process(), psutil.Process().parent())
    for c in process.net_connections() if not c.raddr
]
distributed.barrier()
json.dump([total.item(), listening], open(f"{distributed.get_rank()}.json", "w"))
"""


@pytest.fixture
def signals():
    """Puts back the handlers of the signals that a launcher passes on."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_processes_meet_on_loopback_alone(tmp_path, monkeypatch, signals):
    (tmp_path / "flowgrpo").mkdir()  # the command that is launched, in place of ours
    (tmp_path / "flowgrpo" / "__main__.py").write_text(TALK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert launch.relaunch(2) == 0
    said = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [total for total, _ in said] == [3.0, 3.0]  # 1 + 2
    for _, listening in said:
        assert {ip for ip, _ in listening} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
        assert len(listening) > 0
