"""Where tests find the library's header, the bundled model and the keyhole command."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def command() -> str:
    """The keyhole command of the build that the tests run in."""
    found = os.environ.get("KEYHOLE_COMMAND") or str(ROOT / "build/release/tools/keyhole")
    if not os.access(found, os.X_OK):
        pytest.skip(f"the keyhole command is not built: {found}")
    return found
