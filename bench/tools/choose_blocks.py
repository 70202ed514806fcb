#!/usr/bin/env python3
"""What a prompt by chosen blocks does to a real model's predictions, of the choice alone.

    choose_blocks.py FOLDER TEXT [--tokens N] [--from N] [--blocks 3,4,8]

FOLDER: a Llama of tools/real-models/bring. Runs the first N tokens of TEXT exactly, and with the pattern codes:blocks=B of
keyhole/batch.h in every layer, in NumPy and fp32: batches of 1,024 tokens, of which each tile of 128 query rows of a KV head attends
the B blocks of 256 offloaded tokens whose mean keys weigh most for the mean query of one of its heads, the two newest among
them. Rows are exact: what codes lose is not in the figures. Prints the divergence of the predictions of tokens --from .. N from
the exact ones, in nats. Needs numpy and tokenizers.
"""
import argparse
import json
import pathlib

import numpy as np

BATCH, TILE, BLOCK, SINK, WINDOW = 1024, 128, 256, 4, 256


def read_weights(path):
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    weights = {}
    for name, t in json.loads(data[8:end]).items():
        if name == "__metadata__":
            continue
        raw = data[end + t["data_offsets"][0]:end + t["data_offsets"][1]]
        if t["dtype"] == "BF16":
            x = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            x = np.frombuffer(raw, {"F16": np.float16, "F32": np.float32}[t["dtype"]]).astype(np.float32)
        weights[name] = x.reshape(t["shape"])
    return weights


def norm(x, weight, epsilon):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * weight


def turn(x, theta):
    """RoPE of `[tokens, heads, dim]`."""
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None] / theta ** (np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None].astype(np.float32), np.sin(angle)[:, None].astype(np.float32)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def chosen(q, means, group, first, wanted):
    """The blocks that a tile of query rows attends. q: logits are products with keys."""
    worth = np.full(len(means), -np.inf)
    for head in range(group):
        own = q[(head - first) % group::group]
        if len(own) == 0:
            continue
        logits = means @ own.mean(0)
        top = logits.max()
        worth = np.maximum(worth, logits - top - np.log(np.exp(logits - top).sum()))
    worth[-2:] = np.inf
    return np.sort(np.argsort(-worth, kind="stable")[:wanted])


def attend(q, k, v, wanted):
    """`[tokens, q heads, dim]`; wanted: blocks, 0: all."""
    n, heads, dim = q.shape
    group = heads // k.shape[1]
    out = np.empty_like(q)
    for h in range(k.shape[1]):
        keys, values = np.ascontiguousarray(k[:, h]), np.ascontiguousarray(v[:, h])
        for begin in range(0, n, BATCH):
            end = min(begin + BATCH, n)
            blocks = max(begin - SINK - WINDOW, 0) // BLOCK
            rows = np.ascontiguousarray(q[begin:end, h * group:(h + 1) * group]).reshape(-1, dim) / np.sqrt(dim)
            means = keys[SINK:SINK + blocks * BLOCK].reshape(blocks, BLOCK, dim).mean(1)
            answers = np.empty_like(rows)
            for first in range(0, len(rows), TILE):
                tile = rows[first:first + TILE]
                tokens = begin + (first + np.arange(len(tile))) // group
                seen = np.arange(tokens[-1] + 1)
                if wanted and blocks > wanted:
                    of = chosen(tile, means, group, first, wanted)
                    middle = (SINK + of[:, None] * BLOCK + np.arange(BLOCK)).ravel()
                    seen = np.concatenate([seen[:SINK], middle, seen[SINK + blocks * BLOCK:]])
                logits = tile @ keys[seen].T
                logits[seen > tokens[:, None]] = -np.inf
                logits -= logits.max(1, keepdims=True)
                np.exp(logits, logits)
                answers[first:first + TILE] = (logits @ values[seen]) / logits.sum(1, keepdims=True)
            out[begin:end, h * group:(h + 1) * group] = answers.reshape(end - begin, group, dim)
    return out


def run(w, config, ids, wanted):
    """What the last norm gives, of all tokens."""
    x = w["model.embed_tokens.weight"][ids]
    n, dim, epsilon = len(ids), config["head_dim"], config["rms_norm_eps"]
    for layer in range(config["num_hidden_layers"]):
        of = lambda name: w[f"model.layers.{layer}.{name}.weight"]
        a = norm(x, of("input_layernorm"), epsilon)
        q, k, v = (np.reshape(a @ of(f"self_attn.{p}_proj").T, (n, -1, dim)) for p in "qkv")
        o = attend(turn(q, config["rope_theta"]), turn(k, config["rope_theta"]), v, wanted)
        x = x + o.reshape(n, -1) @ of("self_attn.o_proj").T
        a = norm(x, of("post_attention_layernorm"), epsilon)
        gate = a @ of("mlp.gate_proj").T
        x = x + (gate / (1 + np.exp(-gate)) * (a @ of("mlp.up_proj").T)) @ of("mlp.down_proj").T
    return norm(x, w["model.norm.weight"], epsilon)


def log_probabilities(w, x):
    logits = x @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T
    logits -= logits.max(1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("text", type=pathlib.Path)
    parser.add_argument("--tokens", type=int, default=7680)
    parser.add_argument("--from", type=int, default=4096, dest="first")
    parser.add_argument("--blocks", default="3,4,8")
    options = parser.parse_args()
    from tokenizers import Tokenizer

    config = json.loads((options.folder / "config.json").read_text())
    w = read_weights(options.folder / "model.safetensors")
    tokenizer = Tokenizer.from_file(str(options.folder / "tokenizer.json"))
    ids = np.array(tokenizer.encode(options.text.read_text()).ids[:options.tokens])
    exact = run(w, config, ids, 0)
    parts = [slice(at, min(at + 128, len(ids) - 1)) for at in range(options.first, len(ids) - 1, 128)]

    def own(log_p, part):
        return np.take_along_axis(log_p, ids[part.start + 1:part.stop + 1, None], 1)[:, 0] / -np.log(2)

    bits = np.concatenate([own(log_probabilities(w, exact[part]), part) for part in parts])
    print(f"{len(ids)} tokens, {len(bits)} predicted, exactly {bits.mean():.4f} bits a token")
    print("blocks  mean        +-        p50       p99       largest   same best  bits/token above exact", flush=True)
    for wanted in map(int, options.blocks.split(",")):
        x = run(w, config, ids, wanted)
        nats, same, bits = [], [], []
        for part in parts:
            p, q = log_probabilities(w, exact[part]), log_probabilities(w, x[part])
            nats += list((np.exp(p) * (p - q)).sum(1))
            same += list(p.argmax(1) == q.argmax(1))
            bits += list(own(q, part) - own(p, part))
        nats = np.array(nats)
        print(f"{wanted:6}  {nats.mean():.2e}  {nats.std() / np.sqrt(len(nats)):.1e}   {np.median(nats):.2e}  "
              f"{np.quantile(nats, 0.99):.2e}  {nats.max():.2e}  {100 * np.mean(same):.1f} %     "
              f"{np.mean(bits):+.4f} +- {np.std(bits) / np.sqrt(len(bits)):.4f}", flush=True)


if __name__ == "__main__":
    main()
