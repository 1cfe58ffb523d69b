"""Find, check and call rewards.

A reward is a function: `reward(images, prompts, **columns)` returns one float per sample, or None where it does not apply.
It needs no base class and no registration. A class with `__init__(self, **options)` and `__call__` as above may hold a
model; `to(device)` moves it. `group_wise = True` on either asks for one whole group per call.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property, partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rewards.cards import BUILT_IN, default_name
from rewards.files import frames as frame_rules
from rewards.memory import is_out_of_memory
from rewards.process_state import module_of, preserve

if TYPE_CHECKING:
    import torch

    from rewards.audio import Films

    Samples = torch.Tensor | Films | Sequence[str]

ENTRY_POINTS = "flowgrpo.rewards"
CONTRACT = "docs/reference/rewards.md"


class RewardError(ValueError):
    """A reward cannot be found or breaks the contract. The message is one clear sentence."""


class NoAnswer(RewardError):
    """A server could not be reached or did not answer in time, after all retries."""


@dataclass(frozen=True)
class Reward:
    """A reward ready to be called."""

    name: str
    function: Callable[..., Any]
    weight: float = 1.0
    _: KW_ONLY
    group_wise: bool = False
    offset: float = 0.0  # the value that counts as 0 among several rewards
    only: Mapping[str, Any] = field(default_factory=dict)  # column values of the rows to which it applies
    frames: str | int | None = None  # a rule of `rewards.files.frames`: chosen frames of a video are scored as pictures
    of: str | None = None  # `soundtrack`: the sound of a video is scored

    def __str__(self) -> str:
        return f"the reward {self.name!r}"

    def applies(self, columns: Mapping[str, Any]) -> bool:
        """Return True if the reward applies to a row with these columns."""
        return matches(columns, self.only)

    @cached_property
    def takes(self) -> list[str] | None:
        """Names of the columns that the function accepts; None: all."""
        takes_all = any(p.kind is p.VAR_KEYWORD for p in self._parameters)
        return None if takes_all else [p.name for p in self._parameters[2:]]

    @cached_property
    def _parameters(self) -> list[inspect.Parameter]:
        return list(inspect.signature(_code(self.function)).parameters.values())

    @property
    def remote(self) -> bool:
        """Whether the reward waits for another machine and retries by itself: its function says `remote = True`."""
        return bool(getattr(self.function, "remote", False))

    @property
    def hears(self) -> bool:
        """Whether the reward needs the sound of videos: by `of`, or since its function names the argument `soundtrack`."""
        return self.of == "soundtrack" or "soundtrack" in (self.takes or ())

    def __call__(self, samples: Samples, prompts: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> torch.Tensor:
        """Return rewards (B,) float64: NaN where the reward does not apply, infinity for numbers that are not finite.

        With `frames` they are means over the chosen frames of videos. A function with an argument `soundtrack` gets the
        sounds (C, N) of `rewards.audio.Films` there. Raises RewardError if the reward did not return a number or None for
        each sample, a column that it needs is missing, or a column has the name of one of its first two arguments.
        """
        import torch  # imported here so that rewards can be found and described without it

        from rewards.audio import Films

        if isinstance(samples, Films) and self.hears:
            if "soundtrack" in columns:
                raise RewardError(f"{self} gets the sound of videos as soundtrack, so no column can have that name")
            columns = {**columns, "soundtrack": list(samples.soundtrack)}
        return torch.stack([self._score(seen, prompts, columns) for seen in self._seen(samples)]).mean(0)

    def features(self, samples: Samples, prompts: Sequence[str]) -> torch.Tensor:
        """Return features (B, D) by the function's method `features`, or else scores (B,); means over chosen `frames`."""
        import torch

        of = getattr(self.function, "features", self.function)
        with torch.no_grad():
            parts = [torch.as_tensor(of(seen, prompts), dtype=torch.float64).cpu() for seen in self._seen(samples)]
        return torch.stack(parts).mean(0)

    def _seen(self, samples: Samples) -> Iterator[torch.Tensor | Sequence[str]]:
        """Yield what the function is called with: the samples, their soundtracks, or each chosen frame as pictures."""
        import torch

        from rewards.audio import Films

        if self.of == "soundtrack":
            if not isinstance(samples, Films):
                raise RewardError(f"{self} has of=soundtrack, but these samples are no videos with sound; leave of out")
            yield samples.soundtrack
            return
        if isinstance(samples, Films):
            samples = samples.frames
        if self.frames is None:
            yield samples
            return
        if not isinstance(samples, torch.Tensor) or samples.ndim != 5:
            kind = tuple(samples.shape) if isinstance(samples, torch.Tensor) else "texts"
            raise RewardError(f"{self} has frames={self.frames}, which chooses from videos (B, F, 3, H, W), not {kind}")
        for place in frame_rules.choose(self.frames, samples.shape[1]):
            yield samples[:, place]

    def _score(
        self, samples: torch.Tensor | Sequence[str], prompts: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> torch.Tensor:
        import torch

        # Contiguous, since rounding of sums depends on the layout.
        samples = samples.contiguous() if isinstance(samples, torch.Tensor) else list(samples)
        given = {k: list(v) for k, v in columns.items() if self.takes is None or k in self.takes}
        for p in self._parameters[:2]:
            if p.name in given:
                raise RewardError(f"{self} calls an argument {p.name!r}, so no column can have that name")
        self._check_arguments(given)
        with preserve(str(self), self.function, calls=True), torch.no_grad():
            returned = self.function(samples, list(prompts), **given)
            values = self._read_values(returned, len(prompts))  # a generator runs only here
            if len(values) != len(prompts):
                raise RewardError(f"{self} returned {len(values)} values for {len(prompts)} samples")
            numbers = [self._read_number(value, i) for i, value in enumerate(values)]  # may run a plug-in's __float__
        return torch.tensor(numbers, dtype=torch.float64)

    def _read_values(self, returned: Any, size: int) -> list[Any]:
        try:
            if isinstance(returned, (Mapping, Set, str, bytes)):  # iterable, but not lists of numbers
                raise TypeError
            entries = iter(returned)
        except TypeError:
            kind = "one number" if hasattr(returned, "__float__") else type(returned).__name__
            raise RewardError(f"{self} returned {kind}, not a list of {size} floats") from None
        if len(shape := tuple(getattr(returned, "shape", ()))) > 1 and math.prod(shape) != size:
            rest = f"not one float for each of {size} samples (reduce it, for example with .mean(1))"
            raise RewardError(f"{self} returned a tensor of shape {shape}, {rest}")
        return list(entries)  # outside the try: a generator's TypeError is the plug-in's own

    def to(self, device: torch.device | str) -> None:
        """Move the reward to a device if it has a method `to`."""
        if hasattr(self.function, "to"):
            with (
                _one_sentence(f"{self} could not load or move to {device}", self.function),
                preserve(str(self), self.function),
            ):
                self.function.to(device)

    def _read_number(self, value: Any, i: int) -> float:
        if value is None:
            return math.nan
        try:
            if isinstance(value, (str, bytes)):
                raise TypeError
            number = float(value)
        except OverflowError:
            return math.inf
        except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several numbers
            raise RewardError(f"{self} returned {type(value).__name__} for sample {i}, not a float or None") from None
        return number if math.isfinite(number) else math.inf

    def check(self, sample: torch.Tensor | Films | str, prompt: str, columns: Mapping[str, Any]) -> None:
        """Raise RewardError unless the reward accepts two synthetic samples: one and its mirror image, or a text twice."""
        from rewards.audio import join_samples

        self.to("cpu")  # where some load their weights
        self.check_columns(prompt, columns)
        two = [sample, sample] if isinstance(sample, str) else join_samples([sample[None], sample.flip(-1)[None]])
        with _one_sentence(f"{self} failed on two synthetic samples", self.function):
            values = self(two, [prompt, prompt], {k: [v, v] for k, v in columns.items()})
        if values.isinf().any():
            raise RewardError(f"{self} returned NaN or infinity for a synthetic sample, not a float or None")

    def check_columns(self, prompt: str, columns: Iterable[str]) -> None:
        """Raise RewardError if the function needs a column that a prompt does not have, or takes no prompts."""
        self._check_arguments({*columns, "soundtrack", "sampling_rate"}, f"the prompt {one_line(prompt)[:60]!r} has")

    def _check_arguments(self, columns: Container[str], have: str = "the prompts have") -> None:
        """Raise RewardError if the function does not take samples and prompts, or needs a column that is not there."""
        count = len(self._parameters)
        if count < 2 and not any(p.kind is p.VAR_POSITIONAL for p in self._parameters):
            raise RewardError(f"{self} must take two arguments, samples and prompts, not {count} (see {CONTRACT})")
        for p in self._parameters[2:]:
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in columns:
                raise RewardError(f"{self} needs a column {p.name!r}, {have} none (see {CONTRACT})")


def matches(columns: Mapping[str, Any], only: Mapping[str, Any]) -> bool:
    """Return True if a row with these columns has all values of `only`."""
    return all(columns.get(name) == value for name, value in only.items())


def describe_error(error: BaseException, plugin: Any) -> str:
    """Describe a plug-in's exception in one line: type, message, and the last traceback entry in the plug-in's file."""
    message = f"{type(error).__name__}: {one_line(str(error))}".removesuffix(": ")
    module = module_of(plugin)
    frames = [at for at in traceback.walk_tb(error.__traceback__) if at[0].f_globals.get("__name__") == module]
    if isinstance(error, RewardError) or not frames:
        return message
    file, line = Path(frames[-1][0].f_code.co_filename), frames[-1][1]
    return f"{message} at {file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file}:{line}"


def one_line(words: str) -> str:
    """Replace line breaks and control characters by spaces and cut after 500 characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in words).split())[:500]


def load(
    use: str,
    weight: float = 1.0,
    options: Mapping[str, Any] | None = None,
    name: str | None = None,
    *,
    frames: str | int | None = None,
    of: str | None = None,
) -> Reward:
    """Load the reward that `use` names, or raise RewardError.

    Args:
        use: a built-in name, a dotted path `pkg.module:object`, a file `./file.py:object` (`./file.py` if only one object
            in it looks like a reward), an entry point of an installed package in the group `flowgrpo.rewards`, or the URL
            `http://host:port/name` of a served reward (several, separated by commas, are its replicas).
        options: arguments for a class, or for the client of a URL.
        name: in metrics; by default the last part of `use`.
        frames: a rule of `rewards.files.frames`, by which chosen frames of a video are scored as pictures.
        of: `soundtrack` to score the sound of videos.
    """
    reward = find(use)
    if inspect.isclass(reward) or isinstance(reward, partial):
        takes = inspect.signature(reward).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in takes.values()) and (odd := (options or {}).keys() - takes.keys()):
            raise RewardError(f"the reward {use!r} has no option {min(odd)!r}, {nearest(min(odd), takes)}")
        said = f"the reward {use!r} could not be made (options: {', '.join(options or ()) or 'none'})"
        with _one_sentence(said, reward), preserve(f"the reward {use!r}", reward):
            reward = reward(**(options or {}))
    elif options:
        raise RewardError(f"the reward {use!r} is a function and takes no options, but got {', '.join(options)}")
    if not callable(reward):
        raise RewardError(f"the reward {use!r} is {type(reward).__name__}, which cannot be called")
    if frames is not None:
        try:
            frame_rules.choose(frames, 1)
        except ValueError as error:
            raise RewardError(f"the reward {use!r}: {error}") from None
        if use in BUILT_IN and "video" in BUILT_IN[use].inputs:
            raise RewardError(f"the reward {use!r} sees videos itself; leave frames out, which are for pictures")
    if of not in (None, "soundtrack"):
        raise RewardError(f"the reward {use!r}: of is {of!r}, choose soundtrack or leave it out")
    if of is not None and frames is not None:
        raise RewardError(f"the reward {use!r}: frames choose pictures and of=soundtrack the sound, leave one out")
    group_wise = bool(getattr(reward, "group_wise", False))
    return Reward(name or default_name(use), reward, weight, group_wise=group_wise, frames=frames, of=of)


def load_nested(use: str | Mapping[str, Any], complaint: str) -> Reward:
    """Load an option that is a reward: a name, or a map of `use`, `options`, `frames`; else RewardError(`complaint`)."""
    fields: dict[str, Any] = {"use": use} if isinstance(use, str) else dict(use)
    if not isinstance(fields.get("use"), str) or fields.keys() - {"use", "options", "frames"}:
        raise RewardError(complaint)
    return load(fields["use"], options=fields.get("options"), frames=fields.get("frames"))


def find(use: str) -> Any:
    """Return the function or class that `load` would use, as a `partial` if `use` fixes some of its options."""
    if use in BUILT_IN:
        target = locate(BUILT_IN[use].target, f"the reward {use!r}")
        return partial(target, **BUILT_IN[use].options) if BUILT_IN[use].options else target
    if use.startswith(("http://", "https://")):
        return partial(locate("rewards.served.client:Client", f"the reward {use!r}"), use)
    if ":" in use:
        return locate(use, f"the reward {use!r}")
    if use.endswith(".py"):
        return _only_reward(use, _load_file(Path(use), f"the reward {use!r}"))
    installed = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if use in installed:
        said, module = f"the reward {use!r}: {installed[use].value} could not be imported", installed[use].module
        with _one_sentence(said, module), preserve(f"the reward {use!r}", module, imports=True):
            return installed[use].load()
    hint = f"did you mean './{use}.py'?" if Path(f"{use}.py").is_file() else nearest(use, [*BUILT_IN, *installed])
    raise RewardError(f"there is no reward {use!r}, {hint} (one in a file is ./file.py:function)")


def _only_reward(use: str, module: Any) -> Any:
    """Return the only object of a module that looks like a reward; raise RewardError if there are none or several."""
    rewards = [name for name in _names(module) if _looks_like_reward(getattr(module, name))]
    names = rewards or _names(module)
    if len(names) == 1:
        return getattr(module, names[0])
    has = f"it has {', '.join(names)}" if names else "but it has no function or class"
    raise RewardError(f"the reward {use!r}: say which of its names, {use}:{names[0] if names else 'NAME'}; {has}")


def _code(item: Any) -> Any:
    """Return the function that a call of a function, an object or an object of a class runs: `forward` of torch modules."""
    kind, torch = item if inspect.isclass(item) else type(item), sys.modules.get("torch")
    if torch and issubclass(kind, torch.nn.Module) and kind.__call__ is torch.nn.Module.__call__:
        return item.forward
    return getattr(item, "__call__", None) if inspect.isclass(item) else item  # noqa: B004


def _looks_like_reward(item: Any) -> bool:
    called = _code(item)
    runs = inspect.isfunction(called) or inspect.ismethod(called)
    return runs and "prompts" in [*inspect.signature(called).parameters][: 3 if inspect.isclass(item) else 2]


def nearest(word: str, choices: Iterable[str], others: str | None = None) -> str:
    """Return the end of an error message: "did you mean 'x'?" if a choice resembles `word`, otherwise `others` or all."""
    choices = [str(choice) for choice in choices]
    longer = [choice for choice in choices if len(word) > 2 and word in choice]
    close = difflib.get_close_matches(word, choices, 1, 0.8) or longer or difflib.get_close_matches(word, choices, 1)
    return f"did you mean {close[0]!r}?" if close else others or f"choose one of {', '.join(choices)}"


def locate(use: str, what: str) -> Any:
    """Return the object of `pkg.module:object` or `./file.py:object`; `what` begins the sentence of a RewardError."""
    place, _, attribute = use.rpartition(":")
    if place.endswith(".py"):
        return _attribute(_load_file(Path(place), what), attribute, what)
    if place.isidentifier() and Path(f"{place}.py").is_file() and importlib.util.find_spec(place) is None:
        raise RewardError(f"{what}: there is no module {place}, did you mean './{place}.py:{attribute}'?")
    with _one_sentence(f"{what}: {place} could not be imported", place), preserve(what, place, imports=True):
        module = importlib.import_module(place)
    return _attribute(module, attribute, what)


def _load_file(path: Path, what: str) -> Any:
    if not path.is_file():
        near = difflib.get_close_matches(str(path), [str(file) for file in path.parent.glob("*.py")], 1)
        raise RewardError(f"{what}: there is no file {path}" + "".join(f", did you mean {file!r}?" for file in near))
    digest = hashlib.blake2b(str(path.resolve()).encode(), digest_size=4).hexdigest()
    spec = importlib.util.spec_from_file_location(f"flowgrpo_plugin_{path.stem}_{digest}", path)
    assert spec is not None and spec.loader is not None  # noqa: PT018 - the file ends in .py
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # for dataclasses and pickle
    with _one_sentence(f"{what}: {path} could not be imported", spec.name), preserve(what, path, imports=True):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _one_sentence(sentence: str, plugin: Any) -> Iterator[None]:
    """Turn any exception of a plug-in except running out of memory into a RewardError that starts with `sentence`."""
    try:
        yield
    except RewardError:
        raise
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            raise
        raise RewardError(f"{sentence}: {describe_error(error, plugin)}") from error


def _attribute(module: Any, name: str, what: str) -> Any:
    if not hasattr(module, name):
        close = difflib.get_close_matches(name, _names(module), 1) or _names(module)
        hint = f", it has {', '.join(close)}" if close else ""
        raise RewardError(f"{what}: nothing is named {name!r} there{hint}")
    return getattr(module, name)


def _names(module: Any) -> list[str]:
    """Return the public callables that a module defines itself."""
    public = {k: v for k, v in vars(module).items() if callable(v) and not k.startswith("_")}
    return [k for k, v in public.items() if getattr(v, "__module__", None) == module.__name__]
