"""Train one run from its config: check everything, prepare the folder, train, and write the pages."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, gather_object, set_seed

from flowgrpo import config
from flowgrpo.commands import launch
from flowgrpo.commands.model_kinds import KINDS, load_engines
from flowgrpo.commands.remedies import remedy
from flowgrpo.commands.runs import folder_check, inputs
from flowgrpo.data import configs, prompts, stored
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import InputError
from flowgrpo.schema.imports.lazy import lazy
from flowgrpo.schema.sections import RewardUse, RunConfig
from flowgrpo.training.checkpoints import checkpoint, resume
from flowgrpo.training.distributed import worker_roles
from flowgrpo.training.distributed.collectives import LONGEST
from flowgrpo.training.distributed.minibatches import check_geometry
from flowgrpo.training.fitting import batch_sizes
from flowgrpo.training.lora import lora_files
from flowgrpo.training.prompts import second_stage
from flowgrpo.training.reports import progress, report, trackers
from flowgrpo.training.reports.tree_store import TreeFolder
from flowgrpo.training.run import run_folder
from flowgrpo.training.run.out_of_memory_error import OutOfMemory, last_resort
from flowgrpo.training.run.phases import phase
from flowgrpo.training.run.run_data import RunData
from flowgrpo.training.run.stop_reasons import DiskFull, Finished, Lost, RanOutOfMemory, Stopped
from flowgrpo.training.scoring import scorer
from flowgrpo.training.weights import lora_adapters, optimizers
from rewards.base import matches, nearest
from rewards.cards import default_name

if TYPE_CHECKING:
    from flowgrpo.commands.inspect import gallery
    from flowgrpo.commands.page_parts import trees
    from flowgrpo.flow.pipeline.policy import DiffusersPolicy  # a run has one of them
    from flowgrpo.mdlm.policy import TextPolicy
else:  # pages are written beside the training
    gallery = lazy("flowgrpo.commands.inspect.gallery")
    trees = lazy("flowgrpo.commands.page_parts.trees")

LOGGER = logging.getLogger(__name__)
SHARED_STORE = (
    "torchrun may start this run again, and torch hands it the store of the attempt before, where processes look for "
    "those that have ended; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun is called"
)


@dataclass(frozen=True)
class Run:
    """A finished run: its folder, its metric lines, and the policy with the evaluated weights (the average)."""

    folder: Path
    metrics: list[dict[str, Any]]
    policy: DiffusersPolicy | TextPolicy


def train(path: str | Path, overrides: Iterable[str] | Mapping[str, Any] = ()) -> Run:
    """Run a config file with overrides and return the finished run.

    Raises:
        InputError, RewardError: the input is wrong; nothing expensive has happened.
        Stopped: a signal, nothing to learn, divergence, or lack of memory or disk. The last checkpoint remains.
    """
    return train_or_load(config.load(path, overrides), configs.place_of(path))


def train_or_load(settings: RunConfig, source: Path | None = None) -> Run:
    """Train a config, or load the policy of a run that is finished; return the run. See `train`."""
    try:
        return train_config(settings, source)
    except Finished:
        return train_config(folder_check.with_resume(settings, True), source)


def train_config(settings: RunConfig, source: Path | None = None) -> Run:
    """Train a config and return the finished run; `source` is the config's file. See `train`.

    Raises Finished if `run.resume: auto` finds nothing left to do; no model is loaded.
    """
    ends = settings.run.resume == resume.AUTO
    settings = folder_check.decide_resume(settings)
    with run_folder.lock_folder(settings.run.folder) if launch.is_main() else nullcontext():
        try:
            with progress.open_display(launch.is_main()) as display:
                return _train(settings, source, display, ends=ends)
        except OutOfMemory as error:
            raise _out_of_memory(error, settings) from error
        except Exception as error:
            if (reason := run_folder.disk_full(error)) is None:
                raise
            there, overrides = checkpoint.way_on(settings.run.folder)
            room = run_folder.disk_room(settings.run.folder)
            sentence = f"stopped, {settings.run.folder} cannot be written to ({reason}; {room})"
            raise DiskFull(sentence, f"{there}, once there is room,", overrides) from error


def _out_of_memory(error: OutOfMemory, settings: RunConfig) -> RanOutOfMemory:
    """Return the error that stops the run: it names the override that saves most memory, and says how to go on with it."""
    folder = settings.run.folder
    settings = batch_sizes.with_sizes(batch_sizes.resolve_sizes(settings, folder), error.sizes)
    if not error.kept_graphs:  # `train.replay` would not save more
        settings = settings.model_copy(update={"train": settings.train.model_copy(update={"replay": "always"})})
    begun, step = run_folder.is_begun(folder), checkpoint.latest(folder / "checkpoints")
    switch = remedy(error.phase, settings, ("",) if step is None else folder_check.MAY_DIFFER)
    error.remedy = switch or last_resort(error.phase)
    overrides = [] if switch is None else [switch]
    if begun and (switch is None or switch.startswith(folder_check.MAY_DIFFER)):
        there, end = checkpoint.way_on(folder)
        return RanOutOfMemory(f"stopped, {error}", there, [*overrides, *end])
    if begun:
        overrides.append(f"run.name={run_folder.next_free_folder(folder).name}")
    return RanOutOfMemory(f"stopped, {error}", "begin again", overrides)


def _train(settings: RunConfig, source: Path | None, display: progress.Display, *, ends: bool) -> Run:
    folder = settings.run.folder
    launch.check_environment(os.environ)
    launch.check_alone(os.environ)
    launch.check_usable(os.environ)
    if launch.shares_store(os.environ) and launch.is_main():
        LOGGER.warning(SHARED_STORE)
    optimizers.check(settings.train.optimizer.name)
    folder_check.check(settings)
    if ends:
        _check_left(settings)
    trackers.check(settings.run.trackers)
    train_prompts = stored.train_prompts(settings)
    eval_prompts = prompts.load_split(settings.prompts, "eval")[: settings.eval.prompts]
    _check_only(settings.rewards, train_prompts, "rewards", "training")
    _check_only(settings.eval_rewards, eval_prompts, "eval_rewards", "held-out")
    if settings.run.evaluators and not eval_prompts:
        raise InputError("run.evaluators: there are no held-out prompts; name some in prompts.eval, or set it to 0")
    kind = KINDS[settings.kind]
    kind.setup.check_model(settings.model)
    rewards, eval_rewards = scorer.rewards(settings.rewards, settings.eval_rewards)
    if settings.prompts.pick.by == "variance" and settings.train.groups > len(train_prompts):
        raise InputError(
            f"prompts.pick.by: variance takes different prompts, but {settings.train.groups} groups have only "
            f"{len(train_prompts)}; take shuffle, or fewer train.groups"
        )
    second_stage.check_rewards(settings, rewards)
    data = RunData(train_prompts, eval_prompts, rewards, eval_rewards)
    begun = lora_files.with_kept_lora(settings, folder) if settings.run.resume else settings
    if (engines := load_engines(begun)) is not None:
        engines.check(begun, train_prompts)
        engines.greet(begun.run.engine)
    kind.setup.check(begun, data)

    cpu = not torch.accelerator.is_available()  # accelerate connects several CPU processes only if told
    timeout = InitProcessGroupKwargs(timeout=LONGEST)
    accelerator = Accelerator(cpu=cpu, project_dir=str(folder), kwargs_handlers=[timeout])
    _check_processes(settings, accelerator.num_processes)
    if len({*gather_object([settings.run.resume])}) > 1:
        raise InputError(f"run.resume: some processes see a run in {folder} and others see none; look at its disk")
    set_seed(settings.run.seed)
    display.begin(f"run      {folder}")
    with phase("loading"):
        trainer = kind.setup.trainer(begun, accelerator, data, engines)
    with phase("rewards"):
        for reward in (*rewards, *eval_rewards) if trainer.state.shard.leads else ():
            reward.to(accelerator.device)

    trainer.evaluation.after_evaluation = _write_gallery
    trainer.state.report.forwards = kind.plan.forwards(settings)

    accelerator.wait_for_everyone()  # all have looked for the folder
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        if trainer.state.weights.begun and not settings.run.resume:
            lora_adapters.save(folder / lora_files.START, trainer.state.weights.begun)
        run_folder.replace_text(folder / "config.yaml", config.dump(settings))
        environment = {**report.environment(accelerator), "folder": str(Path.cwd())}
        run_folder.replace_text(folder / "environment.json", json.dumps(environment, indent=1) + "\n")
        changed = inputs.keep(folder, settings, source)
    accelerator.wait_for_everyone()
    trainer.state.weights.begun = {}  # saved in that file
    if settings.run.resume:
        trainer.checkpoints.resume()
    if accelerator.is_main_process and changed:
        with trainer.state.report:  # whose log they go to
            for sentence in changed:
                trainer.state.report.warn(sentence)
    try:
        trackers.start(accelerator, settings, folder, trainer.state.done)
        trainer.run()
    except Stopped as stopped:  # on every process, unless one is lost
        if accelerator.is_main_process:
            _write_gallery(folder)
        trackers.finish(accelerator, together=not isinstance(stopped, Lost))
        raise
    finally:
        accelerator.end_training()
    with torch.no_grad():
        weights = trainer.state.weights
        for p, average in zip(weights.parameters, weights.ema or weights.parameters, strict=True):
            p.copy_(average)
    if accelerator.is_main_process:
        _write_gallery(folder)
    return Run(folder, trainer.state.report.lines, trainer.state.policy)


def _write_gallery(folder: Path) -> None:
    try:
        if TreeFolder(folder).sizes():
            trees.write_trees(folder, folder / trees.TREES)
        else:
            (folder / trees.TREES).unlink(missing_ok=True)  # a resume dropped the trees that it showed
    except InputError as error:
        LOGGER.warning("the page of trees is not written: %s", error)
    gallery.write_gallery([folder], folder / "gallery.html")


def _check_only(uses: Sequence[RewardUse], every: Sequence[Prompt], key: str, which: str) -> None:
    for use in uses:
        name = use.name or default_name(use.use)
        if any(matches(prompt.columns, use.only) for prompt in every):
            continue
        for column, value in use.only.items():
            columns = list(dict.fromkeys(name for prompt in every for name in prompt.columns))
            if column not in columns:
                has = nearest(column, columns) if columns else "they have nothing but their texts"
                raise InputError(
                    f"{key}: {name!r} is only for {column} = {value!r}, no {which} prompt has that column; {has}"
                )
            known = list(dict.fromkeys(str(prompt.columns.get(column)) for prompt in every))
            if str(value) not in known:
                hint = nearest(str(value), known[:20])
                raise InputError(
                    f"{key}: {name!r} is only for {column} = {value!r}, no {which} prompt has that; {hint}"
                )
        raise InputError(f"{key}: {name!r} is only for {use.only}, no {which} prompt has all of that")


def _check_processes(settings: RunConfig, processes: int) -> None:
    if settings.run.processes not in (1, processes):
        raise InputError(
            f"run.processes: {settings.run.processes} processes are started by the command flowgrpo train, here "
            f"{'runs' if processes == 1 else 'run'} {processes}; from Python use accelerate launch"
        )
    run = settings.run
    worker_roles.check(run, processes)
    trainers = run.trainers(processes)
    check_geometry(
        settings.train, settings.algorithm, trainers, sharing=run.context_parallel, generators=run.generators
    )


def _check_left(settings: RunConfig) -> None:
    run, iterations = settings.run, settings.train.iterations
    if run.resume and resume.is_finished(run.folder, iterations=iterations, patience=run.patience):
        sentence = f"{run.folder} is finished, with all its {iterations} iterations"
        more = 2 * max(iterations, checkpoint.step_to_resume(run.folder / "checkpoints") or 0)
        raise Finished(sentence, "a longer run goes on", [f"train.iterations={more}", "run.resume=true"])
