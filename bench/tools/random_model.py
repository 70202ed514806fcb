#!/usr/bin/env python3
"""Writes a model folder in the Hugging Face layout with random bf16 weights, to time a decoder without a download.

    bench/tools/random_model.py DIR [--shape llama-3-8b] [--tokens N]

DIR gets config.json, four safetensors files with an index, and tokens.txt: N random token ids for `keyhole decode --tokens`.
Weights are one block of normal numbers over and over, each matrix from another place on, and the files are written side by
side, so that 16 GB take no longer than writing them. Needs nothing but Python.
"""
import argparse
import array
import json
import math
import multiprocessing
import os
import random
import struct

SHAPES = {
    "llama-3-8b": dict(hidden=4096, inner=14336, layers=32, heads=32, kv_heads=8, vocab=128256),
    "llama-3-1b": dict(hidden=2048, inner=8192, layers=16, heads=32, kv_heads=8, vocab=128256),
    "tiny": dict(hidden=256, inner=512, layers=2, heads=4, kv_heads=2, vocab=1000),
}
SHARDS = 4
BLOCK = 1 << 20  # numbers


def bf16(x):
    return struct.unpack("<I", struct.pack("<f", x))[0] >> 16


def block_of(deviation, source):
    values = [bf16(source.gauss(0.0, deviation)) for _ in range(1 << 16)]
    out = array.array("H")
    while len(out) < BLOCK:
        source.shuffle(values)
        out.extend(values)
    return (out * 2).tobytes()  # a block from any place on


def tensors_of(shape):
    hidden, inner = shape["hidden"], shape["inner"]
    head = hidden // shape["heads"]
    wide, narrow = shape["heads"] * head, shape["kv_heads"] * head
    yield "model.embed_tokens.weight", [shape["vocab"], hidden]
    for i in range(shape["layers"]):
        layer = f"model.layers.{i}."
        yield layer + "input_layernorm.weight", [hidden]
        yield layer + "self_attn.q_proj.weight", [wide, hidden]
        yield layer + "self_attn.k_proj.weight", [narrow, hidden]
        yield layer + "self_attn.v_proj.weight", [narrow, hidden]
        yield layer + "self_attn.o_proj.weight", [hidden, wide]
        yield layer + "post_attention_layernorm.weight", [hidden]
        yield layer + "mlp.gate_proj.weight", [inner, hidden]
        yield layer + "mlp.up_proj.weight", [inner, hidden]
        yield layer + "mlp.down_proj.weight", [hidden, inner]
    yield "model.norm.weight", [hidden]
    yield "lm_head.weight", [shape["vocab"], hidden]


def write_shard(path, tensors, block, seed):
    source = random.Random(seed)
    header, at = {}, 0
    for name, dims in tensors:
        size = 2 * math.prod(dims)
        header[name] = {"dtype": "BF16", "shape": dims, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, dims in tensors:
            left = 2 * math.prod(dims)
            if len(dims) == 1:
                file.write(struct.pack("<H", bf16(1.0)) * dims[0])
                continue
            begin = 2 * source.randrange(BLOCK)
            while left > 0:
                piece = min(left, 2 * BLOCK)
                file.write(memoryview(block)[begin : begin + piece])
                left -= piece


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--tokens", type=int, default=131000)
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    source = random.Random(1)
    os.makedirs(args.folder, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape["hidden"],
        "intermediate_size": shape["inner"],
        "max_position_embeddings": 1 << 20,
        "num_attention_heads": shape["heads"],
        "num_hidden_layers": shape["layers"],
        "num_key_value_heads": shape["kv_heads"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": shape["vocab"],
    }
    with open(os.path.join(args.folder, "config.json"), "w") as file:
        json.dump(config, file, indent=2)
    block = block_of(1.0 / math.sqrt(shape["hidden"]), source)
    tensors = list(tensors_of(shape))
    total = sum(2 * math.prod(dims) for _, dims in tensors)
    shards, filled = [[]], 0
    for tensor in tensors:
        size = 2 * math.prod(tensor[1])
        if filled + size > total / SHARDS and len(shards) < SHARDS and shards[-1]:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += size
    index, writers = {}, []
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        path = os.path.join(args.folder, name)
        writers.append(multiprocessing.Process(target=write_shard, args=(path, shard, block, i)))
        writers[-1].start()
        index.update({tensor: name for tensor, _ in shard})
    for writer in writers:
        writer.join()
        if writer.exitcode != 0:
            raise SystemExit(f"{args.folder}: not all files are written")
    with open(os.path.join(args.folder, "model.safetensors.index.json"), "w") as file:
        json.dump({"metadata": {"total_size": total}, "weight_map": index}, file)
    with open(os.path.join(args.folder, "tokens.txt"), "w") as file:
        file.write(" ".join(str(source.randrange(shape["vocab"])) for _ in range(args.tokens)) + "\n")
    print(f"{args.folder}: {total / 1e9:.2f} GB in {len(shards)} files, {args.tokens} tokens in tokens.txt")


if __name__ == "__main__":
    main()
