"""Runs of the plane's field that decide whether to compile, with stand-ins for compiled blocks and their times."""

import torch
from field import Network, settings, trainer
from torch._dynamo import utils as dynamo
from torch._dynamo.exc import BackendCompilerFailed

from flowgrpo.flow.planning import compile_decision
from flowgrpo.training.fitting import batch_probing

SECONDS = {False: (1.0, 3.0)}  # of a call of a rollout and of an update, by whether blocks are compiled
UNDER_TEST = []  # the blocks of the last run


class Blocks:
    """Blocks that change what a network computes once they are on, or that cannot be compiled."""

    def __init__(self, network):
        self.on, self.switched, self.fault, forward = False, [], None, network.forward

        def compute(*arguments):
            if self.on:
                self.fail()
            return forward(*arguments) * (1.01 if self.on else 1.0)

        network.forward = compute
        UNDER_TEST[:] = [self]

    def switch(self, on):
        self.on = on
        self.switched.append(on)

    def fail(self):
        if self.fault == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if self.fault == "break":
            dynamo.counters["graph_break"]["Unsupported: print\n  Explanation: it prints"] += 1
        if self.fault == "error":
            raise BackendCompilerFailed(torch.compile, ValueError("no such operator"), None)


def timed(put, seconds, took):
    """Let calls take `seconds`, and compiling `took` seconds."""
    now = [0.0]

    def measure(call, rows, clear):
        call(rows)
        update = any(p.grad is not None for p in UNDER_TEST[0].parameters)
        clear()
        return seconds[UNDER_TEST[0].on][update]

    def clock():
        now[0] += (sum(seconds[True]) + took) if UNDER_TEST[0].on else 0.0
        return now[0]

    put(batch_probing, "measure_seconds", measure)
    put(compile_decision, "clock", clock)


def begun(folder, iterations=6, *, stops=None, **overrides):
    """Build a run of `iterations` that decides itself; one that `stops` is run until then."""
    chosen = {"model__compile": "auto", "train__replay": "always", "train__iterations": stops or iterations}
    network = Network()
    run = trainer(settings(folder, **{**chosen, **overrides}), network)
    run.policy.compiled = Blocks(network)
    run.policy.compiled.parameters = run.weights.parameters
    if stops:
        run.run()
    return run
