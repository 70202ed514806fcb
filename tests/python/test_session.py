"""Sessions against attention in double precision, with NumPy alone."""

import json

import numpy as np
import pytest

import keyhole
from truth import attention, error

D, HQ, HKV, LAYERS = 64, 6, 2, 2
# Sums in fp32 of a few hundred terms, K and V stored in fp32.
ROUNDING = 2e-5


@pytest.fixture(scope="module")
def engine():
    return keyhole.Engine(layers=LAYERS, q_heads=HQ, kv_heads=HKV, head_dim=D, kv_dtype="f32", threads=2)


def random(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def exact(engine, **fields):
    return engine.session(**{"mode": "exact", "sink": 8, "window": 32, "max_tokens": 4096, **fields})


def test_prompt_and_steps_are_exact_attention(engine):
    k, v, q = random(1, LAYERS, 300, HKV, D), random(2, LAYERS, 300, HKV, D), random(3, LAYERS, 300, HQ, D)
    session = exact(engine)
    for layer in range(LAYERS):
        session.append(layer, k[layer, :290], v[layer, :290], q[layer, :290])
    session.build()
    for token in range(290, 300):
        for layer in range(LAYERS):
            lse = np.empty(HQ, np.float32)
            out = session.attend(layer, q[layer, token], k[layer, token], v[layer, token], lse=lse)
            truth, truth_lse = attention(q[layer, token : token + 1], k[layer, : token + 1], v[layer, : token + 1])
            assert error(out, truth[0]) < ROUNDING
            np.testing.assert_allclose(lse, truth_lse[0], atol=1e-4)
    assert session.layer_tokens(1).total == 300


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_extend_attends_causally_and_takes_strides(engine, dtype):
    k, v = random(4, 200, HKV, D, dtype=dtype), random(5, 200, HKV, D, dtype=dtype)
    q = random(6, 200, HQ, D, dtype=dtype)
    session = exact(engine)
    # Heads before tokens, as models have them: the views are not contiguous.
    heads_first = [np.ascontiguousarray(array.transpose(1, 0, 2)).transpose(1, 0, 2) for array in (q, k, v)]
    outputs = []
    for start, stop in ((0, 150), (150, 151), (151, 200)):
        views = [array[start:stop] for array in heads_first]
        outputs.append(session.extend(0, *views))
        assert outputs[-1].dtype == dtype
    truth, _ = attention(q, k, v)
    assert error(np.concatenate(outputs), truth) < (ROUNDING if dtype == np.float32 else 2e-3)


def test_a_tree_of_drafts_and_what_is_accepted(engine):
    k, v, q = random(7, 64, HKV, D), random(8, 64, HKV, D), random(9, 64, HQ, D)
    session = exact(engine)
    for layer in range(LAYERS):
        session.append(layer, k[:60], v[:60])
    tree = np.array([0b0001, 0b0011, 0b0101, 0b1011], np.uint64)
    for layer in range(LAYERS):
        out = session.extend(layer, q[60:64], k[60:64], v[60:64], mask=tree)
        for token, parents in enumerate(((0,), (0, 1), (0, 2), (0, 1, 3))):
            rows = [*range(60), *(60 + parent for parent in parents)]
            truth, _ = attention(q[60 + token : 61 + token], k[rows], v[rows])
            assert error(out[token], truth[0]) < ROUNDING
    with pytest.raises(ValueError, match="path is shorter than m"):
        session.accept(3, [0, 1])
    session.accept(3, [0, 1, 3])
    assert session.layer_tokens().total == 63
    out = session.attend(0, q[0])
    truth, _ = attention(q[:1], k[[*range(61), 61, 63]], v[[*range(61), 61, 63]])
    assert error(out, truth[0]) < ROUNDING


def test_batches_of_ragged_sequences(engine):
    lengths, new = (40, 7, 120), (1, 5, 3)
    k, v, q = random(10, 3, 200, HKV, D), random(11, 3, 200, HKV, D), random(12, 3, 200, HQ, D)
    sessions = [exact(engine) for _ in lengths]
    for place, length in enumerate(lengths):
        sessions[place].append(0, k[place, :length], v[place, :length])
    rows = [slice(length, length + more) for length, more in zip(lengths, new)]
    packed = [np.concatenate([array[place, row] for place, row in enumerate(rows)]) for array in (q, k, v)]
    out = keyhole.extend_batch(sessions, 0, *packed, [0, 1, 6, 9])
    at = 0
    for place, (length, more) in enumerate(zip(lengths, new)):
        truth, _ = attention(q[place, rows[place]], k[place, : length + more], v[place, : length + more])
        assert error(out[at : at + more], truth) < ROUNDING
        at += more


def test_a_batch_says_who_failed(engine):
    sessions = [exact(engine), exact(engine)]
    q, k = random(13, 2, HQ, D), random(14, 2, HKV, D)
    k[1, 0, 0] = np.nan
    with pytest.raises(keyhole.BatchError, match="session 1") as caught:
        keyhole.extend_batch(sessions, 0, q, k, k, [0, 1, 2])
    assert caught.value.errors[0] is None and isinstance(caught.value.errors[1], keyhole.NotFinite)
    assert [session.layer_tokens().total for session in sessions] == [1, 0]
    k[0] = np.nan
    with pytest.raises(keyhole.NotFinite):
        keyhole.extend_batch(sessions, 0, q, k, k, [0, 1, 2])


def test_a_launch_of_a_graph_is_announced_to_all_sessions_or_to_none(engine):
    sessions = [exact(engine), exact(engine)]
    keyhole.announce_batch([], 1)
    with pytest.raises(keyhole.InvalidArgument, match="graph"):
        keyhole.announce_batch(sessions, 0)
    with pytest.raises(keyhole.Unsupported):  # there are no graphs on a host
        keyhole.announce_batch(sessions, 1)


def test_the_default_index_is_near_and_reads_less(engine):
    k, v = random(15, 10000, HKV, D), random(16, 10000, HKV, D)  # on a host it indexes from 8,192 on
    q = 3 * k[3000].repeat(HQ // HKV, axis=0)  # a needle
    session = engine.session(max_tokens=12288)
    session.append(0, k, v)
    session.build()
    assert session.config.index.startswith("codes")
    truth, _ = attention(q[None], k, v)
    assert error(session.attend(0, q), truth[0]) < 0.1
    assert session.statistics().attends == 1
    if engine.config.device == keyhole.Device.HOST:  # a CUDA device scores keys by itself
        assert 0 < session.statistics().keys_offered
    session.set_mode("resident")
    assert error(session.attend(0, q), truth[0]) > 0.5  # the needle is not resident


@pytest.fixture(scope="module")
def flat_attention():
    """K, V, q and the truth of attention in which no few of 2,000 tokens weigh much. The newest of them, which every session has
    in its window, have other values than the many that are left to an index."""
    k, v, q = random(60, 2000, HKV, D), 1 + random(61, 2000, HKV, D), random(62, HQ, D)
    v[-32:] -= 5
    return k, v, q, attention(q[None], k, v)[0][0]


def coded(engine, flat, **fields):
    """A session in which nearly all of these tokens are indexed."""
    k, v, _, _ = flat
    session = engine.session(max_tokens=4096, sink=8, window=32, **fields)
    for layer in range(LAYERS):
        session.append(layer, k, v)
    session.build()
    return session


# By codes of 4 bits of what is not read exactly; and where that has no weight, and the window nearly all of it.
BY_CODES, WITHOUT = 0.05, 0.5


@pytest.mark.parametrize("index", ["codes:k=4,v=4", "codes:k=4,v=4,lists=64", "auto"])
@pytest.mark.parametrize("fields", [{"top_k": 32}, {"top_k": 100}, {"attend": "none"}, {"min_weight": 1e-3}])
def test_what_a_budget_of_codes_does_not_read_goes_by_codes(engine, flat_attention, index, fields):
    _, _, q, truth = flat_attention
    for budget in (keyhole.Budget(**fields), fields):
        session = coded(engine, flat_attention, index=index, budget=budget)
        assert error(session.attend(0, q), truth) < BY_CODES
        assert session.budget().tail == keyhole.Tail.CODES
        assert session.budget().top_k == fields.get("top_k", 16)
    session = coded(engine, flat_attention, index=index)
    session.set_budget(**fields)
    assert error(session.attend(0, q), truth) < BY_CODES
    session.set_budget(keyhole.Budget(top_k=7), layer=0, kv_head=1)
    one, other = session.budget(layer=0, kv_head=1), session.budget(layer=1, kv_head=1)
    assert (one.tail, one.top_k) == (keyhole.Tail.CODES, 7) and (other.tail, other.top_k) == (keyhole.Tail.CODES, fields.get("top_k", 16))


def test_a_budget_of_codes_that_says_more_is_kept(engine, flat_attention):
    _, _, q, truth = flat_attention
    session = coded(engine, flat_attention, index="codes:k=4,v=4", budget=keyhole.Budget(top_k=32, tail="none"))
    assert error(session.attend(0, q), truth) > WITHOUT
    session.set_budget(top_k=32)
    assert error(session.attend(0, q), truth) < BY_CODES
    session.set_budget(top_k=32, tail="none", layer=0)
    assert error(session.attend(0, q), truth) > WITHOUT and error(session.attend(1, q), truth) < BY_CODES
    # As the library has it before it completes a budget: the same to it as one that nobody has touched.
    for index in ("codes:k=4,v=4", "auto"):
        for fields in ({"tail": "none"}, {"tail": keyhole.Tail.NONE, "top_k": 100}, {"tail": "none", "attend": "topk"}):
            session = engine.session(index=index, budget=fields)
            assert session.config.index.startswith("codes")
            assert (session.budget().tail, session.budget().top_k) == (keyhole.Tail.NONE, 100)
    for fields in ({"tail": "codes"}, {}):
        session.set_budget(**fields)
        assert (session.budget().tail, session.budget().top_k) == (keyhole.Tail.CODES, 16)
    session.set_budget(attend="scored")
    assert session.budget().tail == keyhole.Tail.NONE
    session.set_budget(mass_target=0.9)
    assert session.budget().tail == keyhole.Tail.NONE
    with pytest.raises(keyhole.InvalidArgument, match="tail"):  # it has none where none is named
        session.set_budget(attend="none", tail="none")
    with pytest.raises(keyhole.InvalidArgument, match="1..1024"):
        session.set_budget(top_k=1025)


def test_budgets_of_other_indexes_have_no_codes(engine, tmp_path):
    for index in ("ivf", "flat"):
        session = engine.session(index=index, budget=keyhole.Budget(top_k=32))
        assert session.budget().tail == keyhole.Tail.NONE
        session.set_budget(top_k=9)
        assert session.budget().tail == keyhole.Tail.NONE
    # As many as codes read exactly; for more "auto" is another index.
    most = engine.session(max_tokens=65536, budget=keyhole.Budget(top_k=1024))
    assert most.config.index.startswith("codes") and most.budget().tail == keyhole.Tail.CODES
    more = engine.session(max_tokens=65536, budget=keyhole.Budget(top_k=1025))
    assert more.config.index.startswith("ivf") and more.budget().tail == keyhole.Tail.NONE
    # A file gives a head another index than the session's.
    file = tmp_path / "budgets.json"
    head = {"layer": 1, "kv_head": 0, "index": "ivf", "top_k": 50, "tail": "none"}
    shape = {"layers": LAYERS, "q_heads": HQ, "kv_heads": HKV, "head_dim": D}
    file.write_text(json.dumps({"keyhole_budgets": 1, "model": shape, "heads": [head]}))
    session = engine.session(index="codes:k=4,v=4", budgets=str(file))
    session.set_budget(top_k=9, layer=1, kv_head=0)
    assert session.budget(layer=1, kv_head=0).tail == keyhole.Tail.NONE
    session.set_budget(top_k=9, layer=0)
    assert session.budget(layer=0).tail == keyhole.Tail.CODES
    with pytest.raises(keyhole.InvalidArgument, match="ivf"):
        session.set_budget(top_k=9)
    session.set_budget(top_k=9, tail="none")


def test_an_index_of_codes_attends_by_them_too(engine, flat_attention):
    k, v, q, _ = flat_attention
    truth, truth_lse = attention(q[None, :3], k[:, :1], v[:, :1])
    with keyhole.Index(engine, "codes:k=4,v=4") as index:
        index.build(k[:, 0], v[:, 0])
        o, lse = np.empty((3, D), np.float32), np.empty(3, np.float32)
        index.attend(q[:3], o=o, lse=lse, top_k=32)
        assert error(o, truth[0]) < BY_CODES
        np.testing.assert_allclose(lse, truth_lse[0], atol=0.02)
        index.attend(q[:3], o=o, lse=lse, top_k=32, tail="none")
        assert np.all(lse < truth_lse[0] - 1)  # most of the weight is that of other tokens


def test_a_built_index_takes_other_search_parameters(engine):
    keys, queries = random(73, 400, D), random(74, 3, D)

    def found(index):
        ids, counts = np.empty((3, 20), np.uint32), np.empty(3, np.uint32)
        cost = index.search(queries, ids=ids, counts=counts, top_k=20)
        return ids.tolist(), cost.keys_scored

    best = np.argsort(-(queries.astype(np.float64) @ keys.T), axis=1)[:, :20].tolist()
    with keyhole.Index(engine, "flat") as index:
        index.set_spec("ivf:C=8,probe=1")  # before a build any will do
        index.build(keys)
        one, scored = found(index)
        assert one != best  # of 8 lists one is searched
        for other, part in (("ivf:C=9,probe=8", "C=9"), ("flat", "flat"), ("nothing", "nothing")):
            with pytest.raises(keyhole.InvalidArgument, match=part):
                index.set_spec(other)
            assert found(index) == (one, scored)
        index.set_spec("ivf:C=8,probe=8")
        ids, of_all = found(index)
        assert ids == best and of_all > scored
        assert "probe=8" in index.info.params


def test_windows_sinks_and_softcap_of_layers():
    sinks = random(17, LAYERS, HQ)
    engine = keyhole.Engine(
        layers=LAYERS, q_heads=HQ, kv_heads=HKV, head_dim=D, kv_dtype="f32", threads=2, sink_logits=sinks, softcap=2.0,
        layer_configs=[keyhole.LayerConfig(window=16, softcap=0.0, scale=0.3), keyhole.LayerConfig()],
    )  # fmt: skip
    k, v, q = random(18, 100, HKV, D), random(19, 100, HKV, D), random(20, 100, HQ, D)
    session = exact(engine)
    for layer, shape in enumerate(({"window": 16, "scale": 0.3}, {"softcap": 2.0})):
        session.append(layer, k[:90], v[:90])
        out = session.extend(layer, q[90:], k[90:], v[90:])
        truth, _ = attention(q[90:], k, v, sinks=sinks[layer], **shape)
        assert error(out, truth) < ROUNDING


def test_states_of_parts_merge_to_the_whole(engine):
    k, v, q = random(21, 500, HKV, D), random(22, 500, HKV, D), random(23, HQ, D)
    session = exact(engine)
    session.append(0, k, v)
    tokens = session.layer_tokens()
    resident = [*range(tokens.sink), *range(500 - tokens.window, 500)]
    lse = [np.empty(HQ, np.float32) for _ in range(3)]
    parts = [session.attend_offloaded(0, q, lse=lse[0]), session.attend_tokens(0, q, [resident] * HKV, lse=lse[1])]
    whole = np.empty_like(q)
    keyhole.merge_states(parts, lse[:2], whole, lse[2])
    truth, truth_lse = attention(q[None], k, v)
    assert error(whole, truth[0]) < ROUNDING
    np.testing.assert_allclose(lse[2], truth_lse[0], atol=1e-4)


def test_states_that_do_not_fit_are_not_merged():
    states, lse = [random(75, 4, D), random(76, 4, D)], [random(77, 4), random(78, 4)]
    out, out_lse = np.full((4, D), 7, np.float32), np.full(4, 7, np.float32)
    for wrong, wrong_lse in ((out.reshape(-1)[:-1], out_lse), (out, out_lse[:3]), (out, out_lse[:0])):
        with pytest.raises(ValueError, match="out must be .heads, head_dim., out_lse .heads., heads at least 1"):
            keyhole.merge_states(states, lse, wrong, wrong_lse)
    with pytest.raises(ValueError, match="there must be one lse for each o"):
        keyhole.merge_states(states, lse[:1], out, out_lse)
    with pytest.raises(ValueError, match="lse has 3 elements"):
        keyhole.merge_states(states, [lse[0], lse[1][:3]], out, out_lse)
    with pytest.raises(ValueError, match="o has 192 elements"):
        keyhole.merge_states([states[0], states[1][:3]], lse, out, out_lse)
    with pytest.raises(TypeError, match="o must be a dense float32 array"):
        keyhole.merge_states([states[0], states[1].astype(np.float16)], lse, out, out_lse)
    assert np.all(out == 7) and np.all(out_lse == 7)


def test_search_finds_the_largest_products(engine):
    k, q = random(24, 700, HKV, D), random(25, HQ, D)
    session = exact(engine, index="flat")
    session.append(0, k, k)
    ids, counts = np.empty((HQ, 10), np.uint32), np.empty(HQ, np.uint32)
    session.search_tokens(0, q, 10, ids, counts)
    tokens = session.layer_tokens()
    for head in range(HQ):
        products = k[:, head // (HQ // HKV)] @ q[head]
        products[: tokens.sink] = products[700 - tokens.window :] = -np.inf
        assert set(ids[head]) == set(np.argsort(-products)[:10])
    assert list(counts) == [10] * HQ


def test_truncate_fork_save_and_load(engine, tmp_path):
    k, v, q = random(26, LAYERS, 400, HKV, D), random(27, LAYERS, 400, HKV, D), random(28, HQ, D)
    session = exact(engine, index="flat", mode="indexed")
    for layer in range(LAYERS):
        session.append(layer, k[layer], v[layer])
    session.build()
    session.truncate(350)
    copy = session.fork()
    assert session.statistics().shared_bytes + copy.statistics().shared_bytes > 0
    copy.append(0, k[0, :5], v[0, :5])
    assert (session.layer_tokens().total, copy.layer_tokens().total) == (350, 355)
    tokens = np.arange(350, dtype=np.int32)
    session.set_identity("a model", tokens)
    session.save(tmp_path / "s.kv")
    loaded = keyhole.Session.load(engine, tmp_path / "s.kv", model="a model", tokens=np.arange(400, dtype=np.int32))
    assert loaded.identity == session.identity and loaded.identity.token_count == 350
    np.testing.assert_array_equal(loaded.attend(0, q), session.attend(0, q))
    with pytest.raises(keyhole.InvalidArgument, match="a model"):
        engine.load(tmp_path / "s.kv", model="another")
    with pytest.raises(keyhole.IOFailure):
        engine.load(tmp_path / "none.kv")
    (tmp_path / "broken.kv").write_bytes(b"no session at all, by its looks")
    with pytest.raises(keyhole.Corrupt):
        engine.load(tmp_path / "broken.kv")


def test_audits_see_the_error_that_there_is(engine):
    k, v = random(29, 2000, HKV, D), random(30, 2000, HKV, D)
    session = engine.session(max_tokens=4096, sink=8, window=32, audit_share=1.0, index="flat", budget={"top_k": 4, "tail": "none"})
    session.append(0, k, v)
    session.build()
    truths = []
    for step in range(4):
        q = random(31 + step, HQ, D)
        truth, _ = attention(q[None], k, v)
        truths.append(np.linalg.norm(session.attend(0, q) - truth[0], axis=-1) / np.linalg.norm(truth[0], axis=-1))
    audit = session.audit(layer=0)
    assert audit.audits == 4 * HQ
    assert audit.error_mean == pytest.approx(np.mean(truths), rel=1e-3)
    assert audit.error_max == pytest.approx(np.max(truths), rel=1e-3)
    assert session.audit(layer=1).audits == 0
    session.reset_statistics()
    assert session.audit().audits == 0 and session.statistics().attends == 0


def test_budgets_and_settings(engine):
    session = engine.session(max_tokens=4096, index="ivf", budget=keyhole.Budget(top_k=7, tail="second"))
    assert session.budget().top_k == 7 and session.budget().tail == keyhole.Tail.SECOND
    session.set_budget(top_k=9, layer=1)
    assert session.budget(layer=1, kv_head=1).top_k == 9
    with pytest.raises(keyhole.InvalidArgument):
        session.budget()
    session.set_index("flat")
    assert session.config.index.startswith("flat")
    session.set_mode("exact")
    assert session.config.mode == keyhole.Mode.EXACT
    session.set_attend("weight", 1e-3)
    assert session.budget(layer=0).attend == keyhole.AttendMode.WEIGHT
    assert engine.session(dense_layers=[1]).config.dense_layers == (1,)
    session.set_extend_pattern("dense", 4)
    k, q = random(40, 300, HKV, D), random(41, 300, HQ, D)
    assert error(session.extend(0, q, k, k), attention(q, k, k)[0]) < 2e-3
    assert session.extend_blocks() == (0, 0)
    session.set_prompt_chunk(128)
    session.extend(0, q, k, k)
    rows = np.zeros_like(k)
    session.get_rows(0, 300, k=rows)
    assert np.array_equal(rows, k)
    session.set_index("exact")
    assert session.config.mode == keyhole.Mode.EXACT


def test_a_plan_is_what_a_session_takes(engine):
    config = keyhole.SessionConfig(max_tokens=4096, dense_layers=[0], index="flat")
    shape = keyhole.EngineConfig(layers=LAYERS, q_heads=HQ, kv_heads=HKV, head_dim=D, kv_dtype="f32", device="host", threads=2)
    plan = keyhole.plan(shape, config, context=4096)
    assert plan.kv_bytes == 2 * LAYERS * 4096 * HKV * D * 4 and plan.fits
    assert plan.index.startswith("flat")
    assert not keyhole.plan(shape, config, context=4096, host_limit=1000).fits
    session = engine.session(config)
    k = random(42, 4096, HKV, D)
    for layer in range(LAYERS):
        session.append(layer, k, k)
    session.build()
    assert 0.5 * plan.host_bytes < session.statistics().host_bytes < 1.1 * plan.host_bytes


def test_outputs_may_be_given_and_buffers_will_do(engine):
    from array import array

    session = exact(engine)
    k, q = random(43, 3, HKV, D), random(44, HQ, D)
    session.append(0, k, k)
    given = np.full((HQ, D), np.nan, np.float16)
    assert session.attend(0, q, out=given) is given
    assert error(given, session.attend(0, q)) < 1e-3
    flat = array("f", q.ravel().tolist())
    given[:] = np.nan
    session.attend(0, memoryview(flat).cast("B").cast("f", (HQ, D)), out=given)
    assert error(given, session.attend(0, q)) < 1e-3
    read_only = np.empty((HQ, D), np.float32)
    read_only.flags.writeable = False
    with pytest.raises(TypeError, match="out"):
        session.attend(0, q, out=read_only)
    q.flags.writeable = False
    session.attend(0, q)  # what is only read may be read-only


def test_a_step_in_two_halves(engine):
    k, v, q = random(31, 60, HKV, D), random(32, 60, HKV, D), random(33, 60, HQ, D)
    session = exact(engine)
    session.append(0, k[:50], v[:50])
    with pytest.raises(keyhole.InvalidArgument, match="without attend_begin"):
        session.attend_end()
    for token in range(50, 60):
        mine = q[token].copy()
        session.attend_begin(0, mine, k[token], v[token])
        mine[:] = 0  # q in host memory was copied
        assert session.layer_tokens(0).total == token + 1
        with pytest.raises(keyhole.Busy):
            session.attend(0, q[token], k[token], v[token])
        lse = np.empty(HQ, np.float32)
        out = session.attend_end(lse=lse)
        truth, truth_lse = attention(q[token : token + 1], k[: token + 1], v[: token + 1])
        assert error(out, truth[0]) < ROUNDING
        np.testing.assert_allclose(lse, truth_lse[0], atol=1e-4)
    session.attend_begin(0, q[59])  # attends without appending
    with pytest.raises(keyhole.InvalidArgument, match="lse must be a dense float32 array of 6"):
        session.attend_end(lse=np.empty(HQ - 1, np.float32))
    given = np.empty((HQ, D), np.float16)
    assert session.attend_end(given) is given
    assert error(given, attention(q[59:], k, v)[0][0]) < 2e-3 and session.layer_tokens(0).total == 60


def test_prompts_are_exact_or_attend_some_blocks(engine):
    n, m = 300, 700
    k, v, q = random(34, m, HKV, D), random(35, m, HKV, D), random(36, n, HQ, D)
    truth, truth_lse = attention(q, k, v)
    with keyhole.Prompt(engine, "dense") as prompt:
        lse = np.empty((n, HQ), np.float32)
        out = prompt.attend(1, q, k, v, lse=lse)
        assert error(out, truth) < ROUNDING
        np.testing.assert_allclose(lse, truth_lse, atol=1e-4)
        assert prompt.blocks() == (0, 0)
        given = np.empty((n, HQ, D), np.float16)
        assert prompt.attend(0, q, k, v, given) is given
        assert error(given, truth) < 2e-3
        prompt.set_pattern("a-shape:first=64,near=128")
        prompt.attend(0, q, k, v)
        attended, seen = prompt.blocks()
        assert 0 < attended < seen
        with pytest.raises(keyhole.InvalidArgument, match="nosuch"):
            prompt.set_pattern("nosuch", layer=0, q_head=1)
        with pytest.raises(keyhole.InvalidArgument, match="lse must be"):
            prompt.attend(0, q, k, v, lse=np.empty(HQ, np.float32))
    assert prompt.closed
    with pytest.raises(ValueError, match="the prompt is closed"):
        prompt.blocks()
    with pytest.raises(keyhole.InvalidArgument, match="nosuch"):
        keyhole.Prompt(engine, "nosuch")
    assert error(keyhole.Prompt(engine).attend(0, q, k, v), truth) < ROUNDING  # short ones are exact


def test_merges_on_a_device_want_arrays_there():
    states, lse = random(37, 2, 4, D), random(38, 2, 4)
    with pytest.raises(keyhole.InvalidArgument, match="out lies in host memory"):
        keyhole.merge_states_device(states, lse, np.empty((4, D), np.float32), np.empty(4, np.float32))
    with pytest.raises(ValueError, match="base is 'ten'"):
        keyhole.merge_states_device(states, lse, None, None, base="ten")
    with pytest.raises(ValueError, match="out must be .*head_dim. with a row at least"):
        keyhole.merge_states_device(states, lse, np.empty((0, D), np.float32), np.empty(0, np.float32))
    with pytest.raises(ValueError, match="there must be one lse for each o"):
        keyhole.merge_states_device(states, lse[:1], np.empty((4, D), np.float32), np.empty(4, np.float32))


def test_queries_alone_append_nothing(engine):
    k, v, q = random(70, 120, HKV, D), random(71, 120, HKV, D), random(72, 9, HQ, D)
    session = exact(engine)
    session.append(0, k, v)
    lse = np.empty((9, HQ), np.float32)
    out = session.attend_queries(0, q, lse=lse)
    assert session.layer_tokens().total == 120
    for query in range(9):
        truth, truth_lse = attention(q[query : query + 1], k, v)
        assert error(out[query], truth[0]) < ROUNDING
        np.testing.assert_allclose(lse[query], truth_lse[0], atol=1e-4)


def turned(rows, positions, theta, interleaved):
    """RoPE of rows [n, heads, D] in double precision."""
    angles = np.asarray(positions)[:, None, None] * theta ** (-np.arange(D // 2) * 2 / D)
    low, high = (rows[..., 0::2], rows[..., 1::2]) if interleaved else (rows[..., : D // 2], rows[..., D // 2 :])
    cos, sin = np.cos(angles), np.sin(angles)
    pair = low * cos - high * sin, high * cos + low * sin
    return (np.stack(pair, -1).reshape(rows.shape) if interleaved else np.concatenate(pair, -1)).astype(np.float32)


@pytest.mark.parametrize("interleaved", [0, 1])
def test_a_context_shift_moves_tokens_up(interleaved):
    engine = keyhole.Engine(layers=1, q_heads=HQ, kv_heads=HKV, head_dim=D, kv_dtype="f32", threads=2, rope_theta=10000.0,
                            rope_interleaved=interleaved)  # fmt: skip
    assert engine.config.rope_interleaved == interleaved
    k, v, q = random(73, 300, HKV, D), random(74, 300, HKV, D), random(75, 1, HQ, D)
    session = exact(engine)
    session.append(0, turned(k, range(300), 10000.0, interleaved), v)
    session.remove(4, 100, -100)
    left = [*range(4), *range(104, 300)]
    asked = turned(q, [199], 10000.0, interleaved)
    truth, _ = attention(asked, turned(k[left], range(200), 10000.0, interleaved), v[left])
    assert error(session.attend(0, asked[0]), truth[0]) < 1e-4
    assert session.layer_tokens().total == 200


def test_memory_of_all_sessions():
    engine = keyhole.Engine(layers=LAYERS, q_heads=HQ, kv_heads=HKV, head_dim=D, kv_dtype="f32", threads=2)
    assert engine.memory().host_bytes == 0
    session = exact(engine)
    session.append(0, random(76, 2000, HKV, D), random(77, 2000, HKV, D))
    one = engine.memory()
    copy = session.fork()
    two = engine.memory()
    assert (one.sessions, two.sessions) == (1, 2)
    assert one.kv_bytes <= two.kv_bytes < 1.1 * one.kv_bytes
    assert two.host_bytes == two.kv_bytes + two.resident_bytes + two.index_bytes + two.work_bytes
    copy.close()
    assert engine.memory().host_bytes == one.host_bytes
