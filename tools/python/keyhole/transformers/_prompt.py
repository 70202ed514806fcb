"""Exact attention of a prompt by PyTorch, in blocks of queries: windows, soft-caps and learned sinks, without a mask of n x n."""

from typing import Any, Optional

import torch

# Elements of logits that lie in memory at once.
_BLOCK = 1 << 25


def prompt_attention(q: Any, k: Any, v: Any, scale: float, window: int, softcap: float, sinks: Optional[Any]) -> Any:
    """Causal attention of q [Hq, n, d] over k, v [Hkv, n, d] of the same tokens: [n, Hq, d].

    window: each query attends to its newest `window` tokens; 0: to all. softcap 0: none. sinks: [Hq] logits or None.
    """
    q_heads, n, _ = q.shape
    group = q_heads // k.shape[0]
    if softcap == 0.0 and sinks is None and (window == 0 or n <= window):
        out = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=n > 1, scale=scale,
                                                               enable_gqa=group > 1)  # fmt: skip
        return out[0].transpose(0, 1)
    out = q.new_empty(n, q_heads, v.shape[-1])
    rows = max(16, _BLOCK // (q_heads * (min(n, 2 * window) if window else n)))
    for start in range(0, n, rows):
        stop = min(n, start + rows)
        first = max(0, start - window + 1) if window else 0
        queries = q[:, start:stop].unflatten(0, (-1, group)).flatten(1, 2)  # [Hkv, group * rows, d]
        logits = torch.matmul(queries, k[:, first:stop].transpose(1, 2)).float() * scale
        logits = logits.unflatten(1, (group, -1)).flatten(0, 1)  # [Hq, rows, keys]
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        positions = torch.arange(start, stop, device=q.device)[:, None]
        keys = torch.arange(first, stop, device=q.device)[None, :]
        hidden = keys > positions
        if window:
            hidden = hidden | (keys <= positions - window)
        logits.masked_fill_(hidden, float("-inf"))
        if sinks is not None:
            logits = torch.cat([logits, sinks.float()[:, None, None].expand(-1, stop - start, 1)], dim=-1)
        weights = torch.softmax(logits, dim=-1)
        if sinks is not None:
            weights = weights[..., :-1]
        weights = weights.to(v.dtype).unflatten(0, (-1, group)).flatten(1, 2)
        part = torch.matmul(weights, v[:, first:stop])  # [Hkv, group * rows, d]
        out[start:stop] = part.unflatten(1, (group, -1)).flatten(0, 1).transpose(0, 1)
    return out


def masked_attention(q: Any, k: Any, v: Any, mask: Optional[Any], scale: float, softcap: float, sinks: Optional[Any]) -> Any:
    """Attention of q [B, Hq, n, d] over k, v [B, Hkv, m, d] where mask [B, 1, n, m] is true: [B, n, Hq, d]. For forward passes
    without a cache: training, scoring."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    if softcap == 0.0 and sinks is None:
        causal = mask is None and q.shape[2] > 1
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
        return out.transpose(1, 2).contiguous()
    logits = torch.matmul(q, k.transpose(2, 3)) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
    logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
    if sinks is not None:
        logits = torch.cat([logits, sinks.to(logits.dtype)[None, :, None, None].expand(*logits.shape[:3], 1)], dim=-1)
    weights = torch.softmax(logits.float(), dim=-1).to(v.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    return torch.matmul(weights, v).transpose(1, 2).contiguous()
