r"""Prompt templates that ask for the answer format that a reward reads.

The formats follow released code, the wording is ours:

 - d1: reasoning and answer tags, as d1 (2504.12216) trains on GSM8K, for `gsm8k`;
 - boxed: a \\boxed answer, as ESPO (2512.03759), for `gsm8k_accuracy` and `math_accuracy`;
 - d1_boxed: the tags with a \\boxed answer, as d1 trains and evaluates on MATH, for `math_answer`.
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
