"""Sessions: one sequence each."""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any, Optional, Union

from . import _enums, _native
from ._arrays import like, stream_of
from ._enums import ALL, AttendMode, Mode, Tail
from ._errors import BY_STATUS, Error, InvalidArgument
from ._progress import Progress, reporter
from ._structs import Audit, Budget, Identity, LayerTokens, SessionConfig, Statistics, completed, fields_of, struct_of


class Session:
    """One sequence: its keys and values, their indexes, and attention over them.

    Session(engine, max_tokens=131072, index="auto"), or Session(engine, config) with a SessionConfig.
    help(keyhole.SessionConfig) has all fields. A decoder calls, per sequence:

        session.append(layer, k, v, q)             for each layer and chunk of the prompt
        session.build()                            once after the prompt
        out = session.attend(layer, q, k, v)       for each layer of each decoding step
        out = session.extend(layer, q, k, v)       the same with several tokens: later turns, drafts

    Shapes: Hq = q_heads, Hkv = kv_heads, d = head_dim, n = tokens; query head h belongs to KV head h / (Hq / Hkv). K and q
    are passed after RoPE (rotate-half). Arrays are NumPy's, PyTorch's or anyone's who speaks DLPack or the buffer
    protocol, of dtype float32, float16 or bfloat16, with any strides whose last is 1; they are borrowed for the call and
    never copied as a whole. With a CUDA device they may lie in its memory: the work is then enqueued on the current
    stream of PyTorch (or CuPy), and errors of it come later, at the latest from synchronize().

    Used by one thread at a time: a call from a second one raises Busy and changes nothing. Different sessions may run at
    once; every call that works releases Python's lock. A failed call changes nothing unless it says so.
    """

    def __init__(self, engine: Any, config: Optional[SessionConfig] = None, **fields: Any) -> None:
        if config is None:
            config = SessionConfig(**fields)
        elif fields:
            config = dataclasses.replace(config, **fields)
        values, dense_layers = config.parts()
        self._set(engine, _native.session_create(engine._native, values, dense_layers))
        budget = values.get("budget", {})
        # The library takes "none" for a tail that nobody has named where "auto" is codes, or nothing else is set. What a file
        # says of heads is left alone.
        if budget.get("tail") == Tail.NONE and config.budgets is None and self.budget().tail == Tail.CODES:
            self._native.set_budget(ALL, ALL, budget)

    def _set(self, engine: Any, native: Any) -> None:
        self.engine = engine
        self._native = native
        self._stream: Optional[int] = None
        self._begun: Any = None

    @classmethod
    def _of(cls, engine: Any, native: Any) -> "Session":
        session = cls.__new__(cls)
        session._set(engine, native)
        return session

    def _follow(self, array: Any) -> None:
        """Steps are enqueued where the caller's framework enqueues its own work."""
        if self.engine._cuda and (stream := stream_of(array)) is not None and stream != self._stream:
            self._native.set_stream(stream)
            self._stream = stream

    # ---- the prompt ----

    def append(self, layer: int, k: Any, v: Any, q: Any = None) -> None:
        """Appends n tokens of the prompt to one layer.

        k, v [n, Hkv, d]; q [n, Hq, d] or None: queries of the same tokens, a sample of which guides index types that use
        them. Layers are independent: all of layer 0 may come before layer 1. May follow decoding steps. The tokens can be
        attended at once. On an error nothing is appended. Raises InvalidArgument (layer, shape, dtype; more than
        max_tokens), NotFinite (names tensor, token, head), OutOfMemory, Busy.
        """
        self._follow(k)
        self._native.append(layer, k, v, q)

    def build(self, progress: Progress = None) -> None:
        """Brings every pending token of every layer into the index. May be called at any time; best once after the prompt.

        progress: a callable (fraction, what) whose true answer cancels the call and whose exceptions are raised here; or
        True: a bar of tqdm where that is installed. Ctrl-C cancels. After Cancelled or another error heads that were
        finished keep their index, the tokens of the others stay pending: nothing is lost.
        """
        with reporter(progress) as step:
            self._native.build(step)

    # ---- steps ----

    def attend(self, layer: int, q: Any, k: Any = None, v: Any = None, out: Any = None, lse: Any = None) -> Any:
        """One decoding step of one layer: appends the token's K and V, then attends to all tokens including it.

        q [Hq, d]; k, v [Hkv, d], both None: attend without appending; out [Hq, d], any dtype, None: an array like q;
        lse None, or float32 [Hq]: log-sum-exp of the logits of all tokens attended (natural). Returns out. On an error
        nothing is appended and out is unspecified.
        """
        self._follow(q)
        if out is None:
            out = like("out", q, tuple(q.shape[:-1]) + (self._value_dim(v, q),))
        self._native.attend(layer, q, k, v, out, lse)
        return out

    def attend_begin(self, layer: int, q: Any, k: Any = None, v: Any = None) -> None:
        """The first half of attend(): appends, publishes q and starts the work; the caller may do other work until attend_end().

        Between the two only layer_tokens(), statistics(), config and budget() are allowed: every other call raises Busy. q in
        host memory is copied; in device memory it must stay as it is until the stream has done both halves. Where this raises
        there is no end to call.
        """
        self._follow(q)
        self._native.attend_begin(layer, q, k, v)
        self._begun = (q, self._value_dim(v, q))

    def attend_end(self, out: Any = None, lse: Any = None) -> Any:
        """The second half: waits and writes the result. out [Hq, d], any dtype, None: an array like q; lse as in attend().
        Returns out. InvalidArgument without attend_begin()."""
        if self._begun is None:
            raise InvalidArgument("attend_end() without attend_begin()")
        q, value_dim = self._begun
        if out is None:
            out = like("out", q, tuple(q.shape[:-1]) + (value_dim,))
        self._native.attend_end(out, lse, int(q.shape[0]))
        self._begun = None
        return out

    def extend(self, layer: int, q: Any, k: Any, v: Any, out: Any = None, lse: Any = None, mask: Any = None) -> Any:
        """Attends with n new tokens of one layer, then appends them: a turn of a chat, a chunk of a prompt, drafts.

        Each new token attends to all tokens before the call, as mode and budget say, and exactly to the new ones up to
        itself. q [n, Hq, d]; k, v [n, Hkv, d]; out [n, Hq, d] (may be q), None: an array like q; lse None, or float32
        [n, Hq]. mask: None: causal; else, for trees of drafts, n uint64 words, n <= 64: bit j of word i says that new
        token i attends to new token j. Returns out.
        """
        self._follow(q)
        if out is None:
            out = like("out", q, tuple(q.shape[:-1]) + (self._value_dim(v, q),))
        self._native.extend(layer, q, k, v, mask, out, lse)
        return out

    def attend_queries(self, layer: int, q: Any, out: Any = None, lse: Any = None) -> Any:
        """Answers n queries by all tokens that a layer holds, and appends nothing.

        q [n, Hq, d]; out [n, Hq, d] (may be q), None: an array like q; lse None, or float32 [n, Hq]; all in host memory.
        Returns out.
        """
        if out is None:
            out = like("out", q, tuple(q.shape[:-1]) + (self._value_dim(None, q),))
        self._native.attend_queries(layer, q, out, lse)
        return out

    def _value_dim(self, v: Any, q: Any) -> int:
        if v is not None:
            return int(v.shape[-1])
        return self.engine._value_dim or int(q.shape[-1])

    def accept(self, m: int, path: Optional[Sequence[int]] = None) -> None:
        """After one extend() of the same n tokens in every layer: keeps m of them, and drops the others.

        path: None: the first m; else m rising indexes below n, a path of the tree of drafts.
        """
        self._native.accept(m, path)

    def set_extend_pattern(self, pattern: Optional[str], tokens: int = 0) -> None:
        """By which pattern extend() of at least `tokens` (0: 128) new tokens in host memory attends; None: as steps do.

        "dense" is exact attention of all tokens at once; help: keyhole.prompt_help().
        """
        self._native.set_extend_pattern(pattern, tokens)

    def set_prompt_chunk(self, tokens: int) -> None:
        """extend() of at least `tokens` new tokens (0: none) is a chunk of a prompt: its queries guide the index.

        Nothing is indexed by such calls; build() or the first step ends the prompt.
        """
        self._native.set_prompt_chunk(tokens)

    def get_rows(self, layer: int, first: int, k: Any = None, v: Any = None) -> None:
        """Writes K and V of the tokens from `first` on, as they are stored, to arrays [n, Hkv, d] in host memory."""
        self._native.get_rows(layer, first, k, v)

    def extend_blocks(self) -> tuple[int, int]:
        """Blocks of tokens that such calls attended, and those that the new tokens see."""
        attended, seen = self._native.extend_blocks()
        return attended, seen

    def attend_offloaded(self, layer: int, q: Any, out: Any = None, lse: Any = None) -> Any:
        """The state of a layer's offloaded tokens alone, without sink and window: for engines with attention of their own."""
        self._follow(q)
        if out is None:
            out = like("out", q, tuple(q.shape[:-1]) + (self._value_dim(None, q),))
        self._native.attend_offloaded(layer, q, out, lse)
        return out

    def attend_tokens(self, layer: int, q: Any, ids: Sequence[Sequence[int]], *, with_resident: bool = False,
                      out: Any = None, lse: Any = None) -> Any:  # fmt: skip
        """The state of tokens that the caller has chosen: ids has the positions for each KV head, distinct, in any order."""
        self._follow(q)
        if out is None:
            out = like("out", q, tuple(q.shape[:-1]) + (self._value_dim(None, q),))
        self._native.attend_tokens(layer, q, [list(head) for head in ids], with_resident, out, lse)
        return out

    def search_tokens(self, layer: int, q: Any, top_k: int, ids: Any, counts: Any, scores: Any = None) -> None:
        """The ids that a search chooses: of every query head the offloaded tokens with the largest inner products.

        Written: ids uint32 [Hq, top_k], counts uint32 [Hq], scores None or float32 [Hq, top_k].
        """
        self._native.search_tokens(layer, q, top_k, ids, scores, counts)

    def set_stream(self, stream: int) -> None:
        """The cudaStream_t on which steps are enqueued from now on; arrays of PyTorch and CuPy set it by themselves."""
        self._native.set_stream(stream)
        self._stream = stream

    def announce(self, graph: int = 0) -> None:
        """Announces one launch of a graph that was captured on the session's stream, by its number; 0: of the last one."""
        if graph == 0:
            self._native.announce()
        else:
            self._native.announce_graph(graph)

    @property
    def graph(self) -> int:
        """The number of the graph that was captured last, or is being captured; 0: none was. The newest 16 can be announced."""
        return int(self._native.graph())

    def synchronize(self) -> None:
        """Waits until all steps that were enqueued are done, and raises the first error among them."""
        self._native.synchronize()

    # ---- settings ----

    @property
    def config(self) -> SessionConfig:
        """The values in effect: `index` is what "auto" stands for."""
        return struct_of(SessionConfig, self._native.config())

    def set_index(self, index: str) -> None:
        """Changes the index type of every head: drops the built indexes; all offloaded tokens are pending until a build."""
        self._native.set_index(index)

    def set_mode(self, mode: Union[Mode, str], top_k: int = 0) -> None:
        """Changes mode and, for every head, top_k (0: keep), for the following steps."""
        self._native.set_mode(_enums.number("mode", mode), top_k)

    def set_attend(self, attend: Union[AttendMode, str], min_weight: float = 0.0) -> None:
        """Changes, for every head, what is attended of a search, and min_weight (0: keep), for the following steps."""
        self._native.set_attend(_enums.number("attend", attend), min_weight)

    def set_budget(self, budget: Union[Budget, None] = None, *, layer: int = ALL, kv_head: int = ALL, **fields: Any) -> None:
        """The budget of one head, or of all heads of a layer or KV head or of all, from the next step on.

        Fields that are not given are the defaults of keyhole.Budget, not what the head had: of an index of type codes the tail is
        "codes" where no tail and no target is named.
        """
        if budget is None:
            budget = Budget(**fields)
        elif fields:
            budget = dataclasses.replace(budget, **fields)
        self._native.set_budget(layer, kv_head, completed(fields_of(budget), self._index_of(layer, kv_head)))

    def _index_of(self, layer: int, kv_head: int) -> str:
        """The index of these heads, as completed() wants it."""
        config = self._native.config()
        if config["budgets"] is not None:  # the file may give heads other indexes than the session's
            with contextlib.suppress(InvalidArgument):  # heads that differ
                return "codes" if self._native.get_budget(layer, kv_head)["tail"] == Tail.CODES else "other"
        return str(config["index"])

    def budget(self, *, layer: int = ALL, kv_head: int = ALL) -> Budget:
        """The budget of one head, or of all: InvalidArgument where these differ."""
        return struct_of(Budget, self._native.get_budget(layer, kv_head))

    # ---- the sequence ----

    def truncate(self, n_tokens: int) -> None:
        """Drops all tokens >= n_tokens, in every layer. The window may be shorter than W until it has filled again.

        InvalidArgument where a sliding layer would lack tokens of its window (window_slack).
        """
        self._native.truncate(n_tokens)

    def remove(self, first: int, count: int, shift: int = 0) -> None:
        """Takes tokens first..first + count - 1 out of every layer; those behind them follow the tokens before.

        shift: positions by which the keys behind are turned, by the engine's RoPE: 0: they stay as they were given; -count:
        they take the places of those that went. count 0: all from `first` on are turned. Of sessions on the host.
        """
        self._native.remove(first, count, shift)

    def fork(self) -> "Session":
        """An independent copy, which shares offloaded K and V and indexes until one of the two changes them."""
        copy = Session._of(self.engine, self._native.fork())
        return copy  # it follows the stream of its first array

    def save(self, path: str) -> None:
        """Writes the session to a file: config, K, V and indexes."""
        self._native.save(str(path))

    @classmethod
    def load(cls, engine: Any, path: str, *, model: Optional[str] = None, tokens: Any = None) -> "Session":
        """The session of a file, for an engine of the same shape. With model or tokens (int32): only one that was saved as
        that model's, with tokens that are the first of `tokens`; anything else raises InvalidArgument."""
        return cls._of(engine, _native.session_load(engine._native, str(path), model, tokens))

    def set_identity(self, model: Optional[str] = None, tokens: Any = None) -> None:
        """Which model and tokens (int32 ids of all that it holds) the session is of, for load() to insist on."""
        self._native.set_identity(model, tokens)

    @property
    def identity(self) -> Identity:
        return struct_of(Identity, self._native.identity())

    # ---- figures ----

    def layer_tokens(self, layer: int = 0) -> LayerTokens:
        """Tokens of a layer."""
        return struct_of(LayerTokens, self._native.layer_tokens(layer))

    def statistics(self) -> Statistics:
        """What steps, builds and memory amount to."""
        return struct_of(Statistics, self._native.statistics())

    def reset_statistics(self) -> None:
        """Sets the sums to 0, and the figures of audits."""
        self._native.reset_statistics()

    def audit(self, *, layer: int = ALL, kv_head: int = ALL) -> Audit:
        """What audits have found, of one head or of all. Finishes the audits under way first: call it seldom."""
        return struct_of(Audit, self._native.audit(layer, kv_head))

    # ---- its end ----

    @property
    def closed(self) -> bool:
        return bool(self._native.closed)

    def close(self) -> None:
        """Frees the session now instead of when Python does. Calls afterwards raise ValueError. Busy while another thread is
        inside it."""
        self._native.close()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self.closed:
            return "<keyhole.Session, closed>"
        try:
            return f"<keyhole.Session {self._native.statistics()['tokens']} tokens, {self.config.index}, {Mode(self._native.config()['mode']).name.lower()}>"
        except Error as error:
            return f"<keyhole.Session: {error}>"


def extend_batch(sessions: Sequence[Session], layer: int, q: Any, k: Any, v: Any, query_start: Sequence[int], out: Any = None,
                 lse: Any = None) -> Any:  # fmt: skip
    """Session.extend() of several sessions of one engine, whose work the engine's threads share.

    q, out [total, Hq, d], k, v [total, Hkv, d]: the tokens of session 0, then those of session 1, ...; query_start
    [count + 1]: where each begins; a session without tokens is left alone. Returns out.

    Where some sessions fail and others do not, the failed ones are as they were, the others have gone on, and a BatchError
    says which is which. Where all fail, or an argument that concerns all is wrong, that error is raised.
    """
    for session in sessions:
        session._follow(q)
    if out is None:
        out = like("out", q, tuple(q.shape[:-1]) + (sessions[0]._value_dim(v, q),)) if sessions else q
    answers = _native.extend_batch([session._native for session in sessions], layer, q, k, v, list(query_start), out, lse)
    if any(answer is not None for answer in answers):
        raise BatchError(answers)
    return out


def announce_batch(sessions: Sequence[Session], graph: int) -> None:
    """Session.announce() of different sessions, before one launch of a graph in which steps of all of them were captured: to all
    of them, or, where one refuses, to none. graph: its number, Session.graph behind the capture, the same of all."""
    _native.announce_batch([session._native for session in sessions], graph)


class BatchError(Error):
    """Some sessions of a batch failed. errors has an exception, or None, for each."""

    def __init__(self, answers: Sequence[Any]) -> None:
        self.errors: list[Optional[Error]] = [
            None if answer is None else BY_STATUS.get(answer[0], Error)(answer[1]) for answer in answers
        ]
        failed = [f"session {place}: {error}" for place, error in enumerate(self.errors) if error is not None]
        self.status = next(answer[0] for answer in answers if answer is not None)
        super().__init__("; ".join(failed))


__all__ = ["BatchError", "Session", "extend_batch"]
