"""The configuration of a run: YAML, dotted overrides, strict checks with one sentence for whatever is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, SerializeAsAny, ValidationError, field_validator, model_validator

from flowgrpo import presets
from flowgrpo.axes import Choice, Strict
from flowgrpo.errors import InputError, nearest

# diffusers' attention backends that compute attention as it is defined; the others quantise.
AttentionBackend = Literal[
    "native",
    "_native_cudnn",
    "_native_efficient",
    "_native_flash",
    "_native_math",
    "_native_npu",
    "_native_xla",
    "flash",
    "flash_hub",
    "flash_varlen",
    "flash_varlen_hub",
    "flash_4_hub",
    "_flash_3",
    "_flash_3_hub",
    "_flash_varlen_3",
    "_flash_3_varlen_hub",
    "aiter_fa2_hub",
    "flex",
    "xformers",
]


def refuse_lossy_attention(name: str, key: str) -> None:
    """Let no rollout compute with an attention that quantises.

    Args:
        name: of a backend, known or not.
        key: where it was set.

    Raises:
        InputError: the name is that of a quantising backend.
    """
    if re.search("sage|int8|fp8|fp4", name):
        raise InputError(
            f"{key}: {name!r} quantises, so the log-probs of a rollout would not be the model's; it may serve previews "
            f"(DIFFUSERS_ATTN_BACKEND={name} flowgrpo sample ...), not training"
        )


class Lora(Strict):
    """Low-rank adapters. `targets` are layer names, or `auto` for the attention projections."""

    rank: int = Field(16, ge=1)
    alpha: float = Field(32, gt=0)
    targets: Literal["auto"] | list[str] = "auto"


class Model(Strict):
    """What is trained. `call` is handed to the pipeline as it is; `lora: null` trains every weight.

    `text_encoders` says what becomes of them once the run's prompts are encoded: `keep`, `offload` to host memory, `free`.
    The keys after it are switches of memory and speed; see `flowgrpo.switches`.
    """

    path: str
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    lora: Lora | None = Lora()
    call: dict[str, Any] = {}
    text_encoders: Literal["keep", "offload", "free"] = "offload"
    guidance: Literal["pipeline", "none"] = "pipeline"
    gradient_checkpointing: bool = False
    vae: Literal["keep", "offload"] = "keep"
    vae_tiling: bool = False
    attention: AttentionBackend | None = None
    compile: bool = False

    @field_validator("attention", mode="before")
    @classmethod
    def _exact(cls, written: Any) -> Any:
        if isinstance(written, str):
            refuse_lossy_attention(written, "model.attention")
        return written


class Pick(Strict):
    """Which training prompts an iteration takes, how many samples of each, and what they weigh.

    `by`: `shuffle` takes one pass over all after another; `variance` those whose rewards should differ most (VADE).
    `budget`: `equal` groups, or `knapsack` (Knapsack RL), which moves samples to prompts where they teach more, `least` to
    `most` times a group's size. `robust`, if above 0, leans on the prompts that are solved least (Prompt-GDRO).
    These look at a prompt's mean reward so far, counted from `worst` to `best` as 0 to 1; see `train.memory`.
    """

    by: Literal["shuffle", "variance"] = "shuffle"
    budget: Literal["equal", "knapsack"] = "equal"
    least: float = Field(0.5, gt=0, le=1)
    most: float = Field(2.0, ge=1)
    robust: float = Field(0.0, ge=0)
    worst: float = 0.0
    best: float = 1.0

    @model_validator(mode="after")
    def _ordered(self) -> Pick:
        if self.best <= self.worst:
            raise InputError(f"prompts.pick.best: {self.best} is not above prompts.pick.worst = {self.worst}")
        return self


class Prompts(Strict):
    """Where prompts come from: a built-in name, a .txt file (one per line) or a .jsonl file (`prompt` and any columns)."""

    train: str = "shapes:train"
    eval: str = "shapes:eval"
    pick: Pick = Pick()


class RewardUse(Strict):
    """One reward: what to `use`, its `weight` in the sum, `options` for a class, `name` in the metrics.

    `only` names columns and the value a row must have there for the reward to apply: {task: ocr}.
    """

    use: str
    weight: float = 1.0
    options: dict[str, Any] = {}
    name: str | None = None
    only: dict[str, Any] = {}


class Algorithm(Strict):
    """A preset with any of its five axes replaced; see `flowgrpo.presets`."""

    preset: str
    tree: SerializeAsAny[Choice]
    kernel: SerializeAsAny[Choice]
    credit: SerializeAsAny[Choice]
    baseline: SerializeAsAny[Choice]
    objective: SerializeAsAny[Choice]

    @model_validator(mode="before")
    @classmethod
    def _choose(cls, written: Any) -> dict[str, Any]:
        if not isinstance(written, Mapping):
            raise InputError(f"algorithm: {written!r} is not a map such as {{preset: flow_grpo}}")
        row = presets.resolved(written)
        chosen = {"preset": row.pop("preset")}
        for axis, options in row.items():
            try:
                chosen[axis] = presets.build(axis, options)
            except ValidationError as error:
                raise InputError(
                    _sentence(error, presets.CHOICES[axis][options["name"]], ("algorithm", axis))
                ) from None
        return chosen

    @model_validator(mode="after")
    def _agree(self) -> Algorithm:
        objective, form = self.objective.name, self.kernel.log_prob
        if objective == "normalised_ratio" and form != "mean":
            raise InputError(f"algorithm.kernel.log_prob: normalised_ratio normalises mean, not {form}; take mean")
        return self


class Optimizer(Strict):
    """AdamW."""

    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = [0.9, 0.999]
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(1e-4, ge=0)


class Draft(Strict):
    """Choose the starts of a group's roots by a draft (Sol-RL).

    `pool` times as many are sampled by ODE, with `call` over `model.call`, and the best half and the worst half of what is
    needed go on. Few steps are enough to rank them.
    """

    pool: int = Field(4, ge=2)
    call: dict[str, Any] = {"num_inference_steps": 6}


class Select(Strict):
    """Train on a `fraction` of what is compared: its `extremes` (best and worst), or the `max_variance` choice (PODS).

    `statistics`: whether means and spreads are those of the `kept` or of `all`.
    """

    rule: Literal["extremes", "max_variance"] = "extremes"
    fraction: float = Field(0.5, gt=0, le=1)
    statistics: Literal["kept", "all"] = "kept"


class Train(Strict):
    """The loop's numbers. `updates` splits an iteration's groups into disjoint parts, one optimizer step each.

    `memory` is after how many iterations what a prompt gave counts half, for `prompts.pick` and the baseline `tracker`.
    """

    iterations: int = Field(20, ge=1)
    groups: int = Field(8, ge=1)
    group_size: int = Field(16, ge=2)
    updates: int = Field(2, ge=1)
    learning_rate: float = Field(3.0e-4, gt=0)
    micro_batch: int = Field(32, ge=1)
    ema: float | None = Field(0.9, ge=0, lt=1)
    max_grad_norm: float = Field(1.0, gt=0)
    optimizer: Optimizer = Optimizer()
    memory: float = Field(8.0, gt=0)
    draft: Draft | None = None
    select: Select | None = None


class Eval(Strict):
    """Held-out evaluation by ODE: `every` so many iterations, on the first `prompts`, with `call` over `model.call`.

    `save` of the samples are kept as files, for the gallery. Where a reward of `eval_rewards` fell while the trained one
    rose, `watch` evaluations in a row, the run warns.
    """

    every: int = Field(5, ge=1)
    prompts: int = Field(32, ge=1)
    save: int = Field(16, ge=0)
    watch: int = Field(3, ge=1)
    call: dict[str, Any] = {}


class Checkpoint(Strict):
    """A checkpoint `every` so many iterations; the last `keep` stay."""

    every: int = Field(5, ge=1)
    keep: int = Field(2, ge=1)


class Run(Strict):
    """Where and how a run lives."""

    name: str = Field("demo", pattern=r"^[\w-][\w.-]*$")
    dir: str = "runs"
    seed: int = Field(0, ge=0)
    processes: int = Field(1, ge=1)
    trackers: list[str] = []
    resume: bool = False
    checkpoint: Checkpoint = Checkpoint()

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.dir) / self.name


class Config(Strict):
    """One run."""

    kind: Literal["flow"] = "flow"
    model: Model
    prompts: Prompts = Prompts()
    rewards: list[RewardUse] = Field([RewardUse(use="shapes")], min_length=1)
    eval_rewards: list[RewardUse] = []
    algorithm: Algorithm = Field(default_factory=lambda: Algorithm.model_validate({}))
    train: Train = Train()
    eval: Eval = Eval()
    run: Run = Run()

    @model_validator(mode="after")
    def _geometry(self) -> Config:
        check_geometry(self.train.groups, self.train.updates, self.run.processes)
        roots = self.algorithm.tree.roots(self.train.group_size)
        if self.train.draft is not None and self.algorithm.tree.start == "shared":
            raise InputError("train.draft: it chooses the starts of a group, set algorithm.tree.start=independent")
        if self.prompts.pick.budget == "knapsack" and roots == 1:
            raise InputError(
                f"prompts.pick.budget: a group of {self.train.group_size} is one {self.algorithm.tree.name} tree, which "
                "cannot be shared out; take a larger train.group_size, or equal"
            )
        return self


def check_geometry(groups: int, updates: int, processes: int) -> None:
    """Every process must have equally many groups of each part.

    Raises:
        InputError: they do not divide; names the nearest numbers that do.
    """
    parts = updates * processes
    if groups % parts:
        below = groups // parts * parts
        choices = " or ".join(str(n) for n in (below, below + parts) if n)
        raise InputError(
            f"train.groups: {groups} groups do not divide into train.updates = {updates} parts on {processes} processes, "
            f"take {choices}"
        )


class _Loader(yaml.SafeLoader):
    """YAML in which 3e-4 is a number, as everyone who writes it means, and a key stands once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The map, if no key of it is written twice."""
        keys = [key.value for key, _ in node.value]
        for key, _ in node.value:
            if keys.count(key.value) > 1:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} is given twice", problem_mark=key.start_mark)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+"), list("-+0123456789")
)


def parse_yaml(text: str, place: str) -> Any:
    """The value of a YAML text.

    Raises:
        InputError: the text is not YAML; names `place` and the line.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None and "\n" in text else ""
        raise InputError(f"{place}{line}: not valid YAML ({getattr(error, 'problem', None) or error})") from None


def load(path: str | Path, overrides: Iterable[str] | Mapping[str, Any] = ()) -> Config:
    """The configuration of a YAML file with overrides applied.

    Args:
        path: the file.
        overrides: `key=value` texts with dotted keys and YAML values, or a map from dotted keys to values.

    Raises:
        InputError: whatever is wrong, in one sentence.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such config file{_similar_file(path)}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text (byte {error.start})") from None
    written = parse_yaml(text, str(path))
    if not isinstance(written, dict):
        raise InputError(f"{path}: a config is a map of keys such as model and rewards, not {type(written).__name__}")
    items = overrides.items() if isinstance(overrides, Mapping) else map(override, overrides)
    for key, value in items:
        _set(written, key, value)
    return validated(written)


def validated(written: Mapping[str, Any]) -> Config:
    """The configuration of a plain map.

    Raises:
        InputError: whatever is wrong, in one sentence.
    """
    try:
        return Config.model_validate(written)
    except ValidationError as error:
        raise InputError(_sentence(error, Config)) from None


def dumped(config: Config) -> str:
    """The resolved configuration as YAML; loading it gives the same configuration."""
    return yaml.safe_dump(config.model_dump(), sort_keys=False)


def override(text: str) -> tuple[str, Any]:
    """Key and value of a `key=value` text; the value is YAML.

    Raises:
        InputError: it is not of that form.
    """
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise InputError(f"{text!r}: an override is written key=value, for example train.iterations=4")
    return key, parse_yaml(value, key)


def _set(written: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    at = written
    for i, parent in enumerate(parents):
        inner = at.get(parent)
        if isinstance(inner, str) and parents[:1] == ["algorithm"]:
            inner = {"name": inner}
        if inner is None:
            inner = {}
        if not isinstance(inner, dict):
            raise InputError(
                f"{key}: {'.'.join(parents[: i + 1])} is not a map, it has no key {(*parents, last)[i + 1]!r}"
            )
        at[parent] = at = inner
    at[last] = value


def _similar_file(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    names = [p.name for p in path.parent.iterdir() if p.suffix in (".yaml", ".yml")]
    return f", {nearest(path.name, names)}" if names else ""


def _sentence(error: ValidationError, model: type[Strict], prefix: tuple[str, ...] = ()) -> str:
    """The first unknown key, else the first wrong value, as one sentence with its place and the nearest valid choice."""
    # Where a value may be one number or a list of them, what is wrong with a list is not that it is no number.
    first = min(
        error.errors(),
        key=lambda e: (e["type"] != "extra_forbidden", e["type"] == "float_type" and isinstance(e["input"], list)),
    )
    kind, value, context = first["type"], first["input"], first.get("ctx", {})
    path = [
        part
        for part in first["loc"]
        if not (isinstance(part, str) and re.search(r"[\[(]|^(float|constrained-float|literal)$", part))
    ]
    place = ".".join(map(str, (*prefix, *path)))
    if kind == "value_error":  # raised by us, and already a sentence
        return str(context["error"])
    if kind == "extra_forbidden":
        keys = [key for key in _keys(model, path[:-1]) if key != "name" or not prefix]
        return f"{place}: unknown key, {nearest(str(path[-1]), keys)}"
    if kind == "missing":
        return f"{place}: required, but not given"
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'|(\d+)", context["expected"])
        return f"{place}: {value!r} is not allowed, {nearest(str(value), [a or b for a, b in choices])}"
    if kind == "model_type":
        return f"{place}: {value!r} is not a map of keys"
    if kind == "string_pattern_mismatch":
        return f"{place}: {value!r} may hold only letters, digits, '.', '_' and '-', and not begin with '.'"
    return f"{place}: {value!r} is wrong, {first['msg'][0].lower()}{first['msg'][1:]}"


def _keys(model: type[Strict], path: list[Any]) -> list[str]:
    """The keys of the model found by walking `path` from `model`."""
    for part in path:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation
        while not (isinstance(annotation, type) and issubclass(annotation, Strict)):
            annotation = next(a for a in annotation.__args__ if a is not type(None))
        model = annotation
    return list(model.model_fields)
