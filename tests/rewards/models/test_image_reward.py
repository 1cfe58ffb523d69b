import math

import pytest
import tiny_rewards
import torch
from torch.nn import functional as F

import rewards
from rewards import RewardError

PROMPTS = ["a red circle", "two dog barks of a blue square", "a"]
CLIP_MEAN = torch.tensor([0.48145466, 0.4578275, 0.40821073])[:, None, None]
CLIP_STD = torch.tensor([0.26862954, 0.26130258, 0.27577711])[:, None, None]


@pytest.fixture(scope="module")
def weights():
    return tiny_rewards.image_reward_weights()


@pytest.fixture
def folder(weights, tmp_path):
    torch.save(weights, tmp_path / "ImageReward.pt")
    tiny_rewards.save_tokenizer(tmp_path, 64)
    return tmp_path


def load(folder, **options):
    return rewards.load("image_reward", options={"path": str(folder), "tokenizer": str(folder), **options})


def attention(query, key, value, width=64):
    """Heads of 64, one sample: (Q, D), (K, D), (K, D) -> (Q, D)."""
    heads = [
        torch.softmax(q @ k.T / math.sqrt(width), -1) @ v
        for q, k, v in zip(query.split(width, 1), key.split(width, 1), value.split(width, 1), strict=True)
    ]
    return torch.cat(heads, 1)


def by_hand(weights, image, ids):
    """ImageReward after the authors' code in float64: pre-norm picture blocks, post-norm text layers; `ids` unpadded."""
    w = {name: value.double() if value.is_floating_point() else value for name, value in weights.items()}

    def linear(x, name):
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def norm(x, name, eps):
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps)

    eyes, read = "blip.visual_encoder.", "blip.text_encoder."
    pixels = ((image - CLIP_MEAN) / CLIP_STD).double()[None]
    patches = F.conv2d(pixels, w[f"{eyes}patch_embed.proj.weight"], w[f"{eyes}patch_embed.proj.bias"], stride=16)
    x = torch.cat([w[f"{eyes}cls_token"][0], patches[0].flatten(1).T]) + w[f"{eyes}pos_embed"][0]
    for i in range(2):
        block = f"{eyes}blocks.{i}."
        query, key, value = linear(norm(x, f"{block}norm1", 1e-6), f"{block}attn.qkv").chunk(3, 1)
        x = x + linear(attention(query, key, value), f"{block}attn.proj")
        x = x + linear(F.gelu(linear(norm(x, f"{block}norm2", 1e-6), f"{block}mlp.fc1")), f"{block}mlp.fc2")
    seen = norm(x, f"{eyes}norm", 1e-6)

    words = w[f"{read}embeddings.word_embeddings.weight"][ids]
    places = w[f"{read}embeddings.position_embeddings.weight"][: len(ids)]
    h = norm(words + places, f"{read}embeddings.LayerNorm", 1e-12)
    for i in range(2):
        layer = f"{read}encoder.layer.{i}."
        for kind, context in (("attention", None), ("crossattention", seen)):
            name = f"{layer}{kind}."
            source = h if context is None else context
            parts = (h, "query"), (source, "key"), (source, "value")
            query, key, value = (linear(x, f"{name}self.{part}") for x, part in parts)
            out = linear(attention(query, key, value), f"{name}output.dense")
            h = norm(out + h, f"{name}output.LayerNorm", 1e-12)
        out = linear(F.gelu(linear(h, f"{layer}intermediate.dense")), f"{layer}output.dense")
        h = norm(out + h, f"{layer}output.LayerNorm", 1e-12)
    score = h[0]
    for layer in (0, 2, 4, 6, 7):
        score = linear(score, f"mlp.layers.{layer}")
    return (score.item() - 0.16717362830052426) / 1.0333394966054072


def test_the_translated_checkpoint_computes_what_the_authors_network_does(folder, weights):
    images = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0)).mul(255).round() / 255
    expected = [
        by_hand(weights, image, [tiny_rewards.START, *map(tiny_rewards.WORDS.index, prompt.split()), tiny_rewards.END])
        for image, prompt in zip(images, PROMPTS, strict=True)
    ]
    reward = load(folder)
    assert reward(images, PROMPTS, {}).tolist() == pytest.approx(expected, abs=1e-4)


def test_a_prompt_is_cut_at_35_tokens(folder):
    reward = load(folder)
    image = torch.rand(1, 3, 40, 50)
    values = [reward(image, [" ".join(["dog"] * n)], {}).item() for n in (33, 34, 32)]
    assert values[0] == pytest.approx(values[1])
    assert values[0] != pytest.approx(values[2])


@pytest.mark.parametrize(("lost", "said"), [
    ("blip.visual_encoder.", r"none of its weights is named blip\.visual_encoder\.\*"),
    ("mlp.", r"none of its weights is named mlp\.layers\.\*"),
    ("blip.text_encoder.encoder.layer.1.crossattention.output.dense", "loading state_dict for BlipTextModel"),
])  # fmt: skip
def test_a_checkpoint_that_is_not_complete_is_refused(folder, weights, lost, said):
    kept = {name: value for name, value in weights.items() if not name.startswith(lost)}
    torch.save(kept, folder / "part.pt")
    with pytest.raises(RewardError, match=rf"^image_reward: [^\n]*part\.pt could not be loaded [^\n]*{said}[^\n]*$"):
        load(folder, path=str(folder / "part.pt")).function.to("cpu")


def test_a_tokenizer_that_is_not_there_is_named(folder):
    with pytest.raises(RewardError, match=r"image_reward: there is no \./bert"):
        load(folder, tokenizer="./bert")(torch.rand(1, 3, 32, 32), ["a"], {})
