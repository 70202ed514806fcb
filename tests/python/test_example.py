"""The example runs, and what it shows holds."""

import importlib.util
import json

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


def test_the_table_of_speeds(root, tmp_path, capsys):
    speed = load(root, "speed")
    file = tmp_path / "speed.json"
    speed.main(["--tokens", "690,2k", "--new", "3", "--rounds", "1", "--index", "auto", "--json", str(file)])
    result = json.loads(file.read_text())
    assert result["format"] == "keyhole-speed" and result["device"] == "cpu" and result["dtype"] == "float32"
    printed = capsys.readouterr().out
    for context in (690, 2048):
        rows = {row["way"]: row for row in result["rows"] if row["context"] == context}
        assert list(rows) == ["sdpa", "static", "offloaded", "quanto 4 bits", "hqq 4 bits", "keyhole auto", "keyhole auto, graphs",
                              "keyhole auto, compiled"]
        for way in ("sdpa", "static", "keyhole auto"):
            assert rows[way]["seconds"] > 0 and rows[way]["tokens_per_second"] == 1 / rows[way]["seconds"]
        assert rows["keyhole auto, graphs"]["skipped"] == rows["keyhole auto, compiled"]["skipped"] == "CUDA graphs need a CUDA device"
        assert rows["offloaded"]["skipped"] == "it needs a CUDA device" and rows["offloaded"]["seconds"] is None
        for backend in ("quanto", "hqq"):
            row = rows[f"{backend} 4 bits"]
            assert (row["seconds"] is None) == bool(row["skipped"])
            assert row["seconds"] or backend in row["skipped"].lower()
        # K and V of all tokens in fp32, 6 layers of 2 heads of 128: the prompt and what was decoded.
        one = 2 * 6 * 2 * 128 * 4
        assert rows["sdpa"]["host_bytes"] == (context + 6) * one
        assert (context + 6) * one <= rows["static"]["host_bytes"] < (context + 7) * one
        assert rows["keyhole auto"]["host_bytes"] > 0 and (rows["keyhole auto"]["bytes_read"] > 0) == (context == 2048)
        assert rows["sdpa"]["bytes_read"] is None
    assert "skipped: it needs a CUDA device" in printed and printed.count("\n") == 2 + 16


def test_caches_of_random_numbers(root, tmp_path):
    """Filled at once, and Keyhole's cache of one index serves all its rounds."""
    file = tmp_path / "speed.json"
    load(root, "speed").main(["--tokens", "2k", "--new", "3", "--rounds", "2", "--index", "auto", "ivf", "--ways", "dynamic,keyhole",
                              "--fill", "random", "--json", str(file)])  # fmt: skip
    result = json.loads(file.read_text())
    assert result["fill"] == "random"
    assert [row["way"] for row in result["rows"]] == ["sdpa", "keyhole auto", "keyhole ivf"]
    assert all(row["seconds"] > 0 and not row["skipped"] for row in result["rows"])


def test_a_hybrid_of_random_numbers(root):
    """K and V of its attention alone are drawn; other layers keep the states of a few tokens, which rounds do not change."""
    speed = load(root, "speed")
    if not hasattr(speed.transformers, "Qwen3_5TextConfig"):
        pytest.skip("no Qwen3.5 in this version of transformers")
    small = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 97,
             "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}  # fmt: skip
    speed.SHAPES["hybrid"] = ("Qwen3_5", {**speed.SHAPES["hybrid"][1], **small})
    model = speed.random_model("hybrid", 8, speed.torch.float32, "cpu")
    with speed.torch.no_grad():
        given = speed.random_prompt(model, 600)
    assert list(given.rows) == [3, 7] and list(given.states) == [0, 1, 2, 4, 5, 6] and given.rows[3][0].shape == (1, 2, 600, 64)
    rows = speed.measure(model, 600, 3, 2, ["exact"], ("dynamic", "keyhole"), "random")
    assert [row.way for row in rows] == ["sdpa", "keyhole exact"] and all(row.seconds and not row.skipped for row in rows)


@pytest.mark.parametrize("words, message", [
    (["--tokens", "8x"], "lengths such as 8k"), (["--tokens", "8"], "256 or more"), (["--ways", "dynamic,none"], "no none; allowed"),
    (["--device", "meta"], "cpu and cuda are allowed"), (["--new", "0"], "1 or more"),
])  # fmt: skip
def test_what_the_table_refuses(root, capsys, words, message):
    with pytest.raises(SystemExit):
        load(root, "speed").main(words)
    assert message in capsys.readouterr().err
