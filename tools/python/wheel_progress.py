"""How a build speaks to whoever started it.

pip and its like read all that a backend prints, and show it with -v or when the build fails. Their own output goes to the
terminal, though: where it is one, and they were asked for neither more words nor fewer, lines are written there beside it.
"""

import contextlib
import os
import re
import select
import stat
import sys
import threading
import time
from pathlib import Path


def _terminal():
    """The terminal of the program that called this one, or None."""
    if os.isatty(1) or "PIP_VERBOSE" in os.environ or "PIP_QUIET" in os.environ:
        return None
    caller = Path("/proc") / str(os.getppid())
    try:
        if any(re.fullmatch("-[vq]+|--verbose|--quiet", word) for word in (caller / "cmdline").read_text().split("\0")):
            return None
        if not stat.S_ISCHR((caller / "fd/1").stat().st_mode):
            return None
        terminal = open(os.open(caller / "fd/1", os.O_WRONLY | os.O_NOCTTY), "w")
        return terminal if terminal.isatty() else None
    except OSError:
        return None


class _Progress:
    """Reads what a build prints, hands it on, and draws how far ninja or make says that it is."""

    def __init__(self, terminal, read, out):
        self._terminal, self._read, self._out = terminal, read, out
        self._start = time.monotonic()
        self._done = ""
        self._drawn = ""

    def run(self):
        rest = b""
        try:
            while True:
                if select.select([self._read], [], [], 1)[0]:
                    data = os.read(self._read, 65536)
                    if not data:
                        return
                    self._out.write(data)
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        if found := re.match(rb"\[ *([1-9]\d*/\d+|\d+%)\]", line):
                            self._done = found[1].decode().replace("/", " of ")
                self._draw()
        except (OSError, ValueError):
            pass  # the caller has gone: the build is to see that, and not to wait for a reader
        finally:
            os.close(self._read)

    def _draw(self):
        minutes, seconds = divmod(int(time.monotonic() - self._start), 60)
        text = f"  keyhole: {self._done} compiled, {minutes} min {seconds:02d} s"
        if not self._done or text == self._drawn:
            return
        self._drawn = text
        with contextlib.suppress(OSError):  # a terminal that has gone
            # pip turns its spinner over the last character before the cursor.
            self._terminal.write(f"\r{text:<44}  ")
            self._terminal.flush()


@contextlib.contextmanager
def shown(message: str):
    """Says the message, and how far the build inside is."""
    print(f"*** keyhole: {message}", flush=True)  # for -v, and for what is shown of a failed build
    terminal = _terminal()
    if terminal is None:
        yield
        return
    with contextlib.suppress(OSError):
        terminal.write(f"\n  keyhole: {message}\n")
        terminal.flush()
    read, write = os.pipe()
    with open(os.dup(1), "wb", buffering=0) as out:
        os.dup2(write, 1)
        os.close(write)
        reader = threading.Thread(target=_Progress(terminal, read, out).run, daemon=True)
        reader.start()
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(out.fileno(), 1)
            reader.join(10)  # a compiler's cache may leave a server behind that holds the pipe
