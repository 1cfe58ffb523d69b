"""Restore the process state that a plug-in changes: directory, torch's defaults and flags, signal handlers, warnings.

Rewards, judges and trees of the user run in the process that trains or serves. They may change this state while they are
imported, constructed, moved or called. The changes are undone afterwards, with one warning. Warning filters are restored
silently, since libraries add some on import. Random generators are restored after an import but not after a call: a run
draws from none of them, and a reward must not draw the same numbers twice. Environment variables and `sys.path` are not
restored.

Rewards run in threads beside the model. State that threads share is read before the first of several concurrent plug-ins
and restored after the last; until then all threads see the change. Attention kernels are not restored after calls: a model
in another thread may have selected one meanwhile, and restoring would undo that. Kernels in `LEFT_OUT` stay disabled.
"""

from __future__ import annotations

import ctypes
import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

LOGGER = logging.getLogger("flowgrpo.rewards")
FILTERS = "the filters of warnings"
OURS = ("rewards", "flowgrpo", "samplers")
ATTENTION = ("flash", "math", "mem_efficient", "cudnn")
LEFT_OUT: set[str] = set()  # members of `ATTENTION` that `leave_out_cudnn_attention` disabled
CLONE_FS = 0x200  # Linux's unshare: unshare the current directory


@dataclass(frozen=True)
class Setting:
    """A piece of state."""

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], object]


@dataclass(frozen=True)
class _Settings:
    """The restored settings: of the process, of each thread, settable in the main thread only, and attention kernels."""

    process: tuple[Setting, ...]  # shared by all threads
    thread: tuple[Setting, ...]  # of each thread (the directory only after `own_directory`)
    main_thread: tuple[Setting, ...]  # of the process, but only the main thread can set it
    attention: tuple[Setting, ...]  # kernels that torch may choose


@cache
def _settings() -> _Settings:
    import numpy as np  # noqa: F401 - else torch imports it during a plug-in's import
    import torch

    cuda, cudnn, signals = torch.backends.cuda, torch.backends.cudnn, sorted(signal.valid_signals())

    def get_deterministic() -> tuple[bool, bool]:
        return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()

    def put_deterministic(modes: tuple[bool, bool]) -> None:
        torch.use_deterministic_algorithms(modes[0], warn_only=modes[1])

    def put_device(device: torch.device) -> None:
        torch.set_default_device(None if device == torch.device("cpu") else device)

    def put_handlers(handlers: list[Any]) -> None:
        for number, handler in zip(signals, handlers, strict=True):
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)

    def put_filters(filters: list[Any]) -> None:
        warnings.filters[:] = filters  # type: ignore[index]  # the stubs call this list a Sequence
        with warnings.catch_warnings():  # its exit invalidates Python's cache of filters
            pass

    return _Settings(
        process=(
            Setting("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype),
            Setting("torch's deterministic algorithms", get_deterministic, put_deterministic),
            *(
                Setting(f"cudnn.{name}", partial(getattr, cudnn, name), partial(setattr, cudnn, name))
                for name in ("enabled", "benchmark", "deterministic", "allow_tf32")
            ),
            Setting("the precision of matmul", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
            Setting("the number of threads", torch.get_num_threads, torch.set_num_threads),
        ),
        thread=(
            Setting("the working directory", os.getcwd, os.chdir),
            Setting("torch's default device", torch.get_default_device, put_device),
            Setting("torch's gradient mode", torch.is_grad_enabled, torch.set_grad_enabled),
        ),
        main_thread=(
            Setting("signal handlers", lambda: [signal.getsignal(number) for number in signals], put_handlers),
            Setting(FILTERS, lambda: list(warnings.filters), put_filters),
        ),
        attention=tuple(
            Setting(f"the attention {name}", getattr(cuda, f"{name}_sdp_enabled"), getattr(cuda, f"enable_{name}_sdp"))
            for name in ATTENTION
        ),
    )


def _read(settings: tuple[Setting, ...]) -> list[tuple[Setting, Any]]:
    state = []
    for setting in settings:
        with suppress(OSError, RuntimeError):  # a deleted directory; contradictory precisions
            state.append((setting, setting.get()))
    return state


def _put_back(before: list[tuple[Setting, Any]]) -> list[str]:
    """Restore the settings whose values differ from `before`, and return their names."""
    changed = []
    for setting, value in before:
        try:
            if setting.get() == value:
                continue
        except (OSError, RuntimeError):
            pass
        with suppress(OSError):
            setting.put(value)
        changed.append(setting.name)
    return changed


class _Shared:
    """The settings of the process, saved when the first of the plug-ins that now run began."""

    def __init__(self) -> None:
        self.lock, self.running = threading.Lock(), 0
        self.before: list[tuple[Setting, Any]] = []
        self.met: list[str] = []

    def enter(self, who: str) -> None:
        with self.lock:
            if self.running == 0:
                self.before, self.met = _read(_settings().process), []
            self.running += 1
            self.met.append(who)

    def leave(self) -> tuple[list[str], list[str]]:
        """Restore the settings if no plug-in still runs. Return the changed ones, and the plug-ins that ran since saving."""
        with self.lock:
            self.running -= 1
            return ([] if self.running else _put_back(self.before)), list(dict.fromkeys(self.met))


_shared = _Shared()
_reported: set[tuple[str, str]] = set()


@contextmanager
def preserve(what: str, plugin: Any, *, imports: bool = False, calls: bool = False) -> Iterator[None]:
    """Restore the state after a plug-in has run and warn once about each change. This package's own code is exempt.

    `plugin` is a function, a class, an object, the name of a module, or the path of a file, and `what` names it in the
    warning. With `imports` random generators are restored, too; with `calls` attention kernels are not restored.
    """
    module = None if isinstance(plugin, Path) else module_of(plugin)
    if module is not None and module.partition(".")[0] in OURS:
        yield
        return
    in_main = threading.current_thread() is threading.main_thread()
    settings = _settings().thread + (_settings().main_thread if in_main else ())
    place = str(plugin if module is None else getattr(sys.modules.get(module), "__file__", None) or module)
    _shared.enter(place)
    before, generators = _read(settings), _save_generators() if imports else []
    attention = _read(_settings().attention) if in_main and not calls else []
    try:
        yield
    finally:
        left_out = {f"the attention {name}" for name in LEFT_OUT}  # may have grown meanwhile
        attention = [(setting, value and setting.name not in left_out) for setting, value in attention]
        changed_here = _put_back(before + attention)
        changed, met = _shared.leave()
        for restore in generators:
            restore()
        if len(met) < 2:
            _warn(f"{what} ({place})", place, changed_here + changed)
        else:
            several = f"one of {', '.join(sorted(met))}"
            _warn(f"{what} ({place})", place, changed_here)
            _warn(several, several, changed)


def _warn(who: str, place: str, changed: list[str]) -> None:
    """Warn of changes not yet reported for this place."""
    new = [name for name in changed if (place, name) not in _reported and name != FILTERS]
    _reported.update((place, name) for name in new)
    if new:
        LOGGER.warning("%s changed %s; that is put back after each of its calls", who, ", ".join(new))


def _save_generators() -> list[Callable[[], object]]:
    """Return functions that restore the states of the random generators."""
    import numpy as np
    import torch

    return [
        partial(random.setstate, random.getstate()),
        partial(np.random.set_state, np.random.get_state()),
        partial(torch.set_rng_state, torch.get_rng_state()),
    ]


def module_of(plugin: Any) -> str | None:
    """Return the module name of a function, a class or an object; return a string unchanged."""
    plugin = plugin.func if isinstance(plugin, partial) else plugin
    return plugin if isinstance(plugin, str) else getattr(plugin, "__module__", None)


def own_directory() -> None:
    """Give the calling thread its own current directory, where the system supports that."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "unshare"):
        libc.unshare(CLONE_FS)
