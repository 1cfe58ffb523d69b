"""The public config.json of released masked-diffusion models, with smaller numbers."""

VOCABULARY = 112
END, MASK = 96, 97  # the ends of texts pad, too


def _remote(file, name, **models):
    """Name the classes of the remote code."""
    kinds = {kind: f"modeling_{file}.{name}{ending}" for kind, ending in models.items()}
    return {"AutoConfig": f"configuration_{file}.{name}Config", **kinds}


LLADA = {
    "activation_type": "silu", "alibi": False, "alibi_bias_max": 8.0, "architectures": ["LLaDAModelLM"],
    "attention_dropout": 0.0, "attention_layer_norm": False, "attention_layer_norm_with_affine": True,
    "auto_map": _remote("llada", "LLaDA", AutoModel="ModelLM", AutoModelForCausalLM="ModelLM"),
    "bias_for_layer_norm": False, "block_group_size": 1, "block_type": "llama", "d_model": 32,
    "embedding_dropout": 0.0, "embedding_size": VOCABULARY, "eos_token_id": END, "flash_attention": False,
    "include_bias": False, "include_qkv_bias": False, "init_cutoff_factor": None, "init_device": "meta",
    "init_fn": "mitchell", "init_std": 0.02, "input_emb_norm": False, "layer_norm_type": "rms",
    "layer_norm_with_affine": True, "mask_token_id": MASK, "max_sequence_length": 4096, "mlp_hidden_size": 48,
    "mlp_ratio": 4, "model_type": "llada", "multi_query_attention": None, "n_heads": 4, "n_kv_heads": 4,
    "n_layers": 2, "pad_token_id": END, "precision": "amp_bf16", "residual_dropout": 0.0, "rms_norm_eps": 1e-05,
    "rope": True, "rope_full_precision": True, "rope_theta": 500000.0, "scale_logits": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.46.3", "use_cache": False, "vocab_size": VOCABULARY,
    "weight_tying": False,
}  # fmt: skip
DREAM = {
    "architectures": ["DreamModel"], "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_dream.DreamConfig", "AutoModel": "modeling_dream.DreamModel"},
    "bos_token_id": END, "eos_token_id": END, "hidden_act": "silu", "hidden_size": 32, "initializer_range": 0.02,
    "intermediate_size": 48, "mask_token_id": MASK, "max_position_embeddings": 131072, "max_window_layers": 28,
    "model_type": "Dream", "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
    "pad_token_id": END, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.46.2", "use_cache": True,
    "use_mrope": False, "use_sliding_window": False, "vocab_size": VOCABULARY,
}  # fmt: skip
LLADA2 = {
    "architectures": ["LLaDA2MoeModelLM"], "attention_dropout": 0.0,
    "auto_map": _remote("llada2_moe", "LLaDA2Moe", AutoModel="Model", AutoModelForCausalLM="ModelLM"),
    "dtype": "bfloat16", "embedding_dropout": 0.0, "first_k_dense_replace": 1, "head_dim": 16, "hidden_act": "silu",
    "hidden_size": 32, "initializer_range": 0.02, "intermediate_size": 48, "max_position_embeddings": 32768,
    "max_window_layers": 28, "model_type": "llada2_moe", "moe_intermediate_size": 12,
    "moe_router_enable_expert_bias": True, "n_group": 4, "norm_head": False, "norm_softmax": False,
    "norm_topk_prob": True, "num_attention_heads": 4, "num_experts": 16, "num_experts_per_tok": 3,
    "num_hidden_layers": 2, "num_key_value_heads": 2, "num_shared_experts": 1, "output_dropout": 0.0,
    "output_router_logits": False, "pad_token_id": END, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 600000, "rotary_dim": 8, "routed_scaling_factor": 2.5, "router_dtype": "fp32",
    "score_function": "sigmoid", "sliding_window": 4096, "tie_word_embeddings": False, "topk_group": 2,
    "transformers_version": "4.57.1", "use_bias": False, "use_cache": False, "use_qk_norm": True,
    "use_qkv_bias": False, "use_rmsnorm": True, "use_sliding_window": False,
    "using_split_qkv_in_self_attention": False, "vocab_size": VOCABULARY,
}  # fmt: skip
SDAR = {
    "architectures": ["SDARForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_implementation": "flex_attention",
    "auto_map": _remote("sdar", "SDAR", AutoModel="Model", AutoModelForCausalLM="ForCausalLM"),
    "block_size": 4, "bos_token_id": END, "debug": False, "eos_token_id": END, "ep_size": 1,
    "fuse_cross_entropy": True, "head_dim": 16, "hidden_act": "silu", "hidden_size": 32, "initializer_range": 0.02,
    "intermediate_size": 48, "mask_token_id": MASK, "max_position_embeddings": 32768, "max_window_layers": 36,
    "micro_forward": False, "model_type": "sdar", "num_attention_heads": 4, "num_hidden_layers": 2,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
    "skip_checkpoint": False, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.52.4", "use_cache": False, "use_deepep": False, "use_sliding_window": False,
    "vocab_size": VOCABULARY,
}  # fmt: skip
SDAR_MOE = {
    "architectures": ["SDARMoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": _remote("sdar_moe", "SDARMoe", AutoModel="Model", AutoModelForCausalLM="ForCausalLM"),
    "bos_token_id": END, "decoder_sparse_step": 1, "eos_token_id": END, "head_dim": 16, "hidden_act": "silu",
    "hidden_size": 32, "initializer_range": 0.02, "intermediate_size": 48, "max_position_embeddings": 32768,
    "max_window_layers": 48, "mlp_only_layers": [], "model_type": "sdar_moe", "moe_intermediate_size": 12,
    "norm_topk_prob": True, "num_attention_heads": 4, "num_experts": 16, "num_experts_per_tok": 3,
    "num_hidden_layers": 2, "num_key_value_heads": 2, "output_router_logits": False, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
    "use_sliding_window": False, "vocab_size": VOCABULARY,
}  # fmt: skip
DREAM_GENERATION = {
    "_from_model_config": True, "alg": "origin", "alg_temp": None, "bos_token_id": END, "eos_token_id": END,
    "eps": 0.001, "mask_token_id": None, "output_history": False, "pad_token_id": END, "steps": 512, "top_k": None,
    "top_p": None, "transformers_version": "4.46.2",
}  # fmt: skip
CONFIGS = {"llada": LLADA, "llada15": LLADA, "dream": DREAM, "llada2": LLADA2}  # LLaDA-1.5's is LLaDA-8B-Instruct's
CONFIGS |= {"sdar": SDAR, "sdar_moe": SDAR_MOE}
