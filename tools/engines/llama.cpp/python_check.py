#!/usr/bin/env python3
"""Answers of llama-cpp-python, with its cache in Keyhole where GGML_BACKEND_PATH names the backend, as `test python` has it.
Prints one JSON object.
  python_check.py MODEL THREADS"""

import json
import os
import sys

import llama_cpp

if "GGML_BACKEND_PATH" in os.environ:
    # llama-cpp-python has its backends inside, and loads no others by itself.
    from llama_cpp._ggml import libggml

    libggml.ggml_backend_load_all()

TEXT = "The keeper of the lighthouse had lived on the island for thirty years. Every evening he climbed the stairs and lit the lamp. "
model = llama_cpp.Llama(sys.argv[1], n_ctx=1024, n_gpu_layers=-1, flash_attn=True, n_threads=int(sys.argv[2]),
                        n_threads_batch=int(sys.argv[2]), verbose=True)


def complete(prompt, tokens=24):
    return model.create_completion(prompt, max_tokens=tokens, temperature=0)["choices"][0]["text"]


said = {"completion": complete(TEXT * 4)}
state = model.save_state()
said["goes on"] = complete(TEXT * 5)
said["another prompt"] = complete("Once upon a time")
model.load_state(state)
said["from the saved state"] = complete(TEXT * 4 + said["completion"])
said["chat"] = model.create_chat_completion([{"role": "user", "content": "Name three birds of the sea."}], max_tokens=24,
                                            temperature=0)["choices"][0]["message"]["content"]
print(json.dumps(said))
