"""Attention of prompts, exact or over the blocks that matter, as in keyhole/prefill.h."""

from typing import Any, Optional

from . import _native
from ._arrays import like, stream_of
from ._enums import ALL


class Prompt:
    """Causal attention of prompts for a decoder that computes them with K and V of a layer in the memory of the engine's device.

    Prompt(engine, "sampled:mass=900"); None or "auto": exact up to 16,384 tokens, 95 % of the weight beyond; "dense": exact;
    "budgets:PATH": as a file of `keyhole calibrate --prefill` says of each (layer, query head). keyhole.prompt_help() lists the
    patterns. Nothing is stored: Session.append() takes K and V for the decoding. Sliding layers are always exact.

    Used by one thread at a time: a call from a second one raises Busy. Raises InvalidArgument (the pattern), Unsupported (on a
    CUDA device: head dimensions other than 64, 80, 96, 128, 256, 512), IOFailure, Corrupt, VersionMismatch (the file).
    """

    def __init__(self, engine: Any, pattern: Optional[str] = None) -> None:
        self.engine = engine
        self._native = _native.prompt_create(engine._native, pattern)

    def set_pattern(self, pattern: str, *, layer: int = ALL, q_head: int = ALL) -> None:
        """Another pattern for a query head of a layer, or for all of a layer, of a head number or of both, from the next call on."""
        self._native.set_pattern(layer, q_head, pattern)

    def attend(self, layer: int, q: Any, k: Any, v: Any, out: Any = None, lse: Any = None) -> Any:
        """The last n of m tokens of a prompt. q [n, Hq, d]; k, v [m, Hkv, d], n <= m: all tokens so far (v None where values are
        in the keys); out [n, Hq, d], None: an array like q; lse None, or float32 [n, Hq]: log-sum-exp of the logits attended.

        On a CUDA device all of them lie in its memory, q, k and v in float16 or bfloat16, and the work is enqueued on the current
        stream of q's framework: they stay as they are until it is done. On the host it is done on return. Returns out.
        """
        if out is None:
            width = int(v.shape[-1]) if v is not None else self.engine._value_dim or int(q.shape[-1])
            out = like("out", q, tuple(q.shape[:-1]) + (width,))
        self._native.attend(layer, q, k, v, out, lse, stream_of(q) or 0)
        return out

    def blocks(self) -> tuple[int, int]:
        """Blocks of 64 tokens that calls which were not dense attended, and those that their queries see. Waits for them."""
        attended, seen = self._native.blocks()
        return attended, seen

    @property
    def closed(self) -> bool:
        return bool(self._native.closed)

    def close(self) -> None:
        """Waits for what was enqueued and frees it now instead of when Python does."""
        self._native.close()

    def __enter__(self) -> "Prompt":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


__all__ = ["Prompt"]
