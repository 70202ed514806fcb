"""The vocabulary of a GGUF as tokenizer.json and tokenizer_config.json, which keyhole and transformers read."""

import json
from pathlib import Path

CONTROL, USER_DEFINED = 3, 4  # kinds of tokens in a GGUF


def added_tokens(meta) -> list[dict]:
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    return [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == CONTROL,
        }
        for i, (token, kind) in enumerate(zip(tokens, kinds))
        if kind in (CONTROL, USER_DEFINED)
    ]


def merges_by_score(tokens: list[str], scores: list[float]) -> list[list[str]]:
    """Pairs in the order in which a vocabulary with scores joins them: the token of the highest score first."""
    ids = {token: i for i, token in enumerate(tokens)}
    merges = []
    for token, score in zip(tokens, scores):
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [(ids[a], ids[b], a, b) for a, b in pairs if a in ids and b in ids]
        merges += [(-score, i, [a, b]) for i, (_, _, a, b) in enumerate(sorted(known))]
    merges.sort(key=lambda merge: merge[0])  # keeps the order of a token's pairs
    return [pair for _, _, pair in merges]


def byte_level(meta) -> dict:
    """BPE over bytes, as GPT-2 has it; SmolLM's kind takes digits one by one before."""
    if (kind := meta.get("tokenizer.ggml.pre")) != "smollm":
        raise SystemExit(f"a pre-tokenizer {kind}; allowed: smollm")
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, level],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(meta["tokenizer.ggml.tokens"])},
            "merges": [merge.split(" ") for merge in meta["tokenizer.ggml.merges"]],
        },
    }


def pieces(meta) -> dict:
    """Pieces with scores, as Gemma has them: spaces are a character of their own, bytes stand for what is not known."""
    tokens = meta["tokenizer.ggml.tokens"]
    bos = tokens[meta["tokenizer.ggml.bos_token_id"]]
    beginning = [{"SpecialToken": {"id": bos, "type_id": 0}}]
    if not meta.get("tokenizer.ggml.add_bos_token", True):
        beginning = []
    return {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": beginning + [{"Sequence": {"id": "A", "type_id": 0}}],
            "pair": beginning + [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {bos: {"id": bos, "ids": [meta["tokenizer.ggml.bos_token_id"]], "tokens": [bos]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": tokens[meta.get("tokenizer.ggml.unknown_token_id", 3)],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": merges_by_score(tokens, meta["tokenizer.ggml.scores"]),
        },
    }


def write(meta, out: Path) -> None:
    kinds = {"gpt2": byte_level, "llama": pieces}
    kind = meta["tokenizer.ggml.model"]
    if kind not in kinds:
        raise SystemExit(f"a tokenizer {kind}; allowed: {', '.join(kinds)}")
    document = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added_tokens(meta)}
    document.update(kinds[kind](meta))
    (out / "tokenizer.json").write_text(json.dumps(document, ensure_ascii=False))
    tokens = meta["tokenizer.ggml.tokens"]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
        "clean_up_tokenization_spaces": False,
    }
    if template := meta.get("tokenizer.chat_template"):
        config["chat_template"] = template
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
