"""The pool of drawn pictures on disk, and the sequences built from them.

A shard is SHARD pictures of one size: pixels u8 [N, h, w, 3] as .npy, descriptions and labels as .pkl. A process
of its own draws shards ahead of the training; shard k depends on (seed, k) alone.

A sequence holds many conversations about the same picture. Segment 0 is the system message, 1 the opening with
the picture, 2.. one conversation each; a conversation sees 0, 1 (if it has the picture there) and itself, and its
positions run on from what it sees, so that each token sees just what it would see in a request of its own.
"""
import os
import pickle

import numpy as np
import torch

import talk
from draw import fitted, patch_labels, scene

SHARD = 256
# (h, w) and weight: the grids that smart_resize makes between the files' pixel limits, all of 28 to 36 rows.
SIZES = [((168, 168), 4), ((140, 196), 1), ((196, 140), 1), ((140, 168), 1.2), ((168, 140), 1.2), ((112, 196), .7),
         ((196, 112), .7), ((112, 224), .5), ((224, 112), .5)]
EASY_SHARDS = 24


def draw_shard(seed, k, level, count=SHARD, want=None, words=None, size=None):
    rng = np.random.default_rng([seed, k])
    if size is None:
        weights = np.array([w for _, w in SIZES])
        size = SIZES[int(rng.choice(len(SIZES), p=weights / weights.sum()))][0]
    h, w = size
    pixels = np.empty((count, h, w, 3), np.uint8)
    about, labels = [], []
    for i in range(count):
        image, a = scene(rng, w, h, level, want, words)
        pixels[i] = fitted(image, a)
        about.append(a)
        labels.append(patch_labels(a))
    return pixels, about, [np.stack(x) for x in zip(*labels)]


def draw_pool(folder, seed, shards):
    """Draws what is missing of the pool; files appear whole."""
    os.makedirs(folder, exist_ok=True)
    for k in range(shards):
        name = os.path.join(folder, f"{k:05d}")
        if os.path.exists(name + ".pkl"):
            continue
        pixels, about, labels = draw_shard(seed, k, 0 if k < EASY_SHARDS else 1)
        np.save(name + ".tmp.npy", pixels)
        os.rename(name + ".tmp.npy", name + ".npy")
        with open(name + ".tmp", "wb") as f:
            pickle.dump((about, labels), f)
        os.rename(name + ".tmp", name + ".pkl")


class Pool:
    """The shards drawn so far: easy ones with one or two things, and the others."""

    def __init__(self, folder):
        self.folder, self.loaded = folder, {}

    def names(self):
        return sorted(f[:-4] for f in os.listdir(self.folder) if f.endswith(".pkl"))

    def take(self, rng, n, share):
        """n pictures of one shard, an easy one at this share -> pixels u8 [n, h, w, 3], descriptions, labels."""
        names = self.names()
        easy = names[:EASY_SHARDS]
        hard = names[EASY_SHARDS:]
        name = talk.pick(rng, easy if not hard or rng.random() < share else hard)
        if name not in self.loaded:
            if len(self.loaded) > 600:
                self.loaded.pop(next(iter(self.loaded)))
            with open(os.path.join(self.folder, name + ".pkl"), "rb") as f:
                self.loaded[name] = pickle.load(f)
        about, labels = self.loaded[name]
        pixels = np.load(os.path.join(self.folder, name + ".npy"), mmap_mode="r")
        at = np.sort(rng.choice(len(about), n, replace=False))
        return pixels[at], [about[i] for i in at], [x[at] for x in labels]


class Sequence:
    def __init__(self):
        self.ids, self.slots, self.pos, self.seg, self.sees, self.target = [], [], [], [], [], []

    def text(self, ids, p, seg, sees, learn=0):
        """Appends ids from position p; the last `learn` of them are answers. -> next position."""
        n = len(ids)
        self.ids += ids
        self.slots += [-1] * n
        self.pos += [(p + i,) * 3 for i in range(n)]
        self.seg += [seg] * n
        self.sees += [sees] * n
        self.target += [False] * (n - learn) + [True] * learn
        return p + n

    def rows(self, pad, first, gh, gw, p, seg, sees):
        """Appends a picture of gh x gw rows, the first at slot `first`."""
        n = gh * gw
        self.ids += [pad] * n
        self.slots += list(range(first, first + n))
        self.pos += [(p, p + y, p + x) for y in range(gh) for x in range(gw)]
        self.seg += [seg] * n
        self.sees += [sees] * n
        self.target += [False] * n
        return p + max(gh, gw)


def exchange(v, seq, p, seg, sees, q, a):
    """Question, end, assistant, answer, end. -> next position, index of the answer's first and past its last."""
    head = [*v.encode(q), v.end, v.newline, v.start, *v.encode("assistant"), v.newline]
    p = seq.text(head, p, seg, sees)
    first = len(seq.ids)
    answer = [*v.encode(a), v.end]
    return seq.text(answer, p, seg, sees, len(answer)), first, len(seq.ids)


def user(v):
    return [v.start, *v.encode("user"), v.newline]


def system_turn(rng, v):
    r = rng.random()
    if r < .6:
        return v.turn("system", talk.SYSTEM)
    return [] if r < .8 else v.turn("system", talk.pick(rng, talk.SYSTEMS))


def sequence(rng, v, abouts, gh, gw, n, form):
    """One sequence of n conversations about abouts (1 or 2 pictures of gh x gw rows), or given pairs.
    form: "plain", "after" (picture behind the question), "two" (two pictures), or a list of pairs.
    -> Sequence, [(kind, first, last)] of the answers."""
    seq, spans, r = Sequence(), [], gh * gw
    p0 = seq.text(system_turn(rng, v) if not isinstance(form, list) else v.turn("system", talk.SYSTEM), 0, 0, False)
    about = abouts[0]
    if form == "after":
        for k in range(max(2, n // 4)):
            kind, q, a = talk.ask(rng, about)
            p = seq.text(user(v) + list(v.encode(q)) + [v.vstart], p0, k + 2, False)
            p = seq.rows(v.pad, 0, gh, gw, p, k + 2, False)
            p = seq.text([v.vend], p, k + 2, False)
            _, i, j = exchange(v, seq, p, k + 2, False, "", a)
            spans.append(("after", i, j))
        return seq, spans
    p = seq.text(user(v), p0, 1, False)
    for k in range(len(abouts)):
        p = seq.text([v.vstart], p, 1, False)
        p = seq.rows(v.pad, k * r, gh, gw, p, 1, False)
        p = seq.text([v.vend], p, 1, False)
    if form == "plain":
        pairs = talk.ask_many(rng, about, n)
    elif form == "two":
        pairs = []
        for _ in range(n):
            which = int(rng.integers(2))
            pairs.append(talk.of_which(rng, talk.ask(rng, abouts[which]), which))
    else:
        pairs = form
    for k, (kind, q, a) in enumerate(pairs):
        end, i, j = exchange(v, seq, p, k + 2, True, q, a)
        spans.append((kind, i, j))
        if form == "plain" and rng.random() < .12:  # a second turn about the same picture
            end = seq.text([v.newline] + user(v), end, k + 2, True)
            _, q, a = talk.ask(rng, about) if rng.random() < .85 else talk.small_talk(rng)
            _, i, j = exchange(v, seq, end, k + 2, True, q, a)
            spans.append(("turn2", i, j))
    if not isinstance(form, list) and rng.random() < .3:  # and one without the picture
        k = len(pairs) + 2
        _, q, a = talk.without_picture(rng, about)
        _, i, j = exchange(v, seq, seq.text(user(v), p0, k, False), k, False, q, a)
        spans.append(("talk", i, j))
    return seq, spans


def collate(v, sequences):
    """-> dict of ids, slots [B, T], pos [B, T, 3], mask [B, 1, T, T], target [B, T] (-100 or the next id)."""
    b, t = len(sequences), max(len(s.ids) for s in sequences)
    t = -(-t // 32) * 32  # few distinct shapes: every new one is compiled and cached by the matrix library
    ids = np.full((b, t), v.pad, np.int64)
    slots = np.full((b, t), -1, np.int64)
    pos = np.zeros((b, t, 3), np.int64)
    seg = np.full((b, t), -1, np.int64)
    sees = np.zeros((b, t), bool)
    target = np.full((b, t), -100, np.int64)
    for i, s in enumerate(sequences):
        n = len(s.ids)
        ids[i, :n], slots[i, :n], pos[i, :n], seg[i, :n], sees[i, :n] = s.ids, s.slots, s.pos, s.seg, s.sees
        learn = np.flatnonzero(s.target)
        target[i, learn - 1] = ids[i, learn]
    seg, sees = torch.from_numpy(seg), torch.from_numpy(sees)
    key, query = seg[:, None, :], seg[:, :, None]
    mask = (key == query) | (key == 0) | ((key == 1) & sees[:, :, None])
    mask = mask & torch.ones(t, t, dtype=torch.bool).tril() & (key >= 0)
    mask = mask | torch.eye(t, dtype=torch.bool)
    return dict(ids=torch.from_numpy(ids), slots=torch.from_numpy(slots), pos=torch.from_numpy(pos),
                mask=mask[:, None], target=torch.from_numpy(target))


def batch(rng, v, taken, n, form):
    """taken: what Pool.take gave -> pixels, labels, collated sequences, spans [per sequence]."""
    pixels, about, labels = taken
    h, w = pixels.shape[1:3]
    each = 2 if form == "two" else 1
    made = [sequence(rng, v, about[i:i + each], h // 28, w // 28, n, form) for i in range(0, len(about), each)]
    text = collate(v, [s for s, _ in made])
    return torch.from_numpy(np.ascontiguousarray(pixels)), [torch.from_numpy(x) for x in labels], text, \
        [s for _, s in made]
