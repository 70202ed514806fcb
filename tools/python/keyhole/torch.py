"""Keyhole's attention as an operator of PyTorch, for models and engines of your own.

    engine = keyhole.Engine(layers=32, q_heads=32, kv_heads=8, head_dim=128, kv_dtype="bf16")
    cache = keyhole.torch.Cache(engine, batch=2, index="auto", max_tokens=131072)
    out = keyhole.torch.attention(q, k, v, cache, layer)    # in the model, for each layer: of the new tokens alone

The operator is torch.ops.keyhole.attend. torch.compile(fullgraph=True) has it as one node of its graph: it knows its shapes
(fake tensors), casts under autocast as scaled_dot_product_attention does, and has no gradient: backward() through it raises.
"""

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, Optional, Union

import torch
from torch import Tensor

from ._engine import Engine
from ._enums import Mode
from ._errors import InvalidArgument
from ._progress import Progress
from ._session import BatchError, Session, extend_batch
from ._structs import SessionConfig

__all__ = ["Cache", "attend", "attention"]

# New tokens of a row from which on they are a chunk of a prompt: attended exactly, and indexed before the next step.
CHUNK = 128

_handles = itertools.count(1)
_caches: "weakref.WeakValueDictionary[int, Cache]" = weakref.WeakValueDictionary()


class Cache:
    """The sessions of a batch of sequences, as the operator takes them.

    Cache(engine, batch=2, index="ivf", max_tokens=131072), or Cache(engine, batch, config) with a SessionConfig.

    sessions: one for each row. handle: the number by which the operator knows the cache. lengths [layers, batch], int64, in host
    memory: the tokens that a layer has of each row. The operator adds the new ones to it. It is the truth: what a session has
    beyond it is forgotten before new tokens come, of all layers. So a pass through the model can be made again, from its first
    layer on, and drafts are taken back by smaller numbers. Of one thread at a time.
    """

    def __init__(self, engine: Engine, batch: int = 1, config: Optional[SessionConfig] = None, **fields: Any) -> None:
        if batch < 1:
            raise InvalidArgument(f"batch is {batch}; at least 1 is needed")
        self.engine = engine
        self.sessions: list[Session] = [engine.session(config, **fields) for _ in range(batch)]
        for session in self.sessions:
            self._prepare(session)
        layers = int(engine.config.layers or 0)
        self.handle = next(_handles)
        self.lengths = torch.zeros(layers, batch, dtype=torch.int64)
        # What the sessions have of each row, by layers; and which of them have a prompt that no index has.
        self._stored = [[0] * layers for _ in range(batch)]
        self._unbuilt = [False] * batch
        _caches[self.handle] = self

    def _prepare(self, session: Session) -> None:
        if not self.engine._cuda:
            session.set_extend_pattern("dense", CHUNK)

    def truncate(self, tokens: Union[int, Sequence[int]]) -> None:
        """Drops all tokens >= tokens, one number for all rows or one for each, of every layer. InvalidArgument where a sliding
        layer would lack tokens of its window (window_slack of its LayerConfig)."""
        wanted = [tokens] * len(self.sessions) if isinstance(tokens, int) else list(tokens)
        if len(wanted) != len(self.sessions):
            raise InvalidArgument(f"truncate() of {len(wanted)} rows; the cache has {len(self.sessions)}")
        for row, kept in enumerate(wanted):
            self._cut(row, kept)
            self.lengths[:, row].clamp_(max=kept)

    def select(self, rows: Sequence[int]) -> None:
        """Row i becomes what row rows[i] was: beams. A row that is taken twice is forked."""
        used: set[int] = set()
        sessions = []
        for row in rows:
            sessions.append(self.sessions[row].fork() if row in used else self.sessions[row])
            if row in used:
                self._prepare(sessions[-1])
            used.add(row)
        self.sessions = sessions
        self._stored = [list(self._stored[row]) for row in rows]
        self._unbuilt = [self._unbuilt[row] for row in rows]
        self.lengths = self.lengths[:, list(rows)].contiguous()

    def build(self, progress: Progress = None) -> None:
        """Brings prompts into their indexes now; otherwise the next step does."""
        for row, session in enumerate(self.sessions):
            if self._unbuilt[row]:
                self._unbuilt[row] = False
                if session.config.mode != Mode.EXACT:
                    session.build(progress)

    def close(self) -> None:
        """Frees the sessions."""
        _caches.pop(self.handle, None)
        for session in self.sessions:
            session.close()

    def __repr__(self) -> str:
        return f"<keyhole.torch.Cache {len(self.sessions)} rows, tokens {self.lengths[0].tolist()}>"

    def _cut(self, row: int, tokens: int) -> None:
        stored = self._stored[row]
        if max(stored) > tokens:
            self.sessions[row].truncate(tokens)
            self._stored[row] = [min(have, tokens) for have in stored]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, lengths: Tensor, layer: int) -> Tensor:
        starts = query_start.tolist()
        batch = len(self.sessions)
        if len(starts) != batch + 1 or starts[0] != 0 or starts[-1] != q.shape[0] or sorted(starts) != starts:
            raise InvalidArgument(f"query_start is {starts}; {batch + 1} rising numbers from 0 to {q.shape[0]} are needed")
        if not 0 <= layer < len(self._stored[0]) or tuple(lengths.shape) != (len(self._stored[0]), batch):
            raise InvalidArgument(f"layer {layer}, lengths {list(lengths.shape)}; the cache has {len(self._stored[0])} layers, {batch} rows")
        before = lengths[layer].tolist()
        new = [stop - start for start, stop in zip(starts, starts[1:])]
        for row, tokens in enumerate(before):
            if self._stored[row][layer] < tokens:
                raise InvalidArgument(f"lengths says {tokens} tokens of row {row}, layer {layer}; its session has {self._stored[row][layer]}")
            if self._stored[row][layer] > tokens:
                self._cut(row, tokens)
        if any(self._unbuilt) and max(new) < CHUNK:
            self.build()
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
        try:
            extend_batch(self.sessions, layer, _rows(q), _rows(k), _rows(v), starts, out)
        except BatchError as error:
            # The rows without an error have gone on: the next call takes that back.
            for row, failed in enumerate(error.errors):
                self._stored[row][layer] += 0 if failed else new[row]
            raise
        for row, tokens in enumerate(new):
            self._stored[row][layer] += tokens
            self._unbuilt[row] = self._unbuilt[row] or tokens >= CHUNK
        lengths[layer] += torch.tensor(new)
        return out


def _rows(states: Tensor) -> Tensor:
    states = states.detach()
    return states if states.stride(-1) == 1 and not states.is_cuda else states.contiguous()


@torch.library.custom_op("keyhole::attend", mutates_args=("lengths",))
def attend(q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, lengths: Tensor, cache: int, layer: int) -> Tensor:
    """Takes new tokens of a batch into a layer, and attends with each to all tokens of its row up to itself.

    q [total, Hq, d], k [total, Hkv, d], v [total, Hkv, dv]: the new tokens of row 0, then those of row 1, ..., after RoPE;
    query_start [batch + 1], int64, in host memory: where each row begins, and the end; a row may have none. lengths and cache: those
    of a Cache (cache is its handle). Returns [total, Hq, dv] of the dtype of q. Raises keyhole.Error as Session.extend() does.
    """
    holder = _caches.get(cache)
    if holder is None:
        raise InvalidArgument(f"there is no keyhole.torch.Cache with the handle {cache}; it was dropped or closed")
    return holder._attend(q, k, v, query_start, lengths, layer)


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, lengths: Tensor, cache: int, layer: int) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


def _cast_by(device: str) -> Any:
    def cast(q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, lengths: Tensor, cache: int, layer: int) -> Tensor:
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            states = [states.to(dtype) for states in (q, k, v)]
            return torch.ops.keyhole.attend(*states, query_start, lengths, cache, layer)

    return cast


_library = torch.library.Library("keyhole", "FRAGMENT")
_library.impl("attend", _cast_by("cpu"), "AutocastCPU")
_library.impl("attend", _cast_by("cuda"), "AutocastCUDA")


def attention(q: Tensor, k: Tensor, v: Tensor, cache: Cache, layer: int) -> Tensor:
    """attend() in the layout of scaled_dot_product_attention, where all rows have as many new tokens.

    q [B, Hq, n, d], k [B, Hkv, n, d], v [B, Hkv, n, dv] of the new tokens alone, after RoPE. Returns [B, Hq, n, dv].
    """
    batch, _, n, _ = q.shape
    rows = [states.transpose(1, 2).flatten(0, 1) for states in (q, k, v)]
    query_start = torch.arange(batch + 1) * n
    out = torch.ops.keyhole.attend(*rows, query_start, cache.lengths, cache.handle, layer)
    return out.unflatten(0, (batch, n)).transpose(1, 2)
