"""The structs of the C header as dataclasses. A field that is None is the library's default."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional, TypeVar, Union

from . import _enums
from ._enums import (AppendMode, AttendMode, AuditAction, Device, Dtype, KvHost, Mode, Placement, RopeScaling, RowsBy,
                     Signal, Tail)

Struct = TypeVar("Struct")

#: Tokens that codes read exactly where a budget does not say how many, and the most that they can, as in the library.
_CODE_ROWS, _MOST_CODE_ROWS = 16, 1024


def fields_of(value: Any) -> dict[str, Any]:
    """What the C struct is filled with: fields that are not None, choices as numbers."""
    if not isinstance(value, Mapping):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    filled = {}
    for name, entry in value.items():
        if entry is None:
            continue
        if isinstance(entry, Budget) or (name == "budget" and isinstance(entry, Mapping)):
            entry = fields_of(entry)
        filled[name] = _enums.number(name, entry)
    return filled


def struct_of(kind: type[Struct], values: Mapping[str, Any]) -> Struct:
    """The dataclass of a C struct that came back."""
    filled = {}
    for name, entry in values.items():
        if name == "budget":
            entry = struct_of(Budget, entry)
        filled[name] = entry if kind in _RESULTS else _enums.member(name, entry)
    return kind(**filled)


def completed(budget: dict[str, Any], index: str) -> dict[str, Any]:
    """A budget, as fields_of() has it, with what codes are given where the caller has not said it; index: a spec.

    The library does so with the index "auto", and where nothing of a budget is set. Else one with top_k alone would have no
    tail, and tokens that are not read exactly would weigh nothing.
    """
    attend = budget.get("attend", AttendMode.TOPK)
    # For more rows than codes read exactly "auto" is another index, by the library.
    takes = str(index).partition(":")[0] == "codes" or (index == "auto" and budget.get("top_k", 0) in range(_MOST_CODE_ROWS + 1))
    free = "tail" not in budget and not budget.get("error_target") and not budget.get("mass_target")
    if takes and free and attend in (AttendMode.TOPK, AttendMode.NONE):
        budget = {**budget, "tail": int(Tail.CODES)}
    return {"top_k": _CODE_ROWS, **budget} if budget.get("tail") == Tail.CODES else budget


@dataclass
class LayerConfig:
    """What one layer has of its own. None: as EngineConfig says for all layers.

    window: 0: the layer attends to all tokens; W > 0: to its newest W, the new one included.
    window_slack: tokens behind a window that are kept so that truncate() can take as many back; default 16.
    head_dim, kv_heads, q_heads: of layers of different shapes; those run on the host.
    """

    window: Optional[int] = None
    window_slack: Optional[int] = None
    scale: Optional[float] = None
    softcap: Optional[float] = None
    rope_theta: Optional[float] = None
    rope_scaling: Union[RopeScaling, str, None] = None
    rope_factor: Optional[float] = None
    rope_low_freq_factor: Optional[float] = None
    rope_high_freq_factor: Optional[float] = None
    rope_original_context: Optional[int] = None
    rope_dim: Optional[int] = None
    rope_beta_fast: Optional[float] = None
    rope_beta_slow: Optional[float] = None
    rope_whole_pairs: Optional[int] = None
    head_dim: Optional[int] = None
    kv_heads: Optional[int] = None
    q_heads: Optional[int] = None
    rope_interleaved: Optional[int] = None


@dataclass
class EngineConfig:
    """The model's shape, the device, threads and kernels. layers, q_heads, kv_heads and head_dim are required.

    layers: 1..1024. q_heads: Hq, 1..4096. kv_heads: Hkv, divides Hq; a CUDA device takes up to 16 query heads for each.
    head_dim: d, a multiple of 16 from 64 to 576; a CUDA device takes 64, 80, 96, 128, 256 and 512.
    kv_dtype: how K and V are stored; default "f16". Set it to the dtype of the model's K and V.
    scale: of the logits; default 1 / sqrt(d). softcap: c > 0: logit = c * tanh(scale * q.k / c).
    rope_theta: RoPE's base; 0: none. rope_scaling: "none", "linear", "llama3", "yarn" with the fields of config.json.
    rope_dim: partial RoPE: so many first components are turned. rope_interleaved: 1: components 2i and 2i + 1 are turned
        into each other, as in GGUF's llama; 0: i and i + rope_dim / 2, as in models of Hugging Face.
    device: "auto", "host", "cuda". device_ordinal: which CUDA device. signal, timeout_ms: of a CUDA device.
    threads: worker threads including the caller; default one per core of the process, with a CUDA device two fewer.
    pin_threads: 1: pin workers to cores. spin_us: microseconds that an idle worker spins before it sleeps; default 50.
    cpu_level: "scalar", "avx2", "avx512", "avx512vnni".
    classifiers: path of a file that `keyhole train-saap` wrote for this model.
    sink_logits: learned sinks: float32 [layers, Hq], or each layer's [Hq] behind the other.
    layer_configs: a LayerConfig for each layer of a model whose layers differ.
    value_dim: components of values and outputs where they are fewer than those of keys.
    values_in_keys: 1: a token's value is the first value_dim components of its key; v is None then in every call.
    device_capability: of plans alone: ten times the compute capability of a CUDA device that is not here (89: 8.9).
    """

    layers: Optional[int] = None
    q_heads: Optional[int] = None
    kv_heads: Optional[int] = None
    head_dim: Optional[int] = None
    kv_dtype: Union[Dtype, str, None] = None
    scale: Optional[float] = None
    softcap: Optional[float] = None
    rope_theta: Optional[float] = None
    rope_scaling: Union[RopeScaling, str, None] = None
    rope_factor: Optional[float] = None
    rope_low_freq_factor: Optional[float] = None
    rope_high_freq_factor: Optional[float] = None
    rope_original_context: Optional[int] = None
    device: Union[Device, str, None] = None
    threads: Optional[int] = None
    pin_threads: Optional[int] = None
    spin_us: Optional[int] = None
    cpu_level: Optional[str] = None
    classifiers: Optional[str] = None
    device_ordinal: Optional[int] = None
    signal: Union[Signal, str, None] = None
    timeout_ms: Optional[int] = None
    rope_dim: Optional[int] = None
    rope_beta_fast: Optional[float] = None
    rope_beta_slow: Optional[float] = None
    rope_whole_pairs: Optional[int] = None
    value_dim: Optional[int] = None
    values_in_keys: Optional[int] = None
    rope_interleaved: Optional[int] = None
    device_capability: Optional[int] = None
    sink_logits: Any = None
    layer_configs: Optional[Sequence[LayerConfig]] = None

    def parts(self) -> tuple[dict[str, Any], Optional[list[dict[str, Any]]], Any]:
        """Fields, layers and sinks as the extension takes them."""
        values = fields_of(self)
        layers = values.pop("layer_configs", None)
        sinks = values.pop("sink_logits", None)
        return values, None if layers is None else [fields_of(layer) for layer in layers], sinks


@dataclass
class Budget:
    """How much of a KV head's indexed keys a step reads, and what stands in for the rest.

    top_k: keys that one search finds: an index is searched by each query head, codes once by the KV head; default 100 (16
    with codes).
    attend: "topk", "scored", "weight" or "none". min_weight: of "weight"; default 1e-4.
    tail: "none", "mean", "centroid", "second" or "codes". Default: "codes" with an index of type codes (as "auto" is) where
        attend is "topk" or "none" and there is no target, else "none". With "none" keys that are not read weigh nothing.
    error_target, mass_target: in (0, 1), 0: none: the step reads more until its estimate of the output error is at most
        the one, of the share of the attention mass read at least the other.
    min_keys, max_keys: bounds of the distinct indexed keys that a step with a tail or a target attends.
    """

    top_k: Optional[int] = None
    attend: Union[AttendMode, str, None] = None
    min_weight: Optional[float] = None
    tail: Union[Tail, str, None] = None
    error_target: Optional[float] = None
    mass_target: Optional[float] = None
    min_keys: Optional[int] = None
    max_keys: Optional[int] = None


@dataclass
class SessionConfig:
    """One sequence.

    max_tokens: the longest context; default 131072. Only address space is reserved; memory is taken as tokens arrive.
    sink: S, the first tokens, always attended exactly; default 128. window: W, the newest; default 512.
    flush_block: the window overflows in blocks of so many tokens.
    mode: "indexed", "exact" or "resident".
    index: spec of every head's index, e.g. "ivf:C=1024,probe=32"; default "auto". help: keyhole.index_help().
    budget: a Budget for every head that `budgets` does not name. budgets: path of a file of `keyhole calibrate`.
    tail_partition: keys per partition of the tail.
    offload_placement: where the codes of offloaded tokens lie, "auto", "host" or "device".
    dense_layers: layers with exact attention.
    append_block: pending tokens are added to the index in blocks of this many. append_mode: "background", "in_step".
    training_queries: queries of append() kept per KV head to guide index types that use them; default 4096.
    host_memory_limit, device_memory_limit, pinned_memory_limit: bytes; 0: no limit.
    audit_share: share of (step, layer, KV head) that is audited, 0..1. audit_action: "report", "widen", "exact".
    audit_bound: output error that audit_action compares with.
    kv_host: "same" or "int8". exact_rows_by: "auto", "device", "host".
    """

    max_tokens: Optional[int] = None
    sink: Optional[int] = None
    window: Optional[int] = None
    flush_block: Optional[int] = None
    mode: Union[Mode, str, None] = None
    index: Optional[str] = None
    budget: Union[Budget, Mapping[str, Any], None] = None
    tail_partition: Optional[int] = None
    offload_placement: Union[Placement, str, None] = None
    budgets: Optional[str] = None
    append_block: Optional[int] = None
    append_mode: Union[AppendMode, str, None] = None
    training_queries: Optional[int] = None
    host_memory_limit: Optional[int] = None
    device_memory_limit: Optional[int] = None
    audit_share: Optional[float] = None
    audit_action: Union[AuditAction, str, None] = None
    audit_bound: Optional[float] = None
    kv_host: Union[KvHost, str, None] = None
    pinned_memory_limit: Optional[int] = None
    exact_rows_by: Union[RowsBy, str, None] = None
    dense_layers: Optional[Sequence[int]] = None

    def parts(self) -> tuple[dict[str, Any], list[int]]:
        """Fields and dense layers as the extension takes them."""
        values = fields_of(self)
        if values.get("budget"):  # else the library's
            values["budget"] = completed(values["budget"], values.get("index", "auto"))
        return values, list(values.pop("dense_layers", ()))


@dataclass(frozen=True)
class Statistics:
    """Of one session, over all layers. Sums run since it was made or reset_statistics()."""

    attends: int  # steps of a layer that are done
    keys_scored: int  # (key, query head) pairs that indexes have scored
    keys_offered: int  # indexed tokens x query heads: keys_scored / keys_offered is the scan fraction
    keys_attended: int  # offloaded tokens x query heads that entered an attention state
    bytes_read: int  # host memory read by searches and offloaded attention
    attend_seconds: float  # wall time of attends
    search_seconds: float  # worker time in index searches
    offload_seconds: float  # worker time in attention over offloaded tokens
    resident_seconds: float  # worker time in resident attention (host device)
    append_seconds: float  # appends of K and V, flushes and index appends in attends
    build_seconds: float  # wall time of builds
    tokens: int  # now: of the longest layer
    host_bytes: int  # now: K, V, indexes, training queries, buffers
    index_bytes: int  # now: of host_bytes, the indexes
    device_bytes: int  # now: resident K and V, work space, codes (host memory on a host device)
    device: str
    cpu_level: str
    threads: int
    append_blocks: int  # blocks of pending tokens that steps took into the index of a layer
    append_waits: int  # of these, those that a step had to finish itself
    append_wait_seconds: float
    background_seconds: float
    tail_bytes: int  # now: of index_bytes, the partitions of the tails
    tail_seconds: float  # worker time in estimates of what was not read
    keys_opened: int  # distinct keys read to meet a target
    targets_missed: int  # (head, step) that stopped at max_keys with a target unmet
    stream_steps: int  # of attends, those enqueued on a stream
    device_wait_seconds: float  # the stream stood still for the host
    serve_seconds: float  # of stream steps: from the arrival of q to the last state handed back
    pinned_bytes: int
    device_bytes_peak: int
    host_bytes_peak: int
    signal: str
    code_bytes: int  # now: of device_bytes, codes of offloaded tokens
    code_layers: int  # now: layers that the device attends by these codes
    rows_by_host: int
    shared_bytes: int  # now: of host_bytes, what is shared with forks and counted by another
    codes_doubted: int  # (KV head, step) that read more tokens exactly, as codes could not tell which weigh
    codes_given_up: int  # of these, those that read all of them


@dataclass(frozen=True)
class Audit:
    """What audits have found. Errors and masses are per query head; every figure is 0 where nothing was audited."""

    audits: int  # (step, layer, query head) that were recomputed
    waits: int
    over_bound: int  # of audits: output error above audit_bound
    actions: int  # times that audit_action took effect on a KV head
    error_mean: float  # |o - o*| / |o*|
    error_median: float
    error_p95: float
    error_max: float
    mass_mean: float  # share of the attention mass that was read
    mass_p05: float
    recall: float  # of the true top_k offloaded keys, those attended
    missing_mean: float
    estimated_missing_mean: float
    missing_error_mean: float
    seconds: float
    error_p99: float


@dataclass(frozen=True)
class LayerTokens:
    """Tokens of a layer: all, and how many of them are sink, window, indexed, pending (these add up to total)."""

    total: int
    sink: int
    window: int
    indexed: int
    pending: int


@dataclass(frozen=True)
class MemoryPlan:
    """Memory that a session takes. Bytes."""

    kv_bytes: int  # all K and V at this context, in kv_dtype
    host_bytes: int  # offloaded K and V as kv_host has them, indexes, training queries, buffers
    index_bytes: int  # of host_bytes, the indexes
    device_bytes: int  # resident K and V and work space on the device
    pinned_bytes: int  # exchange between host and device
    fits: int  # 1 if all limits are kept
    longest_context: int  # the most tokens that fit all limits, up to 2^31
    code_bytes: int
    pinned_kv_bytes: int
    index: str  # what "auto" stands for
    code_layers: int
    first_code_layer: int
    rows_by_host: int


@dataclass(frozen=True)
class MemoryUse:
    """What the open sessions of an engine take together, each page once. Bytes."""

    sessions: int  # open sessions, copies among them
    host_bytes: int  # host memory: the sum of the four kinds that follow
    kv_bytes: int  # K and V of offloaded tokens and of sliding layers
    resident_bytes: int  # K and V of sink and window in host memory
    index_bytes: int
    work_bytes: int
    shared_page_bytes: int  # of kv_bytes, in pages that RssShmem of a process has, and RssAnon has not
    pinned_bytes: int
    device_bytes: int
    code_bytes: int  # of device_bytes


@dataclass(frozen=True)
class Identity:
    """Of which model and tokens a session is. token_hash: XXH3 of the ids as little-endian int32."""

    model: str
    token_count: int
    token_hash: int


@dataclass(frozen=True)
class SearchCost:
    """What one search or attend of an index cost."""

    keys_scored: int  # (key, query head) pairs
    bytes_read: int
    keys_attended: int  # distinct keys in the state
    keys_opened: int  # of these: read to meet a target
    tail_bytes_read: int
    tail_seconds: float
    missing: tuple[float, ...]  # [g] estimated share of the attention mass that was not read
    error: tuple[float, ...]  # [g] estimated output error


@dataclass(frozen=True)
class IndexInfo:
    keys: int
    bytes: int  # held by the index beside K and V
    build_seconds: float
    params: str  # the spec in effect
    diagnostics: str  # JSON object of numbers
    tail_bytes: int
    tail_build_seconds: float


_RESULTS = {Statistics, Audit, LayerTokens, MemoryPlan, MemoryUse, Identity, SearchCost, IndexInfo}
