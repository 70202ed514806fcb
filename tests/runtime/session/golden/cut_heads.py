#!/usr/bin/env python3
"""Cuts hard heads out of traces of real models: real_heads.safetensors, which real_heads_test.cpp attends to, and
long_keys.safetensors, which long_keys_test.cpp attends to.

  head -c 4870 tools/model/haystack.txt > prompt.txt
  keyhole record --model "$(tools/real-models/bring smollm2-135m-instruct)" --device host --prompt prompt.txt --queries 24 --training 64 --out all.safetensors
  cut_heads.py all.safetensors real_heads.safetensors
  head -c 2500 tools/model/haystack.txt > prompt.txt
  keyhole record --model "$(tools/real-models/bring gemma3-270m)" --device host --prompt prompt.txt --queries 24 --training 16 --out all.safetensors
  cut_heads.py all.safetensors long_keys.safetensors

The first model is SmolLM2-135M-Instruct (Hugging Face, Apache-2.0), the second Gemma 3 270M (Google, Gemma Terms of Use), and the files
hold keys, values and queries that they compute from the bundled prose, in f16. Each chosen (layer, KV head) becomes a layer of one KV
head with its query heads, numbered KV heads * layer + head, so that a file is a trace like any other: `keyhole compare --trace
real_heads.safetensors` reads it. Layers are those that attend to all tokens. Needs NumPy.
"""
import json
import struct
import sys

import numpy as np

# Why each was chosen: of SmolLM2 of all 90 heads of this text, of Gemma of 3.
HEADS = {
    "smollm2-135m-instruct": {
        (2, 0): "keys with a channel 11 times the median one; codes of 2 bits are off at p95",
        (5, 2): "codes of 2 bits are off at the median, as in (9, 1)",
        (9, 1): "the largest errors of codes of 2 bits at the median and at p95",
        (16, 2): "the largest median error of codes of 2 bits",
        (18, 2): "the first token has 0.94 of the weight, and its value a twelfth of the usual length; the longest keys",
        (19, 0): "the channel that stands out most, 12.6 times the median",
        (27, 2): "sharp, and the largest error of codes of 2 bits at p95",
    },
    "gemma3-270m": {
        (1, 0): "keys of norms above 100, most of it in the mean of all keys, in one channel of 73; RoPE of base 1,000,000, where layers with a window have 10,000",
    },
}
TYPES = {"F16": np.float16, "F32": np.float32, "U32": np.uint32}


def read(path):
    data = open(path, "rb").read()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + size])
    metadata = header.pop("__metadata__")
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = np.frombuffer(data[8 + size + begin:8 + size + end], TYPES[entry["dtype"]]).reshape(entry["shape"])
    return metadata, tensors


def write(path, metadata, tensors):
    names = {dtype: name for name, dtype in TYPES.items()}
    header, data = {"__metadata__": metadata}, b""
    for name, tensor in tensors.items():
        header[name] = {"dtype": names[tensor.dtype.type], "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + tensor.nbytes]}
        data += tensor.tobytes()
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    open(path, "wb").write(struct.pack("<Q", len(text)) + text + data)


metadata, tensors = read(sys.argv[1])
model = next(name for name in HEADS if metadata["model"].startswith(name))
kv_heads = int(metadata["kv_heads"])
out = {name: tensors[name] for name in ("query_positions", "training_positions")}
for layer, head in HEADS[model]:
    for part in ("keys", "values", "queries", "training_queries"):
        numbers = tensors["layer.%d.kv.%d.%s" % (layer, head, part)]
        assert np.isfinite(numbers.astype(np.float16)).all()
        out["layer.%d.kv.0.%s" % (kv_heads * layer + head, part)] = numbers.astype(np.float16)
metadata.update(q_heads=str(int(metadata["q_heads"]) // kv_heads), kv_heads="1", model=model,
                layers=",".join(str(kv_heads * layer + head) for layer, head in HEADS[model]),
                prompt="%s tokens of the bundled prose; layers are %d * layer + KV head of the model" % (metadata["tokens"], kv_heads))
write(sys.argv[2], metadata, out)
