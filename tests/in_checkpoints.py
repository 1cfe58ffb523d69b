"""Checkpoints of weights in shards, which `test_snapshot` and `test_shards` make in several processes."""

import os
import resource
import threading
from pathlib import Path

import torch
from in_shards import Chain, cut_in_shards, learning, of_all, rows

from flowgrpo.schema.sections import Ema
from flowgrpo.training.checkpoints import checkpoint, snapshot
from flowgrpo.training.distributed import agreement
from flowgrpo.training.distributed.dtensors import gather_whole, local
from flowgrpo.training.run import random_states
from flowgrpo.training.weights.policy_versions import Versions
from flowgrpo.training.weights.trained_weights import Weights


def started(form):
    """Make weights with an average, their optimizer and earlier versions; whole where `form` is None."""
    modules = learning()
    if form is None:
        weights = Weights(modules, None, reference="fixed", ema=Ema(decay=0.5, every=1))
    else:
        os.environ["LOCAL_WORLD_SIZE"] = "2"  # of a machine, for hsdp
        weights = of_all(modules, form=form, ema=Ema(decay=0.5, every=1))
    return modules, weights, torch.optim.AdamW(weights.parameters, lr=0.1), Versions(weights, 1)


def trained(form, rank=0):
    """Start, and train for two steps."""
    modules, weights, optimizer, versions = started(form)
    for step in range(2):
        versions.keep(step, {"3": [1.0, float(step), step]})
        optimizer.zero_grad()
        for module in modules.values():
            weights.lockstep.backward(module(rows(rank) + step).square().sum())
        weights.lockstep.join()
        optimizer.step()
        weights.after_update()
    return weights, optimizer, versions


def held(weights, optimizer, versions):
    """Gather all that a checkpoint must bring back."""
    moments = {
        f"{number}.{key}": gather_whole(value.detach()).clone()
        for number, own in optimizer.state_dict()["state"].items()
        for key, value in own.items()
    }
    older = {f"{i}.{name}": gather_whole(t).clone() for i, own in versions.tensors().items() for name, t in own.items()}
    return {
        "weights": {name: gather_whole(t).clone() for name, t in weights.tensors().items()},
        "moments": moments,
        "older": older,
        "updates": weights.updates,
        "stats": {i: version.prompt_stats for i, version in versions.kept.items()},
    }


def taken(weights, optimizer, versions, *, step=1, first=True):
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return snapshot.take(
        step, weights=weights, optimizer=optimizer, scaler=scaler, random_states=[random_states.random_state()],
        beta=0.0, prompt_stats={}, versions=versions, first=first,
    )  # fmt: skip


def spoil(weights, optimizer):
    """Change in place all that a snapshot was taken of."""
    with torch.no_grad():
        tensors = [*weights.tensors().values()]
        tensors += [value for own in optimizer.state.values() for value in own.values()]
        for tensor in tensors:
            local(tensor).fill_(7.0)


def save(rank, folder, form="fsdp2"):
    """Return what a checkpoint was taken of; it is written after all of it has changed."""
    weights, optimizer, versions = trained(form, rank)
    before = held(weights, optimizer, versions)
    among = agreement.of_first(int(os.environ.get("WORLD_SIZE", "1")))
    shot = taken(weights, optimizer, versions, first=among.first)
    spoil(weights, optimizer)
    snapshot.write(folder, shot, keep=1, peers=among)
    return before


def loaded(folder, form):
    """Load the checkpoint of step 1, and return what is held."""
    _, weights, optimizer, versions = started(form)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    place = checkpoint.find(folder, 1)
    checkpoint.check(place)
    checkpoint.load(place, weights=weights, optimizer=optimizer, scaler=scaler, versions=versions)
    return held(weights, optimizer, versions)


def load(rank, folder, form="fsdp2"):
    return loaded(folder, form)


def without_room(rank, folder):
    """Write a second checkpoint without room on the last process; return its error and what is left."""
    weights, optimizer, versions = trained("fsdp2", rank)
    among = agreement.of_first(2)
    snapshot.write(folder, taken(weights, optimizer, versions, first=among.first), keep=2, peers=among)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    try:
        snapshot.write(folder, taken(weights, optimizer, versions, step=2, first=among.first), keep=2, peers=among)
    except OSError as error:
        said = str(error)
    among.together(lambda: None)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return said, sorted(path.name for path in folder.iterdir())


def failing(rank):
    """Return what two processes get of a job that one cannot do, and of one that both can."""
    among = agreement.of_first(2)

    def job():
        if rank == 1:
            raise ZeroDivisionError("no")
        return rank

    try:
        among.together(job)
    except (ZeroDivisionError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}", among.together(lambda: rank + 1)


LAYERS, WIDTH = 16, 1024


def large():
    """Make weights of 64 MiB."""
    torch.manual_seed(0)
    blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
    return Chain(blocks)


def save_large(rank, folder, form="fsdp2"):
    """Save `large` and its average."""
    modules = {"net": large()}
    weights = cut_in_shards(modules, lambda: Weights(modules, None, ema=Ema(decay=0.5, every=1)), form=form)
    optimizer = torch.optim.AdamW(weights.parameters)
    among = agreement.of_first(int(os.environ.get("WORLD_SIZE", "1")))
    shot = taken(weights, optimizer, Versions(weights, 0), first=among.first)
    snapshot.write(folder, shot, keep=1, peers=among)


def memory_beside(rank, folder):
    """Return by how many bytes the process grows while it reads the average of `large`, without pages of files."""
    weights = Weights({"net": large()}, None)
    place = checkpoint.find(folder)
    checkpoint.load_averaged(place, weights)  # which imports what it needs
    before, peak, done = anonymous(), [], threading.Event()
    watching = threading.Thread(target=lambda: [peak.append(anonymous()) for _ in iter(done.is_set, True)])
    watching.start()
    with torch.no_grad():
        for p in weights.parameters:
            p.zero_()
    checkpoint.load_averaged(place, weights)
    done.set()
    watching.join()
    right = all(torch.equal(p, other) for p, other in zip(weights.parameters, large().parameters(), strict=True))
    return max(peak) - before, right


def anonymous():
    """Return the bytes of this process in memory that are of no file."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return 1024 * int(line.split()[1])
