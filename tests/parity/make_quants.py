"""quants.gguf: random blocks of each type and the values that the PyPI package gguf decodes them to."""

import os

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T

import goldens as G

TYPES = (T.F16, T.BF16, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.Q4_K, T.Q5_K, T.Q6_K)
BLOCKS = {32: 32, 256: 12}


def patterns16(qtype, rng):
    """2048 16-bit patterns: every exponent, zeros and subnormals of both signs; no infinity, no NaN."""
    mantissa, exps = (10, 31) if qtype == T.F16 else (7, 255)
    edge = [s << 15 | e << mantissa | m for s in (0, 1) for e in range(exps) for m in (0, 1, (1 << mantissa) - 1)]
    more = rng.integers(0, 1 << 16, 4 * 2048)
    more = more[(more >> mantissa & exps) != exps]
    return np.array(edge + more.tolist(), dtype="<u2")[:2048]


def blocks(qtype, rng):
    elems, nbytes = gguf.GGML_QUANT_SIZES[qtype]
    n = BLOCKS[elems]
    raw = G.random_blocks(qtype, n, rng, 0.02)
    # Beside the random ones: a zero scale, the smallest subnormal half, and all-zero and all-one payloads.
    d = 208 if qtype == T.Q6_K else 0
    raw[0, d:d + 2] = 0
    raw[1, d:d + 2] = (1, 0)
    keep = raw[2:4].copy()
    raw[2], raw[3] = 0, 255
    width = 4 if qtype in (T.Q4_1, T.Q5_1, T.Q4_K, T.Q5_K) else 2
    raw[2:4, d:d + width] = keep[:, d:d + width]
    return raw


def main():
    rng = np.random.default_rng(5)
    w = gguf.GGUFWriter(os.path.join(G.HERE, "quants.gguf"), "parity")
    for t in TYPES:
        name = t.name.lower()
        if t in (T.F16, T.BF16):
            bits = patterns16(t, rng)
            raw, row = bits.view(np.uint8), bits.size
            values = bits.view(np.float16).astype(np.float32) if t == T.F16 else gguf.dequantize(bits.view(np.uint8).reshape(1, -1), t)
        else:
            raw = blocks(t, rng)
            row, values = raw.shape[0] * gguf.GGML_QUANT_SIZES[t][0], gguf.dequantize(raw, t)
        values = values.reshape(-1)
        assert np.isfinite(values).all() and values.size == row
        flat = np.ascontiguousarray(raw).reshape(-1)
        w.add_tensor(name + ".raw", flat.view(np.int8))
        G.add_tensor(w, name + ".typed", flat.view(np.float16) if t == T.F16 else flat, t)
        G.add_f32(w, name + ".f32", values)
        print(f"  {name}: {values.size} values, {np.abs(values).max():.4g} largest")
    G.finish(w)


if __name__ == "__main__":
    main()
