"""Models of transformers with Keyhole beside the same models without: the same tokens, whatever generate() is asked to do.

KEYHOLE_TEST_DEVICE (cpu, or cuda) says where models and their tensors lie.
"""

import json
import os
import threading

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", minversion="4.57", reason="transformers 4.57 is not installed")

import keyhole  # noqa: E402
import keyhole.transformers  # noqa: E402
from tiny_models import DEVICE, EXACT, FAMILIES, HYBRIDS, SHARERS, batch, both, greedy, make  # noqa: E402

@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_batches_have_the_same_tokens(family):
    expected, got, _ = both(make(family), greedy(batch(90, 35, 61)))
    assert torch.equal(expected, got)
    assert len(set(expected[0, 90:].tolist())) > 4  # no model that says one thing again and again


@pytest.mark.parametrize("family, wrong", [("llama", "scale"), ("gemma2", "window"), ("gemma2", "softcap"), ("gemma3", "window"),
                                           ("mistral", "window"), ("qwen2", "window"), ("gpt_oss", "sinks"), ("olmo3", "window"),
                                           ("olmo2", "scale"), ("granite", "scale"), ("cohere2", "window"), ("exaone4", "window"),
                                           ("gemma4", "window"), ("qwen3_next", "scale"), ("qwen3_5", "scale")])  # fmt: skip
def test_these_models_would_show_a_wrong_config(family, wrong, monkeypatch):
    if family not in FAMILIES:
        pytest.skip(f"this version of transformers has no {family}")
    from keyhole.transformers import _enable

    right = _enable.engine_config

    def mistaken(*args):
        config = right(*args)
        for layer in config.layer_configs:
            layer.scale *= 1.1 if wrong == "scale" else 1.0
            layer.window = 0 if wrong == "window" else layer.window
            layer.softcap = 0.0 if wrong == "softcap" else layer.softcap
        config.sink_logits = None if wrong == "sinks" else config.sink_logits
        return config

    monkeypatch.setattr(_enable, "engine_config", mistaken)
    expected, got, _ = both(make(family), greedy(batch(90, 35, 61)))
    assert not torch.equal(expected, got)


@pytest.mark.parametrize("family", FAMILIES)
def test_long_prompts_have_the_same_tokens_and_logits(family):
    """Longer than what counts as a prompt, so that PyTorch attends it, in blocks where there are windows, caps or sinks."""
    inputs = batch(300, 170)
    expected, got, _ = both(make(family), greedy(inputs, 24))
    assert torch.equal(expected, got)

    def logits(model):
        with torch.no_grad():
            return model(**inputs).logits[inputs["attention_mask"].bool()]

    expected, got, _ = both(make(family), logits)
    assert torch.allclose(expected, got, atol=2e-3 * float(expected.detach().std()), rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("more", [9, 150])
def test_two_turns_on_one_cache(family, more):
    first, second = batch(60, 44), batch(more, more, seed=6)

    def turns(model):
        if hasattr(model, "_keyhole"):
            cache = keyhole.transformers.KeyholeCache(model)
        else:
            cache = transformers.DynamicCache(config=model.config)
        answer = greedy(first, 20, past_key_values=cache)(model)
        ids = torch.cat([answer, second["input_ids"]], dim=1)
        mask = torch.cat([first["attention_mask"], torch.ones(2, 20 + more, dtype=torch.long, device=DEVICE)], dim=1)
        return greedy({"input_ids": ids, "attention_mask": mask}, 30, past_key_values=cache)(model)

    expected, got, _ = both(make(family), turns)
    assert torch.equal(expected, got)


@pytest.mark.parametrize("family", FAMILIES)
def test_beams_have_the_same_sequences(family):
    expected, got, _ = both(make(family), greedy(batch(70, 52), 24, num_beams=4, num_return_sequences=2))
    assert torch.equal(expected, got)


@pytest.mark.parametrize("family", FAMILIES)
def test_assisted_generation_has_the_same_tokens(family):
    model, assistant = make(family), make(family)
    # An assistant that is often right and sometimes wrong: its drafts are accepted in part.
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter += 0.01 * torch.randn_like(parameter) * parameter.std().nan_to_num(0.0)
    inputs = batch(75)
    expected = greedy(inputs)(model)
    for one in (model, assistant):
        keyhole.transformers.enable(one, **EXACT)
    assert torch.equal(expected, greedy(inputs, assistant_model=assistant)(model))
    found = greedy(inputs, prompt_lookup_num_tokens=6)(model)
    assert torch.equal(expected, found[:, : expected.shape[1]])  # before transformers 5 one more than asked for, at times


def test_sampling_has_the_same_tokens():
    def sample(model):
        torch.manual_seed(11)
        return model.generate(**batch(50, 30), do_sample=True, top_k=20, max_new_tokens=32, num_return_sequences=2)

    expected, got, _ = both(make("llama"), sample)
    assert torch.equal(expected, got)


def test_return_sequences_share_the_prompt():
    model = make("llama")
    enabled = keyhole.transformers.enable(model, index="ivf", sink=4, window=16, max_tokens=1024)
    builds = []
    build = enabled.build
    enabled.build = lambda session: (builds.append(session), build(session))
    torch.manual_seed(3)
    output = model.generate(**batch(400), do_sample=True, max_new_tokens=8, num_return_sequences=3, return_dict_in_generate=True)
    cache = output.past_key_values
    assert len(builds) == 1 and len(cache.rows) == 3
    figures = cache.statistics()
    assert sum(one.shared_bytes for one in figures) > 0.5 * figures[0].host_bytes
    # Two rows of one prompt, and another prompt: two sessions until they differ.
    with torch.no_grad():
        inputs = batch(200, 200)
        ids = inputs["input_ids"][[0, 0, 1]]
        cache = model(ids, attention_mask=torch.ones_like(ids)).past_key_values
        assert len(cache.sessions) == 2
        model(torch.tensor([[5], [6], [5]], device=DEVICE), past_key_values=cache)
        assert len(cache.sessions) == 3
        tokens = [session.layer_tokens().total for session in cache.rows]
    assert tokens == [201, 201, 201]


def test_chunked_prompts_and_forward_passes_without_a_cache():
    inputs = batch(260)
    expected, got, _ = both(make("llama"), greedy(inputs, 16, prefill_chunk_size=100))
    assert torch.equal(expected, got)
    for family in ("llama", "gemma2", "gpt_oss"):

        def scores(model):
            return model(**batch(60, 33), use_cache=False).logits[batch(60, 33)["attention_mask"].bool()]

        expected, got, _ = both(make(family), scores)
        assert torch.allclose(expected, got, atol=2e-3 * float(expected.detach().std()), rtol=0)
        got.sum().backward()  # training goes through PyTorch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """Logits near those of sdpa: both round in the same places but one."""
    model = make("qwen3").to(dtype)
    inputs = batch(140)

    def logits(model):
        with torch.no_grad():
            cache = model(**inputs).past_key_values
            step = {"input_ids": torch.tensor([[9]], device=DEVICE), "attention_mask": torch.ones(1, 141, device=DEVICE), "past_key_values": cache}
            return model(**step).logits.float()

    expected, got, _ = both(model, logits)
    assert torch.allclose(expected, got, atol=0.1 * float(expected.std()), rtol=0)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name in ("gemma3", *SHARERS, *HYBRIDS)])
def test_a_saved_cache_goes_on(family, tmp_path):
    model, first = make(family), batch(60, 41)
    expected = greedy(first, 40)(model)
    keyhole.transformers.enable(model, **EXACT)
    cache = keyhole.transformers.KeyholeCache(model)
    answer = greedy(first, 20, past_key_values=cache)(model)
    cache.save(tmp_path / "saved")
    loaded = keyhole.transformers.KeyholeCache.load(model, tmp_path / "saved")
    assert loaded.get_seq_length() == cache.get_seq_length() == 79
    mask = torch.cat([first["attention_mask"], torch.ones(2, 20, dtype=torch.long, device=DEVICE)], dim=1)
    again = greedy({"input_ids": answer, "attention_mask": mask}, 20, past_key_values=loaded)(model)
    assert torch.equal(expected, again)
    other = make("llama")
    keyhole.transformers.enable(other, **EXACT)
    with pytest.raises(keyhole.InvalidArgument):
        keyhole.transformers.KeyholeCache.load(other, tmp_path / "saved")


@pytest.mark.parametrize("family", [name for name in FAMILIES if name in ("llama", *HYBRIDS)])
def test_a_cache_of_transformers_is_taken_over(family):
    model, ids = make(family), batch(90, 90)["input_ids"]
    expected = greedy({"input_ids": ids}, 20)(model)
    with torch.no_grad():
        before = model(ids[:, :60]).past_key_values
    keyhole.transformers.enable(model, **EXACT)
    cache = keyhole.transformers.KeyholeCache.from_cache(model, before)
    assert torch.equal(expected, greedy({"input_ids": ids}, 20, past_key_values=cache)(model))


def test_what_is_not_supported_is_refused_by_name():
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=1, n_embd=64, vocab_size=10))
    with pytest.raises(keyhole.Unsupported, match="layer 0, GPT2Attention does not say 'num_key_value_heads'"):
        keyhole.transformers.enable(gpt2)
    narrow = make("llama", head_dim=32)
    with pytest.raises(keyhole.InvalidArgument, match="head_dim is 32"):
        keyhole.transformers.enable(narrow)
    scattered = make("llama")
    scattered.lm_head.to("meta")
    with pytest.raises(keyhole.Unsupported, match=f"several devices .* {DEVICE}.*, meta"):
        keyhole.transformers.enable(scattered)
    model = make("llama")
    with pytest.raises(TypeError, match="colour"):
        keyhole.transformers.enable(model, colour=1)
    with pytest.raises(keyhole.InvalidArgument, match="unknown index type 'foo'"):
        keyhole.transformers.enable(model, index="foo")
    with pytest.raises(keyhole.InvalidArgument, match="is not enabled"):
        keyhole.transformers.KeyholeCache(model)
    assert torch.equal(greedy(batch(20), 3)(model)[:, :20], batch(20)["input_ids"])  # still as it was

    keyhole.transformers.enable(model, **EXACT)
    inputs = batch(20)
    with pytest.raises(keyhole.Unsupported, match="cache_implementation='static'"):
        model.generate(**inputs, cache_implementation="static")
    with pytest.raises(keyhole.Unsupported, match="cache_implementation='static'"):
        model.generate(**inputs, generation_config=transformers.GenerationConfig(cache_implementation="static"))
    static = transformers.StaticCache(config=model.config, max_cache_len=64)
    with torch.no_grad(), pytest.raises(keyhole.Unsupported, match="the cache is a StaticCache"):
        model(inputs["input_ids"], past_key_values=static)
    with pytest.raises(keyhole.Unsupported, match="the cache is a StaticCache"):
        model.generate(**inputs, past_key_values=static, max_new_tokens=2)
    with pytest.raises(keyhole.Unsupported, match="call enable\\(\\) with the model itself"):
        keyhole.transformers.enable(torch.compile(make("llama"), backend="eager"))
    with pytest.raises(keyhole.Unsupported, match="output_attentions"):
        model(**inputs, output_attentions=True)
    with pytest.raises(keyhole.Unsupported, match="DynamicCache"):
        used = transformers.DynamicCache(config=model.config)
        used.update(torch.zeros(1, 2, 3, 64, device=DEVICE), torch.zeros(1, 2, 3, 64, device=DEVICE), 0)
        model(torch.tensor([[4]], device=DEVICE), past_key_values=used)
    with torch.no_grad(), pytest.raises(keyhole.Unsupported, match="attention masks"):
        model(inputs["input_ids"], attention_mask=torch.ones(1, 1, 20, 20, dtype=torch.bool, device=DEVICE))
    cache = keyhole.transformers.KeyholeCache(model)
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
        with pytest.raises(keyhole.InvalidArgument, match="a batch of 2 rows; the cache has 1"):
            model(torch.ones(2, 1, dtype=torch.long, device=DEVICE), past_key_values=cache)
        with pytest.raises(keyhole.InvalidArgument, match="attention_mask is"):
            model(torch.tensor([[4]], device=DEVICE), attention_mask=torch.ones(1, 5, device=DEVICE), past_key_values=cache)
        hidden = torch.ones(1, 21, device=DEVICE)
        hidden[0, 3] = 0
        with pytest.raises(keyhole.Unsupported, match="something else"):
            model(torch.tensor([[4]], device=DEVICE), attention_mask=hidden, past_key_values=cache)
    assert cache.get_seq_length() == 20 and cache.rows[0].layer_tokens().total == 20
    keyhole.transformers.enable(model, **EXACT)
    with torch.no_grad(), pytest.raises(keyhole.InvalidArgument, match="another model"):
        model(torch.tensor([[4]], device=DEVICE), past_key_values=cache)


def test_a_compiled_model_says_the_same():
    model = make("llama")
    inputs = batch(150)
    expected = greedy(inputs, 6)(model)
    keyhole.transformers.enable(model, **EXACT)
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(greedy(inputs, 6)(compiled), expected)
    with torch.no_grad():
        output = compiled(inputs["input_ids"])
        assert isinstance(output.past_key_values, keyhole.transformers.KeyholeCache)
        tokens = [output.logits[:, -1:].argmax(-1)]
        for _ in range(5):
            output = compiled(tokens[-1], past_key_values=output.past_key_values)
            tokens.append(output.logits[:, -1:].argmax(-1))
    assert torch.equal(torch.cat(tokens, dim=1), expected[:, 150:])
    assert output.past_key_values.statistics()[0].attends > 0


def test_a_forward_pass_that_fails_takes_nothing_with_it():
    model = make("llama")
    keyhole.transformers.enable(model, **EXACT)
    cache = keyhole.transformers.KeyholeCache(model)
    with torch.no_grad():
        handle = model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(**batch(150, 150), past_key_values=cache)
        handle.remove()
        assert not cache.rows and cache.get_seq_length() == 0
        model(**batch(40), past_key_values=cache)
        handle = model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(torch.tensor([[4, 5]], device=DEVICE), past_key_values=cache)
        handle.remove()
        assert [cache.rows[0].layer_tokens(layer).total for layer in range(3)] == [40] * 3
        assert cache.get_seq_length() == 40
        model(torch.tensor([[4, 5]], device=DEVICE), past_key_values=cache)
    assert cache.get_seq_length() == 42


@pytest.mark.parametrize("family", [name for name in FAMILIES if name in HYBRIDS])
def test_states_go_back_into_a_pass(family):
    """crop() of a model with recurrent states: also where rows are padded, and where all of the newest pass goes."""
    model, inputs = make(family), batch(40, 28)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    drafts, wanted = batch(9, 9, seed=7)["input_ids"], batch(3, 3, seed=8)["input_ids"]

    def go_on(model, cache, new, tokens):
        seen = torch.cat([mask, torch.ones(2, tokens, dtype=torch.long, device=DEVICE)], dim=1)
        places = (seen.cumsum(1) - 1).clamp(min=0)[:, -new.shape[1] :]
        return model(new, attention_mask=seen, position_ids=places, past_key_values=cache).logits

    with torch.no_grad():
        for kept in (0, 1, 4):
            keyhole.transformers.disable(model)
            straight = torch.cat([ids, drafts[:, :kept], wanted], dim=1)
            seen = torch.cat([mask, torch.ones(2, kept + 3, dtype=torch.long, device=DEVICE)], dim=1)
            expected = model(straight, attention_mask=seen, position_ids=(seen.cumsum(1) - 1).clamp(min=0), use_cache=False).logits[:, -3:]
            keyhole.transformers.enable(model, **EXACT)
            cache = keyhole.transformers.KeyholeCache(model)
            model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), past_key_values=cache)
            go_on(model, cache, drafts, 9)
            cache.crop(kept - 9)
            assert cache.get_seq_length() == 40 + kept
            got = go_on(model, cache, wanted, kept + 3)
            assert torch.allclose(expected, got, atol=2e-3 * float(expected.std()), rtol=0), kept
        cache.reorder_cache(torch.tensor([1, 1], device=DEVICE))
        with pytest.raises(keyhole.Unsupported, match="the oldest state that is kept: none"):
            cache.crop(-1)


def test_states_go_back_over_many_steps():
    """64 tokens at least, of single steps, too, and with few copies of the states."""
    if "qwen3_5" not in FAMILIES:
        pytest.skip("this version of transformers has no layers for states")
    model, ids = make("qwen3_5"), batch(170)["input_ids"]
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        keyhole.transformers.enable(model, **EXACT)
        cache = keyhole.transformers.KeyholeCache(model)
        model(ids[:, :20], past_key_values=cache)
        place, random = 20, torch.Generator().manual_seed(9)
        while place < 150:
            n = 1 if place < 110 else int(torch.randint(1, 5, (1,), generator=random))
            model(ids[:, place : place + n], past_key_values=cache)
            place += n
            assert len(cache._record.copies) <= 6
            assert cache._record.oldest <= max(0, place - 64)
        assert cache._record.oldest >= 20
        with pytest.raises(keyhole.Unsupported, match="crop.. to 10 tokens: layers with a state"):
            cache.crop(10 - place)
        assert cache.get_seq_length() == place
        for back in (1, 17, 40, 3):  # 61 in all
            cache.crop(-back)
            place -= back
            assert cache.get_seq_length() == place
        got = model(ids[:, place : place + 5], past_key_values=cache).logits
        assert torch.allclose(got, expected[:, place : place + 5], atol=2e-3 * float(expected.std()), rtol=0)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name in HYBRIDS])
def test_a_pass_that_fails_puts_states_back(family):
    model = make(family)
    keyhole.transformers.enable(model, **EXACT)
    cache, more = keyhole.transformers.KeyholeCache(model), torch.tensor([[4, 5]], device=DEVICE)
    with torch.no_grad():
        model(**batch(40), past_key_values=cache)
        expected = model(more, past_key_values=cache).logits
        cache.reset()
        model(**batch(40), past_key_values=cache)
        handle = model.get_decoder().layers[-1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(more, past_key_values=cache)
        handle.remove()
        assert torch.allclose(model(more, past_key_values=cache).logits, expected, atol=1e-4)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name in HYBRIDS])
def test_a_single_step_that_fails_again_and_again_takes_nothing_with_it(family):
    """States of the layers before the failure have gone on, and K and V: all are as they were, also where nothing could be computed
    again, and what was copied serves crop() as before."""
    model, ids = make(family), batch(60)["input_ids"]
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        keyhole.transformers.enable(model, **EXACT)
        cache = keyhole.transformers.KeyholeCache(model)
        model(ids[:, :40], past_key_values=cache)
        for place in range(40, 45):
            model(ids[:, place : place + 1], past_key_values=cache)
        handle = model.get_decoder().norm.register_forward_pre_hook(lambda *_: 1 / 0) if hasattr(model.get_decoder(), "norm") else None
        if handle is None:
            handle = model.get_decoder().layers[-1].register_forward_hook(lambda *_: 1 / 0)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                model(ids[:, 45:46], past_key_values=cache)
            assert cache.get_seq_length() == 45
            assert cache.rows[0].layer_tokens(0).total == 45
        handle.remove()
        got = model(ids[:, 45:50], past_key_values=cache).logits
        assert torch.allclose(got, expected[:, 45:50], atol=2e-3 * float(expected.std()), rtol=0)
        cache.crop(-7)  # into the steps before the failure
        got = model(ids[:, 43:55], past_key_values=cache).logits
        assert torch.allclose(got, expected[:, 43:55], atol=2e-3 * float(expected.std()), rtol=0)


def test_what_is_unusual_is_refused_by_its_attribute():
    """An attention that says something else than what the library does, or does something else than it says."""

    def refused(text, error=keyhole.Unsupported, **attributes):
        model = make("llama")
        for name, value in attributes.items():
            setattr(model.model.layers[1].self_attn, name, value)
        with pytest.raises(error, match=text):
            keyhole.transformers.enable(model, **EXACT)

    refused("layer 1, LlamaAttention: is_causal is False", is_causal=False)
    refused("layer 1, LlamaAttention: is_cross_attention is True", is_cross_attention=True)
    refused("layer 1, LlamaAttention does not say 'scaling'", scaling=None)
    refused("layer 1, LlamaAttention: kv_lora_rank is 512", kv_lora_rank=512)
    refused("layer 1, LlamaAttention: v_head_dim is 32", v_head_dim=32)
    refused("k_proj has 128 rows; 4 heads of head_dim 64 have 256", num_key_value_groups=1)
    refused("more than one attention \\(layer_idx: \\[0, 0, 2\\]\\)", layer_idx=0)
    chunked = make("llama")
    chunked.config.layer_types = ["full_attention", "chunked_attention", "full_attention"]
    with pytest.raises(keyhole.Unsupported, match="layer 1, LlamaAttention: layer_type is 'chunked_attention'; supported: full"):
        keyhole.transformers.enable(chunked)
    model = make("llama")
    keyhole.transformers.enable(model, **EXACT)
    attention = model.model.layers[1].self_attn

    def calls(text, **attributes):
        before = {name: getattr(attention, name) for name in attributes}
        vars(attention).update(attributes)
        with torch.no_grad(), pytest.raises(keyhole.Unsupported, match=text):
            model(**batch(5))
        vars(attention).update(before)

    calls("layer 1, LlamaAttention: attention with scaling 0.5; its attribute says 0.125", scaling=0.5)
    for more, text in (({"s_aux": torch.zeros(4)}, "s_aux, and no attribute sinks"), ({"softcap": 3.0}, "softcap 3.0"),
                       ({"sliding_window": 7}, "sliding_window 7; its attributes say 0"),
                       ({"position_bias": torch.zeros(1)}, "position_bias")):  # fmt: skip
        with torch.no_grad(), pytest.raises(keyhole.Unsupported, match=text):
            model(**batch(5), **more)


def test_layer_types_have_older_names():
    """Names of types say what a layer is where its module does not."""
    model, inputs = make("gemma3"), batch(90, 35)
    expected = greedy(inputs, 24)(model)
    keyhole.transformers.enable(model, **EXACT)
    assert [one.window for one in model._keyhole.attentions] == [16, 0, 16, 0]
    assert torch.equal(expected, greedy(inputs, 24)(model))
    keyhole.transformers.disable(model)
    from keyhole.transformers import _shapes

    for module in (one.self_attn for one in model.model.layers):
        del module.sliding_window
    config = model.config.get_text_config()
    for old in ("sliding", "local"):
        kinds = [_shapes._attention_of(one.self_attn, config_with(config, [old, "global"] * 2)) for one in model.model.layers]
        assert [one.window for one in kinds] == [16, 0, 16, 0]


def config_with(config, types):
    import types as modules

    return modules.SimpleNamespace(layer_types=types, sliding_window=config.sliding_window, num_attention_heads=config.num_attention_heads,
                                   head_dim=config.head_dim)  # fmt: skip


def test_two_models_in_two_threads():
    inputs = batch(80, 33)
    models = [make("llama", seed=1), make("qwen3", seed=2)]
    expected = [greedy(inputs, 32)(model) for model in models]
    got = [None, None]
    for model in models:
        keyhole.transformers.enable(model, **EXACT)

    def run(place):
        got[place] = greedy(inputs, 32)(models[place])

    threads = [threading.Thread(target=run, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(*pair) for pair in zip(expected, got))


# ---- arrays of PyTorch ----


def test_tensors_of_torch_are_taken_as_they_are():
    engine = keyhole.Engine(layers=1, q_heads=2, kv_heads=1, head_dim=64, kv_dtype="bf16", threads=1)
    session = engine.session(mode="exact")
    k = torch.randn(5, 1, 64, dtype=torch.bfloat16)
    session.append(0, k, k)
    q = torch.randn(2, 64, dtype=torch.bfloat16)
    out = session.attend(0, q)
    assert out.dtype == torch.bfloat16 and isinstance(out, torch.Tensor)
    weights = torch.softmax(q.double() @ k[:, 0].double().T / 8, dim=-1)
    assert torch.allclose(out.double(), weights @ k[:, 0].double(), atol=2e-2)
    with pytest.raises(keyhole.InvalidArgument, match="q has dtype float64"):
        session.attend(0, torch.randn(2, 64, dtype=torch.float64), out=torch.empty(2, 64))
    with pytest.raises(keyhole.InvalidArgument, match="stride 2 of the last axis"):
        session.attend(0, torch.randn(2, 128)[:, ::2], out=torch.empty(2, 64))
    with pytest.raises(TypeError, match="q"):
        session.attend(0, torch.randn(2, 64, device="meta"), out=torch.empty(2, 64))


# ---- the bundled model ----


@pytest.fixture(scope="module")
def bundled(root):
    return transformers.AutoModelForCausalLM.from_pretrained(root / "tools/model", dtype=torch.float32).eval().to(DEVICE)


def prompt_of(text):
    return torch.tensor([[256, *text.encode()]], device=DEVICE)


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("mode", ["exact", "indexed"])
def test_golden_prompts(bundled, root, place, mode):
    """Tokens and logits of an independent forward pass in NumPy. The default index has nearly all of the prompt."""
    golden = json.loads((root / "tools/model/golden.json").read_text())[place]
    ids = prompt_of(golden["prompt"])
    keyhole.transformers.enable(bundled, mode=mode, sink=16, window=32)
    tokens = len(golden["generated_ids"])
    output = bundled.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=257, return_dict_in_generate=True, output_logits=True)
    assert output.sequences[0, ids.shape[1] :].tolist() == golden["generated_ids"]
    best = output.logits[0][0].topk(5)
    expected = golden["first_logits_top5"]
    expected = list(expected.items()) if isinstance(expected, dict) else [tuple(entry) for entry in expected]
    assert [int(token) for token, _ in expected] == best.indices.tolist()
    assert best.values.tolist() == pytest.approx([value for _, value in expected], abs=1e-3)
    cache = output.past_key_values
    assert cache.statistics()[0].attends == 6 * (tokens - 1) + (0 if ids.shape[1] > 128 else 6 * ids.shape[1])


def kv_question(pairs, seed):
    """Lines key=value, a question, and its answer: tools/model/README.md."""
    import random

    rng = random.Random(seed)
    keys = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=5)) for _ in range(pairs)]
    values = ["".join(rng.choices("0123456789", k=5)) for _ in range(pairs)]
    asked = pairs // 2 + seed
    lines = "".join(f"{key}={value}\n" for key, value in zip(keys, values))
    return f"{lines}?{keys[asked]}=", values[asked]


def passkey_question(root, characters, seed):
    prose = (root / "tools/model/haystack.txt").read_text()[seed * 5000 : seed * 5000 + characters]
    middle = prose.index("\n", characters // 2) + 1
    text = f"{prose[:middle]}[The pass key of marlow is 48{seed}51.]\n{prose[middle:]}\n"
    return f"{text}[Question: what is the pass key of marlow? Answer: ", f"48{seed}51"


@pytest.mark.parametrize("seed", [1, 2])
def test_the_default_index_answers(bundled, root, seed):
    small = {"sink": 64, "window": 128}
    for question, answer in (kv_question(100, seed), passkey_question(root, 1500, seed)):
        ids = prompt_of(question)
        keyhole.transformers.enable(bundled, **small)
        said = bundled.generate(ids, max_new_tokens=len(answer), do_sample=False, pad_token_id=257)
        assert bytes(said[0, ids.shape[1] :].tolist()).decode() == answer
        keyhole.transformers.enable(bundled, mode="resident", **small)
        said = bundled.generate(ids, max_new_tokens=len(answer), do_sample=False, pad_token_id=257)
        # The first token comes from the exact prompt; sink and window alone know nothing of the others.
        assert said[0, ids.shape[1] :].tolist() != list(answer.encode())


def test_a_budget_of_codes_reads_what_it_names_exactly_and_the_rest_by_codes():
    """Random models look at many tokens: without those that are not read exactly a step says something else."""
    model, ids = make("qwen3"), batch(700)["input_ids"]

    def step(seen, **options):
        enabled = keyhole.transformers.enable(model, sink=4, window=16, max_tokens=2048, **options)
        with enabled.session(2048) as session:
            assert session.budget().tail == keyhole.Tail[seen.upper()]
        with torch.no_grad():
            cache = model(ids[:, :-1]).past_key_values
            logits = model(ids[:, -1:], past_key_values=cache).logits[0, -1].float()
        keyhole.transformers.disable(model)
        return logits

    codes = {"index": "codes:k=4,v=4", "top_k": 2}
    exact = step("none", mode="exact", index="flat")
    by_codes = float((step("codes", **codes) - exact).norm())
    without = float((step("none", tail="none", **codes) - exact).norm())
    assert by_codes < 0.3 * without and without > 0.5 * float(exact.norm())


def test_audits_of_a_cache(bundled):
    keyhole.transformers.enable(bundled, audit_share=1.0, sink=16, window=64)
    question, answer = kv_question(60, 3)
    ids = prompt_of(question)
    output = bundled.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=257, return_dict_in_generate=True)
    (audit,) = output.past_key_values.audit()
    assert audit.audits == 4 * 6 * 8 and 0 < audit.error_median < 0.05
    keyhole.transformers.disable(bundled)


def test_dropped_caches_leave_nothing():
    import gc
    import weakref

    model = make("llama")
    keyhole.transformers.enable(model, **EXACT)
    gc.collect()
    gc.disable()  # no cycles: what is dropped goes at once
    try:
        output = greedy(batch(150, 40), 4, num_beams=2, return_dict_in_generate=True)(model)
        sessions = [weakref.ref(session) for session in output.past_key_values.rows]
        assert len(sessions) == 4 and all(session() is not None for session in sessions)
        del output
        assert not any(session() is not None for session in sessions)
    finally:
        gc.enable()


def test_a_cache_of_one_call_has_room_for_that_call(monkeypatch):
    """On a GPU codes take memory for all tokens that a session may hold: for those of the call, not of the model's longest context."""
    model = make("llama", max_position_embeddings=1 << 17)
    ids = torch.randint(3, 97, (2, 30), device=DEVICE)

    def rooms(call, **fields):
        enabled = keyhole.transformers.enable(model, mode="exact", sink=4, window=16, **fields)
        asked, session = [], enabled.session
        monkeypatch.setattr(enabled, "session", lambda room=None: asked.append(room) or session(room))
        out = call()
        return asked, out

    stop = transformers.StoppingCriteriaList([lambda ids, scores, **_: torch.ones(len(ids), dtype=torch.bool, device=ids.device)])
    plain = {"do_sample": False, "pad_token_id": 0}
    assert rooms(lambda: model.generate(ids[:1], max_new_tokens=3, **plain))[0] == [4096]
    assert rooms(lambda: model.generate(ids, max_new_tokens=9000, stopping_criteria=stop, **plain))[0] == [30 + 9000 + 64] * 2
    assert rooms(lambda: model.generate(inputs=ids[:1], max_new_tokens=200000, stopping_criteria=stop, **plain))[0] == [131072]
    config = transformers.GenerationConfig(max_new_tokens=5000, **plain)
    assert rooms(lambda: model.generate(ids[:1], generation_config=config, stopping_criteria=stop))[0] == [30 + 5000 + 64]
    # What is given, and caches that the caller gets and may go on with, have the room of enable().
    assert rooms(lambda: model.generate(ids[:1], max_new_tokens=3, **plain), max_tokens=1024)[0] == [None]
    asked, out = rooms(lambda: model.generate(ids[:1], max_new_tokens=3, return_dict_in_generate=True, **plain))
    assert asked == [None]
    longer = torch.cat([out.sequences, torch.randint(3, 97, (1, 5000), device=DEVICE)], dim=1)
    more = model.generate(longer, attention_mask=torch.ones_like(longer), past_key_values=out.past_key_values, max_new_tokens=2, **plain)
    assert more.shape[1] > 5000
    cache = keyhole.transformers.KeyholeCache(model, max_tokens=64)
    with pytest.raises(keyhole.Error, match="max_tokens"):
        model.generate(torch.randint(3, 97, (1, 80), device=DEVICE), past_key_values=cache, max_new_tokens=2, **plain)
