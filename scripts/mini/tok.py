"""The vocabulary: byte-level BPE of the GPT-2 kind behind the qwen2 split, trained on the script's own questions.

Merges grow only rightwards from a leading space or a capital, so that a run of letters after a quotation mark
(a printed word in an answer) stays one token a letter; "assistant" is the one exception, being in every prompt.
"""
import json
from collections import Counter
from functools import lru_cache

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

import talk
from draw import COLOUR_NAMES, scene

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")
VOCAB = 640
GENERAL = """The quick answer is yes and no. Please look at this image and tell me what it shows. I would like to know
which of these things are in it. Can you see any letters or numbers here? It is on the left of the other one. Some of
them have the same colour. What about the second picture? Is it bigger than the first picture? Thank you, that was
all. Do you know how to read? Give me one word. There was nothing else in the image, only a few small shapes. One two
three four five six. You can ask about more than one thing at the same time.""".replace("\n", " ")


def byte_alphabet():
    """GPT-2's printable stand-in of each byte."""
    keep = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    table, extra = {}, 0
    for b in range(256):
        table[b] = chr(b) if b in keep else chr(256 + extra)
        extra += b not in keep
    return table


def corpus(seed=11, pictures=6000):
    rng = np.random.default_rng(seed)
    lines = [GENERAL] * 40 + [s for s in talk.SYSTEMS for _ in range(300)] + [talk.NO_PICTURE] * 300
    lines += [" " + c for c in COLOUR_NAMES for _ in range(200)]
    for _ in range(pictures):
        lines += [x for _, q, a in talk.ask_many(rng, scene(rng, 112, 112)[1], 4) for x in (q, a)]
        lines += talk.small_talk(rng)[1:]
    return lines


def splitter():
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), "isolated"),
                                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def train():
    """-> (tokens in id order, merges)."""
    split = splitter()
    counts = Counter()
    for line in corpus():
        counts.update(piece for piece, _ in split.pre_tokenize_str(line))
    merges = [("s", "s"), ("a", "ss"), ("ass", "i"), ("assi", "s"), ("assis", "t"), ("assist", "a"),
              ("assista", "n"), ("assistan", "t")]
    tokens = list(byte_alphabet().values()) + [a + b for a, b in merges]
    words = {tuple(w): n for w, n in counts.items()}
    while len(tokens) < VOCAB - len(SPECIAL):
        pairs = Counter()
        for w, n in words.items():
            if len(w) > 1 and (w[0][0] == "Ġ" or w[0][0].isupper()):
                pairs[w[0], w[1]] += n
        (left, right), n = max(pairs.items(), key=lambda item: (item[1], item[0]))
        if n < 10:
            break
        merges.append((left, right))
        tokens.append(left + right)
        merged = {}
        for w, n in words.items():
            key = (left + right, *w[2:]) if w[:2] == (left, right) else w
            merged[key] = merged.get(key, 0) + n
        words = merged
    return tokens + SPECIAL, merges


def save(path):
    tokens, merges = train()
    with open(path, "w") as f:
        json.dump(dict(tokens=tokens, merges=[" ".join(m) for m in merges]), f)


class Vocabulary:
    def __init__(self, tokens, merges):
        self.tokens, self.merges = tokens, merges
        ids = {t: i for i, t in enumerate(tokens)}
        plain = {t: i for t, i in ids.items() if t not in SPECIAL}
        model = models.BPE(vocab=plain, merges=[tuple(m.split(" ")) for m in merges])
        self.bpe = Tokenizer(model)
        self.bpe.pre_tokenizer = splitter()
        self.bpe.decoder = decoders.ByteLevel()
        self.eot, self.start, self.end, self.vstart, self.vend, self.pad = (ids[s] for s in SPECIAL)
        self.newline = ids["Ċ"]

    @classmethod
    def load(cls, path):
        with open(path) as f:
            return cls(**json.load(f))

    @lru_cache(maxsize=200000)
    def encode(self, text):
        return tuple(self.bpe.encode(text).ids)

    def decode(self, ids):
        return self.bpe.decode([i for i in ids if i < self.eot])

    def turn(self, role, text):
        return [self.start, *self.encode(role), self.newline, *self.encode(text), self.end, self.newline]
