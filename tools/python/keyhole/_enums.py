"""Choices of the library. Wherever one is wanted its name will do, too: mode="exact"."""

from enum import IntEnum
from typing import Any

#: Names all layers, or all KV heads, of a call.
ALL = 2**32 - 1


class Dtype(IntEnum):
    F32 = 0
    F16 = 1
    BF16 = 2


class Device(IntEnum):
    #: A CUDA device of compute capability 8.0 or higher where this build and machine have one and it takes the model's
    #: shape, else the host. The log says which.
    AUTO = 0
    #: Resident tokens lie in host memory; the worker pool computes them.
    HOST = 1
    #: Unsupported is raised where there is none, or none for the model's shape.
    CUDA = 2


class Signal(IntEnum):
    AUTO = 0
    WAIT = 1
    LAUNCH = 2


class Placement(IntEnum):
    AUTO = 0
    HOST = 1
    DEVICE = 2


class RopeScaling(IntEnum):
    NONE = 0
    LINEAR = 1
    LLAMA3 = 2
    YARN = 3


class AttendMode(IntEnum):
    """Which of the keys that an index search scored are attended."""

    #: The top_k best of each search, by all heads of the group.
    TOPK = 0
    #: Every key that the search scored.
    SCORED = 1
    #: Every scored key whose softmax weight among the scored keys is above min_weight for a head of the group.
    WEIGHT = 2
    #: None: the partitions of the tail alone decide what is read. Needs a tail or a target.
    NONE = 3


class Tail(IntEnum):
    """What stands in for the indexed keys that a step has not attended."""

    #: Nothing: keys that are not read have no weight.
    NONE = 0
    #: One mean value for all of them (SparQ's correction).
    MEAN = 1
    #: Per partition n * exp(scale * q . mean key) and the mean value (RetroInfer).
    CENTROID = 2
    #: The same with the second-order term of the keys' variance, capped.
    SECOND = 3
    #: Every key and value by its own code of a few bits, of an index of type codes.
    CODES = 4


class Mode(IntEnum):
    #: Resident and pending tokens exactly, indexed tokens through the index.
    INDEXED = 0
    #: Everything exactly: the truth for tests, audits and dense layers.
    EXACT = 1
    #: Sink and window only (StreamingLLM); offloaded tokens are kept and not read.
    RESIDENT = 2


class AuditAction(IntEnum):
    #: Counts it.
    REPORT = 0
    #: Counts it and doubles what the head reads, up to 16 times its budget.
    WIDEN = 1
    #: Counts it and attends everything exactly from then on (this head).
    EXACT = 2


class AppendMode(IntEnum):
    """Which thread brings tokens that leave the window into an index. Same results either way, bit for bit."""

    BACKGROUND = 0
    IN_STEP = 1


class KvHost(IntEnum):
    """How K and V of offloaded tokens lie in host memory: as they come, or in int8 (half the memory of 16 bits)."""

    SAME = 0
    INT8 = 1


class RowsBy(IntEnum):
    """Who reads the offloaded tokens that a step over codes on a CUDA device attends exactly."""

    AUTO = 0
    DEVICE = 1
    HOST = 2


# Fields that are choices, by their names in the C structs.
CHOICES: dict[str, type[IntEnum]] = {
    "kv_dtype": Dtype, "device": Device, "signal": Signal, "offload_placement": Placement, "rope_scaling": RopeScaling,
    "attend": AttendMode, "tail": Tail, "mode": Mode, "audit_action": AuditAction, "append_mode": AppendMode,
    "kv_host": KvHost, "exact_rows_by": RowsBy,
}  # fmt: skip


def number(field: str, value: Any) -> Any:
    """The number of a choice given as a member, its name or its number; anything else as it is."""
    kind = CHOICES.get(field)
    if kind is None:
        return value
    if isinstance(value, str):
        try:
            return int(kind[value.upper()])
        except KeyError:
            names = ", ".join(repr(member.name.lower()) for member in kind)
            raise ValueError(f"{field} is {value!r}; allowed: {names}") from None
    return int(value)


def member(field: str, value: Any) -> Any:
    """The member of a choice for its number; anything else as it is."""
    kind = CHOICES.get(field)
    return value if kind is None or isinstance(value, str) else kind(value)
