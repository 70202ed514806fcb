"""Layers of a cache that keep no keys and values: linear attention, convolutions, recurrences. They stay transformers' own."""

from collections.abc import Iterator
from typing import Any, Optional

import torch

from .._errors import InvalidArgument


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: _copied(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(entry) for entry in value)
    return value


def _restored(now: Any, then: Any) -> Any:
    """What was copied, in the memory that the value has now where it has the same shape: graphs know it."""
    if isinstance(then, torch.Tensor):
        same = isinstance(now, torch.Tensor) and now is not then and (now.shape, now.dtype, now.device) == (then.shape, then.dtype, then.device)
        if not same or (now.is_inference() and not torch.is_inference_mode_enabled()):
            return then.clone()
        return now.copy_(then)
    if isinstance(then, dict):
        return {name: _restored(now.get(name) if isinstance(now, dict) else None, entry) for name, entry in then.items()}
    if isinstance(then, (list, tuple)):
        alike = isinstance(now, (list, tuple)) and len(now) == len(then)
        return type(then)(_restored(now[place] if alike else None, entry) for place, entry in enumerate(then))
    return then


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _tensors(entry)


# Tokens that can be taken back whatever came since, as sliding layers have them (window_slack); the most copies for it; and tokens
# of single steps between two of them.
_BACK, _COPIES, _STRIDE = 64, 6, 16


class States:
    """The states of such layers of one cache, which are taken, put back, chosen by rows and saved without being understood: they are
    the attributes of transformers' layers. False where a model has no such layer."""

    def __init__(self, layers: dict[int, Any]) -> None:
        self.layers = layers
        self._fresh = self.copy()

    def __bool__(self) -> bool:
        return bool(self.layers)

    def copy(self) -> dict[int, dict[str, Any]]:
        """All states, of each layer by its number; tensors are copies."""
        return {number: _copied(vars(layer)) for number, layer in self.layers.items()}

    def copy_to(self, memory: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """copy(), in the memory of an older copy, which is lost."""
        return {number: _restored(memory.get(number), vars(layer)) for number, layer in self.layers.items()}

    def put(self, states: dict[int, dict[str, Any]]) -> None:
        """Makes the layers what copy() took, which stays as it is."""
        for number, layer in self.layers.items():
            found = _restored(dict(vars(layer)), states[number])
            vars(layer).clear()
            vars(layer).update(found)

    def addresses(self) -> list[int]:
        """Where the states lie."""
        return [tensor.data_ptr() for layer in self.layers.values() for tensor in _tensors(vars(layer))]

    def reset(self) -> None:
        self.put(self._fresh)

    def select(self, rows: torch.Tensor) -> None:
        """Row i becomes what row rows[i] was; rows [any number] in host memory."""
        for layer in self.layers.values():
            layer.reorder_cache(rows)

    def save(self, path: Any) -> None:
        torch.save(self.copy(), path)

    def load(self, path: Any, device: Any) -> None:
        states = torch.load(path, map_location=device, weights_only=True)
        if set(states) != set(self.layers):
            raise InvalidArgument(f"{path} has states of layers {sorted(states)}; this model has them in {sorted(self.layers)}")
        for state in states.values():
            if state.get("device") is not None:
                state["device"] = torch.device(device)
        self.put(states)

    def __repr__(self) -> str:
        return ", ".join(sorted({type(layer).__name__ for layer in self.layers.values()}))


class Piece:
    """What one forward pass was given: new tokens of each row behind the first `before`."""

    def __init__(self, before: int, n: int, **inputs: Optional[torch.Tensor]) -> None:
        self.before, self.n = before, n
        # Tensors by their names, with the axis of tokens: the last one, but for embeddings.
        self.inputs = {name: (given, 1 if name == "inputs_embeds" else -1) for name, given in inputs.items() if given is not None}

    def first(self, tokens: int) -> "Piece":
        piece = Piece(self.before, tokens)
        piece.inputs = {name: (given.narrow(axis, 0, tokens), axis) for name, (given, axis) in self.inputs.items()}
        return piece

    def tensors(self) -> dict[str, Any]:
        return {name: given for name, (given, _) in self.inputs.items()}


class Record:
    """What it takes to go back: a state has no tokens that could be cut off. Copies of the states before some of the newest passes,
    and what the passes since the oldest copy were given, so that the model can compute again what stays."""

    def __init__(self, states: States) -> None:
        self.states = states
        self.copies: list[tuple[int, Optional[dict[int, Any]]]] = []  # tokens before, states; None: there were none
        self.pieces: list[Piece] = []
        # The states before the newest pass, until it has ended, where they were copied; and the memory of such copies.
        self._newest: Optional[dict[int, Any]] = None
        self._memory: dict[int, Any] = {}

    def clear(self) -> None:
        self.copies, self.pieces, self._newest = [], [], None

    @property
    def oldest(self) -> Optional[int]:
        """Tokens that can be gone back to; None: not known."""
        return self.copies[0][0] if self.copies else None

    def begin(self, piece: Piece, copied: bool = True) -> None:
        """Before a forward pass. copied: False: copy() comes in time, or the pass cannot fail in its midst."""
        self._newest = None
        if not self.copies or piece.n > 1 or piece.before - self.copies[-1][0] >= _STRIDE:
            self._newest = self.states.copy() if piece.before else None
            self.copies.append((piece.before, self._newest))
        self.pieces.append(piece)
        if len(self.copies) > _COPIES:  # what is nearest to others is missed least
            gaps = [self.copies[place + 1][0] - self.copies[place - 1][0] for place in range(1, len(self.copies) - 1)]
            del self.copies[1 + gaps.index(min(gaps))]
        while len(self.copies) > 1 and self.copies[1][0] <= piece.before - _BACK:
            del self.copies[0]
        self.pieces = [one for one in self.pieces if one.before >= self.copies[0][0]]
        if copied:
            self.copy()

    def copy(self) -> None:
        """Copies the states before the newest pass, for an end that failed; a second time does nothing."""
        if self._newest is None and self.pieces[-1].before:
            self._newest = self._memory = self.states.copy_to(self._memory)

    def end(self, failed: bool) -> None:
        """After the pass. One that failed, behind other tokens, leaves no trace: nothing has to be computed again, which could fail as
        the pass has."""
        newest, self._newest = self._newest, None
        if failed and self.pieces and self.pieces[-1].before:
            before = self.pieces.pop().before
            self.copies = [copy for copy in self.copies if copy[0] < before]
            if newest is not None:
                self.states.put(newest)

    def back(self, columns: int) -> tuple[int, Optional[dict[int, Any]], list[Piece]]:
        """Goes back to `columns` tokens, at least `oldest`: the tokens before the copy that serves, the copy, and what has to be
        computed again behind it. Of copies and pieces those before it stay."""
        place = max(place for place, (before, _) in enumerate(self.copies) if before <= columns)
        before, states = self.copies[place]
        again = [one.first(min(one.n, columns - one.before)) for one in self.pieces if before <= one.before < columns]
        del self.copies[place:]
        self.pieces = [one for one in self.pieces if one.before < before]
        return before, states, _joined(again)


def _joined(pieces: list[Piece]) -> list[Piece]:
    """One piece where all were given the same kinds of inputs."""
    if len({tuple(one.inputs) for one in pieces}) != 1:
        return pieces
    joined = Piece(pieces[0].before, sum(one.n for one in pieces))
    for name, (_, axis) in pieces[0].inputs.items():
        joined.inputs[name] = (torch.cat([one.inputs[name][0] for one in pieces], dim=axis), axis)
    return [joined]
