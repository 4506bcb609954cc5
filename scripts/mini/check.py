"""Compares the layers of kernels.py with the same in plain torch: values and gradients, within what bf16 allows."""
import sys

import torch

import kernels
from model import Config, TextLayer, TowerLayer, tower_angles

SEGS = [(0, 20, 0, 0), (20, 61, 0, 20), (61, 100, 0, 61), (100, 131, 0, 61), (131, 150, 0, 20), (150, 190, 150, 150),
        (190, 250, 150, 190)]  # two sequences: system message, picture, conversations that see one or both


def run(layer, fast, x, g, *rest):
    x = x.clone().requires_grad_()
    layer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=fast):
        y = layer(x, *rest)
    y.backward(g)
    return {"out": y.detach(), "in": x.grad, **{n: p.grad.clone() for n, p in layer.named_parameters()}}


def compare(name, layer, *args):
    slow, fast = run(layer, False, *args), run(layer, True, *args)
    worst = max(((fast[k] - v).norm() / v.norm(), k) for k, v in slow.items())
    print(f"{name}: worst {worst[0]:.4f} at {worst[1]}")
    return worst[0] < .02


def main():
    if not kernels.ready:
        sys.exit("check: kernels.c could not be compiled")
    torch.manual_seed(0)
    c = Config()
    layers = TextLayer(c), TowerLayer(c)
    for p in (p for layer in layers for p in layer.parameters() if p.ndim == 1):
        p.data += torch.randn_like(p) * .1
    angle, n = torch.randn(250, 16), 250
    good = compare("text", layers[0], torch.randn(n, c.dim) * .5, torch.randn(n, c.dim), angle.cos(), angle.sin(),
                   torch.tensor(SEGS, dtype=torch.int32))
    turn = (t.repeat(2, 1) for t in tower_angles(12, 12, c.v_dim // c.v_heads))
    good &= compare("tower", layers[1], torch.randn(288, c.v_dim) * .5, torch.randn(288, c.v_dim), *turn,
                    torch.tensor([(0, 144, 0, 0), (144, 288, 144, 144)], dtype=torch.int32))
    sys.exit(0 if good else "check: the kernels differ from torch")


if __name__ == "__main__":
    main()
