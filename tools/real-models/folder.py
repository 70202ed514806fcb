"""A GGUF file as a folder of Hugging Face's layout: config.json, model.safetensors, tokenizer.json."""

import json
import math
from pathlib import Path

import gguf
import numpy as np

import tokenizer

# Names of a layer's tensors: in GGUF (llama.cpp), and in the layout of transformers.
LAYER = {
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "attn_norm.weight": "input_layernorm.weight",
}
LAYER_OF = {
    "llama": {"ffn_norm.weight": "post_attention_layernorm.weight"},
    "gemma3": {
        "post_attention_norm.weight": "post_attention_layernorm.weight",
        "ffn_norm.weight": "pre_feedforward_layernorm.weight",
        "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
    },
}
MODEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class Metadata:
    """The fields of a GGUF; those of the architecture without its name."""

    def __init__(self, reader: gguf.GGUFReader):
        self._fields = {name: field.contents() for name, field in reader.fields.items()}
        self.architecture = self["general.architecture"]
        if self.architecture not in LAYER_OF:
            raise SystemExit(f"architecture {self.architecture}; allowed: {', '.join(LAYER_OF)}")

    def __getitem__(self, name: str):
        return self._fields[name]

    def get(self, name: str, fallback=None):
        return self._fields.get(name, fallback)

    def own(self, name: str, fallback=None):
        return self._fields.get(f"{self.architecture}.{name}", fallback)


def config_of(meta: Metadata, vocab: int, tied: bool) -> dict:
    heads = meta.own("attention.head_count")
    hidden = meta.own("embedding_length")
    config = {
        "hidden_size": hidden,
        "intermediate_size": meta.own("feed_forward_length"),
        "num_hidden_layers": meta.own("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.own("attention.head_count_kv", heads),
        "head_dim": meta.own("attention.key_length", hidden // heads),
        "max_position_embeddings": meta.own("context_length"),
        "rms_norm_eps": meta.own("attention.layer_norm_rms_epsilon"),
        "rope_theta": meta.own("rope.freq_base", 10000.0),
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
        "attention_bias": False,
    }
    if meta.architecture == "llama":
        return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", **config}
    # As transformers writes Gemma 3: one layer in six attends to all tokens, and turns by a base of its own.
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        **config,
        "sliding_window": meta.own("attention.sliding_window"),
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": config["head_dim"],
    }


def unpermuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k as transformers has them: llama.cpp puts the two halves that RoPE turns beside each other."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def tensors_of(reader: gguf.GGUFReader, meta: Metadata):
    """(name, fp32 array) of every weight, in the layout of transformers."""
    layer_names = {**LAYER, **LAYER_OF[meta.architecture]}
    heads = meta.own("attention.head_count")
    heads_of = {"attn_q.weight": heads, "attn_k.weight": meta.own("attention.head_count_kv", heads)}
    for tensor in reader.tensors:
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        weight = weight.reshape([int(n) for n in reversed(tensor.shape)])
        if tensor.name in MODEL:
            name = MODEL[tensor.name]
        elif tensor.name.startswith("blk."):
            _, layer, own = tensor.name.split(".", 2)
            if own not in layer_names:
                raise SystemExit(f"a tensor that is not known: {tensor.name}")
            name = f"model.layers.{layer}.{layer_names[own]}"
            if meta.architecture == "llama" and own in heads_of:
                weight = unpermuted(weight, heads_of[own])
        elif tensor.name == "rope_freqs.weight":
            raise SystemExit("RoPE by factors in a tensor is not converted")
        else:
            raise SystemExit(f"a tensor that is not known: {tensor.name}")
        # llama.cpp stores 1 + w where transformers adds the 1.
        if meta.architecture == "gemma3" and tensor.name.endswith("norm.weight"):
            weight = weight - 1.0
        yield name, weight


def stored(weight: np.ndarray, dtype: str) -> tuple[str, bytes]:
    if dtype == "f32":
        return "F32", weight.tobytes()
    if dtype == "f16":
        return "F16", weight.astype(np.float16).tobytes()
    bits = np.ascontiguousarray(weight).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to the nearest, ties to even
    return "BF16", rounded.astype(np.uint16).tobytes()


def write_safetensors(path: Path, tensors, dtype: str) -> set[str]:
    """Writes them in the order of their names; returns these."""
    held, header, at = {}, {"__metadata__": {"format": "pt"}}, 0
    for name, weight in tensors:
        held[name] = (weight.shape, *stored(weight, dtype))
    for name in sorted(held):
        shape, kind, data = held[name]
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name in sorted(held):
            out.write(held[name][2])
    return set(held)


def write(path: Path, out: Path, dtype: str) -> None:
    reader = gguf.GGUFReader(path)
    meta = Metadata(reader)
    names = write_safetensors(out / "model.safetensors", tensors_of(reader, meta), dtype)
    tokenizer.write(meta, out)
    vocab = len(meta["tokenizer.ggml.tokens"])
    config = config_of(meta, vocab, "lm_head.weight" not in names)
    config["torch_dtype"] = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[dtype]
    for key, value in config.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise SystemExit(f"{key} is {value}")
    # The last file: a folder with it is whole.
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
