"""The network: a qwen2vl vision tower with its merger, and a qwen2vl text model with M-RoPE, at toy size.

Shapes: B pictures, P = gh * gw patches of 14 px in 2 x 2 block order, R = P / 4 rows, N tokens of all sequences, D width.
"""
import math
from dataclasses import asdict, dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

import kernels

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass
class Config:
    vocab: int = 640
    v_dim: int = 128
    v_heads: int = 4
    v_layers: int = 6
    v_ffn: int = 512
    dim: int = 192
    heads: int = 6
    kv_heads: int = 3
    layers: int = 4
    ffn: int = 384
    base: float = 150.0  # the slowest pairs hardly turn within a conversation: things are found at any distance
    sections: tuple = (2, 4, 10)
    eps: float = 1e-6


def patches(pixels):
    """u8 [B, H, W, 3] -> normalised f32 [B, P, 3 * 14 * 14], patches in 2 x 2 block order, (channel, y, x) inside."""
    b, h, w, _ = pixels.shape
    x = (pixels.float() / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
    x = x.view(b, h // 28, 2, 14, w // 28, 2, 14, 3).permute(0, 1, 4, 2, 5, 7, 3, 6)
    return x.reshape(b, (h // 14) * (w // 14), 588)


def block_order(grid):
    """[..., gh, gw] labels -> [..., P] in 2 x 2 block order."""
    *lead, gh, gw = grid.shape
    x = grid.reshape(*lead, gh // 2, 2, gw // 2, 2)
    return x.transpose(-3, -2).reshape(*lead, gh * gw)


def turn(x, cos, sin):
    """Rotates the pairs (i, i + half) of the last axis."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def tower_angles(gh, gw, head_dim):
    """-> cos, sin [P, head_dim / 2]: the first half of the pairs turns with y, the second with x."""
    ys, xs = torch.meshgrid(torch.arange(gh), torch.arange(gw), indexing="ij")
    freq = 10000.0 ** (-4 * torch.arange(head_dim // 4) / head_dim)
    y, x = block_order(ys).float(), block_order(xs).float()
    angle = torch.cat((y[:, None] * freq, x[:, None] * freq), 1)
    return angle.cos(), angle.sin()


def attend(q, k, v, segs, causal):
    """q [n, heads, hd], k and v [n, kv, hd]; segs [S, 4]: a segment's first token and past its last, first and past
    the last of the prefix that its tokens see as well. The slow way; kernels.c has the fast one."""
    n, heads, hd = q.shape
    q = q.float() * hd ** -.5
    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    out = torch.zeros(n, heads, hd)
    for a, b, p, e in segs.tolist():
        keys, values = torch.cat((k[p:e], k[a:b])), torch.cat((v[p:e], v[a:b]))
        s = torch.einsum("qhd,khd->hqk", q[a:b], keys)
        if causal:
            s = s.masked_fill(torch.ones(b - a, b - a + e - p, dtype=torch.bool).triu(e - p + 1), -1e9)
        out[a:b] = torch.einsum("hqk,khd->qhd", s.softmax(-1), values)
    return out


class Linear(nn.Linear):
    def __init__(self, i, o, bias=True, gain=1.0):
        super().__init__(i, o, bias)
        nn.init.normal_(self.weight, std=gain * i ** -.5)
        if bias:
            nn.init.zeros_(self.bias)


class TowerLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        d = c.v_dim
        self.heads = c.v_heads
        self.ln1, self.ln2 = nn.LayerNorm(d, c.eps), nn.LayerNorm(d, c.eps)
        self.q, self.k, self.v, self.out = (Linear(d, d, gain=g) for g in (1, 1, 1, .3))
        self.up, self.down = Linear(d, c.v_ffn), Linear(c.v_ffn, d, gain=.3)

    def forward(self, x, cos, sin, segs):
        if kernels.ready and torch.is_autocast_enabled("cpu"):
            weights = [p for f in (self.ln1, self.q, self.k, self.v, self.out, self.ln2, self.up, self.down)
                       for p in (f.weight, f.bias)]
            w1, b1, wq, bq, wk, bk, wv, bv, *rest = weights
            return kernels.TowerLayer.apply(x.contiguous(), cos, sin, segs, self.heads, self.ln1.eps, w1, b1, wq, wk, wv, bq, bk,
                                            bv, *rest)
        n, d = x.shape
        h = self.ln1(x)
        q, k, v = (f(h).view(n, self.heads, -1) for f in (self.q, self.k, self.v))
        cos, sin = cos[:, None], sin[:, None]
        x = x + self.out(attend(turn(q, cos, sin), turn(k, cos, sin), v, segs, False).reshape(n, d))
        h = self.up(self.ln2(x))
        return x + self.down(h * torch.sigmoid(1.702 * h))


class Tower(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.embed = Linear(588, c.v_dim, bias=False)
        self.layers = nn.ModuleList(TowerLayer(c) for _ in range(c.v_layers))
        self.post_ln = nn.LayerNorm(c.v_dim, c.eps)
        self.mm0, self.mm2 = Linear(4 * c.v_dim, 4 * c.v_dim), Linear(4 * c.v_dim, c.dim)

    def forward(self, x, gh, gw):
        """x [B, P, 588] -> rows [B, R, dim], patch features [B, P, v_dim] (before post_ln)."""
        b, p, _ = x.shape
        cos, sin = (t.repeat(b, 1) for t in tower_angles(gh, gw, self.c.v_dim // self.c.v_heads))
        first = torch.arange(b, dtype=torch.int32) * p
        segs = torch.stack((first, first + p, first, first), 1)
        x = self.embed(x).float().reshape(b * p, -1)
        for layer in self.layers:
            x = layer(x, cos, sin, segs)
        h = self.post_ln(x).view(b, p, -1)
        rows = self.mm2(F.gelu(self.mm0(h.reshape(h.shape[0], -1, 4 * self.c.v_dim))))
        return rows, h


def pairs_from(old, new):
    """For each rotary pair of `new`, the one of `old` on the same axis that turns most nearly alike; pairs that none is
    near to get what is left, the slowest first."""
    def axes(c):
        return [axis for axis, n in enumerate(c.sections) for _ in range(n)]

    def speed(c, i):
        return -i / len(axes(c)) * math.log(c.base)
    n, take = len(axes(new)), {}
    for off, i, j in sorted((abs(speed(old, i) - speed(new, j)), i, j) for i in range(n) for j in range(n)
                            if axes(old)[i] == axes(new)[j]):
        if off < .2 and i not in take.values() and j not in take:
            take[j] = i
    left = sorted(set(range(n)) - set(take.values()))
    return [take[j] if j in take else left.pop() for j in range(n)]


def reorder(weights, old, new):
    """Makes queries and keys that were trained with `old` rotary base and sections a fair beginning for `new`."""
    if (old.base, tuple(old.sections)) == (new.base, tuple(new.sections)):
        return
    take = pairs_from(old, new)
    take = torch.tensor(take + [i + len(take) for i in take])
    for k, p in weights.items():
        if k.startswith("text.") and k.rsplit(".", 2)[-2] in ("q", "k"):
            weights[k] = p.reshape(-1, len(take), *p.shape[1:])[:, take].reshape(p.shape)


class RMSNorm(nn.Module):
    def __init__(self, d, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(d)), eps

    def forward(self, x):
        f = x.float()
        return (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + self.eps)) * self.weight


class TextLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        d, kv = c.dim, c.dim // c.heads * c.kv_heads
        self.c = c
        self.n1, self.n2 = RMSNorm(d, c.eps), RMSNorm(d, c.eps)
        self.q, self.k, self.v = Linear(d, d), Linear(d, kv), Linear(d, kv)
        self.o = Linear(d, d, bias=False, gain=.3)
        self.gate, self.up = Linear(d, c.ffn, bias=False), Linear(d, c.ffn, bias=False)
        self.down = Linear(c.ffn, d, bias=False, gain=.3)

    def forward(self, x, cos, sin, segs):
        c = self.c
        if kernels.ready and torch.is_autocast_enabled("cpu"):
            return kernels.TextLayer.apply(
                x.contiguous(), cos, sin, segs, c.heads, c.kv_heads, c.eps, self.n1.weight, self.q.weight, self.k.weight,
                self.v.weight, self.q.bias, self.k.bias, self.v.bias, self.o.weight, self.n2.weight, self.gate.weight,
                self.up.weight, self.down.weight)
        n, d = x.shape
        h = self.n1(x)
        q, k, v = (f(h).view(n, m, -1) for f, m in ((self.q, c.heads), (self.k, c.kv_heads), (self.v, c.kv_heads)))
        cos, sin = cos[:, None], sin[:, None]
        x = x + self.o(attend(turn(q, cos, sin), turn(k, cos, sin), v, segs, True).reshape(n, d))
        h = self.n2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Text(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.embed = nn.Embedding(c.vocab, c.dim)
        nn.init.normal_(self.embed.weight, std=.1)
        self.layers = nn.ModuleList(TextLayer(c) for _ in range(c.layers))
        self.norm = RMSNorm(c.dim, c.eps)
        half = c.dim // c.heads // 2
        self.register_buffer("freq", c.base ** (-torch.arange(half) / half), persistent=False)
        self.register_buffer("axis", torch.repeat_interleave(torch.arange(3), torch.tensor(c.sections)),
                             persistent=False)

    def forward(self, ids, slots, rows, pos, segs, want=None):
        """ids [N], tokens of all sequences one after the other; slots [N], -1 or the index into rows [R, dim]; pos [N, 3]
        as (t, h, w); segs [S, 4] as in attend. -> final hidden states [N, dim]; want: only those of the
        tokens chosen by it, and all after each layer."""
        x = self.embed(ids)
        if rows is not None:
            x = torch.where((slots >= 0)[:, None], rows.float()[slots.clamp(min=0)], x)
        angle = pos[..., self.axis].float() * self.freq
        cos, sin = angle.cos(), angle.sin()
        between = []
        for layer in self.layers:
            x = layer(x, cos, sin, segs)
            between.append(x)
        return self.norm(x) if want is None else (self.norm(x[want]), between)

    def logits(self, hidden):
        return F.linear(hidden, self.embed.weight)


class Heads(nn.Module):
    """Auxiliary readouts used in training only."""

    def __init__(self, c):
        super().__init__()
        self.patch = Linear(c.v_dim, 9 + 11 + 37)
        self.row = Linear(c.dim, 9 + 11 + 4 * 37)  # shape, colour, the characters of the row's four patches
        # Where a row lies (y, x) after the first text layer, how large the grid was after the second: the tower
        # turns with relative positions only, so places have to be found by the text model.
        self.where, self.grid = Linear(c.dim, 10 + 10), Linear(c.dim, 10 + 10)
        # Where the asked thing lies (y, x), after the second and the third layer.
        self.point = nn.ModuleList((Linear(c.dim, 10 + 10), Linear(c.dim, 10 + 10)))
        # And where the next character of a text lies: row, column of patches.
        self.letter = nn.ModuleList((Linear(c.dim, 10 + 20), Linear(c.dim, 10 + 20)))
        # The number of each patch's character, from the left and from the right.
        self.order = Linear(c.dim, 4 * (6 + 6))


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.tower, self.text, self.heads = Tower(c), Text(c), Heads(c)

    def config(self):
        return asdict(self.c)
