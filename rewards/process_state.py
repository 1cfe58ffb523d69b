"""What a plug-in may not change of the process: its directory, torch's defaults and flags, signal handlers, warnings.

A reward, a judge or a tree of the user runs in the process that trains or serves. Whatever of these it changes, while it is
imported, made, moved to a device or called, is put back afterwards, and one warning says so; of filters of warnings, which
libraries add when they are imported, nothing is said. Random generators are put back after an import. In a call they are the
plug-in's: a run itself draws from none of them, and a reward that draws must not draw the same numbers again. Environment
variables and `sys.path` are the plug-in's, too.

Some state belongs to the whole process, and rewards are called in threads beside the model. That state is therefore compared
with what it was before the first of several plug-ins that run at once, and put back when the last of them ends; until then
the others see what one changes. Which attention torch may choose is compared around imports, making and moving in the main
thread, not around calls: a model beside a call sets it for a while, too, and a call that began meanwhile would leave it so.
What this package has left out itself stays left out, see `LEFT_OUT`.
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
LEFT_OUT: set[str] = set()  # of `ATTENTION`, by this package's own `leave_out_cudnn_attention`
CLONE_FS = 0x200  # of Linux's unshare: a current directory of one's own


@dataclass(frozen=True)
class Setting:
    """A piece of state: its name, how it is read, and how it is set."""

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], object]


@cache
def _of_process() -> tuple[Setting, ...]:
    """Settings that all threads share."""
    import numpy as np  # noqa: F401 - which torch would import later, in the middle of a plug-in's own import
    import torch

    def flag(name: str, module: Any, attribute: str) -> Setting:
        return Setting(name, partial(getattr, module, attribute), partial(setattr, module, attribute))

    cudnn = torch.backends.cudnn
    return (
        Setting("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype),
        Setting(
            "torch's deterministic algorithms",
            lambda: (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            lambda both: torch.use_deterministic_algorithms(both[0], warn_only=both[1]),
        ),
        *(flag(f"cudnn.{name}", cudnn, name) for name in ("enabled", "benchmark", "deterministic", "allow_tf32")),
        Setting("the precision of matmul", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        Setting("the number of threads", torch.get_num_threads, torch.set_num_threads),
    )


@cache
def _of_thread() -> tuple[Setting, ...]:
    """Settings that each thread has for itself; the directory in threads that have called `own_directory`."""
    import torch

    def put_device(device: torch.device) -> None:
        torch.set_default_device(None if device == torch.device("cpu") else device)

    return (
        Setting("the working directory", os.getcwd, os.chdir),
        Setting("torch's default device", torch.get_default_device, put_device),
        Setting("torch's gradient mode", torch.is_grad_enabled, torch.set_grad_enabled),
    )


def _of_main_thread() -> tuple[Setting, ...]:
    """Settings of the process that only the main thread sets."""
    signals = sorted(signal.valid_signals())

    def put_handlers(handlers: list[Any]) -> None:
        for number, handler in zip(signals, handlers, strict=True):
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)

    def put_filters(filters: list[Any]) -> None:
        warnings.filters[:] = filters  # type: ignore[index]  # the stubs call this list a Sequence
        with warnings.catch_warnings():  # leaving it tells Python that the filters have changed
            pass

    return (
        Setting("signal handlers", lambda: [signal.getsignal(number) for number in signals], put_handlers),
        Setting(FILTERS, lambda: list(warnings.filters), put_filters),
    )


@cache
def _of_attention() -> tuple[Setting, ...]:
    """The kinds of attention that torch may choose."""
    import torch

    cuda = torch.backends.cuda
    return tuple(
        Setting(f"the attention {name}", getattr(cuda, f"{name}_sdp_enabled"), getattr(cuda, f"enable_{name}_sdp"))
        for name in ATTENTION
    )


def _but_left_out(before: list[tuple[Setting, Any]]) -> list[tuple[Setting, Any]]:
    """What the kinds of attention were, those off that this package has left out since."""
    left_out = {f"the attention {name}" for name in LEFT_OUT}
    return [(setting, value and setting.name not in left_out) for setting, value in before]


def _read(settings: tuple[Setting, ...]) -> list[tuple[Setting, Any]]:
    found = []
    for setting in settings:
        with suppress(OSError, RuntimeError):  # a directory that is gone; precisions that contradict each other
            found.append((setting, setting.get()))
    return found


def _put_back(before: list[tuple[Setting, Any]]) -> list[str]:
    """Set what is not as it was; return the names."""
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
    """The state of the process before the first of the plug-ins that run now."""

    def __init__(self) -> None:
        self.lock, self.running = threading.Lock(), 0
        self.before: list[tuple[Setting, Any]] = []
        self.met: list[str] = []  # who has run since then

    def enter(self, who: str) -> None:
        with self.lock:
            if self.running == 0:
                self.before, self.met = _read(_of_process()), []
            self.running += 1
            self.met.append(who)

    def leave(self) -> tuple[list[str], list[str]]:
        """When the last leaves, put the state back; return what had changed, and who ran meanwhile."""
        with self.lock:
            self.running -= 1
            return ([] if self.running else _put_back(self.before)), list(dict.fromkeys(self.met))


_shared = _Shared()
_told: set[tuple[str, str]] = set()


@contextmanager
def kept(what: str, plugin: Any, *, imports: bool = False, calls: bool = False) -> Iterator[None]:
    """Put the state back after a plug-in has run, and warn once of each change. What is of this package may change it.

    Args:
        what: how the warning calls the plug-in.
        plugin: a function, a class, an object, the name of a module, or the path of a file.
        imports: whether it is imported, after which random generators are put back, too.
        calls: whether it is called, around which the kinds of attention are not compared.
    """
    module = None if isinstance(plugin, Path) else module_of(plugin)
    if module is not None and module.partition(".")[0] in OURS:
        yield
        return
    in_main = threading.current_thread() is threading.main_thread()
    own = _of_thread() + (_of_main_thread() if in_main else ())
    place = str(plugin if module is None else getattr(sys.modules.get(module), "__file__", None) or module)
    _shared.enter(place)
    before, drawn = _read(own), _generators() if imports else None
    attention = _read(_of_attention()) if in_main and not calls else []
    try:
        yield
    finally:
        own_changed = _put_back(before + _but_left_out(attention))
        changed, met = _shared.leave()
        if drawn is not None:
            _put_generators(drawn)
        _tell(f"{what} ({place})", place, own_changed + (changed if len(met) < 2 else []))
        _tell(several := f"one of {', '.join(sorted(met))}", several, changed if len(met) > 1 else [])


def _tell(who: str, place: str, changed: list[str]) -> None:
    """Warn of changes that have not been told of a place."""
    new = [name for name in changed if (place, name) not in _told and name != FILTERS]
    _told.update((place, name) for name in new)
    if new:
        LOGGER.warning("%s changed %s; that is put back after each of its calls", who, ", ".join(new))


def _generators() -> tuple[Any, ...]:
    import numpy as np
    import torch

    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _put_generators(drawn: tuple[Any, ...]) -> None:
    import numpy as np
    import torch

    random.setstate(drawn[0])
    np.random.set_state(drawn[1])
    torch.set_rng_state(drawn[2])


def module_of(plugin: Any) -> str | None:
    """The name of the module of a function, a class or an object; a name is one already."""
    plugin = plugin.func if isinstance(plugin, partial) else plugin
    return plugin if isinstance(plugin, str) else getattr(plugin, "__module__", None)


def own_directory() -> None:
    """Give the calling thread a current directory of its own, where the system can: others are not moved with it."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "unshare"):
        libc.unshare(CLONE_FS)
