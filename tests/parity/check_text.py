"""Reads text/*.gguf again with transformers' own GGUF loader (needs the package accelerate) and compares with the goldens: a check of our
conversion by a second reader. Models that this loader can not represent are left out; README.md says why."""

import os

import gguf
import torch
from transformers import AutoModelForCausalLM

import goldens as G

READABLE = ("llama-f32", "llama-mixed", "llama-k", "qwen2-f32", "qwen2-mixed", "qwen2-legacy")


def main():
    folder = os.path.join(G.HERE, "text")
    worst = 0.0
    for name in READABLE:
        golden = gguf.GGUFReader(os.path.join(folder, name + ".golden.gguf"))
        field = golden.fields["parity.ids"]
        ids = [int(field.parts[i][0]) for i in field.data]
        want = next(t.data for t in golden.tensors if t.name == "logits")
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name + ".gguf", dtype=torch.float32).eval()
        with torch.no_grad():
            got = model(input_ids=torch.tensor([ids])).logits[0].numpy()
        d = float(abs(got - want).max())
        worst = max(worst, d)
        print(f"{name}: max |d| {d:.3g}")
    if worst > 1e-3:
        raise SystemExit("the loader and the golden disagree")


if __name__ == "__main__":
    main()
