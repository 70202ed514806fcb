"""The attention as an operator of PyTorch: beside PyTorch's own, eager and compiled."""

import gc

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import keyhole  # noqa: E402
import keyhole.torch  # noqa: E402

HEADS, KV_HEADS, D = 4, 2, 64


def engine(**fields):
    return keyhole.Engine(layers=2, q_heads=HEADS, kv_heads=KV_HEADS, head_dim=D, kv_dtype="f32", device="host", threads=1, **fields)


def cache_of(batch=2, **fields):
    return keyhole.torch.Cache(engine(), batch=batch, **{"mode": "exact", "sink": 4, "window": 16, "max_tokens": 1024, **fields})


def states(*shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, D, generator=generator)


class Layers(torch.nn.Module):
    """Two layers of attention with projections; `attend` is asked for each."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        width = HEADS * D
        self.projections = torch.nn.ModuleList(torch.nn.Linear(width, width + 2 * KV_HEADS * D, bias=False) for _ in range(2))

    def forward(self, x, attend):
        for layer, projection in enumerate(self.projections):
            q, k, v = projection(x).split([HEADS * D, KV_HEADS * D, KV_HEADS * D], dim=-1)
            q, k, v = (one.unflatten(-1, (-1, D)).transpose(1, 2) for one in (q, k, v))
            x = x + attend(layer, q, k, v).transpose(1, 2).flatten(2)
        return x


class Model(torch.nn.Module):
    def __init__(self, cache):
        super().__init__()
        self.layers, self.cache = Layers(), cache

    def forward(self, x):
        return self.layers(x, lambda layer, q, k, v: keyhole.torch.attention(q, k, v, self.cache, layer))


class Truth:
    """The same layers with PyTorch's attention over all keys."""

    def __init__(self):
        self.layers, self.kept = Layers(), {}

    def attend(self, layer, q, k, v):
        old = self.kept.get(layer)
        k, v = (k, v) if old is None else (torch.cat([old[0], k], 2), torch.cat([old[1], v], 2))
        self.kept[layer] = k, v
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    def __call__(self, x):
        return self.layers(x, self.attend)


CHUNKS = (150, 1, 1, 5, 130, 1)  # a prompt, steps, a short turn, a long one


@pytest.mark.parametrize("how", ["eager", "aot_eager", "inductor"])
def test_a_module_says_what_it_says_with_pytorchs_attention(how):
    """Compiled with fullgraph=True: the operator is a node of the graph, and takes its tokens in once a call."""
    cache, truth = cache_of(), Truth()
    model = Model(cache)
    call = model if how == "eager" else torch.compile(model, backend=how, fullgraph=True)
    with torch.no_grad():
        for place, n in enumerate(CHUNKS):
            x = torch.randn(2, n, HEADS * D, generator=torch.Generator().manual_seed(place))
            assert torch.allclose(call(x), truth(x), atol=2e-4), (how, n)
    assert cache.lengths.tolist() == [[sum(CHUNKS)] * 2] * 2
    assert [session.layer_tokens(1).total for session in cache.sessions] == [sum(CHUNKS)] * 2


def sample(cache, n=3):
    q, k, v = states(2 * n, HEADS), states(2 * n, KV_HEADS, seed=2), states(2 * n, KV_HEADS, seed=3)
    return q, k, v, torch.tensor([0, n, 2 * n]), torch.zeros(2, 2, dtype=torch.int64), cache.handle, 0


def test_the_operator_is_as_pytorch_wants_operators():
    """Schema, fake tensors, autograd's registration, and tracing with dynamic shapes."""
    cache = cache_of()
    torch.library.opcheck(torch.ops.keyhole.attend.default, sample(cache))
    q, k, v, *others = sample(cache, 140)
    torch.library.opcheck(torch.ops.keyhole.attend.default, (q.half(), k, v.bfloat16(), *others))


def test_shapes_are_known_without_a_device():
    cache = cache_of()
    q, k, v, *others = sample(cache)
    out = torch.ops.keyhole.attend(q.to("meta"), k.to("meta"), v[..., :32].to("meta"), *others)
    assert out.shape == (6, HEADS, 32) and out.device.type == "meta" and cache.lengths.sum() == 0


def test_autocast_casts_as_for_pytorchs_attention():
    cache = cache_of(batch=1)
    q, k, v = states(1, HEADS, 5), states(1, KV_HEADS, 5, seed=2), states(1, KV_HEADS, 5, seed=3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        got = keyhole.torch.attention(q, k, v, cache, 0)
    assert got.dtype == expected.dtype == torch.bfloat16
    assert torch.allclose(got.float(), expected.float(), atol=3e-2)


def test_there_is_no_gradient():
    cache = cache_of(batch=1)
    q = states(1, HEADS, 2).requires_grad_()
    out = keyhole.torch.attention(q, states(1, KV_HEADS, 2), states(1, KV_HEADS, 2), cache, 0)
    with pytest.raises(RuntimeError, match="keyhole.*attend"):
        out.sum().backward()


def test_rows_of_different_lengths_drafts_and_beams():
    cache = cache_of()
    truth = [Truth(), Truth()]

    def step(rows, seed):
        """New tokens of each row, in layer 0: what comes out, beside the truth."""
        q, k, v = states(sum(rows), HEADS, seed=seed), states(sum(rows), KV_HEADS, seed=seed + 1), states(sum(rows), KV_HEADS, seed=seed + 2)
        start = torch.tensor([0, *rows]).cumsum(0)
        got = torch.ops.keyhole.attend(q, k, v, start, cache.lengths, cache.handle, 0)
        for row, own in enumerate(truth):
            part = slice(int(start[row]), int(start[row + 1]))
            if rows[row]:
                expected = own.attend(0, *(one[part].transpose(0, 1)[None] for one in (q, k, v)))[0].transpose(0, 1)
                assert torch.allclose(got[part], expected, atol=2e-4), (rows, row)

    step([40, 7], 10)
    step([1, 1], 20)
    step([0, 2], 30)
    assert cache.lengths[0].tolist() == [41, 10]
    before = [dict(own.kept) for own in truth]
    step([4, 4], 40)  # drafts
    cache.truncate([41, 10])
    for own, kept in zip(truth, before):
        own.kept = kept
    step([2, 3], 50)
    cache.select([1, 1])
    truth[0].kept = dict(truth[1].kept)
    step([1, 1], 60)  # rows that were one go their ways
    step([1, 5], 70)
    assert cache.lengths[0].tolist() == [15, 19]


def test_prompts_are_indexed_before_the_next_step():
    cache = cache_of(batch=1, mode="indexed", index="ivf", flush_block=16)
    keyhole.torch.attention(states(1, HEADS, 400), states(1, KV_HEADS, 400, seed=2), states(1, KV_HEADS, 400, seed=3), cache, 0)
    assert cache.sessions[0].layer_tokens(0).indexed == 0
    keyhole.torch.attention(states(1, HEADS, 1), states(1, KV_HEADS, 1), states(1, KV_HEADS, 1), cache, 0)
    assert cache.sessions[0].layer_tokens(0).indexed > 300


def test_a_row_that_fails_takes_no_other_with_it():
    """A NaN in one row: the error names it, and the same tokens again without it are as if nothing had been."""
    cache, truth = cache_of(), [Truth(), Truth()]
    q, k, v, start, _, handle, layer = sample(cache)
    call = torch.ops.keyhole.attend
    bad = k.clone()
    bad[4, 1, 7] = float("nan")  # of row 1
    for _ in range(2):
        with pytest.raises(keyhole.BatchError, match="session 1") as raised:
            call(q, bad, v, start, cache.lengths, handle, layer)
        assert raised.value.errors[0] is None and isinstance(raised.value.errors[1], keyhole.NotFinite)
        assert cache.lengths.sum() == 0
    for _ in range(2):
        got = call(q, k, v, start, cache.lengths, handle, layer)
        for row, own in enumerate(truth):
            expected = own.attend(0, *(one[3 * row : 3 * row + 3].transpose(0, 1)[None] for one in (q, k, v)))[0].transpose(0, 1)
            assert torch.allclose(got[3 * row : 3 * row + 3], expected, atol=2e-4), row
    assert cache.lengths.tolist() == [[6, 6], [0, 0]]
    assert [session.layer_tokens(0).total for session in cache.sessions] == [6, 6]


def test_what_is_wrong_is_said():
    cache = cache_of()
    q, k, v, start, lengths, handle, layer = sample(cache)
    call = torch.ops.keyhole.attend
    with pytest.raises(keyhole.InvalidArgument, match=r"query_start is \[0, 3, 5\]; 3 rising numbers from 0 to 6"):
        call(q, k, v, torch.tensor([0, 3, 5]), lengths, handle, layer)
    with pytest.raises(keyhole.InvalidArgument, match="layer 2, lengths"):
        call(q, k, v, start, lengths, handle, 2)
    with pytest.raises(keyhole.InvalidArgument, match="lengths says 9 tokens of row 0, layer 0; its session has 0"):
        call(q, k, v, start, lengths + 9, handle, layer)
    with pytest.raises(keyhole.InvalidArgument, match="truncate.. of 1 rows; the cache has 2"):
        cache.truncate([3])
    with pytest.raises(keyhole.NotFinite):
        call(q, k * float("nan"), v, start, lengths, handle, layer)
    assert lengths.sum() == 0
    call(q, k, v, start, lengths, handle, layer)
    del cache
    gc.collect()
    with pytest.raises(keyhole.InvalidArgument, match=f"handle {handle}"):
        call(q, k, v, start, lengths, handle, layer)
