"""Tokenizer goldens: small vocabularies trained and run by Hugging Face tokenizers (byte-level BPE) and by SentencePiece, stored as
vocab-only GGUFs with the keys of llama.cpp's converters."""

import io
import json
import os
import sys
import unicodedata

import gguf
import sentencepiece as spm
from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import awkward as A
import goldens as G

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
SIZE = 1500


def split(pattern):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def gpt2():
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


# pre-tokenizer name -> (how Hugging Face spells it, ignore_merges). The published Qwen2 file also normalises to NFC; GGUF readers do not, so it is off.
BPE = {
    "qwen2": (lambda: split(QWEN2), False),
    "llama-bpe": (lambda: split(LLAMA3), True),
    "gpt-2": (gpt2, False),
    "smollm": (lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2()]), False),
}


def train_bpe(pre, ignore_merges):
    """(vocab, merges). With ignore_merges some whole words keep their token and lose the merge that would reach it."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre()
    trainer = trainers.BpeTrainer(vocab_size=SIZE - len(A.CONTROL) - len(A.USER_DEFINED), show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tok.train_from_iterator(A.corpus(), trainer)
    state = json.loads(tok.to_str())["model"]
    merges = [tuple(m) if not isinstance(m, str) else tuple(m.split(" ")) for m in state["merges"]]
    if ignore_merges:
        merges = [m for i, m in enumerate(merges) if i < 300 or i % 9 != 0 or len(m[0] + m[1]) < 4]
    return state["vocab"], merges


def bpe_tokenizer(pre, vocab, merges, ignore_merges, control):
    tok = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges))
    tok.pre_tokenizer = pre()
    tok.decoder = decoders.ByteLevel()
    tok.add_tokens([AddedToken(t, normalized=False) for t in A.USER_DEFINED])
    if control:
        tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in A.CONTROL])
    return tok


def new_vocab_file(out, name, model, pre):
    w = gguf.GGUFWriter(os.path.join(out, name + ".gguf"), "llama")
    w.add_name("vocab-" + name)
    w.add_context_length(512)
    w.add_embedding_length(64)
    w.add_block_count(1)
    w.add_feed_forward_length(64)
    w.add_head_count(2)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_tokenizer_model(model)
    w.add_tokenizer_pre(pre)
    return w


def write_ids(out, name, texts, plain, special):
    """name.ids.jsonl: line i holds the ids of strings.jsonl line i, control tokens taken as plain text. name.special.jsonl: where
    control tokens in the text count, and only the lines that differ."""
    with open(os.path.join(out, name + ".ids.jsonl"), "w") as f:
        for t in texts:
            f.write(json.dumps(plain(t), separators=(",", ":")) + "\n")
    rows = [{"text": t, "ids": special(t)} for t in texts if special(t) != plain(t)]
    G.write_jsonl(os.path.join(out, name + ".special.jsonl"), rows)
    print(f"  {name}: {len(texts)} strings, {sum(len(plain(t)) for t in texts)} ids, {len(rows)} with control tokens")


def make_bpe(out, name, texts):
    pre, ignore_merges = BPE[name]
    vocab, merges = train_bpe(pre, ignore_merges)
    with_control = bpe_tokenizer(pre, vocab, merges, ignore_merges, True)
    without = bpe_tokenizer(pre, vocab, merges, ignore_merges, False)
    for t in texts:
        assert without.decode(without.encode(t, add_special_tokens=False).ids, skip_special_tokens=False) == t, repr(t)
    w = new_vocab_file(out, name, "gpt2", name)
    tokens = [t for t, _ in sorted(vocab.items(), key=lambda kv: kv[1])]
    added = A.USER_DEFINED + A.CONTROL
    assert [with_control.token_to_id(t) for t in added] == list(range(len(tokens), len(tokens) + len(added)))
    w.add_token_list(tokens + added)
    w.add_token_types([TokenType.NORMAL] * len(tokens) + [TokenType.USER_DEFINED] * len(A.USER_DEFINED) + [TokenType.CONTROL] * len(A.CONTROL))
    w.add_token_merges([" ".join(m) for m in merges])
    w.add_bos_token_id(with_control.token_to_id("<|endoftext|>"))
    w.add_eos_token_id(with_control.token_to_id("<|im_end|>"))
    G.finish(w)
    write_ids(out, name, texts, lambda t: without.encode(t, add_special_tokens=False).ids, lambda t: with_control.encode(t, add_special_tokens=False).ids)


# ---- SentencePiece ---------------------------------------------------------------------------------------------------

def train_spm(prefix):
    model = io.BytesIO()
    lines = [s for line in A.corpus() for s in line.split("\n") if s]
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, model_type="bpe", vocab_size=SIZE, byte_fallback=True, character_coverage=0.985,
        normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=prefix, allow_whitespace_only_pieces=True,
        split_digits=True, num_threads=1, unk_id=0, bos_id=1, eos_id=2, control_symbols=[c for c in A.SPM_CONTROL if c.startswith("<start") or c.startswith("<end")],
        minloglevel=2)
    return spm.SentencePieceProcessor(model_proto=model.getvalue())


def spm_type(sp, i):
    if sp.is_unknown(i):
        return TokenType.UNKNOWN
    if sp.is_control(i):
        return TokenType.CONTROL
    return TokenType.BYTE if sp.is_byte(i) else TokenType.NORMAL


def converted(sp, prefix):
    """The same model as Hugging Face converts it (merges by the scores of their results), which knows control tokens in text: each
    piece of text between two of them gets the prefix, as in llama.cpp."""
    pieces = [sp.id_to_piece(i) for i in range(len(sp))]
    vocab = {p: i for i, p in enumerate(pieces)}
    normal = {p: i for p, i in vocab.items() if spm_type(sp, i) == TokenType.NORMAL}
    merges = sorted((-sp.get_score(i), normal[p[:k]], normal[p[k:]], p[:k], p[k:]) for p, i in normal.items() for k in range(1, len(p)) if p[:k] in normal and p[k:] in normal)
    tok = Tokenizer(models.BPE(vocab=vocab, merges=[(a, b) for *_, a, b in merges], byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    steps = [normalizers.Prepend("▁")] if prefix else []
    tok.normalizer = normalizers.Sequence(steps + [normalizers.Replace(" ", "▁")])
    tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ["<unk>"] + A.SPM_CONTROL])
    return tok


def make_spm(out, name, prefix, texts):
    sp = train_spm(prefix)
    w = new_vocab_file(out, name, "llama", "default")
    n = len(sp)
    w.add_token_list([sp.id_to_piece(i) for i in range(n)])
    w.add_token_scores([sp.get_score(i) for i in range(n)])
    w.add_token_types([spm_type(sp, i) for i in range(n)])
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_unk_token_id(0)
    w.add_add_space_prefix(prefix)
    G.finish(w)
    tok = converted(sp, prefix)
    marks = ["<unk>"] + A.SPM_CONTROL
    clean = [t for t in texts if not any(m in t for m in marks)]
    differ = [t for t in clean if tok.encode(t, add_special_tokens=False).ids != sp.encode(t)]
    print(f"  {name}: SentencePiece and Hugging Face agree on {len(clean) - len(differ)} of {len(clean)}", [t[:12] for t in differ[:5]])

    def special(t):
        return tok.encode(t, add_special_tokens=False).ids if any(m in t for m in marks) else sp.encode(t)

    write_ids(out, name, texts, sp.encode, special)


def check_classes(texts):
    """The regex engine behind the goldens and Python's Unicode tables must agree on letters, numbers and spaces of all that is in the strings."""
    chars = sorted(set("".join(texts)))
    for cls, test in ((r"\p{L}", lambda c: unicodedata.category(c)[0] == "L"), (r"\p{N}", lambda c: unicodedata.category(c)[0] == "N"), (r"\s", lambda c: c.isspace() and c not in "\x1c\x1d\x1e\x1f")):
        pre = pre_tokenizers.Split(Regex(cls), "removed")
        odd = [hex(ord(c)) for c in chars if (not pre.pre_tokenize_str(c)) != test(c)]
        print(f"  {cls}: {len(chars)} characters, Python ({unicodedata.unidata_version}) differs on {odd}")
        if odd:
            sys.exit("awkward.strings() holds characters whose class is in doubt")


def main():
    out = G.out_dir("tokenizers")
    texts = A.strings()
    check_classes(texts)
    G.write_jsonl(os.path.join(out, "strings.jsonl"), [{"text": t} for t in texts])
    for name in BPE:
        make_bpe(out, name, texts)
    make_spm(out, "spm-llama", True, texts)
    make_spm(out, "spm-gemma", False, texts)


if __name__ == "__main__":
    main()
