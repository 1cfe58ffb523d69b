"""The plan of a run: axes, batch geometry and model evaluations, without loading weights."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flowgrpo.data import embedded, known, prompts, stored
from flowgrpo.data.prompts import STEPS, Prompt
from flowgrpo.errors import InputError
from flowgrpo.flow.config import Config
from flowgrpo.flow.methods import CHOICES, likelihood_rules
from flowgrpo.flow.methods.objectives.policy_gradient import TrainedStep
from flowgrpo.flow.methods.published import MODELS, NOT_SAID, PUBLISHED
from flowgrpo.flow.model import initial_lora, memory_estimate
from flowgrpo.flow.offline import stored_groups
from flowgrpo.flow.pipeline.call_arguments import check_call, unguided
from flowgrpo.flow.pipeline.guidance import guidance_branches
from flowgrpo.flow.pipeline.loading import load
from flowgrpo.flow.pipeline.loading.load import planned_class
from flowgrpo.flow.planning.iteration_forecast import exact_finish_cost, most_further, most_hinted, predict_cost
from flowgrpo.flow.planning.tree_diagram import draw_tree, legend
from flowgrpo.flow.planning.unseen import unseen
from flowgrpo.flow.rollouts import early_stop, hinted_rollout
from flowgrpo.flow.rollouts.adaptive_tree import Shaping
from flowgrpo.schema import published
from flowgrpo.schema.imports.lazy import lazy
from flowgrpo.schema.readable import counted
from flowgrpo.training.planning.memory_estimate import device_words
from flowgrpo.training.planning.memory_phases import with_setting
from flowgrpo.training.prompts import second_stage
from flowgrpo.training.reports.progress import BACKWARD
from flowgrpo.training.scoring import scorer
from samplers.growth import trained_steps
from samplers.schedule import euler_sigmas, linear_sigmas

if TYPE_CHECKING:  # only a plan of shared calls needs it
    from flowgrpo.flow.model import context_parallel
else:
    context_parallel = lazy("flowgrpo.flow.model.context_parallel")

UNEVEN = 100  # largest ratio of two steps' gradients in the velocity without a warning
UNEVEN_KL = 100_000  # the same for the divergence, whose weights are squares
LOOKS = 32  # number of iterations whose trained steps are compared
# Keys of a scheduler's config that make its sigmas differ from `euler_sigmas`.
RESHAPED = ("invert_sigmas", "shift_terminal", "use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas")


def plan(config: Config) -> dict[str, Any]:
    """Return the plan of a run as `flowgrpo plan --format json` prints it, for one iteration on all processes.

    Model evaluations count latents: a batch of 8 counts 8, and each guided step with two branches counts 2. The counts
    come from the real tree, grown on states of one number each. If the hub cannot be reached, stored configs are
    used (`data.known`), and the plan has no `memory`. Raise InputError if model, files, prompts or geometry are wrong.
    """
    if not load.uses_known_configs(config.model.path):
        load.check_weights(config.model.path, config.model.variant, or_configs=True)
        begun = initial_lora.adapters(config.model)
        initial_lora.check_switched(begun, config)
        return _plan(config) | {"memory": memory_estimate.memory_estimate(config, begun=begun)}
    with known.folder(config.model.path, with_tokenizers=False) as folder:
        return _plan(with_setting(config, "model.path", folder)) | {"config": config.model_dump(mode="json")}


def _plan(config: Config) -> dict[str, Any]:
    if config.run.context_parallel > 1:
        context_parallel.check(config)
    train, algorithm = config.train, config.algorithm
    train_prompts = stored.train_prompts(config)
    columns = train_prompts[0].columns
    over, update_branches = _training(config, columns)
    held_out = prompts.load_split(config.prompts, "eval")[: config.eval.prompts]
    check_columns(config, train_prompts)
    check_columns(config, held_out, config.eval.call)
    hinted_rollout.check_pictures(config, [prompt.columns for prompt in train_prompts])
    call, branches = call_and_branches(config, over, _steps_of(columns) if over else columns)
    eval_call, eval_branches = call_and_branches(config, config.eval.call, held_out[0].columns if held_out else columns)
    if call["num_inference_steps"] is None:
        raise InputError("model.call.num_inference_steps: this pipeline decides it while it runs, set it to plan")
    rewards, watched = scorer.rewards(config.rewards, config.eval_rewards)
    scorer.check_columns(rewards, train_prompts)
    scorer.check_columns([*rewards, *watched], held_out)
    early_stop.check_rewards(config, rewards)
    second_stage.check_rewards(config, rewards)
    stored_groups.check_model(config, stored_groups.load_source(config), call)
    cost = predict_cost(config, call["num_inference_steps"])
    hinted = most_hinted(config, call["num_inference_steps"])
    further = most_further(config, call["num_inference_steps"])
    drafts, draft_evaluations = _draft(config, over, columns)
    rounds = 0 if algorithm.kernel.calibrate is None else algorithm.kernel.calibrate.rounds
    eval_evaluations = len(held_out) * eval_call["num_inference_steps"] * eval_branches
    written = config.model_dump(mode="json")
    model = {**written["model"], "call": {**written["model"]["call"], **call}}
    return {
        "preset": algorithm.preset,
        "axes": {axis: getattr(algorithm, axis).name for axis in CHOICES},
        "geometry": {
            "groups": train.groups,
            "group_size": train.group_size,
            "roots": algorithm.tree.roots(train.group_size),
            "samples": train.groups * train.group_size,
            "updates": train.updates,
            "split": train.split,
            "micro_batch": train.update_rows,
            "rollout_batch": train.rollout_rows,
            "found": list(train.found),
            "steps": call["num_inference_steps"],
            "guidance_branches": branches,
            "trained_edges": cost.trained_edges,
            "update_batches": cost.update_batches,
            "level_batches": cost.level_batches,
        },
        "picture": [] if config.data.groups else picture(config, call["num_inference_steps"]),
        "model_evaluations": {
            "rollout": branches * cost.rollout + draft_evaluations,
            "update": update_branches * cost.update,
        },
        "with_gradient": update_branches * cost.with_gradient,
        "graphs": 0 if train.replay == "always" else branches * cost.graphs,
        "drafted": drafts,
        "early_stop": {"stopped": cost.stopped, "saved_evaluations": branches * cost.saved},
        "calibration": {
            "model_evaluations": (branches * cost.rollout + draft_evaluations) * rounds,
            "decoded": (cost.decoded + drafts) * rounds,
        },
        "decoded": cost.decoded + drafts,
        "reward_calls": (cost.decoded + drafts) * len(config.rewards),
        "hinted": {"model_evaluations": branches * hinted[0], "decoded": hinted[1]},
        "second_stage": {
            "model_evaluations": {"rollout": branches * further[0], "update": update_branches * further[1]},
            "decoded": further[2],
        },
        "comparison": _comparison(config, call["num_inference_steps"], branches),
        "evaluation": {"model_evaluations": eval_evaluations, "decoded": len(held_out)},
        "evaluation_branches": eval_branches,
        "published": published.compared(PUBLISHED[algorithm.preset], {**written, "model": model}),
        "not_said": list(NOT_SAID.get(algorithm.preset, ())),
        "warnings": [
            *uneven(config, sigma_table(config.model.path, call["num_inference_steps"])),
            *likelihood_rules.guidance_warnings(config, call_and_branches(config, columns=columns)[1]),
            *unseen(config),
        ],
        "config": written,
    }


def config_at_step(config: Config, step: int, rollout: Any) -> Config:
    """Return the config with the shape of an adaptive tree after `step` iterations.

    `rollout` is the tree's state in a checkpoint; raise InputError if it is malformed.
    """
    if not config.algorithm.tree.adapts:
        return config
    shaping = Shaping(config)
    shaping.restore(rollout)
    return config.model_copy(update={"algorithm": shaping.algorithm(step)})


def table(planned: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the plan as (label, text) pairs for the terminal."""
    g, cost, before = planned["geometry"], planned["model_evaluations"], planned["calibration"]
    evaluation, compares = planned["evaluation"], planned["comparison"]
    batch = (
        f"{counted(g['groups'], 'group')} x {g['group_size']} = {g['samples']:,} trajectories, "
        f"{counted(g['roots'], 'root')} a group; {counted(g['updates'], 'optimizer step')}, split by {g['split']}"
    )
    steps = (
        f"{g['steps']}, in batches of at most {g['rollout_batch']}; {counted(g['trained_edges'], 'trained edge')} in "
        f"{counted(g['update_batches'], 'batch')} of at most {g['micro_batch']}"
    )
    if g["level_batches"] > g["update_batches"]:
        steps += f", or {g['level_batches']:,} if noise levels share no calls"
    update = f"{cost['update']:,} update ({planned['with_gradient']:,} with a backward pass)"
    evaluations = f"each iteration: {cost['rollout']:,} rollout + {update}{_format_spared(planned)}"
    early = planned["early_stop"]
    stopped = (
        f"{early['stopped']} chains on average, which saves {early['saved_evaluations']:,} rollout evaluations; "
        f"{g['samples']:,} of the decoded samples are clean estimates, which choose the chains"
    )
    draft = f"{planned['drafted']:,} of the decoded samples are drafts, which choose the starts"
    calibration = f"once: {before['model_evaluations']:,} model evaluations, {before['decoded']:,} decoded"
    comparison = (
        f"every {counted(compares['every'], 'iteration')}, from the first: "
        f"{compares['model_evaluations']:,} model evaluations, {compares['decoded']:,} decoded"
    )
    hinted = planned["hinted"]
    samples = planned["config"]["algorithm"]["hints"].get("source") in ("search", "teacher")
    hints = (
        f"at most {hinted['model_evaluations']:,} model evaluations, {hinted['decoded']:,} decoded, if all groups fail"
        + " and get candidates" * samples
    )
    held_out = f"each time: {evaluation['model_evaluations']:,} model evaluations, {evaluation['decoded']:,} decoded"
    return [
        ("preset", planned["preset"]),
        *planned["axes"].items(),
        ("batch", batch),
        ("steps", steps),
        ("model evaluations", evaluations),
        *[("draft", draft)] * bool(planned["drafted"]),
        *[("early stop", stopped)] * bool(planned["config"]["algorithm"]["tree"].get("stop")),
        *[("calibration", calibration)] * bool(before["decoded"]),
        *[("comparison", comparison)] * bool(compares["every"]),
        *[("with hints", hints)] * bool(hinted["decoded"]),
        *second_stage.plan_lines(planned["second_stage"]),
        ("decoded", f"{counted(planned['decoded'], 'sample')}, {counted(planned['reward_calls'], 'reward')}"),
        *_memory(planned),
        ("evaluation", held_out),
        *published.plan_lines(planned, MODELS),
        *[("warning", sentence) for sentence in planned["warnings"]],
    ]


def _format_spared(planned: dict[str, Any]) -> str:
    """Return a text on the evaluations that kept graphs save (`flow.updates.rollout_graphs`); empty if none.

    It is empty, too, if no graph fits the GPU of `--gpu-memory`.
    """
    room = planned["gpu"]["graphs"]["kept_rows"] if "gpu" in planned else None
    if not planned["graphs"] or room == 0:
        return ""
    where = "" if planned["config"]["train"]["replay"] == "never" else "as far as memory allows, "
    evaluations = planned["model_evaluations"]
    passes = evaluations["rollout"] + evaluations["update"] + (BACKWARD - 1) * planned["with_gradient"]
    return (
        f"; {planned['graphs']:,} of the update's reuse the rollout's graphs ({where}train.replay), which saves about "
        f"{planned['graphs'] / passes:.0%} of the work"
    )


def _memory(planned: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the line of the memory estimate; [] if the plan has the estimate of --gpu-memory."""
    if "gpu" in planned:
        return []
    if "memory" not in planned:
        return [("memory", "unknown, as the hub cannot be reached; --gpu-memory 24 counts it from stored configs")]
    on_device, host = device_words(planned["memory"]), planned["memory"]["host_bytes"] / 2**30
    processes = planned["config"]["run"]["processes"]
    every = f" ({host * processes:.2f} for {processes} processes)" if processes > 1 else ""
    return [("memory", f"{on_device}, {host:.2f} GiB in host memory{every}; --gpu-memory 24 also counts activations")]


def format_tree(planned: dict[str, Any]) -> list[str]:
    """Return the lines of the tree diagram with its legend; [] if the plan has none."""
    return [*planned["picture"], legend(planned["picture"])] if planned["picture"] else []


def _comparison(config: Config, num_steps: int, branches: int) -> dict[str, int]:
    """Return the cost and the interval (0: never) of the check in `flow.rollouts.cheap_finishes`."""
    finish = getattr(config.algorithm.tree, "finish", None)
    evaluations, decoded = exact_finish_cost(config, num_steps)
    every = 0 if finish is None else finish.every
    return {"every": every, "model_evaluations": branches * evaluations, "decoded": decoded}


def _draft(config: Config, over: dict[str, Any], columns: dict[str, Any]) -> tuple[int, int]:
    """Return the number of samples that an iteration drafts, and their model evaluations; zeros without a draft."""
    train = config.train
    if train.draft is None:
        return 0, 0
    call, branches = call_and_branches(config, {**over, **train.draft.call}, columns, key="train.draft.call")
    drafts = train.groups * config.algorithm.tree.roots(train.group_size) * train.draft.pool
    return drafts, drafts * branches * call["num_inference_steps"]


def forwards(config: Config) -> int | None:
    """Return the cost of an iteration in forward passes, None if unknown; a row with gradient counts `BACKWARD`."""
    columns = stored.train_prompts(config)[0].columns
    over, update_branches = _training(config, columns)
    call, branches = call_and_branches(config, over, _steps_of(columns) if over else columns)
    if call["num_inference_steps"] is None:
        return None
    cost = predict_cost(config, call["num_inference_steps"])
    _, of_draft = _draft(config, over, columns)
    updates = cost.update + (BACKWARD - 1) * cost.with_gradient
    return branches * cost.rollout + update_branches * updates + of_draft


def _training(config: Config, columns: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the overrides of `model.call` in rollouts, and the number of guidance branches of an update's step."""
    off = unguided(planned_class(config.model.path))
    guided = config.model.guidance == "pipeline"
    branches = call_and_branches(config, {} if guided else off, columns if guided else _steps_of(columns))[1]
    return off if config.model.guidance == "none" else {}, branches


def _steps_of(columns: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in columns.items() if key == STEPS}


def sigma_table(path: str, num_steps: int) -> list[float]:
    """Return the sigmas of a model's scheduler; linear ones with shift 3 if the pipeline computes them at run time."""
    scheduler = load.scheduler_config(path)
    if scheduler is None or scheduler.get("use_dynamic_shifting"):
        return linear_sigmas(num_steps, shift=3.0).tolist()
    if not any(scheduler.get(key) for key in RESHAPED):
        return euler_sigmas(num_steps, scheduler.get("shift", 1.0), scheduler.get("num_train_timesteps", 1000)).tolist()
    from samplers.scheduler import FlowSDEScheduler

    table = FlowSDEScheduler.from_config(scheduler, kernel="ode")
    table.set_timesteps(num_steps)
    return table.noise_levels.tolist()


def uneven(config: Config, sigmas: list[float]) -> list[str]:
    """Return warnings if a trained step dominates the loss or the divergence; see `UNEVEN` and `UNEVEN_KL`."""
    algorithm = config.algorithm
    steps, sigma_cap = _find_trained_steps(config, sigmas), sigmas[1]
    form, sentences = algorithm.kernel.log_prob, []
    pulls = _extremes(steps, algorithm.objective.pulls(steps, sigma_cap), UNEVEN)
    if pulls is not None:
        free = "" if form == "constant_free" else "algorithm.kernel.log_prob=constant_free or "
        sentences.append(
            f"of the steps trained, that {pulls[1]} pulls {pulls[0]:,.0f} times as hard at the velocity as that {pulls[2]} "
            f"({algorithm.kernel.name}, log_prob {form}); take {free}algorithm.objective.step_weights=equalised"
        )
    kl = algorithm.objective.kl
    holds = _extremes(steps, algorithm.objective.holds(steps, sigma_cap), UNEVEN_KL) if kl.beta > 0 else None
    if holds is not None:
        sentences.append(
            f"the divergence {kl.form} holds the step {holds[1]} {holds[0]:,.0f} times as strictly as that {holds[2]} "
            f"({algorithm.kernel.name}); take algorithm.objective.kl.form=velocity or algorithm.objective.kl.beta=0"
        )
    return sentences


def _find_trained_steps(config: Config, sigmas: list[float]) -> list[TrainedStep]:
    """Return the steps trained in any of `LOOKS` iterations spread over the run."""
    train, algorithm = config.train, config.algorithm
    kernels = algorithm.kernel.kernels(len(sigmas) - 1)
    plans = [
        algorithm.plan(kernels, train.group_size, config.run.seed, iteration)
        for iteration in sorted({i * train.iterations // LOOKS for i in range(LOOKS)})
    ]
    return list(dict.fromkeys(step for plan in plans for step in trained_steps(plan, sigmas)))


def _extremes(steps: list[TrainedStep], sizes: list[float], most: float) -> tuple[float, str, str] | None:
    """Return the ratio of the largest to the smallest size, and their steps as text; None if it is at most `most`."""
    ranked = sorted((size, *step[1:]) for size, step in zip(sizes, steps, strict=True) if size > 0)
    if not ranked or ranked[-1][0] <= most * ranked[0][0]:
        return None
    large, small = (f"from sigma {sigma:.3g} to {after:.3g}" for _, sigma, after in (ranked[-1], ranked[0]))
    return ranked[-1][0] / ranked[0][0], large, small


def picture(config: Config, num_steps: int) -> list[str]:
    """Return the diagram of one root's tree in the first iteration; see `flowgrpo.flow.planning.tree_diagram`."""
    train, algorithm = config.train, config.algorithm
    kernels = algorithm.kernel.kernels(num_steps)
    return draw_tree(algorithm.plan(kernels, train.group_size, config.run.seed, 0), num_steps)


def check_columns(config: Config, rows: Sequence[Prompt], over: dict[str, Any] | None = None) -> None:
    """Raise InputError if a column for a numeric argument holds no number, or if rows have different numbers of steps.

    `over` is `eval.call` if the rows are evaluation prompts; it gives the number of steps of rows whose column is empty.
    """
    pipeline, key = planned_class(config.model.path), "the prompts' columns"
    parameters = inspect.signature(inspect.unwrap(pipeline.__call__)).parameters
    numbers = {
        n for n, p in parameters.items() if isinstance(p.default, int | float) and not isinstance(p.default, bool)
    }
    written = {(n, repr(row.columns[n])): (n, row) for row in rows for n in (numbers | {STEPS}) & row.columns.keys()}
    for name, row in written.values():
        check_call(pipeline, {name: row.columns[name]} if row.columns[name] is not None else {}, key)
    steps = {
        call_and_branches(config, over, row.columns)[0][STEPS]: row for name, row in written.values() if name == STEPS
    }
    if len(steps) > 1:
        (one, row), (other, another), *_ = steps.items()
        raise InputError(
            f"{key}.{STEPS}: {one} at {row.text!r} and {other} at {another.text!r}, but rows of one run walk the same steps"
        )


def call_and_branches(
    config: Config,
    over: dict[str, Any] | None = None,
    columns: dict[str, Any] | None = None,
    *,
    key: str = "eval.call",
) -> tuple[dict[str, Any], int]:
    """Return the pipeline's call arguments, with `num_inference_steps`, and the number of guidance branches of a step.

    Args:
        over: overrides of `model.call`, such as `eval.call` or the arguments that switch guidance off.
        columns: columns of a prompt row, which may change the guidance (a negative prompt) or the number of steps.
        key: config key of `over`.
    """
    pipeline = planned_class(config.model.path)
    call = {**embedded.default_call(config.model.path), **config.model.call}
    check_call(pipeline, call)
    check_call(pipeline, over or {}, key)
    call = {k: v for k, v in {**call, **(over or {})}.items() if v is not None}
    parameters = inspect.signature(inspect.unwrap(pipeline.__call__)).parameters
    call.setdefault("num_inference_steps", parameters["num_inference_steps"].default)
    given = {k: v for k, v in (columns or {}).items() if k in parameters and v is not None}
    call |= {key: steps for key, steps in given.items() if key == STEPS}
    return call, guidance_branches(pipeline, {**call, **given})
