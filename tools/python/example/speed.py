"""Tokens per second of generate() with Keyhole beside sdpa with a DynamicCache, on the bundled model: prints a table.

    OMP_WAIT_POLICY=passive python tools/python/example/speed.py [--context 8192 32768] [--tokens 32] [--index auto]

The prompt is computed once, by sdpa; both decode from it, by turns, `--rounds` times. Each figure is the best round, and the
machine should have nothing else to do.
"""

import argparse
import time
from pathlib import Path

import torch
import transformers

import keyhole.transformers

MODEL = Path(__file__).resolve().parents[2] / "model"


def prompt(tokens):
    """Prose of the bundled haystack, one byte a token."""
    text = (MODEL / "haystack.txt").read_bytes()[: tokens - 1]
    return torch.tensor([[256, *text]])


def decode(model, cache, tokens):
    """Seconds for a token, greedily."""
    token = torch.tensor([[10]])
    with torch.no_grad():
        token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)  # builds what is to be built
        start = time.perf_counter()
        for _ in range(tokens):
            token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
        seconds = time.perf_counter() - start
    cache.crop(-tokens - 1)
    return seconds / tokens


def measure(model, context, tokens, rounds, indexes):
    """Rows of the table: name, seconds for a token, the session's statistics."""
    keyhole.transformers.disable(model)
    with torch.no_grad():
        dynamic = model(prompt(context), logits_to_keep=1).past_key_values
    caches = {}
    best = {"sdpa": float("inf"), **{index: float("inf") for index in indexes}}
    for _ in range(rounds):
        keyhole.transformers.disable(model)
        best["sdpa"] = min(best["sdpa"], decode(model, dynamic, tokens))
        for index in indexes:
            keyhole.transformers.enable(model, index=index)
            caches[index] = keyhole.transformers.KeyholeCache.from_cache(model, dynamic)
            best[index] = min(best[index], decode(model, caches[index], tokens))
    keyhole.transformers.disable(model)
    return [(name, seconds, None if name == "sdpa" else caches[name].statistics()[0]) for name, seconds in best.items()]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--index", nargs="+", default=["auto", "ivf"])
    parser.add_argument("--model", default=str(MODEL))
    options = parser.parse_args()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    print(f"{torch.get_num_threads()} threads, {options.tokens} tokens, best of {options.rounds}")
    print(f"{'context':>8}  {'attention':<12} {'tokens/s':>9} {'ms/token':>9} {'attention ms':>13} {'read/token':>12}")
    for context in options.context:
        for name, seconds, figures in measure(model, context, options.tokens, options.rounds, options.index):
            line = f"{context:>8}  {name:<12} {1 / seconds:>9.1f} {1e3 * seconds:>9.2f}"
            if figures is not None:
                steps = figures.attends / model.config.num_hidden_layers
                line += f" {1e3 * figures.attend_seconds / steps:>13.2f} {figures.bytes_read / steps / 2**20:>8.2f} MiB"
            print(line, flush=True)


if __name__ == "__main__":
    main()
