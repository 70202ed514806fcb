"""Which new tokens of a forward pass go to which sequence, and whose answers they get."""

from collections.abc import Sequence
from typing import Any, Optional

import torch

from .._session import Session


class Forward:
    """One forward pass: new tokens of the different sessions, one behind the other."""

    def __init__(self, rows: Sequence[Session], n: int, real: Optional[torch.Tensor], before: int) -> None:
        self.n = n
        self.before = before
        self.empty = before == 0
        self.batch = len(rows)
        self.real = real
        sessions = list(dict.fromkeys(rows))
        self.sessions = sessions
        # The first row of each session, and for each row the place of its session.
        self.first = [rows.index(session) for session in sessions]
        places = {session: place for place, session in enumerate(sessions)}
        self.place = [places[session] for session in rows]
        self.shared = len(sessions) < self.batch
        counts = [n] * len(sessions) if real is None else [int(real[row].sum()) for row in self.first]
        self.query_start = [0]
        for count in counts:
            self.query_start.append(self.query_start[-1] + count)
        self._index: Optional[torch.Tensor] = None
        if self.shared or real is not None:
            columns = torch.arange(n)
            chosen = [row * n + (columns if real is None else columns[real[row]]) for row in self.first]
            self._index = torch.cat(chosen)
        # For each row of the output its row among the answers of the different sessions.
        self._back: Optional[torch.Tensor] = None
        if self.shared:
            self._back = torch.tensor(self.place)

    def packed(self, states: Any) -> Any:
        """[B, H, n, d] as [total, H, d]: the real tokens of the different sessions."""
        rows = states.transpose(1, 2).flatten(0, 1)
        if self._index is None:
            return rows.contiguous() if rows.is_cuda else rows
        return rows.index_select(0, self._index.to(rows.device))

    def unpacked(self, answers: Any) -> Any:
        """[total, Hq, d] as [B, n, Hq, d]; 0 for masked tokens."""
        if self._index is None:
            return answers.unflatten(0, (self.batch, self.n))
        if self.real is not None:
            full = answers.new_zeros(self.batch * self.n, *answers.shape[1:])
            full.index_copy_(0, self._index.to(answers.device), answers)
            full = full.unflatten(0, (self.batch, self.n))
            if self._back is None:
                return full
            first = torch.tensor(self.first)[self._back]
            return full.index_select(0, first.to(answers.device))
        full = answers.unflatten(0, (len(self.sessions), self.n))
        return full.index_select(0, self._back.to(answers.device))
