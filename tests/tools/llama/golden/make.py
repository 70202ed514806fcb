#!/usr/bin/env python3
"""Golden values of every family of models, computed by Hugging Face transformers.

  make.py [NAME...]        writes NAME.json beside this file, by default all of them

A file holds the config.json that transformers writes, names and shapes of the tensors in its model.safetensors, the
logits behind the prompt, and the tokens that follow greedily. Weights and prompt are not in it: both are a hash of
names and numbers (values() and prompt() here, family_golden_test.cpp there), exact in bf16, so that folders in fp32,
bf16 and fp16 hold the same model.

Truth is transformers' own code run in double (see in_double()). Its fp32 differs from that by up to 0.005 in these logits,
because RoPE's angles, position times frequency, are rounded to fp32, which at 2,000 tokens is 1e-4 rad; "fp32_error" of
each file says by how much. Prompts are chosen so that the tokens of its fp32, with its own cache, are the same ones.

Needs torch, transformers and safetensors (made with transformers 5.23, torch 2.15).
"""
import contextlib
import copy
import json
import os
import sys
import tempfile

import numpy as np
import torch
import transformers as tf
from safetensors import safe_open

PROMPT = 2000
GENERATED = 64
VOCAB = 256
# All but the sizes of heads: different from each other.
SHAPE = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
             num_key_value_heads=2, head_dim=64, max_position_embeddings=4096, bos_token_id=1, eos_token_id=2,
             pad_token_id=0, rms_norm_eps=1e-5)


def shape(**changes):
    return {**SHAPE, **changes}


def without(*names, **changes):
    return {k: v for k, v in shape(**changes).items() if k not in names}


TEXT3 = shape(sliding_window=100, query_pre_attn_scalar=48,
              layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
              rope_parameters={"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000000.0},
                               "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}})
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 10000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 256, "rope_theta": 500000.0}

MODELS = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**shape(rope_parameters=LLAMA3))),
    "llama_biases": lambda: tf.LlamaForCausalLM(
        tf.LlamaConfig(**shape(attention_bias=True, mlp_bias=True, tie_word_embeddings=True))),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**shape(sliding_window=None))),
    "mistral_sliding": lambda: tf.MistralForCausalLM(tf.MistralConfig(**shape(sliding_window=300))),
    # No head_dim: hidden_size / heads.
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(
        **without("head_dim", hidden_size=128, num_attention_heads=2, num_key_value_heads=1,
                  use_sliding_window=True, sliding_window=64, max_window_layers=2))),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**shape(rope_parameters=YARN))),
    "gemma2": lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(
        **shape(sliding_window=200, query_pre_attn_scalar=100, attn_logit_softcapping=12.0,
                final_logit_softcapping=2.0))),
    "gemma3_text": lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(
        **TEXT3, final_logit_softcapping=2.0)),
    "gemma3": lambda: tf.Gemma3ForConditionalGeneration(tf.Gemma3Config(
        text_config=TEXT3, mm_tokens_per_image=4, image_token_index=VOCAB - 1, boi_token_index=VOCAB - 2,
        eoi_token_index=VOCAB - 3,
        vision_config=dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
                           image_size=8, patch_size=4))),
    # head_dim is hidden_size / heads in this family.
    "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(
        **without("head_dim", hidden_size=256, num_hidden_layers=3, sliding_window=None,
                  rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}))),
    # The prompt is longer than the original context: the long factors.
    "phi3_longrope": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(
        **without("head_dim", hidden_size=256, num_hidden_layers=2, original_max_position_embeddings=1024,
                  rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
                                   "short_factor": [1.0 + i / 64 for i in range(24)],
                                   "long_factor": [1.0 + i / 8 for i in range(24)]}))),
    "phi3_sliding": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(
        **without("head_dim", hidden_size=256, num_hidden_layers=2, sliding_window=500))),
}


def hashes(name, count):
    """splitmix64 of FNV-1a of the name plus the number."""
    start = 0xCBF29CE484222325
    for byte in name.encode():
        start = (start ^ byte) * 0x100000001B3 % 2**64
    with np.errstate(over="ignore"):
        z = np.uint64(start) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def values(name, count, gemma):
    """Numbers of 8 bits, so that every dtype holds them."""
    bits = hashes(name, count)
    low = (bits >> np.uint64(57)).astype(np.float64)
    if name.endswith("norm.weight") and not gemma:
        return ((128 + low) / 128).astype(np.float32)  # 1 to 2
    if gemma and (name.endswith("q_norm.weight") or name.endswith("k_norm.weight")):
        return ((128 + low) / 64).astype(np.float32)  # 2 to 4, and 1 is added
    if name.endswith("norm.weight"):
        step = 2.0**-9
    elif "embed_tokens" in name:
        step = 2.0**-11 if gemma else 2.0**-8
    elif "q_proj" in name or "k_proj" in name:
        step = 2.0**-8 if gemma else 2.0**-10
    elif "lm_head" in name:
        step = 2.0**-9
    else:
        step = 2.0**-10
    # Odd numbers from -255 to 255 times the step: standard deviation 147 steps.
    return ((2 * (bits >> np.uint64(56)).astype(np.float64) - 255) * step).astype(np.float32)


def prompt(seed):
    return (hashes("prompt %d" % seed, PROMPT) % np.uint64(VOCAB)).astype(np.int64).tolist()


def greedy(model, tokens):
    """GENERATED tokens, in fp32 and with transformers' own cache, and the logits behind the prompt."""
    generated, cache, new, first = [], None, tokens, None
    with torch.no_grad():
        while len(generated) < GENERATED:
            out = model(torch.tensor([new]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            first = out.logits[0, -1] if first is None else first
            cache, new = out.past_key_values, [int(torch.argmax(out.logits[0, -1]))]
            generated += new
    return generated, first


@contextlib.contextmanager
def in_double(model):
    """What transformers computes in fp32 by name (norms, softmax, RoPE and its frequencies) is in double meanwhile."""
    saved = torch.float, torch.float32, torch.Tensor.float
    torch.float = torch.float32 = torch.float64
    torch.Tensor.float = torch.Tensor.double
    try:
        twin = copy.deepcopy(model).double()
        for module in twin.modules():
            if "RotaryEmbedding" in type(module).__name__ and hasattr(module, "config"):
                module.__init__(module.config)
                module.long_inv_freq = None  # LongRoPE's, kept from the pass in fp32
                assert all(buffer.dtype == torch.float64 for buffer in module.buffers())
            if hasattr(module, "scalar_embed_scale"):
                module.embed_scale = torch.tensor(module.scalar_embed_scale, dtype=torch.float64)
        yield twin
    finally:
        torch.float, torch.float32, torch.Tensor.float = saved


def make(name):
    model = MODELS[name]().eval().float()
    gemma = name.startswith("gemma")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        # Tied matrices are one parameter: what the file has decides.
        with safe_open(os.path.join(folder, "model.safetensors"), "pt") as file:
            shapes = {key: list(file.get_slice(key).get_shape()) for key in sorted(file.keys())}
        from safetensors.torch import save_file
        save_file({key: torch.from_numpy(values(key, int(np.prod(s)), gemma)).reshape(s) for key, s in shapes.items()},
                  os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
        config = json.load(open(os.path.join(folder, "config.json")))
        model = type(model).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    seed, margin, same = 0, 0.0, False
    while margin < 2e-3 or not same:  # a prompt after which no two tokens are as good as equal
        seed += 1
        tokens = prompt(seed)
        generated, rounded = greedy(model, tokens)
        with in_double(model) as exact, torch.no_grad():
            logits = exact(torch.tensor([tokens + generated]), use_cache=False).logits[0, PROMPT - 1:-1]
        assert logits.dtype == torch.float64
        same = torch.argmax(logits, 1).tolist() == generated
        best = torch.topk(logits, 2).values
        margin = float((best[:, 0] - best[:, 1]).min())
        fp32_error = float((logits[0] - rounded.double()).abs().max())
        print("%s: seed %d, %s tokens in fp32, whose logits are off by %.1e; margin %.4f, %d kinds of tokens" %
              (name, seed, "same" if same else "other", fp32_error, margin, len(set(generated))), flush=True)
    first = logits[0].tolist()
    config.pop("transformers_version", None)
    golden = {"made_by": "transformers " + tf.__version__, "seed": seed, "prompt_tokens": PROMPT,
              "fp32_error": float("%.1e" % fp32_error),
              "config": config, "tensors": shapes, "logits": [float("%.7g" % x) for x in first],
              "generated": generated}
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), name + ".json")
    with open(path, "w") as file:
        file.write("{\n" + ",\n".join('"%s": %s' % (k, json.dumps(v)) for k, v in golden.items()) + "\n}\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for wanted in sys.argv[1:] or MODELS:
        make(wanted)
