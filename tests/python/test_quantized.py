"""Weights in 8 and 4 bits, as packages for transformers keep them: what attention is under them makes no difference to them.

Each package is one case; what is not installed is skipped. Packages differ in what they round: weights alone, once, and then tokens
are those of sdpa; or what goes into each product, too, and then a difference in the last bit of an attention's answer can become
one of a step of these roundings.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed")

import keyhole.transformers  # noqa: E402
from tiny_models import DEVICE, EXACT, batch, both, greedy, make  # noqa: E402

SIZE = {"hidden_size": 256, "intermediate_size": 256, "initializer_range": 0.15}
pytestmark = pytest.mark.filterwarnings("ignore")


def loaded(folder, config):
    """As users do it: the weights of a folder are quantized while they are read."""
    make("llama", **SIZE).cpu().save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32, device_map=DEVICE)
    return model.eval()


def torchao(kind, *args, **options):
    def load(folder):
        ways = pytest.importorskip("torchao.quantization")
        if "group" in options:
            options["granularity"] = ways.PerGroup(options.pop("group"))
        return loaded(folder, transformers.TorchAoConfig(getattr(ways, kind)(*args, **options)))

    return load


def bitsandbytes(**options):
    def load(folder):
        pytest.importorskip("bitsandbytes")
        return loaded(folder, transformers.BitsAndBytesConfig(**options))

    return load


def quanto(folder):
    pytest.importorskip("optimum.quanto")
    return loaded(folder, transformers.QuantoConfig(weights="int8"))


def hqq(bits):
    """By the package itself: the newest transformers refuses it for now."""

    def load(folder):
        models, core = pytest.importorskip("hqq.models.hf.base"), pytest.importorskip("hqq.core.quantize")
        model = make("llama", **SIZE)
        config = core.BaseQuantizeConfig(nbits=bits, group_size=64)
        models.AutoHQQHFModel.quantize_model(model, quant_config=config, compute_dtype=torch.float32, device=DEVICE)
        return model

    return load


def compressed_tensors(bits, **options):
    """A folder as llm-compressor writes it, by round-to-nearest."""

    def load(folder):
        of = pytest.importorskip("compressed_tensors.quantization")
        compressors = pytest.importorskip("compressed_tensors.compressors")
        model = make("llama", **SIZE).cpu()
        weights = of.QuantizationArgs(num_bits=bits, type="int", symmetric=True, strategy="group", group_size=64)
        scheme = of.QuantizationScheme(targets=["Linear"], weights=weights)
        config = of.QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"], quantization_status="compressed", format="pack-quantized")
        of.apply_quantization_config(model, config)
        for module in model.modules():
            if hasattr(module, "weight_scale"):
                groups = module.weight.detach().unflatten(1, (-1, 64))
                module.weight_scale.data = groups.abs().amax(-1) / (2 ** (bits - 1) - 1)
        compressor = compressors.ModelCompressor(quantization_config=config)
        compressor.compress_model(model)
        model.save_pretrained(folder)
        compressor.update_config(folder)
        given = {"quantization_config": transformers.CompressedTensorsConfig(**options)} if options else {}
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map=DEVICE, **given).eval()

    return load


WEIGHTS = {
    "torchao, 8 bits": torchao("Int8WeightOnlyConfig"),
    "torchao, 4 bits": torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4, group=32),
    "quanto, 8 bits": quanto,
    "hqq, 8 bits": hqq(8),
    "hqq, 4 bits": hqq(4),
    "compressed-tensors, 8 bits": compressed_tensors(8),
    "compressed-tensors, 4 bits": compressed_tensors(4),
    "compressed-tensors, 4 bits, opened": compressed_tensors(4, run_compressed=False),
}
PRODUCTS = {
    "torchao, 8 bits of both": torchao("Int8DynamicActivationInt8WeightConfig"),
    "bitsandbytes, 8 bits": bitsandbytes(load_in_8bit=True),
    "bitsandbytes, 4 bits": bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32),
}


def rounded(model):
    """The weights are no longer those of make(): logits show it."""
    ids = batch(20)["input_ids"]
    with torch.no_grad():
        expected, got = (one(ids, use_cache=False).logits for one in (make("llama", **SIZE), model))
    error = float((got - expected).norm() / expected.norm())
    assert 1e-3 < error < 0.8, error


@pytest.mark.parametrize("way", WEIGHTS)
def test_tokens_are_those_of_sdpa(way, tmp_path):
    model = WEIGHTS[way](tmp_path)
    rounded(model)
    expected, got, _ = both(model, greedy(batch(90, 60), 40))
    assert torch.equal(expected, got) and len(set(expected[0, 90:].tolist())) > 10


@pytest.mark.parametrize("way", PRODUCTS)
def test_logits_are_near_those_of_sdpa(way, tmp_path):
    model, ids, steps = PRODUCTS[way](tmp_path), batch(120)["input_ids"], 40
    rounded(model)

    def logits():
        with torch.no_grad():
            output = model(ids[:, :-steps])
            found = [output.logits[:, -1]]
            for place in range(120 - steps, 119):
                cache = getattr(output, "cache", None) or output.past_key_values
                output = model(ids[:, place : place + 1], past_key_values=cache)
                found.append(output.logits[:, -1])
        return torch.cat(found)

    expected = logits()
    keyhole.transformers.enable(model, **EXACT)
    got = logits()
    assert (got - expected).abs().mean() < 0.05 * expected.std() and (got.argmax(-1) == expected.argmax(-1)).float().mean() > 0.9
