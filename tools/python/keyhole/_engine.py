"""Engine, plan, merges of states."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Optional

from . import _native
from ._arrays import stream_of
from ._enums import Device
from ._structs import EngineConfig, MemoryPlan, MemoryUse, SessionConfig, struct_of


class Engine:
    """Model shape, device, threads and kernels: made once per model, shared by its sessions.

    Engine(layers=32, q_heads=32, kv_heads=8, head_dim=128, kv_dtype="bf16", rope_theta=500000.0), or
    Engine(config) with an EngineConfig. help(keyhole.EngineConfig) has all fields.

    Immutable: may be used from any number of threads. Sessions keep what they need of their engine: the order in which
    they are closed is free. Messages go to Python's logging, logger "keyhole".

    Raises InvalidArgument (names the field; also for classifiers of another model), IOFailure, Corrupt, VersionMismatch
    (the classifier file).
    """

    def __init__(self, config: Optional[EngineConfig] = None, **fields: Any) -> None:
        if config is None:
            config = EngineConfig(**fields)
        elif fields:
            config = dataclasses.replace(config, **fields)
        self._native = _native.engine_create(*config.parts())
        config = self.config
        self._cuda = config.device == Device.CUDA
        # Of values, where they are narrower than keys; else 0.
        self._value_dim = 0 if config.value_dim == config.head_dim else int(config.value_dim or 0)

    @property
    def config(self) -> EngineConfig:
        """The values in effect, without layer_configs and sink_logits."""
        return struct_of(EngineConfig, _native.engine_config(self._native))

    def session(self, config: Optional[SessionConfig] = None, **fields: Any) -> "Session":
        """A new, empty Session of this engine: Session(engine, ...)."""
        return Session(self, config, **fields)

    def load(self, path: str, *, model: Optional[str] = None, tokens: Any = None) -> "Session":
        """A session as Session.save() wrote it: Session.load(engine, ...)."""
        return Session.load(self, path, model=model, tokens=tokens)

    def memory(self) -> MemoryUse:
        """What all open sessions of the engine take together, with what copies share counted once.

        From any thread: waits for calls that other threads have inside a session, and disturbs none.
        """
        return struct_of(MemoryUse, _native.engine_memory(self._native))

    def close(self) -> None:
        """Frees the engine now instead of when Python does. Its sessions go on."""
        self._native.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._native.closed:
            return "<keyhole.Engine, closed>"
        config = self.config
        return (f"<keyhole.Engine {config.layers} layers, {config.q_heads} heads on {config.kv_heads}, d {config.head_dim}, "
                f"{'CUDA' if self._cuda else 'host'}, {config.threads} threads>")  # fmt: skip


def plan(engine: EngineConfig, session: Optional[SessionConfig] = None, *, context: int, device_limit: int = 0,
         host_limit: int = 0) -> MemoryPlan:  # fmt: skip
    """Memory that a session of this shape takes at `context` tokens. Needs no engine, GPU or memory.

    Limits in bytes, 0: none; device_limit is what is left for Keyhole after the weights. On a host device device_bytes
    count against host_limit as well. Raises InvalidArgument, also where a size passes 2^63; Unsupported: a shape that
    device "cuda" does not take; the errors of the budgets file.
    """
    values, layers, _ = engine.parts()
    sequence, dense_layers = (session or SessionConfig()).parts()
    return struct_of(MemoryPlan, _native.plan(values, layers, sequence, dense_layers, context, device_limit, host_limit))


def merge_states(o: Sequence[Any], lse: Sequence[Any], out: Any, out_lse: Any, *, base: str = "natural") -> None:
    """Merges n attention states by log-sum-exp, for decoders with attention kernels of their own.

    o: n arrays [heads, head_dim], lse: n arrays [heads] (-inf: empty), all dense float32 in host memory; out, out_lse: the
    same shapes, written; may be one of the inputs. base: of lse and out_lse, "natural" or "log2" (FlashInfer's). Sums in
    fp32, in the order given; empty sets give no NaN; n = 0 gives (0, -inf).
    """
    _native.merge_states(list(o), list(lse), out, out_lse, _base(base))


def merge_states_device(o: Sequence[Any], lse: Sequence[Any], out: Any, out_lse: Any, *, base: str = "natural",
                        stream: Optional[int] = None) -> None:  # fmt: skip
    """The same on a CUDA device, enqueued: returns at once, and can be captured in a graph.

    o: n arrays [rows, head_dim] (or [tokens, heads, head_dim]) of one dtype, lse: n float32 arrays of the rows, all contiguous in
    device memory; out (of any dtype), out_lse: the same shapes, written; may be one of the inputs (out where the dtypes are
    equal). stream: a cudaStream_t; None: the current one of out's framework. All must stay until the stream has done it. Raises
    InvalidArgument (arrays in host memory, shapes), Unsupported: a build without CUDA, a machine without a device.
    """
    if stream is None:
        stream = stream_of(out) or 0
    _native.merge_states_device(list(o), list(lse), out, out_lse, _base(base), stream)


def _base(base: str) -> int:
    bases = {"natural": 0, "log2": 1}
    if base not in bases:
        raise ValueError(f"base is {base!r}; allowed: 'natural', 'log2'")
    return bases[base]


from ._session import Session  # noqa: E402  (a session needs its engine, an engine makes sessions)
