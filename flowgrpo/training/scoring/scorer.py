"""Calls of rewards in threads, while the model samples."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

import torch

from flowgrpo.data.prompts import Prompt, Row
from flowgrpo.schema.readable import counted
from flowgrpo.schema.sections import RewardUse
from flowgrpo.training.run.out_of_memory_error import OutOfMemory
from rewards import Reward, RewardError
from rewards import load as load_reward
from rewards.audio import Films, tensors
from rewards.base import NoAnswer, describe_error
from rewards.memory import is_out_of_memory
from rewards.process_state import own_directory
from samplers.batches import batched

Samples = torch.Tensor | Films | Sequence[str]  # pictures, videos and sounds, videos with sound, or texts

ATTEMPTS = 3
SILENT = 2  # calls in a row without an answer, after which a scorer does not call a server again

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scores:
    """Rewards of samples."""

    values: torch.Tensor  # (B, R) float64; NaN where a reward does not apply or the sample is lost
    lost: torch.Tensor  # (B,) bool, samples that are not finite, or for which a reward failed in all attempts
    seconds: float  # time spent inside the reward functions


@dataclass(kw_only=True)
class Failures:
    """Counts of a reward's failures."""

    calls: int = 0  # calls in a row without an answer
    unasked: int = 0  # samples dropped without a call, since the server was silent
    scored: int = 0  # samples whose rewards were returned
    odd: int = 0  # of these, samples dropped since their reward was NaN or infinity
    failed: int = 0  # calls that failed
    further: int = 0  # samples that calls after the first failure dropped


class Scorer:
    """A context that calls rewards in threads.

    A call that raises is repeated. If all attempts fail, the samples count as lost. If the last attempt runs out of
    memory, waiting for the scores raises `OutOfMemory` instead.

    Local rewards run one after another in one thread, so that they draw from global random generators in a fixed order.
    A reward that waits for another machine (`remote = True` on the function) has its own thread; if its server did not
    answer `SILENT` calls in a row, it is not called again. On a GPU each call has its own stream.
    """

    def __init__(self, rewards: Sequence[Reward]):
        self.rewards = rewards
        self._failures = [Failures() for _ in rewards]
        local = _thread()
        self._threads = [_thread() if r.remote else local for r in rewards]

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *error: object) -> None:
        for thread in self._threads:
            thread.shutdown(cancel_futures=True)
        for reward, failures in zip(self.rewards, self._failures, strict=True):
            if failures.odd:
                LOGGER.warning(
                    "the reward %r returned NaN or infinity for %d of %d samples, which are dropped",
                    reward.name,
                    failures.odd,
                    failures.scored,
                )
            if failures.failed > 1:
                LOGGER.warning(
                    "the reward %r failed for %s; %d more samples are dropped",
                    reward.name,
                    counted(failures.failed - 1, "more call"),
                    failures.further,
                )
            if failures.unasked:
                LOGGER.warning(
                    "the reward %r was not asked any more; %d more samples are dropped", reward.name, failures.unasked
                )

    def submit(
        self, samples: Samples, rows: Sequence[Row], one_group: bool = True, *, asked: Sequence[bool] | None = None
    ) -> Callable[[], Scores]:
        """Begin to score samples; return a function that waits for the scores.

        Args:
            one_group: whether the samples are one group. Otherwise group-wise rewards get them one by one.
            asked: (R,) whether to call each reward; a reward that is not called has values NaN. None calls all rewards.
        """
        begun = self._begin(samples, rows, one_group=one_group, asked=asked)

        def wait() -> Scores:
            values, spent = begun()
            lost = values.isinf().any(1)
            values[lost] = torch.nan
            return Scores(values, lost, spent)

        return wait

    def submit_apart(self, samples: Samples, rows: Sequence[Row]) -> Callable[[], torch.Tensor]:
        """Begin to score samples of different prompts; return a function that waits for their values (B, R).

        A reward that fails on some of them is NaN there. It keeps its values of the others, and other rewards keep theirs.
        """
        begun = self._begin(samples, rows, one_group=False, apart=True)

        def wait() -> torch.Tensor:
            values, _ = begun()
            return values.masked_fill(values.isinf(), torch.nan)

        return wait

    def _begin(
        self,
        samples: Samples,
        rows: Sequence[Row],
        *,
        one_group: bool,
        asked: Sequence[bool] | None = None,
        apart: bool = False,
    ) -> Callable[[], tuple[torch.Tensor, float]]:
        """Return a function that waits for the values (B, R), infinity where a reward failed, and for their seconds."""
        ready = None
        if isinstance(samples, torch.Tensor | Films) and tensors(samples)[0].is_cuda:
            ready = torch.cuda.Event()
            ready.record()
        which = range(len(self.rewards)) if asked is None else [k for k, one in enumerate(asked) if one]
        jobs = {
            k: self._threads[k].submit(
                _time_reward,
                self.rewards[k],
                samples,
                rows,
                one_group=one_group,
                apart=apart,
                ready=ready,
                failures=self._failures[k],
            )
            for k in which
        }

        def wait() -> tuple[torch.Tensor, float]:
            values = torch.full((len(rows), len(self.rewards)), torch.nan, dtype=torch.float64)
            spent = 0.0
            for k, job in jobs.items():
                values[:, k], seconds = job.result()
                spent += seconds
            return values, spent

        return wait


def _thread() -> ThreadPoolExecutor:
    """Return a pool of one thread with its own current directory, since the run's files have relative names."""
    return ThreadPoolExecutor(1, initializer=own_directory)


@contextmanager
def unheard() -> Iterator[None]:
    """Return a context without warnings of failed rewards, for samples that are not trained on."""
    LOGGER.disabled = True
    try:
        yield
    finally:
        LOGGER.disabled = False


def score(rewards: Sequence[Reward], samples: Samples, rows: Sequence[Row], one_group: bool = True) -> Scores:
    """Score samples, wait, and return the scores; see `Scorer`."""
    with Scorer(rewards) as scorer:
        return scorer.submit(samples, rows, one_group)()


@torch.no_grad()
def _time_reward(
    reward: Reward,
    samples: Samples,
    rows: Sequence[Row],
    *,
    one_group: bool,
    apart: bool,
    ready: torch.cuda.Event | None,
    failures: Failures,
) -> tuple[torch.Tensor, float]:
    started = time.perf_counter()
    apply = partial(_apply, reward, samples, rows, one_group=one_group, apart=apart, failures=failures)
    if ready is None or not isinstance(samples, torch.Tensor | Films):
        return apply(), time.perf_counter() - started
    stream = torch.cuda.Stream(tensors(samples)[0].device)
    stream.wait_event(ready)
    with torch.cuda.stream(stream):
        values = apply()
    stream.synchronize()  # so that the memory of the samples can be reused
    return values, time.perf_counter() - started


def _apply(
    reward: Reward, samples: Samples, rows: Sequence[Row], *, one_group: bool, apart: bool, failures: Failures
) -> torch.Tensor:
    """Return the values (B,) of a reward: NaN for samples that it does not apply to, infinity for lost samples.

    Samples that are not finite are lost without a call of the reward, which could give them any number, even the best.
    """
    applies = [reward.applies(row.columns) for row in rows]
    finite = [True] * len(rows)
    if isinstance(samples, torch.Tensor | Films):
        finite = torch.stack([part.flatten(1).isfinite().all(1) for part in tensors(samples)]).all(0).tolist()
    asked = [i for i in range(len(rows)) if applies[i] and finite[i]]
    if broken := sum(applies) - len(asked):
        LOGGER.warning(
            "%d of %d samples are not finite and are dropped, unseen by the reward %r", broken, len(rows), reward.name
        )
    values = torch.tensor(
        [torch.inf if a and not f else torch.nan for a, f in zip(applies, finite, strict=True)]
    ).double()
    size = len(asked) if one_group or not reward.group_wise else 1
    for batch in batched(asked, max(1, size)):
        if failures.calls >= SILENT:
            failures.unasked += len(batch)
            values[batch] = torch.inf
        else:
            values[batch] = _attempt(reward, _select(samples, batch), [rows[i] for i in batch], failures, apart=apart)
    return values


def _select(samples: Samples, indices: Sequence[int]) -> Samples:
    if len(indices) == len(samples):
        return samples
    return samples[indices] if isinstance(samples, torch.Tensor | Films) else [samples[i] for i in indices]


def _attempt(reward: Reward, samples: Samples, rows: Sequence[Row], failures: Failures, *, apart: bool) -> torch.Tensor:
    """Call a reward until it succeeds; with `apart`, a call that always fails is made again for each sample alone."""
    prompts = [row.prompt for row in rows]
    columns = {name: [row.columns[name] for row in rows] for name in rows[0].columns}
    attempts = 1 if reward.remote else ATTEMPTS  # a client has its own retries
    for attempt in range(1, attempts + 1):
        try:
            values = reward(samples, prompts, columns)
            failures.calls = 0
            failures.scored, failures.odd = failures.scored + len(rows), failures.odd + int(values.isinf().sum())
            return values
        except (Exception, SystemExit) as error:  # a plug-in may raise anything; the last error is reported
            if attempt == attempts and is_out_of_memory(error):  # before, the model may have used the memory
                raise OutOfMemory("rewards", error, f"the reward {reward.name!r}") from error
            failures.calls = failures.calls + 1 if isinstance(error, NoAnswer) else 0
            problem = describe_error(error, reward.function)
            time.sleep(0.1 * (attempt - 1))
    values = torch.full((len(prompts),), torch.inf, dtype=torch.float64)
    if apart and len(rows) > 1 and not reward.remote:
        for i, row in enumerate(rows):
            with suppress(Exception, SystemExit):  # of which the last attempt's error tells
                values[i] = reward(_select(samples, [i]), [row.prompt], {k: [v] for k, v in row.columns.items()})[0]
    times, failed = "" if attempts == 1 else f"{attempts} times ", int(values.isinf().sum())
    failures.failed += 1
    if failures.failed > 1:
        failures.further += failed
        return values
    what = "1 sample is" if failed == 1 else f"{failed} samples are"
    LOGGER.warning("the reward %r failed %s(%s); its %s dropped", reward.name, times, problem, what)
    return values


def rewards(uses: Sequence[RewardUse], eval_uses: Sequence[RewardUse] = ()) -> tuple[list[Reward], list[Reward]]:
    """Load a config's training and evaluation rewards.

    Raise RewardError if one is missing, two have the same name, or one of `eval_uses` compares the samples of a group.
    """
    loaded = [
        [
            replace(
                load_reward(use.use, use.weight, use.options, use.name, frames=use.frames, of=use.of),
                only=use.only,
                offset=use.offset,
            )
            for use in part
        ]
        for part in (uses, eval_uses)
    ]
    trained, watched = ([reward.name for reward in part] for part in loaded)
    for name in trained + watched:
        if (trained + watched).count(name) > 1:
            where = ", one in rewards and one in eval_rewards" if name in trained and name in watched else ""
            named = f"two rewards are named {name!r}{where}"
            raise RewardError(f"{named}: leave one out, or give it another name, {{use: ..., name: ...}}")
    for reward in loaded[1]:
        if reward.group_wise:
            raise RewardError(
                f"eval_rewards: {reward} compares the samples of a group, and a held-out prompt has one sample; put it into "
                "rewards, with a low weight"
            )
    return loaded[0], loaded[1]


def check_columns(rewards: Sequence[Reward], prompts: Sequence[Prompt]) -> None:
    """Raise RewardError if a reward needs a column that the first prompt to which it applies does not have."""
    for reward, prompt in pair_with_prompts(rewards, prompts):
        reward.check_columns(prompt.text, prompt.columns)


def pair_with_prompts(rewards: Sequence[Reward], prompts: Sequence[Prompt]) -> Iterator[tuple[Reward, Prompt]]:
    """Yield each reward with the first prompt that it applies to; skip rewards that apply to none."""
    for reward in rewards:
        first = next((prompt for prompt in prompts if reward.applies(prompt.columns)), None)
        if first is not None:
            yield reward, first
