"""Train an embedded flow model: a small StableDiffusion3Pipeline of 64 x 64 scenes of flat shapes.

    python scripts/make_flow_model.py shapes --out flowgrpo/models/shapes
    python scripts/make_flow_model.py patterns --out flowgrpo/models/patterns

It trains the autoencoder on drawn scenes, encodes a pool of scenes, then trains transformer and text encoders by flow
matching in several passes. The model is imperfect on purpose: a share of captions is wrong (see `Task`). So pictures are
clean but follow prompts loosely, and alignment can improve them. Dropped captions enable guidance. Transformer and
autoencoder are saved as float16 safetensors, which diffusers loads as float32. Text encoders are saved as float32, because
transformers loads them as stored. The script needs a C++ compiler and torch 2.9 (Muon), and takes some 47 minutes on two
cores for `shapes`, 30 for `patterns`.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, PreTrainedTokenizerFast, T5Config, T5EncoderModel

from flowgrpo.data.embedded import default_call
from flowgrpo.data.generators import patterned, scenes
from rewards import patterns, shapes

TEXT_TOKENS = 12
TEXT_WIDTH = 64
WIDTH = 128
POOL = 24_000
BATCH = 64
DROPPED_CAPTIONS = 0.1

Random = np.random.Generator


@dataclass(frozen=True)
class Task:
    """What a model learns.

    Attributes:
        words: vocabulary of the captions.
        allowed: captions to train on.
        paint: draw a caption as float32 (3, 64, 64) in [0, 1].
        autoencoder_steps: steps that train the autoencoder.
        passes: steps of each pass, and how often captions are wrong in it.
        describe: the captions of some rows of the pool, of which some are wrong.
        reward: the reward of pictures for captions.
        held_out: captions that the model is tried on.
        shift: of the sampler's schedule.
    """

    words: Sequence[str]
    allowed: Sequence[str]
    paint: Callable[[str, Random], np.ndarray]
    autoencoder_steps: int
    passes: Sequence[tuple[int, Any]]
    describe: Callable[[list[str], np.ndarray, Any, Random], list[str]]
    reward: Callable[[torch.Tensor, Sequence[str]], list[float]]
    held_out: Sequence[str]
    shift: float


def shapes_task() -> Task:
    """Return the task of `shapes`, where a wrong caption describes another picture."""

    def describe(texts: list[str], rows: np.ndarray, wrong: float, rng: Random) -> list[str]:
        swapped = rng.random(len(rows)) < wrong
        return [texts[i] for i in np.where(swapped, rng.integers(0, len(texts), len(rows)), rows)]

    words = ["and", *shapes.COUNTS, *shapes.COLOURS]
    words += [form for shape in shapes.SHAPES for form in (shape, shape + "s")]
    return Task(
        words=words + sorted({word for relation in shapes.RELATIONS for word in relation.split()}),
        allowed=[caption for caption in scenes.every_caption() if not scenes.is_held_out(caption)],
        paint=lambda caption, rng: scenes.draw(scenes.arrange(caption, rng)),
        autoencoder_steps=1500,
        passes=((4000, 0.15), (1500, 0.35), (1300, 0.2)),
        describe=describe,
        reward=shapes.shapes,
        held_out=scenes.captions("eval"),
        shift=3.0,
    )


def patterns_task() -> Task:
    """Return the task of `patterns`, where each part of a caption is wrong at a rate of its own (`patterned.reword`)."""

    def paint(caption: str, rng: Random) -> np.ndarray:
        parsed = patterns.parse(caption)
        return patterned.draw(patterned.arrange(parsed, rng), parsed.kinds)

    def describe(texts: list[str], rows: np.ndarray, rates: tuple[float, float, float], rng: Random) -> list[str]:
        return [str(patterned.reword(patterns.parse(texts[i]), rates, rng)) for i in rows]

    words = ["and", "a", *patterns.COLOURS, *patterns.SHAPES, *patterns.PATTERNS]
    return Task(
        words=words + sorted({word for relation in patterns.RELATIONS for word in relation.split()}),
        allowed=[str(caption) for caption in patterned.every_caption() if not patterned.is_held_out(caption)],
        paint=paint,
        autoencoder_steps=1200,
        passes=((3500, (0.1, 0.1, 0.1)), (1000, (0.25, 0.35, 0.4))),
        describe=describe,
        reward=patterns.patterns,
        held_out=patterned.captions("eval"),
        shift=6.5,  # by which each third of the steps decides a fifth of the reward or more
    )


TASKS = {"shapes": shapes_task, "patterns": patterns_task}


def tokenizer(caption_words: Sequence[str]) -> PreTrainedTokenizerFast:
    """Return a word-level tokenizer of the caption language, padded to `TEXT_TOKENS`."""
    words = ["<pad>", "<start>", "<end>", "<unknown>", *caption_words]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unknown>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(
        single="<start> $A <end>", special_tokens=[("<start>", 1), ("<end>", 2)]
    )
    names = {"pad_token": "<pad>", "bos_token": "<start>", "eos_token": "<end>", "unk_token": "<unknown>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **names, model_max_length=TEXT_TOKENS)


def silent_t5() -> tuple[T5EncoderModel, PreTrainedTokenizerFast]:
    """Return a T5 without layers, and its tokenizer; it outputs zeros, which the pipeline uses if it has no T5.

    It exists because `from_pretrained` requires text_encoder_3, unless that is passed as None.
    """
    sizes = {"d_model": 2 * TEXT_WIDTH, "d_kv": 1, "d_ff": 1, "num_heads": 1, "num_layers": 0}
    model = T5EncoderModel(T5Config(vocab_size=2, **sizes, pad_token_id=0, eos_token_id=1))
    model.shared.weight.data.zero_()
    inner = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1}, unk_token="<pad>"))
    inner.normalizer = normalizers.Replace(Regex(r"[\s\S]+"), "")
    inner.post_processor = processors.TemplateProcessing(single="$A <end>", special_tokens=[("<end>", 1)])
    names = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<pad>"}
    return model, PreTrainedTokenizerFast(tokenizer_object=inner, **names, model_max_length=TEXT_TOKENS)


def build(caption_words: Sequence[str], shift: float) -> StableDiffusion3Pipeline:
    """Return the untrained pipeline: two CLIP text encoders, a silent T5, an f = 4 autoencoder and a 4-layer transformer."""
    words = tokenizer(caption_words)
    t5, nothing = silent_t5()
    text = CLIPTextConfig(
        vocab_size=len(words),
        hidden_size=TEXT_WIDTH,
        intermediate_size=4 * TEXT_WIDTH,
        projection_dim=TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=TEXT_TOKENS,
        pad_token_id=words.pad_token_id,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
    )
    return StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=4,
            attention_head_dim=32,
            num_attention_heads=WIDTH // 32,
            joint_attention_dim=2 * TEXT_WIDTH,
            caption_projection_dim=WIDTH,
            pooled_projection_dim=2 * TEXT_WIDTH,
            pos_embed_max_size=8,
            qk_norm="rms_norm",
        ),
        vae=AutoencoderKL(
            latent_channels=4,
            block_out_channels=(16, 32, 64),
            down_block_types=("DownEncoderBlock2D",) * 3,
            up_block_types=("UpDecoderBlock2D",) * 3,
            layers_per_block=1,
            norm_num_groups=8,
            sample_size=64,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=shift),
        text_encoder=CLIPTextModelWithProjection(text),
        text_encoder_2=CLIPTextModelWithProjection(text),
        text_encoder_3=t5,
        tokenizer=words,
        tokenizer_2=tokenizer(caption_words),
        tokenizer_3=nothing,
    )


def pictures(task: Task, count: int, rng: Random) -> tuple[torch.Tensor, list[str]]:
    """Return random pictures (count, 3, 64, 64) in [-1, 1] with their captions, none of them held out."""
    chosen = [task.allowed[i] for i in rng.integers(0, len(task.allowed), count)]
    return torch.from_numpy(np.stack([task.paint(caption, rng) for caption in chosen])) * 2 - 1, chosen


def optimise(optimizers: list[torch.optim.Optimizer], steps: int, loss, name: str) -> None:
    """Minimise `loss()` with a short warm-up and a cosine decay of every optimizer's rate, reporting as it goes."""
    warm = min(100, steps // 10 + 1)
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    factor = lambda i: min((i + 1) / warm, 0.5 * (1 + np.cos(np.pi * i / steps)) + 0.01)  # noqa: E731
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, factor) for optimizer in optimizers]
    started, mean = time.time(), 0.0
    for step in range(1, steps + 1):
        value = loss()
        value.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for schedule in schedules:
            schedule.step()
        mean += (value.item() - mean) / min(step, 100)
        if step % 100 == 0 or step == steps:
            print(f"{name} {step}/{steps} loss {mean:.4f} {time.time() - started:.0f} s", flush=True)


def adamw(parameters: list[torch.nn.Parameter], rate: float) -> torch.optim.Optimizer:
    """Return the AdamW of all stages, whose second moment averages fewer steps than the default."""
    return torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.99), weight_decay=0.01)


def muon(
    blocks: torch.nn.Module, parameters: list[torch.nn.Parameter], rate: float = 3e-3
) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a transformer with such blocks, and of what is trained with it.

    Muon orthogonalises the updates of the blocks' matrices, which learn the scenes in far fewer steps than with AdamW.
    AdamW trains all other parameters at a third of the rate.
    """
    matrices = {id(p): p for p in blocks.parameters() if p.ndim == 2}
    return [
        torch.optim.Muon(
            list(matrices.values()), lr=rate, momentum=0.95, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
        ),
        adamw([p for p in parameters if id(p) not in matrices], rate / 3),
    ]


def train_autoencoder(task: Task, vae: AutoencoderKL, steps: int, rng: Random) -> None:
    """Train an autoencoder: absolute plus squared error, and a small KL to a unit Gaussian."""

    def loss() -> torch.Tensor:
        images, _ = pictures(task, 16, rng)
        posterior = vae.encode(images).latent_dist
        error = vae.decode(posterior.sample()).sample - images
        return error.abs().mean() + error.square().mean() + 1e-5 * posterior.kl().mean() / 64

    optimise([adamw(list(vae.parameters()), 1.5e-3)], steps, loss, "autoencoder")


@torch.no_grad()
def make_pool(task: Task, vae: AutoencoderKL, count: int, rng: Random) -> tuple[torch.Tensor, list[str]]:
    """Return latents (count, 4, 16, 16) of unit scale with captions; set the autoencoder's scale and shift."""
    batches = [pictures(task, 200, rng) for _ in range(count // 200)]
    latents = torch.cat([vae.encode(images).latent_dist.mean for images, _ in batches])
    vae.register_to_config(shift_factor=latents.mean().item(), scaling_factor=1 / latents.std().item())
    latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor
    return latents, [caption for _, chosen in batches for caption in chosen]


def train_flow(
    task: Task,
    pipe: StableDiffusion3Pipeline,
    latents: torch.Tensor,
    texts: list[str],
    steps: int,
    wrong: Any,
    rng: Random,
) -> None:
    """Train transformer and text encoders by flow matching with logit-normal sigmas; end with their moving average."""
    modules = [pipe.transformer, pipe.text_encoder, pipe.text_encoder_2]
    parameters = [p for module in modules for p in module.parameters()]
    average = [p.detach().clone() for p in parameters]
    transformer = torch.compile(pipe.transformer)

    def loss() -> torch.Tensor:
        with torch.no_grad():
            for slow, p in zip(average, parameters, strict=True):
                slow.lerp_(p, 0.005)
        rows = rng.integers(0, len(texts), BATCH)
        described = task.describe(texts, rows, wrong, rng)
        prompts = ["" if rng.random() < DROPPED_CAPTIONS else text for text in described]
        embeds, _, pooled, _ = pipe.encode_prompt(
            prompts, None, None, do_classifier_free_guidance=False, max_sequence_length=1
        )
        x0 = latents[rows]
        noise = torch.randn_like(x0)
        sigma = torch.sigmoid(torch.randn(BATCH))
        s = sigma[:, None, None, None]
        velocity = transformer(
            hidden_states=(1 - s) * x0 + s * noise,
            timestep=1000 * sigma,
            encoder_hidden_states=embeds,
            pooled_projections=pooled,
            return_dict=False,
        )[0]
        return (velocity - (noise - x0)).square().mean()

    optimise(muon(pipe.transformer.transformer_blocks, parameters), steps, loss, "flow")
    for slow, p in zip(average, parameters, strict=True):
        p.data.copy_(slow)


@torch.no_grad()
def held_out_reward(name: str, task: Task, pipe: StableDiffusion3Pipeline, **call: Any) -> float:
    """Return the mean reward of the held-out captions: fixed seeds, by ODE."""
    pipe.set_progress_bar_config(disable=True)
    generators = [torch.Generator().manual_seed(i) for i in range(len(task.held_out))]
    call = {**default_call(name), "output_type": "pt", **call}
    return float(np.mean(task.reward(pipe(list(task.held_out), generator=generators, **call).images, task.held_out)))


def save(pipe: StableDiffusion3Pipeline, out: Path) -> None:
    """Save in half precision, text encoders as float32."""
    pipe.to(torch.float16)
    for encoder in (pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3):
        encoder.float()
    pipe.save_pretrained(out)


def main() -> None:
    """Train, save, reload and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    rng = np.random.default_rng(arguments.seed)

    task = TASKS[arguments.task]()
    pipe = build(task.words, task.shift)
    train_autoencoder(task, pipe.vae, task.autoencoder_steps, rng)
    latents, texts = make_pool(task, pipe.vae, POOL, rng)
    for steps, wrong in task.passes:
        train_flow(task, pipe, latents, texts, steps, wrong, rng)
    save(pipe, arguments.out)
    pipe = StableDiffusion3Pipeline.from_pretrained(arguments.out)
    plain, guided = (held_out_reward(arguments.task, task, pipe, **call) for call in ({}, {"guidance_scale": 3.0}))
    print(f"held-out reward {plain:.3f}, with guidance 3 {guided:.3f}")


if __name__ == "__main__":
    main()
