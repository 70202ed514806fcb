"""What holds for the package as a whole: errors, threads, callbacks, closing, and that it has all of the header."""

import dataclasses
import inspect
import logging
import re
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import keyhole
from keyhole import _native
from keyhole._errors import BY_STATUS

D = 64


@pytest.fixture(scope="module")
def engine():
    return keyhole.Engine(layers=1, q_heads=2, kv_heads=1, head_dim=D, threads=2)


def filled(engine, tokens=3000, **fields):
    session = engine.session(**{"sink": 8, "window": 32, "max_tokens": 1 << 16, "index": "ivf", **fields})
    keys = np.random.default_rng(1).standard_normal((tokens, 1, D)).astype(np.float16)
    session.append(0, keys, keys)
    return session


# ---- errors ----


def test_every_status_has_its_class(root):
    header = (root / "runtime/include/keyhole/keyhole.h").read_text()
    numbers = {int(number) for number in re.findall(r"KEYHOLE_[A-Z_]+ = (-\d+)", header)}
    assert set(BY_STATUS) == numbers and len(numbers) == 14
    for status, kind in BY_STATUS.items():
        assert issubclass(kind, keyhole.Error) and kind.status == status


def test_errors_have_the_text_of_the_library(engine):
    with pytest.raises(keyhole.InvalidArgument, match="head_dim is 60, allowed:") as caught:
        keyhole.Engine(layers=1, q_heads=1, kv_heads=1, head_dim=60)
    assert isinstance(caught.value, ValueError) and caught.value.status == -1
    session = engine.session(max_tokens=10)
    keys = np.zeros((11, 1, D), np.float32)
    with pytest.raises(keyhole.InvalidArgument, match="max_tokens"):
        session.append(0, keys, keys)
    keys[2, 0, 5] = np.inf
    with pytest.raises(keyhole.NotFinite, match="k"):
        session.append(0, keys[:5], keys[:5])
    assert session.layer_tokens().total == 0
    limited = engine.session(host_memory_limit=100_000)
    large = np.zeros((20_000, 1, D), np.float32)
    with pytest.raises(keyhole.OutOfMemory) as caught:
        limited.append(0, large, large)
    assert isinstance(caught.value, MemoryError)
    if not keyhole.CUDA:
        with pytest.raises(keyhole.Unsupported):
            keyhole.Engine(layers=1, q_heads=2, kv_heads=1, head_dim=D, device="cuda")


@pytest.mark.parametrize(
    "array, kind, words",
    [
        (np.zeros((2, D)), keyhole.InvalidArgument, "q has dtype float64; float32, float16 and bfloat16 are allowed"),
        (np.zeros((2, D), np.int32), keyhole.InvalidArgument, "q has dtype int32"),
        (np.zeros((2, 2 * D), np.float32)[:, ::2], keyhole.InvalidArgument, "tensor q: stride 2 of the last axis, allowed: 1"),
        (np.zeros((3, D), np.float32), keyhole.InvalidArgument, "q"),
        (np.zeros((1, 1, 1, 2, D), np.float32), keyhole.InvalidArgument, "q has 5 axes; 1 to 4 are allowed"),
        ([1.0, 2.0], TypeError, "q: an array is needed .* not list"),
        (None, keyhole.InvalidArgument, "q"),
    ],
)
def test_wrong_arrays_are_named(engine, array, kind, words):
    session = filled(engine, 10)
    out = np.empty((2, D), np.float32)
    with pytest.raises(kind, match=words):
        session.attend(0, array, out=out)
    session.attend(0, np.ones((2, D), np.float32))


def test_wrong_fields_are_named(engine):
    with pytest.raises(TypeError, match="windw"):
        engine.session(windw=3)
    with pytest.raises(TypeError, match="window cannot be -3"):
        engine.session(window=-3)
    with pytest.raises(TypeError, match="window cannot be 'x'"):
        engine.session(window="x")
    with pytest.raises(ValueError, match="mode is 'no'; allowed: 'indexed', 'exact', 'resident'"):
        engine.session(mode="no")
    with pytest.raises(keyhole.InvalidArgument, match="unknown index type 'foo'"):
        engine.session(index="foo")
    with pytest.raises(TypeError, match="colour"):
        engine.session(budget={"colour": 1})
    with pytest.raises(ValueError, match="sink_logits has 1 elements; 2 are needed"):
        keyhole.Engine(layers=1, q_heads=2, kv_heads=1, head_dim=D, sink_logits=np.zeros(1, np.float32))


# ---- closing, threads ----


def test_a_closed_session_says_so(engine):
    session = filled(engine, 10)
    session.close()
    session.close()
    assert session.closed and "closed" in repr(session)
    for call in (session.build, session.fork, session.statistics, lambda: session.attend(0, np.ones((2, D), np.float32)),
                 lambda: session.config, lambda: session.save("nowhere")):  # fmt: skip
        with pytest.raises(ValueError, match="the session is closed"):
            call()
    with keyhole.Engine(layers=1, q_heads=2, kv_heads=1, head_dim=D) as other:
        session = filled(other, 10)
    with pytest.raises(ValueError, match="the engine is closed"):
        other.session()
    session.attend(0, np.ones((2, D), np.float32))  # a session outlives its engine


def test_a_second_thread_is_busy_and_closing_waits_for_nobody(engine):
    session = filled(engine)
    inside, leave = threading.Event(), threading.Event()

    def stop(fraction, what):
        inside.set()
        leave.wait(30)

    worker = threading.Thread(target=session.build, args=(stop,))
    worker.start()
    assert inside.wait(30)
    try:
        with pytest.raises(keyhole.Busy):
            session.attend(0, np.ones((2, D), np.float32))
        with pytest.raises(keyhole.Busy, match="cannot be closed"):
            session.close()
    finally:
        leave.set()
        worker.join()
    assert session.layer_tokens().pending == 0
    session.close()


def test_calls_that_work_release_the_lock(engine):
    """With an endless switch interval another Python thread runs during a call only if the call lets it."""
    seen = {}
    counter, done = [0], threading.Event()
    keys = np.zeros((60_000, 1, D), np.float32)

    def work():
        session = engine.session(max_tokens=1 << 16, index="ivf")
        for name, call in (("append", lambda: session.append(0, keys, keys)), ("build", session.build),
                           ("statistics", lambda: session.fork())):  # fmt: skip
            before = counter[0]
            call()
            seen[name] = counter[0] - before
        done.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        worker = threading.Thread(target=work)
        worker.start()
        while not done.is_set():
            counter[0] += 1
            time.sleep(0.0002)
        worker.join()
    finally:
        sys.setswitchinterval(interval)
    assert seen["append"] > 0 and seen["build"] > 0, seen


def test_two_engines_in_two_threads():
    """Each thread has sessions of its own and gets the answers that one thread alone gets."""

    def answers(seed, results):
        rng = np.random.default_rng(seed)
        engine = keyhole.Engine(layers=1, q_heads=2, kv_heads=1, head_dim=D, threads=2)
        keys = rng.standard_normal((2000, 1, D)).astype(np.float32)
        session = engine.session(index="flat", sink=8, window=32, max_tokens=4096)
        session.append(0, keys, keys)
        session.build()
        results[seed] = [session.attend(0, rng.standard_normal((2, D)).astype(np.float32)) for _ in range(100)]

    alone, together = {}, {}
    for seed in (1, 2):
        answers(seed, alone)
    threads = [threading.Thread(target=answers, args=(seed, together)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in (1, 2):
        np.testing.assert_array_equal(alone[seed], together[seed])


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_sessions_made_and_dropped_leave_nothing(engine):
    keys, q = np.ones((40, 1, D), np.float32), np.ones((2, D), np.float32)

    def once():
        session = engine.session(max_tokens=64, sink=4, window=8, index="flat")
        session.append(0, keys, keys)
        session.attend(0, q, keys[0], keys[0])
        session.fork().statistics()
        with pytest.raises(keyhole.InvalidArgument):
            session.attend(5, q)

    for _ in range(500):
        once()
    before = resident_bytes()
    for _ in range(4750):  # and a fork of each
        once()
    assert resident_bytes() - before < 8 << 20


# ---- callbacks ----


def test_progress_is_told_and_what_it_raises_arrives(engine):
    session = filled(engine)
    told = []
    session.build(lambda fraction, what: told.append((fraction, what)))
    assert told and told[-1][0] == 1.0 and all(0 <= fraction <= 1 and what for fraction, what in told)

    session = filled(engine)

    def fail(fraction, what):
        raise LookupError("from the callback")

    with pytest.raises(LookupError, match="from the callback"):
        session.build(fail)
    with pytest.raises(keyhole.Cancelled):
        session.build(lambda fraction, what: True)
    assert session.layer_tokens().pending > 0
    session.build(progress=True)
    assert session.layer_tokens().pending == 0


def test_interrupts_end_a_build(engine):
    """Ctrl-C while the library builds, in a process of its own."""
    script = (
        "import keyhole, numpy, os, signal, threading\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell starts background jobs with SIGINT ignored
        "engine = keyhole.Engine(layers=1, q_heads=2, kv_heads=1, head_dim=64, threads=1)\n"
        "session = engine.session(index='roargraph', max_tokens=1 << 16)\n"
        "keys = numpy.random.default_rng(1).standard_normal((60000, 1, 64)).astype('f4')\n"
        "session.append(0, keys, keys, numpy.repeat(keys, 2, 1))\n"
        "threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "try:\n    session.build()\nexcept KeyboardInterrupt:\n    print('interrupted', session.layer_tokens().pending > 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "interrupted True\n", done


def test_messages_go_to_logging(engine, caplog):
    other = keyhole.Engine(layers=1, q_heads=2, kv_heads=1, head_dim=D, kv_dtype="bf16", threads=1)
    keys = np.ones((2, 1, D), np.float16)
    with caplog.at_level(logging.DEBUG, logger="keyhole"):
        other.session().append(0, keys, keys)
    assert any("f16" in record.getMessage() for record in caplog.records if record.name == "keyhole")


# ---- one index ----


def test_an_index_finds_what_brute_force_finds(engine):
    rng = np.random.default_rng(3)
    keys, queries = rng.standard_normal((2000, D)).astype(np.float32), rng.standard_normal((4, D)).astype(np.float32)
    with keyhole.Index(engine, "flat") as index:
        index.build(keys, keys, progress=lambda fraction, what: None)
        ids, counts, scores = np.empty((4, 5), np.uint32), np.empty(4, np.uint32), np.empty((4, 5), np.float32)
        cost = index.search(queries, ids=ids, counts=counts, scores=scores, top_k=5)
        products = queries.astype(np.float16).astype(np.float64) @ keys.astype(np.float16).astype(np.float64).T
        np.testing.assert_array_equal(np.sort(ids), np.sort(np.argsort(-products, axis=1)[:, :5].astype(np.uint32)))
        assert cost.keys_scored == 4 * 2000 and list(counts) == [5] * 4 and len(cost.missing) == 4
        o, lse = np.empty((4, D), np.float32), np.empty(4, np.float32)
        rows, cost = index.attend(queries, o=o, lse=lse, top_k=5)
        assert set(rows) == set(ids.ravel()) and cost.keys_attended == len(rows)
        assert index.info.keys == 2000 and index.info.params.startswith("flat")
        with pytest.raises(ValueError, match="ids has 4 elements; 20 are needed"):
            index.search(queries, ids=ids[:1, :4].copy(), counts=counts, top_k=5)
        index.build_tail(16)
        index.attend(queries, o=o, lse=lse, top_k=5, tail="second")
    with pytest.raises(ValueError, match="the index is closed"):
        index.info


# ---- budgets, compare ----


def test_budgets_files_are_read(engine, tmp_path):
    file = tmp_path / "b.json"
    file.write_text(
        '{"keyhole_budgets": 1, "model": {"layers": 1, "q_heads": 2, "kv_heads": 1, "head_dim": 64}, "target": {"error": 0.05},'
        ' "heads": [{"layer": "all", "kv_head": "all", "index": "ivf", "top_k": 100},'
        ' {"layer": 0, "kv_head": 0, "top_k": 31, "tail": "second", "measured": {"us": 12.5}}]}'
    )
    budgets = keyhole.read_budgets(file)
    head = budgets.of(0, 0)
    assert (head.index, head.budget.top_k, head.budget.tail, head.measured) == ("ivf", 31, "second", {"us": 12.5})
    session = engine.session(budgets=str(file))
    assert session.budget(layer=0, kv_head=0).top_k == 31  # the library reads it likewise
    file.write_text('{"keyhole_budgets": 2}')
    with pytest.raises(keyhole.VersionMismatch, match="keyhole_budgets is 2; allowed: 1"):
        keyhole.read_budgets(file)
    with pytest.raises(keyhole.VersionMismatch):
        engine.session(budgets=str(file))
    file.write_text("[]")
    with pytest.raises(keyhole.Corrupt):
        keyhole.read_budgets(file)


def test_compare_gives_the_rows_of_the_command(command, tmp_path):
    trace = tmp_path / "t.safetensors"
    subprocess.run([command, "record", "--task", "kv", "--length", "1500", "--layers", "4", "--out", trace], check=True,
                   stdin=subprocess.DEVNULL, capture_output=True)  # fmt: skip
    table = keyhole.compare(trace, ["flat", "ivf:probe=1|4"], tail="none", queries=8, command=command)
    rows = table if isinstance(table, list) else table.to_dict("records")
    assert [row["index"] for row in rows] == ["flat", "ivf:probe=1", "ivf:probe=4"]
    assert rows[0]["recall"] == 1.0 and rows[1]["scan_fraction"] < rows[2]["scan_fraction"] < 1
    assert rows[0]["latency_us_p50"] > 0
    assert len(keyhole.compare(trace, "flat", per_head=True, queries=8, command=command)) == 2
    with pytest.raises(keyhole.Error, match="nosuch"):
        keyhole.compare(trace, "nosuch", command=command)


# ---- the header ----

# What Python needs no function for, or has in another form.
ELSEWHERE = re.compile(
    r"keyhole_(\w+_init_sized|\w+_destroy|tensor_host|last_error|"
    # A process of Python is one rank.
    r"communicator_\w+|mpi_local_ranks)"
)


# Fields that are about several ranks.
RANKS = {"communicator", "context_block"}


def test_every_function_of_the_headers_is_called(root):
    headers = "".join(file.read_text() for file in sorted((root / "runtime/include/keyhole").glob("*.h")))
    functions = set(re.findall(r"\b(keyhole_[a-z_]+)\s*\(", re.sub(r"/\*.*?\*/", "", headers, flags=re.S)))
    functions = {name for name in functions if not name.endswith(("_init", "_fn"))}
    called = "".join(file.read_text() for file in (root / "tools/python/src").glob("*.cpp"))
    missing = {name for name in functions if not re.search(rf"\b{name}\b", called) and not ELSEWHERE.fullmatch(name)}
    assert len(functions) > 50 and not missing


@pytest.mark.parametrize("struct", sorted(_native.field_names()))
def test_every_field_of_the_structs_is_there(root, struct):
    headers = "".join(file.read_text() for file in sorted((root / "runtime/include/keyhole").glob("*.h")))
    headers = re.sub(r"/\*.*?\*/", "", headers, flags=re.S)
    body = re.search(r"struct %s \{(.*?)\}" % struct, headers, flags=re.S).group(1)
    members = []
    for declaration in body.split(";")[:-1]:
        words = re.sub(r"\[\w+\]", "", declaration).replace("*", " ").split()
        members += [word.strip(",") for word in words if not word.startswith(("keyhole_", "uint", "int32", "size_t", "const", "char"))
                    and word not in ("float", "double", "void")]  # fmt: skip
    members = {name for name in members if name not in ("struct_size", "reserved")}
    by_hand = {
        "keyhole_engine_config": {"log", "log_user", "run", "run_user", "sink_logits", "layer_configs", "layer_count"} | RANKS,
        "keyhole_session_config": {"dense_layers", "dense_layer_count"},
        "keyhole_search_options": {"other_o", "other_lse"},
    }.get(struct, set())
    assert set(_native.field_names()[struct]) == members - by_hand
    name = "".join(word.capitalize() for word in struct.split("_")[1:])
    kind = getattr(keyhole, name)
    fields = {field.name for field in dataclasses.fields(kind)}
    assert fields == (members - {"log", "log_user", "run", "run_user", "layer_count", "dense_layer_count"} - RANKS)


def test_help_is_there_for_all_that_is_public():
    for name in keyhole.__all__:
        thing = getattr(keyhole, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert inspect.getdoc(thing), name
        if inspect.isclass(thing) and thing.__module__ in ("keyhole._session", "keyhole._index", "keyhole._engine"):
            for member, value in vars(thing).items():
                if inspect.isfunction(value) and not member.startswith("_"):
                    assert inspect.getdoc(value), f"{name}.{member}"
    assert "roargraph" in keyhole.index_help() and "dense" in keyhole.prompt_help()


def test_the_stub_names_what_the_extension_has(root):
    stub = (root / "tools/python/keyhole/_native.pyi").read_text()
    for name in dir(_native):
        if not name.startswith("_"):
            assert re.search(rf"\b(def|class) {name}\b|^{name}:", stub, flags=re.M), name


def test_the_version_is_the_headers(root):
    header = (root / "runtime/include/keyhole/keyhole.h").read_text()
    assert keyhole.__version__ == ".".join(re.findall(r"#define KEYHOLE_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header))
