"""Loads text/*.gguf and tokenizers/*.gguf with llama.cpp (package llama-cpp-python 0.3.36, in an environment of its own) and
compares with the goldens: a check of the files and of the references by a second program."""

import glob
import json
import os

import gguf
import numpy as np
from llama_cpp import Llama

HERE = os.path.dirname(os.path.abspath(__file__))


def check_text(path):
    golden = gguf.GGUFReader(path.replace(".gguf", ".golden.gguf"))
    field = golden.fields["parity.ids"]
    ids = [int(field.parts[i][0]) for i in field.data]
    want = next(t.data for t in golden.tensors if t.name == "logits")
    model = Llama(path, n_ctx=128, logits_all=True, verbose=False, n_threads=1, type_k=0, type_v=0)
    model.eval(ids)
    d = np.array(model.scores[:len(ids)]) - want
    print(f"{os.path.basename(path)}: nmse {(d ** 2).sum() / (want ** 2).sum():.3g}, max |d| {np.abs(d).max():.3g}")


def lines(path):
    with open(path, encoding="utf-8") as f:
        return [json.loads(line) for line in f]


def check_tokenizer(path, texts):
    model = Llama(path, vocab_only=True, verbose=False)

    def ids(text, special):
        return model.tokenize(text.encode(), add_bos=False, special=special)

    plain = sum(ids(t, False) != want for t, want in zip(texts, lines(path.replace(".gguf", ".ids.jsonl")), strict=True))
    special = lines(path.replace(".gguf", ".special.jsonl"))
    wrong = sum(ids(s["text"], True) != s["ids"] for s in special)
    print(f"{os.path.basename(path)}: {plain} of {len(texts)} differ, {wrong} of {len(special)} with control tokens")


def main():
    for path in sorted(glob.glob(os.path.join(HERE, "text", "*.gguf"))):
        if not path.endswith(".golden.gguf"):
            check_text(path)
    texts = [row["text"] for row in lines(os.path.join(HERE, "tokenizers", "strings.jsonl"))]
    for path in sorted(glob.glob(os.path.join(HERE, "tokenizers", "*.gguf"))):
        check_tokenizer(path, texts)


if __name__ == "__main__":
    main()
