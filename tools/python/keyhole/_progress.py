"""Progress of long calls."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Optional, Union

#: Called with the share done (0..1) and what is being done; a true answer cancels the call.
Progress = Union[Callable[[float, str], Any], bool, None]


@contextmanager
def reporter(progress: Progress) -> Iterator[Optional[Callable[[float, str], Any]]]:
    """The callable for `progress`: itself; True: a bar of tqdm where that is installed; None and False: none."""
    if callable(progress):
        yield progress
        return
    if not progress:
        yield None
        return
    try:
        from tqdm.auto import tqdm
    except ImportError:
        yield None
        return
    with tqdm(total=1.0, bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}") as bar:

        def step(fraction: float, what: str) -> None:
            bar.set_description_str(what, refresh=False)
            bar.update(fraction - bar.n)

        yield step
