"""`flowgrpo.Trainer`: plan, train, evaluate, sample and save from Python."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flowgrpo import config
from flowgrpo.commands.evaluations.evaluation import evaluate, numbers, summary
from flowgrpo.commands.evaluations.page import write_page
from flowgrpo.commands.evaluations.planning import plan_evaluation, read_request
from flowgrpo.commands.evaluations.results import Results
from flowgrpo.commands.evaluations.statistics import TOTAL
from flowgrpo.commands.evaluations.targets import Target
from flowgrpo.commands.model_kinds import detect_kind
from flowgrpo.commands.python import given
from flowgrpo.commands.python.shown import Samples
from flowgrpo.commands.runs import folder_check, plan, train
from flowgrpo.commands.runs.export import export
from flowgrpo.data import configs
from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.schema.sections import RunConfig
from flowgrpo.training.advantages.reward_combination import Combination
from flowgrpo.training.checkpoints import checkpoint
from flowgrpo.training.reports.metrics import totals_of
from flowgrpo.training.run import run_folder
from rewards.base import find as find_reward
from rewards.cards import default_name

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

Reward = str | Mapping[str, Any] | Callable[..., Any]
Prompts = str | Sequence[str | Mapping[str, Any]]


class Trainer:
    """A run in Python: the same numbers, folder and resume as `flowgrpo train`.

        trainer = flowgrpo.Trainer("shapes", rewards=[redness], prompts=["a red circle"], preset="awm_fast", name="red")
        trainer.plan()
        trainer.train()
        trainer.sample(["a red circle"])

    Attributes:
        settings: the whole configuration.
        metrics: the lines of `metrics.jsonl`, after `train`.
    """

    def __init__(
        self,
        pipeline: str | Path | DiffusionPipeline,
        rewards: Reward | Sequence[Reward],
        prompts: Prompts | Mapping[str, Any],
        *,
        eval_prompts: Prompts | None = None,
        preset: str | None = None,
        name: str | None = None,
        **sections: Any,
    ):
        """Check a configuration; nothing is loaded.

        A pipeline and lists of prompts are then written to the folder NAME-inputs beside the run's, from where the run
        reads them. A reward is a name or a map as in a config, or a function of samples and prompts that a notebook or a
        module defines.

        Args:
            pipeline: a pipeline of diffusers, a folder, a hub id, or a built-in model.
            prompts: a source as in a config, or a list of texts or of maps with `prompt` and further columns. A map is the
                section `prompts`, with these as its `train` and `eval`.
            eval_prompts: held out for evaluation; None evaluates on the prompts that are trained on.
            preset: a method, `algorithm.preset`.
            name: the run's, `run.name`; None is `notebook`.
            sections: the sections of a config: `train={"iterations": 4}`, `model={"lora": {"rank": 8}}`. `eval_rewards`
                takes what `rewards` takes.

        Raises InputError if something is wrong, RewardError if there is no such reward. Nothing is written then.
        """
        kind = detect_kind(str(pipeline)) if isinstance(pipeline, str | Path) else "flow"
        given.check_sections(sections, config.CONFIGS[kind]())
        own = dict(prompts) if isinstance(prompts, Mapping) else {"train": prompts}
        if "train" not in own:
            raise InputError("prompts: the map has no 'train'")
        arguments = {"algorithm.preset": preset, "run.name": name, "model.path": pipeline, "prompts.eval": eval_prompts}
        given.check_given_once(arguments, {**sections, "prompts": own})
        run = {"name": "notebook" if name is None else name, **sections.get("run", {})}
        uses = {"rewards": rewards, "eval_rewards": sections.get("eval_rewards", [])}
        written: dict[str, Any] = {**sections, "run": run, **{key: given.uses_of(told) for key, told in uses.items()}}
        if preset is not None:
            written["algorithm"] = {"preset": preset, **sections.get("algorithm", {})}
        folder = Path(str(run.get("dir", "runs"))) / str(run["name"])
        inputs = folder.with_name(f"{folder.name}-inputs")
        of_train = given.read_prompts(own["train"], inputs, "prompts")
        held_out = own.get("eval", eval_prompts)
        of_eval = of_train if held_out is None else given.read_prompts(held_out, inputs, "eval_prompts")
        written["prompts"] = {**own, "train": of_train[0], "eval": of_eval[0]}
        path, is_path = inputs / given.PIPELINE, isinstance(pipeline, str | Path)
        is_saved = run_folder.is_begun(folder) and path.is_dir()
        if not is_path:
            given.check_pipeline(pipeline)
            if is_saved:
                given.check_same_pipeline(pipeline, path)
        written |= {"kind": kind, "model": {**sections.get("model", {}), "path": str(pipeline if is_path else path)}}
        self.settings: RunConfig = config.validate(written)
        for use in (*self.settings.rewards, *self.settings.eval_rewards):
            find_reward(use.use)
        for source, text in (of_train, of_eval):
            if text is not None:
                given.write_table(Path(source), text)
        if not is_path and not is_saved:
            given.save_pipeline(pipeline, path)
        self.metrics: list[dict[str, Any]] = []
        self._source: Path | None = None

    @classmethod
    def from_config(cls, path: str | Path, overrides: Iterable[str] | Mapping[str, Any] = ()) -> Trainer:
        """Return a trainer of a config file or a built-in config, with overrides; see `flowgrpo.train`."""
        trainer = cls.__new__(cls)
        trainer.settings, trainer.metrics = config.load(path, overrides), []
        trainer._source = configs.place_of(path)
        return trainer

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.settings.run.folder

    def plan(self, gpu_memory: float | None = None) -> dict[str, Any]:
        """Print what the run will do and cost, and return it; with `gpu_memory` in GiB whether it fits such a GPU.

        Raises InputError if the config cannot be run.
        """
        return plan.show(self.settings, gpu_memory, None, "human")

    def train(self) -> list[dict[str, Any]]:
        """Train, and return the metrics: a map for each iteration and each evaluation; for errors see `flowgrpo.train`.

        The model leaves memory; `sample` and `evaluate` load the last checkpoint.
        """
        self.metrics = train.train_or_load(self.settings, self._source).metrics
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return self.metrics

    def evaluate(self, samples: int = 1, *, batch_size: int = 16) -> dict[str, Any]:
        """Return means of the rewards with standard errors on all evaluation prompts, of the last checkpoint or the model.

        The rewards are those of the run and its `eval_rewards`; `mean` and `error` are of the run's total, as training
        prints it. `samples` is the number of samples of each prompt. The samples, scores and a page are in
        NAME-evaluations beside the run's folder; an evaluation that is done is not repeated. Raises InputError if the run's
        folder holds another run.
        """
        settings, target = self.settings, self._target()
        request = read_request(
            settings.prompts.eval,
            by=None,
            uses=[*settings.rewards, *settings.eval_rewards],
            samples=samples,
            limit=None,
            batch_size=batch_size,
        )
        folder = self.folder.with_name(f"{self.folder.name}-evaluations") / target.name
        results = evaluate(plan_evaluation(request, target, folder))
        return {**summary(results), **self._total(results), "page": str(write_page([results]))}

    def sample(self, prompts: Sequence[str], seed: int = 0) -> Samples:
        """Return a sample of each prompt, of the last checkpoint or the model; prompt i has seed `seed` + i.

        The model is loaded for the call, so give all prompts at once. Raises InputError if the run's folder holds another
        run.
        """
        if isinstance(prompts, str):
            raise InputError(f"sample: {prompts!r} is one text, give a list of prompts")
        rows = [Row(prompt, seed + i) for i, prompt in enumerate(prompts)]
        sampler = self._target().sampler(rows)
        return Samples(sampler.generate(rows), sampler.sampling_rate, sampler.frame_rate)

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write the trained weights for diffusers or transformers, as `flowgrpo export` does, and return the folder.

        Raises InputError if the run has no checkpoint, its folder holds another run, or `folder` is not empty.
        """
        if self._checkpoint() is None:
            raise InputError("save_pretrained: nothing is trained yet, call train() first")
        return export(self.folder, Path(folder)).folder

    def _target(self) -> Target:
        """Return the last checkpoint of the run; the model as it is if there is none."""
        found = self._checkpoint()
        if found is None:
            return Target(name="step-000000", settings=self.settings)
        return Target(name=found.name, settings=self.settings, run=self.folder, found=found)

    def _checkpoint(self) -> Path | None:
        """Return the last checkpoint of the run, None before there is one; raise InputError if another run is there."""
        if not run_folder.is_begun(self.folder):
            return None
        if changed := folder_check.changes(self.settings):
            words = (key.split(".") for key in changed)
            keys = dict.fromkeys(".".join(word for word in path[:2] if not word.isdigit()) for path in words)
            raise InputError(
                f"name: {self.folder} holds another run, which differs in {', '.join(keys)}; take another name"
            )
        if checkpoint.latest(self.folder / "checkpoints") is None:
            return None
        found = checkpoint.find(self.folder / "checkpoints", None)
        checkpoint.check(found)
        return found

    def _total(self, results: Results) -> dict[str, Any]:
        """Return the numbers of the run's total, which combines its rewards."""
        uses = self.settings.rewards
        names = [use.name or default_name(use.use) for use in uses]
        combination = Combination.of(uses, self.settings.algorithm.baseline)
        totals = totals_of((one.rewards for one in results.samples), combination, names).tolist()
        combined = [
            replace(one, rewards={TOTAL: None if math.isnan(total) else total}, answers={})
            for one, total in zip(results.samples, totals, strict=True)
        ]
        return numbers(replace(results, samples=combined), TOTAL)
