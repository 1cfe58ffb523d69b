"""The explanation of a sample, written by hand."""

import numpy as np

from flowgrpo.commands.inspect.explanation import Explained
from flowgrpo.data.prompts import Row
from flowgrpo.flow.diagnostics.counterfactual import Explanation, Look, Step
from flowgrpo.flow.diagnostics.spectrum import VarianceShare


def look(reward, grey=100):
    return Look(reward=reward, picture=np.full((6, 6, 4), [grey, grey, grey, 255], dtype=np.uint8))


SAMPLE = look(0.5, 50)


def step(index, rewards, *, share=None, advantage=None, before=0.1, after=0.3):
    return Step(
        index=index, sigma=1 - 0.3 * index, kernel="flow_sde 0.7", std=0.25, before=look(before), after=look(after),
        redraws=[look(reward, 10 * place) for place, reward in enumerate(rewards)], advantage=advantage,
        share=share and VarianceShare(steps=(index, index + 1), share=share, error=0.125),
    )  # fmt: skip


def explained(*steps, prompt="a cat", variance=0.04, residual=0.1, lost=0, lent=False):
    explanation = Explanation(
        row=Row(prompt, 7), sample=SAMPLE, still=look(0.4, 60), steps=steps, of_steps=4, variance=variance,
        residual=None if residual is None else VarianceShare(steps=None, share=residual, error=0.05),
        lost=lost, lent=lent, evaluations=1234,
    )  # fmt: skip
    return Explained(explanation, run="mine", step=20, method="flow_grpo")


SEVERAL = (
    step(0, [0.5, 0.9, 0.2], share=0.625, advantage=1.5),
    step(1, [0.6, None, 0.4], share=-0.0625, advantage=-0.25),
    step(2, [0.5, 0.5, 0.5], share=0.25),
)
