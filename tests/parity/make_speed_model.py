"""Random-weight models at shapes that people run, for measuring speed: they are valid, their answers mean nothing. Not committed.

usage: make_speed_model.py FOLDER [--layers N] [--depth N]
writes FOLDER/text-q4_k_m.gguf  Qwen2-VL 2B's text shape (width 1536), Q4_K with Q6_K where Q4_K_M has it
       FOLDER/text-q8_0.gguf    Qwen2 0.5B's shape (width 896), Q8_0
       FOLDER/mmproj-f16.gguf   Qwen2-VL's vision tower (width 1280, 16 heads), rows for the first
Layers alike repeat, so a part of them is enough: --layers of each text model (default 6), --depth of the tower (default 8).
"""

import argparse
import os

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T

import goldens as G

VOCAB = 151936
TEXTS = {
    "text-q4_k_m": dict(arch="qwen2vl", width=1536, heads=12, kv=2, ffn=8960, types=(T.Q4_K, T.Q6_K)),
    "text-q8_0": dict(arch="qwen2", width=896, heads=14, kv=2, ffn=4864, types=(T.Q8_0, T.Q8_0)),
}
SECTIONS = [16, 24, 24, 0]
VISION = dict(width=1280, heads=16, ffn=5120, patch=14, merge=2)


def byte_characters():
    """GPT-2's printable character of each byte."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in kept]
    return [chr(b) for b in kept] + [chr(256 + i) for i in range(len(rest))]


def add_vocab(w):
    n = VOCAB - len(G.CONTROL)
    tokens = byte_characters() + ["ab"]
    tokens += [f"filler{i}" for i in range(n - len(tokens))]
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen2")
    w.add_token_list(tokens + G.CONTROL)
    w.add_token_types([gguf.TokenType.NORMAL] * n + [gguf.TokenType.CONTROL] * len(G.CONTROL))
    w.add_token_merges(["a b"])
    w.add_bos_token_id(n)
    w.add_eos_token_id(n + 2)
    w.add_add_bos_token(False)
    w.add_chat_template(G.CHATML)


def weight(w, name, qtype, n_out, n_in, rng):
    """[n_out][n_in] of random blocks whose values have a standard deviation of about 1/sqrt(n_in)."""
    std = n_in ** -0.5
    if qtype == T.F16:
        w.add_tensor(name, (rng.standard_normal((n_out, n_in), dtype=np.float32) * std).astype(np.float16))
        return
    values, _ = gguf.GGML_QUANT_SIZES[qtype]
    probe = gguf.dequantize(G.random_blocks(qtype, 64, np.random.default_rng(7), 0.01), qtype).std()
    raw = G.random_blocks(qtype, n_out * n_in // values, rng, 0.01 * std / float(probe))
    w.add_tensor(name, raw.reshape(n_out, -1), raw_dtype=qtype)


def vector(w, name, n, rng, centre=0.0):
    w.add_tensor(name, (centre + 0.1 * rng.standard_normal(n)).astype(np.float32))


def more_bits(i, n):
    """The layers whose v and down projections llama.cpp's Q4_K_M stores with more bits."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def write_text(path, m, layers):
    rng = np.random.default_rng(1)
    kind, better = m["types"]
    head = m["width"] // m["heads"]
    w = gguf.GGUFWriter(path, m["arch"])
    w.add_name(os.path.basename(path))
    w.add_context_length(32768)
    w.add_embedding_length(m["width"])
    w.add_block_count(layers)
    w.add_feed_forward_length(m["ffn"])
    w.add_head_count(m["heads"])
    w.add_head_count_kv(m["kv"])
    w.add_layer_norm_rms_eps(1e-6)
    w.add_rope_freq_base(1e6)
    if m["arch"] == "qwen2vl":
        w.add_rope_dimension_sections(SECTIONS)
    add_vocab(w)
    weight(w, "token_embd.weight", better, VOCAB, m["width"], rng)  # tied
    vector(w, "output_norm.weight", m["width"], rng, 1.0)
    for i in range(layers):
        b = f"blk.{i}."
        extra = better if more_bits(i, layers) else kind
        vector(w, b + "attn_norm.weight", m["width"], rng, 1.0)
        vector(w, b + "ffn_norm.weight", m["width"], rng, 1.0)
        for part, n, qtype in (("q", m["width"], kind), ("k", m["kv"] * head, kind), ("v", m["kv"] * head, extra)):
            weight(w, f"{b}attn_{part}.weight", qtype, n, m["width"], rng)
            vector(w, f"{b}attn_{part}.bias", n, rng)
        weight(w, b + "attn_output.weight", kind, m["width"], m["width"], rng)
        weight(w, b + "ffn_gate.weight", kind, m["ffn"], m["width"], rng)
        weight(w, b + "ffn_up.weight", kind, m["ffn"], m["width"], rng)
        weight(w, b + "ffn_down.weight", extra, m["width"], m["ffn"], rng)
    G.finish(w)


def vision_keys(w, depth, rows_width):
    p = "clip.vision."
    w.add_type("mmproj")
    w.add_name("speed-vision")
    w.add_bool("clip.has_vision_encoder", True)
    w.add_string("clip.projector_type", "qwen2vl_merger")
    w.add_uint32(p + "image_size", 560)
    w.add_uint32(p + "patch_size", VISION["patch"])
    w.add_uint32(p + "embedding_length", VISION["width"])
    w.add_uint32(p + "feed_forward_length", VISION["ffn"])
    w.add_uint32(p + "block_count", depth)
    w.add_uint32(p + "attention.head_count", VISION["heads"])
    w.add_uint32(p + "projection_dim", rows_width)
    w.add_uint32(p + "spatial_merge_size", VISION["merge"])
    w.add_float32(p + "attention.layer_norm_epsilon", 1e-6)
    w.add_array(p + "image_mean", [0.48145466, 0.4578275, 0.40821073])
    w.add_array(p + "image_std", [0.26862954, 0.26130258, 0.27577711])


def write_vision(path, depth, rows_width):
    rng = np.random.default_rng(2)
    d, ffn, wide = VISION["width"], VISION["ffn"], VISION["width"] * VISION["merge"] ** 2
    w = gguf.GGUFWriter(path, "clip")
    vision_keys(w, depth, rows_width)
    for name in ("v.patch_embd.weight", "v.patch_embd.weight.1"):
        w.add_tensor(name, (rng.standard_normal((d, 3, VISION["patch"], VISION["patch"])) * 0.03).astype(np.float16))
    for i in range(depth):
        b = f"v.blk.{i}."
        for name in ("ln1", "ln2"):
            vector(w, f"{b}{name}.weight", d, rng, 1.0)
            vector(w, f"{b}{name}.bias", d, rng)
        for name, n_out, n_in in (("attn_q", d, d), ("attn_k", d, d), ("attn_v", d, d), ("attn_out", d, d),
                                  ("ffn_up", ffn, d), ("ffn_down", d, ffn)):
            weight(w, f"{b}{name}.weight", T.F16, n_out, n_in, rng)
            vector(w, f"{b}{name}.bias", n_out, rng)
    vector(w, "v.post_ln.weight", d, rng, 1.0)
    vector(w, "v.post_ln.bias", d, rng)
    for name, n_out in (("mm.0", wide), ("mm.2", rows_width)):
        weight(w, name + ".weight", T.F16, n_out, wide, rng)
        vector(w, name + ".bias", n_out, rng)
    G.finish(w)


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("folder")
    p.add_argument("--layers", type=int, default=6)
    p.add_argument("--depth", type=int, default=8)
    a = p.parse_args()
    os.makedirs(a.folder, exist_ok=True)
    for name, m in TEXTS.items():
        write_text(os.path.join(a.folder, name + ".gguf"), m, a.layers)
    write_vision(os.path.join(a.folder, "mmproj-f16.gguf"), a.depth, TEXTS["text-q4_k_m"]["width"])


if __name__ == "__main__":
    main()
