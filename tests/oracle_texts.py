"""Hold the gradient of every text preset's update against the exact one, and print the table of docs/research/oracle.md.

    python research/oracle_tables.py texts [PRESET ...]

The model is the table of `tiny_texts`, of which every canvas can be counted. A preset decodes, scores, credits and updates
by the code of a run.
"""

import argparse
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import tiny_texts
import torch
from opened import Opened
from oracle_page import markdown
from tiny_texts import Decoding, Exact, Table, normal_temperatures
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flowgrpo import config
from flowgrpo.data.prompts import Prompt
from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor
from flowgrpo.mdlm.methods import CHOICES
from flowgrpo.mdlm.methods.presets import PRESETS
from flowgrpo.mdlm.policy import TextPolicy
from flowgrpo.mdlm.trainer import text_loop
from flowgrpo.training.weights.trained_weights import Weights
from rewards import Reward

GROUPS, SIZE, BATCHES = 16, 8, 12
WORDS = ("a", "b", "<end>", "<mask>")


@dataclass(frozen=True)
class Variant:
    """A preset, as it stands or with changes, and what is exact for it.

    `decoding` is its decoder as `tiny_texts` counts it; `own` the estimate of `Exact` that its likelihood is by definition.
    """

    preset: str
    decoding: Decoding
    own: str | None = None
    _: KW_ONLY
    name: str | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)


def _drawn(temperature: float, order: str = "confidence") -> Decoding:
    return Decoding(order, temperatures=((temperature, 1.0),))


_ENTROPY, _LEFT = Decoding("entropy", (0, 1)), _drawn(1.0, "left_to_right")
_DECODERS = {name: {"algorithm.decoder": {"name": name}} for name in ("random", "entropy", "left_to_right")}
_TOKEN_MEAN = {**_DECODERS["entropy"], "algorithm.aggregation": "token_mean"}
_UNMERGED = {**_DECODERS["left_to_right"], "algorithm.likelihood.shrink": 1}
_NO_HINTS = {"algorithm.hints": {"name": "none"}}
_ONE_A_STEP = {"algorithm.decoder": {"committer": {"threshold": 1.0}}}
_PATH = "by_trajectory"
_TREE = {
    **_DECODERS["random"],
    "algorithm.tree": {"name": "branch", "factor": 2, "splits": [0.4, 0.7]},
    "algorithm.baseline": {"name": "leave_one_out"},
}
_LATE = {"algorithm.tree": {"splits": [0.4, 0.7]}}  # a third of three steps is one of them
_NESTED = {**_TREE, "algorithm.credit": "nested"}
VARIANTS = (
    Variant("diffu_grpo", _drawn(0.9)),
    Variant("diffu_grpo_fast", _drawn(1.0), "by_one_step"),
    Variant("coupled_grpo", _ENTROPY),
    Variant("gdpo", _drawn(1.0)),
    Variant("bgpo", _drawn(0.6)),
    Variant("espo", _drawn(1.0)),
    Variant("cj_grpo", _drawn(1.0), _PATH),
    Variant("just_grpo", _LEFT, _PATH),
    Variant("igpo", _drawn(1.2), changes={"algorithm.hints.success": 2.0}),
    Variant("spg", _drawn(0.9)),
    Variant("trace_rl", _drawn(0.8), "by_one_step"),
    Variant("ebpo", _drawn(0.6), changes=_ONE_A_STEP),
    Variant("co_grpo", Decoding("gumbel", temperatures=normal_temperatures(0.8, 0.3, top=2.0)), _PATH),
    Variant("spo", _drawn(1.0), "by_one_step"),
    Variant("bnpo", _drawn(1.0), changes={"algorithm.baseline.bound": 5.0}),  # for rewards that are not 0 or 1
    Variant("dcpo", _drawn(1.0)),
    Variant("riskpo", _drawn(1.0)),
    Variant("dars", _drawn(1.0)),
    Variant("igpo", _drawn(1.2), "by_one_step", name="igpo, no hints", changes=_NO_HINTS),
    Variant("cj_grpo", _drawn(1.0, "random"), _PATH, name="cj_grpo, random", changes=_DECODERS["random"]),
    Variant("cj_grpo", _ENTROPY, name="cj_grpo, entropy", changes=_DECODERS["entropy"]),
    Variant("cj_grpo", _ENTROPY, _PATH, name="cj_grpo, entropy, token_mean", changes=_TOKEN_MEAN),
    Variant("trace_rl", _LEFT, _PATH, name="trace_rl, left_to_right, unmerged", changes=_UNMERGED),
    Variant("d_tree_rpo", _drawn(0.9), changes={"algorithm.tree": {"factor": 2}}),
    *(Variant(name, _LEFT, changes=_LATE) for name in ("tempo", "spo_tree")),
    Variant("tree_po", _LEFT, changes={**_LATE, "algorithm.baseline.combine": "sum"}),  # undivided, as the others
    *(Variant(name, _LEFT, changes=_LATE) for name in ("gigpo", "hgpo", "salt")),
    Variant("cj_grpo", _drawn(1.0, "random"), name="cj_grpo, random, trees", changes=_TREE),
    Variant("cj_grpo", _drawn(1.0, "random"), _PATH, name="cj_grpo, random, nested", changes=_NESTED),
    Variant("bgpo", _drawn(1.0, "random"), name="bgpo, random, temperature 1", changes=_DECODERS["random"]),
)


@contextmanager
def trainer(variant: Variant) -> Iterator[Opened]:
    """Build a run of a preset on the table of three letters."""
    with tempfile.TemporaryDirectory() as folder:
        written = {
            "kind": "mdlm",
            "model": {"path": "table", "length": tiny_texts.LENGTH, "lora": None},
            "algorithm": {
                "preset": variant.preset,
                "baseline": _undivided(PRESETS[variant.preset]["baseline"]["name"]),
            },
            "rewards": ["table"],
            "train": {"groups": GROUPS, "group_size": SIZE, "updates": 1, "micro_batch": 1 << 20},
            "run": {"dir": folder, "name": "run"},
        }
        written["train"] |= {"ema": None, "max_grad_norm": 1e9}
        if PRESETS[variant.preset]["objective"].get("kl"):
            written["algorithm"]["objective"] = {"kl": {"beta": 0.0}}
        for key, value in variant.changes.items():
            config._set(written, key, value)
        chosen = config.validate(written)
        chosen.run.folder.mkdir()
        table = Table()
        policy = TextPolicy(MaskPredictor(table, tiny_texts.MASK), _tokenizer(), tiny_texts.LENGTH)
        schedule = chosen.algorithm.schedule.policy(tiny_texts.LENGTH)
        extra = {} if schedule is None else {"schedule": schedule}
        weights = Weights({"model": table}, None, extra_modules=extra, ema=None, reference=None)
        earned = Reward("table", lambda texts, prompts, **columns: [tiny_texts.REWARDS[(*text,)] for text in texts])
        prompt = Prompt(WORDS[tiny_texts.PROMPT], {"completion": "aba"})
        run = Opened(text_loop(chosen, policy, weights, schedule=schedule, train_prompts=[prompt], rewards=[earned]))
        run.learning_rates = [0.0] * len(run.learning_rates)  # the gradients stay, and nothing moves
        yield run


def _undivided(baseline: str) -> dict[str, str]:
    """Return the option by which a baseline divides by no standard deviation, if it has one."""
    return {"std": "none"} if "std" in CHOICES["baseline"][baseline].model_fields else {}


def _tokenizer() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token=WORDS[-1]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, mask_token="<mask>", eos_token="<end>")


def batch(run: Opened, iteration: int) -> tuple[torch.Tensor, float, list[str]]:
    """Return the ascent of a batch (P,), the evaluations of a group, and the texts."""
    run.done, before = iteration, run.evaluations
    rolled = run.made(iteration).batch
    minibatches = run.minibatches(rolled, run.compare(rolled))
    minibatches.prepare()
    for number in range(len(minibatches)):
        minibatches.step(number)
    ascent = torch.cat([-p.grad.flatten().double() for p in run.policy.predictor.model.parameters()])
    return ascent, (run.evaluations - before) / run.config.train.groups, rolled.completions.texts


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a variant's update was.

    Attributes:
        size, error: its length along the exact gradient times what the baseline leaves, over the letters.
        cosine: to that gradient, its own noise taken off.
        worst, compared: the largest distance from the estimate it is by definition, in standard errors, and of how many.
        exact: cosine of that estimate to the exact gradient, or None.
        noise: of a group's update over its length.
        drawn: the largest distance of a text's frequency from its chance, in standard errors.
    """

    name: str
    evaluations: float
    size: float
    error: float
    cosine: float
    worst: float | None
    compared: int
    exact: float | None
    noise: float
    drawn: float


def row(variant: Variant, batches: int = BATCHES) -> Row:
    with trainer(variant) as run:
        found = [batch(run, iteration) for iteration in range(batches)]
        own = run.config.algorithm.baseline.name in ("leave_one_out", "tracker")
    exact = Exact(Table(), variant.decoding)
    share = (1.0 if own else 1 - 1 / SIZE) / tiny_texts.LENGTH
    aim, seen = exact.gradient * share, torch.stack([each for each, _, _ in found])
    mean, spread = seen.mean(0), seen.std(0) / math.sqrt(batches)
    along = seen @ aim / (aim @ aim)
    length = math.sqrt(max(float(mean @ mean - spread @ spread), 1e-12))
    definition = None if variant.own is None else getattr(exact, variant.own) * share
    moved = spread > 1e-9
    return Row(
        name=variant.name or variant.preset,
        evaluations=found[0][1],
        size=float(along.mean()),
        error=float(along.std()) / math.sqrt(batches),
        cosine=float(mean @ aim) / float(aim.norm()) / length,
        worst=None if definition is None else float(((mean - definition) / spread)[moved].abs().max()),
        compared=int(moved.sum()),
        exact=None if definition is None else float(definition @ aim / definition.norm() / aim.norm()),
        noise=float(spread.norm()) * math.sqrt(batches * GROUPS) / length,
        drawn=_drawn_apart(exact, [text for _, _, texts in found for text in texts]),
    )


def _drawn_apart(exact: Exact, texts: Sequence[str]) -> float:
    """The largest distance of a text's frequency from its chance, in standard errors."""
    apart = 0.0
    for text, chance in exact.texts().items():
        share = texts.count("".join(WORDS[token] for token in text)) / len(texts)
        apart = max(apart, abs(share - chance) / math.sqrt(chance * (1 - chance) / len(texts)))
    return apart


HEADS = ("preset", "decoder", "evaluations", "size", "cosine", "by its definition", "parameters", "noise", "of 1,000")


def table(rows: Sequence[Row], variants: Sequence[Variant]) -> Iterator[str]:
    rows = (
        [
            f"`{each.name}`",
            variant.decoding.order,
            f"{each.evaluations:.0f}",
            f"{each.size:.2f} ± {each.error:.2f}",
            f"{each.cosine:.3f}",
            "-" if each.exact is None else f"{each.exact:.3f}",
            "-" if each.worst is None else f"{each.worst:.1f} of {each.compared}",
            f"{each.noise:.2f}",
            f"{each.noise * math.sqrt(each.evaluations / 1000):.2f}",
        ]
        for each, variant in zip(rows, variants, strict=True)
    )
    return markdown(HEADS, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("presets", nargs="*", metavar="PRESET", help="those to try; by default all")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [each for each in VARIANTS if not asked.presets or each.preset in asked.presets]
    for line in table([row(each) for each in chosen], chosen):
        print(line)
