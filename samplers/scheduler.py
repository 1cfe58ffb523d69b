"""`FlowSDEScheduler`: a stochastic scheduler for any diffusers flow pipeline, usable without the rest of this library.

    from samplers import FlowSDEScheduler
    pipe.scheduler = FlowSDEScheduler.from_config(pipe.scheduler.config, kernel="cps", noise_level=0.8)
    image = pipe("a red circle").images[0]
    [step.log_prob for step in pipe.scheduler.history]

It keeps the parent's table of sigmas bit for bit, steps by one of our kernels, and records its steps. `restrict` limits
the next calls of the pipeline to a slice of the schedule, so that a stock pipeline can be used as a policy.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.configuration_utils import register_to_config
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteSchedulerOutput
from diffusers.utils.torch_utils import randn_tensor

from samplers.kernels import KERNELS, LOG_PROBS, ODE, Kernel, default_log_prob, log_prob, transition
from samplers.levels import DEFAULT_LEVELS


class Timesteps(torch.Tensor):
    """All timesteps of a run; iteration yields only those of `steps`. Slices and results of operations are plain tensors.

    So a pipeline that finds its last step by index, or looks one step ahead, reads the same values as in a whole run.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch documents
    steps: range

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.as_subclass(torch.Tensor)[self.steps.start : self.steps.stop])


@dataclass(frozen=True)
class StepRecord:
    """One recorded step: tensors (B, ...), `log_prob` (B,), and numbers: the sigmas at its begin and end, and its std."""

    sigma: float
    sigma_next: float
    sample: torch.Tensor
    velocity: torch.Tensor
    next_sample: torch.Tensor
    mean: torch.Tensor
    std: float
    log_prob: torch.Tensor


class FlowSDEScheduler(FlowMatchEulerDiscreteScheduler):
    """Flow matching with a choice of kernel; every argument of the parent has the parent's meaning.

    The exception is `stochastic_sampling`, which would be a kernel of its own: it is accepted, but `kernel` decides.
    With `invert_sigmas` the pipeline's time runs from 0 (noise) to 1 (data), and its velocity points to the data. The
    pipeline still sees such a table, but steps, `history` and `noise_levels` use sigmas from 1 (noise) to 0 (data).

    Args:
        kernel: `ode`, `flow_sde`, `dance_sde`, `cps`, `ddim_sde` or `manifold` (see `samplers.kernels`).
        noise_level: the kernel's level; None: the published one (`samplers.levels`).
        log_prob: form of the log-probability, a key of `samplers.kernels.LOG_PROBS`; None: the kernel's default.

    Attributes:
        history: the `StepRecord`s since the last `set_timesteps`, or since the last `restrict` once that was used.
            Copies of the scheduler, which pipelines of two modalities make, share it.
        noise_levels: the whole table as sigmas that descend to 0.
        generator: source of the noise if the pipeline passes none to `step`; None: torch's global one.
    """

    _begin_index: Any  # of the parent; None before a run
    _step_index: Any

    @register_to_config
    def __init__(
        self,
        num_train_timesteps: int = 1000,
        shift: float = 1.0,
        use_dynamic_shifting: bool = False,
        base_shift: float | None = 0.5,
        max_shift: float | None = 1.15,
        base_image_seq_len: int = 256,
        max_image_seq_len: int = 4096,
        invert_sigmas: bool = False,
        shift_terminal: float | None = None,
        use_karras_sigmas: bool = False,
        use_exponential_sigmas: bool = False,
        use_beta_sigmas: bool = False,
        time_shift_type: Literal["exponential", "linear"] = "exponential",
        stochastic_sampling: bool = False,
        kernel: str = "flow_sde",
        noise_level: float | None = None,
        log_prob: str | None = None,
        last_step_ode: bool = True,
    ):
        if kernel not in KERNELS:
            raise ValueError(f"kernel {kernel!r} is not one of {', '.join(KERNELS)}")
        if log_prob not in (None, *LOG_PROBS):
            raise ValueError(f"log_prob {log_prob!r} is not one of {', '.join(LOG_PROBS)}")
        # Passed one by one: with **kwargs the config would have the values, but the parent would use its defaults.
        super().__init__(
            num_train_timesteps=num_train_timesteps,
            shift=shift,
            use_dynamic_shifting=use_dynamic_shifting,
            base_shift=base_shift,
            max_shift=max_shift,
            base_image_seq_len=base_image_seq_len,
            max_image_seq_len=max_image_seq_len,
            invert_sigmas=invert_sigmas,
            shift_terminal=shift_terminal,
            use_karras_sigmas=use_karras_sigmas,
            use_exponential_sigmas=use_exponential_sigmas,
            use_beta_sigmas=use_beta_sigmas,
            time_shift_type=time_shift_type,
            stochastic_sampling=stochastic_sampling,
        )
        level = DEFAULT_LEVELS[kernel] if noise_level is None else noise_level
        self.kernel = Kernel(kernel, level, log_prob or default_log_prob(kernel))
        self.history: list[StepRecord] = []
        self.recording = True
        self.generator: torch.Generator | None = None
        self._steps: range | tuple[float, ...] | torch.Tensor | None = None
        self._directed = False
        self._landing: list[torch.Tensor] = []
        self._onward: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._first = 0  # index in `noise_levels` of the first sigma of the slice
        self._table = (self.sigmas, self.timesteps)
        self._asked: tuple[Any, ...] | None = None  # arguments of the last table
        self._given = self._table
        self.noise_levels = self.sigmas
        self._known: tuple[torch.Tensor | None, list[float]] = (None, [])

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None = None, return_unused_kwargs: bool = False, **kwargs):
        """Build from a config as diffusers does, with `flow_shift` as `shift`; raise ValueError unless it is for a flow."""
        if config is not None and config.get("prediction_type", "flow_prediction") != "flow_prediction":
            raise ValueError(
                f"the scheduler predicts {config['prediction_type']!r}, not a flow: flow kernels need a model trained by "
                "flow matching"
            )
        if config is not None and config.get("sigma_data") is not None:
            raise ValueError("the scheduler has a sigma_data: it runs a variance-exploding process (EDM), not a flow")
        if config is not None and config.get("flow_shift") is not None:
            known = inspect.signature(cls.__init__).parameters
            config = {"shift": config["flow_shift"], **{k: v for k, v in config.items() if k in known}}
        return super().from_config(config, return_unused_kwargs, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> FlowSDEScheduler:
        copied = copy.copy(self)  # shares the history; other attributes are replaced, never changed in place
        memo[id(self)] = copied
        return copied

    def restrict(
        self,
        steps: range | tuple[float, ...] | torch.Tensor | None,
        landing: Sequence[torch.Tensor] = (),
        onward: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """Restrict the next calls to a part of the schedule, until the next `restrict`.

        Args:
            steps: a range of step indices of the pipeline's own table; a tuple of float32 sigmas instead of that table;
                a tensor (B,) of float32 sigmas, for one step of B rows, each from its own sigma, which `onward` takes;
                or None for the whole table. With an empty range the pipeline only prepares, or only decodes.
            landing: results that the next calls of `step` return, one each, instead of taking a step.
            onward: returns the result of each call of `step`, given its velocity, instead of taking a step.

        Raise ValueError for sigmas of rows without `onward`.
        """
        if isinstance(steps, torch.Tensor) and onward is None:
            raise ValueError("steps: rows at their own sigmas have no common step to take, so they need `onward`")
        self._steps, self._directed, self._landing, self._onward = steps, True, list(landing), onward
        self.history.clear()

    @property
    def lands(self) -> bool:
        """Return whether the next call of `step` returns a given result instead of taking a step."""
        return bool(self._landing)

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: str | torch.device | None = None,
        sigmas: list[float] | None = None,
        mu: float | None = None,
        timesteps: list[float] | None = None,
    ) -> None:
        """Set the parent's table, cut to the slice of `restrict`.

        Then `timesteps` has only the slice, but `sigmas` goes on to the end of the table. So a pipeline that reads
        `sigmas[i]` by its loop counter, or `sigmas[-1]`, reads the right values.
        """
        self._set_table(num_inference_steps, device, sigmas, mu, timesteps)
        if not self._directed:
            self.history.clear()
        if isinstance(self._steps, tuple):
            levels = torch.tensor(self._steps, dtype=torch.float32, device=device)
            self.sigmas = self._inverted(levels)
            self.timesteps = self.sigmas[:-1] * self.config.num_train_timesteps
        elif isinstance(self._steps, torch.Tensor):
            self.timesteps = self._times_of_rows(self._steps.to(self.sigmas.device))[None]
            self.sigmas = torch.full((2,), torch.nan, device=device)  # NaN shows if a pipeline reads one
        self.noise_levels = self._inverted(self.sigmas)
        self._first, self._table = 0, (self.sigmas, self.timesteps)
        if isinstance(self._steps, range):
            self._first = self._steps.start
            self.sigmas = self.sigmas[self._steps.start :]
            self.timesteps = self.timesteps[self._steps.start : self._steps.stop]
        if self._steps is not None:
            self._step_index = 0
        self.num_inference_steps = len(self.timesteps)

    def _times_of_rows(self, levels: torch.Tensor) -> torch.Tensor:
        """Return the timesteps (B,) of sigmas (B,): those of the table for its own sigmas."""
        same = levels[:, None] == self._inverted(self.sigmas)[:-1]
        own = self.timesteps[same.int().argmax(1)]
        return torch.where(same.any(1), own, self._inverted(levels) * self.config.num_train_timesteps)

    def _inverted(self, sigmas: torch.Tensor) -> torch.Tensor:
        """Return the pipeline's sigmas for noise levels, or noise levels for the pipeline's sigmas."""
        return 1 - sigmas if self.config.invert_sigmas else sigmas

    def _set_table(self, num_inference_steps, device, sigmas, mu, timesteps) -> None:
        lists = tuple(None if values is None else tuple(map(float, values)) for values in (sigmas, timesteps))
        asked = (num_inference_steps, device, lists, mu, self.shift)
        if self._asked == asked:
            self.sigmas, self.timesteps = self._given
            self._step_index = self._begin_index = None
            return
        super().set_timesteps(num_inference_steps, device, sigmas=sigmas, mu=mu, timesteps=timesteps)
        self._asked, self._given = asked, (self.sigmas, self.timesteps)

    def recut(self, cut: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Let a pipeline drop the first steps of the table, as image-to-image does; return the timesteps to iterate.

        `cut` takes the timesteps of the whole table and returns its end, the part that the pipeline keeps. Slices of
        `restrict` count from the first kept step. Sigmas given to `restrict` are not cut.
        """
        self.sigmas, self.timesteps = self._table
        kept = self.timesteps if isinstance(self._steps, (tuple, torch.Tensor)) else cut(self.timesteps)
        begin = len(self.timesteps) - len(kept)
        self.sigmas, self.timesteps, self.noise_levels = self.sigmas[begin:], kept, self.noise_levels[begin:]
        self._first, self._begin_index, self._step_index = 0, 0, None
        self.num_inference_steps = len(kept)
        if not isinstance(self._steps, range):
            return kept
        sliced = kept.as_subclass(Timesteps)
        sliced.steps = self._steps
        return sliced

    def _floats(self) -> list[float]:
        if self._known[0] is not self.noise_levels:
            self._known = self.noise_levels, self.noise_levels.tolist()
        return self._known[1]

    def _init_step_index(self, timestep: float | torch.Tensor) -> None:
        super()._init_step_index(timestep)
        if isinstance(self._steps, range):
            self._step_index += self._steps.start

    def scale_model_input(self, sample: torch.Tensor, timestep: float | torch.Tensor | None = None) -> torch.Tensor:
        """Return the sample unchanged; pipelines for several kinds of scheduler call this."""
        return sample

    def _moving_tokens(self, times: torch.Tensor, timestep: float | torch.Tensor, count: int) -> torch.Tensor:
        """Return the indices (n,) of the tokens at `timestep`; raise ValueError unless all others are at 0 in every row."""
        moving = times[0] > 0
        if (times != torch.where(moving, timestep, 0).to(times)).any():
            raise ValueError(
                "per_token_timesteps: a condition of partial strength moves at another time than the rest of its sample, "
                "which no kernel here does; give conditions of strength 1"
            )
        return moving.expand(count).nonzero().squeeze(1)

    def step(
        self,
        model_output: torch.Tensor,
        timestep: float | torch.Tensor,
        sample: torch.Tensor,
        s_churn: float = 0.0,
        s_tmin: float = 0.0,
        s_tmax: float = float("inf"),
        s_noise: float = 1.0,
        generator: torch.Generator | None = None,
        per_token_timesteps: torch.Tensor | None = None,
        return_dict: bool = True,
    ) -> FlowMatchEulerDiscreteSchedulerOutput | tuple[torch.Tensor]:
        """Take a step of the kernel, and append a `StepRecord` to `history` if `recording`.

        The next sample is rounded to the model's dtype before its log-probability is computed, so a replay scores
        exactly the stored sample. Sigmas are looked up by a step index that each call advances. `timestep` only finds
        the first index, and not even that after `restrict` to a slice or with a begin index. `s_churn` to `s_noise`
        have no effect, as in the parent.

        With `per_token_timesteps` (B, T) the model's output points to the data. Tokens at time 0 are conditions: they
        do not move and are not recorded. Raise ValueError if a token's time is neither 0 nor that of the step.
        """
        if per_token_timesteps is not None:
            moving = self._moving_tokens(per_token_timesteps, timestep, sample.shape[1])
            moved = self.step(
                -model_output[:, moving], timestep, sample[:, moving], generator=generator, return_dict=False
            )[0]
            following = sample.clone()
            following[:, moving] = moved.to(sample.dtype)
            return FlowMatchEulerDiscreteSchedulerOutput(prev_sample=following) if return_dict else (following,)
        if self._step_index is None:
            self._init_step_index(timestep)
        levels, index = self._floats(), self._first + self._step_index
        sigma, sigma_next = levels[index], levels[index + 1]
        velocity = -model_output if self.config.invert_sigmas else model_output
        if self._onward is not None:
            following = _promoted(self._onward(velocity), model_output)
            self._step_index += 1
            return FlowMatchEulerDiscreteSchedulerOutput(prev_sample=following) if return_dict else (following,)
        kernel = ODE if self.config.last_step_ode and sigma_next == 0 else self.kernel
        kept = sample.clone() if self.recording else sample  # some pipelines overwrite `sample` with the next one
        (mean,), std = transition(kernel, (sample,), (velocity,), sigma, sigma_next, levels[1])
        following = mean
        if kernel.stochastic:
            noise = randn_tensor(mean.shape, generator=generator or self.generator, device=mean.device)
            following = mean.detach() + std * noise
        following = _promoted(self._landing.pop(0), model_output) if self._landing else following.to(model_output.dtype)
        if self.recording:
            # A step without noise has no density, so its log_prob is 0.
            scored = (
                log_prob((following,), (mean,), std, kernel.log_prob)
                if kernel.stochastic
                else mean.new_zeros(len(mean))
            )
            self.history.append(StepRecord(sigma, sigma_next, kept, velocity, following, mean, std, scored))
        self._step_index += 1
        return FlowMatchEulerDiscreteSchedulerOutput(prev_sample=following) if return_dict else (following,)


def _promoted(following: torch.Tensor, model_output: torch.Tensor) -> torch.Tensor:
    """Return a given state in the dtype of a step's result, or in its own if that is finer."""
    return following.to(torch.promote_types(following.dtype, model_output.dtype))
