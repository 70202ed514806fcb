"""Arrays in the memory of a CUDA device, and streams, against attention in double precision. Needs PyTorch and a GPU."""

import gc
import os

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import keyhole  # noqa: E402
from truth import attention, error  # noqa: E402

if not keyhole.CUDA:
    pytest.skip("the extension was built without CUDA", allow_module_level=True)
if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

D, HQ, HKV, LAYERS = 128, 8, 2, 2
# K, V and answers are stored in fp16. Random rows have no heavy ones: codes answer them with an error of a fifth.
ROUNDING = 2e-3


@pytest.fixture(scope="module")
def engine():
    return keyhole.Engine(layers=LAYERS, q_heads=HQ, kv_heads=HKV, head_dim=D, kv_dtype="f16", device="cuda")


def random(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)


def on_device(array):
    return torch.from_numpy(array).to("cuda")


def run(session, q, k, v, prompt, stream):
    """Answers [n, Hq, d] to the tokens behind the prompt: steps, and extends of 7 tokens, of all layers in turn."""
    answers = [[] for _ in range(LAYERS)]
    with torch.cuda.stream(stream):
        for layer in range(LAYERS):
            session.append(layer, on_device(k[layer, :prompt]), on_device(v[layer, :prompt]), on_device(q[layer, :prompt]))
        session.build()
        at = prompt
        while at < q.shape[1]:
            n = 1 if (at - prompt) % 4 else min(7, q.shape[1] - at)
            for layer in range(LAYERS):
                rows = [on_device(array[layer, at : at + n]) for array in (q, k, v)]
                if n == 1:
                    answers[layer].append(session.attend(layer, *(array[0] for array in rows))[None])
                else:
                    answers[layer].append(session.extend(layer, *rows))
            at += n
        session.synchronize()
        return [torch.cat(of_layer).cpu().numpy() for of_layer in answers]


@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("mode, bound", [("exact", ROUNDING), ("indexed", 0.25)])
def test_steps_on_the_current_stream(engine, own_stream, mode, bound):
    tokens, prompt = 900, 850
    q, k, v = random(1, LAYERS, tokens, HQ, D), random(2, LAYERS, tokens, HKV, D), random(3, LAYERS, tokens, HKV, D)
    stream = torch.cuda.Stream() if own_stream else torch.cuda.default_stream()
    session = engine.session(mode=mode, sink=16, window=64, max_tokens=2048)
    found = run(session, q, k, v, prompt, stream)
    for layer in range(LAYERS):
        truth, _ = attention(q[layer], k[layer], v[layer])
        assert found[layer].dtype == np.float16
        assert error(found[layer], truth[prompt:]) < bound
    assert session.layer_tokens(1).total == tokens
    assert session.statistics().attends == LAYERS * (tokens - prompt)


def test_a_session_that_is_dropped_has_answered(engine):
    q, k, v = random(40, 3000, HQ, D), random(41, 3000, HKV, D), random(42, 3000, HKV, D)
    truth, _ = attention(q[-1:], k, v)
    session = engine.session(mode="exact", sink=16, window=64, max_tokens=4096)
    session.append(0, *(on_device(array[:-1]) for array in (k, v)))
    rows = [on_device(array[-1]) for array in (q, k, v)]
    torch.cuda._sleep(20_000_000)  # the step waits on the stream when the session goes
    out = session.attend(0, *rows)
    del session
    assert error(out.cpu().numpy(), truth[0]) < ROUNDING


def test_arrays_of_the_host_go_to_the_same_device(engine):
    k, v, q = random(4, 300, HKV, D), random(5, 300, HKV, D), random(6, 300, HQ, D)
    session = engine.session(mode="exact", sink=16, window=64, max_tokens=2048)
    session.append(0, k[:290], v[:290], q[:290])
    out = np.stack([session.attend(0, q[at], k[at], v[at]) for at in range(290, 300)])
    assert error(out, attention(q, k, v)[0][290:]) < ROUNDING


def test_a_batch_of_ragged_sequences(engine):
    lengths, sessions, truths, rows = [700, 333, 512], [], [], []
    for seed, tokens in enumerate(lengths):
        q, k, v = random(10 + seed, tokens, HQ, D), random(20 + seed, tokens, HKV, D), random(30 + seed, tokens, HKV, D)
        session = engine.session(mode="exact", sink=16, window=64, max_tokens=2048)
        session.append(0, *(on_device(array[:-3]) for array in (k, v)))
        sessions.append(session)
        truths.append(attention(q, k, v)[0][-3:])
        rows.append([on_device(array[-3:]) for array in (q, k, v)])
    q, k, v = (torch.cat(arrays) for arrays in zip(*rows))
    out = keyhole.extend_batch(sessions, 0, q, k, v, [0, 3, 6, 9])
    for session in sessions:
        session.synchronize()
    assert error(out.cpu().numpy(), np.concatenate(truths)) < ROUNDING


def test_wrong_tensors_are_refused(engine):
    session = engine.session(mode="exact", sink=16, window=64, max_tokens=2048)
    rows = on_device(random(7, 40, HKV, D))
    session.append(0, rows, rows)
    q = on_device(random(8, HQ, D))
    with pytest.raises(keyhole.InvalidArgument, match="q has dtype float64"):
        session.attend(0, q.double(), out=torch.empty(HQ, D, device="cuda"))
    with pytest.raises(keyhole.InvalidArgument, match="out"):
        session.attend(0, q, out=torch.empty(HQ, D, dtype=torch.float16))  # q on the device, the answer on the host
    host = keyhole.Engine(layers=1, q_heads=HQ, kv_heads=HKV, head_dim=D, kv_dtype="f16", device="host", threads=1)
    with pytest.raises(keyhole.Error, match="device"), host.session(mode="exact") as other:
        other.append(0, rows, rows)


def test_states_of_several_dtypes_are_not_merged(engine):
    states, lse = [on_device(random(10, 4, D)), on_device(random(11, 4, D))], [torch.zeros(4, device="cuda") for _ in range(3)]
    out = torch.empty(4, D, device="cuda")
    keyhole.merge_states_device(states, lse[:2], out, lse[2])  # out is float32, which may differ
    with pytest.raises(keyhole.InvalidArgument, match="the arrays of o differ in dtype"):
        keyhole.merge_states_device([states[0], states[1].float()], lse[:2], out, lse[2])
    with pytest.raises(keyhole.InvalidArgument, match="o.0. has 512 elements; 384 are needed"):
        keyhole.merge_states_device(states, lse[:2], out[:3], lse[2][:3])


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="other processes take memory of the device meanwhile")
def test_dropped_sessions_give_device_memory_back(engine):
    def use():
        session = engine.session(sink=16, window=64, max_tokens=2048)
        rows = on_device(random(9, 400, HKV, D))
        for layer in range(LAYERS):
            session.append(layer, rows, rows)
        session.build()
        session.attend(0, on_device(random(8, HQ, D)))
        session.synchronize()

    use()
    gc.collect()
    free = torch.cuda.mem_get_info()[0]
    for _ in range(40):
        use()
    gc.collect()
    assert torch.cuda.mem_get_info()[0] > free - (8 << 20)
