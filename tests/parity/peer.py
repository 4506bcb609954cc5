"""Farsight beside llama.cpp: the same files and thread count on one machine, in turn, in one run, so that a busy machine slows both.
Run by `scripts/bench peer`, with the python of an environment that holds llama-cpp-python and gguf. One JSON object on stdout."""

import argparse
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import zlib

import numpy as np

import llamacpp


def say(text):
    print(text, file=sys.stderr, flush=True)


def ours(program, *args):
    return json.loads(subprocess.run([program, "--json", *args], check=True, stdout=subprocess.PIPE).stdout)


def compared(ours_all, theirs_all, better_high):
    a, b = statistics.median(ours_all), statistics.median(theirs_all)
    return {"ours": round(a, 2), "llamacpp": round(b, 2), "ratio": round(a / b if better_high else b / a, 3),
            "ours_all": [round(v, 2) for v in ours_all], "llamacpp_all": [round(v, 2) for v in theirs_all]}


def compare_text(a, path):
    """Tokens a second; ratio > 1: ours is faster."""
    bench = os.path.join(a.build, "server/engine/farsight-bench-engine")
    llm = llamacpp.Text(path, a.threads, a.prompt + a.gen + 8, a.flash)
    ids = np.random.default_rng(1).integers(0, 150000, a.prompt).tolist()
    llm.time(ids, 2)
    prefill, decode = ([], []), ([], [])
    for _ in range(a.rounds):
        r = ours(bench, "--model", path, "--threads", str(a.threads), "--prompt-tokens", str(a.prompt), "--gen", str(a.gen), "--repeat", "1")
        read, passes = llm.time(ids, a.gen)
        prefill[0].append(r["prefill_tokens_per_s"]["median"])
        decode[0].append(r["decode_tokens_per_s"]["median"])
        prefill[1].append(a.prompt / read)
        decode[1].append(a.gen / passes)
    out = {"model": os.path.basename(path), "prompt_tokens": a.prompt, "generated": a.gen,
           "prefill_tokens_per_s": compared(*prefill, True), "decode_tokens_per_s": compared(*decode, True)}
    for what in ("prefill", "decode"):
        v = out[what + "_tokens_per_s"]
        say(f"{out['model']:24} {what:8} ours {v['ours']:9.1f} tokens/s   llama.cpp {v['llamacpp']:9.1f}   x {v['ratio']:.2f}")
    return out


def draw(width, height):
    rng = np.random.default_rng(3)
    y, x = np.mgrid[0:height, 0:width]
    rgb = np.stack([x * 255 // width, y * 255 // height, (x // 40 + y // 40) % 2 * 160], -1) + rng.integers(0, 24, (height, width, 1))
    return np.clip(rgb, 0, 255).astype(np.uint8)


def png(path, rgb):
    """No picture library is asked of the environment: an RGB PNG, every row unfiltered."""
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + row.tobytes() for row in rgb)
    with open(path, "wb") as f:
        f.write(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", rgb.shape[1], rgb.shape[0], 8, 2, 0, 0, 0)) +
                chunk(b"IDAT", zlib.compress(rows, 1)) + chunk(b"IEND", b""))


def rows_of(path):
    with open(path, "rb") as f:
        magic, n, _nx, _ny, width = struct.unpack("<5i", f.read(20))
        assert magic == 0x31455653
        return np.frombuffer(f.read(), dtype="<f4").reshape(n, width)


def compare_vision(a, mmproj, text):
    """Milliseconds from the picture (ours: the PNG file's bytes; theirs: its pixels) to its rows; ratio > 1: ours is faster."""
    bench = os.path.join(a.build, "remote/encoder/farsight-bench-encoder")
    vision, out = llamacpp.Vision(mmproj, llamacpp.Text(text, a.threads), a.threads), []
    for size in a.size:
        w, h = (int(v) for v in size.split("x"))
        rgb, times = draw(w, h), ([], [])
        with tempfile.TemporaryDirectory() as tmp:
            picture, rows = os.path.join(tmp, "p.png"), os.path.join(tmp, "rows")
            png(picture, rgb)
            theirs, _ = vision.encode(rgb)
            for _ in range(a.rounds):
                r = ours(bench, "--mmproj", mmproj, "--picture", picture, "--rows", rows, "--threads", str(a.threads), "--repeat", "1")
                times[0].append(r["pictures"][0]["encode_ms"])
                times[1].append(vision.encode(rgb)[1] * 1000)
            mine = rows_of(rows)
        same = mine.shape == theirs.shape
        nmse = float(((mine - theirs) ** 2).sum() / (theirs ** 2).sum()) if same else None
        v = compared(*times, False)
        out.append({"mmproj": os.path.basename(mmproj), "picture": size, "rows": len(mine), "encode_ms": v, "rows_nmse": nmse})
        say(f"{out[-1]['mmproj']:24} {size:8} ours {v['ours']:9.1f} ms         llama.cpp {v['llamacpp']:9.1f}   x {v['ratio']:.2f}   "
            f"rows: {f'NMSE {nmse:.2g}' if same else f'{mine.shape} and {theirs.shape}'}")
    return out


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--build", required=True)
    p.add_argument("--models", required=True, help="folder that make_speed_model.py filled")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--prompt", type=int, default=256)
    p.add_argument("--gen", type=int, default=16)
    p.add_argument("--size", action="append", help="WxH; sides that are multiples of 28 are the same picture to both")
    p.add_argument("--flash", action="store_true", help="flash attention in llama.cpp")
    p.add_argument("--only", choices=["text", "vision"])
    a = p.parse_args()
    a.size = a.size or ["448x448"]
    texts = [os.path.join(a.models, n) for n in ("text-q4_k_m.gguf", "text-q8_0.gguf")]
    out = {"threads": a.threads, "rounds": a.rounds}
    if a.only != "vision":
        out["text"] = [compare_text(a, t) for t in texts]
    if a.only != "text":
        out["vision"] = compare_vision(a, os.path.join(a.models, "mmproj-f16.gguf"), texts[0])
    print(json.dumps(out))


main()
