"""Keyhole: decoding with a long context while most of the KV cache lies in host memory.

The first tokens (the attention sink) and the newest ones (the window) stay on the device; every other key and value lies in
host memory behind a vector index, and each decoding step reads only the keys that carry attention weight. The partial
attention of both is merged by log-sum-exp.

    Engine, Session, extend_batch, announce_batch
                                       the decoder's calls, as in keyhole/keyhole.h
    plan                               memory before anything is allocated
    Prompt                             attention of prompts, as in keyhole/prefill.h
    Index                              one index by itself, as in keyhole/index.h
    read_budgets                       what `keyhole calibrate` found
    compare                            index types beside each other on a recorded trace, as a table
    keyhole.transformers.enable        models of Hugging Face transformers
    keyhole.torch                      the attention as an operator of PyTorch

WORDS   sink: the first S tokens. window: the newest tokens, W of them or up to a flush block more. resident: sink or window.
        offloaded: all others. indexed / pending: offloaded tokens that are in the index / not yet in it (attended exactly).
        group: the q_heads / kv_heads query heads that share a KV head. Every token is attended exactly once: resident,
        indexed or pending.
LOGS    natural log everywhere. An empty set of tokens has lse = -inf and o = 0.
ERRORS  keyhole.Error and its classes, one per status of the library. Messages of the library go to logging's "keyhole".
"""

import logging as _logging

from . import _native
from ._budgets import Budgets, HeadBudget, read_budgets
from ._compare import compare
from ._engine import Engine, merge_states, merge_states_device, plan
from ._enums import (ALL, AppendMode, AttendMode, AuditAction, Device, Dtype, KvHost, Mode, Placement, RopeScaling, RowsBy,
                     Signal, Tail)
from ._errors import (BY_STATUS, Busy, Cancelled, Corrupt, DeviceError, Error, Internal, InvalidArgument, IOFailure, NotFinite, RankFailed,
                      OutOfDeviceMemory, OutOfMemory, Timeout, Unsupported, VersionMismatch)
from ._index import POSITION_UNKNOWN, Index
from ._prompt import Prompt
from ._session import BatchError, Session, announce_batch, extend_batch
from ._structs import (Audit, Budget, EngineConfig, Identity, IndexInfo, LayerConfig, LayerTokens, MemoryPlan, MemoryUse, SearchCost,
                       SessionConfig, Statistics)

if _native.abi_version() != _native.HEADER_ABI_VERSION:
    raise ImportError("keyhole: the extension was compiled with another header than the library inside it")

_native.set_error_classes(BY_STATUS)
_log = _logging.getLogger("keyhole")
_log.addHandler(_logging.NullHandler())
_native.set_log(lambda level, text: _log.log((_logging.DEBUG, _logging.INFO, _logging.WARNING)[level], text))

__version__: str = _native.version()
#: Whether this build has a CUDA device inside. Whether the machine has one is found when an engine is made.
CUDA: bool = _native.CUDA


def index_help() -> str:
    """Text that lists every index type with its parameters, defaults and allowed values."""
    return _native.index_help()


def prompt_help() -> str:
    """Text that lists the patterns of prompts (Session.set_extend_pattern) with their parameters."""
    return _native.prompt_help()


__all__ = [
    "ALL", "AppendMode", "AttendMode", "Audit", "AuditAction", "BatchError", "Budget", "Budgets", "Busy", "CUDA", "Cancelled",
    "Corrupt", "Device", "DeviceError", "Dtype", "Engine", "EngineConfig", "Error", "HeadBudget", "IOFailure", "Identity",
    "Index", "IndexInfo", "Internal", "InvalidArgument", "KvHost", "LayerConfig", "LayerTokens", "MemoryPlan", "MemoryUse", "Mode",
    "NotFinite", "OutOfDeviceMemory", "OutOfMemory", "POSITION_UNKNOWN", "Placement", "Prompt", "RankFailed", "RopeScaling", "RowsBy",
    "SearchCost", "Session", "SessionConfig", "Signal", "Statistics", "Tail", "Timeout", "Unsupported", "VersionMismatch", "announce_batch",
    "compare", "extend_batch", "index_help", "merge_states", "merge_states_device", "plan", "prompt_help", "read_budgets",
]  # fmt: skip
