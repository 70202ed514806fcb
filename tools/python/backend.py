"""What `pip wheel` and `python -m build` call: scikit-build-core, with the library's sources beside the package.

A source distribution must hold all that it is built from, and the library lies above this folder: its sources are laid into
library/ for as long as the distribution is packed, with the headers that it includes of xxHash and nlohmann's JSON.

A wheel is for the card of this machine, unless the settings say otherwise (wheel_device.py), and says so (wheel_progress.py).
"""

import contextlib
import re
import shutil
from pathlib import Path

import wheel_device
import wheel_progress
from scikit_build_core import build as _build
from scikit_build_core.build import get_requires_for_build_sdist, get_requires_for_build_wheel  # noqa: F401

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parent.parent
_FOLDERS = ("cmake", "cpu", "gpu", "index", "runtime")


def _in_repository() -> bool:
    return (_ROOT / "runtime" / "include" / "keyhole" / "keyhole.h").exists()


@contextlib.contextmanager
def _version_file():
    """The version's one home is the public header."""
    file = _HERE / "version.txt"
    if not _in_repository():
        yield
        return
    header = (_ROOT / "runtime/include/keyhole/keyhole.h").read_text()
    file.write_text(".".join(re.findall(r"#define KEYHOLE_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header)) + "\n")
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


@contextlib.contextmanager
def _library():
    if not _in_repository():
        yield
        return
    library = _HERE / "library"
    shutil.rmtree(library, ignore_errors=True)
    try:
        for folder in _FOLDERS:
            shutil.copytree(_ROOT / folder, library / folder)
        shutil.copytree(_HERE / "src", library / "tools" / "python" / "src")  # where includes look for its headers
        for file in ("CMakeLists.txt", "LICENSE"):
            shutil.copy(_ROOT / file, library / file)
        dependencies = library / "dependencies"
        (dependencies / "include").mkdir(parents=True)
        (dependencies / "share" / "doc").mkdir(parents=True)
        shutil.copy("/usr/include/xxhash.h", dependencies / "include" / "xxhash.h")
        shutil.copytree("/usr/include/nlohmann", dependencies / "include" / "nlohmann")
        config = next(Path(p) for p in ("/usr/share/cmake/nlohmann_json", "/usr/lib/cmake/nlohmann_json") if Path(p).exists())
        shutil.copytree(config, dependencies / config.relative_to("/usr"))
        for package in ("libxxhash-dev", "nlohmann-json3-dev"):
            licence = Path("/usr/share/doc") / package / "copyright"
            if licence.exists():
                shutil.copy(licence, dependencies / "share" / "doc" / f"{package}.copyright")
        yield
    finally:
        shutil.rmtree(library, ignore_errors=True)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    choice = wheel_device.choose(config_settings or {}, _ROOT if _in_repository() else _HERE / "library")
    chosen = {f"cmake.define.{name}": value for name, value in choice.defines.items()}
    if _in_repository():  # objects lie where those of all other builds do, not among the sources
        chosen["build-dir"] = str(_ROOT / "build" / "wheel" / "{wheel_tag}")
    config_settings = {**chosen, **(config_settings or {})}
    with _version_file(), wheel_progress.shown(choice.message):
        return _build.build_wheel(wheel_directory, config_settings, metadata_directory)


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    with _version_file():
        return _build.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def build_sdist(sdist_directory, config_settings=None):
    with _version_file(), _library():
        return _build.build_sdist(sdist_directory, config_settings)
