"""Background jobs, which write checkpoints, samples and galleries while training continues."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Background:
    """A queue of jobs that one thread runs in the order of submission.

    A failed job does not cancel later ones: a checkpoint must not be lost because a picture failed. The next `submit`
    or `wait` raises the first error. Jobs must read copies of tensors that are being trained.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="background")  # its thread starts with the first job
        self._jobs: deque[Future[None]] = deque()
        self._error: BaseException | None = None

    def submit(self, job: Callable[[], object]) -> Future[None]:
        """Queue a job and return its future for `wait`; raise the first error of earlier jobs."""
        while self._jobs and self._jobs[0].done():
            self._jobs.popleft()
        self._raise()
        self._jobs.append(self._pool.submit(self._run, job))
        return self._jobs[-1]

    def wait(self, last: Future[None] | None = None) -> None:
        """Wait for all jobs, or until job `last` is done; raise the first error so far."""
        while self._jobs and (last is None or last in self._jobs):
            self._jobs.popleft().result()
        self._raise()

    def __enter__(self) -> Background:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *trace: object) -> None:
        """Wait for all jobs (Ctrl-C cancels them) and raise their first error, or log it if the context itself failed."""
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            return self._pool.shutdown(wait=False, cancel_futures=True)
        try:
            self.wait()
        except Exception as failed:
            if kind is None:
                raise
            if failed is not error:
                logging.getLogger(__name__).warning(
                    "writing in the background failed, too: %s: %s", type(failed).__name__, failed
                )
        finally:
            self._pool.shutdown()

    def _run(self, job: Callable[[], object]) -> None:
        try:
            job()
        except BaseException as error:
            self._error = self._error or error

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
