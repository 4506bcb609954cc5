"""A text or tower layer as one autograd function: torch does the products, kernels.c all that lies between them.

kernels.c is compiled for this machine at first use; without a compiler `ready` is false and the layers run as plain
torch (model.py), which gives the same numbers several times slower.
"""
import ctypes
import os
import subprocess

import torch

HERE = os.path.dirname(os.path.abspath(__file__))


def build():
    source, name = os.path.join(HERE, "kernels.c"), f"/tmp/farsight-mini-kernels-{os.getuid()}.so"
    if not os.path.exists(name) or os.path.getmtime(name) < os.path.getmtime(source):
        part = f"{name}.{os.getpid()}"
        flags = ["-O3", "-march=native", "-mprefer-vector-width=512", "-ffast-math", "-shared", "-fPIC"]
        try:
            subprocess.run([os.environ.get("CC", "gcc"), *flags, "-o", part, source, "-lmvec", "-lm"], check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        os.replace(part, name)
    return ctypes.CDLL(name)


lib = build()
ready = lib is not None


def call(name, *args):
    """Tensors go as pointers (they have to be contiguous), floats as float, integers as long."""
    out = []
    for a in args:
        if isinstance(a, torch.Tensor):
            assert a.is_contiguous()
            out.append(ctypes.c_void_p(a.data_ptr()))
        elif a is None:
            out.append(ctypes.c_void_p(0))
        else:
            out.append(ctypes.c_float(a) if isinstance(a, float) else ctypes.c_long(a))
    if getattr(lib, name)(*out) == -1 and name.startswith("attend"):
        raise MemoryError(name)


def low(*shape):
    return torch.empty(shape, dtype=torch.bfloat16)


def room(segs, heads):
    """Floats that the shares of all heads take."""
    a, b, p, e = segs.long().unbind(1)
    up = lambda x, n: (x + n - 1) // n * n
    return int((up(b - a, 8) * (up(e - p, 32) + up(b - a, 32))).sum()) * heads


def matrix(*weights):
    return (torch.cat(weights) if len(weights) > 1 else weights[0]).bfloat16()


def attend(qkv, bias, turn, segs, heads, kv, causal):
    n = qkv.shape[0]
    kept, out = torch.empty(room(segs, heads)), low(n, heads * 32)
    call("attend_forward", n, heads, kv, causal, segs.shape[0], segs, qkv, bias, *turn, kept, out)
    return kept, out


def attend_back(qkv, bias, turn, segs, heads, kv, causal, kept, dout):
    dqkv, dbias = torch.empty_like(qkv), torch.zeros(qkv.shape[1])
    call("attend_backward", qkv.shape[0], heads, kv, causal, segs.shape[0], segs, qkv, bias, *turn, kept, dout, dqkv)
    call("column_sum", *dqkv.shape, dqkv, dbias)
    return dqkv, dbias


class TextLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, segs, heads, kv, eps, n1, wq, wk, wv, bq, bk, bv, wo, n2, wg, wu, wd):
        n, d = x.shape
        qkv_w, bias, o_w, gu_w, d_w = matrix(wq, wk, wv), torch.cat((bq, bk, bv)), matrix(wo), matrix(wg, wu), matrix(wd)
        h1, inv1 = low(n, d), torch.empty(n)
        call("rms_forward", n, d, x, None, n1, eps, x, h1, inv1)
        qkv = h1 @ qkv_w.T
        kept, a = attend(qkv, bias, (cos, sin), segs, heads, kv, 1)
        x1, h2, inv2 = torch.empty_like(x), low(n, d), torch.empty(n)
        call("rms_forward", n, d, x, a @ o_w.T, n2, eps, x1, h2, inv2)
        gu = h2 @ gu_w.T
        act = low(n, gu.shape[1] // 2)
        call("swiglu_forward", n, act.shape[1], gu, act)
        ctx.save_for_backward(x, cos, sin, segs, n1, n2, bias, qkv_w, o_w, gu_w, d_w, h1, inv1, qkv, kept, a, x1, h2, inv2, gu, act)
        ctx.shape = heads, kv, [w.shape[0] for w in (wq, wk, wv)]
        return x1 + act @ d_w.T

    @staticmethod
    def backward(ctx, g):
        x, cos, sin, segs, n1, n2, bias, qkv_w, o_w, gu_w, d_w, h1, inv1, qkv, kept, a, x1, h2, inv2, gu, act = ctx.saved_tensors
        heads, kv, split = ctx.shape
        n, d = x.shape
        dx = g.clone(memory_format=torch.contiguous_format)
        gb = g.bfloat16()
        da, dgu = gb @ d_w, torch.empty_like(gu)
        ddw = gb.T @ act
        call("swiglu_backward", n, act.shape[1], gu, da, dgu)
        dn2, dn1 = torch.zeros(d), torch.zeros(d)
        call("rms_backward", n, d, x1, n2, inv2, dgu @ gu_w, dx, dn2, gb)
        dgw = dgu.T @ h2
        dow = gb.T @ a
        dqkv, dbias = attend_back(qkv, bias, (cos, sin), segs, heads, kv, 1, kept, gb @ o_w)
        dqw = dqkv.T @ h1
        call("rms_backward", n, d, x, n1, inv1, dqkv @ qkv_w, dx, dn1, gb)
        return (dx, None, None, None, None, None, None, dn1, *dqw.float().split(split), *dbias.split(split), dow.float(), dn2,
                *dgw.float().chunk(2), ddw.float())


class TowerLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, segs, heads, eps, w1, b1, wq, wk, wv, bq, bk, bv, wo, bo, w2, b2, wu, bu, wd, bd):
        n, d = x.shape
        qkv_w, bias, o_w, u_w, d_w = matrix(wq, wk, wv), torch.cat((bq, bk, bv)), matrix(wo), matrix(wu), matrix(wd)
        h1, inv1, m1 = low(n, d), torch.empty(n), torch.empty(n)
        call("ln_forward", n, d, x, None, w1, b1, eps, x, h1, inv1, m1)
        qkv = h1 @ qkv_w.T
        kept, a = attend(qkv, bias, (cos, sin), segs, heads, heads, 0)
        x1, h2, inv2, m2 = torch.empty_like(x), low(n, d), torch.empty(n), torch.empty(n)
        call("ln_forward", n, d, x, torch.addmm(bo.bfloat16(), a, o_w.T), w2, b2, eps, x1, h2, inv2, m2)
        u = torch.addmm(bu.bfloat16(), h2, u_w.T)
        act = torch.empty_like(u)
        call("quick_gelu_forward", u.numel(), u, act)
        ctx.save_for_backward(x, cos, sin, segs, w1, w2, bias, qkv_w, o_w, u_w, d_w, h1, inv1, m1, qkv, kept, a, x1, h2, inv2, m2, u,
                              act)
        ctx.heads = heads
        return x1 + torch.addmm(bd.bfloat16(), act, d_w.T)

    @staticmethod
    def backward(ctx, g):
        x, cos, sin, segs, w1, w2, bias, qkv_w, o_w, u_w, d_w, h1, inv1, m1, qkv, kept, a, x1, h2, inv2, m2, u, act = ctx.saved_tensors
        n, d = x.shape
        dx = g.clone(memory_format=torch.contiguous_format)
        gb = g.bfloat16()
        du, dbd = gb @ d_w, g.sum(0)
        ddw = gb.T @ act
        call("quick_gelu_backward", u.numel(), u, du)
        dw2, db2, dw1, db1, dbu = (torch.zeros(k) for k in (d, d, d, d, u.shape[1]))
        call("column_sum", *du.shape, du, dbu)
        call("ln_backward", n, d, x1, w2, inv2, m2, du @ u_w, dx, dw2, db2, gb)
        dbo = dx.sum(0)
        duw = du.T @ h2
        dow = gb.T @ a
        dqkv, dbias = attend_back(qkv, bias, (cos, sin), segs, ctx.heads, ctx.heads, 0, kept, gb @ o_w)
        dqw = dqkv.T @ h1
        call("ln_backward", n, d, x, w1, inv1, m1, dqkv @ qkv_w, dx, dw1, db1, gb)
        return (dx, None, None, None, None, None, dw1, db1, *dqw.float().chunk(3), *dbias.chunk(3), dow.float(), dbo, dw2, db2,
                duw.float(), dbu, ddw.float(), dbd)
