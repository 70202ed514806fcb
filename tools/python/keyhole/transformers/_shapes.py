"""A model's attention as an engine's config: by what its modules say of themselves, not by the model's name."""

import inspect
import sys
from dataclasses import dataclass
from typing import Any, Optional

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicCache

from .._errors import Unsupported
from .._structs import EngineConfig, LayerConfig

# Types of layers, by old and new names, whose attention is causal over all tokens or over the newest. What attends otherwise, in
# chunks, by an indexer, over compressed keys, has another name.
_ATTENDING = ("full_attention", "sliding_attention", "attention", "full", "sliding", "global", "local", "global_attention", "local_attention")
_SLIDING = ("sliding_attention", "sliding", "local", "local_attention")
# Attributes that an attention module has where its logits or its keys are not what the interface is given.
_UNUSUAL = ("indexer", "relative_attention_bias", "alibi_slopes", "lambda_q1", "kv_lora_rank", "v_head_dim")

_DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


@dataclass
class Attention:
    """One module that calls transformers' attention interface, and what the engine's layer of it is."""

    module: Any
    layer_type: Optional[str]
    window: int  # newest tokens that it attends to; 0: all
    scale: float
    softcap: float
    q_heads: int
    kv_heads: int
    head_dim: int
    shared: bool  # K and V come from another layer: transformers' cache is not told of them


def _calls_interface(kind: type) -> bool:
    """Whether a method of a module's class takes its attention from transformers' table of implementations. Whole models do so to
    look what is in it."""
    if issubclass(kind, PreTrainedModel):
        return False
    for base in kind.__mro__:
        if base.__module__.startswith("torch."):
            continue
        for method in vars(base).values():
            code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
            if code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names:
                return True
    return False


def text_config(model: Any) -> Any:
    """The config of the model's decoder. Raises Unsupported, by name, for what Keyhole cannot stand under."""
    config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        raise Unsupported(f"{type(model).__name__} is an encoder-decoder model; only decoders are supported")
    if config is not model.config and getattr(model.config, "vision_config", None) is not None:
        raise Unsupported(f"{type(model).__name__} also reads images, which attend in both directions; load its text model alone")
    if not hasattr(model, "get_decoder") or not hasattr(model, "set_attn_implementation"):
        raise Unsupported(f"{type(model).__name__} has no decoder whose attention could be set (get_decoder(), set_attn_implementation())")
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        raise Unsupported(f"a model on several devices is not supported; this one lies on {', '.join(sorted(map(str, devices)))}")
    if model.dtype not in _DTYPES:
        raise Unsupported(f"a model in {model.dtype} is not supported; supported: float32, float16, bfloat16")
    return config


def attentions(model: Any) -> list[Attention]:
    """The attention of each layer that has one, in the order of layers. Raises Unsupported, by the attribute's name, for what is
    not causal attention over K and V of all tokens or of the newest."""
    config = text_config(model)
    kinds: dict[type, bool] = {}
    modules = []
    for module in model.get_decoder().modules():
        kind = type(module)
        if kind not in kinds:
            kinds[kind] = _calls_interface(kind)
        if kinds[kind]:
            modules.append(module)
    if not modules:
        raise Unsupported(f"the attention of {type(model).__name__} does not call transformers' attention interface")
    found = [_attention_of(module, config) for module in modules]
    found.sort(key=lambda one: one.module.layer_idx)
    numbers = [one.module.layer_idx for one in found]
    if len(set(numbers)) < len(numbers):
        raise Unsupported(f"{type(model).__name__} has layers with more than one attention (layer_idx: {numbers})")
    return found


def _attention_of(module: Any, config: Any) -> Attention:
    name = f"attention of {type(module).__name__}"

    def said(attribute: str, *others: str) -> Any:
        """What the module says by this name or another one, else the config of the layer."""
        for place in (module, config):
            for known in (attribute, *others):
                if (value := getattr(place, known, None)) is not None:
                    return value
        raise Unsupported(f"{name} does not say {attribute!r}")

    layer = said("layer_idx")
    name = f"layer {layer}, {type(module).__name__}"
    if hasattr(config, "per_layer_config"):  # what the layers have of their own
        config = config.per_layer_config[layer]
    types = getattr(config, "layer_types", None)
    layer_type = types[layer] if types and layer < len(types) else None
    if layer_type is not None and layer_type not in _ATTENDING:
        raise Unsupported(f"{name}: layer_type is {layer_type!r}; supported: {', '.join(_ATTENDING)}")
    if not getattr(module, "is_causal", True):
        raise Unsupported(f"{name}: is_causal is False; only causal attention is supported")
    if getattr(module, "is_cross_attention", False):
        raise Unsupported(f"{name}: is_cross_attention is True; only attention to earlier tokens is supported")
    for attribute in _UNUSUAL:
        value = getattr(module, attribute, None)
        if value is not None and not (attribute == "v_head_dim" and value == getattr(module, "head_dim", None)):
            raise Unsupported(f"{name}: {attribute} is {value if isinstance(value, (int, float)) else 'there'}; such attention is not supported")
    q_heads = int(said("num_attention_heads", "num_heads"))
    head_dim = int(said("head_dim", "head_size"))
    groups = getattr(module, "num_key_value_groups", None)
    kv_heads = int(said("num_key_value_heads")) if groups is None else q_heads // int(groups)
    rows = getattr(getattr(module, "k_proj", None), "out_features", None)
    if rows is not None and rows != kv_heads * head_dim:
        raise Unsupported(f"{name}: k_proj has {rows} rows; {kv_heads} heads of head_dim {head_dim} have {kv_heads * head_dim}")
    return Attention(
        module, layer_type, _window(module, config, layer_type), float(said("scaling")),
        float(getattr(module, "attn_logit_softcapping", None) or 0.0), q_heads, kv_heads, head_dim,
        bool(getattr(module, "is_kv_shared_layer", False)),
    )  # fmt: skip


def _window(module: Any, config: Any, layer_type: Optional[str]) -> int:
    """Newest tokens that a layer attends to; 0: all."""
    if getattr(module, "is_sliding", True) is False or (layer_type is not None and layer_type not in _SLIDING):
        return 0
    if hasattr(module, "sliding_window"):
        return int(module.sliding_window or 0)
    return int(getattr(config, "sliding_window", None) or 0)


def states_of(config: Any, found: list[Attention]) -> list[Any]:
    """The cache's layers as transformers makes them, None in the place of those whose K and V are Keyhole's. Those that stay are
    the layers that keep a state of another kind, or nothing."""
    layers = list(DynamicCache(config=config).layers)
    attending = {one.module.layer_idx: one for one in found}
    count = max(len(layers), int(getattr(config, "num_hidden_layers", 0)), max(attending) + 1)
    result: list[Any] = []
    for number in range(count):
        layer = layers[number] if number < len(layers) else None
        keeps_rows = isinstance(layer, CacheLayerMixin)
        if number in attending:
            if layer is not None and hasattr(layer, "recurrent_states") and keeps_rows:
                raise Unsupported(f"layer {number} keeps a state beside its keys and values ({type(layer).__name__})")
            result.append(layer if attending[number].shared and not keeps_rows else None)
        elif keeps_rows or layer is None:
            kind = (getattr(config, "layer_types", None) or ["of another kind"] * count)[number]
            raise Unsupported(f"layer {number} ({kind}) does not call the attention interface, and this version of transformers has no "
                              f"cache for its state")  # fmt: skip
        else:
            result.append(layer)
    return result


def _turns_halves(module: Any) -> bool:
    """Whether RoPE of this module turns component i with i + d / 2, as the library takes it: others turn neighbours."""
    rotate = getattr(sys.modules.get(type(module).__module__), "rotate_half", None)
    if rotate is None:
        return False
    turned = rotate(torch.arange(1.0, 5.0))
    return turned.tolist() == [-3.0, -4.0, 1.0, 2.0]


def _rope(one: Attention, config: Any) -> dict[str, Any]:
    """RoPE as an index can undo it; nothing where there is none, or one of a kind that the library does not know."""
    module = one.module
    uses = getattr(module, "use_rope", True)
    if not uses or not _turns_halves(module) or (getattr(module, "is_sliding", True) is False and getattr(module, "sliding_window", None)):
        return {}
    rope = getattr(config, "rope_parameters", None)
    if rope is None:  # before transformers 5
        rope = {"rope_theta": getattr(config, "rope_theta", None), **(getattr(config, "rope_scaling", None) or {})}
        local = getattr(config, "rope_local_base_freq", None)
        if local is not None and one.window:
            rope = {"rope_theta": local}
    if one.layer_type in rope:
        rope = rope[one.layer_type] or {}
    kind, theta = rope.get("rope_type") or rope.get("type") or "default", rope.get("rope_theta")
    if theta is None or kind not in ("default", "linear", "llama3", "yarn"):
        return {}
    fields: dict[str, Any] = {"rope_theta": float(theta)}
    share = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    if share != 1.0:
        fields["rope_dim"] = int(one.head_dim * share)
    if kind != "default":
        original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        fields.update(rope_scaling=kind, rope_factor=float(rope["factor"]), rope_original_context=int(original))
    if kind == "linear":
        del fields["rope_original_context"]
    if kind == "llama3":
        fields.update(rope_low_freq_factor=float(rope["low_freq_factor"]), rope_high_freq_factor=float(rope["high_freq_factor"]))
    if kind == "yarn":
        fields.update(rope_beta_fast=float(rope.get("beta_fast") or 32), rope_beta_slow=float(rope.get("beta_slow") or 1),
                      rope_whole_pairs=1 if rope.get("truncate", True) else -1)  # fmt: skip
    return fields


def engine_config(model: Any, found: list[Attention], window_slack: int) -> EngineConfig:
    """The engine for a model: a layer for each attention, with a config of its own."""
    config = text_config(model)
    q_heads = max(one.q_heads for one in found)
    layers = [
        LayerConfig(window=one.window, window_slack=window_slack if one.window else None, scale=one.scale, softcap=one.softcap,
                    head_dim=one.head_dim, kv_heads=one.kv_heads, q_heads=one.q_heads if one.q_heads != q_heads else None,
                    **_rope(one, config))
        for one in found
    ]  # fmt: skip
    sinks = None
    if any(getattr(one.module, "sinks", None) is not None for one in found):
        none = torch.tensor(float("-inf"))
        logits = [none.expand(one.q_heads) if (own := getattr(one.module, "sinks", None)) is None else own.detach().float().cpu() for one in found]
        sinks = torch.cat(logits).contiguous().numpy()
    widest = max(found, key=lambda one: one.q_heads)
    return EngineConfig(
        layers=len(found), q_heads=q_heads, kv_heads=widest.kv_heads, head_dim=max(one.head_dim for one in found),
        kv_dtype=_DTYPES[model.dtype], layer_configs=layers, sink_logits=sinks,
    )  # fmt: skip
