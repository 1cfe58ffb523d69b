"""The axes of a method for texts, each with its choices, their options and mathematics.

- decoder: how answers are sampled;
- schedule: whether settings of the decoder are fixed or actions of a policy;
- hints: which part of a known solution is given if a whole group fails;
- likelihood: the masked views that estimate an answer's log-probability;
- baseline: what an answer's reward is compared with;
- objective: the loss;
- aggregation: the weight of each token in the loss.
"""

from __future__ import annotations

from collections.abc import Mapping

from flowgrpo.mdlm.decoding.decoders import DECODERS
from flowgrpo.mdlm.methods.decoder_options import Rollouts
from flowgrpo.mdlm.methods.hints import Inpainting, NoHints
from flowgrpo.mdlm.methods.likelihoods.likelihood import LIKELIHOODS
from flowgrpo.mdlm.methods.objectives.aggregation import AGGREGATIONS, Aggregation
from flowgrpo.mdlm.methods.objectives.group_objectives import Contrast, Regression
from flowgrpo.mdlm.methods.objectives.objective import LinearBound, Sandwich, SequenceRatio, TokenRatio
from flowgrpo.mdlm.methods.objectives.path_objectives import PrefixRatio
from flowgrpo.mdlm.methods.schedules.schedule import LearnedSchedule, Unscheduled
from flowgrpo.schema.base import Choice, named
from flowgrpo.training.advantages.baseline import BASELINES

CHOICES: Mapping[str, Mapping[str, type[Choice]]] = {
    "decoder": dict.fromkeys(DECODERS, Rollouts),
    "schedule": named(Unscheduled, LearnedSchedule),
    "hints": named(NoHints, Inpainting),
    "likelihood": LIKELIHOODS,
    "baseline": BASELINES,
    "objective": named(TokenRatio, SequenceRatio, PrefixRatio, LinearBound, Sandwich, Regression, Contrast),
    "aggregation": dict.fromkeys(AGGREGATIONS, Aggregation),
}
