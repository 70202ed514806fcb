"""Decoding steps of a whole model as CUDA graphs: what enable(graphs=True) does."""

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Callable, Optional

import torch

from .._errors import Error
from .._session import Session, announce_batch
from ._cache import KeyholeCache
from ._compiled import Compiled

# New tokens of a pass that may be a graph: one, or that many drafts and one; and the graphs of one cache, each for its own number
# of tokens, as many as a session knows the captures of.
TOKENS, GRAPHS = 32, 16
# Captures of one kind of pass that may fail in a row; passes in a row that may still compile something; and passes that go without
# a graph behind graphs of which none was taken, at most.
TRIES, COMPILING, REST = 3, 6, 1024
_CACHES = ("cache", "past_key_values")
_log = logging.getLogger("keyhole")


class Recorder:
    """CUDA's part of it: a stream for all that the model does, and graphs that are captured on it. PyTorch's default stream can
    not be captured, and the sessions' stream must stay the same."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._keeper: Any = None  # a pool without graphs is gone, and its handle must not be used again

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Work goes to the stream: behind what the caller has enqueued, and before what the caller enqueues later."""
        outer = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outer)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outer.wait_stream(self._stream)

    @contextmanager
    def watch(self, found: list[str]) -> Iterator[None]:
        """Adds to `found` what no capture allows: operations for which the host waits."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)
        waits = [one for one in told if "called a synchronizing" in str(one.message)]
        found += [f"{one.filename}:{one.lineno} waits for the device" for one in waits]

    def record(self, sessions: Sequence[Session], run: Callable[[], Any]) -> tuple[Any, int, Any]:
        """The graph of run(), which does not happen now; its number, the same in all sessions; and what run() returned: each replay() of the
        graph fills it."""
        for session in sessions:
            if session._stream != self._stream.cuda_stream:  # no capture allows that it changes
                session.set_stream(self._stream.cuda_stream)
            session.synchronize()
        torch.cuda.synchronize(self._device)
        if self._keeper is None:
            self._keeper, _ = self._graph(lambda: torch.zeros(1, device=self._device))
        graph, output = self._graph(run)
        return graph, sessions[0].graph, output

    def _graph(self, run: Callable[[], Any]) -> tuple[Any, Any]:
        graph = torch.cuda.CUDAGraph()
        # Threads of the sessions may take memory meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = run()
        return graph, output

    def announce(self, sessions: Sequence[Session], number: int) -> None:
        announce_batch(sessions, number)


@dataclass
class Call:
    """The arguments of a pass over new tokens behind those of a cache."""

    cache: KeyholeCache
    tensors: dict[str, torch.Tensor]  # those that a graph reads: new ones in each pass
    constants: dict[str, Any]
    mask: Optional[torch.Tensor]
    training: bool

    @property
    def n(self) -> int:
        return self.tensors["input_ids"].shape[1]

    @property
    def key(self) -> tuple[Any, ...]:
        """What a graph is for. Values that are equal and of different types are different: 1, 1.0 and True."""
        tensors = [(name, tuple(tensor.shape), tensor.dtype, tensor.device) for name, tensor in sorted(self.tensors.items())]
        constants = [(name, type(value), value) for name, value in sorted(self.constants.items(), key=lambda item: item[0])]
        return (*tensors, *constants, self.training, torch.is_inference_mode_enabled())


@dataclass
class Step:
    """A pass of one kind of one cache: seen once, then a graph."""

    sessions: list[Session]
    graph: Any = None
    number: int = 0  # of the graph, in all sessions
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    kind: Any = None  # of the output, its tensors, and the name of the cache in it
    output: dict[str, torch.Tensor] = field(default_factory=dict)
    cache_name: Optional[str] = None
    addresses: list[int] = field(default_factory=list)  # of states that other layers keep
    passes: int = 0  # that were seen
    ready: bool = False  # to be captured
    never: bool = False
    refusals: int = 0  # of its graphs in a row, by sessions that took the step itself
    rest: int = 0  # passes without a graph before the next capture


class Graphs:
    """The forward pass of an enabled model. Passes of one token, or of a few, behind a context are graphs from the second pass of
    their shape on: what is captured is the forward pass alone, with the sessions' steps in it; the cache's own accounts, and
    whatever the caller does with logits, happen each time. All else goes on as it was, with the reason in the log, once.
    """

    def __init__(self, enabled: Any, forward: Callable[..., Any], recorder: Any) -> None:
        self.enabled = enabled
        self.forward = forward
        self.recorder = recorder
        self.on = True  # False: every pass goes as it would without graphs
        self.replays = 0  # passes that were a launch of a graph
        self.captures = 0
        self.compiled: Optional[Compiled] = None  # the model's layers, for passes of one token
        self._compiling = False  # during a pass that may compile
        self._failed: dict[Any, int] = {}  # of each kind of pass, captures that failed in a row
        self._told: set[str] = set()
        # The cache whose pass has begun here, so that the hooks of the decoder leave that alone.
        self.begun: Optional[KeyholeCache] = None

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.recorder.turn():
            call = self._call(args, kwargs) if self.on else None
            return self.forward(*args, **kwargs) if call is None else self._pass(call)

    # ---- which passes ----

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Optional[Call]:
        """None: the pass is none for a graph."""
        kwargs = dict(zip(("input_ids",), args)) | kwargs
        cache = next((kwargs[name] for name in _CACHES if kwargs.get(name) is not None), None)
        ids = kwargs.get("input_ids")
        if not isinstance(cache, KeyholeCache) or cache.enabled is not self.enabled or cache.get_seq_length() == 0:
            return None
        if len(args) > 1 or not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.shape[1] > TOKENS:
            return None
        why = self._why_not(cache, kwargs)
        if why is not None:
            self._tell(why)
            return None
        mask = kwargs.pop("attention_mask", None)
        call = Call(cache, {}, {}, mask, self.enabled.decoder.training)
        for name, value in kwargs.items():
            if name in _CACHES:
                continue
            if isinstance(value, torch.Tensor):
                call.tensors[name] = value
            else:
                call.constants[name] = value
        places = None
        for name, axes in (("position_ids", 2), ("cache_position", 1)):
            if name in call.tensors or name not in self.enabled.decoder_parameters:
                continue
            call.constants.pop(name, None)
            if places is None:
                before = cache.get_seq_length()
                places = torch.arange(before, before + call.n, device=ids.device)
            call.tensors[name] = places[None] if axes == 2 else places
        return call

    def _why_not(self, cache: KeyholeCache, kwargs: dict[str, Any]) -> Optional[str]:
        if torch.is_grad_enabled():
            return "gradients are on: call the model under torch.no_grad()"
        if torch.is_autocast_enabled(self.enabled.device.type):
            return "autocast is on"
        if cache.reordered:
            return "rows of the cache were chosen anew (beams)"
        if len(cache.rows) != 1:
            return f"a batch of {len(cache.rows)} rows; graphs are for one"
        for name, value in kwargs.items():
            if isinstance(value, torch.Tensor) and name not in ("input_ids", "attention_mask", "position_ids", "cache_position"):
                return f"the argument {name} is a tensor"
            if name not in _CACHES and not isinstance(value, (torch.Tensor, bool, int, float, str, type(None))):
                return f"the argument {name} is a {type(value).__name__}"
        if kwargs.get("output_hidden_states") or kwargs.get("return_dict") is False:
            return "output_hidden_states and return_dict=False are not for graphs"
        return None

    def _tell(self, why: str, what: str = "steps are no CUDA graphs") -> None:
        if why not in self._told:
            self._told.add(why)
            _log.warning("%s: %s", what, why)

    # ---- a pass ----

    def _pass(self, call: Call) -> Any:
        try:
            return self._whole(call)
        except Exception as error:
            # Whatever compilers raise; the pass has left no trace, and goes again without one, which raises what is not a compiler's.
            if not self._compiling or isinstance(error, (Error, torch.OutOfMemoryError)):
                raise
            compiled, self._compiling, self.compiled = self.compiled, False, None
            try:
                output = self._whole(call)
            except Exception:
                self.compiled = compiled  # it was not the compiler
                raise
            self._tell(f"they cannot be compiled: {error}", "layers are as they were")
            return output
        finally:
            self._compiling = False

    def _whole(self, call: Call) -> Any:
        cache, before = call.cache, call.cache.get_seq_length()
        cache.begin_forward(call.tensors["input_ids"], None, call.mask, call.tensors.get("position_ids"), copied=False)
        self.begun = cache
        failed = True
        try:
            output = self._graphed(call, before) if cache._forward.real is None else self._run(call)
            failed = False
        finally:
            self.begun = None
            cache.end_forward(failed)
        return output

    def _run(self, call: Call) -> Any:
        """The pass without a graph. It may fail in its midst: only then, and not by a launch, can states have gone on."""
        call.cache.copy_states()
        return self._forward(call, call.tensors)

    def _forward(self, call: Call, tensors: dict[str, torch.Tensor]) -> Any:
        return self.forward(**{**tensors, **call.constants, self.enabled.cache_name: call.cache})

    def _layers(self, call: Call) -> Any:
        return self.compiled.layers() if self.compiled is not None and call.n == 1 else contextlib.nullcontext()

    def _graphed(self, call: Call, before: int) -> Any:
        cache, key = call.cache, call.key
        step = cache.steps.get(key)
        if step is None or step.sessions != cache.rows:
            if len(cache.steps) >= GRAPHS and key not in cache.steps:
                cache.steps.pop(next(iter(cache.steps)))  # the oldest
            cache.steps[key] = step = Step(list(cache.rows))
        if step.never or self._failed.get(key, 0) >= TRIES:
            return self._run(call)
        if not step.ready:
            return self._watched(call, step)
        if step.rest > 0:
            step.rest -= 1
            return self._run(call)
        if step.addresses != cache._states.addresses():
            step.graph = None
        if step.graph is None and not self._captured(call, step, before):
            return self._run(call)
        # Before the steps are announced: a session waits for those that are, and nothing may come between them and the launch; and
        # nothing may fail behind it, as states of other layers have no copy.
        self._fill(step, call)
        output: dict[str, Any] = {name: torch.empty_like(tensor) for name, tensor in step.output.items()}
        try:
            self.recorder.announce(step.sessions, step.number)
        except Error as error:
            # A session has changed, or takes no such tokens: then the step itself says so, and the graph may be good again.
            own = self._run(call)
            step.graph, step.output = None, {}
            step.refusals += 1
            if step.refusals > 1:
                step.rest = min(REST, 8**step.refusals)
                self._tell(f"a graph was captured twice, and refused: {error}")
            return own
        step.graph.replay()
        for name, tensor in step.output.items():
            output[name].copy_(tensor)
        step.refusals = 0
        self.replays += 1
        cache._set_columns(before + call.n)
        if step.cache_name is not None:
            output[step.cache_name] = cache
        return step.kind(**output)

    @staticmethod
    def _fill(step: Step, call: Call) -> None:
        if not step.inputs:
            with torch.inference_mode(False):
                step.inputs = {name: torch.empty_like(tensor) for name, tensor in call.tensors.items()}
        for name, tensor in step.inputs.items():
            tensor.copy_(call.tensors[name], non_blocking=True)

    def _watched(self, call: Call, step: Step) -> Any:
        """The first pass of its kind, which also shows whether it can be captured; and the first ones, as long as they compile."""
        found: list[str] = []
        states, compiled = call.cache._states, 0 if self.compiled is None else self.compiled.count
        call.cache.copy_states()
        self._fill(step, call)
        step.addresses = states.addresses()
        call.cache.asked = found
        self._compiling = self.compiled is not None and call.n == 1
        try:
            with self.recorder.watch(found), self._layers(call):
                output = self._forward(call, step.inputs)
            self._compiling = False
        finally:
            call.cache.asked = None
        step.passes += 1
        if self.compiled is not None and self.compiled.count != compiled and step.passes < COMPILING:
            return output  # the compiler waits for the device
        step.ready = True
        if step.addresses != states.addresses():
            found.append(f"layers that keep a state ({states!r}) do not keep it in one place")
        if not found:
            found += self._outputs(output)
        if found:
            self._tell(found[0])
            step.never = True
        return output

    @staticmethod
    def _outputs(output: Any) -> list[str]:
        """Why an output cannot be that of a graph."""
        if not isinstance(output, dict) or not hasattr(output, "logits"):
            return [f"the output is a {type(output).__name__}"]
        return [
            f"{name} of the output is a {type(value).__name__}"
            for name, value in output.items()
            if value is not None and not isinstance(value, (torch.Tensor, KeyholeCache))
        ]

    def _captured(self, call: Call, step: Step, before: int) -> bool:
        self._fill(step, call)
        step.addresses = call.cache._states.addresses()
        key = call.key

        def run() -> Any:
            with self._layers(call):
                return self._forward(call, step.inputs)

        try:
            step.graph, step.number, output = self.recorder.record(step.sessions, run)
        except (Error, RuntimeError) as error:
            # Nothing of a capture has happened.
            if not isinstance(error, torch.OutOfMemoryError):
                self._failed[key] = self._failed.get(key, 0) + 1
            self._tell(f"a capture failed: {error}")
            step.graph = None
            return False
        finally:
            call.cache._set_columns(before)
        self.captures += 1
        self._failed.pop(key, None)
        step.kind = type(output)
        step.output = {name: value for name, value in output.items() if isinstance(value, torch.Tensor)}
        step.cache_name = next((name for name, value in output.items() if isinstance(value, KeyholeCache)), None)
        return True
