"""One index by itself."""

from typing import Any, Optional

import dataclasses

from . import _native
from ._progress import Progress, reporter
from ._structs import Budget, IndexInfo, SearchCost, completed, fields_of, struct_of

#: Token position of queries that is not known.
POSITION_UNKNOWN = 2**32 - 1


class Index:
    """An index over the keys of one KV head, to compare index types on recorded keys. A decoder needs Session alone.

    Index(engine, "ivf:C=64,probe=8", layer=0, kv_head=0). keyhole.index_help() lists the types. Used by one thread at a
    time; a call from a second one raises Busy.
    """

    def __init__(self, engine: Any, spec: str, *, layer: int = 0, kv_head: int = 0) -> None:
        self.engine = engine
        self._native = _native.index_create(engine._native, spec, layer, kv_head)
        self._spec = spec

    def build(self, keys: Any, values: Any = None, *, training_queries: Any = None, training_positions: Any = None,
              first_position: int = 0, progress: Progress = None) -> None:  # fmt: skip
        """Builds over keys [n, d], which are copied to kv_dtype with values [n, d] (needed by attend() alone).

        training_queries [m, d] with their token positions (uint32; None: unknown); first_position is the token position of
        keys[0]. Replaces an earlier build. progress: as in Session.build().
        """
        with reporter(progress) as step:
            self._native.build(keys, values, training_queries, training_positions, first_position, step)

    def build_tail(self, keys_per_partition: int = 0, progress: Progress = None) -> None:
        """Partitions the keys for tails and targets, keys_per_partition (4..1024; 0: 16) keys each; needs values."""
        with reporter(progress) as step:
            self._native.build_tail(keys_per_partition, step)

    def set_spec(self, spec: str) -> None:
        """Gives a built index other search parameters, without building it again."""
        self._native.set_spec(spec)
        self._spec = spec

    @staticmethod
    def _options(budget: Optional[Budget], position: int, fields: dict[str, Any]) -> dict[str, Any]:
        budget = Budget(**fields) if budget is None else dataclasses.replace(budget, **fields)
        return {"budget": fields_of(budget), "position": position}

    def search(self, queries: Any, *, ids: Any, counts: Any, scores: Any = None, budget: Optional[Budget] = None,
               position: int = POSITION_UNKNOWN, **fields: Any) -> SearchCost:  # fmt: skip
        """The keys of largest inner product for each of g queries [g, d], g 1..128.

        Written: ids uint32 [g, top_k], best first; counts uint32 [g]: how many were found; scores None or float32
        [g, top_k]: inner products. Fields of a Budget may be given by name: top_k=100.
        """
        return struct_of(SearchCost, self._native.search(queries, self._options(budget, position, fields), ids, scores, counts))

    def attend(self, queries: Any, *, o: Any, lse: Any, other_o: Any = None, other_lse: Any = None,
               budget: Optional[Budget] = None, position: int = POSITION_UNKNOWN,
               **fields: Any) -> tuple[list[int], SearchCost]:  # fmt: skip
        """Search, then partial attention of all g heads over the keys that the budget takes from it.

        Written: o float32 [g, d] (or value_dim), lse float32 [g]. other_o, other_lse: states of everything else that the
        queries attend to: targets are about them and the index's keys together. Returns the distinct keys attended, in no
        particular order, and the cost.
        """
        options = self._options(budget, position, fields)
        options["budget"] = completed(options["budget"], self._spec)
        rows, cost = self._native.attend(queries, options, other_o, other_lse, o, lse)
        return rows, struct_of(SearchCost, cost)

    @property
    def info(self) -> IndexInfo:
        """Keys, bytes, build time, the spec in effect, diagnostics."""
        return struct_of(IndexInfo, self._native.info())

    def close(self) -> None:
        """Frees the index now instead of when Python does."""
        self._native.close()

    def __enter__(self) -> "Index":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


__all__ = ["Index", "POSITION_UNKNOWN"]
