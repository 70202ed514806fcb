"""The rows of `keyhole compare` as a table."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Optional, Union

from ._errors import Error


def _command(command: Optional[str]) -> str:
    if command is not None:
        return command
    found = os.environ.get("KEYHOLE_COMMAND") or shutil.which("keyhole")
    if not found:
        raise FileNotFoundError(
            "the keyhole command is not on the PATH: build it (cmake --build build/release --target keyhole_command), then pass "
            "command=, or set KEYHOLE_COMMAND"
        )
    return found


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """One level: latency_us with p50 and p99 becomes latency_us_p50 and latency_us_p99."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            flat.update({f"{name}_{inner}": entry for inner, entry in _flat(value).items()})
        else:
            flat[name] = value
    return flat


def compare(trace: Union[str, os.PathLike[str]], index: Union[str, Iterable[str]] = "auto", *, per_head: bool = False,
            command: Optional[str] = None, **options: Any) -> Any:  # fmt: skip
    """Index types and budgets beside each other on a recorded trace: `keyhole compare` as a table.

    trace: a file of `keyhole record`, or keys as .hdf5, .fbin or .fvecs. index: specs, also sweeps such as
    "ivf:probe=8|16|32". options: those of the command, with _ for -; lists for those that repeat: tail=["none", "second"],
    queries=200, layers="4,5". per_head: a row for each (layer, KV head) instead of the summary of all. command: the keyhole
    command; default: environment variable KEYHOLE_COMMAND, else the one on the PATH.

    Returns a pandas DataFrame where pandas is installed, else a list of dicts: output_error_median, output_error_p95,
    read_share, bytes_per_step, latency_us_p50, recall, recovered_mass, build_s and the others of `keyhole compare --help`.
    Its figures are of the machine that it runs on. Raises keyhole.Error with the command's text where that fails.
    """
    words = [_command(command), "compare", "--trace", os.fspath(trace)]
    for spec in [index] if isinstance(index, str) else index:
        words += ["--index", spec]
    for name, value in options.items():
        option = "--" + name.replace("_", "-")
        if value is True:
            words.append(option)
        elif value is not None and value is not False:
            for entry in value if isinstance(value, (list, tuple)) else [value]:
                words += [option, str(entry)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        done = subprocess.run([*words, "--json", str(file)], stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode != 0:
            raise Error((done.stderr or done.stdout).strip() or f"{words[0]} compare ended with {done.returncode}")
        result = json.loads(file.read_text())
    rows = [_flat(row) for row in result["results" if per_head else "summary"]]
    try:
        import pandas
    except ImportError:
        return rows
    return pandas.DataFrame(rows)
