"""A model's attention as an engine's config."""

from typing import Any, Optional

import torch

from .._errors import Unsupported
from .._structs import EngineConfig, LayerConfig

# Families whose attention is known, and tested: causal softmax attention over K and V of tokens, with RoPE in rotate-half
# layout, sliding windows, soft-caps and learned sinks.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt_oss")

_DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def text_config(model: Any) -> Any:
    """The config of the model's decoder. Raises Unsupported, by name, for what Keyhole cannot stand under."""
    config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        raise Unsupported(f"{type(model).__name__} is an encoder-decoder model; only decoders are supported")
    if config.model_type not in FAMILIES:
        raise Unsupported(f"models of type {config.model_type!r} are not supported; supported: {', '.join(FAMILIES)}")
    if config is not model.config and getattr(model.config, "vision_config", None) is not None:
        raise Unsupported(f"{type(model).__name__} also reads images, which attend in both directions; load its text model alone")
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        raise Unsupported(f"a model on several devices is not supported; this one lies on {', '.join(sorted(map(str, devices)))}")
    if model.dtype not in _DTYPES:
        raise Unsupported(f"a model in {model.dtype} is not supported; supported: float32, float16, bfloat16")
    return config


def attentions(model: Any) -> list[Any]:
    """The attention module of each layer of the decoder."""
    modules = [getattr(layer, "self_attn", None) for layer in model.get_decoder().layers]
    if None in modules or [module.layer_idx for module in modules] != list(range(len(modules))):
        raise Unsupported(f"{type(model).__name__} has layers without attention of their own")
    return modules


def window_of(module: Any) -> int:
    """Newest tokens that a layer attends to; 0: all."""
    if hasattr(module, "sliding_window"):
        return int(module.sliding_window or 0)
    return int(getattr(module.config, "sliding_window", None) or 0)


def _rope(config: Any, layer_type: Optional[str], head_dim: int) -> dict[str, Any]:
    """RoPE as an index can undo it; nothing where it is of a kind that the library does not know."""
    rope = getattr(config, "rope_parameters", None) or {}
    if layer_type in rope:
        rope = rope[layer_type]
    kind, theta = rope.get("rope_type", "default"), rope.get("rope_theta")
    if theta is None or kind not in ("default", "linear", "llama3", "yarn"):
        return {}
    fields: dict[str, Any] = {"rope_theta": float(theta)}
    share = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    if share != 1.0:
        fields["rope_dim"] = int(head_dim * share)
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


def engine_config(model: Any, window_slack: int) -> EngineConfig:
    """The engine for a model; layers that differ have configs of their own."""
    config = text_config(model)
    modules = attentions(model)
    q_heads = config.num_attention_heads
    types = getattr(config, "layer_types", None) or [None] * len(modules)
    layers = []
    for module, layer_type in zip(modules, types):
        if layer_type not in (None, "full_attention", "sliding_attention"):
            raise Unsupported(f"layer {module.layer_idx} is of type {layer_type!r}; supported: full_attention, sliding_attention")
        if not getattr(module, "is_causal", True):
            raise Unsupported(f"layer {module.layer_idx} attends in both directions; only causal attention is supported")
        window = window_of(module)
        layers.append(
            LayerConfig(window=window, window_slack=window_slack if window else None, scale=float(module.scaling),
                        softcap=float(getattr(module, "attn_logit_softcapping", None) or 0.0), head_dim=int(module.head_dim),
                        kv_heads=q_heads // module.num_key_value_groups, **_rope(config, layer_type, int(module.head_dim)))
        )  # fmt: skip
    sinks = None
    if any(getattr(module, "sinks", None) is not None for module in modules):
        sinks = torch.cat([module.sinks.detach().float().cpu() for module in modules]).contiguous().numpy()
    return EngineConfig(
        layers=len(modules), q_heads=q_heads, kv_heads=max(layer.kv_heads for layer in layers),
        head_dim=max(layer.head_dim for layer in layers), kv_dtype=_DTYPES[model.dtype], layer_configs=layers, sink_logits=sinks,
    )  # fmt: skip
