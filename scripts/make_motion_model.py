"""Train the embedded video model `clips`: a small WanPipeline, 9 frames of 48 x 48 pixels of moving flat shapes.

    python scripts/make_motion_model.py --out flowgrpo/models/clips

Its stages are those of scripts/make_flow_model.py: autoencoder, a pool of encoded clips, then transformer and text encoder
by flow matching. The model is imperfect on purpose: each part of a caption is wrong at a rate of its own (`clips.reword`).
Transformer and autoencoder are saved as float16 safetensors, the text encoder as float32. The script needs a C++ compiler
and torch 2.9 (Muon). The packaged weights come from this code in two parts; the script has not run once from start to end.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from make_flow_model import DROPPED_CAPTIONS, Random, adamw, muon, optimise, tokenizer
from transformers import UMT5Config, UMT5EncoderModel

from flowgrpo.data.embedded import default_call
from flowgrpo.data.generators import clips
from rewards import moves

WIDTH, TEXT_WIDTH, TEXT_TOKENS = 128, 64, 12
CHANNELS = 16  # of a latent
POOL = 12_000
BATCH = 32
AUTOENCODER_STEPS = 2400
PASSES = ((3200, (0.1, 0.1, 0.1)), (3600, (0.1, 0.15, 0.15)))  # steps, and how often parts of captions are wrong


def words() -> list[str]:
    """Return the vocabulary of the captions."""
    return [
        "and",
        "a",
        *moves.COLOURS,
        *moves.SHAPES,
        *sorted({word for motion in moves.MOTIONS for word in motion.split()}),
    ]


def build() -> WanPipeline:
    """Return the untrained pipeline: a UMT5 of two layers, an autoencoder (8 in space, 4 in time), a 4-layer transformer."""
    texts = tokenizer(words())
    encoder = UMT5EncoderModel(
        UMT5Config(
            vocab_size=len(texts),
            d_model=TEXT_WIDTH,
            d_kv=TEXT_WIDTH // 2,
            d_ff=4 * TEXT_WIDTH,
            num_heads=2,
            num_layers=2,
            dropout_rate=0.0,
            pad_token_id=texts.pad_token_id,
            eos_token_id=texts.eos_token_id,
        )
    )
    return WanPipeline(
        tokenizer=texts,
        text_encoder=encoder,
        vae=AutoencoderKLWan(
            in_channels=12,
            out_channels=12,
            patch_size=2,
            base_dim=16,
            z_dim=CHANNELS,
            dim_mult=[1, 2, 2],
            num_res_blocks=1,
            temperal_downsample=[True, True],
            latents_mean=[0.0] * CHANNELS,
            latents_std=[1.0] * CHANNELS,
            scale_factor_spatial=8,
            scale_factor_temporal=4,
        ),
        transformer=WanTransformer3DModel(
            patch_size=(1, 1, 1),
            num_attention_heads=WIDTH // 32,
            attention_head_dim=32,
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            text_dim=TEXT_WIDTH,
            freq_dim=TEXT_WIDTH,
            ffn_dim=4 * WIDTH,
            num_layers=4,
            rope_max_seq_len=32,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
    )


def films(count: int, rng: Random) -> tuple[torch.Tensor, list[clips.Caption]]:
    """Return random clips (count, 3, 9, 48, 48) in [-1, 1] with their captions, none of them held out."""
    allowed = [caption for caption in clips.every_caption() if not clips.is_held_out(caption)]
    chosen = [allowed[i] for i in rng.integers(0, len(allowed), count)]
    drawn = np.stack([clips.draw(clips.arrange(caption, rng)) for caption in chosen])
    return torch.from_numpy(drawn).transpose(1, 2) * 2 - 1, chosen


def train_autoencoder(vae: AutoencoderKLWan, steps: int, rng: Random) -> None:
    """Train an autoencoder: absolute plus squared error, and a small KL to a unit Gaussian."""

    def loss() -> torch.Tensor:
        videos, _ = films(8, rng)
        posterior = vae.encode(videos).latent_dist
        error = vae.decode(posterior.sample()).sample - videos
        return error.abs().mean() + error.square().mean() + 1e-5 * posterior.kl().mean() / 64

    optimise([adamw(list(vae.parameters()), 1.5e-3)], steps, loss, "autoencoder")


@torch.no_grad()
def make_pool(vae: AutoencoderKLWan, count: int, rng: Random) -> tuple[torch.Tensor, list[clips.Caption]]:
    """Return latents (count, 16, 3, 6, 6) of unit scale with captions; set the autoencoder's mean and deviation."""
    batches = [films(50, rng) for _ in range(count // 50)]
    latents = torch.cat([vae.encode(videos).latent_dist.mean for videos, _ in batches])
    mean, deviation = latents.mean((0, 2, 3, 4)), latents.std((0, 2, 3, 4))
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=deviation.tolist())
    normal = (latents - mean.view(-1, 1, 1, 1)) / deviation.view(-1, 1, 1, 1)
    return normal, [caption for _, chosen in batches for caption in chosen]


def train_flow(
    pipe: WanPipeline,
    latents: torch.Tensor,
    captions: Sequence[clips.Caption],
    steps: int,
    wrong: tuple[float, float, float],
    rng: Random,
) -> None:
    """Train transformer and text encoder by flow matching with logit-normal sigmas; end with their moving average."""
    parameters = [p for module in (pipe.transformer, pipe.text_encoder) for p in module.parameters()]
    average = [p.detach().clone() for p in parameters]
    transformer = torch.compile(pipe.transformer)

    def loss() -> torch.Tensor:
        with torch.no_grad():
            for slow, p in zip(average, parameters, strict=True):
                slow.lerp_(p, 0.005)
        rows = rng.integers(0, len(captions), BATCH)
        described = [str(clips.reword(captions[i], wrong, rng)) for i in rows]
        prompts = ["" if rng.random() < DROPPED_CAPTIONS else text for text in described]
        embeds, _ = pipe.encode_prompt(prompts, do_classifier_free_guidance=False, max_sequence_length=TEXT_TOKENS)
        x0 = latents[rows]
        noise = torch.randn_like(x0)
        sigma = torch.sigmoid(torch.randn(BATCH))
        s = sigma[:, None, None, None, None]
        velocity = transformer(
            hidden_states=(1 - s) * x0 + s * noise,
            timestep=1000 * sigma,
            encoder_hidden_states=embeds,
            return_dict=False,
        )[0]
        return (velocity - (noise - x0)).square().mean()

    optimise(muon(pipe.transformer.blocks, parameters), steps, loss, "flow")
    for slow, p in zip(average, parameters, strict=True):
        p.data.copy_(slow)


@torch.no_grad()
def held_out_reward(pipe: WanPipeline, **call: Any) -> float:
    """Return the mean reward of the held-out captions: fixed seeds, by ODE."""
    pipe.set_progress_bar_config(disable=True)
    texts = list(clips.captions("eval"))
    generators = [torch.Generator().manual_seed(i) for i in range(len(texts))]
    call = {**default_call("clips"), "output_type": "pt", **call}
    return float(np.mean(moves.moves(pipe(texts, generator=generators, **call).frames, texts)))


def main() -> None:
    """Train, save, reload and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    rng = np.random.default_rng(arguments.seed)

    pipe = build()
    train_autoencoder(pipe.vae, AUTOENCODER_STEPS, rng)
    latents, captions = make_pool(pipe.vae, POOL, rng)
    for steps, wrong in PASSES:
        train_flow(pipe, latents, captions, steps, wrong, rng)
    pipe.to(torch.float16)
    pipe.text_encoder.float()
    pipe.save_pretrained(arguments.out)
    pipe = WanPipeline.from_pretrained(arguments.out)
    plain, guided = (held_out_reward(pipe, **call) for call in ({}, {"guidance_scale": 3.0}))
    print(f"held-out reward {plain:.3f}, with guidance 3 {guided:.3f}")


if __name__ == "__main__":
    main()
