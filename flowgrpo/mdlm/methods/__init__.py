"""The axes of a method for texts, each with its choices, their options and mathematics."""

from __future__ import annotations

from collections.abc import Mapping

from flowgrpo.mdlm.decoding.decoders import DECODERS
from flowgrpo.mdlm.methods.credit import Depthwise, Nested, Siblings, StepGain, Terminal
from flowgrpo.mdlm.methods.decoder_options import Rollouts
from flowgrpo.mdlm.methods.hints import Inpainting, NoHints
from flowgrpo.mdlm.methods.likelihoods.all_blocks import AllBlocks
from flowgrpo.mdlm.methods.likelihoods.likelihood import LIKELIHOODS
from flowgrpo.mdlm.methods.objectives.aggregation import AGGREGATIONS, Aggregation
from flowgrpo.mdlm.methods.objectives.bounds import LinearBound, Sandwich
from flowgrpo.mdlm.methods.objectives.group_objectives import Contrast, Regression
from flowgrpo.mdlm.methods.objectives.objective import SequenceRatio, TokenRatio
from flowgrpo.mdlm.methods.objectives.one_token import OneToken
from flowgrpo.mdlm.methods.objectives.path_objectives import PrefixRatio
from flowgrpo.mdlm.methods.schedules.schedule import LearnedSchedule, Unscheduled
from flowgrpo.mdlm.methods.trees import Branch, Chain
from flowgrpo.schema.base import Choice, named
from flowgrpo.training.advantages.past_baselines import BASELINES

CHOICES: Mapping[str, Mapping[str, type[Choice]]] = {
    "decoder": dict.fromkeys(DECODERS, Rollouts),
    "tree": named(Chain, Branch),
    "schedule": named(Unscheduled, LearnedSchedule),
    "hints": named(NoHints, Inpainting),
    "likelihood": {**LIKELIHOODS, **named(AllBlocks)},
    "credit": named(Terminal, Siblings, Depthwise, Nested, StepGain),
    "baseline": BASELINES,
    "objective": named(TokenRatio, SequenceRatio, PrefixRatio, LinearBound, Sandwich, Regression, Contrast, OneToken),
    "aggregation": dict.fromkeys(AGGREGATIONS, Aggregation),
}

QUESTIONS: Mapping[str, str] = {
    "decoder": "how are answers sampled?",
    "tree": "which answers of a group share their first steps?",
    "schedule": "are the decoder's settings fixed, or actions of a policy?",
    "hints": "which part of a known solution helps a group that fails?",
    "likelihood": "which masked views estimate an answer's log-probability?",
    "credit": "which parts of the answers are compared?",
    "baseline": "compared with what?",
    "objective": "how does the policy move?",
    "aggregation": "what does a token weigh in the loss?",
}
"""The question that each axis answers."""
