"""Work that the training does not wait for: checkpoints, samples and galleries are written while iterations go on."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

LOGGER = logging.getLogger(__name__)


class Background:
    """Jobs in a thread, one after the other in the order in which they were given.

    Where one fails, those after it are run all the same, for a checkpoint among them should not be lost with a picture; who
    gives the next or waits gets the first error. What a job reads must not change meanwhile: give it copies of tensors that
    are trained.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="background")  # its thread starts with the first job
        self._jobs: deque[Future[None]] = deque()
        self._error: BaseException | None = None

    def submit(self, job: Callable[[], object]) -> Future[None]:
        """Run a job after those given before; returns what `wait` can wait for.

        Raises:
            Exception: what an earlier one raised.
        """
        while self._jobs and self._jobs[0].done():
            self._jobs.popleft()
        self._raise()
        self._jobs.append(self._pool.submit(self._run, job))
        return self._jobs[-1]

    def wait(self, last: Future[None] | None = None) -> None:
        """Wait until all jobs are done.

        Args:
            last: that is waited for, if not all of them are.

        Raises:
            Exception: what the first of them raised that did, whenever that was.
        """
        while self._jobs and (last is None or last in self._jobs):
            self._jobs.popleft().result()
        self._raise()

    def __enter__(self) -> Background:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *trace: object) -> None:
        """Wait for all jobs; where an error is on its way, theirs is a warning. Ctrl-C leaves out those not begun."""
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            return self._pool.shutdown(wait=False, cancel_futures=True)
        try:
            self.wait()
        except Exception as failed:
            if kind is None:
                raise
            if failed is not error:
                LOGGER.warning(
                    "what was written beside the training failed, too: %s: %s", type(failed).__name__, failed
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
