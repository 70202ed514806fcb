"""The cache of a model: a session for each sequence."""

import json
import os
import sys
from pathlib import Path
from typing import Any, Optional

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from .._errors import InvalidArgument, Unsupported
from .._session import Session
from .._structs import Audit, Statistics
from ._forward import Forward
from ._states import Piece, Record, States

# New tokens from which on a chunk is a prompt rather than steps: PyTorch or the library's dense blocks attend it exactly.
CHUNK = 128

# What layers with a state ask of a cache; where these are calls, from transformers 5.2x on.
STATE_CALLS = [name for name in ("get_conv_state", "get_recurrent_state", "update_conv_state", "update_recurrent_state", "has_previous_state",
                                 "is_recording_past") if hasattr(Cache, name)]  # fmt: skip


def rows_of(*states: Any) -> list[Any]:
    """[H, n, d] of each as [n, H, d]. In a device's memory the heads of a token lie side by side, as sessions want them there."""
    rows = [of_heads.transpose(0, 1) for of_heads in states]
    return [of_tokens.contiguous() if of_tokens.is_cuda else of_tokens for of_tokens in rows]


class _Length(int):
    """A length that tells the mask's maker that it is a KeyholeCache's: padding is known, and no mask is needed."""


class KeyholeLayer(CacheLayerMixin):
    """What transformers asks of one layer. K and V are in the sessions of the cache."""

    is_croppable = True
    supports_early_init = False

    def __init__(self, window: int) -> None:
        super().__init__()
        self.is_initialized = True
        self.is_sliding = window > 0
        self.columns = 0

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None: ...

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        raise Unsupported("a layer of a KeyholeCache is updated through its cache")

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        new = query_length if isinstance(query_length, int) else len(query_length)  # before transformers 5: positions
        return _Length(self.columns + new), 0

    def get_seq_length(self) -> int:
        return self.columns

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # before transformers 5


class KeyholeCache(Cache):
    """Keys and values of a batch of sequences, in sessions. Made by generate() of an enabled model, or by hand:

        cache = keyhole.transformers.KeyholeCache(model)
        model.generate(**first, past_key_values=cache)
        model.generate(**second, past_key_values=cache)     # a later turn

    Sequences of a batch may have any padding: masked tokens are not stored. Rows that are the same (return sequences, beams)
    share one session until they differ, and are forks of it from then on.

    Layers without keys and values (linear attention, convolutions, recurrences) keep their states in transformers' own layers,
    one row for each row of the batch. Such states cannot be cut: crop() goes back to a copy of them, which the newest
    64 tokens have, and has the model compute the tokens behind it that stay once more.

    max_tokens: the longest context of a row; default: that of enable(). On a GPU codes take memory for so many tokens.
    """

    def __init__(self, model: Any, max_tokens: Optional[int] = None) -> None:
        enabled = getattr(model, "_keyhole", None)
        if enabled is None:
            raise InvalidArgument(f"{type(model).__name__} is not enabled: call keyhole.transformers.enable(model) first")
        self._begin(enabled, max_tokens)

    @classmethod
    def from_cache(cls, model: Any, cache: Any) -> "KeyholeCache":
        """The tokens of a DynamicCache, e.g. of a prompt that another attention has computed. Padding is not known of it: all of
        its tokens are attended. Unsupported where layers with a window have dropped tokens."""
        made = cls(model)
        found = made.enabled.attentions
        if any(one.shared for one in found):
            raise Unsupported("from_cache() of a model whose layers share keys and values is not supported")
        layers = [cache.layers[one.module.layer_idx] for one in found]
        made.rows = [made._session() for _ in range(layers[0].keys.shape[0])]
        columns = layers[0].get_seq_length()
        for number, (one, layer) in enumerate(zip(found, layers)):
            if layer.keys.shape[-2] != columns:
                raise Unsupported(f"layer {one.module.layer_idx} of the cache has kept {layer.keys.shape[-2]} of {columns} tokens")
            for row, session in enumerate(made.rows):
                session._follow(layer.keys)
                session._native.append(number, *rows_of(layer.keys[row], layer.values[row]), None)
        made._states.put(States({number: cache.layers[number] for number in made._states.layers}).copy())
        made._set_columns(columns)
        made._unbuilt = True
        return made

    def _begin(self, enabled: Any, max_tokens: Optional[int] = None) -> None:
        windows = {one.module.layer_idx: one.window for one in enabled.attentions}
        own = enabled.states()
        super().__init__(layers=[KeyholeLayer(windows[number]) if layer is None else layer for number, layer in enumerate(own)])
        self.enabled = enabled
        self._attending = [layer for layer in self.layers if isinstance(layer, KeyholeLayer)]
        self._states = States({number: layer for number, layer in enumerate(own) if hasattr(layer, "recurrent_states")})
        self._record = Record(self._states)
        self._max_tokens = max_tokens
        # Of each row its session; rows that are alike have one session together.
        self.rows: list[Session] = []
        # [B, columns] of bool in host memory, false where a token was masked; None: none was.
        self._real: Optional[torch.Tensor] = None
        # [B, columns] ids of the tokens; None: not known.
        self._ids: Optional[torch.Tensor] = None
        self._forward: Optional[Forward] = None
        self._unbuilt = False
        # Passes that are graphs (_graphs.py), by their shape; whether rows were chosen anew, which ends that; and, while a first
        # pass is watched, where it is noted that somebody asks for the length, which a graph would know as it was.
        self.steps: dict[Any, Any] = {}
        self.reordered = False
        self.asked: Optional[list[str]] = None

    # ---- what transformers calls ----

    @torch.compiler.disable  # the counts of tokens would be compiled into a step
    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Hands new keys to the attention, which is not told of the cache otherwise, by a mark on them."""
        if self._forward is None:
            raise Unsupported("a KeyholeCache is filled by the forward pass of the enabled model alone")
        key_states._keyhole = self
        self.layers[layer_idx].columns += key_states.shape[-2]
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        if self.asked is not None:
            asks = sys._getframe(1)
            if not asks.f_globals.get("__name__", "").startswith(("transformers.masking_utils", "transformers.cache_utils", "keyhole.")):
                self.asked.append(f"{asks.f_code.co_filename}:{asks.f_lineno} asks for the length of the cache")
        return self._attending[0].columns

    def activate_past_recording(self) -> None: ...

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return True

    @property
    def batch_size(self) -> int:
        return len(self.rows) or -1

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the newest -tokens_to_remove tokens of every row; before transformers 5 a positive number is that of the tokens
        that stay."""
        tokens = int(tokens_to_remove)  # some versions of transformers give a tensor
        before = self.get_seq_length()
        columns = tokens if tokens > 0 else before + tokens
        if columns >= before or not self.rows:
            return
        if columns < 0:
            raise InvalidArgument(f"crop({tokens_to_remove}): the cache has {before} tokens")
        if not self._states:
            self._cut(columns)
            return
        oldest = self._record.oldest
        if oldest is None or columns < oldest:
            known = "none" if oldest is None else f"{oldest} tokens"
            raise Unsupported(f"crop() to {columns} tokens: layers with a state ({self._states!r}) can go back some 64 tokens of the "
                              f"newest passes; the oldest state that is kept: {known}")  # fmt: skip
        mask = None if self._real is None else self._real[:, :columns]
        kept, states, again = self._record.back(columns)
        if states is None:
            self.reset()
        else:
            self._cut(kept)
            self._states.put(states)
        for piece in again:
            self.enabled.forward_again(self, piece.tensors(), None if mask is None else mask[:, : piece.before + piece.n])

    def _cut(self, columns: int) -> None:
        """The first `columns` of what the sessions and masks have."""
        for session, kept in zip(self.rows, self._counts(columns)):
            session.truncate(kept)  # a second time does nothing
        if self._real is not None:
            self._real = self._real[:, :columns]
        if self._ids is not None:
            self._ids = self._ids[:, :columns]
        self._set_columns(columns)

    def reorder_cache(self, beam_idx: Any) -> None:
        """Row i becomes what row beam_idx[i] was."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Any) -> None:
        if not self.rows:
            return
        indices = torch.as_tensor(indices, device="cpu")
        if indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        self._record.clear()
        self.steps, self.reordered = {}, True
        self._states.select(indices)
        self.rows = [self.rows[index] for index in indices.tolist()]
        self._real = None if self._real is None else self._real[indices]
        self._ids = None if self._ids is None else self._ids[indices]

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(len(self.rows)).repeat_interleave(repeats))

    def reset(self) -> None:
        """Forgets all sequences."""
        self.rows, self._real, self._ids, self._unbuilt = [], None, None, False
        self.steps, self.reordered = {}, False
        self._states.reset()
        self._record.clear()
        self._set_columns(0)

    def _set_columns(self, columns: int) -> None:
        for layer in self._attending:
            layer.columns = columns

    def _counts(self, columns: int) -> list[int]:
        """Tokens of each row that lie in the first `columns`."""
        if self._real is None:
            return [columns] * len(self.rows)
        return self._real[:, :columns].sum(dim=1).tolist()

    # ---- what people call ----

    def statistics(self) -> list[Statistics]:
        """Of each session, in the order of rows; rows that are still alike have one together."""
        return [session.statistics() for session in self.sessions]

    def audit(self, **head: int) -> list[Audit]:
        """What audits have found (audit_share of enable()), of each session."""
        return [session.audit(**head) for session in self.sessions]

    @property
    def sessions(self) -> list[Session]:
        """The different sessions, in the order of their first rows."""
        return list(dict.fromkeys(self.rows))

    def save(self, folder: Any) -> None:
        """Writes all rows to a folder, for load()."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        sessions = self.sessions
        for place, session in enumerate(sessions):
            first = self.rows.index(session)
            tokens = None
            if self._ids is not None:
                ids = self._ids[first] if self._real is None else self._ids[first][self._real[first]]
                tokens = ids.to(device="cpu", dtype=torch.int32).contiguous().numpy()
            session.set_identity(self.enabled.model_id, tokens)
            session.save(folder / f"session-{place}.kv")
        if self._states:
            self._states.save(folder / "states.pt")
        content = {
            "keyhole_cache": 1, "columns": self.get_seq_length(), "model": self.enabled.model_id,
            "rows": [sessions.index(session) for session in self.rows],
            "padding": None if self._real is None else [(~row).nonzero()[:, 0].tolist() for row in self._real],
            "ids": None if self._ids is None else self._ids.tolist(),
        }  # fmt: skip
        partial = folder / "cache.json.part"
        partial.write_text(json.dumps(content))
        os.replace(partial, folder / "cache.json")

    @classmethod
    def load(cls, model: Any, folder: Any) -> "KeyholeCache":
        """The cache that save() wrote, for the same model: another one's is refused (InvalidArgument)."""
        cache = cls(model)
        folder = Path(folder)
        content = json.loads((folder / "cache.json").read_text())
        if content.get("keyhole_cache") != 1:
            raise InvalidArgument(f"{folder}/cache.json: keyhole_cache is {content.get('keyhole_cache')!r}; allowed: 1")
        sessions = [
            Session.load(cache.enabled.engine, str(folder / f"session-{place}.kv"), model=cache.enabled.model_id)
            for place in range(max(content["rows"]) + 1)
        ]
        for session in sessions:
            cache.enabled.prepare(session)
        cache.rows = [sessions[place] for place in content["rows"]]
        if content["padding"] is not None:
            cache._real = torch.ones(len(cache.rows), content["columns"], dtype=torch.bool)
            for row, masked in zip(cache._real, content["padding"]):
                row[masked] = False
        if cache._states:
            cache._states.load(folder / "states.pt", cache.enabled.device)
        cache._ids = None if content["ids"] is None else torch.tensor(content["ids"])
        cache._set_columns(content["columns"])
        return cache

    def __repr__(self) -> str:
        return f"KeyholeCache({len(self.rows)} rows, {len(self.sessions)} sessions, {self.get_seq_length()} tokens)"

    # ---- a forward pass ----

    def begin_forward(self, ids: Any, embeds: Any, mask: Any, positions: Any = None, copied: bool = True) -> None:
        """Before the first layer: which tokens are new, whose they are, and who still shares a session with whom. copied: whether the
        states of other layers are copied now, in case that the pass fails; else copy_states() does it, before they change."""
        new = ids if ids is not None else embeds
        batch, n = new.shape[:2]
        if not self.rows:
            first = self._session()
            self.rows = [first] * batch
        elif len(self.rows) != batch:
            raise InvalidArgument(f"a batch of {batch} rows; the cache has {len(self.rows)}")
        columns = self.get_seq_length()
        real = self._new_mask(mask, columns, batch, n)
        if self._unbuilt and n < CHUNK:
            self._build()
        self._part(new, real)
        if self._states:
            self._record.begin(Piece(columns, n, input_ids=ids, inputs_embeds=embeds, position_ids=positions), copied)
        if real is not None or self._real is not None:
            before = torch.ones(batch, columns, dtype=torch.bool) if self._real is None else self._real
            added = torch.ones(batch, n, dtype=torch.bool) if real is None else real
            self._real = torch.cat([before, added], dim=1)
        if ids is None or (columns and self._ids is None):
            self._ids = None
        else:
            self._ids = ids if self._ids is None else torch.cat([self._ids, ids.to(self._ids.device)], dim=1)
        self._forward = Forward(self.rows, n, real, columns)
        if n >= CHUNK:
            self._unbuilt = True

    def copy_states(self) -> None:
        if self._states and self._forward is not None:
            self._record.copy()

    def _new_mask(self, mask: Any, columns: int, batch: int, n: int) -> Optional[torch.Tensor]:
        """Which of the new tokens are real, [B, n] in host memory; None: all."""
        if mask is None:
            return None
        if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
            raise Unsupported("only attention masks [batch, tokens] are supported, not ones of other shapes or of each layer")
        if tuple(mask.shape) != (batch, columns + n):
            raise InvalidArgument(f"attention_mask is {tuple(mask.shape)}; [{batch}, {columns + n}] is needed: {columns} tokens in the cache and {n} new ones")
        mask = mask.to(torch.bool)
        before = mask[:, :columns]
        same = before.all() if self._real is None else (before == self._real.to(mask.device)).all()
        # From a device a few bytes a step, whatever the context.
        found = torch.cat([same.view(1), mask[:, columns:].flatten()]).to("cpu")
        if not found[0]:
            raise Unsupported("attention_mask says something else of tokens in the cache than when they came")
        new = found[1:].view(batch, n)
        return None if bool(new.all()) else new

    def _part(self, new: Any, real: Optional[torch.Tensor]) -> None:
        """Rows that share a session and now differ get forks."""
        if len(set(self.rows)) == len(self.rows):
            return
        groups: dict[Session, list[tuple[int, Session]]] = {}
        inputs = new.to("cpu")
        for row, session in enumerate(self.rows):
            alike = groups.setdefault(session, [])
            for other, shared in alike:
                same = torch.equal(inputs[row], inputs[other])
                if same and (real is None or torch.equal(real[row], real[other])):
                    self.rows[row] = shared
                    break
            else:
                # The first keeps the session: copies are made of it before it takes anything in.
                empty = self.get_seq_length() == 0
                mine = session if not alike else self._session() if empty else session.fork()
                alike.append((row, mine))
                self.rows[row] = mine

    def end_forward(self, failed: bool) -> None:
        """After the last layer. What a pass that failed has appended is taken back, as far as sliding layers reach."""
        forward, self._forward = self._forward, None
        if forward is None:
            return
        if failed and forward.empty:
            self.reset()
        elif failed:
            self._cut(forward.before)
        if self._states:
            self._record.end(failed)

    def _session(self) -> Session:
        return self.enabled.session(self._max_tokens)

    def _build(self) -> None:
        self._unbuilt = False
        for session in self.sessions:
            self.enabled.build(session)


# A compiler that looks into these compiles a layer's number into it, and so each layer by itself.
for name in STATE_CALLS:
    setattr(KeyholeCache, name, torch.compiler.disable(getattr(Cache, name)))
