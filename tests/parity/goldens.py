"""Shared by the golden makers: deterministic weights, GGUF writing in the layout of llama.cpp's converters, and
the measured effect of rounding activations. Nothing expected by a test is computed here: models run in Hugging Face
transformers, blocks are (de)quantised by the PyPI package gguf."""

import json
import os

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as T

HERE = os.path.dirname(os.path.abspath(__file__))
DATA = os.path.normpath(os.path.join(HERE, "..", "data"))

K_TYPES = (T.Q4_K, T.Q5_K, T.Q6_K)


def out_dir(*parts):
    path = os.path.join(HERE, *parts)
    os.makedirs(path, exist_ok=True)
    return path


def write_jsonl(path, rows):
    with open(path, "w", encoding="utf-8", newline="\n") as f:
        for row in rows:
            f.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n")


# ---- blocks -------------------------------------------------------------------------------------------------

def random_blocks(qtype, n_blocks, rng, d_scale=1.0):
    """Random valid blocks, uint8 [n_blocks][block_bytes]: every field takes all its bit patterns, half scales are finite."""
    _, nbytes = gguf.GGML_QUANT_SIZES[qtype]
    raw = rng.integers(0, 256, size=(n_blocks, nbytes), dtype=np.uint8)

    def half(offset, values):
        raw[:, offset:offset + 2] = values.astype("<f2").view(np.uint8).reshape(n_blocks, 2)

    sign = rng.choice([-1.0, 1.0], size=n_blocks)
    d = d_scale * rng.uniform(0.5, 1.5, size=n_blocks)
    if qtype in (T.Q4_0, T.Q5_0, T.Q8_0):
        half(0, d * sign)
    elif qtype in (T.Q4_1, T.Q5_1):
        half(0, d)
        half(2, -d * (7.5 if qtype == T.Q4_1 else 15.5) * rng.uniform(0.8, 1.2, size=n_blocks))
    elif qtype in (T.Q4_K, T.Q5_K):
        half(0, d)
        half(2, d * (7.5 if qtype == T.Q4_K else 15.5) * rng.uniform(0.9, 1.1, size=n_blocks))
    elif qtype == T.Q6_K:
        half(208, d * sign)
    else:
        raise ValueError(qtype)
    return raw


def random_k_weight(qtype, shape, std, rng):
    """A [out][in] weight of a K type whose dequantised standard deviation is about std: (raw, float32)."""
    n_blocks = int(np.prod(shape)) // 256
    probe = gguf.dequantize(random_blocks(qtype, 64, np.random.default_rng(7), 0.01), qtype)
    raw = random_blocks(qtype, n_blocks, rng, 0.01 * std / float(probe.std()))
    raw = raw.reshape(shape[0], -1)
    return raw, gguf.dequantize(raw, qtype).reshape(shape)


def store(weight, qtype, rng=None):
    """float32 [out][in] -> (array for GGUFWriter, the float32 values that a reader gets back)."""
    weight = np.ascontiguousarray(weight, dtype=np.float32)
    if qtype == T.F32:
        return weight, weight
    if qtype == T.F16:
        h = weight.astype(np.float16)
        return h, h.astype(np.float32)
    if qtype in K_TYPES:
        return random_k_weight(qtype, weight.shape, float(weight.std()), rng)
    raw = gguf.quantize(weight, qtype)
    return raw, gguf.dequantize(raw, qtype).reshape(weight.shape)


# ---- weights ------------------------------------------------------------------------------------------------

def randomise(model, seed, head_gain=2.5):
    """Fills all parameters: lively logits, biases and norm weights not at their defaults."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            r = torch.randn(p.shape, generator=g)
            if p.ndim == 1:
                is_norm = "norm" in name or "ln_q" in name
                p.copy_(1.0 + 0.2 * r if is_norm and name.endswith("weight") else 0.3 * r)
            elif "embed_tokens" in name or "lm_head" in name:
                p.copy_(r * head_gain / p.shape[-1] ** 0.5)
            else:
                fan_in = p[0].numel()
                gain = 1.5 if any(s in name for s in ("q_proj", "k_proj", "qkv")) else 1.0
                p.copy_(r * gain / fan_in ** 0.5)
    return model.eval()


def permute_rows(w, n_head):
    """HF rotate-half row order -> adjacent pairs, as llama.cpp's llama converter stores q and k."""
    return w.reshape(n_head, 2, w.shape[0] // n_head // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def unpermute_rows(w, n_head):
    return w.reshape(n_head, w.shape[0] // n_head // 2, 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


# ---- a small real vocabulary for the models --------------------------------------------------------------------

CORPUS = """The quick brown fox jumps over the lazy dog. What colour is the circle? The circle is red and the square is blue.
How many shapes are there in the picture? There are three shapes. you are a helpful assistant system user"""
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
CHATML = ("{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
          "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
          "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def byte_vocab(size):
    """(tokens, merges) of a byte-level BPE with exactly size tokens, control tokens last."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.train_from_iterator([CORPUS], trainers.BpeTrainer(
        vocab_size=size - len(CONTROL), initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False))
    state = json.loads(tok.to_str())["model"]
    tokens = [t for t, _ in sorted(state["vocab"].items(), key=lambda kv: kv[1])]
    merges = [m if isinstance(m, str) else " ".join(m) for m in state["merges"]]
    assert len(tokens) == size - len(CONTROL), len(tokens)
    return tokens + CONTROL, merges


def add_vocab(w, size, pre):
    tokens, merges = byte_vocab(size)
    n = size - len(CONTROL)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre(pre)
    w.add_token_list(tokens)
    w.add_token_types([gguf.TokenType.NORMAL] * n + [gguf.TokenType.CONTROL] * len(CONTROL))
    w.add_token_merges(merges)
    w.add_bos_token_id(n)
    w.add_eos_token_id(n + 2)
    w.add_pad_token_id(n)
    w.add_add_bos_token(False)
    w.add_chat_template(CHATML)


def finish(w):
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def add_tensor(w, name, array, qtype):
    if qtype in (T.F32, T.F16):
        w.add_tensor(name, np.ascontiguousarray(array))
    else:
        w.add_tensor(name, np.ascontiguousarray(array), raw_dtype=qtype)


def add_f32(w, name, array):
    w.add_tensor(name, np.ascontiguousarray(array, dtype=np.float32))


def add_ints(w, key, values):
    w.add_array(key, [int(v) for v in values])


# ---- what rounding does ----------------------------------------------------------------------------------------

def _round_bf16(x):
    return x.to(torch.bfloat16).to(torch.float32)


def _round_q8(x):
    b = x.reshape(*x.shape[:-1], -1, 32)
    d = b.abs().amax(-1, keepdim=True) / 127.0
    q = torch.where(d > 0, torch.round(b / d), torch.zeros_like(b))
    return (q * d.half().float()).reshape(x.shape)


class rounded:
    """Within it every nn.Linear sees rounded inputs: what an engine does that multiplies in bf16 (weights rounded too), or whose
    quantised mat-vec turns each 32 activations into int8."""

    def __init__(self, how):
        self.how = how

    def __enter__(self):
        self.plain = torch.nn.Linear.forward
        how = self.how

        def forward(lin, x):
            if how == "bf16":
                return torch.nn.functional.linear(_round_bf16(x), _round_bf16(lin.weight), lin.bias)
            if x.shape[-1] % 32:
                return torch.nn.functional.linear(x, lin.weight, lin.bias)
            return torch.nn.functional.linear(_round_q8(x), lin.weight, lin.bias)

        torch.nn.Linear.forward = forward

    def __exit__(self, *_):
        torch.nn.Linear.forward = self.plain


def add_deviation(w, run, golden):
    """run() -> the golden again; how far rounding moves it goes into the metadata: parity.<how>.{max,nmse}."""
    for how in ("bf16", "q8"):
        with rounded(how):
            d = run() - golden
        worst, nmse = float(np.abs(d).max()), float((d ** 2).sum() / (golden ** 2).sum())
        w.add_float32(f"parity.{how}.max", worst)
        w.add_float32(f"parity.{how}.nmse", nmse)
        print(f"    {how}: max |d| {worst:.4g}, nmse {nmse:.3g}, golden std {golden.std():.3g}")
