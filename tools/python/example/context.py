"""Output error and time of a token against the length of the context, on the bundled model: a table and a chart.

    python tools/python/example/context.py [--context 1024 2048 4096 8192] [--index auto ivf] [--out context.png]

Needs torch, transformers, and matplotlib for the chart. What is measured:
  error  |o - o*| / |o*| of a layer's output for a query head, o* from exact attention: audits of every step
  time   of a token, all layers, whole model; "exact" is the model's own attention with a DynamicCache
"""

import argparse
import random
import statistics
import time
from pathlib import Path

import torch
import transformers

import keyhole.transformers

MODEL = Path(__file__).resolve().parents[2] / "model"


def kv_prompt(tokens, seed=1):
    """Lines key=value, and a question about one in the middle: tools/model/README.md."""
    rng = random.Random(seed)
    pairs = [("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=5)), f"{rng.randrange(100000):05}") for _ in range(tokens // 12)]
    key, value = pairs[len(pairs) // 2]
    text = "".join(f"{one}={other}\n" for one, other in pairs) + f"?{key}="
    return torch.tensor([[256, *text.encode()]]), value


class Clock(transformers.StoppingCriteria):
    """Looks at the clock after each token, and stops nothing."""

    def __init__(self):
        self.times = []

    def __call__(self, input_ids, scores, **_):
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def run(model, ids):
    """The answer, milliseconds for a token (median; not the first two: the prompt, and the build), and the cache."""
    clock = Clock()
    output = model.generate(ids, max_new_tokens=17, min_new_tokens=17, do_sample=False, pad_token_id=257,
                            return_dict_in_generate=True, stopping_criteria=[clock])  # fmt: skip
    milliseconds = 1e3 * statistics.median(after - before for before, after in zip(clock.times[1:], clock.times[2:]))
    answer = bytes(output.sequences[0, ids.shape[1] :].clamp(max=255).tolist()).decode(errors="replace")
    return answer, milliseconds, output.past_key_values


def measure(model, contexts, indexes):
    """Rows: context, index, median and p95 of the error, milliseconds for a token, whether the answer was right."""
    rows = []
    for context in contexts:
        ids, value = kv_prompt(context)
        keyhole.transformers.disable(model)
        answer, milliseconds, _ = run(model, ids)
        rows.append((context, "exact", 0.0, 0.0, milliseconds, answer.startswith(value)))
        for index in indexes:
            keyhole.transformers.enable(model, index=index)
            answer, milliseconds, _ = run(model, ids)
            # Audits read everything once more: they are not in the time.
            keyhole.transformers.enable(model, index=index, audit_share=1.0)
            cache = run(model, ids)[2]
            (audit,) = cache.audit()
            rows.append((context, index, audit.error_median, audit.error_p95, milliseconds, answer.startswith(value)))
    keyhole.transformers.disable(model)
    return rows


def draw(rows, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (errors, times) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for color, name in enumerate(dict.fromkeys(row[1] for row in rows)):
        mine = [row for row in rows if row[1] == name]
        contexts = [row[0] for row in mine]
        times.plot(contexts, [row[4] for row in mine], marker="o", color=f"C{color}", label=name)
        if name != "exact":
            errors.plot(contexts, [row[2] for row in mine], marker="o", color=f"C{color}", label=f"{name}, median")
            errors.plot(contexts, [row[3] for row in mine], linestyle="--", color=f"C{color}", label=f"{name}, p95")
    errors.set(xscale="log", yscale="log", xlabel="tokens of context", ylabel="output error of a layer")
    times.set(xscale="log", xlabel="tokens of context", ylabel="milliseconds for a token", ylim=(0, None))
    for axes in (errors, times):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--index", nargs="+", default=["auto", "ivf"])
    parser.add_argument("--out", default="context.png")
    options = parser.parse_args(arguments)
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    rows = measure(model, options.context, options.index)
    print(f"{'context':>8}  {'index':<10} {'error p50':>10} {'error p95':>10} {'ms/token':>9}  answer")
    for context, name, median, p95, milliseconds, right in rows:
        print(f"{context:>8}  {name:<10} {median:>10.4f} {p95:>10.4f} {milliseconds:>9.2f}  {'right' if right else 'wrong'}")
    try:
        draw(rows, options.out)
        print(f"drawn: {options.out}")
    except ImportError:
        print("matplotlib is not installed: nothing is drawn")
    return rows


if __name__ == "__main__":
    main()
