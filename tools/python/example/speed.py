"""Tokens per second and memory of generate()'s decoding with Keyhole, beside the caches of transformers: a table, and JSON.

    OMP_WAIT_POLICY=passive python tools/python/example/speed.py [--tokens 8k,32k] [--index auto ivf] [--json speed.json]
    python tools/python/example/speed.py --device cuda --tokens 8k,32k,128k --model DIR
    python tools/python/example/speed.py --device cuda --tokens 128k --model 8b --fill random --index auto --rounds 1
    python tools/python/example/speed.py --device cuda --tokens 256k --model hybrid --layers 32 --fill random --index auto --rounds 1 --ways dynamic,keyhole,graphs

Beside each other: sdpa with a DynamicCache, a StaticCache, an OffloadedCache (a GPU alone) and QuantizedCaches of the backends that
are installed, and Keyhole with each --index, each step in pieces, and on a GPU as one CUDA graph, of the model's own layers and of
compiled ones. What cannot run here is skipped, and says why. --model 8b and hybrid (27B, a quarter of its layers with keys and values)
are models of that shape with random weights.

The prompt is computed once, by sdpa, or its keys and values are random numbers (--fill random: nothing to wait for, and no text);
every way decodes from it, greedily, by turns, `--rounds` times. Each time is the best round,
and the machine should have nothing else to do. Memory is what decoding takes: of the device PyTorch's peak, the model's weights
among it, and what Keyhole holds there; of the host what the cache holds.
"""

import argparse
import copy
import dataclasses
import gc
import json
import math
import platform
import time
from pathlib import Path
from typing import Any, Optional

import torch
import transformers
from transformers.cache_utils import DynamicCache, QuantizedCache, StaticCache

import keyhole.transformers

MODEL = Path(__file__).resolve().parents[2] / "model"
WARM = 3  # steps before those that are timed
CHUNK = 8192  # of the prompt: what sdpa takes at once
COMPILING = 10  # the same where layers are compiled
START = 8  # tokens of a prompt of random numbers that are computed, where layers keep states
WAYS = ("dynamic", "static", "offloaded", "quantized", "keyhole", "graphs", "compiled")
# Of random models the class, and the fields of its config.
SHAPES = {
    "8b": ("Llama", {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
                     "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 131072 + 4096}),
    "hybrid": ("Qwen3_5", {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64, "num_attention_heads": 24,
                           "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
                           "linear_key_head_dim": 128, "linear_value_head_dim": 128, "vocab_size": 248320,
                           "max_position_embeddings": 262144 + 4096}),
}  # fmt: skip


@dataclasses.dataclass
class Row:
    """One way at one context. None: not known, or not measured, for which `skipped` has the reason."""

    context: int
    way: str
    seconds: Optional[float] = None  # for a token
    device_bytes: Optional[int] = None
    host_bytes: Optional[int] = None
    bytes_read: Optional[float] = None  # of host memory, for a token
    attend_seconds: Optional[float] = None  # in Keyhole's calls, for a token
    skipped: str = ""


def length(text):
    """ "8192", "8k", "1M"."""
    factor = {"k": 1024, "m": 1024**2}.get(text[-1:].lower(), 1)
    return int(text[:-1] if factor > 1 else text) * factor


def prompt(model, context):
    """Prose of the bundled haystack, one byte a token, over and over: ids that any model has."""
    text = (MODEL / "haystack.txt").read_bytes()
    text = text * math.ceil(context / len(text))
    return torch.tensor([[0, *text[: context - 1]]], device=model.device) % model.config.get_text_config().vocab_size


@dataclasses.dataclass
class Prompt:
    """What caches hold before anything is decoded: K and V by the number of their layer, and of other layers their states."""

    context: int
    rows: dict[int, tuple[Any, Any]]
    states: dict[int, dict[str, Any]]

    @property
    def device_bytes(self):
        return sum(one.nbytes for pair in self.rows.values() for one in pair if one.is_cuda)

    def filled(self, cache, device):
        for number, state in self.states.items():
            vars(cache.layers[number]).update(copy.deepcopy(state))
        for number, (keys, values) in self.rows.items():
            cache.update(keys.to(device), values.to(device), number)
        return cache


def empty(config):
    """A cache that keeps all tokens of all layers, also of those with a window, which the other caches then cut."""
    kinds = getattr(config, "layer_types", None) or []
    return DynamicCache(config=config) if set(kinds) - {"full_attention", "sliding_attention"} else DynamicCache()


def computed(model, ids):
    cache = empty(model.config.get_text_config())
    for first in range(0, ids.shape[1], CHUNK):
        model(ids[:, first : first + CHUNK], past_key_values=cache, logits_to_keep=1)
    rows = {number: (layer.keys, layer.values) for number, layer in enumerate(cache.layers) if getattr(layer, "keys", None) is not None}
    return rows, {number: vars(layer) for number, layer in enumerate(cache.layers) if number not in rows}


def prefilled(model, context):
    """K and V of a prompt, in host memory."""
    rows, states = computed(model, prompt(model, context))
    return Prompt(context, {number: (keys.cpu(), values.cpu()) for number, (keys, values) in rows.items()}, states)


def random_prompt(model, context):
    """Random keys and values in place of a prompt's, but for the first."""
    rows, states = computed(model, prompt(model, START))
    draw = torch.Generator(model.device).manual_seed(1)

    def continued(given):
        wanted = (*given.shape[:2], context - START, given.shape[3])
        return torch.cat([given, torch.randn(wanted, dtype=given.dtype, device=given.device, generator=draw)], dim=2)

    return Prompt(context, {number: (continued(keys), continued(values)) for number, (keys, values) in rows.items()}, states)


def random_model(shape, layers, dtype, device):
    """Weights are small, so that states stay in range."""
    name, fields = SHAPES[shape]
    kind = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    config = kind(**{**fields, "num_hidden_layers": layers or fields["num_hidden_layers"]})
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    model = model.to(dtype).to_empty(device=device)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)  # what is computed, not loaded
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        torch.nn.init.ones_(parameter) if name.endswith("norm.weight") else torch.nn.init.normal_(parameter, std=0.02)
    return model.eval()


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def cached_bytes(cache):
    """Bytes of a cache's tensors in host memory."""
    if isinstance(cache, keyhole.transformers.KeyholeCache):
        return sum(figures.host_bytes for figures in cache.statistics())
    tensors, seen = [], set()

    def collect(value):
        if isinstance(value, torch.Tensor):
            if value.device.type == "cpu" and value.data_ptr() not in seen:
                seen.add(value.data_ptr())
                tensors.append(value)
            for part in ("_data", "_scale", "_shift"):  # of quantized ones, which say of themselves what they stand for
                if isinstance(getattr(value, part, None), torch.Tensor):
                    collect(getattr(value, part))
        elif isinstance(value, (tuple, list)):
            for part in value:
                collect(part)
        elif isinstance(value, dict):
            collect(list(value.values()))

    for layer in cache.layers:
        for value in vars(layer).values():
            collect(value)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def ways(model, chosen, indexes, capacity):
    """Of each way its name, its index (None: none of Keyhole's) and its empty cache, or why it cannot be. With Keyhole the cache is
    that of the way before with the same index; then it is said how the steps go: WAYS."""
    config = model.config
    on_cuda = model.device.type == "cuda"
    if "dynamic" in chosen:
        yield "sdpa", None, lambda: DynamicCache(config=config)
    if "static" in chosen:
        yield "static", None, lambda: StaticCache(config=config, max_cache_len=capacity)
    if "offloaded" in chosen:
        yield "offloaded", None, (lambda: DynamicCache(config=config, offloading=True)) if on_cuda else "it needs a CUDA device"
    if "quantized" in chosen:
        for backend in ("quanto", "hqq"):
            # What hqq quantizes lies along the rows (axis 1), of quanto along the columns (axis 0), as their defaults say.
            axes = {"axis_key": 1, "axis_value": 1} if backend == "hqq" else {}
            try:
                QuantizedCache(backend, config=config, nbits=4, **axes)
            except (ImportError, ValueError) as error:
                yield f"{backend} 4 bits", None, str(error).split(". ")[0]
                continue
            yield f"{backend} 4 bits", None, lambda backend=backend, axes=axes: QuantizedCache(backend, config=config, nbits=4, **axes)
    for index in indexes:
        if "keyhole" in chosen:
            yield f"keyhole {index}", index, lambda: "keyhole"
        for way in ("graphs", "compiled"):
            if way in chosen:
                yield f"keyhole {index}, {way}", index, (lambda way=way: way) if on_cuda else "CUDA graphs need a CUDA device"


def timed(model, cache, tokens, warm=WARM):
    """Seconds for a token. The first steps are not timed: they build what is to be built, and capture graphs."""
    token = torch.tensor([[10]], device=model.device)
    for _ in range(warm):
        token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
    synchronize(model.device)
    start = time.perf_counter()
    for _ in range(tokens):
        token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
    synchronize(model.device)
    return (time.perf_counter() - start) / tokens


def kept_cache(model, index, given, tokens, kept):
    """Keyhole's cache of the prompt: made once for each index, as to bring 16 GiB into it takes longer than to decode from it."""
    if kept.get("index") != index:
        drop(kept)
        on_cuda = model.device.type == "cuda"
        # On a GPU codes take device memory for as many tokens as a session may hold.
        kept["enabled"] = keyhole.transformers.enable(model, index=index, max_tokens=given.context + tokens + 64, graphs=on_cuda, compile=on_cuda,
                                                       window_slack=max(64, tokens + COMPILING))  # fmt: skip
        kept["compiled"] = kept["enabled"].graphs and kept["enabled"].graphs.compiled
        kept["cache"] = keyhole.transformers.KeyholeCache.from_cache(model, given.filled(empty(model.config.get_text_config()), model.device))
        for session in kept["cache"].sessions:
            session.synchronize()  # what was enqueued has read K and V: they can go
        kept["states"] = kept["cache"]._states.copy()
        kept["index"] = index
    cache = kept["cache"]  # crop() goes back a few tokens alone where layers keep states
    cache._cut(given.context)
    cache._record.clear()
    cache._states.put(kept["states"])
    cache.steps.clear()
    for session in cache.sessions:
        session.reset_statistics()
    return cache


def drop(kept):
    """Frees it."""
    for session in kept["cache"].sessions if kept else []:
        session.close()
    kept.clear()


def one_round(model, row, index, make, given, tokens, kept):
    """Decodes from the prompt once, and keeps the best of what is measured in `row`."""
    device = model.device
    on_cuda = device.type == "cuda"
    if index is None:
        drop(kept)
        keyhole.transformers.disable(model)
        cache = given.filled(make(), device)
    else:
        cache = kept_cache(model, index, given, tokens, kept)
        graphs = kept["enabled"].graphs
        if on_cuda:
            graphs.on = make() != "keyhole"
            graphs.compiled = kept["compiled"] if make() == "compiled" else None
            launched = graphs.replays
    gc.collect()
    if on_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    seconds = timed(model, cache, tokens, COMPILING if index is not None and make() == "compiled" else WARM)
    row.seconds = seconds if row.seconds is None else min(row.seconds, seconds)
    row.host_bytes = cached_bytes(cache)
    if on_cuda:
        row.device_bytes = torch.cuda.max_memory_allocated(device) - given.device_bytes
    if index is not None:
        figures = cache.statistics()[0]
        steps = figures.attends / len(given.rows)
        row.bytes_read = figures.bytes_read / steps
        row.attend_seconds = figures.attend_seconds / steps
        if on_cuda:
            row.device_bytes += sum(one.device_bytes_peak for one in cache.statistics())
            if graphs.on and graphs.replays - launched < tokens or make() == "compiled" and graphs.compiled is None:
                row.seconds = None
                raise keyhole.Unsupported("steps were no graphs of this kind: see the log")


@torch.no_grad()
def measure(model, context, tokens, rounds, indexes, chosen=WAYS, fill="prompt", told=lambda row: None):
    """The rows of one context; told() has each when its last round is over."""
    keyhole.transformers.disable(model)
    given = random_prompt(model, context) if fill == "random" else prefilled(model, context)
    found = list(ways(model, chosen, indexes, context + tokens + WARM))
    kept = {}
    rows = [Row(context, name, skipped=make if isinstance(make, str) else "") for name, _, make in found]
    for number in range(rounds):
        for row, (_, index, make) in zip(rows, found):
            if row.skipped:
                if number == rounds - 1:
                    told(row)
                continue
            try:
                one_round(model, row, index, make, given, tokens, kept)
            except (torch.OutOfMemoryError, keyhole.OutOfMemory, keyhole.OutOfDeviceMemory) as error:
                row.skipped = "it does not fit: " + str(error).split("\n")[0]
            except keyhole.Unsupported as error:
                row.skipped = str(error)
            if number == rounds - 1:
                told(row)
            gc.collect()
            if model.device.type == "cuda":
                torch.cuda.empty_cache()
    drop(kept)
    keyhole.transformers.disable(model)
    return rows


def shown(row):
    line = f"{row.context:>8}  {row.way:<22}"
    if row.seconds is None:
        return f"{line} skipped: {row.skipped}"

    def mebibytes(value):
        return f"{'-':>11}" if value is None else f"{value / 2**20:>11.1f}"

    line += f" {1 / row.seconds:>9.1f} {1e3 * row.seconds:>9.2f} {mebibytes(row.device_bytes)} {mebibytes(row.host_bytes)}"
    if row.bytes_read is not None:
        line += f" {1e3 * row.attend_seconds:>13.2f} {mebibytes(row.bytes_read)}"
    return line


def arguments(words: Optional[list[str]]) -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="8k,32k", help="tokens of the prompt, e.g. 8k,32k,128k [8k,32k]")
    parser.add_argument("--new", type=int, default=32, help="tokens that are timed [32]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", default=",".join(WAYS), help=f"what is compared [{','.join(WAYS)}]")
    parser.add_argument("--index", nargs="+", default=["auto", "ivf"], help="of Keyhole [auto ivf]")
    parser.add_argument("--model", default=str(MODEL), help="a folder in the Hugging Face layout, or 8b or hybrid: random weights [the bundled model]")
    parser.add_argument("--layers", type=int, help="of 8b or hybrid, in place of all")
    parser.add_argument("--fill", choices=["prompt", "random"], default="prompt", help="what the caches hold [prompt]")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... [cpu]")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="[float32; on a GPU bfloat16]")
    parser.add_argument("--json", help="write all figures here")
    options = parser.parse_args(words)
    try:
        options.tokens = [length(part) for part in options.tokens.split(",")]
    except ValueError:
        parser.error(f"--tokens is {options.tokens}; lengths such as 8k,32k,128k are needed")
    if min(options.tokens) < 256 or options.new < 1 or options.rounds < 1:
        parser.error("--tokens are 256 or more each, --new and --rounds 1 or more")
    options.ways = options.ways.split(",")
    if unknown := set(options.ways) - set(WAYS):
        parser.error(f"--ways: there is no {', '.join(sorted(unknown))}; allowed: {', '.join(WAYS)}")
    options.device = torch.device(options.device)
    if options.device.type == "cuda":
        if not torch.cuda.is_available():
            parser.error("--device cuda: PyTorch finds no CUDA device")
        if {"keyhole", "graphs", "compiled"} & set(options.ways) and not keyhole.CUDA:
            parser.error("--device cuda: this keyhole was built without CUDA; build its wheel where nvcc is on the PATH, or "
                         "leave keyhole out of --ways")  # fmt: skip
        torch.cuda.set_device(options.device.index or 0)
    elif options.device.type != "cpu":
        parser.error(f"--device {options.device}: cpu and cuda are allowed")
    options.dtype = options.dtype or ("bfloat16" if options.device.type == "cuda" else "float32")
    return options


def main(words: Optional[list[str]] = None):
    options = arguments(words)
    transformers.logging.disable_progress_bar()
    dtype = getattr(torch, options.dtype)
    if options.model in SHAPES:
        model = random_model(options.model, options.layers, dtype, options.device)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval().to(options.device)
    on_cuda = options.device.type == "cuda"
    machine = torch.cuda.get_device_name(options.device) if on_cuda else f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    print(f"{machine}; {options.dtype}; {options.new} tokens, best of {options.rounds}; keyhole {keyhole.__version__}, torch "
          f"{torch.__version__}, transformers {transformers.__version__}")  # fmt: skip
    print(f"{'context':>8}  {'way':<22} {'tokens/s':>9} {'ms/token':>9} {'device MiB':>11} {'host MiB':>11} {'attention ms':>13} {'read MiB':>11}")
    rows = []
    for context in options.tokens:
        rows += measure(model, context, options.new, options.rounds, options.index, options.ways, options.fill,
                        told=lambda row: print(shown(row), flush=True))  # fmt: skip
    if options.json:
        figures = [{**dataclasses.asdict(row), "tokens_per_second": row.seconds and 1 / row.seconds} for row in rows]
        Path(options.json).write_text(json.dumps({
            "format": "keyhole-speed", "version": 1, "machine": machine, "device": str(options.device), "dtype": options.dtype,
            "model": options.model, "layers": model.config.get_text_config().num_hidden_layers, "new": options.new, "rounds": options.rounds, "fill": options.fill, "keyhole": keyhole.__version__,
            "torch": torch.__version__, "transformers": transformers.__version__, "rows": figures,
        }, indent=1) + "\n")  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
