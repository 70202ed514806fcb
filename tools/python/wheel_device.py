"""Which device a wheel is built for, and how long that takes.

Kernels are compiled for each architecture by itself, and those of one take longer than all the rest: a wheel of which nobody
said more is for the card of this machine.
"""

import dataclasses
import os
import re
import shutil
import subprocess
from pathlib import Path

# Minutes of one core of a Xeon (Sapphire Rapids, two threads a core, both busy), g++ 12 and nvcc 13.0: a wheel without CUDA; the
# kernels of one architecture; the longest file of these, which no second core shortens.
_HOST_MINUTES = 9
_KERNEL_MINUTES = 15
_LONGEST_MINUTES = 1.5
_OLDEST_CARD = 80  # a compute capability of 8.0: asynchronous copies, products of bfloat16
_OLDEST_NVCC = (13, 0)  # cmake/cuda.cmake refuses older ones


@dataclasses.dataclass(frozen=True)
class Choice:
    defines: dict  # CMake's variables, those that the caller gave left out
    message: str


def _run(*words) -> str:
    """What a command says; nothing where it is missing or fails."""
    try:
        return subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _told(name, settings):
    """The value of a CMake variable by any of scikit-build-core's ways to give one, or None."""
    settings = {key.removeprefix("skbuild."): value for key, value in settings.items()}
    if f"cmake.define.{name}" in settings:
        return str(settings[f"cmake.define.{name}"])
    arguments = settings.get("cmake.args", [])
    texts = [arguments] if isinstance(arguments, str) else list(arguments)
    texts += [os.environ.get(variable, "") for variable in ("SKBUILD_CMAKE_ARGS", "CMAKE_ARGS")]
    # Between arguments and between definitions there are spaces or semicolons; inside a list there are semicolons, too.
    values = re.findall(rf"(?:^|[\s;])-D *{name}(?::\w+)?=(\"[^\"]*\"|'[^']*'|\S*)", "\n".join(texts))
    values += re.findall(rf"(?:^|;){name}=(.*)", os.environ.get("SKBUILD_CMAKE_DEFINE", ""))
    return re.split(r";(?=-|\w+=)", values[-1])[0].strip("\"'") if values else None


def _nvcc():
    """The CUDA compiler that CMake would take, and its version."""
    path = os.environ.get("CUDACXX") or shutil.which("nvcc")
    found = re.search(r"release (\d+)\.(\d+)", _run(path, "--version")) if path else None
    return path, (int(found[1]), int(found[2])) if found else None


def _cards():
    """Name and compute capability times ten of each card that the driver sees."""
    lines = _run("nvidia-smi", "--query-gpu=compute_cap,name", "--format=csv,noheader").splitlines()
    found = (re.fullmatch(r"\s*(\d+)\.(\d)\s*,\s*(.*?)\s*", line) for line in lines)
    return [(card[3], int(card[1] + card[2])) for card in found if card]


def _every_architecture(root: Path) -> str:
    """Those of all other builds, whose one home is cmake/cuda.cmake."""
    (words,) = re.findall(r"set\(CMAKE_CUDA_ARCHITECTURES ([^)]*)\)", (root / "cmake" / "cuda.cmake").read_text())
    return ";".join(words.split())


def jobs() -> int:
    """How many compilers run at once, as far as there are cores for them."""
    cores = len(os.sched_getaffinity(0))
    level = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", "")
    return min(cores, int(level)) if level.isdigit() and int(level) > 0 else cores


def _how_long(architectures) -> str:
    words = [word for word in architectures.split(";") if word]
    some = any(word.startswith("all") for word in words)  # nvcc knows which, at least those of the list
    count = max(len(words), 5) if some else len(words)
    minutes = max((_HOST_MINUTES + _KERNEL_MINUTES * count) / jobs(), _LONGEST_MINUTES * count)
    # Other cores and other compilers are faster or slower, and machines are shared.
    low, high = (round(value) if value < 20 else 5 * round(value / 5) for value in (0.7 * minutes, 2.5 * minutes))
    time = f"more than {max(low, 1)}" if some else f"{max(low, 1)} to {max(high, 2)}"
    return f"Compiling takes {time} minutes on {jobs()} {'core' if jobs() == 1 else 'cores'}."


def choose(settings: dict, root: Path) -> Choice:
    """What CMake is told beside `settings`, those of `pip wheel -C`. `root` has the library's sources."""
    if extension := _told("KEYHOLE_PYTHON_EXTENSION", settings):
        return Choice({}, f"The extension is {extension}: nothing is compiled.")
    cuda = _told("KEYHOLE_CUDA", settings)
    named = _told("CMAKE_CUDA_ARCHITECTURES", settings)

    def without(why):
        return Choice({"KEYHOLE_CUDA": "OFF"} if cuda is None else {}, f"Without CUDA: {why}. {_how_long('')}")

    def with_cuda(architectures, why):
        # The folder of builds stays, and what an earlier one was told must not last. What the caller gave is the caller's.
        defines = {} if named else {"CMAKE_CUDA_ARCHITECTURES": architectures}
        if cuda is None:
            defines["KEYHOLE_CUDA"] = "ON"
        return Choice(defines, f"With CUDA for {architectures.replace(';', ', ')}: {why}. {_how_long(architectures)}")

    if cuda is not None and cuda.upper() in ("", "0", "OFF", "NO", "FALSE", "N"):
        return without("KEYHOLE_CUDA is off")
    if architectures := named or os.environ.get("CUDAARCHS"):
        return with_cuda(architectures, "these architectures were asked for")
    if cuda is not None:
        return with_cuda(_every_architecture(root), "KEYHOLE_CUDA is on, and CMAKE_CUDA_ARCHITECTURES names no fewer")
    nvcc, version = _nvcc()
    if nvcc is None:
        return without("there is no nvcc on the PATH")
    if version is not None and version < _OLDEST_NVCC:
        return without(f"{nvcc} is of CUDA {version[0]}.{version[1]}, and {_OLDEST_NVCC[0]}.{_OLDEST_NVCC[1]} is needed")
    cards = _cards()
    if not cards:
        return without("nvidia-smi names no card here (-C cmake.define.KEYHOLE_CUDA=ON builds for cards elsewhere)")
    able = [(name, capability) for name, capability in cards if capability >= _OLDEST_CARD]
    if not able:
        return without(f"{cards[0][0]} has compute capability {cards[0][1] / 10}, and {_OLDEST_CARD / 10} is needed")
    names = ", ".join(sorted({name for name, _ in able}))
    architectures = ";".join(str(capability) for capability in sorted({capability for _, capability in able}))
    return with_cuda(architectures, f"the card here is {names} (-C cmake.define.KEYHOLE_CUDA=OFF leaves CUDA out)")
