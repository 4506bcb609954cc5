"""Writes the two GGUF files from a model, and reads them back into one.

Tensor names are those of llama.cpp. Matrices are F16, vectors and the patch kernels F32. A still picture feeds
both temporal kernels, so each holds half of the trained kernel.
"""
import json
import os

import gguf
import numpy as np
import torch

from model import MEAN, STD, Config, Model
from tok import SPECIAL, Vocabulary

TEXT, TOWER = "farsight-mini-text.gguf", "farsight-mini-mmproj.gguf"
# Between them smart_resize makes the grids of data.SIZES of all pictures that are not very long.
MIN_PIXELS, MAX_PIXELS = 26 * 784, 37 * 784
CONTEXT = 2048
# ChatML as Qwen2-VL speaks it: content is a string or a list of parts.
TEMPLATE = """{%- if messages and messages[0].role != 'system' -%}
<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' or part.type == 'image_url' or 'image' in part or 'image_url' in part -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif 'text' in part -%}
{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}"""

TEXT_LAYER = {"attn_norm.weight": "n1.weight", "ffn_norm.weight": "n2.weight", "attn_q.weight": "q.weight",
              "attn_q.bias": "q.bias", "attn_k.weight": "k.weight", "attn_k.bias": "k.bias",
              "attn_v.weight": "v.weight", "attn_v.bias": "v.bias", "attn_output.weight": "o.weight",
              "ffn_gate.weight": "gate.weight", "ffn_up.weight": "up.weight", "ffn_down.weight": "down.weight"}
TOWER_LAYER = {f"{theirs}.{kind}": f"{ours}.{kind}" for kind in ("weight", "bias") for theirs, ours in
               (("ln1", "ln1"), ("ln2", "ln2"), ("attn_q", "q"), ("attn_k", "k"), ("attn_v", "v"),
                ("attn_out", "out"), ("ffn_up", "up"), ("ffn_down", "down"))}


def text_names(c):
    names = {"token_embd.weight": "text.embed.weight", "output_norm.weight": "text.norm.weight"}
    for n in range(c.layers):
        names.update({f"blk.{n}.{a}": f"text.layers.{n}.{b}" for a, b in TEXT_LAYER.items()})
    return names


def tower_names(c):
    names = {"v.post_ln.weight": "tower.post_ln.weight", "v.post_ln.bias": "tower.post_ln.bias"}
    for n in (0, 2):
        names.update({f"mm.{n}.{kind}": f"tower.mm{n}.{kind}" for kind in ("weight", "bias")})
    for n in range(c.v_layers):
        names.update({f"v.blk.{n}.{a}": f"tower.layers.{n}.{b}" for a, b in TOWER_LAYER.items()})
    return names


def stored(x):
    x = x.detach().float().contiguous().numpy()
    return x.astype(np.float16) if x.ndim > 1 else x


def finish(writer, path):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(path + ".part", path)


def export_text(state, c, v, path):
    w = gguf.GGUFWriter(path + ".part", "qwen2vl")
    w.add_type("model")
    w.add_name("Farsight mini")
    w.add_description("Answers questions about simple drawn pictures")
    w.add_license("mit")
    w.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    w.add_context_length(CONTEXT)
    w.add_embedding_length(c.dim)
    w.add_block_count(c.layers)
    w.add_feed_forward_length(c.ffn)
    w.add_head_count(c.heads)
    w.add_head_count_kv(c.kv_heads)
    w.add_layer_norm_rms_eps(c.eps)
    w.add_rope_freq_base(c.base)
    w.add_rope_dimension_count(c.dim // c.heads)
    w.add_rope_dimension_sections([*c.sections, 0])
    w.add_vocab_size(c.vocab)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen2")
    w.add_token_list(v.tokens)
    w.add_token_types([gguf.TokenType.CONTROL if t in SPECIAL else gguf.TokenType.NORMAL for t in v.tokens])
    w.add_token_merges(v.merges)
    w.add_bos_token_id(v.eot)
    w.add_eos_token_id(v.end)
    w.add_eot_token_id(v.end)
    w.add_pad_token_id(v.eot)
    w.add_add_bos_token(False)
    w.add_chat_template(TEMPLATE)
    for name, ours in text_names(c).items():
        w.add_tensor(name, stored(state[ours]))
    finish(w, path)


def export_tower(state, c, path):
    w = gguf.GGUFWriter(path + ".part", "clip")
    w.add_type("mmproj")
    w.add_name("Farsight mini")
    w.add_license("mit")
    w.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    w.add_bool("clip.has_vision_encoder", True)
    w.add_string("clip.projector_type", "qwen2vl_merger")
    w.add_uint32("clip.vision.image_size", 224)
    w.add_uint32("clip.vision.patch_size", 14)
    w.add_uint32("clip.vision.spatial_merge_size", 2)
    w.add_uint32("clip.vision.embedding_length", c.v_dim)
    w.add_uint32("clip.vision.feed_forward_length", c.v_ffn)
    w.add_uint32("clip.vision.projection_dim", c.dim)
    w.add_uint32("clip.vision.block_count", c.v_layers)
    w.add_uint32("clip.vision.attention.head_count", c.v_heads)
    w.add_float32("clip.vision.attention.layer_norm_epsilon", c.eps)
    w.add_array("clip.vision.image_mean", list(MEAN))
    w.add_array("clip.vision.image_std", list(STD))
    w.add_uint32("clip.vision.image_min_pixels", MIN_PIXELS)
    w.add_uint32("clip.vision.image_max_pixels", MAX_PIXELS)
    kernel = (state["tower.embed.weight"].float() / 2).view(c.v_dim, 3, 14, 14).numpy()
    for name in ("v.patch_embd.weight", "v.patch_embd.weight.1"):
        w.add_tensor(name, kernel.astype(np.float32))
    for name, ours in tower_names(c).items():
        w.add_tensor(name, stored(state[ours]))
    finish(w, path)


def export(model, v, folder):
    os.makedirs(folder, exist_ok=True)
    state = {k: p.detach() for k, p in model.state_dict().items()}
    export_text(state, model.c, v, os.path.join(folder, TEXT))
    export_tower(state, model.c, os.path.join(folder, TOWER))


def field(reader, key):
    return reader.fields[key].contents()


def read_back(folder):
    """-> Model, Vocabulary from the two files alone."""
    text = gguf.GGUFReader(os.path.join(folder, TEXT))
    tower = gguf.GGUFReader(os.path.join(folder, TOWER))
    q, n = "qwen2vl.", "clip.vision."
    c = Config(vocab=len(field(text, "tokenizer.ggml.tokens")), v_dim=field(tower, n + "embedding_length"),
               v_heads=field(tower, n + "attention.head_count"), v_layers=field(tower, n + "block_count"),
               v_ffn=field(tower, n + "feed_forward_length"), dim=field(text, q + "embedding_length"),
               heads=field(text, q + "attention.head_count"), kv_heads=field(text, q + "attention.head_count_kv"),
               layers=field(text, q + "block_count"), ffn=field(text, q + "feed_forward_length"),
               base=field(text, q + "rope.freq_base"), sections=tuple(field(text, q + "rope.dimension_sections")[:3]),
               eps=field(text, q + "attention.layer_norm_rms_epsilon"))
    model = Model(c)
    state = model.state_dict()
    tensors = {t.name: t for r in (text, tower) for t in r.tensors}
    for name, ours in (text_names(c) | tower_names(c)).items():
        t = tensors[name]
        x = gguf.dequantize(t.data, t.tensor_type).reshape(state[ours].shape)
        state[ours] = torch.from_numpy(np.array(x, np.float32))
    kernels = [np.array(tensors["v.patch_embd.weight" + s].data, np.float32) for s in ("", ".1")]
    state["tower.embed.weight"] = torch.from_numpy(sum(kernels).reshape(c.v_dim, 588))
    model.load_state_dict(state)
    return model.eval(), Vocabulary(field(text, "tokenizer.ggml.tokens"), field(text, "tokenizer.ggml.merges"))


def export_checkpoint(path, folder):
    c = torch.load(path, weights_only=False)
    config = Config(**c["config"])
    model = Model(config)
    model.load_state_dict(c["average"])
    export(model, Vocabulary(c["tokens"], c["merges"]), folder)
    print(json.dumps(dict(step=c["step"], minutes=round(c["spent"] / 60, 1), folder=folder)))
