"""Random models of transformers, small enough for tests, one for each way of attending; and what tests ask of them."""

import os

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", minversion="4.57", reason="transformers 4.57 is not installed")

import keyhole.transformers  # noqa: E402

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

DEVICE = os.environ.get("KEYHOLE_TEST_DEVICE", "cpu")
# Nothing that can be said ends a sequence.
SMALL = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024, "initializer_range": 0.3, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 1000,
}  # fmt: skip
# Windows are shorter than the prompts, so that they matter.
HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
SLIDING_THEN_FULL = ["sliding_attention", "full_attention"] * 2
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
# Two layers that keep a state, an attention, and again: with fewer heads of values than of keys none of these models is made.
LINEAR = {
    "num_hidden_layers": 4, "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
# Of each family the name of its config, and what it has of its own. Windows are shorter than the prompts, so that they matter.
FAMILIES = {
    "llama": ("LlamaConfig", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
                                                  "high_freq_factor": 4.0, "original_max_position_embeddings": 256}}),
    "mistral": ("MistralConfig", {"sliding_window": 24}),
    "mixtral": ("MixtralConfig", {"sliding_window": 24, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}),
    "qwen2_moe": ("Qwen2MoeConfig", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2,
                                     "shared_expert_intermediate_size": 48, **EXPERTS}),
    "qwen3": ("Qwen3Config", {}),
    "qwen3_moe": ("Qwen3MoeConfig", {**EXPERTS}),
    "gemma2": ("Gemma2Config", {"sliding_window": 24, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 4.0}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 16, "query_pre_attn_scalar": 48, "num_hidden_layers": 4,
                                    "layer_types": SLIDING_THEN_FULL}),
    # Heads of two sizes; the last two layers have no keys and values of their own.
    "gemma4": ("Gemma4TextConfig", {"sliding_window": 16, "num_hidden_layers": 6, "global_head_dim": 128, "num_global_key_value_heads": 2,
                                    "layer_types": ["sliding_attention", "full_attention"] * 3, "num_kv_shared_layers": 2,
                                    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97}),
    "phi3": ("Phi3Config", {"sliding_window": None, "hidden_size": 256, "partial_rotary_factor": 0.5, "resid_pdrop": 0.0}),
    "gpt_oss": ("GptOssConfig", {"sliding_window": 24, "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 4,
                                 "layer_types": SLIDING_THEN_FULL}),
    "glm4": ("Glm4Config", {**HALF}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", {"sliding_window": 24, "num_hidden_layers": 4, "layer_types": SLIDING_THEN_FULL}),
    "granite": ("GraniteConfig", {"attention_multiplier": 0.2, "residual_multiplier": 0.8, "logits_scaling": 2.0}),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 1, 0]}),
    "cohere2": ("Cohere2Config", {"sliding_window": 24, "num_hidden_layers": 4, "layer_types": SLIDING_THEN_FULL}),
    "exaone4": ("Exaone4Config", {"sliding_window": 24, "num_hidden_layers": 4, "layer_types": SLIDING_THEN_FULL}),
    "qwen3_next": ("Qwen3NextConfig", {"shared_expert_intermediate_size": 48, **EXPERTS, **LINEAR}),
    "qwen3_5": ("Qwen3_5TextConfig", {**LINEAR}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {"shared_expert_intermediate_size": 48, **EXPERTS, **LINEAR}),
    "lfm2": ("Lfm2Config", {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"], "block_ff_dim": 96,
                            "block_auto_adjust_ff_dim": False}),
}  # fmt: skip
HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "lfm2")
# Caches of states, as layers of their own, came with transformers 5, and a qwen2_moe that calls the attention interface.
if not hasattr(transformers.cache_utils, "LinearAttentionLayer"):
    FAMILIES = {name: family for name, family in FAMILIES.items() if name not in (*HYBRIDS, "qwen2_moe")}
FAMILIES = {name: family for name, family in FAMILIES.items() if hasattr(transformers, family[0])}
SHARERS = ("gemma4",)
EXACT = {"mode": "exact", "sink": 4, "window": 16, "max_tokens": 1024}


def make(family, seed=1, **fields):
    kind, own = FAMILIES[family]
    config = getattr(transformers, kind)(**{**SMALL, **own, **fields})
    if family in ("gemma2", "gpt_oss"):
        config._attn_implementation = "eager"  # what these have in place of sdpa
    torch.manual_seed(seed)
    if family.startswith("gemma"):
        config.tie_word_embeddings = False  # tied ones say each token again, whatever attention finds
    model = transformers.AutoModelForCausalLM.from_config(config).eval().to(DEVICE)
    model.generation_config.pad_token_id = 1001  # assistants take what the model says for padding, where it may say it
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
        if family.startswith(("gemma", "olmo")) and name.endswith("post_attention_layernorm.weight"):
            torch.nn.init.constant_(parameter, 6.0)  # else the embeddings outweigh attention
    return model


def batch(*lengths, seed=5):
    """Rows of random tokens, padded on the left."""
    torch.manual_seed(seed)
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, ids.shape[1] - length :] = torch.randint(3, SMALL["vocab_size"], (length,))
        mask[row, ids.shape[1] - length :] = 1
    return {"input_ids": ids.to(DEVICE), "attention_mask": mask.to(DEVICE)}


def both(model, call, **options):
    """What `call` gives without Keyhole, and with it."""
    expected = call(model)
    enabled = keyhole.transformers.enable(model, **{**EXACT, **options})
    try:
        return expected, call(model), enabled
    finally:
        keyhole.transformers.disable(model)


def greedy(inputs, tokens=64, **options):
    return lambda model: model.generate(**inputs, max_new_tokens=tokens, do_sample=False, **options)


