"""The likelihood of a trajectory is what the decoder says it committed: two programs that share no line."""

import pytest
import torch
from predictors import MASK, PAD, llama

from flowgrpo.mdlm.decoding.decode import decode
from flowgrpo.mdlm.decoding.decoders import DECODERS, build
from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor
from flowgrpo.mdlm.methods.likelihoods import likelihood
from flowgrpo.mdlm.methods.likelihoods.answers import Answers
from flowgrpo.mdlm.methods.likelihoods.estimate import estimate

EOS, LENGTH = 13, 8
PROMPT = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])
SEEDS = [(0, "decode", group) for group in range(2)]


@pytest.mark.parametrize("name", [name for name in DECODERS if name != "trace_lock"])  # it needs a controller
def test_the_trajectory_s_likelihood_is_that_of_the_commits(name):
    predictor = MaskPredictor(llama(), MASK, PAD)
    rollout = decode(predictor, PROMPT, build({"name": name, "proposal": {"temperature": 1.0}}, LENGTH, EOS), SEEDS)
    seen = rollout.attention_mask
    answers = Answers(ids=rollout.ids, attention_mask=seen, scored=seen[:, 4:], addresses=SEEDS, steps=rollout.step_map)
    plans = [likelihood.trajectory, *([likelihood.autoregressive] if name == "left_to_right" else [])]
    for plan in plans:
        found = estimate(predictor, answers, plan(answers), micro_batch=4).token
        torch.testing.assert_close(found, rollout.commit_logp.to(found), rtol=1e-5, atol=1e-5)
