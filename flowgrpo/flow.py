"""What a run of a flow model needs before its first iteration: checks that cost little, then the model."""

from __future__ import annotations

from collections.abc import Sequence

from accelerate import Accelerator

from flowgrpo import calibration, checkpoint, conditions, loading, memory, switches
from flowgrpo.config import Config
from flowgrpo.modality import expected_shape
from flowgrpo.plan import call_and_branches, pipeline_class, predicted
from flowgrpo.policy import Row
from flowgrpo.prompts import Prompt
from flowgrpo.trainer import Trainer
from rewards import Reward


def check(
    settings: Config,
    train_prompts: Sequence[Prompt],
    eval_prompts: Sequence[Prompt],
    rewards: Sequence[Reward],
    eval_rewards: Sequence[Reward],
) -> None:
    """Refuse what can be refused without the model.

    Raises:
        InputError: the axes do not fit each other, or the folder's calibration cannot be read.
        RewardError: a reward fails on synthetic samples.
    """
    if settings.algorithm.kernel.calibrate is not None:
        folder = settings.run.folder
        calibration.read(folder, begun=checkpoint.resumed(folder / "checkpoints") is not None)
    steps = call_and_branches(settings)[0]["num_inference_steps"]
    if steps is not None:  # otherwise the pipeline decides, and is asked later
        predicted(settings, steps)  # refuses axes that do not fit each other
    shape = expected_shape(pipeline_class(settings.model.path), settings.model.call)
    loading.check_rewards(rewards, train_prompts, shape)
    loading.check_rewards([*rewards, *eval_rewards], eval_prompts, shape)


def trainer(
    settings: Config,
    accelerator: Accelerator,
    train_prompts: Sequence[Prompt],
    eval_prompts: Sequence[Prompt],
    rewards: Sequence[Reward],
    eval_rewards: Sequence[Reward],
) -> Trainer:
    """The loop with its model, which has been asked whether it can do what is wanted.

    Raises:
        InputError: it cannot, or does not fit into memory.
    """
    memory.check(settings, accelerator.device)
    policy, weights = loading.policy_and_weights(settings, accelerator.device)
    train_prompts, eval_prompts = (loading.with_sampling_rate(part, policy) for part in (train_prompts, eval_prompts))
    conditions.check((p.columns for p in train_prompts), policy.takes, "prompts.train")
    conditions.check((p.columns for p in eval_prompts), policy.takes, "prompts.eval")
    steps = call_and_branches(settings)[0]["num_inference_steps"]
    with policy.calling(**switches.training_call(settings.model, policy)):
        policy.check(_unequal(train_prompts))
        if settings.model.guidance == "none":
            switches.check_unguided(policy, _unequal(train_prompts))
        if len(policy.sigmas) - 1 != steps:  # some pipelines walk another number of steps than they are asked for
            predicted(settings, len(policy.sigmas) - 1)
    if settings.eval.call or settings.model.guidance == "none":
        with policy.calling(**settings.eval.call):
            policy.check(_unequal(eval_prompts), "eval.call")
    return Trainer(
        settings, policy, weights, rewards, train_prompts, eval_prompts, eval_rewards, accelerator=accelerator
    )


def _unequal(prompts: Sequence[Prompt]) -> list[Row]:
    """The longest and the shortest prompt."""
    chosen = (max(prompts, key=lambda p: len(p.text)), min(prompts, key=lambda p: len(p.text)))
    return [Row(prompt.text, i, prompt.columns) for i, prompt in enumerate(chosen)]
