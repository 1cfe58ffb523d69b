r"""Prompt templates that ask for the answer format that a reward reads.

The formats follow released code, the wording is ours:

 - d1: reasoning and answer tags, as in d1's (2504.12216) training on GSM8K, for the reward `gsm8k`;
 - boxed: a \boxed answer, as in ESPO (2512.03759), for the rewards `gsm8k_accuracy` and `math_accuracy`;
 - d1_boxed: d1's tags around a \boxed answer, as d1 trains and evaluates on MATH, for the reward `math_answer`.
"""

from __future__ import annotations

_TAGS = """Work the answer out step by step, and write it in this form and nothing else:
<reasoning>
your steps
</reasoning>
<answer>
{answer}
</answer>

{question}"""

TEMPLATES = {
    "d1": _TAGS.replace("{answer}", "the answer alone"),
    "boxed": "{question}\n\nSolve this step by step, and end with the answer in \\boxed{}.",
    "d1_boxed": _TAGS.replace("{answer}", "\\boxed{the answer alone}"),
}


def apply(template: str | None, question: str) -> str:
    """Return a question in the named template, or the question alone."""
    return question if template is None else TEMPLATES[template].replace("{question}", question)
