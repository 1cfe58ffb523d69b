"""The axes of a method for masked-diffusion language models: every choice, with its options and their defaults.

A choice is a small configuration and the one call that builds what it names; the baseline is that of flow models.

 - decoder: how answers are made, by `flowgrpo.mdlm.decoding.decoders`;
 - schedule: whether the decoder's numbers are actions of their own;
 - hints: what is given of a known solution where a whole group fails;
 - likelihood: which views of an answer its log-probability is estimated from;
 - objective: how the policy moves;
 - aggregation: what a token weighs.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding.decode import Decoder
from flowgrpo.mdlm.decoding.decoders import DECODERS, build
from flowgrpo.mdlm.methods import actions, objectives, views
from flowgrpo.mdlm.methods.aggregation import AGGREGATIONS, Aggregate
from flowgrpo.mdlm.methods.answers import Answers, Scope
from flowgrpo.schema.base import Choice, Count, Positive, Rate, Strict, named
from flowgrpo.schema.lazy import lazy
from flowgrpo.training.baseline import BASELINES

if TYPE_CHECKING:
    from flowgrpo.mdlm.decoding.predictor import MaskPredictor
    from flowgrpo.mdlm.methods import schedule
    from flowgrpo.mdlm.methods.schedule import SchedulePolicy
else:
    schedule = lazy("flowgrpo.mdlm.methods.schedule")

Pair = Annotated[list[Positive], Field(min_length=2, max_length=2)]


class Decoding(Choice):
    """A decoder of the table by `name`, with any of its words and numbers replaced; a plain word is its name.

    See `flowgrpo.mdlm.decoding.decoders.build`, which checks them. Without `steps` it commits one token a step.
    """

    name: str = "low_confidence"
    proposal: str | dict[str, Any] | None = None
    scorer: Any = None
    modifiers: Any = None
    committer: Any = None
    region: Any = None
    steps: Any = None
    cfg_scale: Any = None
    suppressed: Any = None
    eos_early_stop: Any = None
    cache: Any = None

    @model_validator(mode="before")
    @classmethod
    def _word(cls, written: Any) -> Any:
        return {"name": written} if isinstance(written, str) else written

    def build(
        self,
        length: int,
        eos_id: int | None,
        place: str,
        predictor: MaskPredictor | None = None,
        block_size: int | None = None,
    ) -> Decoder:
        """The decoder for answers of some length.

        Args:
            place: where it was written, for errors.
            predictor: the model; None if it is not loaded yet.
            block_size: tokens of a block of a block-causal model that is not loaded yet.

        Raises:
            InputError: a word or an option is unknown, or they do not fit together.
        """
        written = {key: value for key, value in self._written().items() if value is not None}
        try:
            return build(written, length, eos_id, predictor, block_size)
        except InputError as error:
            raise InputError(str(error).replace("decoder", place, 1)) from None

    def _written(self) -> dict[str, Any]:
        return self.model_dump()


class Rollouts(Decoding):
    """The decoder of training, which draws at temperature 1 unless another is given."""

    def _written(self) -> dict[str, Any]:
        proposal = {"name": self.proposal} if isinstance(self.proposal, str) else self.proposal or {}
        return {**super()._written(), "proposal": {"temperature": 1.0, **proposal}}


class Unscheduled(Choice):
    """The decoder's numbers stay as they are."""

    name: Literal["none"] = "none"

    def policy(self, steps: int) -> None:
        """There is none."""

    def check(self, decoder: Decoder, steps: int) -> None:
        """Nothing can be wrong."""


class LearnedSchedule(Choice):
    """Co-GRPO (arXiv 2512.22288), reconstructed: numbers of the decoder are drawn, and trained by the same advantage.

    `start` has the mean of each to begin with, of all steps or of each: ratio, temperature, selection_temperature,
    cfg_scale. `std` is that of their logits.
    """

    name: Literal["learned"] = "learned"
    start: Annotated[dict[str, float | list[float]], Field(min_length=1)] = {"temperature": 0.8}
    std: Positive = 0.3
    learning_rate: Positive = 0.03

    def policy(self, steps: int) -> SchedulePolicy:
        """The distribution of the numbers, for decodes of at most so many steps."""
        return schedule.SchedulePolicy(self.start, steps, self.std)

    def check(self, decoder: Decoder, steps: int) -> None:
        """See that the decoder has these numbers, and that each lies between its bounds.

        Raises:
            InputError: it has not, or one does not.
        """
        actions.check_start(self.start, steps)
        for action in self.start:
            actions.check_taken(action, decoder)


class NoHints(Choice):
    """Every answer is the model's own."""

    name: Literal["none"] = "none"


class Inpainting(Choice):
    """IGPO (arXiv 2509.10396): a group that fails is answered once more, with parts of a known solution given.

    An answer succeeds where `reward`, a name among `rewards`, is at least `success`; it needs no name where there is one.
    Of those that then succeed, as many as a share `replace` of the group take the place of failed ones. The solution is in
    the `column`; `chunk`, `share`, `tail` and `stretch` as in `mdlm.methods.hints`; without a `chunk` or a `tail` it
    is the paper's part of the length, 5 to 10 and 30 of 256. Of the tokens given, the share `entropy` whose prediction is
    least certain is trained on.
    """

    name: Literal["inpainting"] = "inpainting"
    column: str = "completion"
    reward: str | None = None
    success: float = 1.0
    replace: Annotated[float, Field(gt=0, le=1)] = 0.5
    chunk: Annotated[list[Count], Field(min_length=2, max_length=2)] | None = None
    share: Annotated[list[Rate], Field(min_length=2, max_length=2)] = [0.2, 0.6]
    tail: Annotated[int, Field(ge=0)] | None = None
    stretch: float = Field(1.5, ge=1)
    entropy: Rate = 0.2

    @model_validator(mode="after")
    def _ordered(self) -> Inpainting:
        for key in ("chunk", "share"):
            low, high = getattr(self, key) or (0, 0)
            if low > high:
                raise InputError(f"algorithm.hints.{key}: {low} is above {high}, write the least first")
        return self


class Likelihood(Choice):
    """Options of every likelihood: which tokens it is of, those up to and with the first end (`eos`) or all (`canvas`)."""

    scope: Scope = "eos"

    @property
    def fixed(self) -> bool:
        """Whether its views are drawn by no chance, and so the same in every pass."""
        return False

    def recorded(self, decoder: Decoder) -> bool:
        """Whether each view scores what the decoder committed, from the same canvas and under the same distribution."""
        return False

    @abstractmethod
    def views(self, answers: Answers) -> views.Views:
        """The views of some answers."""


class OneStep(Likelihood):
    """The whole answer hidden, one view, and each token of the prompt with a probability (diffu-GRPO)."""

    name: Literal["one_step"] = "one_step"
    prompt_rate: Rate = 0.15

    @property
    def fixed(self) -> bool:
        """Whether its views are drawn by no chance, and so the same in every pass."""
        return self.prompt_rate == 0

    def views(self, answers: Answers) -> views.Views:
        """The views of some answers."""
        return views.one_step(answers, self.prompt_rate)


class Coupled(Likelihood):
    """The whole answer, a random part, and the rest (coupled-GRPO), weighted as `released` or `unbiased`."""

    name: Literal["coupled"] = "coupled"
    weights: Literal["released", "unbiased"] = "released"

    def views(self, answers: Answers) -> views.Views:
        """The views of some answers."""
        return views.coupled_as_released(answers) if self.weights == "released" else views.coupled(answers)


class MonteCarlo(Likelihood):
    """The ELBO from random masks: each token at a random rate (`bernoulli`), or a random number of them (`exact_k`)."""

    name: Literal["monte_carlo"] = "monte_carlo"
    masks: Literal["bernoulli", "exact_k"] = "exact_k"
    draws: Count = 2
    stratified: bool = False
    antithetic: bool = False

    def views(self, answers: Answers) -> views.Views:
        """The views of some answers."""
        plan = views.bernoulli if self.masks == "bernoulli" else views.exact_k
        return plan(answers, self.draws, self.stratified, self.antithetic)


class Quadrature(Likelihood):
    """The ELBO by Gauss-Legendre quadrature over the mask rate (GDPO)."""

    name: Literal["quadrature"] = "quadrature"
    nodes: Count = 3
    draws: Count = 1
    masks: Literal["floor", "centred", "bernoulli"] = "floor"

    def views(self, answers: Answers) -> views.Views:
        """The views of some answers."""
        return views.quadrature(answers, self.nodes, self.draws, self.masks)


class Autoregressive(Likelihood):
    """Exact for decoding from left to right (JustGRPO); a view for each token."""

    name: Literal["autoregressive"] = "autoregressive"
    fixed: ClassVar[bool] = True

    def views(self, answers: Answers) -> views.Views:
        """The views of some answers."""
        return views.autoregressive(answers)


class Trajectory(Likelihood):
    """Each token where the decoder committed it (CJ-GRPO); every `shrink` steps are taken as one (TraceRL)."""

    name: Literal["trajectory"] = "trajectory"
    shrink: Count = 1
    fixed: ClassVar[bool] = True

    def recorded(self, decoder: Decoder) -> bool:
        """Whether each view scores what the decoder committed, from the same canvas and under the same distribution."""
        return self.shrink == 1 and decoder.recorded

    def views(self, answers: Answers) -> views.Views:
        """The views of some answers."""
        return views.trajectory(answers, self.shrink)


class Blocks(Likelihood):
    """A random part of a random block, all blocks after it, and with a probability each token before it (SPG)."""

    name: Literal["blocks"] = "blocks"
    size: Count = 32
    draws: Count = 2
    prompt_rate: Rate = 0.15

    def views(self, answers: Answers) -> views.Views:
        """The views of some answers."""
        return views.blocks(answers, self.size, self.draws, self.prompt_rate)


class Divergence(Strict):
    """A pull to the reference, or to the policy that made the answers: `beta` times a form of KL; 0 computes none."""

    form: Literal["k1", "k2", "k3"] = "k3"
    beta: float = Field(0.0, ge=0)
    level: Literal["token", "sequence"] = "token"
    target: Literal["reference", "old"] = "reference"

    def build(self) -> objectives.Divergence | None:
        """What the objective adds; None for nothing."""
        return objectives.Divergence(self.beta, self.form, self.level, self.target) if self.beta > 0 else None


class Ratio(Choice):
    """Options of objectives of a ratio: `clip_range` is one bound for both sides or [low, high], `dual` bounds bad answers.

    With `gate`, temperatures for A > 0 and A <= 0, SAPO's soft gate takes the place of the clip.
    """

    clip_range: Positive | Pair = 0.2
    dual: Positive | None = None
    gate: Pair | None = None
    kl: Divergence = Divergence()

    def surrogate(self) -> objectives.Surrogate:
        """The loss of a ratio."""
        if self.gate is not None:
            return objectives.SoftGate(*self.gate)
        low, high = self.clip_range if isinstance(self.clip_range, list) else (self.clip_range, self.clip_range)
        return objectives.Clip(low, high, self.dual)


class TokenRatio(Ratio):
    """A ratio for each token."""

    name: Literal["token_ratio"] = "token_ratio"

    def build(self) -> objectives.Objective:
        """The objective."""
        return objectives.TokenRatio(self.surrogate(), self.kl.build())


class SequenceRatio(Ratio):
    """A ratio for each answer; `normalised`: of the log-probability over the length."""

    name: Literal["sequence_ratio"] = "sequence_ratio"
    normalised: bool = True

    def build(self) -> objectives.Objective:
        """The objective."""
        return objectives.SequenceRatio(self.surrogate(), self.normalised, self.kl.build())


class Unpulled(Choice):
    """Options of objectives that have no divergence."""

    @property
    def kl(self) -> Divergence:
        """None."""
        return Divergence()


class LinearBound(Unpulled):
    """BGPO's lower bound, a sum over views."""

    name: Literal["linear_bound"] = "linear_bound"
    normalised: bool = True

    def build(self) -> objectives.Objective:
        """The objective."""
        return objectives.LinearBound(self.normalised)


class Sandwich(Unpulled):
    """SPG's lower bound for good answers, and a mixture with the upper one for bad ones."""

    name: Literal["sandwich"] = "sandwich"
    beta: Positive = 1.5
    mix: Rate = 0.5

    def build(self) -> objectives.Objective:
        """The objective."""
        return objectives.Sandwich(self.beta, self.mix)


class Aggregation(Choice):
    """What a token weighs in the loss, by `name`; see `flowgrpo.mdlm.methods.aggregation`."""

    name: Literal["token_mean", "sequence_mean", "step_mean", "fixed_length", "balanced"]

    @property
    def weights(self) -> Aggregate:
        """The weights (B, L) of tokens."""
        return AGGREGATIONS[self.name]


CHOICES: dict[str, dict[str, type[Choice]]] = {
    "decoder": dict.fromkeys(DECODERS, Rollouts),
    "schedule": named(Unscheduled, LearnedSchedule),
    "hints": named(NoHints, Inpainting),
    "likelihood": named(OneStep, Coupled, MonteCarlo, Quadrature, Autoregressive, Trajectory, Blocks),
    "baseline": BASELINES,
    "objective": named(TokenRatio, SequenceRatio, LinearBound, Sandwich),
    "aggregation": dict.fromkeys(AGGREGATIONS, Aggregation),
}
