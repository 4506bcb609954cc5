"""The pool of drawn pictures on disk, and the sequences built from them.

A shard is SHARD pictures of one size: pixels u8 [N, h, w, 3] as .npy, descriptions and labels as .pkl; it depends on
the seed, its kind and its number alone. All are drawn before the training begins, so that what a step sees depends on
the seed and its number alone, too.

A sequence holds many conversations about the same picture. Segment 0 is the system message, 1 the opening with
the picture, 2.. one conversation each; a conversation sees 0, 1 (if it has the picture there) and itself, and its
positions run on from what it sees, so that each token sees just what it would see in a request of its own.
"""
import os
import pickle

import numpy as np
import torch

import talk
from draw import crowd, fitted, patch_labels, scene

SHARD = 256
KINDS = {"easy": 24, "whole": 400, "crowd": 160}  # and how many shards of each
# (h, w) and weight: the grids that smart_resize makes between the files' pixel limits of pictures with sides of up to
# about 3 : 2.
SIZES = [((168, 168), 4), ((140, 196), 1.2), ((196, 140), 1.2), ((140, 168), 1.2), ((168, 140), 1.2)]


def draw_shard(seed, k, kind="whole", count=SHARD, want=None, words=None, size=None, loose=.1):
    """`count` pictures of one size: easy (one or two things), whole, or crowd (see draw.crowd)."""
    rng = np.random.default_rng([seed, k, *([] if kind == "whole" else [list(KINDS).index(kind)])])
    if size is None:
        weights = np.array([w for _, w in SIZES])
        size = SIZES[int(rng.choice(len(SIZES), p=weights / weights.sum()))][0]
    h, w = size
    pixels = np.empty((count, h, w, 3), np.uint8)
    about, labels = [], []
    for i in range(count):
        image, a = crowd(rng, w, h) if kind == "crowd" else scene(rng, w, h, kind != "easy", want, words, loose)
        pixels[i] = fitted(image, a)
        about.append(a)
        labels.append(patch_labels(a))
    return pixels, about, [np.stack(x) for x in zip(*labels)]


def draw_pool(folder, seed, part, parts):
    """Draws what is missing of one part of the pool; files appear whole."""
    for kind, k in [(kind, k) for kind, n in KINDS.items() for k in range(n)][part::parts]:
        name = os.path.join(folder, f"{kind}-{k:04d}")
        if os.path.exists(name + ".pkl"):
            continue
        pixels, about, labels = draw_shard(seed, k, kind, loose=.3)
        np.save(name + ".tmp.npy", pixels)
        os.rename(name + ".tmp.npy", name + ".npy")
        with open(name + ".tmp", "wb") as f:
            pickle.dump((about, labels), f)
        os.rename(name + ".tmp", name + ".pkl")


class Pool:
    def __init__(self, folder):
        self.folder, self.loaded = folder, {}

    def take(self, rng, n, kind):
        """n pictures of one shard of that kind -> pixels u8 [n, h, w, 3], descriptions, labels."""
        name = f"{kind}-{rng.integers(KINDS[kind]):04d}"
        if name not in self.loaded:
            with open(os.path.join(self.folder, name + ".pkl"), "rb") as f:
                about, labels = pickle.load(f)
            # Packed: in the end a process holds all shards.
            self.loaded[name] = [pickle.dumps(a) for a in about], [x.astype(np.int8) for x in labels]
        about, labels = self.loaded[name]
        pixels = np.load(os.path.join(self.folder, name + ".npy"), mmap_mode="r")
        at = np.sort(rng.choice(len(about), n, replace=False))
        return pixels[at], [pickle.loads(about[i]) for i in at], [x[at].astype(np.int64) for x in labels]


class Sequence:
    def __init__(self):
        self.ids, self.slots, self.pos, self.seg, self.sees, self.target = [], [], [], [], [], []
        self.points = []  # (token, y, x): the row that an answer is about
        self.letters = []  # (token, y, x): row and column of patches of the character that comes next, or no more

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


def letters(v, text, answer, first, grid):
    """(token before it, row, column of patches) of each character of the text that the answer spells; 9, 19 after the last."""
    spelled = [v.encode(c)[0] for c in text["string"]]
    for j in range(len(answer) - len(spelled), 0, -1):
        if answer[j:j + len(spelled)] == spelled:
            return [(first + j + k - 1, min(max(int(y / 28), 0), grid[0] - 1), min(max(int(x / 14), 0), 2 * grid[1] - 1))
                    for k, (_, x, y) in enumerate(text["chars"])] + [(first + j + len(spelled) - 1, 9, 19)]
    return []


def exchange(v, seq, p, seg, sees, q, a, about=None, grid=None):
    """Question, end, assistant, answer (about a picture of that grid), end. -> next position, index of the answer's first and past its last."""
    head = [*v.encode(q), v.end, v.newline, v.start, *v.encode("assistant"), v.newline]
    p = seq.text(head, p, seg, sees)
    first = len(seq.ids)
    answer = [*v.encode(a), v.end]
    p = seq.text(answer, p, seg, sees, len(answer))
    at, late = talk.lies(about, q, a) if about else (None, 0)
    if at:
        y, x = min(max(int(at[1] / 28), 0), grid[0] - 1), min(max(int(at[0] / 28), 0), grid[1] - 1)
        seq.points += [(k, y, x) for k in range(first + late, len(seq.ids) - 1)]
    if about and about["text"]:
        seq.letters += letters(v, about["text"], answer, first, grid)
    return p, first, len(seq.ids)


def user(v):
    return [v.start, *v.encode("user"), v.newline]


def system_turn(rng, v):
    r = rng.random()
    if r < .6:
        return v.turn("system", talk.SYSTEM)
    return [] if r < .8 else v.turn("system", talk.pick(rng, talk.SYSTEMS))


def sequence(rng, v, about, gh, gw, n, form, again=.25):
    """One sequence of n conversations about a picture of gh x gw rows, or given pairs.
    form: "plain", "after" (picture behind the question), or a list of pairs; again: share of plain ones that have a
    second turn.
    -> Sequence, [(kind, first, last)] of the answers."""
    seq, spans = Sequence(), []
    p0 = seq.text(system_turn(rng, v) if not isinstance(form, list) else v.turn("system", talk.SYSTEM), 0, 0, False)
    if form == "after":
        for k in range(max(2, n // 3)):
            kind, q, a = talk.ask(rng, about)
            p = seq.text(user(v) + list(v.encode(q)) + [v.vstart], p0, k + 2, False)
            p = seq.rows(v.pad, 0, gh, gw, p, k + 2, False)
            p = seq.text([v.vend], p, k + 2, False)
            _, i, j = exchange(v, seq, p, k + 2, False, "", a, about, (gh, gw))
            spans.append(("after", i, j))
        return seq, spans
    p = seq.text(user(v), p0, 1, False)
    p = seq.text([v.vstart], p, 1, False)
    p = seq.rows(v.pad, 0, gh, gw, p, 1, False)
    p = seq.text([v.vend], p, 1, False)
    if form == "plain":
        pairs = talk.ask_many(rng, about, n)
    else:
        pairs = form
    for k, (kind, q, a) in enumerate(pairs):
        end, i, j = exchange(v, seq, p, k + 2, True, q, a, about, (gh, gw))
        spans.append((kind, i, j))
        if form == "plain" and rng.random() < again:  # a second turn about the same picture
            end = seq.text([v.newline] + user(v), end, k + 2, True)
            _, q, a = talk.ask(rng, about) if rng.random() < .85 else talk.small_talk(rng)
            _, i, j = exchange(v, seq, end, k + 2, True, q, a, about, (gh, gw))
            spans.append(("turn2", i, j))
    if not isinstance(form, list) and rng.random() < .3:  # and one without the picture
        k = len(pairs) + 2
        _, q, a = talk.without_picture(rng, about)
        _, i, j = exchange(v, seq, seq.text(user(v), p0, k, False), k, False, q, a)
        spans.append(("talk", i, j))
    return seq, spans


def segments(seq, base):
    """[first, past the last, prefix's first, past the prefix's last] of each, prefix: system message and picture."""
    seg, out, first = np.array(seq.seg), [], 0
    for last in [*(np.flatnonzero(np.diff(seg)) + 1), len(seg)]:
        k = seg[first]
        seen = 0 if k == 0 else np.searchsorted(seg, 2 if seq.sees[first] and k > 1 else 1)
        out.append((base + first, base + last, base, base + seen))
        first = last
    return out


def collate(v, sequences, rows):
    """Sequences of `rows` picture rows each, one after the other -> dict of ids, slots, target [N] (-100 or the next id),
    pos [N, 3], segs [S, 4], starts (each sequence's first token), points and letters [K, 3]."""
    starts = np.cumsum([0] + [len(s.ids) for s in sequences])
    n = -(-int(starts[-1]) // 128) * 128  # few distinct shapes: every new one is compiled and cached by the matrix library
    ids = np.full(n, v.pad, np.int64)
    slots = np.full(n, -1, np.int64)
    pos = np.zeros((n, 3), np.int64)
    target = np.full(n, -100, np.int64)
    segs, points, letters = [], [], []
    for i, (s, a) in enumerate(zip(sequences, starts)):
        b = a + len(s.ids)
        ids[a:b], slots[a:b], pos[a:b] = s.ids, s.slots, s.pos
        slots[a:b][slots[a:b] >= 0] += i * rows
        learn = np.flatnonzero(s.target) + a
        target[learn - 1] = ids[learn]
        segs += segments(s, a)
        points += [(a + k, y, x) for k, y, x in s.points]
        letters += [(a + k, y, x) for k, y, x in s.letters]
    return dict(ids=torch.from_numpy(ids), slots=torch.from_numpy(slots), pos=torch.from_numpy(pos),
                segs=torch.from_numpy(np.array(segs, np.int32)), target=torch.from_numpy(target), starts=starts,
                points=torch.tensor(points, dtype=torch.int64).reshape(-1, 3),
                letters=torch.tensor(letters, dtype=torch.int64).reshape(-1, 3))


def batch(rng, v, taken, n, form, again=.25):
    """taken: what Pool.take gave -> pixels, labels, collated sequences, spans [per sequence]."""
    pixels, about, labels = taken
    h, w = pixels.shape[1:3]
    made = [sequence(rng, v, a, h // 28, w // 28, n, form, again) for a in about]
    text = collate(v, [s for s, _ in made], h * w // 784)
    return torch.from_numpy(np.ascontiguousarray(pixels)), [torch.from_numpy(x) for x in labels], text, \
        [s for _, s in made]
