"""Work that the training does not wait for: checkpoints, samples and galleries are written while iterations go on."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

LOGGER = logging.getLogger(__name__)


class Background:
    """Jobs in a thread, one after the other in the order in which they were given.

    Where one fails, those after it are not run, and who gives the next or waits gets its error. What a job reads must not
    change meanwhile: give it copies of tensors that are trained.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="background")  # its thread starts with the first job
        self._jobs: deque[Future[None]] = deque()
        self._failed = False

    def submit(self, job: Callable[[], object]) -> Future[None]:
        """Run a job after those given before; returns what `wait` can wait for.

        Raises:
            Exception: what an earlier one raised.
        """
        while self._jobs and self._jobs[0].done():
            self._jobs.popleft().result()
        self._jobs.append(self._pool.submit(self._run, job))
        return self._jobs[-1]

    def wait(self, last: Future[None] | None = None) -> None:
        """Wait until all jobs are done.

        Args:
            last: that is waited for, if not all of them are.

        Raises:
            Exception: what one of them raised; it is raised once.
        """
        while self._jobs and (last is None or last in self._jobs):
            self._jobs.popleft().result()

    def __enter__(self) -> Background:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Wait for all jobs; where an error is on its way, theirs is a warning."""
        try:
            self.wait()
        except Exception as failed:
            if kind is None:
                raise
            LOGGER.warning("what was written beside the training failed, too: %s: %s", type(failed).__name__, failed)
        finally:
            self._jobs.clear()
            self._pool.shutdown()

    def _run(self, job: Callable[[], object]) -> None:
        if self._failed:
            return
        try:
            job()
        except BaseException:
            self._failed = True
            raise
