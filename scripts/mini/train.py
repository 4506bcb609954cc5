"""The training: Muon for matrices, AdamW for the rest, warm-up then constant then linear decay, averaged weights.

Two processes of one thread each share the weights and split every step's microbatches by whoever is free: on cores
that others use as well this loses far less time than two threads meeting at the end of every operation. Each
process then updates its part of the weights.

The schedule follows progress = time spent / minutes (or step / steps), so that it ends when it is told to on a
machine of unknown speed. Checkpoints hold everything that is needed to go on.
"""
import argparse
import ctypes
import os
import signal
import sys
import threading
import time
from collections import defaultdict

import numpy as np
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F

import data
from export import read_back
from model import Config, Model, block_order, patches, reorder
from tok import Vocabulary, save


class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal by Newton-Schulz (Jordan 2024); matrices of one shape go through it together."""

    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))
        for p in self.param_groups[0]["params"]:
            self.state[p]["m"] = torch.zeros_like(p)

    @torch.no_grad()
    def step_some(self, params):
        lr = self.param_groups[0]["lr"]
        shapes = defaultdict(list)
        for p in params:
            self.state[p]["m"].lerp_(p.grad, .05)
            shapes[p.shape].append(p)
        for (o, i), ps in shapes.items():
            g = torch.stack([p.grad.lerp(self.state[p]["m"], .95) for p in ps])
            x = g.mT if o > i else g
            x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).bfloat16().contiguous()
            for _ in range(5):
                a = x @ x.mT
                x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
            x = x.mT if o > i else x
            for p, u in zip(ps, x.float()):
                p.mul_(1 - lr * .02)
                p.add_(u, alpha=-lr * .2 * max(o, i) ** .5)


def optimisers(model):
    matrix, rest = [], []
    for name, p in model.named_parameters():
        big = p.ndim == 2 and "embed" not in name and "heads." not in name
        (matrix if big else rest).append(p)
    return Muon(matrix, 1), torch.optim.AdamW(rest, 1, betas=(.9, .98), weight_decay=0)


def reading(o, progress):
    """How far the text model's part of the schedule is, 0 to 1; negative while the tower learns alone."""
    return (progress - o.tower_until) / (1 - o.tower_until)


def rate(o, progress, step):
    """Share of the highest rates: doubled for the tower alone; then warm-up, constant, linear decay."""
    read = reading(o, progress)
    if read < 0:
        return 2 * min(1, (step + 1) / 80)
    return min(1, (step + 1) / 80, read / .03 + .02) * (1 if read < o.decay_from else max(.015, (1 - read) / (1 - o.decay_from)))


def balanced(out, label, weight):
    """Cross entropy with the few things and the many empty places weighed apart."""
    each = F.cross_entropy(out.reshape(-1, out.shape[-1]), label.reshape(-1), ignore_index=-1, reduction="none")
    full = label.reshape(-1) > 0
    return each[label.reshape(-1) == 0].mean() + (each[full].mean() if full.any() else 0) * weight


def see(model, pixels, labels, fast, still=False):
    """-> rows, loss of the readouts of the tower: what each patch and each row shows. still: neither learns."""
    b, h, w, _ = pixels.shape
    with torch.autocast("cpu", torch.bfloat16, enabled=fast):
        with torch.set_grad_enabled(torch.is_grad_enabled() and not still):
            rows, feats = model.tower(patches(pixels), h // 14, w // 14)
        if still:
            return rows, 0.
        on_patch, on_row, order = model.heads.patch(feats).float(), model.heads.row(rows).float(), model.heads.order(rows).float()
    shape, colour, char, cell_shape, cell_colour, _, nth, left = labels
    shape, colour, char = block_order(shape), block_order(colour), block_order(char)
    aux = 0.
    for out, label, weight in zip(on_patch.split((9, 11, 37), -1), (shape, colour, char), (.7, .7, 1.2)):
        aux = aux + balanced(out, label, weight)
    in_row = (cell_shape, cell_colour, *char.reshape(b, -1, 4).unbind(-1))
    for out, label in zip(on_row.split((9, 11, 37, 37, 37, 37), -1), in_row):
        aux = aux + balanced(out, label, .7) * (1 if out.shape[-1] < 37 else .3)
    for k, (n, l) in enumerate(zip(*(block_order(x).reshape(b, -1, 4).unbind(-1) for x in (nth, left)))):
        aux = aux + .3 * (balanced(order[..., 12 * k:12 * k + 6], n, .7) + balanced(order[..., 12 * k + 6:12 * k + 12], l, .7))
    return rows, aux


def losses(model, pixels, labels, text, fast, still=False):
    """-> answer loss, auxiliary loss, logits at the answers, their targets. still: the tower does not learn."""
    b, h, w, _ = pixels.shape
    rows, aux = see(model, pixels, labels, fast, still)
    with torch.autocast("cpu", torch.bfloat16, enabled=fast):
        hidden, deep = model.text(text["ids"], text["slots"], rows.reshape(-1, rows.shape[-1]), text["pos"], text["segs"],
                                  text["target"] >= 0)
    target = text["target"]
    want = target[target >= 0]
    logits = model.text.logits(hidden.float())
    return F.cross_entropy(logits, want), aux + positions(model, text, deep, h // 28, w // 28), logits, want


def positions(model, text, deep, gh, gw):
    """Loss of telling each row's place and, at the picture's end mark, the grid."""
    slots = text["slots"]
    at = slots >= 0
    r = slots[at] % (gh * gw)
    # Rows of unit length: the place has to be a good part of what a row holds, not a trace that a large weight finds.
    y, x = F.linear(F.layer_norm(deep[0][at].float(), (model.c.dim,)), F.normalize(model.heads.where.weight)).split(10, -1)
    loss = F.cross_entropy(y, r // gw) + F.cross_entropy(x, r % gw)
    for heads, targets in ((model.heads.point, text["points"]), (model.heads.letter, text["letters"])):
        at, ty, tx = targets.unbind(1)
        for head, x in zip(heads, deep[1:] if len(at) else ()):
            out = head(F.layer_norm(x[at].float(), (model.c.dim,)))
            loss = loss + F.cross_entropy(out[:, :10], ty) + F.cross_entropy(out[:, 10:], tx)
    ends = text["ids"] == model.c.vocab - 2
    if not ends.any():
        return loss
    ny, nx = model.heads.grid(F.layer_norm(deep[1][ends].float(), (model.c.dim,))).split(10, -1)
    return loss + F.cross_entropy(ny, torch.full((len(ny),), gh)) + F.cross_entropy(nx, torch.full((len(nx),), gw))


def right(text, logits, want, spans):
    """-> [(kind, whole answer right)]: argmax at every token of the answer, which is what greedy decoding gives."""
    hits = torch.ones_like(text["target"], dtype=torch.bool)
    hits[text["target"] >= 0] = logits.argmax(-1) == want
    return [(kind, bool(hits[s + a - 1:s + b - 1].all())) for s, row in zip(text["starts"], spans) for kind, a, b in row]


@torch.no_grad()
def evaluate(model, v, taken, forms=("plain", "plain", "plain", "plain", "plain", "after"), seed=5, fast=True):
    counts = defaultdict(lambda: [0, 0])
    for k, t in enumerate(taken):
        rng = np.random.default_rng([seed, k])
        pixels, labels, text, spans = data.batch(rng, v, t, 8, forms[k % len(forms)])
        _, _, logits, want = losses(model, pixels, labels, text, fast)
        for kind, ok in right(text, logits, want, spans):
            counts[kind][0] += ok
            counts[kind][1] += 1
    return counts


def arguments(args=None):
    p = argparse.ArgumentParser()
    p.add_argument("--work", default="/tmp/farsight-mini", help="pool, vocabulary, checkpoints")
    p.add_argument("--models", required=True, help="folder of the two GGUF files")
    p.add_argument("--minutes", type=float, default=100)
    p.add_argument("--steps", type=int, default=0, help="instead of --minutes")
    p.add_argument("--batch", type=int, default=24, help="pictures a step")
    p.add_argument("--micro", type=int, default=4, help="microbatches a step")
    p.add_argument("--pairs", type=int, default=10, help="conversations a picture")
    p.add_argument("--processes", type=int, default=2)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--log", default="")
    p.add_argument("--tower-until", type=float, default=.36, help="progress at which the text model begins to learn")
    p.add_argument("--still-until", type=float, default=.25, help="share of the reading during which the tower keeps still")
    p.add_argument("--still", type=float, default=.4, help="share of the microbatches after that in which it keeps still")
    p.add_argument("--crowd", type=float, default=.15, help="share of the microbatches in which the tower goes on alone, with "
                   "crowded pictures, while the text model reads")
    p.add_argument("--easy", type=float, default=1, help="share of easy pictures when reading begins")
    p.add_argument("--peak", type=float, nargs=2, default=(.004, .002), help="highest rates of Muon and AdamW; at .008 "
                   "attention of the text model saturates and it never learns to read")
    p.add_argument("--decay-from", type=float, default=.5, help="share of the reading at which the rates begin to fall")
    p.add_argument("--aux", type=float, nargs=2, default=(.25, .15), help="weight of the readouts' loss in each half")
    p.add_argument("--again", type=float, default=.5, help="share of the conversations that have a second turn")
    p.add_argument("--init", default="", help="checkpoint, or folder of GGUF files, whose weights to begin with, on a fresh "
                   "schedule (with --tower-until 0 where the text model can read already)")
    p.add_argument("--resume", action="store_true")
    p.add_argument("--f32", action="store_true", help="no bf16 in the products")
    p.add_argument("--export-every", type=float, default=15, help="minutes")
    return p.parse_args(args)


def draw(o, folder):
    os.makedirs(folder, exist_ok=True)
    parts = [mp.get_context("fork").Process(target=data.draw_pool, args=(folder, o.seed, k, o.processes)) for k in range(o.processes)]
    for p in parts:
        p.start()
    for p in parts:
        p.join()
    if any(p.exitcode for p in parts):
        sys.exit("the pictures could not be drawn")
    return data.Pool(folder)


def weights_at(path):
    """From a checkpoint, or from a folder with the two GGUF files (which lack the readouts), for today's rotary base."""
    if os.path.isdir(path):
        m = read_back(path)[0]
        weights, c = {k: p for k, p in m.state_dict().items() if not k.startswith("heads.")}, m.c
    else:
        checkpoint = torch.load(path, weights_only=False)
        weights, c = checkpoint["average"], Config(**checkpoint["config"])
    reorder(weights, c, Config())
    return weights


def vocabulary_at(path):
    """Weights go with the vocabulary that they were trained with, which today's questions may no longer make."""
    if os.path.isdir(path):
        return read_back(path)[1]
    c = torch.load(path, weights_only=False)
    return Vocabulary(c["tokens"], c["merges"])


def own_vocabulary(work):
    path = os.path.join(work, "vocabulary.json")
    if not os.path.exists(path):
        save(path)
    return Vocabulary.load(path)


class Trainer:
    """Built once, then forked: weights, Muon's momenta, the gradients' meeting place and the step are shared."""

    def __init__(self, o):
        self.o = o
        os.makedirs(o.work, exist_ok=True)
        self.path = os.path.join(o.work, "checkpoint.pt")
        begin = self.path if o.resume and os.path.exists(self.path) else o.init
        self.v = vocabulary_at(begin) if begin else own_vocabulary(o.work)
        torch.manual_seed(o.seed)
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)
        self.model = Model(Config(vocab=len(self.v.tokens)))
        self.muon, self.adam = optimisers(self.model)
        if o.init:
            self.begin_with(weights_at(o.init))
        self.average = {k: p.detach().clone() for k, p in self.model.state_dict().items()}
        self.step, self.spent = 0, 0.
        self.settled = o.tower_until == 0 or bool(o.init)
        if o.resume and os.path.exists(self.path):
            self.load()
        self.share()

    def share(self):
        self.model.share_memory()
        for s in self.muon.state.values():
            s["m"].share_memory_()
        self.params = list(self.model.parameters())
        self.ends = np.cumsum([0] + [p.numel() for p in self.params])
        self.grads = torch.zeros(self.o.processes, int(self.ends[-1])).share_memory_()
        self.numbers = torch.zeros(self.o.processes, 3).share_memory_()
        self.shared_step = mp.Value("q", self.step)
        self.shared_progress = mp.Value("d", 0.)
        self.next = mp.Value("i", 0)
        self.barrier = mp.Barrier(self.o.processes, timeout=900)

    def load(self):
        c = torch.load(self.path, weights_only=False)
        self.begin_with(c["model"])
        for opt, s in zip((self.muon, self.adam), c["opts"]):
            s["param_groups"][0]["params"] = list(range(len(opt.param_groups[0]["params"])))
            opt.load_state_dict(s)
        for k, p in self.model.state_dict().items():
            c["average"].setdefault(k, p.detach().clone())
        self.average, self.step, self.spent = c["average"], c["step"], c["spent"]
        self.settled = c.get("settled", self.settled)

    @torch.no_grad()
    def settle(self, pool):
        """Once the tower has learned alone: centres its rows and brings them to a spread of .3, a text model's own
        scale. What the readouts say stays the same. A large offset that all rows share hides their differences from
        attention."""
        pixels, _, _ = pool.take(np.random.default_rng([self.o.seed, 78]), 96, "whole")
        rows, _ = self.model.tower(patches(torch.from_numpy(np.ascontiguousarray(pixels))), pixels.shape[1] // 14,
                                   pixels.shape[2] // 14)
        rows = rows.reshape(-1, rows.shape[-1])
        middle = rows.mean(0)
        scale = .3 / (rows - middle).std()
        for w in (self.model.state_dict(), self.average):
            w["tower.mm2.weight"].mul_(scale)
            w["tower.mm2.bias"].sub_(middle).mul_(scale)
            w["heads.row.bias"].add_(w["heads.row.weight"] @ middle)
            w["heads.row.weight"].div_(scale)

    def begin_with(self, weights):
        mine = self.model.state_dict()
        mine.update({k: p for k, p in weights.items() if k in mine and mine[k].shape == p.shape})
        self.model.load_state_dict(mine)

    def save(self):
        torch.save(dict(model=self.model.state_dict(), opts=[self.muon.state_dict(), self.adam.state_dict()],
                        average=self.average, step=self.step, spent=self.spent, settled=self.settled,
                        config=self.model.config(),
                        tokens=self.v.tokens, merges=self.v.merges), self.path + ".tmp")
        os.replace(self.path + ".tmp", self.path)

    def averaged(self):
        m = Model(self.model.c)
        m.load_state_dict(self.average)
        return m.eval()

    def progress(self):
        o = self.o
        return self.step / o.steps if o.steps else self.spent / (o.minutes * 60)

    def micro(self, pool, step, k, progress):
        """One microbatch's gradients, added to what this process has."""
        o = self.o
        rng = np.random.default_rng([o.seed, 77, step, k])
        alone = progress < o.tower_until  # the tower learns to see, at less than half the cost of a whole step
        if alone or rng.random() < o.crowd:
            kind = "crowd" if not alone or rng.random() < .6 else "easy" if rng.random() < .1 else "whole"
            pixels, _, labels = pool.take(rng, (3 if alone else 2) * o.batch // o.micro, kind)
            _, aux = see(self.model, torch.from_numpy(np.ascontiguousarray(pixels)), [torch.from_numpy(x) for x in labels],
                         not o.f32)
            (aux * (1 if alone else o.aux[progress >= .5]) / o.micro).backward()
            return 0., aux.item(), alone
        r = rng.random()
        # Reading begins with pictures of one or two things: there the way from a word to its row is found soonest.
        read = reading(o, progress)
        form = "after" if r < .15 else "plain"
        still = read < o.still_until or rng.random() < o.still
        easy = rng.random() < max(.05, o.easy * (1 - 2.5 * read))
        taken = pool.take(rng, o.batch // o.micro, "easy" if easy else "whole")
        pixels, labels, text, _ = data.batch(rng, self.v, taken, o.pairs, form, o.again)
        answer, aux, _, _ = losses(self.model, pixels, labels, text, not o.f32, still)
        ((answer + o.aux[progress >= .5] * aux) / o.micro).backward()
        return answer.item(), aux.item(), 1.

    def share_step(self, rank, pool):
        """One process's part of a step, from the first barrier to the last."""
        self.barrier.wait()
        step, progress = self.shared_step.value, self.shared_progress.value
        self.numbers[rank] = 0
        while True:
            with self.next.get_lock():
                k = self.next.value
                self.next.value += 1
            if k >= self.o.micro:
                break
            self.numbers[rank] += torch.tensor(self.micro(pool, step, k, progress))
        mine = self.grads[rank]
        for p, a, b in zip(self.params, self.ends, self.ends[1:]):
            if p.grad is None:
                mine[a:b] = 0
            else:
                mine[a:b] = p.grad.flatten()
            p.grad = None
        self.barrier.wait()
        self.update(rank, step, progress)
        self.barrier.wait()

    def update(self, rank, step, progress):
        o = self.o
        total = self.grads.sum(0)
        for p, a, b in zip(self.params, self.ends, self.ends[1:]):
            p.grad = total[a:b].view_as(p)
        for opt, peak in zip((self.muon, self.adam), o.peak):
            for g in opt.param_groups:
                g["lr"] = peak * rate(o, progress, step)
        text = {id(p) for p in self.model.text.parameters()}
        matrices = self.muon.param_groups[0]["params"]
        if self.o.processes == 1 or rank == 1:
            self.muon.step_some([p for p in matrices if id(p) in text])
        if rank == 0:
            self.muon.step_some([p for p in matrices if id(p) not in text])
            torch.nn.utils.clip_grad_norm_(self.adam.param_groups[0]["params"], 1.)
            self.adam.step()
        for p in self.params:
            p.grad = None

    def train_step(self, pool):
        """Rank 0: leads one step. -> answer loss, auxiliary loss."""
        o = self.o
        if not self.settled and self.progress() >= self.o.tower_until:
            self.settle(pool)
            self.settled = True
        self.shared_step.value, self.shared_progress.value, self.next.value = self.step, self.progress(), 0
        self.share_step(0, pool)
        self.step += 1
        keep = min(.996, (self.step + 1) / (self.step + 10))
        with torch.no_grad():
            for k, p in self.model.state_dict().items():
                self.average[k].lerp_(p, 1 - keep)
        n = self.numbers.sum(0)
        return (n[0] / n[2].clamp(min=1)).item(), (n[1] / o.micro).item()

    def follow(self, rank, pool):
        while True:
            self.share_step(rank, pool)


def follower(t, rank, folder):
    prctl_die_with_parent()
    try:
        t.follow(rank, data.Pool(folder))
    except threading.BrokenBarrierError:
        pass


def prctl_die_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def held_out():
    """Pictures of another seed, 24 of each form of sequence."""
    sizes = [(168, 168), (140, 168), (196, 140), (140, 196), (168, 168), (168, 140)]
    return [data.draw_shard(990, k, count=24, size=s) for k, s in enumerate(sizes)]


def report(log, t, mean, counts):
    table = " ".join(f"{k}={100 * a / n:.0f}" for k, (a, n) in sorted(counts.items()))
    line = (f"{time.strftime('%H:%M:%S')} step {t.step} progress {t.progress():.3f} answer {mean[0]:.4f} "
            f"aux {mean[1]:.3f} | {table}")
    print(line, flush=True)
    if log:
        with open(log, "a") as f:
            f.write(line + "\n")


def put_out(t):
    """Writes the averaged weights as GGUF files; a failure to write must not end the training."""
    try:
        from export import export
        export(t.averaged(), t.v, t.o.models)
    except OSError as e:
        print("not exported:", e, flush=True)


def lead(t, pool):
    """Rank 0 until the end of the schedule: steps, the log, checkpoints, files."""
    o, held = t.o, held_out()
    last = said = exported = saved = time.monotonic()
    recent, lines = [], 0
    while t.progress() < 1:
        recent.append(t.train_step(pool))
        now = time.monotonic()
        t.spent, last = t.spent + now - last, now
        if now - said > 60 or t.progress() >= 1:
            whole = lines % 3 == 0 or t.progress() >= 1
            report(o.log, t, np.mean(recent, 0), evaluate(t.averaged(), t.v, held) if whole else {})
            said, recent, lines = now, [], lines + 1
        if now - saved > 240:
            t.save()
            saved = now
        if now - exported > o.export_every * 60:
            put_out(t)
            exported = now
    t.save()
    put_out(t)


def main(args=None):
    o = arguments(args)
    t = Trainer(o)
    pool = draw(o, os.path.join(o.work, "pool"))
    others = [mp.get_context("fork").Process(target=follower, args=(t, r, pool.folder), daemon=True) for r in range(1, o.processes)]
    for p in others:
        p.start()
    lead(t, pool)
    for p in others:
        p.terminate()


if __name__ == "__main__":
    main()
