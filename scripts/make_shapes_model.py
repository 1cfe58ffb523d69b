"""Train the embedded flow model: a small StableDiffusion3Pipeline of 64 x 64 scenes of flat shapes.

    python scripts/make_shapes_model.py --out flowgrpo/shapes/model

It trains the autoencoder on drawn scenes, encodes a pool of scenes, then trains transformer and text encoders by flow
matching in three passes. The model is imperfect on purpose: a share of captions describes another picture, most in the
short second pass. So pictures are clean but follow prompts loosely, and alignment can improve them. Dropped captions
enable guidance. Transformer and autoencoder are saved as float16 safetensors, which diffusers loads as float32. Text
encoders are saved as float32, because transformers loads them as stored. The script needs a C++ compiler and torch 2.9
(Muon), and takes some 47 minutes on two cores.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, PreTrainedTokenizerFast, T5Config, T5EncoderModel

from flowgrpo.data.generators.scenes import arrange, captions, draw, every_caption, is_held_out
from rewards.shapes import COLOURS, COUNTS, RELATIONS, SHAPES, shapes

TEXT_TOKENS = 12
TEXT_WIDTH = 64
WIDTH = 128
T5_TOKENS = 1  # the pipeline appends this many tokens of T5, here zeros
POOL = 24_000
BATCH = 64
PASSES = ((4000, 0.15), (1500, 0.35), (1300, 0.2))  # steps, share of captions that describe another picture
DROPPED_CAPTIONS = 0.1


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a word-level tokenizer of the caption language, padded to `TEXT_TOKENS`."""
    words = ["<pad>", "<start>", "<end>", "<unknown>", "and", *COUNTS, *COLOURS]
    words += [form for shape in SHAPES for form in (shape, shape + "s")]
    words += sorted({word for relation in RELATIONS for word in relation.split()})
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


def build() -> StableDiffusion3Pipeline:
    """Return the untrained pipeline: two CLIP text encoders, a silent T5, an f = 4 autoencoder and a 4-layer transformer."""
    words = tokenizer()
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
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        text_encoder=CLIPTextModelWithProjection(text),
        text_encoder_2=CLIPTextModelWithProjection(text),
        text_encoder_3=t5,
        tokenizer=words,
        tokenizer_2=tokenizer(),
        tokenizer_3=nothing,
    )


def scenes(count: int, rng: np.random.Generator) -> tuple[torch.Tensor, list[str]]:
    """Return random pictures (count, 3, 64, 64) in [-1, 1] with their captions, none of them held out."""
    allowed = [caption for caption in every_caption() if not is_held_out(caption)]
    chosen = [allowed[i] for i in rng.integers(0, len(allowed), count)]
    return torch.from_numpy(np.stack([draw(arrange(caption, rng)) for caption in chosen])) * 2 - 1, chosen


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


def train_autoencoder(vae: AutoencoderKL, steps: int, rng: np.random.Generator) -> None:
    """Train an autoencoder: absolute plus squared error, and a small KL to a unit Gaussian."""

    def loss() -> torch.Tensor:
        images, _ = scenes(16, rng)
        posterior = vae.encode(images).latent_dist
        error = vae.decode(posterior.sample()).sample - images
        return error.abs().mean() + error.square().mean() + 1e-5 * posterior.kl().mean() / 64

    optimise([adamw(list(vae.parameters()), 1.5e-3)], steps, loss, "autoencoder")


@torch.no_grad()
def make_pool(vae: AutoencoderKL, count: int, rng: np.random.Generator) -> tuple[torch.Tensor, list[str]]:
    """Return latents (count, 4, 16, 16) of unit scale with captions; set the autoencoder's scale and shift."""
    batches = [scenes(200, rng) for _ in range(count // 200)]
    latents = torch.cat([vae.encode(images).latent_dist.mean for images, _ in batches])
    vae.register_to_config(shift_factor=latents.mean().item(), scaling_factor=1 / latents.std().item())
    latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor
    return latents, [caption for _, chosen in batches for caption in chosen]


def train_flow(
    pipe: StableDiffusion3Pipeline, latents: torch.Tensor, texts: list[str], steps: int, wrong_captions: float, rng
) -> None:
    """Train transformer and text encoders by flow matching, with logit-normal sigmas; at the end, load their moving average.

    Muon orthogonalises the updates of the blocks' matrices, which learn the scenes in far fewer steps than with AdamW.
    AdamW trains all other parameters.
    """
    modules = [pipe.transformer, pipe.text_encoder, pipe.text_encoder_2]
    parameters = [p for module in modules for p in module.parameters()]
    average = [p.detach().clone() for p in parameters]
    matrices = {id(p): p for p in pipe.transformer.transformer_blocks.parameters() if p.ndim == 2}
    optimizers = [
        torch.optim.Muon(
            list(matrices.values()), lr=3e-3, momentum=0.95, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
        ),
        adamw([p for p in parameters if id(p) not in matrices], 1e-3),
    ]
    transformer = torch.compile(pipe.transformer)

    def loss() -> torch.Tensor:
        with torch.no_grad():
            for slow, p in zip(average, parameters, strict=True):
                slow.lerp_(p, 0.005)
        rows = rng.integers(0, len(texts), BATCH)
        wrong = rng.random(BATCH) < wrong_captions
        described = np.where(wrong, rng.integers(0, len(texts), BATCH), rows)
        prompts = ["" if rng.random() < DROPPED_CAPTIONS else texts[i] for i in described]
        embeds, _, pooled, _ = pipe.encode_prompt(
            prompts, None, None, do_classifier_free_guidance=False, max_sequence_length=T5_TOKENS
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

    optimise(optimizers, steps, loss, "flow")
    for slow, p in zip(average, parameters, strict=True):
        p.data.copy_(slow)


@torch.no_grad()
def held_out_reward(pipe: StableDiffusion3Pipeline, **call) -> float:
    """Return the mean `shapes` reward of the 256 held-out captions: fixed seeds, 10 ODE steps, no guidance."""
    pipe.set_progress_bar_config(disable=True)
    prompts = captions("eval")
    call = {"num_inference_steps": 10, "guidance_scale": 1.0, "height": 64, "width": 64, **call}
    generators = [torch.Generator().manual_seed(i) for i in range(len(prompts))]
    images = pipe(prompts, generator=generators, max_sequence_length=T5_TOKENS, output_type="pt", **call).images
    return float(np.mean(shapes(images, prompts)))


def save(pipe: StableDiffusion3Pipeline, out: Path) -> None:
    """Save in half precision, text encoders as float32."""
    pipe.to(torch.float16)
    for encoder in (pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3):
        encoder.float()
    pipe.save_pretrained(out)


def main() -> None:
    """Train, save, reload and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--autoencoder-steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    rng = np.random.default_rng(arguments.seed)

    pipe = build()
    train_autoencoder(pipe.vae, arguments.autoencoder_steps, rng)
    latents, texts = make_pool(pipe.vae, POOL, rng)
    for steps, wrong_captions in PASSES:
        train_flow(pipe, latents, texts, steps, wrong_captions, rng)
    save(pipe, arguments.out)
    pipe = StableDiffusion3Pipeline.from_pretrained(arguments.out)
    print(
        f"held-out reward {held_out_reward(pipe):.3f}, with guidance 3 {held_out_reward(pipe, guidance_scale=3.0):.3f}"
    )


if __name__ == "__main__":
    main()
