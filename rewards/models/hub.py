"""Whether the model hub may give something, and why it did not: gated, absent or out of reach, with the way out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

PATIENCE = 5.0  # seconds


def may_give(name: str, file: str) -> bool:
    """Whether a file of a model is in the cache, or the hub answers.

    It is asked once; its library would ask six times, for half a minute.

    Args:
        name: its hub id.
    """
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, file), str) or answers()


@cache
def answers() -> bool:
    """Whether the hub may be asked and can be reached; it is asked once."""
    import httpx2 as httpx  # the hub's library
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        httpx.head(constants.ENDPOINT, timeout=PATIENCE)
    except httpx.TransportError:
        return False
    return True


def why(error: BaseException, name: str, instead: str, dataset: bool = False) -> str | None:
    """Why something could not be had from the hub, to be said after its name; None if it is not for one of these reasons.

    Libraries wrap what the hub said, so all that lies below an error is looked at.

    Args:
        name: its hub id.
        instead: what may be done without the hub, as `set model.path to a folder`.
        dataset: whether it is a data set, not a model.
    """
    import httpx2 as httpx  # the hub's library
    from huggingface_hub import constants, errors

    below = list(_below(error))
    if _is_any(below, errors.GatedRepoError):
        kind = "its terms" if dataset else "its licence"
        return f"is gated: accept {kind} on its page at the model hub, then log in with `hf auth login`"
    if _is_any(below, errors.RepositoryNotFoundError):
        return "is not at the model hub, or is private: check the name, or log in with `hf auth login`"
    if _is_any(
        below, errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, ConnectionError, httpx.TransportError
    ):
        cause = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "it cannot be reached"
        command = f"hf download {'--repo-type dataset ' if dataset else ''}{name}"
        once = f"download it once with `{command}`, or " if "/" in name else ""
        return (
            f"could not be loaded from the model hub: {cause}, and the cache lacks it or a part of it; {once}{instead}"
        )
    return None


def _below(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_any(errors: Sequence[BaseException], *kinds: type[BaseException]) -> bool:
    return any(isinstance(error, kinds) for error in errors)
