"""The wheel, in an environment that has nothing else."""

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from keyhole import _native


def run(*words, **options):
    done = subprocess.run([str(word) for word in words], stdin=subprocess.DEVNULL, capture_output=True, text=True, **options)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(map(str, words))}\n{done.stdout}{done.stderr}")
    return done.stdout


@pytest.fixture(scope="module")
def wheel(root, tmp_path_factory):
    """A wheel of the extension that these tests run with: the rest of the package comes from the sources."""
    pytest.importorskip("scikit_build_core")
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", folder, "-C",
        f"cmake.define.KEYHOLE_PYTHON_EXTENSION={Path(_native.__file__).resolve()}", "-C", f"build-dir={folder}/build",
        root / "tools/python")  # fmt: skip
    (file,) = folder.glob("*.whl")
    return file


def test_the_wheel_has_the_package_alone(wheel):
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    assert all(name.startswith("keyhole/") for name in names)
    assert {"keyhole/__init__.py", "keyhole/_native.pyi", "keyhole/py.typed"} <= set(names)
    assert any(name.endswith(".so") for name in names)
    assert not any("__pycache__" in name for name in names)


def test_the_extension_needs_nothing_but_the_system():
    needed = re.findall(r"NEEDED.*\[(.*?)\]", run("readelf", "-d", _native.__file__))
    allowed = r"(libc|libm|libstdc\+\+|libgcc_s|libpthread|libdl|librt|ld-linux-[\w-]+)\.so\.\d+"
    assert needed and [name for name in needed if not re.fullmatch(allowed, name)] == []


def test_a_fresh_environment_runs_the_lines_of_the_readme(wheel, root, tmp_path):
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    try:
        run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", wheel)
    except AssertionError as error:
        if "numpy" in str(error):
            pytest.skip("NumPy cannot be installed here")
        raise
    (lines,) = re.findall(r"```python\n(.*?)```", (root / "tools/python/README.md").read_text(), flags=re.S)[:1]
    assert run(python, "-c", lines, cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}).startswith("(32, 128)")


def test_the_source_distribution_holds_all_that_it_is_built_from(root, tmp_path):
    """Its build is configured outside the repository, and every file of ours that a source includes is in it."""
    pytest.importorskip("scikit_build_core")
    run(sys.executable, "-c", "import sys; sys.path.insert(0, '.'); import backend; backend.build_sdist(sys.argv[1])", tmp_path,
        cwd=root / "tools/python")  # fmt: skip
    assert not (root / "tools/python/library").exists(), "what was laid there to be packed has gone"
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    (source,) = (path for path in tmp_path.iterdir() if path.is_dir())
    library = source / "library"
    roots = (library, library / "runtime/include", library / "dependencies/include", source)
    seen = 0
    for file in [path for path in source.rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh") and "dependencies" not in path.parts]:
        for name in re.findall(r'^\s*#\s*include\s*["<]([\w./-]+)[">]', file.read_text(), flags=re.M):
            # Ours, those of xxHash and of nlohmann's JSON; all others are the system's, CUDA's or nanobind's.
            if not name.startswith(("cpu/", "gpu/", "index/", "runtime/", "tools/", "keyhole/", "xxhash", "nlohmann/")):
                continue
            seen += 1
            assert any((folder / name).exists() for folder in roots), f"{file.relative_to(source)} includes {name}"
    assert seen > 500
    # CMake refuses a source file that is not there.
    run("cmake", "-S", source, "-B", tmp_path / "build", "-DKEYHOLE_CUDA=OFF", f"-DPython_EXECUTABLE={sys.executable}",
        "-DSKBUILD_PROJECT_NAME=keyhole", "-DSKBUILD_PROJECT_VERSION=0")  # fmt: skip
