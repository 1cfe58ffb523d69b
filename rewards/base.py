"""What a reward is, and how one is found, checked and called.

A reward is a function: `reward(images, prompts, **columns)` returns one float per sample. Nothing has to be subclassed or
registered. A class with `__init__(self, **options)` and `__call__` as above may hold a model, and `to(device)` moves it.
`group_wise = True` on either asks to be called with one whole group at a time. None means: not applicable to this sample.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import math
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property, partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rewards.cards import BUILT_IN
from rewards.memory import is_out_of_memory
from rewards.process_state import kept, module_of

if TYPE_CHECKING:
    import torch

ENTRY_POINTS = "flowgrpo.rewards"
LONGEST = 500  # characters of what a plug-in says when it fails, or a server of what it refuses


class _Rows(Protocol):
    """What has rows: a sequence, a tensor, an array."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Any: ...


S = TypeVar("S", bound=_Rows)


class RewardError(ValueError):
    """A reward cannot be found or does not keep the contract. The message is one clear sentence."""


class NoAnswer(RewardError):
    """A server did not answer in time, or could not be reached, however often it was asked."""


@dataclass(frozen=True)
class Reward:
    """A reward ready to be called.

    Attributes:
        name: in metrics and manifests.
        function: the contract's callable.
        weight: in the sum of rewards.
        group_wise: whether it must be given one whole group at a time.
        offset: the value that counts as 0 among several rewards.
        only: columns, and the value a row must have there for the reward to apply.
    """

    name: str
    function: Callable[..., Any]
    weight: float = 1.0
    _: KW_ONLY
    group_wise: bool = False
    offset: float = 0.0
    only: Mapping[str, Any] = field(default_factory=dict)

    def applies(self, columns: Mapping[str, Any]) -> bool:
        """Whether this reward is asked about a row of these columns."""
        return matches(columns, self.only)

    @cached_property
    def takes(self) -> list[str] | None:
        """Names of the columns that it receives where there are such; None: all there are."""
        parameters = list(inspect.signature(self.function).parameters.values())
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        return None if takes_all else [p.name for p in parameters[2:]]

    def __call__(
        self, samples: torch.Tensor | Sequence[str], prompts: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> torch.Tensor:
        """Rewards (B,) float64: NaN where the reward does not apply, infinity where what it returned is not finite.

        Raises:
            RewardError: it did not return one number or None per sample, or a column has the name of its samples or prompts.
        """
        import torch  # here, so that a reward can be found and described without it

        if isinstance(samples, torch.Tensor):
            samples = samples.contiguous()  # sums round by layout: here as in a server, whatever decoder they come from
        takes = self.takes
        given = {k: list(v) for k, v in columns.items() if takes is None or k in takes}
        if taken := [name for name in [*inspect.signature(self.function).parameters][:2] if name in given]:
            raise RewardError(
                f"the reward {self.name!r} calls an argument {taken[0]!r}, so no column can have that name"
            )
        with kept(f"the reward {self.name!r}", self.function, calls=True):
            returned = self.function(
                samples if isinstance(samples, torch.Tensor) else list(samples), list(prompts), **given
            )
            values = self._listed(returned, len(prompts))  # a generator runs only here
            if len(values) != len(prompts):
                raise RewardError(f"the reward {self.name!r} returned {len(values)} values for {len(prompts)} samples")
            # A number may have a `__float__` of the plug-in's own.
            numbers = [self._number(value, i) for i, value in enumerate(values)]
        return torch.tensor(numbers, dtype=torch.float64)

    def _listed(self, returned: Any, size: int) -> list[Any]:
        try:
            if isinstance(returned, (Mapping, Set, str, bytes)):  # lists of keys, in no order, of letters
                raise TypeError
            entries = iter(returned)
        except TypeError:
            kind = type(returned).__name__
            raise RewardError(f"the reward {self.name!r} returned {kind}, not a list of {size} floats") from None
        return list(entries)  # what a generator raises is its own error

    def to(self, device: torch.device | str) -> None:
        """Move what it holds, if it can be moved."""
        if hasattr(self.function, "to"):
            with kept(f"the reward {self.name!r}", self.function):
                self.function.to(device)

    def _number(self, value: Any, i: int) -> float:
        if value is None:
            return math.nan
        try:
            if isinstance(value, (str, bytes)):
                raise TypeError
            number = float(value)
        except OverflowError:
            return math.inf
        except (TypeError, ValueError, RuntimeError):  # the last of a tensor of several numbers
            kind = type(value).__name__
            raise RewardError(f"the reward {self.name!r} returned {kind} for sample {i}, not a float or None") from None
        return number if math.isfinite(number) else math.inf

    def check(self, sample: torch.Tensor | str, prompt: str, columns: Mapping[str, Any]) -> None:
        """Call the reward on two synthetic samples, before anything expensive: one and its mirror image, or a text twice.

        Raises:
            RewardError: it fails, or breaks the contract.
        """
        import torch

        two = torch.stack([sample, sample.flip(-1)]) if isinstance(sample, torch.Tensor) else [sample, sample]
        with _one_sentence(f"the reward {self.name!r} failed on two synthetic samples", self.function):
            values = self(two, [prompt, prompt], {k: [v, v] for k, v in columns.items()})
        if values.isinf().any():
            raise RewardError(
                f"the reward {self.name!r} returned NaN or infinity for a synthetic sample, not a float or None"
            )


def matches(columns: Mapping[str, Any], only: Mapping[str, Any]) -> bool:
    """Whether a row of these columns has all values of `only`."""
    return all(columns.get(name) == value for name, value in only.items())


def told(error: BaseException, plugin: Any) -> str:
    """What a plug-in raised, in one line: its kind, its words, and the last line of the plug-in's own file on the way there.

    Args:
        plugin: a function, a class, an object, or the name of the module.
    """
    said = f"{type(error).__name__}: {one_line(str(error))}".removesuffix(": ")
    module = module_of(plugin)
    own = [at for at in traceback.walk_tb(error.__traceback__) if at[0].f_globals.get("__name__") == module]
    if isinstance(error, RewardError) or not own:  # a sentence of ours names what is wrong
        return said
    file, line = Path(own[-1][0].f_code.co_filename), own[-1][1]
    return f"{said} at {file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file}:{line}"


def one_line(words: str) -> str:
    """Words without line breaks or other control characters, `LONGEST` at most."""
    return " ".join("".join(c if c.isprintable() else " " for c in words).split())[:LONGEST]


def last_part(use: str) -> str:
    """The name of a reward that was given none; of a file alone it is the file's, without .py."""
    return re.split("[:/]", use)[-1].removesuffix(".py")


def load(use: str, weight: float = 1.0, options: Mapping[str, Any] | None = None, name: str | None = None) -> Reward:
    """Find a reward by what a user wrote.

    Args:
        use: a built-in name, a dotted path `pkg.module:object`, a file `./file.py:object` (`./file.py` where one
            object in it alone looks like a reward), the name of an installed package's entry point in the group
            `flowgrpo.rewards`, or the URL `http://host:port/name` of a served one (several, separated by commas, are
            its replicas).
        options: arguments for a class, or of the client of a URL.
        name: in metrics; by default the last part of `use`.

    Raises:
        RewardError: there is no such thing, or it cannot be made.
    """
    found = find(use)
    if inspect.isclass(found) or isinstance(found, partial):
        with _one_sentence(f"the reward {use!r} could not be made", found), kept(f"the reward {use!r}", found):
            found = found(**(options or {}))
    elif options:
        raise RewardError(f"the reward {use!r} is a function and takes no options, but got {', '.join(options)}")
    if not callable(found):
        raise RewardError(f"the reward {use!r} is {type(found).__name__}, which cannot be called")
    return Reward(name or last_part(use), found, weight, group_wise=bool(getattr(found, "group_wise", False)))


def find(use: str) -> Any:
    """The function or class (a `partial` of it, where some options are settled) that `load` would use; see there."""
    if use in BUILT_IN:
        found = locate(BUILT_IN[use].target, f"the reward {use!r}")
        return partial(found, **BUILT_IN[use].options) if BUILT_IN[use].options else found
    if use.startswith(("http://", "https://")):
        return partial(locate("rewards.served.client:Client", f"the reward {use!r}"), use)
    if ":" in use:
        return locate(use, f"the reward {use!r}")
    if use.endswith(".py"):
        return _only_reward(use, _load_file(Path(use), f"the reward {use!r}"))
    installed = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if use in installed:
        module = installed[use].module
        sentence = f"the reward {use!r}: {installed[use].value} could not be imported"
        with _one_sentence(sentence, module), kept(f"the reward {use!r}", module, imports=True):
            return installed[use].load()
    hint = nearest(use, [*BUILT_IN, *installed])
    raise RewardError(
        f"there is no reward {use!r}, {hint}" + ("" if hint.endswith("?") else ", or write ./file.py:function")
    )


def _only_reward(use: str, module: Any) -> Any:
    """The one object of a file that looks like a reward: it is called with samples and then `prompts`.

    Raises:
        RewardError: there are several, or none.
    """
    alike = [name for name in _names(module) if _looks_like_reward(getattr(module, name))]
    if len(alike) == 1:
        return getattr(module, alike[0])
    names = alike or _names(module)
    has = f"it has {', '.join(names)}" if names else "but it has no function or class"
    raise RewardError(f"the reward {use!r}: say which of its names, {use}:{names[0] if names else 'NAME'}; {has}")


def _looks_like_reward(found: Any) -> bool:
    called = getattr(found, "__call__", None) if inspect.isclass(found) else found  # noqa: B004
    if not (inspect.isfunction(called) or inspect.ismethod(called)):
        return False
    return "prompts" in [*inspect.signature(called).parameters][: 3 if inspect.isclass(found) else 2]


def batched(rows: S, size: int) -> list[S]:
    """Consecutive parts of `size` rows, of the type of the whole; the last may have fewer, and no rows have no parts."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def nearest(word: str, choices: Iterable[str]) -> str:
    """The end of an error: "did you mean 'x'?" if one of `choices` is close to `word`, otherwise all of them."""
    choices = [str(choice) for choice in choices]
    close = difflib.get_close_matches(word, choices, 1)
    return f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(choices)}"


def locate(use: str, what: str) -> Any:
    """The object that a user names by `pkg.module:object` or `./file.py:object`.

    Args:
        what: how errors call it.

    Raises:
        RewardError: there is no such thing, or it cannot be imported.
    """
    place, _, attribute = use.rpartition(":")
    if place.endswith(".py"):
        return _attribute(_load_file(Path(place), what), attribute, what)
    with _one_sentence(f"{what}: {place} could not be imported", place), kept(what, place, imports=True):
        module = importlib.import_module(place)
    return _attribute(module, attribute, what)


def _load_file(path: Path, what: str) -> Any:
    if not path.is_file():
        raise RewardError(f"{what}: there is no file {path}")
    digest = hashlib.blake2b(str(path.resolve()).encode(), digest_size=4).hexdigest()
    spec = importlib.util.spec_from_file_location(f"flowgrpo_plugin_{path.stem}_{digest}", path)
    assert spec is not None  # the file ends in .py
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses and pickle look there
    with _one_sentence(f"{what}: {path} could not be imported", spec.name), kept(what, path, imports=True):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _one_sentence(sentence: str, plugin: Any) -> Iterator[None]:
    """Whatever is raised by a plug-in, which may be anything, as one sentence that ends in what `told` says.

    Only that memory ran out is left as it is: the plug-in need not be to blame.
    """
    try:
        yield
    except RewardError:
        raise
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            raise
        raise RewardError(f"{sentence}: {told(error, plugin)}") from error


def _attribute(module: Any, name: str, what: str) -> Any:
    if not hasattr(module, name):
        own = _names(module)
        close = difflib.get_close_matches(name, own, 1) or own[:5]
        hint = f", it has {', '.join(close)}" if close else ""
        raise RewardError(f"{what}: nothing is named {name!r} there{hint}")
    return getattr(module, name)


def _names(module: Any) -> list[str]:
    """What can be called in a module and is its own, not imported."""
    own = {k: v for k, v in vars(module).items() if callable(v) and not k.startswith("_")}
    return [k for k, v in own.items() if getattr(v, "__module__", None) == module.__name__]
