"""Rewards, called in threads while the model goes on sampling."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from flowgrpo.data.prompts import Prompt, Row
from flowgrpo.schema.sections import RewardUse
from flowgrpo.training.run.out_of_memory import OutOfMemory
from rewards import Reward, RewardError
from rewards import load as load_reward
from rewards.base import NoAnswer, describe_error
from rewards.memory import is_out_of_memory
from rewards.process_state import own_directory
from samplers.batches import batched

Samples = torch.Tensor | Sequence[str]  # pictures, videos and sounds, or texts

ATTEMPTS = 3
SILENT = 2  # calls in a row without an answer, after which a rollout or an evaluation asks a server no more

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scores:
    """Rewards of samples.

    Attributes:
        values: (B, R) float64; NaN where a reward does not apply or the sample is lost.
        lost: (B,) samples for which some reward failed to the end, or that are not finite.
        seconds: time spent inside the reward functions.
    """

    values: torch.Tensor
    lost: torch.Tensor
    seconds: float


@dataclass
class Silence:
    """How many calls in a row a reward's server has not answered, and how many samples were dropped unasked since."""

    calls: int = 0
    unasked: int = 0


class Scorer:
    """Calls rewards in threads; a reward that raises is tried again, then its samples count as lost.

    One that runs out of memory is tried again, too; if that does not help, waiting for its scores raises `OutOfMemory`.

    Local rewards run one after another in one thread, so that what they draw from global generators keeps its order; one
    that waits for another machine (`remote = True` on the function) has a thread of its own. On a GPU each call has a
    stream of its own.

    A server that did not answer `SILENT` calls in a row is not asked any more, so that one that hangs costs so many time
    limits and not one for each group; the next scorer asks it again.

    Args:
        rewards: each is called by one thread at a time.
    """

    def __init__(self, rewards: Sequence[Reward]):
        self.rewards = rewards
        self._silences = [Silence() for _ in rewards]
        local = _thread()
        self._threads = [_thread() if getattr(r.function, "remote", False) else local for r in rewards]

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *error: object) -> None:
        for thread in self._threads:
            thread.shutdown(cancel_futures=True)
        for reward, silence in zip(self.rewards, self._silences, strict=True):
            if silence.unasked:
                LOGGER.warning(
                    "the reward %r was not asked any more; %d more samples are dropped", reward.name, silence.unasked
                )

    def submit(
        self, samples: Samples, rows: Sequence[Row], one_group: bool = True, *, asked: Sequence[bool] | None = None
    ) -> Callable[[], Scores]:
        """Begin to score samples; returns a function that waits for the scores.

        Args:
            one_group: whether the samples are one group; otherwise each is a group of its own, and group-wise rewards meet
                them one by one.
            asked: (R,) which rewards are asked, the others' values are NaN; None asks all.
        """
        ready = None
        if isinstance(samples, torch.Tensor) and samples.is_cuda:
            ready = torch.cuda.Event()
            ready.record()
        which = range(len(self.rewards)) if asked is None else [k for k, one in enumerate(asked) if one]
        jobs = {
            k: self._threads[k].submit(
                _timed, self.rewards[k], samples, rows, one_group=one_group, ready=ready, silence=self._silences[k]
            )
            for k in which
        }

        def wait() -> Scores:
            values = torch.full((len(rows), len(self.rewards)), torch.nan, dtype=torch.float64)
            spent = 0.0
            for k, job in jobs.items():
                values[:, k], seconds = job.result()
                spent += seconds
            lost = values.isinf().any(1)
            values[lost] = torch.nan
            return Scores(values, lost, spent)

        return wait


def _thread() -> ThreadPoolExecutor:
    """One thread, with a current directory of its own: the run's files have relative names."""
    return ThreadPoolExecutor(1, initializer=own_directory)


@contextmanager
def unheard() -> Iterator[None]:
    """Context that says nothing of rewards that fail, for samples that nobody loses with them."""
    LOGGER.disabled = True
    try:
        yield
    finally:
        LOGGER.disabled = False


def score(rewards: Sequence[Reward], samples: Samples, rows: Sequence[Row], one_group: bool = True) -> Scores:
    """Score samples at once and return every reward of each; see `Scorer`."""
    with Scorer(rewards) as scorer:
        return scorer.submit(samples, rows, one_group)()


@torch.no_grad()
def _timed(
    reward: Reward,
    samples: Samples,
    rows: Sequence[Row],
    *,
    one_group: bool,
    ready: torch.cuda.Event | None,
    silence: Silence,
) -> tuple[torch.Tensor, float]:
    started = time.perf_counter()
    if ready is None or not isinstance(samples, torch.Tensor):
        return _applied(reward, samples, rows, one_group=one_group, silence=silence), time.perf_counter() - started
    stream = torch.cuda.Stream(samples.device)
    stream.wait_event(ready)
    with torch.cuda.stream(stream):
        values = _applied(reward, samples, rows, one_group=one_group, silence=silence)
    stream.synchronize()  # before anyone may reuse the memory of the samples
    return values, time.perf_counter() - started


def _applied(
    reward: Reward, samples: Samples, rows: Sequence[Row], *, one_group: bool, silence: Silence
) -> torch.Tensor:
    """Values (B,) of a reward: NaN for samples it does not apply to, infinity for samples that are not finite: lost.

    A reward may make a number of NaN, the best of its group, even.
    """
    applies = [reward.applies(row.columns) for row in rows]
    whole = [True] * len(rows)
    if isinstance(samples, torch.Tensor) and samples.is_floating_point():
        whole = samples.flatten(1).isfinite().all(1).tolist()
    asked = [i for i in range(len(rows)) if applies[i] and whole[i]]
    if broken := sum(applies) - len(asked):
        LOGGER.warning(
            "%d of %d samples are not finite and are dropped, unseen by the reward %r", broken, len(rows), reward.name
        )
    values = torch.tensor(
        [torch.inf if a and not w else torch.nan for a, w in zip(applies, whole, strict=True)]
    ).double()
    size = len(asked) if one_group or not reward.group_wise else 1
    for batch in batched(asked, max(1, size)):
        if silence.calls >= SILENT:
            silence.unasked += len(batch)
            values[batch] = torch.inf
        else:
            values[batch] = _attempt(reward, _some(samples, batch), [rows[i] for i in batch], silence)
    return values


def _some(samples: Samples, indices: Sequence[int]) -> Samples:
    """Samples at some indices; the same object for all of them."""
    if len(indices) == len(samples):
        return samples
    return samples[indices] if isinstance(samples, torch.Tensor) else [samples[i] for i in indices]


def _attempt(reward: Reward, samples: Samples, rows: Sequence[Row], silence: Silence) -> torch.Tensor:
    prompts = [row.prompt for row in rows]
    columns = {name: [row.columns[name] for row in rows] for name in rows[0].columns}
    attempts = 1 if getattr(reward.function, "remote", False) else ATTEMPTS  # a client has its own retries
    for attempt in range(1, attempts + 1):
        try:
            values = reward(samples, prompts, columns)
            silence.calls = 0
            if odd := int(values.isinf().sum()):
                LOGGER.warning(
                    "the reward %r returned NaN or infinity for %d of %d samples, which are dropped",
                    reward.name,
                    odd,
                    len(rows),
                )
            return values
        except (Exception, SystemExit) as error:  # a plug-in may raise anything; what it raised is reported
            if attempt == attempts and is_out_of_memory(error):  # the model may have had the memory before
                raise OutOfMemory("rewards", error, f"the reward {reward.name!r}") from error
            silence.calls = silence.calls + 1 if isinstance(error, NoAnswer) else 0
            problem = describe_error(error, reward.function)
            time.sleep(0.1 * (attempt - 1))
    times = "" if attempts == 1 else f"{attempts} times "
    LOGGER.warning("the reward %r failed %s(%s); its %d samples are dropped", reward.name, times, problem, len(rows))
    return torch.full((len(prompts),), torch.inf, dtype=torch.float64)


def rewards(uses: Sequence[RewardUse], eval_uses: Sequence[RewardUse] = ()) -> tuple[list[Reward], list[Reward]]:
    """Training and evaluation rewards of a config.

    Raises:
        RewardError: one cannot be found, or two share a name.
    """
    loaded = [
        [
            replace(load_reward(use.use, use.weight, use.options, use.name), only=use.only, offset=use.offset)
            for use in part
        ]
        for part in (uses, eval_uses)
    ]
    names = [reward.name for part in loaded for reward in part]
    for name in names:
        if names.count(name) > 1:
            raise RewardError(f"two rewards are named {name!r}: give one of them another name, {{use: ..., name: ...}}")
    return loaded[0], loaded[1]


def pair_with_prompts(rewards: Sequence[Reward], prompts: Sequence[Prompt]) -> Iterator[tuple[Reward, Prompt]]:
    """Each reward with the first prompt that it is for; not those that are for none."""
    for reward in rewards:
        first = next((prompt for prompt in prompts if reward.applies(prompt.columns)), None)
        if first is not None:
            yield reward, first
