#!/usr/bin/env python3
"""Attention of layers as gpt-oss, Gemma 2 and Qwen 2 have them, by Hugging Face transformers: what layer_golden_test.cpp
compares the C API with.

Needs torch and transformers (5.23 wrote the file that is there). K, V and q come from the recurrence below, which the test
repeats, and are taken as they are after RoPE; masks, windows, soft-caps and learned sinks are the library's own.

    python3 make_attention.py > attention.json
"""

import json

import torch
import transformers
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.qwen2 import modeling_qwen2

TOKENS = 150
CHECKED = [0, 1, 15, 16, 17, 40, 99, 149]  # positions whose outputs are written


class Numbers:
    """Multiples of 1/16 up to 4, which every dtype holds exactly."""

    def __init__(self, seed):
        self.state = seed

    def many(self, *shape):
        count = 1
        for n in shape:
            count *= n
        out = []
        for _ in range(count):
            self.state = (1664525 * self.state + 1013904223) % 2**32
            out.append(((self.state >> 16) % 129 - 64) / 16.0)
        return torch.tensor(out, dtype=torch.float64).reshape(shape)


def masks(config, slides):
    make = create_sliding_window_causal_mask if slides else create_causal_mask
    embeds = torch.zeros(1, TOKENS, config.hidden_size, dtype=torch.float64)
    return make(config=config, inputs_embeds=embeds, attention_mask=None,
                past_key_values=None, position_ids=torch.arange(TOKENS)[None])


class Layer(torch.nn.Module):
    """What eager_attention_forward asks of the module that it belongs to."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.training = False


def family(name, module, config, seed, scale, softcap, windows, has_sinks):
    config._attn_implementation = "eager"
    q_heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    numbers = Numbers(seed)
    layers = []
    for window in windows:
        k = numbers.many(TOKENS, kv_heads, dim)
        v = numbers.many(TOKENS, kv_heads, dim)
        q = numbers.many(TOKENS, q_heads, dim) / 8
        layer = Layer(config)
        extra = {}
        sinks = []
        if has_sinks:
            layer.sinks = numbers.many(q_heads)
            sinks = layer.sinks.tolist()
        if softcap:
            extra["softcap"] = softcap
        heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]
        out, _ = module.eager_attention_forward(
            layer, *heads_first, masks(config, window != 0), scaling=scale, dropout=0.0, **extra)
        out = out[0]  # [tokens, heads, dim]
        # Three components of each head tell a wrong token as well as all of them.
        layers.append({"window": window, "sinks": sinks,
                       "outputs": [[[round(x, 7) for x in head[[0, 31, 63]].tolist()]
                                    for head in out[t]] for t in CHECKED]})
    return {"name": name, "seed": seed, "q_heads": q_heads, "kv_heads": kv_heads, "head_dim": dim,
            "scale": scale, "softcap": softcap or 0.0, "layers": layers}


def main():
    small = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
             "num_hidden_layers": 2}
    families = [
        family("gpt-oss", modeling_gpt_oss, transformers.GptOssConfig(sliding_window=16, **small), 1,
               64**-0.5, None, [16, 0], True),
        family("gemma2", modeling_gemma2,
               transformers.Gemma2Config(sliding_window=40, attn_logit_softcapping=5.0, **small), 2,
               32**-0.5, 5.0, [40, 0], False),
        family("qwen2", modeling_qwen2,
               transformers.Qwen2Config(sliding_window=100, use_sliding_window=True, **small), 3,
               64**-0.5, None, [0, 100], False),
    ]
    print(json.dumps({"transformers": transformers.__version__, "tokens": TOKENS, "checked": CHECKED,
                      "families": families}))


main()
