"""Draws the pictures of tests/data/pictures and the questions about them, from the held-out seed.

Run as: python samples.py FOLDER. Each picture is the first of its seed's stream that has what its name says.
"""
import json
import os
import sys

import numpy as np

from draw import WORDS, scene

SEED = 20261


def plain(about):
    """Strong colours only: nothing that a person could call by another name."""
    colours = [o["colour"] for o in about["objects"]] + ([about["text"]["colour"]] if about["text"] else [])
    return set(colours) <= {"red", "green", "blue", "yellow", "black", "white"}


def first(k, w, h, want, test, words=None):
    for n in range(20000):
        image, about = scene(np.random.default_rng([SEED, 4000 + k, n]), w, h, 1, want, words)
        if image.size == (w, h) and plain(about) and test(about):
            return image, about
    raise SystemExit("no such picture")


def shapes(about, *names):
    return sorted(o["shape"] for o in about["objects"]) == sorted(names)


def two(a):
    return shapes(a, "circle", "star") and a["objects"][0]["colour"] != a["objects"][1]["colour"] and \
        min(o["r"] for o in a["objects"]) > 20


PICTURES = [
    ("two-shapes.png", 168, 168, "shapes", two, None),
    ("many-shapes.png", 196, 168, "shapes",
     lambda a: len(a["objects"]) == 5 and sum(o["shape"] == "square" for o in a["objects"]) == 3, None),
    ("word.png", 196, 140, "text",
     lambda a: a["text"]["kind"] == "word" and a["text"]["string"] == "stop" and not a["objects"]
     and a["text"]["size"] >= 30, ["stop"]),
    ("number.png", 168, 168, "text",
     lambda a: a["text"]["kind"] == "number" and len(a["text"]["string"]) == 2 and not a["objects"]
     and a["text"]["size"] >= 34, WORDS),
    ("places.png", 224, 168, "shapes",
     lambda a: shapes(a, "heart", "triangle", "cross") and len({o["colour"] for o in a["objects"]}) == 3, None),
]


def questions(name, a):
    """Pairs of question and canonical answer, from the description alone."""
    from talk import PLACES, an
    o = a["objects"]
    if name == "two-shapes.png":
        by = {x["shape"]: x for x in o}
        return [("What colour is the circle?", f"The circle is {by['circle']['colour']}."),
                ("Where is the star?", f"The star is {PLACES[by['star']['place']]}."),
                (f"What shape is {by['star']['colour']}?", f"The {by['star']['colour']} shape is a star."),
                ("What colour is the heart?", "The heart is not there."),
                (f"Is there {an(by['circle']['colour'])} circle?", "Yes."),
                ("Is there a triangle?", "No."), ("How many shapes are there?", "I count 2 shapes.")]
    if name == "many-shapes.png":
        return [("How many squares are there?", "I count 3 squares."),
                ("How many shapes do you see?", "I count 5 shapes.")]
    if name == "word.png":
        return [("What does it say?", 'It says "stop".'), ("What is the word?", 'It says "stop".'),
                ("What colour is the word?", f"The word is {a['text']['colour']}.")]
    if name == "number.png":
        return [("Which number is shown?", f"The number is {a['text']['string']}."),
                ("Where is the number?", f"The number is {PLACES[a['text']['place']]}."),
                ("Is there a star?", "No.")]
    return [(f"Where is the {x['shape']}?", f"The {x['shape']} is {PLACES[x['place']]}.") for x in o] + [
        (f"What colour is the {o[0]['shape']}?", f"The {o[0]['shape']} is {o[0]['colour']}.")]


def main(folder):
    os.makedirs(folder, exist_ok=True)
    out = []
    for k, (name, w, h, want, test, words) in enumerate(PICTURES):
        image, about = first(k, w, h, want, test, words)
        image.save(os.path.join(folder, name), optimize=True)
        out += [dict(picture=name, question=q, answer=a) for q, a in questions(name, about)]
    with open(os.path.join(folder, "questions.json"), "w") as f:
        f.write("[\n" + ",\n".join("  " + json.dumps(x) for x in out) + "\n]\n")


if __name__ == "__main__":
    main(sys.argv[1])
