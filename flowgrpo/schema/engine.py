"""Section of an external rollout engine (`run.engine`)."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator

from flowgrpo.schema.base import Positive, Strict


class Engine(Strict):
    """A server that rolls out: SGLang-Diffusion (`flowgrpo_engine.flow`), or a text server that returns step maps
    (`flowgrpo_engine.text`)."""

    url: Annotated[list[str], Field(min_length=1)] = ["http://127.0.0.1:30000"]
    """Address of the engine, or a list of several, which take turns."""
    samples: int | None = Field(None, ge=1)
    """Most samples of a prompt in one request; null: all that this process has of a group."""
    requests: int = Field(4, ge=1, le=256)
    """Requests that are under way at once."""
    timeout: Positive = 600.0
    """Seconds after which a request has failed, all its tries included."""
    retries: int = Field(2, ge=0)
    """Further rounds over the engines when none could be reached, each after twice the pause."""
    token_env: str | None = None
    """Environment variable with the engine's API key; null: it wants none."""
    truncate: float = Field(2.0, ge=1)
    """Most that an edge weighs by the ratio of the trained policy's probability to the engine's, in the form of
    algorithm.kernel.log_prob, or a token by that of its own; 1 only takes weight away."""
    log_probs: bool = False
    """Ask an engine of texts for the log-probability of each token, by which the mismatch is told and corrected. One of a
    flow model always tells them."""
    folder: str | None = None
    """Folder for the adapters that are pushed, which the engine sees under the same path; null: engine in the run's."""
    untold: list[str] = []
    """Arguments of model.call that the engine is not told, because it was started with the same (max_sequence_length)."""
    options: dict[str, Any] = {}
    """Further sampling parameters, which the engine gets as they are."""

    @field_validator("url", mode="before")
    @classmethod
    def _as_list(cls, written: Any) -> Any:
        return [written] if isinstance(written, str) else written
