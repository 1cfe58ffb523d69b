"""The network of DeQA-Score: mPLUG-Owl2 (2311.04257), which transformers lacks, with one prompt.

A vision transformer looks at the picture, an abstractor sums it up in some tokens, and a Llama reads the prompt with these
tokens in it. In each layer of the Llama the picture's tokens have norms, keys and values of their own. Modules are named
as in the released weights.
"""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaModel, LlamaPreTrainedModel
from transformers.activations import QuickGELUActivation

# "USER: How would you rate the quality of this image?\n", the picture, "\nASSISTANT: The quality of the image is", and the
# words excellent, good, fair, poor and bad, in tokens of the Llama tokenizer that is released with the weights.
BEFORE = (1, 3148, 1001, 29901, 1128, 723, 366, 6554, 278, 11029, 310, 445, 1967, 29973, 13)
AFTER = (29871, 13, 22933, 9047, 13566, 29901, 450, 11029, 310, 278, 1967, 338)
LEVELS = (15129, 1781, 6534, 6460, 4319)


class DeqaConfig(LlamaConfig):
    """The released configuration: of the Llama, and in `visual_config` of the other two networks."""

    model_type = "mplug_owl2"
    visual_config: dict[str, Any]


class DeqaNetwork(LlamaPreTrainedModel):
    """mPLUG-Owl2 that gives the logits of the five words after the prompt."""

    config_class = DeqaConfig

    def __init__(self, config: DeqaConfig) -> None:
        super().__init__(config)
        vision, abstractor = (SimpleNamespace(**config.visual_config[f"visual_{it}"]) for it in ("model", "abstractor"))
        self.model = LlamaModel(config)
        picture = slice(len(BEFORE), len(BEFORE) + abstractor.num_learnable_queries + 1)
        for layer in self.model.layers:
            for module, names in (
                (layer, ("input_layernorm", "post_attention_layernorm")),
                (layer.self_attn, ("k_proj", "v_proj")),
            ):
                for name in names:
                    setattr(module, name, _Multiway(getattr(module, name), picture))
        self.model.vision_model = _Vision(vision)
        self.model.visual_abstractor = _Abstractor(abstractor, config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return logits (b, 5), excellent to bad, of preprocessed pictures (b, 3, h, w)."""
        picture = self.model.visual_abstractor(self.model.vision_model(pixels))
        words = self.model.embed_tokens(torch.tensor(BEFORE + AFTER, device=pixels.device))
        before, after = words.expand(len(pixels), -1, -1).split([len(BEFORE), len(AFTER)], dim=1)
        read = self.model(inputs_embeds=torch.cat([before, picture, after], dim=1), use_cache=False)
        return self.lm_head(read.last_hidden_state[:, -1])[:, LEVELS]


class _Multiway(nn.Module):
    """A module for the prompt's tokens, and one like it for the picture's."""

    def __init__(self, module: nn.Module, picture: slice) -> None:
        super().__init__()
        self.multiway = nn.ModuleList([module, deepcopy(module)])
        self.picture = picture

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words, picture = self.multiway
        before, seen, after = x[:, : self.picture.start], x[:, self.picture], x[:, self.picture.stop :]
        return torch.cat([words(before), picture(seen), words(after)], dim=1)


class _Vision(nn.Module):
    """A CLIP ViT whose last norm is that of every token."""

    def __init__(self, sizes: SimpleNamespace) -> None:
        super().__init__()
        width, patches = sizes.hidden_size, (sizes.image_size // sizes.patch_size) ** 2
        self.embeddings: Any = nn.Module()
        self.embeddings.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.embeddings.patch_embed = nn.Conv2d(3, width, sizes.patch_size, sizes.patch_size, bias=False)
        self.embeddings.position_embedding = nn.Parameter(torch.empty(1, patches + 1, width))
        self.embeddings.pre_layernorm = nn.LayerNorm(width, sizes.layer_norm_eps)
        self.encoder: Any = nn.Module()
        self.encoder.layers = nn.ModuleList(_VisionLayer(sizes) for _ in range(sizes.num_hidden_layers))
        self.post_layernorm = nn.LayerNorm(width, sizes.layer_norm_eps)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:  # (b, 3, h, w) -> (b, 1 + patches, D)
        embeddings = self.embeddings
        patches = embeddings.patch_embed(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([embeddings.cls_token.expand(len(pixels), -1, -1), patches], dim=1)
        x = embeddings.pre_layernorm(x + embeddings.position_embedding)
        for layer in self.encoder.layers:
            x = layer(x)
        return self.post_layernorm(x)


class _VisionLayer(nn.Module):
    def __init__(self, sizes: SimpleNamespace) -> None:
        super().__init__()
        width, self.heads = sizes.hidden_size, sizes.num_attention_heads
        self.self_attn: Any = nn.Module()
        self.self_attn.query_key_value = nn.Linear(width, 3 * width)
        self.self_attn.dense = nn.Linear(width, width)
        self.input_layernorm = nn.LayerNorm(width, sizes.layer_norm_eps)
        self.mlp: Any = nn.Sequential()
        self.mlp.fc1 = nn.Linear(width, sizes.intermediate_size)
        self.mlp.activation = QuickGELUActivation()
        self.mlp.fc2 = nn.Linear(sizes.intermediate_size, width)
        self.post_attention_layernorm = nn.LayerNorm(width, sizes.layer_norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        joint = self.self_attn.query_key_value(self.input_layernorm(x)).unflatten(2, (self.heads, 3, -1))
        x = x + self.self_attn.dense(_attend(*joint.permute(3, 0, 2, 1, 4)))
        return x + self.mlp(self.post_attention_layernorm(x))


class _Abstractor(nn.Module):
    """Learned queries that look at the vision network's tokens, and a last token that ends the picture."""

    def __init__(self, sizes: SimpleNamespace, width: int) -> None:
        super().__init__()
        self.encoder: Any = nn.Module()
        self.encoder.layers = nn.ModuleList(_AbstractorLayer(sizes) for _ in range(sizes.num_hidden_layers))
        self.visual_fc = nn.Linear(sizes.hidden_size, width)
        self.query_embeds = nn.Parameter(torch.empty(1, sizes.num_learnable_queries, sizes.hidden_size))
        self.vit_eos = nn.Parameter(torch.empty(1, 1, width))

    def forward(self, seen: torch.Tensor) -> torch.Tensor:  # (b, N, D) -> (b, queries + 1, D of the Llama)
        x = self.query_embeds.expand(len(seen), -1, -1)
        for layer in self.encoder.layers:
            x = layer(x, seen)
        return torch.cat([self.visual_fc(x), self.vit_eos.expand(len(seen), -1, -1)], dim=1)


class _AbstractorLayer(nn.Module):
    """Attention of the queries to themselves and to the picture; as released, the residual is of the normed queries."""

    def __init__(self, sizes: SimpleNamespace) -> None:
        super().__init__()
        width, inner, self.heads = sizes.hidden_size, sizes.intermediate_size, sizes.num_attention_heads
        self.crossattention: Any = nn.Module()
        cross = self.crossattention
        cross.norm1, cross.normk = nn.LayerNorm(width), nn.LayerNorm(width)
        cross.attention = nn.Module()
        cross.attention.query = nn.Linear(width, width)
        cross.attention.key = nn.Linear(sizes.encoder_hidden_size, width)
        cross.attention.value = nn.Linear(sizes.encoder_hidden_size, width)
        places = {"q_pos_embed": sizes.num_learnable_queries, "k_pos_embed": (sizes.grid_size or 32) ** 2 + 1}
        for name, count in places.items():  # fixed sines and cosines, which the weights' files hold
            cross.attention.register_buffer(name, torch.empty(count, width))
        cross.output = nn.Module()
        cross.output.out_proj, cross.output.norm2 = nn.Linear(width, width), nn.LayerNorm(width)
        cross.output.mlp = nn.Module()
        cross.output.mlp.w1, cross.output.mlp.w3 = nn.Linear(width, inner), nn.Linear(width, inner)
        cross.output.mlp.w2 = nn.Linear(inner, width)
        cross.output.mlp.ffn_ln = nn.LayerNorm(inner, sizes.layer_norm_eps)

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        cross, attention, output = self.crossattention, self.crossattention.attention, self.crossattention.output
        x = cross.norm1(x)
        context = torch.cat([x, cross.normk(seen)], dim=1)
        places = torch.cat([attention.q_pos_embed, attention.k_pos_embed]).to(x.dtype)
        query = attention.query(x + attention.q_pos_embed.to(x.dtype))
        parts = (query, attention.key(context + places), attention.value(context))
        heads = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        x = x + output.out_proj(_attend(*heads))
        mlp, y = output.mlp, output.norm2(x)
        return x + mlp.w2(mlp.ffn_ln(F.silu(mlp.w1(y)) * mlp.w3(y)))


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return attention (b, n, heads * d) of heads (b, heads, n, d)."""
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
