"""Text goldens: random-weight checkpoints run by Hugging Face transformers, stored as GGUF in llama.cpp's layout.
For a stored type other than F32 the reference runs with the values that the stored blocks stand for."""

import itertools
import os

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as T
from transformers import (LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen2VLConfig,
                          Qwen2VLForConditionalGeneration, Qwen3Config, Qwen3ForCausalLM)

import goldens as G

VOCAB, N_PROMPT, N_NEXT = 320, 40, 16
END = {VOCAB - 6, VOCAB - 4}  # end of generation: an engine would stop there
MIXED = (T.F16, T.BF16, T.Q8_0)
LEGACY = (T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0)
SECTIONS = [4, 6, 6]
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}

# HF suffix -> GGUF suffix; all that a layer may have.
LAYER = {"input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
         "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}


def base(width, heads, kv, ffn, layers=3, tied=False, **kw):
    return dict(vocab_size=VOCAB, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv,
                intermediate_size=ffn, max_position_embeddings=512, rms_norm_eps=1e-5, tie_word_embeddings=tied,
                bos_token_id=VOCAB - 6, eos_token_id=VOCAB - 4, attn_implementation="eager", **kw)


def rope(theta, **kw):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **kw}}


def qwen2vl_config(width, heads, kv, ffn, vision):
    kw = base(width, heads, kv, ffn, **rope(1e6, mrope_section=SECTIONS))
    for k in ("attn_implementation", "tie_word_embeddings"):
        kw.pop(k)
    c = Qwen2VLConfig(text_config=kw, vision_config=vision, image_token_id=VOCAB - 1, vision_start_token_id=VOCAB - 3,
                      vision_end_token_id=VOCAB - 2, video_token_id=VOCAB + 7, tie_word_embeddings=False)
    c._attn_implementation = "eager"
    return c


NO_VISION = dict(depth=1, embed_dim=32, num_heads=1, hidden_size=64, patch_size=14, mlp_ratio=1)

# name -> (arch, pre-tokenizer, make model)
MODELS = {
    "qwen2": ("qwen2", "qwen2", lambda: Qwen2ForCausalLM(Qwen2Config(**base(64, 2, 1, 160, **rope(1e6))))),
    "qwen3": ("qwen3", "qwen2", lambda: Qwen3ForCausalLM(Qwen3Config(**base(64, 4, 2, 96, tied=True, head_dim=32, **rope(1e6))))),
    "llama": ("llama", "llama-bpe", lambda: LlamaForCausalLM(LlamaConfig(**base(64, 2, 1, 128, **rope(10000.0))))),
    "llama3": ("llama", "llama-bpe", lambda: LlamaForCausalLM(LlamaConfig(
        **base(64, 2, 2, 96, tied=True, attention_bias=True, rope_parameters=LLAMA3)))),
    "qwen2vl": ("qwen2vl", "qwen2", lambda: Qwen2VLForConditionalGeneration(qwen2vl_config(64, 2, 1, 128, NO_VISION))),
}
WIDE = {
    "qwen2-legacy": ("qwen2", "qwen2", lambda: Qwen2ForCausalLM(Qwen2Config(**base(256, 8, 2, 256, layers=2, **rope(1e6))))),
    "llama-k": ("llama", "llama-bpe", lambda: LlamaForCausalLM(LlamaConfig(**base(256, 8, 2, 256, layers=2, **rope(10000.0))))),
}


def tensors(model, cfg):
    """Yields (GGUF name, HF parameter, heads to permute or 0)."""
    params = {n.replace("model.language_model.", "model."): p for n, p in model.named_parameters() if ".visual." not in n}
    for name, p in params.items():
        stem, leaf = name.rsplit(".", 1)
        if name == "model.embed_tokens.weight":
            yield "token_embd.weight", p, 0
        elif name == "model.norm.weight":
            yield "output_norm.weight", p, 0
        elif name == "lm_head.weight":
            yield "output.weight", p, 0
        else:
            _, _, i, part = stem.split(".", 3)
            heads = 0
            if cfg["arch"] == "llama":
                heads = {"self_attn.q_proj": cfg["n_head"], "self_attn.k_proj": cfg["n_kv"]}.get(part, 0)
            yield f"blk.{i}.{LAYER[part]}.{leaf}", p, heads


def write_keys(w, arch, name, c, pre):
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    w.add_name("parity-" + name)
    w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(c.hidden_size)
    w.add_block_count(c.num_hidden_layers)
    w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(c.num_attention_heads)
    w.add_head_count_kv(c.num_key_value_heads)
    w.add_layer_norm_rms_eps(c.rms_norm_eps)
    w.add_rope_freq_base(c.rope_parameters["rope_theta"])
    if arch == "llama":
        w.add_vocab_size(c.vocab_size)
        w.add_rope_dimension_count(head_dim)
    if head_dim * c.num_attention_heads != c.hidden_size:
        w.add_key_length(head_dim)
        w.add_value_length(head_dim)
    if arch == "qwen2vl":
        w.add_rope_dimension_sections(SECTIONS + [0])
    G.add_vocab(w, c.vocab_size, pre)


def rope_freqs(head_dim, r):
    """llama.cpp's divisors for llama3 scaling; transformers' own scaled inv_freq is what is written: factor = plain / scaled."""
    plain = 1.0 / r["rope_theta"] ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    cfg = LlamaConfig(hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, max_position_embeddings=512, rope_parameters=dict(r))
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](cfg, "cpu")
    f = plain / scaled.double().numpy()
    assert f.min() > 0.99 and f.max() < r["factor"] * 1.01 and len(np.unique(np.round(f, 2))) > 2
    return f.astype(np.float32)


def export(model, name, arch, pre, types, path):
    """Writes the GGUF and puts the stored values back into the model."""
    c = model.config.get_text_config()
    cfg = {"arch": arch, "n_head": c.num_attention_heads, "n_kv": c.num_key_value_heads}
    rng = np.random.default_rng(11)
    cycle = itertools.cycle(types)
    w = gguf.GGUFWriter(path, arch)
    write_keys(w, arch, name, c, pre)
    if c.rope_parameters["rope_type"] == "llama3":
        G.add_f32(w, "rope_freqs.weight", rope_freqs(c.hidden_size // c.num_attention_heads, c.rope_parameters))
    with torch.no_grad():
        for gname, p, heads in tensors(model, cfg):
            a = p.detach().numpy()
            a = G.permute_rows(a, heads) if heads else a
            qtype = next(cycle) if a.ndim == 2 else T.F32
            raw, back = G.store(a, qtype, rng)
            G.add_tensor(w, gname, raw, qtype)
            back = G.unpermute_rows(back, heads) if heads else back
            p.copy_(torch.from_numpy(np.array(back)))
    G.finish(w)


def logits_of(model, ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0].float().numpy()


def continue_greedy(model, ids):
    """(next ids, logits that chose each, smallest gap between first and second)."""
    seq, rows, margin = list(ids), [], np.inf
    for _ in range(N_NEXT):
        row = logits_of(model, seq)[-1]
        top = np.sort(row)[-2:]
        margin = min(margin, float(top[1] - top[0]))
        rows.append(row)
        seq.append(int(row.argmax()))
    return seq[len(ids):], np.stack(rows), margin


def make_golden(model, name, path):
    """Of random prompts the first whose greedy continuation varies and is decided clearly, so that rounding can not flip it."""
    best, best_key = None, (0, 0.0)
    for seed in range(200):
        ids = np.random.default_rng(1000 + seed).integers(0, VOCAB - 6, N_PROMPT).tolist()
        found = (*continue_greedy(model, ids), ids)
        key = (min(len(set(found[0])), 6) if found[2] > 0.15 and not END.intersection(found[0]) else 0, found[2])
        if best is None or key > best_key:
            best, best_key = found, key
        if key[0] == 6 and key[1] > 0.25:
            break
    nxt, rows, margin, ids = best
    logits = logits_of(model, ids)
    w = gguf.GGUFWriter(path, "parity")
    G.add_ints(w, "parity.ids", ids)
    G.add_ints(w, "parity.next_ids", nxt)
    w.add_float32("parity.next_margin", margin)
    print(f"  {name}: margin {margin:.3f}, distinct next {len(set(nxt))}")
    G.add_deviation(w, lambda: logits_of(model, ids), logits)
    G.add_f32(w, "logits", logits)
    G.add_f32(w, "next_logits", rows)
    G.finish(w)


def main():
    out = G.out_dir("text")
    jobs = []
    for name, spec in MODELS.items():
        jobs += [(name + "-f32", spec, (T.F32,)), (name + "-mixed", spec, MIXED)]
    jobs += [("qwen2-legacy", WIDE["qwen2-legacy"], LEGACY), ("llama-k", WIDE["llama-k"], G.K_TYPES)]
    for i, (name, (arch, pre, make), types) in enumerate(jobs):
        model = G.randomise(make(), 100 + i)
        export(model, name, arch, pre, types, os.path.join(out, name + ".gguf"))
        make_golden(model, name, os.path.join(out, name + ".golden.gguf"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
