"""Accuracy of the two GGUF files, by kind of question, on pictures of a seed that training never used.

Whole answers must match exactly. Teacher forcing with argmax at every token of the answer is the same judgement as
greedy decoding; --greedy N decodes N questions token by token as well, to show it.
"""
import argparse
import base64
import io
import json
import urllib.request
from collections import defaultdict

import numpy as np
import torch

import data
import talk
from draw import UNSEEN_WORDS, WORDS, fitted, letters, scene
from export import read_back
from model import patches
from train import losses, right

SEED = 20261  # unless another one is given
SIZES = [size for size, _ in data.SIZES]
KINDS = ["colour", "shape", "where", "count", "at", "yesno", "describe", "absent", "number", "word", "random letters",
         "unseen word", "after", "turn2", "talk"]


@torch.no_grad()
def run(model, v, taken, form, rng, pairs=6):
    pixels, labels, text, spans = data.batch(rng, v, taken, pairs, form)
    _, _, logits, want = losses(model, pixels, labels, text, False)
    return right(text, logits, want, spans)


@torch.no_grad()
def words(model, v, counts, name, least, choose, seed):
    for k in range(least // 24 + 1):
        rng = np.random.default_rng([seed, 500 + k, len(name)])
        h, w = SIZES[k % len(SIZES)]
        seqs, pixels = [], []
        for _ in range(24):
            image, about = scene(rng, w, h, 1, "text", choose(rng))
            while about["text"]["kind"] != "word":
                image, about = scene(rng, w, h, 1, "text", choose(rng))
            pixels.append(fitted(image, about))
            seqs.append(data.sequence(rng, v, about, h // 28, w // 28, 1, [talk.ask_word(rng, about)]))
        text = data.collate(v, [s for s, _ in seqs], h * w // 784)
        rows, _ = model.tower(patches(torch.from_numpy(np.stack(pixels))), h // 14, w // 14)
        hidden = model.text(text["ids"], text["slots"], rows.reshape(-1, rows.shape[-1]), text["pos"], text["segs"])
        target = text["target"]
        logits = model.text.logits(hidden[target >= 0])
        for _, ok in right(text, logits, target[target >= 0], [s for _, s in seqs]):
            counts[name][0] += ok
            counts[name][1] += 1


def random_letters(rng):
    return [letters(rng, int(rng.integers(2, 6)))]


def table(model, v, least=300, seed=SEED):
    counts = defaultdict(lambda: [0, 0])
    forms, k = ["plain", "plain", "plain", "after"], 0
    needed = [x for x in KINDS if x not in ("word", "random letters", "unseen word")]
    while any(counts[x][1] < least for x in needed) and k < 200:
        rng = np.random.default_rng([seed, 77, k])
        taken = data.draw_shard(seed, k, count=24, size=SIZES[k % len(SIZES)])
        for kind, ok in run(model, v, taken, forms[k % 4], rng):
            if kind != "word":
                counts[kind][0] += ok
                counts[kind][1] += 1
        k += 1
    words(model, v, counts, "word", least, lambda rng: WORDS, seed)
    words(model, v, counts, "unseen word", least, lambda rng: UNSEEN_WORDS, seed)
    words(model, v, counts, "random letters", least, random_letters, seed)
    return counts


@torch.no_grad()
def answer(model, v, pixels, question, longest=48):
    """Greedy answer, decoded token by token, to a question about pixels u8 [h, w, 3] on the grid."""
    h, w = pixels.shape[:2]
    seq, _ = data.sequence(None, v, None, h // 28, w // 28, 0, [("", question, "")])
    seq.ids, seq.slots, seq.pos = seq.ids[:-1], seq.slots[:-1], seq.pos[:-1]
    rows, _ = model.tower(patches(torch.from_numpy(np.array(pixels))[None]), h // 14, w // 14)
    ids, slots, pos = (torch.tensor(x) for x in (seq.ids, seq.slots, seq.pos))
    out = []
    while len(out) < longest:
        hidden = model.text(ids, slots, rows[0], pos, torch.tensor([[0, len(ids), 0, 0]], dtype=torch.int32))
        token = int(model.text.logits(hidden[-1]).argmax())
        if token in (v.end, v.eot):
            break
        out.append(token)
        ids = torch.cat((ids, torch.tensor([token])))
        slots = torch.cat((slots, torch.tensor([-1])))
        pos = torch.cat((pos, pos[-1:] + 1))
    return v.decode(out)


def asked(n, seed):
    """n pictures (images of a size on the grid), descriptions, questions and right answers."""
    for k in range(n):
        rng = np.random.default_rng([seed, 900, k])
        h, w = SIZES[k % len(SIZES)]
        image, about = scene(rng, w, h)
        yield image, about, *talk.ask(rng, about)[1:]


def greedy(model, v, n, seed=SEED):
    """-> how many of n questions a real greedy decode answers exactly."""
    return sum(answer(model, v, fitted(image, about), q) == a for image, about, q, a in asked(n, seed))


def answer_of(url, image, question):
    png = io.BytesIO()
    image.save(png, "png")
    picture = "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()
    content = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": question}]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0}
    request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["message"]["content"]


def ask_server(url, model, v, n, seed):
    """-> how many of n questions a farsight-server with these files answers exactly, and how many as we do here."""
    good = same = 0
    for image, about, q, a in asked(n, seed):
        told = answer_of(url, image, q)
        good += told == a
        same += told == answer(model, v, fitted(image, about), q)
    return good, same


def main(args=None):
    p = argparse.ArgumentParser()
    p.add_argument("--models", required=True)
    p.add_argument("--least", type=int, default=300, help="questions a kind")
    p.add_argument("--greedy", type=int, default=100)
    p.add_argument("--seed", type=int, default=SEED, help="of the pictures; training draws with others")
    p.add_argument("--server", default="", help="http://HOST:PORT of a farsight-server with these files: only --greedy questions, asked there")
    o = p.parse_args(args)
    torch.set_num_threads(1)
    model, v = read_back(o.models)
    if o.server:
        good, same = ask_server(o.server.rstrip("/"), model, v, o.greedy, o.seed)
        print(f"through the server: {good} of {o.greedy} exact; {same} as token by token here")
        return
    counts = table(model, v, o.least, o.seed)
    print("| kind | right | asked | accuracy |\n| --- | --- | --- | --- |")
    for kind in KINDS:
        a, n = counts[kind]
        print(f"| {kind} | {a} | {n} | {100 * a / max(n, 1):.1f} % |")
    a, n = np.sum([counts[k] for k in KINDS if k not in ("random letters", "unseen word")], 0)
    print(f"| all but unseen words and random letters | {a} | {n} | {100 * a / n:.1f} % |")
    print(f"decoded token by token: {greedy(model, v, o.greedy, o.seed)} of {o.greedy} exact")


if __name__ == "__main__":
    main()
