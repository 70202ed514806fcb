"""The wheel, in an environment that has nothing else; for which device it is built, and who hears of it."""

import importlib.util
import json
import os
import pty
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
    # Its backend has all that it imports, and finds the list of architectures.
    script = "import backend; backend.wheel_device._every_architecture(backend._HERE / 'library')"
    run(sys.executable, "-c", f"import sys; sys.path.insert(0, '.'); {script}", cwd=source)
    # CMake refuses a source file that is not there.
    run("cmake", "-S", source, "-B", tmp_path / "build", "-DKEYHOLE_CUDA=OFF", f"-DPython_EXECUTABLE={sys.executable}",
        "-DSKBUILD_PROJECT_NAME=keyhole", "-DSKBUILD_PROJECT_VERSION=0")  # fmt: skip


# Which device a wheel is for. The compiler and the driver are scripts: nothing is compiled here.


class Machine:
    """A PATH with a CUDA compiler and a driver, or without."""

    def __init__(self, root, folder):
        self.root, self.folder = root, folder
        spec = importlib.util.spec_from_file_location("wheel_device", root / "tools/python/wheel_device.py")
        self.device = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.device)

    def command(self, name, script):
        (self.folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (self.folder / name).chmod(0o755)

    def nvcc(self, version="13.0"):
        self.command("nvcc", f"echo 'Cuda compilation tools, release {version}, V{version}.88'")

    def cards(self, *lines):
        self.command("nvidia-smi", "\n".join(f"echo '{line}'" for line in lines))

    def choose(self, **settings):
        chosen = self.device.choose({f"cmake.define.{name}": value for name, value in settings.items()}, self.root)
        return chosen.defines, chosen.message


@pytest.fixture
def machine(root, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CUDACXX", "CUDAARCHS", "CMAKE_ARGS", "SKBUILD_CMAKE_ARGS", "SKBUILD_CMAKE_DEFINE", "CMAKE_BUILD_PARALLEL_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    return Machine(root, tmp_path)


HOST = {"KEYHOLE_CUDA": "OFF"}
H100 = "9.0, NVIDIA H100 80GB HBM3"


def test_without_nvcc_a_wheel_has_no_cuda(machine):
    machine.cards(H100)
    defines, message = machine.choose()
    assert defines == HOST
    assert message.startswith("Without CUDA: there is no nvcc on the PATH. Compiling takes ")


@pytest.mark.parametrize("driver", [None, "echo 'NVIDIA-SMI has failed'; exit 9", "echo 'No devices were found'"])
def test_nvcc_without_a_card_makes_no_kernels(machine, driver):
    machine.nvcc()
    if driver:
        machine.command("nvidia-smi", driver)
    defines, message = machine.choose()
    assert defines == HOST
    assert message.startswith("Without CUDA: nvidia-smi names no card here (-C cmake.define.KEYHOLE_CUDA=ON ")


def test_kernels_are_for_the_card_that_is_there(machine):
    machine.nvcc()
    machine.cards(H100, H100)
    defines, message = machine.choose()
    assert defines == {"KEYHOLE_CUDA": "ON", "CMAKE_CUDA_ARCHITECTURES": "90"}
    assert message.startswith("With CUDA for 90: the card here is NVIDIA H100 80GB HBM3 (-C cmake.define.KEYHOLE_CUDA=OFF ")


def test_cards_that_differ_get_their_kernels_each(machine):
    machine.nvcc()
    machine.cards("12.0, NVIDIA GeForce RTX 5090", "8.6, NVIDIA RTX A6000", "7.5, Tesla T4")
    defines, message = machine.choose()
    assert defines["CMAKE_CUDA_ARCHITECTURES"] == "86;120"
    assert "86, 120: the card here is NVIDIA GeForce RTX 5090, NVIDIA RTX A6000 (" in message


def test_what_cannot_run_is_not_compiled(machine):
    machine.nvcc()
    machine.cards("7.5, Tesla T4")
    defines, message = machine.choose()
    assert defines == HOST
    assert message.startswith("Without CUDA: Tesla T4 has compute capability 7.5, and 8.0 is needed.")
    machine.nvcc("12.4")
    machine.cards(H100)
    defines, message = machine.choose()
    assert defines == HOST
    assert "nvcc is of CUDA 12.4, and 13.0 is needed." in message


def test_cuda_that_is_asked_for_is_for_every_architecture(machine):
    """Also on a machine with a card, and in a folder of builds that had one architecture before."""
    machine.nvcc()
    machine.cards(H100)
    defines, message = machine.choose(KEYHOLE_CUDA="ON")
    (every,) = re.findall(r"CMAKE_CUDA_ARCHITECTURES (80.*)\)", (machine.root / "cmake/cuda.cmake").read_text())
    assert defines == {"CMAKE_CUDA_ARCHITECTURES": every.replace(" ", ";")}
    assert message.startswith(f"With CUDA for {every.replace(' ', ', ')}: KEYHOLE_CUDA is on, and CMAKE_CUDA_ARCHITECTURES names no fewer.")


def test_what_is_asked_for_is_not_changed(machine, monkeypatch):
    machine.nvcc()
    machine.cards(H100)
    assert machine.choose(KEYHOLE_CUDA="OFF")[0] == {}
    assert machine.choose(KEYHOLE_CUDA="OFF")[1].startswith("Without CUDA: KEYHOLE_CUDA is off.")
    assert machine.choose(CMAKE_CUDA_ARCHITECTURES="80;120")[0] == {"KEYHOLE_CUDA": "ON"}
    assert "for 80, 120: these architectures were asked for." in machine.choose(CMAKE_CUDA_ARCHITECTURES="80;120")[1]
    assert machine.choose(KEYHOLE_CUDA="ON", CMAKE_CUDA_ARCHITECTURES="80")[0] == {}
    assert machine.choose(KEYHOLE_PYTHON_EXTENSION="native.so") == ({}, "The extension is native.so: nothing is compiled.")
    for name, value in {
        "CMAKE_ARGS": "-DX=1 -DKEYHOLE_CUDA:BOOL=off",
        "SKBUILD_CMAKE_ARGS": "-DKEYHOLE_CUDA=off;-DX=1",
        "SKBUILD_CMAKE_DEFINE": "X=1;KEYHOLE_CUDA=off;Y=2",
    }.items():
        monkeypatch.setenv(name, value)
        assert machine.choose()[0] == {}, name
        monkeypatch.delenv(name)
    for name, value in {
        "CMAKE_ARGS": "-DX=1 -DCMAKE_CUDA_ARCHITECTURES='80;90' -DY=2",
        "SKBUILD_CMAKE_DEFINE": "CMAKE_CUDA_ARCHITECTURES=80;90;Y=2",
    }.items():
        monkeypatch.setenv(name, value)
        assert machine.choose()[0] == {"KEYHOLE_CUDA": "ON"}, name
        assert "for 80, 90: these" in machine.choose()[1], name
        monkeypatch.delenv(name)
    # CMake's own variable would be overruled by what an earlier build left in the folder.
    monkeypatch.setenv("CUDAARCHS", "89")
    assert machine.choose()[0] == {"KEYHOLE_CUDA": "ON", "CMAKE_CUDA_ARCHITECTURES": "89"}


def test_more_to_compile_takes_longer_and_more_cores_less(machine, monkeypatch):
    def minutes(cores, **settings):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
        low, high, named = re.search(r"takes (\d+) to (\d+) minutes on (\d+) core", machine.choose(**settings)[1]).groups()
        assert int(named) == cores and int(low) < int(high)
        return int(high)

    one = {"KEYHOLE_CUDA": "ON", "CMAKE_CUDA_ARCHITECTURES": "90"}
    assert minutes(2) < minutes(2, **one) < minutes(2, KEYHOLE_CUDA="ON")
    assert minutes(16, KEYHOLE_CUDA="ON") < minutes(2, KEYHOLE_CUDA="ON")
    monkeypatch.setenv("CMAKE_BUILD_PARALLEL_LEVEL", "2")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    assert "on 2 cores." in machine.choose()[1]


def test_the_build_is_told_what_was_chosen(machine):
    """By the hook that pip calls; what the caller gave stands beside it."""
    pytest.importorskip("scikit_build_core")
    machine.nvcc()
    machine.cards(H100)
    script = """import json, sys; sys.path.insert(0, "."); import backend
backend._build.build_wheel = lambda folder, settings, metadata: print(json.dumps(settings))
backend.build_wheel("folder", {"cmake.define.X": "1"})"""
    said = run(sys.executable, "-c", script, cwd=machine.root / "tools/python").splitlines()
    assert said[0].startswith("*** keyhole: With CUDA for 90: ")
    settings = json.loads(said[1])
    assert settings.pop("build-dir").startswith(str(machine.root / "build"))
    assert settings == {"cmake.define.KEYHOLE_CUDA": "ON", "cmake.define.CMAKE_CUDA_ARCHITECTURES": "90", "cmake.define.X": "1"}


# Who hears of it. A caller like pip reads what the backend prints, and has a terminal of its own.

HOOK = """import os, sys; sys.path.insert(0, "."); import wheel_progress
with wheel_progress.shown("What it does."):
    os.system("echo '[0/2] Looking'; echo '[1/2] One'; sleep 0.2; echo '[2/2] Two'")
print("the end")"""
CALLER = f"""import subprocess, sys
said = subprocess.run([sys.executable, "-c", {HOOK!r}], stdout=subprocess.PIPE, text=True, check=True).stdout
print("caller read", said.splitlines())"""
READ = "caller read ['*** keyhole: What it does.', '[0/2] Looking', '[1/2] One', '[2/2] Two', 'the end']"


def on_a_terminal(*words, **options):
    """What a terminal gets of a command."""
    own, its = pty.openpty()
    with subprocess.Popen([str(word) for word in words], stdin=subprocess.DEVNULL, stdout=its, stderr=its, **options) as process:
        os.close(its)
        said = b""
        try:
            while data := os.read(own, 65536):
                said += data
        except OSError:  # the last one who had it open has gone
            pass
        os.close(own)
    assert process.returncode == 0, said.decode()
    return said.decode().replace("\r\n", "\n")


@pytest.fixture
def quiet_environment(monkeypatch):
    for name in ("PIP_VERBOSE", "PIP_QUIET"):
        monkeypatch.delenv(name, raising=False)


def test_the_terminal_of_the_caller_shows_progress(root, quiet_environment):
    said = on_a_terminal(sys.executable, "-c", CALLER, cwd=root / "tools/python")
    assert said.startswith("\n  keyhole: What it does.\n\r  keyhole: 1 of 2 compiled, 0 min 00 s ")
    assert "\r  keyhole: 2 of 2 compiled, 0 min " in said
    assert READ in said, "and the caller reads all that it would have read"


@pytest.mark.parametrize("word", ["-v", "-qq", "--verbose", "--quiet"])
def test_a_caller_who_shows_all_or_nothing_shows_it_himself(root, quiet_environment, word):
    assert on_a_terminal(sys.executable, "-c", CALLER, word, cwd=root / "tools/python") == READ + "\n"


def test_nothing_is_written_to_what_is_no_terminal(root, quiet_environment, tmp_path):
    assert run(sys.executable, "-c", CALLER, cwd=root / "tools/python") == READ + "\n"
    log = tmp_path / "log"
    log.write_text("before\n")
    with log.open("a") as file:
        subprocess.run([sys.executable, "-c", CALLER], stdout=file, cwd=root / "tools/python", check=True)
    assert log.read_text() == f"before\n{READ}\n"


def test_pip_on_a_terminal_says_what_it_builds(root, quiet_environment, tmp_path):
    pytest.importorskip("scikit_build_core")
    extension = Path(_native.__file__).resolve()
    said = on_a_terminal(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, "-C",
                         f"cmake.define.KEYHOLE_PYTHON_EXTENSION={extension}", "-C", f"build-dir={tmp_path}/build",
                         root / "tools/python")  # fmt: skip
    assert f"keyhole: The extension is {extension}: nothing is compiled." in said
