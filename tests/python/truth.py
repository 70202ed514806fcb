"""Attention in double precision, which knows nothing of the library."""

import numpy as np


def attention(q, k, v, scale=None, softcap=0.0, window=0, sinks=None, first=None):
    """Causal attention of q [n, Hq, d], the last n of the m tokens of k, v [m, Hkv, d]: output [n, Hq, dv], lse [n, Hq].

    first: the position of q[0]; default m - n. window: the newest so many tokens alone. sinks [Hq]: learned sinks.
    """
    q, k, v = (np.asarray(array, dtype=np.float64) for array in (q, k, v))
    n, q_heads, d = q.shape
    m, kv_heads, _ = k.shape
    group = q_heads // kv_heads
    first = m - n if first is None else first
    scale = d**-0.5 if scale is None else scale
    logits = np.einsum("nhd,mhd->nhm", q, np.repeat(k, group, axis=1)) * scale
    if softcap:
        logits = softcap * np.tanh(logits / softcap)
    position = first + np.arange(n)[:, None]
    seen = np.arange(m)[None, :] <= position
    if window:
        seen &= np.arange(m)[None, :] > position - window
    logits = np.where(seen[:, None, :], logits, -np.inf)
    top = logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits - top)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(np.asarray(sinks, dtype=np.float64)[None, :, None] - top)
    out = np.einsum("nhm,mhd->nhd", weights / total, np.repeat(v, group, axis=1))
    return out, (np.log(total) + top)[..., 0]


def error(out, expected):
    """The largest |out - expected| / |expected| of a row."""
    out, expected = np.asarray(out, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    return float(np.max(np.linalg.norm(out - expected, axis=-1) / np.linalg.norm(expected, axis=-1)))
