"""What enable() does to a model: an engine of its shape, the attention, the cache."""

import contextlib
import copy
import dataclasses
import functools
import inspect
import logging
import os
import types
from typing import Any, Optional, Union

import torch
from transformers import AttentionInterface
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

from .._engine import Engine
from .._enums import Mode, number
from .._errors import InvalidArgument, Unsupported
from .._native import extend_batch as _extend_batch
from .._progress import Progress
from .._session import BatchError, Session
from .._structs import Budget, SessionConfig
from ._cache import CHUNK, KeyholeCache, _Length, rows_of
from ._compiled import Compiled
from ._graphs import Graphs, Recorder
from ._prompt import masked_attention, prompt_attention
from ._shapes import Attention, attentions, engine_config, states_of, text_config

NAME = "keyhole"
ROOM = 4096  # tokens of the smallest session
DRAFTS = 64  # that assisted generation may have beyond the last token
_log = logging.getLogger("keyhole")


class Enabled:
    """What a model has since enable(): `engine`, and the config of the sessions that its caches make."""

    def __init__(self, model: Any, found: list[Attention], engine: Engine, config: SessionConfig, pattern: Optional[str],
                 progress: Progress) -> None:  # fmt: skip
        self.engine = engine
        self.attentions = found
        # The engine's layer of each attention, by the number of the model's layer: others may lie between them.
        self.numbers = {one.module.layer_idx: number for number, one in enumerate(found)}
        self.device = model.device
        self.decoder = model.get_decoder()
        self.text_config = text_config(model)
        # Newer versions of transformers have given it another name.
        parameters = inspect.signature(type(self.decoder).forward).parameters
        self.decoder_parameters = set(parameters)
        self.cache_name = "cache" if "cache" in parameters else "past_key_values"
        self.config = config
        self.progress = progress
        self.pattern = pattern
        self.model_id = f"{getattr(model.config, '_name_or_path', '') or type(model).__name__}"[:255]
        self.graphs: Optional[Graphs] = None
        self.exact = config.mode is not None and number("mode", config.mode) == Mode.EXACT
        # Graphs that follow the prompt's queries need these; nobody else does.
        self.samples = "roargraph" in (config.index or "") or config.budgets is not None

    def prepare(self, session: Session) -> Session:
        if self.pattern is not None and not self.engine._cuda:
            session.set_extend_pattern(self.pattern, CHUNK)
        return session

    def session(self, max_tokens: Optional[int] = None) -> Session:
        """max_tokens: None: those of the config."""
        config = self.config if max_tokens is None else dataclasses.replace(self.config, max_tokens=max_tokens)
        return self.prepare(self.engine.session(config))

    def states(self) -> list[Any]:
        """For each layer of a cache transformers' own, or None where keys and values are Keyhole's."""
        return states_of(self.text_config, self.attentions)

    def forward_again(self, cache: KeyholeCache, inputs: dict[str, Any], mask: Optional[torch.Tensor]) -> None:
        """The decoder over tokens that the cache has lost and is to have again."""
        if mask is not None:
            mask = mask.to(device=self.device, dtype=torch.long)
        with torch.no_grad(), contextlib.nullcontext() if self.graphs is None else self.graphs.recorder.turn():
            self.decoder(**inputs, attention_mask=mask, use_cache=True, **{self.cache_name: cache})

    def build(self, session: Session) -> None:
        if not self.exact:
            session.build(self.progress)


def enable(model: Any, index: str = "auto", *, mode: Union[Mode, str] = "indexed", threads: Optional[int] = None,
           max_tokens: Optional[int] = None, window_slack: int = 64, prefill: Optional[str] = "dense", graphs: bool = False,
           compile: bool = False, progress: Progress = None, **budget: Any) -> Enabled:  # fmt: skip
    """From now on the model's sequences lie in keyhole sessions, and its attention reads those keys that matter.

    generate() stays as it is: greedy and sampling, batches with padding, several turns on one KeyholeCache, assisted generation,
    beams, return sequences. A forward pass without a cache (use_cache=False, training) attends exactly, by PyTorch.

    index: what the keys lie behind; help: keyhole.index_help(). mode: "indexed", or "exact": everything, the truth to compare
    with. threads: of the engine; default: those of PyTorch (torch.get_num_threads()), with which it takes turns. max_tokens: the
    longest context of a sequence; default: the model's, at least 131072, and what the call needs in a generate() that makes a cache
    and does not return it. Of host memory only addresses are reserved; codes on a GPU take its memory for so many
    tokens: for caches of your own, give what you need there or to KeyholeCache(). window_slack: tokens that sliding layers keep behind their window, so that as many drafts can be taken back. prefill: the pattern by which chunks
    of 128 tokens and more that follow others attend (keyhole.prompt_help()); None: as steps do. graphs: on a GPU, whether
    the forward pass of a step is one CUDA graph: see below. compile: whether graphs of one token are of compiled layers. progress: of builds, as in
    Session.build(). budget: fields of keyhole.Budget (top_k=, tail=, error_target=, ...) and of keyhole.SessionConfig (sink=,
    window=, budgets=, audit_share=, kv_host=, ...). Of an index of type codes, as "auto" is, top_k alone says how many tokens are read
    exactly; all others go by their codes, unless tail="none".

    graphs=True: the first pass of 1 to 32 new tokens behind a context goes as ever, the second one of as many tokens is captured,
    and from then on such a pass is one launch. Sampling, stopping and all else of generate() stay outside. Of a cache of one row,
    whose pass waits for nothing on the host and whose states stay where they are; without gradients. What cannot be captured goes on without a graph,
    and the log says why, once. Weights, adapters and hooks that change under a cache are not seen by its graphs.

    compile=True: in graphs of one token each layer is what torch.compile makes of it: norms, rotations and products of a matrix and
    a vector become fewer kernels, which round in fewer places, so that logits differ in their last bits. The first steps of a
    model compile, for a minute or so; it takes a C compiler, as Triton does. All other passes are the model's own.

    Taken is every causal model whose attention calls transformers' attention interface and says in the usual attributes what it is:
    layer_idx, scaling, head_dim, num_key_value_groups, sliding_window, attn_logit_softcapping, sinks. Layers that keep other
    states (linear attention, convolutions) stay as they are.

    Refused, with the attribute's name (keyhole.Unsupported): attention that is something else (not causal, in chunks, by indexers,
    with biases, of latent keys); head dimensions that are no multiple of 16 from 64 to 576 (InvalidArgument); static and other
    caches of transformers; custom masks; attention weights as outputs; gradients through a cache; what torch.compile() returned:
    enable() the model itself, then compile it (its graphs break at every attention, so fullgraph=True fails).

    Returns an Enabled, whose engine and config can be looked at. enable() again replaces what was set; disable(model) takes it
    back. One model is used by one thread at a time; different models may run at once.
    """
    fields = {field.name for field in dataclasses.fields(SessionConfig)} - {"budget", "index", "mode", "max_tokens"}
    session_fields = {name: budget.pop(name) for name in list(budget) if name in fields}
    unknown = set(budget) - {field.name for field in dataclasses.fields(Budget)}
    if unknown:
        raise TypeError(f"enable() knows no {', '.join(sorted(unknown))}: neither keyhole.Budget nor keyhole.SessionConfig has it")
    if hasattr(model, "_orig_mod"):  # torch.compile()'s wrapper, whose generate() is the inner model's
        raise Unsupported("a compiled model is not supported: call enable() with the model itself, and torch.compile() it then")
    found = attentions(model)
    own = states_of(text_config(model), found)
    config = engine_config(model, found, window_slack)
    on_cuda = model.device.type == "cuda"
    if model.device.type not in ("cpu", "cuda"):
        raise Unsupported(f"a model on {model.device.type} is not supported; supported: cpu, cuda")
    config.device = "auto" if on_cuda else "host"
    if on_cuda:
        config.device_ordinal = model.device.index or 0
    if graphs and not on_cuda:
        raise Unsupported(f"graphs=True needs a model on a CUDA device; this one is on {model.device.type}")
    if compile and not graphs:
        raise Unsupported("compile=True is of steps that are graphs: give graphs=True, too")
    config.threads = threads or (None if on_cuda else torch.get_num_threads())
    given = max_tokens is not None
    if max_tokens is None:
        max_tokens = max(131072, int(getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", 0)))
    if not on_cuda and torch.get_num_threads() > 1 and os.environ.get("OMP_WAIT_POLICY", "").lower() != "passive":
        _log.warning("idle threads of PyTorch spin and take the cores from attention: start Python with OMP_WAIT_POLICY=passive")
    disable(model)
    session_config = SessionConfig(index=index, mode=mode, max_tokens=max_tokens, budget=Budget(**budget) if budget else None, **session_fields)
    enabled = Enabled(model, found, Engine(config), session_config, prefill, progress)
    enabled.rooms_by_call = not given
    enabled.session(max_tokens if given else ROOM).close()  # a wrong index or budget is told here
    enabled.before = model.config._attn_implementation
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    model.set_attn_implementation(NAME)
    for one in found:
        one.module._keyhole = enabled
    decoder = enabled.decoder
    enabled.hooks = [
        decoder.register_forward_pre_hook(types.MethodType(_before_forward, enabled), with_kwargs=True),
        decoder.register_forward_hook(_after_forward, with_kwargs=True, always_call=True),
    ]
    model._keyhole = enabled
    if any(hasattr(layer, "recurrent_states") for layer in own):
        model._is_stateful = False  # drafts can be taken back: KeyholeCache.crop()
    if hasattr(model, "generate"):
        model.generate = types.MethodType(_generate, model)
    if graphs:
        use_graphs(model, Recorder(model.device), Compiled(enabled.decoder) if compile else None)
    return enabled


def use_graphs(model: Any, recorder: Any, compiled: Optional[Compiled] = None) -> Graphs:
    """Has the forward passes of an enabled model go by graphs that `recorder` records."""
    enabled = model._keyhole
    enabled.forward_before = model.__dict__.get("forward")
    enabled.graphs = graphs = Graphs(enabled, model.forward, recorder)
    graphs.compiled = compiled

    @functools.wraps(type(model).forward)  # transformers looks at its arguments
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return graphs(*args, **kwargs)

    model.forward = types.MethodType(forward, model)
    return graphs


def disable(model: Any) -> None:
    """Takes enable() back. Caches that were made go on to exist, and cannot be used any more."""
    enabled = model.__dict__.pop("_keyhole", None)
    if enabled is None:
        return
    for hook in enabled.hooks:
        hook.remove()
    for one in enabled.attentions:
        one.module.__dict__.pop("_keyhole", None)
    for name in ("generate", "_is_stateful"):
        model.__dict__.pop(name, None)
    if enabled.graphs is not None:
        model.__dict__.pop("forward", None)
        if enabled.forward_before is not None:
            model.forward = enabled.forward_before
    model.set_attn_implementation(enabled.before)


def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """generate() of the model's class, with a KeyholeCache where the caller gives none."""
    generation = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None) or self.generation_config
    use_cache = kwargs.get("use_cache", getattr(generation, "use_cache", True))
    kind = kwargs.get("cache_implementation", getattr(generation, "cache_implementation", None))
    if kind not in (None, "dynamic", "dynamic_full"):
        raise Unsupported(f"cache_implementation={kind!r} is not supported by a model with Keyhole; leave it out")
    if kwargs.get("output_attentions", getattr(generation, "output_attentions", False)):
        raise Unsupported("output_attentions is not supported: attention weights are never all there")
    if all(kwargs.get(name) is None for name in ("cache", "past_key_values")) and use_cache is not False:
        if kind is not None:  # beside a cache transformers takes no name of one
            generation = copy.copy(generation)
            generation.cache_implementation = None
            if len(args) > 1:
                args = (args[0], generation, *args[2:])
            else:
                kwargs["generation_config"] = generation
            kwargs.pop("cache_implementation", None)
        kwargs[self._keyhole.cache_name] = KeyholeCache(self, _room(self, generation, args, kwargs))
    return type(self).generate(self, *args, **kwargs)


def _room(model: Any, generation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Optional[int]:
    """Tokens that the cache of one generate() holds at most. None, for those of enable(): they were given there, the caller gets the
    cache and may go on with it, or the length is not known."""
    configs = [kwargs, vars(generation), vars(model.generation_config)]

    def known(*names: str) -> list[Any]:
        return [config[name] for config in configs for name in names if config.get(name) is not None]

    inputs = [kwargs[name] for name in ("inputs", "input_ids", "inputs_embeds") if kwargs.get(name) is not None] + list(args[:1])
    new = known("max_new_tokens", "max_length")  # a max_length counts the prompt, or not, by where it stands: this is enough
    if not model._keyhole.rooms_by_call or any(known("return_dict_in_generate")) or not inputs or inputs[0] is None or not new:
        return None
    needed = max(one.shape[1] for one in inputs) + max(new) + DRAFTS
    return min(max(needed, ROOM), model._keyhole.config.max_tokens)


def _given(enabled: Enabled, kwargs: dict[str, Any]) -> Any:
    """The cache that a forward pass is given, by its old name or its new one; afterwards by that of this version alone."""
    cache = kwargs.pop("past_key_values", None)
    if cache is not None:
        kwargs[enabled.cache_name] = cache
    return kwargs.get(enabled.cache_name)


def _before_forward(enabled: Enabled, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs.get("output_attentions"):
        raise Unsupported("output_attentions is not supported: attention weights are never all there")
    cache = _given(enabled, kwargs)
    use_cache = kwargs.get("use_cache")
    use_cache = decoder.config.use_cache if use_cache is None else use_cache
    if cache is None and not use_cache:
        return None
    if torch.is_grad_enabled() and decoder.training:
        if isinstance(cache, KeyholeCache):
            raise Unsupported("a KeyholeCache has no gradients: call model.eval(), or run under torch.no_grad()")
        kwargs["use_cache"] = False
        return args, kwargs
    if cache is None or (type(cache) is DynamicCache and cache.get_seq_length() == 0):
        cache = KeyholeCache.__new__(KeyholeCache)
        cache._begin(enabled)
    elif not isinstance(cache, KeyholeCache):
        raise Unsupported(f"the cache is a {type(cache).__name__}; a model with Keyhole takes a KeyholeCache, or none")
    elif cache.enabled is not enabled:
        raise InvalidArgument("the cache was made for another model, or before enable() was called again")
    kwargs[enabled.cache_name] = cache
    if enabled.graphs is not None and enabled.graphs.begun is cache:
        return args, kwargs
    ids = kwargs.get("input_ids", args[0] if args else None)
    cache.begin_forward(ids, kwargs.get("inputs_embeds"), kwargs.get("attention_mask"), kwargs.get("position_ids"))
    return args, kwargs


def _after_forward(decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    if isinstance(cache, KeyholeCache) and (cache.enabled.graphs is None or cache.enabled.graphs.begun is not cache):
        cache.end_forward(failed=output is None)


def _mask(*args: Any, **kwargs: Any) -> Any:
    """The mask of a forward pass: none with a KeyholeCache, which knows the padding; else PyTorch's."""
    if isinstance(kwargs.get("kv_length"), _Length):
        function = kwargs.get("mask_function", causal_mask_function)
        plain = function is causal_mask_function or function.__qualname__.startswith("and_masks.")
        if kwargs.get("use_vmap") or not plain:
            raise Unsupported("custom masks (images, prefixes, packed sequences) are not supported with a KeyholeCache")
        return None
    kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(*args, **kwargs)


@torch.compiler.disable  # steps of sessions are no operations that a compiler could see through, nor is the stream they follow
def _attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: Optional[float] = None,
               softcap: Optional[float] = None, s_aux: Any = None, **kwargs: Any) -> tuple[Any, None]:  # fmt: skip
    """query [B, Hq, n, d], key and value [B, Hkv, n, d] of the new tokens alone: [B, n, Hq, d]."""
    enabled = getattr(module, "_keyhole", None)
    if enabled is None:
        raise Unsupported("attn_implementation='keyhole' alone does nothing: call keyhole.transformers.enable(model)")
    number = enabled.numbers[module.layer_idx]
    one = enabled.attentions[number]
    scale = one.scale if scaling is None else scaling
    cache = getattr(key, "_keyhole", None)
    if cache is None:
        return masked_attention(query, key, value, attention_mask, scale, softcap or 0.0, s_aux), None
    if attention_mask is not None:
        raise Unsupported("custom attention masks are not supported with a KeyholeCache")
    _check_call(one, scale, softcap, s_aux, kwargs)
    queries = query.shape[2]
    if queries < key.shape[2]:  # layers that share K and V may answer the newest tokens alone
        query = torch.nn.functional.pad(query, (0, 0, key.shape[2] - queries, 0))
    if torch.is_grad_enabled():
        query, key, value = query.detach(), key.detach(), value.detach()
    forward = cache._forward
    if forward.empty and (forward.n >= CHUNK or enabled.samples):
        out = _prompt(enabled, forward, number, query, key, value, scale, softcap or 0.0, s_aux)
    else:
        out = _step(forward, number, query, key, value)
    return out[:, out.shape[1] - queries :], None


def _check_call(one: Attention, scale: float, softcap: Optional[float], sinks: Any, kwargs: dict[str, Any]) -> None:
    """What a module asks of its attention is what it had said when the engine was made."""
    where = f"layer {one.module.layer_idx}, {type(one.module).__name__}"
    if abs(scale - one.scale) > 1e-6 * abs(one.scale):
        raise Unsupported(f"{where}: attention with scaling {scale}; its attribute says {one.scale}")
    if (softcap or 0.0) != one.softcap:
        raise Unsupported(f"{where}: attention with softcap {softcap}; attn_logit_softcapping says {one.softcap}")
    if sinks is not None and getattr(one.module, "sinks", None) is None:
        raise Unsupported(f"{where}: attention with s_aux, and no attribute sinks")
    if "sliding_window" in kwargs and (kwargs["sliding_window"] or 0) != one.window:
        raise Unsupported(f"{where}: attention with sliding_window {kwargs['sliding_window']}; its attributes say {one.window}")
    if kwargs.get("is_causal") is False:
        raise Unsupported(f"{where}: attention with is_causal False; only causal attention is supported")
    for name in ("position_bias", "alibi", "head_mask", "indices", "block_indices"):
        if kwargs.get(name) is not None:
            raise Unsupported(f"{where}: attention with {name} is not supported")


def _step(forward: Any, layer: int, query: Any, key: Any, value: Any) -> Any:
    """New tokens of all sequences behind those that the sessions have."""
    q, k, v = forward.packed(query), forward.packed(key), forward.packed(value)
    out = torch.empty_like(q) if q.is_contiguous() else q.new_empty(q.shape)
    if len(forward.sessions) == 1:
        session = forward.sessions[0]
        session._follow(q)
        if len(q) == 1:
            session._native.attend(layer, q[0], k[0], v[0], out[0], None)
        elif len(q):
            session._native.extend(layer, q, k, v, None, out, None)
    else:
        for session in forward.sessions:
            session._follow(q)
        answers = _extend_batch([session._native for session in forward.sessions], layer, q, k, v, forward.query_start, out, None)
        if any(answer is not None for answer in answers):
            raise BatchError(answers)
    return forward.unpacked(out)


def _prompt(enabled: Enabled, forward: Any, layer: int, query: Any, key: Any, value: Any, scale: float, softcap: float,
            sinks: Any) -> Any:  # fmt: skip
    """The first tokens of all sequences: exact attention by PyTorch, while the sessions take K and V."""
    window = enabled.attentions[layer].window
    out = query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
    for session, row in zip(forward.sessions, forward.first):
        q, k, v = query[row], key[row], value[row]
        if forward.real is not None:
            columns = forward.real[row].nonzero()[:, 0].to(q.device)
            q, k, v = (states.index_select(1, columns) for states in (q, k, v))
        if q.shape[1] == 0:
            continue
        session._follow(q)
        rows = rows_of(k, v, q) if enabled.samples else [*rows_of(k, v), None]
        session._native.append(layer, *rows)
        answers = prompt_attention(q, k, v, scale, window, softcap, sinks)
        if forward.real is None:
            out[row] = answers
        else:
            out[row].index_copy_(0, columns, answers)
    if forward.shared:
        first = torch.tensor([forward.first[place] for place in forward.place], device=out.device)
        out = out.index_select(0, first)
    return out
