#!/usr/bin/env python3
"""Golden tokens and texts of the real models that tools/real-models brings, computed by Hugging Face transformers.

  make.py [MODEL...]     writes MODEL.json beside this file, by default of all models

The model and its tokenizer come from the GGUF file in the cache by transformers' own reader, not from the folder that
tools/real-models/bring makes of it, so that the tests check that folder, too. Weights are dequantised, and everything is computed in fp32.

A prompt is continued greedily, whatever ends a text. "margin" is the smallest difference of the two largest logits of its
steps: rounding in another order must not decide a token, so a text ends before the first token whose margin is below MARGIN,
and a prompt that LEAST tokens do not follow until there is refused.

Needs torch, transformers, gguf and the models in the cache (tools/real-models/bring MODEL). Takes some minutes on two cores.
"""
import json
import os
import sys
from pathlib import Path

import torch
import transformers as tf

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[3]
CACHE = Path(os.environ.get("KEYHOLE_CACHE", Path.home() / ".cache" / "keyhole"))
sys.path.append(str(ROOT / "tools" / "real-models"))
import models  # noqa: E402

MARGIN = 2e-3
LEAST = 6
PROSE = ROOT / "tools" / "model" / "haystack.txt"
LONG = 2000  # tokens of the long prompt

# name: (text, tokens to generate). The long one is the beginning of the bundled prose.
PROMPTS = {
    "english": ("The lighthouse keeper climbed the stairs every evening, and", 48),
    "facts": ("The three largest cities of France are", 40),
    "code": ("def fibonacci(n):\n    \"\"\"Returns the n-th Fibonacci number.\"\"\"\n    if n < 2:\n", 64),
    "json": ("{\n  \"name\": \"keyhole\",\n  \"version\": \"0.1.0\",\n  \"dependencies\": [", 40),
    "numbers": ("1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024,", 48),
    "sum": ("12 + 30 = 42\n7 + 5 = 12\n19 + 23 = 42\n8 + 9 =", 32),
    "unicode": ("Die Stra\u00dfe f\u00fchrt \u00fcber die Br\u00fccke nach K\u00f6ln. \u201eWohin?\u201c \u2014 fragte", 40),
    "chinese": ("\u4eca\u5929\u5929\u6c14\u5f88\u597d\uff0c\u6211\u4eec\u53bb", 32),
    "emoji": ("\U0001f600 means happy, \U0001f622 means sad, \u2764\ufe0f means", 32),
    "spaces": ("  a\tb\n\n\n   c    d\r\n", 32),
}


def long_prompt(tokenizer):
    """The beginning of the bundled prose that has LONG tokens, in bytes."""
    prose = PROSE.read_bytes()
    low, high = 0, len(prose)
    while low < high:
        middle = (low + high) // 2
        if len(tokenizer(prose[:middle].decode()).input_ids) < LONG:
            low = middle + 1
        else:
            high = middle
    return low


def greedy(model, tokens, count):
    """`count` tokens, or those before a near tie, and the smallest margin, with transformers' own cache."""
    generated, cache, new, margin = [], None, tokens, float("inf")
    with torch.no_grad():
        while len(generated) < count:
            out = model(torch.tensor([new]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            best = torch.topk(out.logits[0, -1], 2)
            step = float(best.values[0] - best.values[1])
            if step < MARGIN:
                break
            margin = min(margin, step)
            cache, new = out.past_key_values, [int(best.indices[0])]
            generated += new
    return generated, margin


def text_of(tokenizer, tokens):
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def make(name):
    gguf = models.MODELS[name].gguf
    tokenizer = tf.AutoTokenizer.from_pretrained(CACHE, gguf_file=gguf)
    model = tf.AutoModelForCausalLM.from_pretrained(CACHE, gguf_file=gguf, dtype=torch.float32).eval()
    prompts = []
    prose_bytes = long_prompt(tokenizer)
    long_text = PROSE.read_bytes()[:prose_bytes].decode()
    for prompt, (text, count) in {**PROMPTS, "long": (long_text, 32)}.items():
        tokens = tokenizer(text).input_ids
        generated, margin = greedy(model, tokens, count)
        said = text_of(tokenizer, generated)
        while said.endswith("\ufffd"):  # the last token ends inside a character
            generated.pop()
            said = text_of(tokenizer, generated)
        print("%s, %s: %d tokens, margin %.4f: %r" % (name, prompt, len(tokens), margin, said), flush=True)
        if len(generated) < LEAST:
            sys.exit("a margin is below %g after %d tokens: another text" % (MARGIN, len(generated)))
        golden = {"name": prompt, "tokens": tokens, "generated": generated, "generated_text": said,
                  "margin": float("%.2g" % margin)}
        golden.update({"prose_bytes": prose_bytes} if prompt == "long" else {"text": text})
        prompts.append(golden)
    with open(HERE / (name + ".json"), "w") as file:
        head = {"made_by": "transformers %s, torch %s" % (tf.__version__, torch.__version__), "gguf": gguf,
                "sha256": models.MODELS[name].sha256, "licence": models.MODELS[name].licence}
        lines = ['"%s": %s' % (key, json.dumps(value)) for key, value in head.items()]
        lines.append('"prompts": [\n' + ",\n".join(json.dumps(p) for p in prompts) + "\n]")
        file.write("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    torch.set_num_threads(2)
    for wanted in sys.argv[1:] or models.MODELS:
        make(wanted)
