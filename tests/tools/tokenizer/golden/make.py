#!/usr/bin/env python3
"""Trains small tokenizers of every style that is built in, and writes what Hugging Face's library makes of a set of texts.

    make.py [--lines N | --characters] [--seed S] [FOLDER]

FOLDER (default: beside this script) gets <style>.json, a tokenizer.json, and <style>.expected.json. Needs the package tokenizers.
With KEYHOLE_TOKENIZER_GOLDEN=FOLDER the tests named Golden read another folder than the repository's, with more lines, or with a line
for every assigned character (--characters).
"""
import argparse
import json
import pathlib
import random
import sys
import unicodedata

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[3]
SPACE = "\u2581"

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
          r"\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+")

EDGES = [
    "", " ", "  ", "a", " a", "a ", "   a   b    c     ", "\n", "\n\n\n", "\r\n", "a\r\nb\r\n\r\nc", "\t\tif (x)\t{\n\t}",
    "trailing spaces   \n   leading", "I'm you're THEY'LL we'd it\u2019s CAN'T o'\u017f", "3.14159 1234567 0x1F 10,000 \u00bd \u2167 \u0663\u0664",
    "na\u00efve cafe\u0301 \u212b \ufb01 \u1e9b\u0323 \u0130I\u0131i \u00df \u1e9e", "\u3053\u3093\u306b\u3061\u306f\u4e16\u754c\u3002",
    "\ud55c\uad6d\uc5b4 \u1112\u1161\u11ab", "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645", "\u0928\u092e\u0938\u094d\u0924\u0947",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \u2764\ufe0f\U0001f44d\U0001f3fd", "a\u0300\u0301\u0302b\u0334",
    "nbsp\u00a0thin\u2009ideo\u3000nel\u0085mongol\u180ezero\u200bls\u2028ps\u2029end", "\u0000\u0001\u007f", "\ufffd\ufeffbom",
    SPACE, SPACE + SPACE + "x", "a" + SPACE + "b", "x " + SPACE + " y", "<0x41>", "<0x0A><0xZZ>", "<s>", "</s> <s>hello</s>", "<unk>", "text <s> text",
    "<|user|>hello<|end|>", "  <|end|>  \n x", "a<|end|>b <|end|> c", "<tool>name</tool>", " <tool>\n x", "thorough thor thorn", "THOR Thor  thor ",
    "word<mask>word <mask> <mask>", "\u0120\u010a\u0100", "http://example.com/a?b=c&d=%20#e", "__init__(self, *args, **kwargs) -> None:",
    "snake_case camelCase SCREAMING_CASE kebab-case", "!!!???...;;;:::---===>>><<<", "$+<=>^`|~", "\u00bfQu\u00e9? \u00a1S\u00ed! \u201cquotes\u201d \u2014 dash",
    "x" * 300, " " * 100 + "y", "ab" * 100, "\n" * 40, "1" * 50, "\u4e16" * 60, "e\u0301" * 40,
]

# Bytes that are no UTF-8: the library is given what Python's "replace" makes of them.
BROKEN = ["80", "61ff62", "c3", "61c3", "e282", "61e28261", "f09f98", "f09f9861", "c0af", "eda080", "f4908080", "f5808080", "e2c3a9", "ffc3a9fe", "8080c3a980"]



def comparable(c):
    """Assigned, and no mark, punctuation or compatible form that is newer than the library's tables of them, which are of Unicode 8."""
    c = chr(c)
    category = unicodedata.category(c)
    if category in ("Cn", "Cs", "Co"):
        return False
    if c in "\u1cf2\u1cf3":  # no marks any more
        return False
    return unicodedata.ucd_3_2_0.category(c) != "Cn" or not (category[0] in "MP" or unicodedata.decomposition(c))


ASSIGNED = [c for c in range(0x110000) if comparable(c)]
BLOCKS = [(0x20, 0x7F), (0xA0, 0x250), (0x300, 0x370), (0x370, 0x530), (0x590, 0x700), (0x900, 0xE00), (0x1100, 0x1200), (0x1E00, 0x2200),
          (0x2190, 0x2800), (0x3000, 0x3100), (0x4E00, 0x5000), (0xAC00, 0xAE00), (0xFB00, 0xFE70), (0xFF00, 0xFFF0), (0x1D400, 0x1D800),
          (0x1F300, 0x1F700)]


def prose():
    return (ROOT / "tools/model/haystack.txt").read_text()


def code():
    files = sorted(p for folder in ("cpu", "index", "tools") for p in (ROOT / folder).rglob("*.cpp"))
    return "".join(p.read_text() for p in files[::7])


def random_text(rng):
    out = []
    for _ in range(rng.randrange(1, 8)):
        low, high = rng.choice(BLOCKS)
        pool = [c for c in range(low, high) if comparable(c)]
        out += [chr(rng.choice(pool)) for _ in range(rng.randrange(1, 12))]
        out.append(rng.choice(["", " ", "  ", "\n", "\t", "\u00a0"]))
    if rng.random() < 0.3:
        out += [chr(rng.choice(ASSIGNED)) for _ in range(rng.randrange(1, 20))]
    return "".join(out)


def make_lines(count, rng):
    texts = [prose(), code()]
    lines = list(EDGES)
    while len(lines) < count:
        kind = rng.randrange(3)
        if kind < 2:
            begin = rng.randrange(len(texts[kind]) - 300)
            lines.append(texts[kind][begin:begin + rng.randrange(1, 160)])
        else:
            lines.append(random_text(rng))
    return lines[:max(count, len(EDGES))]


def corpus(rng):
    text = prose()[:60000] + code()[:60000]
    lines = text.splitlines(keepends=True)
    return lines + [random_text(rng) + "\n" for _ in range(200)] + ["\u4e16\u754c caf\u00e9 na\u00efve \U0001f600\n"] * 20


def train(tokenizer, vocab, rng, specials, alphabet=(), limit=None):
    options = {"vocab_size": vocab, "special_tokens": specials, "show_progress": False, "initial_alphabet": list(alphabet)}
    if limit is not None:
        options["limit_alphabet"] = limit
    tokenizer.train_from_iterator(corpus(rng), trainers.BpeTrainer(**options))
    return tokenizer


BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
FALLBACK = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]


def bos_template(bos, tokenizer):
    return processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))])


def gpt2(rng):
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    t.post_processor = processors.ByteLevel(trim_offsets=False)
    return train(t, 700, rng, ["<|end|>"], BYTES)


def gpt2_prefixed(rng):
    t = gpt2(rng)
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=True)])
    return t


def llama3(rng):
    t = Tokenizer(models.BPE(ignore_merges=True))
    t.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(LLAMA3), behavior="isolated", invert=False),
        pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False)])
    t.decoder = decoders.ByteLevel()
    train(t, 700, rng, ["<s>", "</s>", "<|user|>", "<|end|>"], BYTES)
    t.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), bos_template("<s>", t)])
    return t


def qwen(rng):
    t = Tokenizer(models.BPE(byte_fallback=False))
    t.normalizer = normalizers.NFC()
    t.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(QWEN), behavior="isolated", invert=False),
        pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)])
    t.decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    t.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    train(t, 700, rng, ["<|end|>", "<|user|>"], BYTES)
    t.add_tokens([AddedToken("<tool>", special=False, normalized=False), AddedToken("</tool>", special=False, normalized=False)])
    return t


def llama2(rng):
    t = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    t.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    # Trained on words, which the finished tokenizer does not cut at.
    t.pre_tokenizer = pre_tokenizers.Split(SPACE, "merged_with_next")
    train(t, 800, rng, FALLBACK, limit=120)
    t.pre_tokenizer = None
    t.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    t.post_processor = bos_template("<s>", t)
    return t


def mistral(rng):
    t = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    t.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="first", split=True)
    train(t, 800, rng, FALLBACK, limit=120)
    t.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="first", split=False)
    t.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    t.post_processor = bos_template("<s>", t)
    return t


def gemma(rng):
    t = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    t.normalizer = normalizers.Replace(" ", SPACE)
    t.pre_tokenizer = pre_tokenizers.Split(SPACE, "merged_with_next")
    train(t, 800, rng, FALLBACK, limit=120)
    t.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    t.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    t.post_processor = bos_template("<s>", t)
    t.add_tokens([AddedToken(x, special=False, normalized=False) for x in ("\n\n", "\n\n\n", SPACE * 2, SPACE * 4)])
    t.add_special_tokens([AddedToken("<mask>", special=True, normalized=False, lstrip=True)])
    return t


def odd(rng):
    """What the families do not use together, but files may."""
    t = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    t.normalizer = normalizers.Sequence([
        normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase(), normalizers.Strip(left=False, right=True),
        normalizers.Replace(Regex(r"[xy]{2,}"), "z")])
    t.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always"), pre_tokenizers.Punctuation("contiguous"),
        pre_tokenizers.Digits(individual_digits=False)])
    t.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="always")
    train(t, 400, rng, ["<unk>", "<s>"], limit=60)
    t.add_tokens([AddedToken("thor", single_word=True, normalized=True), AddedToken("<tool>", lstrip=True, rstrip=True, normalized=False)])
    t.add_special_tokens([AddedToken("<|end|>", rstrip=True, normalized=False), AddedToken("<mask>", lstrip=True, normalized=False)])
    t.post_processor = processors.TemplateProcessing(single="<s> $A <|end|>", special_tokens=[
        ("<s>", t.token_to_id("<s>")), ("<|end|>", t.token_to_id("<|end|>"))])
    return t


def spaced(rng):
    t = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=False))
    t.normalizer = normalizers.NFKC()
    t.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Whitespace(), pre_tokenizers.Split("e", "removed"),
        pre_tokenizers.Split(Regex("[aou]"), "merged_with_previous"), pre_tokenizers.Split(Regex("[il]"), "merged_with_next"),
        pre_tokenizers.Split(Regex("[st]+"), "contiguous", invert=True)])
    t.decoder = decoders.Sequence([decoders.Strip("x", 1, 0), decoders.Fuse()])
    return train(t, 300, rng, ["<unk>", "<s>"], limit=100)


STYLES = [gpt2, gpt2_prefixed, llama3, qwen, llama2, mistral, gemma, odd, spaced]


def as_published(text, old):
    """Bytes are no added tokens in published files; old ones, before 2024, have merges as "a b"."""
    root = json.loads(text)
    root["added_tokens"] = [t for t in root["added_tokens"] if not t["content"].startswith("<0x")]
    if old:
        root["model"]["merges"] = [" ".join(m) for m in root["model"]["merges"]]
    return root


def write(path, value):
    path.write_text(json.dumps(value, ensure_ascii=True, separators=(",", ":")) + "\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=pathlib.Path, default=HERE)
    parser.add_argument("--lines", type=int, default=120)
    parser.add_argument("--characters", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.characters:
        lines = [f"a{c}b 1{c} {c}." for c in map(chr, ASSIGNED)]
    else:
        lines = make_lines(options.lines, random.Random(options.seed))
    write(options.folder / "lines.json", {"lines": lines, "broken": BROKEN})
    for style in STYLES:
        t = style(random.Random(7))
        root = as_published(t.to_str(), style in (gpt2, qwen, llama2))
        write(options.folder / f"{style.__name__}.json", root)
        t = Tokenizer.from_str(json.dumps(root))  # as the file has it
        result = {"tokenizers": tokenizers.__version__}
        result["parsed"] = [t.encode(x, add_special_tokens=False).ids for x in lines]
        t.encode_special_tokens = True
        ids = [t.encode(x, add_special_tokens=False).ids for x in lines]
        # Only where they differ, by number of the line.
        result["as_text"] = {str(i): x for i, x in enumerate(ids) if x != result["parsed"][i]}
        decoded = [t.decode(x, skip_special_tokens=True) for x in ids]
        result["decoded"] = {str(i): x for i, x in enumerate(decoded) if x != lines[i]}
        result["prompt"] = t.encode("A prompt.", add_special_tokens=True).ids
        result["broken"] = [t.encode(bytes.fromhex(x).decode("utf-8", "replace"), add_special_tokens=False).ids for x in BROKEN]
        write(options.folder / f"{style.__name__}.expected.json", result)
        print(style.__name__, t.get_vocab_size(), sum(map(len, ids)), "tokens", file=sys.stderr)


if __name__ == "__main__":
    main()
