"""Find out if the model hub can deliver a file, and explain a failure: gated, missing or unreachable."""

from __future__ import annotations

from functools import cache

TIMEOUT = 5.0  # seconds


def can_load(name: str, file: str) -> bool:
    """Return True if a file of the hub id `name` is in the cache, or the hub answers."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, file), str) or is_reachable()


@cache
def is_reachable() -> bool:
    """Return True if the hub may be asked and can be reached; cached, since its library tries six times for each file."""
    import httpx2 as httpx  # the hub's library
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        httpx.head(constants.ENDPOINT, timeout=TIMEOUT)
    except httpx.TransportError:
        return False
    return True


def explain_failure(error: BaseException, name: str, instead: str, dataset: bool = False) -> str | None:
    """Return why a download from the hub failed, to follow `name` in a sentence; None if the error has another cause.

    Libraries wrap the hub's errors, so the whole chain of causes is searched. `instead` says how to do without the hub.
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
    if has(errors.RepositoryNotFoundError):
        return "is not at the model hub, or is private: check the name, or log in with `hf auth login` or set HF_TOKEN"
    if has(errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, ConnectionError, httpx.TransportError):
        cause = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "it cannot be reached"
        command = f"hf download {'--repo-type dataset ' if dataset else ''}{name}"
        once = f"download it once with `{command}`, or " if "/" in name else ""
        lack = f"{cause}, and the cache lacks it or a part of it"
        return f"could not be loaded from the model hub: {lack}; {once}{instead}"
    return None
