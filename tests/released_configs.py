"""The public config.json of released masked-diffusion models with smaller numbers; a comment tells the public one."""

VOCABULARY = 112
END, MASK = 96, 97  # the ends of texts pad, too

LLADA = {
    "activation_type": "silu",
    "alibi": False,
    "alibi_bias_max": 8.0,
    "architectures": ["LLaDAModelLM"],
    "attention_dropout": 0.0,
    "attention_layer_norm": False,
    "attention_layer_norm_with_affine": True,
    "auto_map": {
        "AutoConfig": "configuration_llada.LLaDAConfig",
        "AutoModel": "modeling_llada.LLaDAModelLM",
        "AutoModelForCausalLM": "modeling_llada.LLaDAModelLM",
    },
    "bias_for_layer_norm": False,
    "block_group_size": 1,
    "block_type": "llama",
    "d_model": 32,  # 4096
    "embedding_dropout": 0.0,
    "embedding_size": VOCABULARY,  # 126464
    "eos_token_id": END,  # 126081
    "flash_attention": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "init_cutoff_factor": None,
    "init_device": "meta",
    "init_fn": "mitchell",
    "init_std": 0.02,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "mask_token_id": MASK,  # 126336
    "max_sequence_length": 4096,
    "mlp_hidden_size": 48,  # 12288
    "mlp_ratio": 4,
    "model_type": "llada",
    "multi_query_attention": None,
    "n_heads": 4,  # 32
    "n_kv_heads": 4,  # 32
    "n_layers": 2,  # 32
    "pad_token_id": END,  # 126081
    "precision": "amp_bf16",
    "residual_dropout": 0.0,
    "rms_norm_eps": 1e-05,
    "rope": True,
    "rope_full_precision": True,
    "rope_theta": 500000.0,
    "scale_logits": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.46.3",
    "use_cache": False,
    "vocab_size": VOCABULARY,  # 126464
    "weight_tying": False,
}
DREAM = {
    "architectures": ["DreamModel"],
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_dream.DreamConfig", "AutoModel": "modeling_dream.DreamModel"},
    "bos_token_id": END,  # 151643
    "eos_token_id": END,  # 151643
    "hidden_act": "silu",
    "hidden_size": 32,  # 3584
    "initializer_range": 0.02,
    "intermediate_size": 48,  # 18944
    "mask_token_id": MASK,  # 151666
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "model_type": "Dream",
    "num_attention_heads": 4,  # 28
    "num_hidden_layers": 2,  # 28
    "num_key_value_heads": 2,  # 4
    "pad_token_id": END,  # 151643
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.46.2",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": VOCABULARY,  # 152064
}
LLADA2 = {
    "architectures": ["LLaDA2MoeModelLM"],
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_llada2_moe.LLaDA2MoeConfig",
        "AutoModel": "modeling_llada2_moe.LLaDA2MoeModel",
        "AutoModelForCausalLM": "modeling_llada2_moe.LLaDA2MoeModelLM",
    },
    "dtype": "bfloat16",
    "embedding_dropout": 0.0,
    "first_k_dense_replace": 1,
    "head_dim": 16,  # 128
    "hidden_act": "silu",
    "hidden_size": 32,  # 2048
    "initializer_range": 0.02,
    "intermediate_size": 48,  # 5120
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "llada2_moe",
    "moe_intermediate_size": 12,  # 512
    "moe_router_enable_expert_bias": True,
    "n_group": 4,  # 8
    "norm_head": False,
    "norm_softmax": False,
    "norm_topk_prob": True,
    "num_attention_heads": 4,  # 16
    "num_experts": 16,  # 256
    "num_experts_per_tok": 3,  # 8
    "num_hidden_layers": 2,  # 20
    "num_key_value_heads": 2,  # 4
    "num_shared_experts": 1,
    "output_dropout": 0.0,
    "output_router_logits": False,
    "pad_token_id": END,  # 156892
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 600000,
    "rotary_dim": 8,  # 64
    "routed_scaling_factor": 2.5,
    "router_dtype": "fp32",
    "score_function": "sigmoid",
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "topk_group": 2,  # 4
    "transformers_version": "4.57.1",
    "use_bias": False,
    "use_cache": False,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "use_rmsnorm": True,
    "use_sliding_window": False,
    "using_split_qkv_in_self_attention": False,
    "vocab_size": VOCABULARY,  # 157184
}
SDAR = {
    "architectures": ["SDARForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_implementation": "flex_attention",
    "auto_map": {
        "AutoConfig": "configuration_sdar.SDARConfig",
        "AutoModel": "modeling_sdar.SDARModel",
        "AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM",
    },
    "block_size": 4,
    "bos_token_id": END,  # 151643
    "debug": False,
    "eos_token_id": END,  # 151643
    "ep_size": 1,
    "fuse_cross_entropy": True,
    "head_dim": 16,  # 128
    "hidden_act": "silu",
    "hidden_size": 32,  # 2560
    "initializer_range": 0.02,
    "intermediate_size": 48,  # 9728
    "mask_token_id": MASK,  # 151669
    "max_position_embeddings": 32768,
    "max_window_layers": 36,
    "micro_forward": False,
    "model_type": "sdar",
    "num_attention_heads": 4,  # 32
    "num_hidden_layers": 2,  # 36
    "num_key_value_heads": 2,  # 8
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "skip_checkpoint": False,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.52.4",
    "use_cache": False,
    "use_deepep": False,
    "use_sliding_window": False,
    "vocab_size": VOCABULARY,  # 151936
}
SDAR_MOE = {
    "architectures": ["SDARMoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_sdar_moe.SDARMoeConfig",
        "AutoModel": "modeling_sdar_moe.SDARMoeModel",
        "AutoModelForCausalLM": "modeling_sdar_moe.SDARMoeForCausalLM",
    },
    "bos_token_id": END,  # 151643
    "decoder_sparse_step": 1,
    "eos_token_id": END,  # 151643
    "head_dim": 16,  # 128
    "hidden_act": "silu",
    "hidden_size": 32,  # 2048
    "initializer_range": 0.02,
    "intermediate_size": 48,  # 6144
    "max_position_embeddings": 32768,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "sdar_moe",
    "moe_intermediate_size": 12,  # 768
    "norm_topk_prob": True,
    "num_attention_heads": 4,  # 32
    "num_experts": 16,  # 128
    "num_experts_per_tok": 3,  # 8
    "num_hidden_layers": 2,  # 48
    "num_key_value_heads": 2,  # 4
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": VOCABULARY,  # 151936
}
DREAM_GENERATION = {
    "_from_model_config": True,
    "alg": "origin",
    "alg_temp": None,
    "bos_token_id": END,
    "eos_token_id": END,
    "eps": 0.001,
    "mask_token_id": None,
    "output_history": False,
    "pad_token_id": END,
    "steps": 512,
    "top_k": None,
    "top_p": None,
    "transformers_version": "4.46.2",
}
CONFIGS = {"llada": LLADA, "llada15": LLADA, "dream": DREAM, "llada2": LLADA2}  # LLaDA-1.5's is LLaDA-8B-Instruct's
CONFIGS |= {"sdar": SDAR, "sdar_moe": SDAR_MOE}
