"""Budgets files: what `keyhole calibrate` found for each head of a model."""

import json
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, Optional, Union

from ._errors import Corrupt, VersionMismatch
from ._structs import Budget, struct_of

_BUDGET_FIELDS = ("top_k", "attend", "min_weight", "tail", "error_target", "mass_target", "min_keys", "max_keys")


@dataclass(frozen=True)
class HeadBudget:
    """One entry of a file: the fields that it sets, of the heads that it names. Later entries win.

    layer, kv_head, q_head: a number or "all". index, budget, dense: of KV heads. pattern: of query heads, for prompts.
    measured: figures for people.
    """

    layer: Union[int, str]
    kv_head: Union[int, str, None] = None
    q_head: Union[int, str, None] = None
    index: Optional[str] = None
    dense: bool = False
    budget: Budget = field(default_factory=Budget)
    pattern: Optional[str] = None
    measured: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Budgets:
    """A budgets file. SessionConfig(budgets=path) is what makes a session use one."""

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    heads: list[HeadBudget]
    tail_partition: Optional[int] = None
    target: Any = None
    machine: Any = None
    made_by: Any = None

    def of(self, layer: int, kv_head: int) -> HeadBudget:
        """What all entries together say of one KV head."""
        index: Optional[str] = None
        dense = False
        measured: dict[str, Any] = {}
        budget: dict[str, Any] = {}
        for entry in self.heads:
            if entry.kv_head not in (kv_head, "all") or entry.layer not in (layer, "all"):
                continue
            index = entry.index if entry.index is not None else index
            dense = dense or entry.dense
            measured = {**measured, **entry.measured}
            budget.update({name: getattr(entry.budget, name) for name in _BUDGET_FIELDS if getattr(entry.budget, name) is not None})
        return HeadBudget(layer, kv_head, None, index, dense, Budget(**budget), None, measured)


def read_budgets(path: Union[str, PathLike[str]]) -> Budgets:
    """Reads a file of `keyhole calibrate` for people to look at. The library reads and checks it itself when a session is
    made with budgets=path. Raises Corrupt for what is no such file, VersionMismatch for another format."""
    with open(path, encoding="utf-8") as file:
        try:
            content = json.load(file)
            version = content["keyhole_budgets"]
        except (ValueError, TypeError, KeyError) as error:
            raise Corrupt(f"{path}: not a budgets file: {error!r}") from None
    if version != 1:
        raise VersionMismatch(f"{path}: keyhole_budgets is {version!r}; allowed: 1")
    try:
        heads = [
            HeadBudget(
                entry["layer"], entry.get("kv_head"), entry.get("q_head"), entry.get("index"), bool(entry.get("dense", False)),
                struct_of(Budget, {name: entry.get(name) for name in _BUDGET_FIELDS if entry.get(name) is not None}),
                entry.get("pattern"), dict(entry.get("measured", {})),
            )
            for entry in content["heads"]
        ]  # fmt: skip
        shape = {name: content["model"][name] for name in ("layers", "q_heads", "kv_heads", "head_dim")}
    except (TypeError, KeyError, AttributeError) as error:
        raise Corrupt(f"{path}: not a budgets file: {error!r}") from None
    extra = {name: content.get(name) for name in ("tail_partition", "target", "machine", "made_by")}
    return Budgets(heads=heads, **shape, **extra)
