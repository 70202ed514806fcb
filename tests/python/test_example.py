"""The example runs, and what it shows holds."""

import importlib.util

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed")


def load(root, name):
    spec = importlib.util.spec_from_file_location(name, root / f"tools/python/example/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_chart_of_errors_and_times(root, tmp_path):
    example = load(root, "context")
    rows = example.main(["--context", "800", "1200", "--index", "auto", "--out", str(tmp_path / "c.png")])
    assert [row[:2] for row in rows] == [(800, "exact"), (800, "auto"), (1200, "exact"), (1200, "auto")]
    for _, name, median, p95, milliseconds, right in rows:
        assert right and milliseconds > 0
        if name == "auto":
            assert 0 < median < p95 < 0.2
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG") and (tmp_path / "c.png").stat().st_size > 10_000


def test_the_table_of_speeds(root):
    import torch
    import transformers

    speed = load(root, "speed")
    model = transformers.AutoModelForCausalLM.from_pretrained(root / "tools/model", dtype=torch.float32).eval()
    rows = speed.measure(model, 700, 3, 1, ["auto"])
    assert [row[0] for row in rows] == ["sdpa", "auto"] and all(row[1] > 0 for row in rows)
    assert rows[1][2].attends == 6 * 4  # the first token and three that were timed
