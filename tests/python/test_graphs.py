"""Steps of models as CUDA graphs: the same tokens, from launches alone.

On a GPU (KEYHOLE_TEST_DEVICE=cuda) graphs are CUDA's. On the host what is recorded is made again at each launch, and a recording
is taken back as if it had not happened, so that all but the capture itself is tested.
"""

import contextlib
import inspect
import logging
import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", minversion="4.57", reason="transformers 4.57 is not installed")

import keyhole  # noqa: E402
import keyhole.transformers  # noqa: E402
from keyhole.transformers import _enable, _graphs  # noqa: E402
from keyhole.transformers._compiled import Compiled  # noqa: E402
from tiny_models import DEVICE, EXACT, FAMILIES, batch, greedy, make  # noqa: E402

ON_CUDA = DEVICE.startswith("cuda")
# Models without experts: the products of those wait for the device in some versions of transformers.
DENSE = [name for name in ("llama", "qwen3", "gemma2", "gemma3", "gemma4", "phi3", "olmo3", "qwen3_5", "lfm2") if name in FAMILIES]


class Recording:
    def __init__(self, run, output):
        self.run, self.output = run, output

    def replay(self):
        for name, value in self.run().items():
            if isinstance(value, torch.Tensor):
                self.output[name].copy_(value)


class Recorder:
    """What keyhole.transformers._graphs.Recorder is on a GPU."""

    def __init__(self):
        self.model, self.waits, self.fails, self.refusals, self.announced = None, [], lambda inputs: False, 0, []

    turn = staticmethod(contextlib.nullcontext)

    @contextlib.contextmanager
    def watch(self, found):
        yield
        found += self.waits

    def record(self, sessions, run):
        cache = self.model._keyhole.graphs.begun
        if self.fails(cache._forward.n):
            raise RuntimeError("operation not permitted when stream is capturing")
        tokens = [session.layer_tokens(0).total for session in sessions]
        states = cache._states.copy()
        output = run()
        cache._states.put(states)
        for session, before in zip(sessions, tokens):
            session.truncate(before)
        # A launch fills the tensors of the output.
        return Recording(run, {name: value for name, value in output.items() if isinstance(value, torch.Tensor)}), 7, output

    def announce(self, sessions, number):
        if self.refusals:
            self.refusals -= 1
            raise keyhole.InvalidArgument("the session has changed since the graph was captured: capture it again")
        self.announced.append(number)


def graphed(model, compile=False, **options):
    """Enabled, with graphs; what records them. compile: a backend of torch.compile; on a GPU its own."""
    if ON_CUDA:
        keyhole.transformers.enable(model, graphs=True, compile=bool(compile), **{**EXACT, **options})
        return model._keyhole.graphs, model._keyhole.graphs.recorder
    keyhole.transformers.enable(model, **{**EXACT, **options})
    recorder = Recorder()
    recorder.model = model
    compiled = Compiled(model._keyhole.decoder, backend=compile) if compile else None
    return _enable.use_graphs(model, recorder, compiled), recorder


on_host = pytest.mark.skipif(ON_CUDA, reason="what is recorded is CUDA's own")


@pytest.mark.parametrize("family", DENSE)
def test_greedy_tokens_are_the_same(family):
    model, inputs = make(family), batch(90)
    expected = greedy(inputs, 40)(model)
    graphs, _ = graphed(model)
    assert torch.equal(expected, greedy(inputs, 40)(model))
    # The prompt, a step that is watched, and then one graph.
    assert graphs.captures == 1 and graphs.replays >= 37, (graphs.captures, graphs.replays)


def test_sampled_tokens_are_the_same():
    def sample(model):
        torch.manual_seed(11)
        return model.generate(**batch(50), do_sample=True, top_k=20, max_new_tokens=32)

    model = make("llama")
    expected = sample(model)
    graphs, _ = graphed(model)
    assert torch.equal(expected, sample(model)) and graphs.replays > 20


@pytest.mark.parametrize("family", [name for name in ("llama", "gemma3", "qwen3_5") if name in FAMILIES])
def test_drafts_have_graphs_of_their_own(family):
    """Of each number of tokens one; drafts that are not accepted are taken back."""
    model, assistant, inputs = make(family), make(family), batch(75)
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter += 0.01 * torch.randn_like(parameter) * parameter.std().nan_to_num(0.0)
    expected = greedy(inputs)(model)
    of_assistant, _ = graphed(assistant)
    graphs, _ = graphed(model)
    got = greedy(inputs, assistant_model=assistant)(model)
    assert torch.equal(expected, got[:, : expected.shape[1]])
    assert of_assistant.replays > 0
    before = graphs.replays
    found = greedy(inputs, prompt_lookup_num_tokens=4, return_dict_in_generate=True)(model)
    assert torch.equal(expected, found.sequences[:, : expected.shape[1]])
    cache = found.past_key_values
    assert graphs.replays > before and len({key[0][1] for key in cache.steps}) > 1, [key for key in cache.steps]


def test_turns_and_crops_on_one_cache():
    model, first, second = make("gemma3"), batch(60), batch(9, seed=6)
    with torch.no_grad():
        straight = transformers.DynamicCache(config=model.config)
        expected = greedy(first, 20, past_key_values=straight)(model)
        ids = torch.cat([expected, second["input_ids"]], dim=1)
        wanted = greedy({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, 30, past_key_values=straight)(model)
        graphs, _ = graphed(model)
        cache = keyhole.transformers.KeyholeCache(model)
        assert torch.equal(expected, greedy(first, 20, past_key_values=cache)(model))
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        assert torch.equal(wanted, greedy(inputs, 30, past_key_values=cache)(model))
        assert graphs.captures == 1  # the second turn goes on with the first one's graph
        cache.crop(-30)
        assert cache.get_seq_length() == wanted.shape[1] - 31
        logits = [model(wanted[:, place : place + 1], past_key_values=cache).logits for place in range(wanted.shape[1] - 31, wanted.shape[1])]
        said = torch.cat([one.argmax(-1) for one in logits], dim=1)  # each output keeps its own logits
        assert torch.equal(said[:, :-1], wanted[:, -30:])


def test_outputs_and_positions_are_those_of_the_call():
    """Without a mask, without positions, under inference_mode and no_grad in turn."""
    model, ids = make("qwen3"), batch(60)["input_ids"]
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    graphs, _ = graphed(model)
    cache = keyhole.transformers.KeyholeCache(model)
    with torch.no_grad():
        model(ids[:, :40], past_key_values=cache)
    for place in range(40, 56):
        with torch.inference_mode(place % 3 == 0), torch.no_grad():
            n = {"attention_mask": torch.ones_like(ids[:, : place + 1])} if place % 2 else {}
            output = model(input_ids=ids[:, place : place + 1], past_key_values=cache, **n)
        assert type(output).__name__ == "CausalLMOutputWithPast"
        assert (getattr(output, "cache", None) or output.past_key_values) is cache
        assert torch.allclose(output.logits[:, 0], expected[:, place], atol=2e-3 * float(expected.std()), rtol=0), place
    assert graphs.replays >= 13 and cache._ids.shape[1] == 56
    assert cache.rows[0].layer_tokens(0).total == cache.get_seq_length() == 56


@pytest.mark.parametrize("kind", ["beams", "batch", "waits", "gradients"])
def test_what_is_no_graph_goes_on_and_says_why_once(kind, caplog):
    model, inputs = make("llama"), batch(70, 52) if kind == "batch" else batch(70)
    options = {"num_beams": 3} if kind == "beams" else {}
    text = {"beams": "", "batch": "a batch of 2 rows", "waits": "waits for the device", "gradients": "gradients are on"}[kind]

    def call(model):
        if kind == "gradients":
            output = model(inputs["input_ids"])
            cache = output.past_key_values
            return torch.cat([model(torch.tensor([[token]], device=DEVICE), past_key_values=cache).logits for token in (4, 5, 6)], dim=1).argmax(-1)
        return greedy(inputs, 12, **options)(model)

    expected = call(model)
    graphs, recorder = graphed(model)
    if kind == "waits" and ON_CUDA:
        model.model.norm.register_forward_pre_hook(lambda _, args: args[0].sum().item() and None)
    elif kind == "waits":
        recorder.waits = ["model.py:7 waits for the device"]
    with caplog.at_level(logging.WARNING, "keyhole"):
        assert torch.equal(expected, call(model)) and torch.equal(expected, call(model))
    told = [record.getMessage() for record in caplog.records if "no CUDA graphs" in record.getMessage()]
    assert graphs.replays == 0 and len(told) == len(set(told)) and any(text in one for one in told), told


def test_a_session_that_has_changed_is_captured_again():
    model, ids = make("llama"), batch(90)["input_ids"]
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        graphs, recorder = graphed(model)
        cache = keyhole.transformers.KeyholeCache(model)
        model(ids[:, :40], past_key_values=cache)
        for place in range(40, 60):
            if place in (45, 52):
                if ON_CUDA:
                    cache.rows[0].set_mode("exact" if place == 52 else "indexed")
                else:
                    recorder.refusals = 1
            got = model(ids[:, place : place + 1], past_key_values=cache).logits
            if not ON_CUDA or not 45 <= place < 52:
                assert torch.allclose(got[:, 0], expected[:, place], atol=2e-3 * float(expected.std()), rtol=0), place
    assert graphs.captures == 3 and graphs.replays == 20 - 1 - 2


@on_host
def test_captures_that_fail_are_tried_three_times(caplog):
    """For each kind of pass; the others have their graphs."""
    model, ids = make("llama"), batch(90)["input_ids"]
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        graphs, recorder = graphed(model)
        recorder.fails = lambda tokens: tokens == 1
        cache = keyhole.transformers.KeyholeCache(model)
        model(ids[:, :40], past_key_values=cache)
        with caplog.at_level(logging.WARNING, "keyhole"):
            for place in range(40, 90, 5):
                one = model(ids[:, place : place + 1], past_key_values=cache).logits
                several = model(ids[:, place + 1 : place + 5], past_key_values=cache).logits
                got = torch.cat([one, several], dim=1)
                assert torch.allclose(got[0], expected[0, place : place + 5], atol=2e-3 * float(expected.std()), rtol=0), place
        assert graphs.captures == 1 and graphs.replays == 9
        assert [record.getMessage() for record in caplog.records if "capture failed" in record.getMessage()] == [
            "steps are no CUDA graphs: a capture failed: operation not permitted when stream is capturing"
        ]
        # Not in the next cache either; before its last try a capture that does not fail ends the count.
        for failures, captures in ((_graphs.TRIES, 1), (_graphs.TRIES - 1, 2)):
            (kind,) = [key for key in graphs._failed]
            graphs._failed[kind], recorder.fails = failures, lambda tokens: False
            cache = keyhole.transformers.KeyholeCache(model)
            model(ids[:, :40], past_key_values=cache)
            for place in range(40, 46):
                model(ids[:, place : place + 1], past_key_values=cache)
            assert graphs.captures == captures and bool(graphs._failed) == (captures == 1)


@on_host
def test_a_session_that_refuses_every_graph_is_asked_more_and_more_seldom(caplog):
    model, ids = make("llama"), batch(250)["input_ids"]
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        graphs, recorder = graphed(model)
        recorder.refusals = 2
        cache = keyhole.transformers.KeyholeCache(model)
        model(ids[:, :100], past_key_values=cache)
        with caplog.at_level(logging.WARNING, "keyhole"):
            for place in range(100, 250):
                got = model(ids[:, place : place + 1], past_key_values=cache).logits
                assert torch.allclose(got[:, 0], expected[:, place], atol=2e-3 * float(expected.std()), rtol=0), place
    # One pass is seen, two graphs are refused, 64 passes go without, and then all is well.
    assert graphs.captures == 3 and graphs.replays == 150 - 1 - 2 - 64 and "captured twice" in caplog.text


@on_host
def test_what_a_graph_is_for():
    ids = torch.ones(1, 1, dtype=torch.long)

    def key(tensor=ids, keep=1, training=False):
        return _graphs.Call(None, {"input_ids": tensor}, {"logits_to_keep": keep}, None, training).key

    kinds = [key(), key(ids.int()), key(ids.to("meta")), key(ids.expand(1, 2)), key(keep=True), key(keep=1.0), key(keep=2), key(training=True)]
    assert key() == key(ids + 4) and len(set(kinds)) == len(kinds)


@on_host
@pytest.mark.parametrize("family", [name for name in ("qwen3_5", "lfm2") if name in FAMILIES])
def test_launches_copy_no_states_and_failures_put_them_back(family):
    model, ids = make(family), batch(90)["input_ids"]
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        graphs, recorder = graphed(model)
        cache = keyhole.transformers.KeyholeCache(model)
        model(ids[:, :40], past_key_values=cache)
        copies, broken = [], [False]
        cache._states.copy_to = lambda memory, own=cache._states.copy_to: copies.append(1) or own(memory)
        model.model.layers[-1].register_forward_hook(lambda *_: 1 / 0 if broken[0] else None)
        for place in range(40, 60):
            if place == 50:  # the session refuses the launch, and the step fails behind layers that have gone on
                recorder.refusals, broken[0] = 1, True
                with pytest.raises(ZeroDivisionError):
                    model(ids[:, place : place + 1], past_key_values=cache)
                broken[0] = False
                assert cache.get_seq_length() == 50
            got = model(ids[:, place : place + 1], past_key_values=cache).logits
            assert torch.allclose(got[:, 0], expected[:, place], atol=2e-3 * float(expected.std()), rtol=0), place
    assert len(copies) == 1 and graphs.replays == 19, (copies, graphs.replays)  # the first pass had a copy that is kept


@pytest.mark.parametrize("family", [name for name in (("llama",) if ON_CUDA else ("llama", "qwen3_5")) if name in FAMILIES])
def test_compiled_layers_say_the_same(family):
    more = {"num_hidden_layers": 8} if family == "llama" else {"num_hidden_layers": 6, "layer_types": ["linear_attention"] * 5 + ["full_attention"]}
    model, inputs = make(family, **more), batch(90)
    expected = greedy(inputs, 40)(model)
    graphs, _ = graphed(model, compile="eager")
    torch._dynamo.reset()
    assert torch.equal(expected, greedy(inputs, 40)(model))
    # Layers that are alike are compiled once, and again for another number, and in a few pieces each; a later sequence compiles nothing.
    made, replays = graphs.compiled.count, graphs.replays
    assert 0 < made <= 10 * (1 if family == "llama" else 2) and graphs.captures == 1 and replays >= 32, (made, graphs.captures, replays)
    assert torch.equal(expected, greedy(inputs, 40)(model))
    assert graphs.compiled.count == made and graphs.replays >= replays + 36
    assert not any("forward" in vars(layer) for layer in model.model.layers)


@on_host
@pytest.mark.parametrize("family", [name for name in ("llama", "qwen3_5") if name in FAMILIES])
def test_a_compiler_that_fails_leaves_layers_as_they_were(family, caplog):
    def no_compiler(graph, inputs):
        if len(seen) > 1:
            raise OSError("there is no C compiler")
        seen.append(graph)
        return graph.forward

    model, inputs, seen = make(family), batch(70), []
    expected = greedy(inputs, 24)(model)
    graphs, _ = graphed(model, compile=no_compiler)
    torch._dynamo.reset()
    with caplog.at_level(logging.WARNING, "keyhole"):
        assert torch.equal(expected, greedy(inputs, 24)(model)) and torch.equal(expected, greedy(inputs, 24)(model))
    told = [record.getMessage() for record in caplog.records if "there is no C compiler" in record.getMessage()]
    assert graphs.replays >= 40 and len(told) == 1 and told[0].startswith("layers are as they were"), (graphs.replays, told)


@on_host
def test_a_model_that_asks_for_the_length_is_not_captured(caplog):
    model, inputs = make("llama"), batch(70)
    expected = greedy(inputs, 12)(model)
    graphs, _ = graphed(model)
    model.model.layers[0].register_forward_pre_hook(lambda _, args, kwargs: _asks(kwargs), with_kwargs=True)
    with caplog.at_level(logging.WARNING, "keyhole"):
        assert torch.equal(expected, greedy(inputs, 12)(model))
    assert graphs.replays == 0 and "asks for the length of the cache" in caplog.text


def _asks(kwargs):
    (kwargs.get("cache") or kwargs.get("past_key_values")).get_seq_length()


def test_more_tokens_than_there_is_room_for():
    model, ids = make("llama"), batch(90)["input_ids"]
    graphs, _ = graphed(model)
    cache = keyhole.transformers.KeyholeCache(model, max_tokens=50)
    with torch.no_grad():
        model(ids[:, :40], past_key_values=cache)
        for place in range(40, 50):
            model(ids[:, place : place + 1], past_key_values=cache)
        for _ in range(2):
            with pytest.raises(keyhole.Error, match="max_tokens"):
                model(ids[:, 50:51], past_key_values=cache)
            assert cache.get_seq_length() == cache.rows[0].layer_tokens(2).total == 50
    assert graphs.replays >= 8


def test_a_dropped_cache_leaves_nothing_and_the_model_its_signature():
    import gc
    import weakref

    model = make("llama")
    before = inspect.signature(model.forward)
    forward = model.forward
    graphs, _ = graphed(model)
    assert inspect.signature(model.forward) == before
    gc.collect()
    gc.disable()
    try:
        output = greedy(batch(50), 8, return_dict_in_generate=True)(model)
        session = weakref.ref(output.past_key_values.rows[0])
        assert graphs.replays > 3 and session() is not None
        del output
        if ON_CUDA:  # on the host a recording knows its pass
            assert session() is None
    finally:
        gc.enable()
    keyhole.transformers.disable(model)
    assert model.forward == forward and "forward" not in vars(model)


@on_host
def test_graphs_need_a_device():
    with pytest.raises(keyhole.Unsupported, match="graphs=True needs a model on a CUDA device; this one is on cpu"):
        keyhole.transformers.enable(make("llama"), graphs=True)
    with pytest.raises(keyhole.Unsupported, match="compile=True is of steps that are graphs"):
        keyhole.transformers.enable(make("llama"), compile=True)


@pytest.mark.skipif(not ON_CUDA, reason="codes of a device")
def test_codes_say_the_same_in_a_graph():
    """The default index in bf16: launches beside single calls of the same library."""
    model, inputs = make("llama", max_position_embeddings=8192).to(torch.bfloat16), batch(3000)
    small = {"sink": 16, "window": 256, "max_tokens": 8192}
    keyhole.transformers.enable(model, **small)
    expected = greedy(inputs, 48)(model)
    drafted = greedy(inputs, 48, prompt_lookup_num_tokens=3)(model)
    enabled = keyhole.transformers.enable(model, graphs=True, **small)
    assert torch.equal(expected, greedy(inputs, 48)(model))
    assert enabled.graphs.replays >= 45
    assert torch.equal(drafted, greedy(inputs, 48, prompt_lookup_num_tokens=3)(model))
