"""Find out if the model hub can deliver a file, and explain a failure: gated, missing or unreachable."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path

PATIENCE = 60.0
_answers: list[tuple[float, bool]] = []  # when the hub was asked last, and whether it answered
_given: list[bool] = []  # HF_HUB_OFFLINE before each open context of `cache_if_unreachable`


def can_load(name: str, file: str) -> bool:
    """Return True if a file of the hub id `name` is in the cache, or the hub answers."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, file), str) or is_reachable()


def is_reachable() -> bool:
    """Return True if the hub may be asked and answers within HF_HUB_ETAG_TIMEOUT, 10 s by default.

    A hub that has answered is not asked again, one that has not only after `PATIENCE` seconds.
    """
    now = time.monotonic()
    if not _answers or not (_answers[-1][1] or now - _answers[-1][0] < PATIENCE):
        _answers[:] = [(now, _ask())]
    return _answers[-1][1]


def _ask() -> bool:
    import httpx2 as httpx  # the hub's library
    from huggingface_hub import constants, errors, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    answered = threading.Event()

    def ask() -> None:
        with suppress(httpx.HTTPError, errors.OfflineModeIsEnabled):  # the second if it goes on after the wait
            get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT, follow_redirects=False)
            answered.set()

    asking = threading.Thread(target=ask, daemon=True)  # each address of the hub has that timeout, and DNS has its own
    asking.start()
    asking.join(constants.HF_HUB_ETAG_TIMEOUT)
    return answered.is_set()


@contextmanager
def cache_if_unreachable(place: str) -> Iterator[None]:
    """Return a context in which the hub's libraries read only their cache, if the hub does not answer.

    Otherwise they would try six times for each file, and print each try. Where `place` is a local path, the hub is not
    asked.
    """
    from huggingface_hub import constants

    offline = constants.HF_HUB_OFFLINE or not (Path(place).exists() or is_reachable())
    _given.append(constants.HF_HUB_OFFLINE)
    constants.HF_HUB_OFFLINE = offline
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = _given.pop()


def explain_failure(error: BaseException, name: str, instead: str, dataset: bool = False) -> str | None:
    """Return why a download from the hub failed, to follow `name` in a sentence; None if the error has another cause.

    Libraries wrap the hub's errors, so the whole chain of causes is searched. `instead` says how to do without the hub.
    Where `name` begins with a local folder, the nearest entry of that folder is named.
    """
    import httpx2 as httpx  # the hub's library
    from huggingface_hub import constants, errors

    chain = [error]
    while (below := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(below)

    def has(*kinds: type[BaseException]) -> bool:
        return any(isinstance(each, kinds) for each in chain)

    if has(errors.GatedRepoError):
        kind = "its terms" if dataset else "its licence"
        return f"is gated: accept {kind} on its page at the model hub, then log in with `hf auth login` or set HF_TOKEN"
    unreached = (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, ConnectionError, httpx.TransportError)
    if not has(errors.RepositoryNotFoundError, *unreached):
        return None
    folder = Path(name).parent
    beside = [path.name for path in folder.iterdir()] if "/" in name and folder.is_dir() else []
    if close := get_close_matches(Path(name).name, beside, 1):
        return f"is not in the folder {folder}, did you mean {str(folder / close[0])!r}?"
    if has(errors.RepositoryNotFoundError):
        return "is not at the model hub, or is private: check the name, or log in with `hf auth login` or set HF_TOKEN"
    cause = "HF_HUB_OFFLINE is set" if (*_given, constants.HF_HUB_OFFLINE)[0] else "it cannot be reached"
    command = f"hf download {'--repo-type dataset ' if dataset else ''}{name}"
    once = f"download it once with `{command}`, or " if "/" in name else ""
    lack = f"{cause}, and the cache lacks it or a part of it"
    return f"could not be loaded from the model hub: {lack}; {once}{instead}"
