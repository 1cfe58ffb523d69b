"""Section of an external rollout engine (`run.engine`)."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator

from flowgrpo.schema.base import Positive, Strict


class Engine(Strict):
    """A server that rolls out: SGLang-Diffusion (`flowgrpo_engine.flow`), or a text server that returns step maps
    (`flowgrpo_engine.text`)."""

    url: Annotated[list[str], Field(min_length=1)] = ["http://127.0.0.1:30000"]
    """Address of the engine; for several engines a list, and they take turns."""
    samples: int | None = Field(None, ge=1)
    """Largest number of samples in one request; null: all samples of a group on this process."""
    requests: int = Field(4, ge=1, le=256)
    """Number of requests that are under way at once."""
    timeout: Positive = 600.0
    """Seconds after which a request fails, all its retries included."""
    retries: int = Field(2, ge=0)
    """Number of further rounds over the engines if none could be reached; the pause doubles each time."""
    token_env: str | None = None
    """Environment variable with the engine's API key; null: no key."""
    truncate: float = Field(2.0, ge=1)
    """Upper bound of the weight that corrects the mismatch: probability of an edge (in the form of
    algorithm.kernel.log_prob) or token under the trained policy / under the engine. With 1, weights only shrink."""
    log_probs: bool = False
    """Ask a text engine for the log-probability of each token, to measure and correct the mismatch. An engine of a flow
    model always returns them."""
    folder: str | None = None
    """Folder for the adapters that the engine loads; it must see them under the same path. null: engine in the run's
    folder."""
    untold: list[str] = []
    """Arguments of model.call that are not sent, because the engine was started with them (max_sequence_length)."""
    options: dict[str, Any] = {}
    """Further sampling parameters, sent to the engine unchanged."""

    @field_validator("url", mode="before")
    @classmethod
    def _as_list(cls, written: Any) -> Any:
        return [written] if isinstance(written, str) else written
