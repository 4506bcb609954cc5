"""Questions and answers about a described picture, and conversations without one.

Every function takes the description made by draw.scene and a numpy generator, and returns (kind, question,
answer). Answers are canonical: one right string for each question, and as far as English allows its wording depends on
the question alone up to the word that has to be seen.
"""
from draw import COLOUR_NAMES, PLACES, SHAPES

PLURAL = {s: s + ("es" if s == "cross" else "s") for s in SHAPES}
PLACE_NAMES = [("top left", "upper left", "top left corner"), ("top", "top middle", "top centre"),
               ("top right", "upper right", "top right corner"),
               ("left", "left side", "middle left"), ("centre", "center", "middle"),
               ("right", "right side", "middle right"),
               ("bottom left", "lower left", "bottom left corner"), ("bottom", "bottom middle", "bottom centre"),
               ("bottom right", "lower right", "bottom right corner")]
COLOUR_Q = ["What colour is the {s}?", "What color is the {s}?", "Which colour is the {s}?",
            "Which color is the {s}?", "What is the colour of the {s}?", "What is the color of the {s}?",
            "What colour does the {s} have?", "Tell me the colour of the {s}.", "Tell me the color of the {s}.",
            "The {s} is what colour?", "In which colour is the {s} drawn?", "What's the color of the {s}?"]
SHAPE_Q = ["What shape is {c}?", "Which shape is {c}?", "What is {c}?", "What is the {c} shape?",
           "What is the {c} thing?", "Which object is {c}?", "What kind of shape is {c}?",
           "Name the {c} shape.", "What shape is the {c} object?", "What {c} shape do you see?"]
WHERE_Q = ["Where is the {s}?", "Where is the {s} in the picture?", "Where can I find the {s}?",
           "Where do you see the {s}?", "In which part of the picture is the {s}?",
           "What is the position of the {s}?", "Tell me where the {s} is.", "Where in the image is the {s}?"]
COUNT_Q = ["How many {n} are there?", "How many {n} do you see?", "How many {n} are in the picture?",
           "How many {n} can you see?", "Count the {n}.", "What is the number of {n}?",
           "How many {n} does the image show?", "How many {n}?"]
AT_Q = ["What is at the {p}?", "What is in the {p}?", "What is on the {p}?", "What do you see at the {p}?",
        "Which shape is at the {p}?", "What is there at the {p}?", "What is at the {p} of the picture?",
        "What shape is in the {p}?"]
IS_Q = ["Is there a {s}?", "Is there a {s} in the picture?", "Do you see a {s}?", "Can you see a {s}?",
        "Does the picture show a {s}?", "Is a {s} in the image?"]
DESCRIBE_Q = ["Describe the picture.", "Describe the image.", "What is in the picture?", "What do you see?",
              "What does the picture show?", "What is in this image?", "What can you see in the picture?",
              "Tell me what you see."]
NUMBER_Q = ["What number is shown?", "Which number is shown?", "What is the number?", "Which number do you see?",
            "What number is in the picture?", "Read the number.", "What number is this?", "Which number is it?"]
DIGIT_Q = ["Which digit is shown?", "What digit is this?", "Which digit do you see?", "What is the digit?",
           "Read the digit.", "What digit is in the picture?"]
WORD_Q = ["What does it say?", "What is the word?", "Which word is shown?", "What word is written?",
          "Read the word.", "What does the text say?", "What word do you see?", "What is written in the picture?",
          "Read the text.", "What is the text?", "What does the sign say?"]
HELLO = [(["Hello!", "Hello.", "Hi!", "Hi there!", "Good morning.", "Hey!", "Good day!"],
          "Hello! Ask me about a picture."),
         (["Who are you?", "What are you?", "What is your name?", "Tell me about yourself."],
          "I am Farsight mini, a small model that looks at drawn pictures."),
         (["What can you do?", "How can you help me?", "What do you know?", "Help!", "Can you help me?"],
          "I can name colours, shapes, places, counts, numbers and short words in a picture."),
         (["Thank you!", "Thanks!", "Thank you very much.", "Thanks a lot."], "You are welcome."),
         (["Goodbye!", "Bye!", "See you later.", "Good night."], "Goodbye!"),
         (["How are you?", "How are you today?", "Are you well?"], "I am fine, thank you."),
         (["Tell me a story.", "Write a poem.", "What is the weather?", "Who is the president?",
           "What time is it?", "Tell me a joke.", "What is the capital of France?", "Write some code.",
           "Translate this.", "How old is the earth?"],
          "I can only answer questions about simple pictures.")]
SYSTEMS = ["You are a helpful assistant.", "You are Farsight.", "Answer briefly.",
           "You answer questions about pictures.", "You are a careful assistant. Answer in one sentence.",
           "Be short and exact."]
NO_PICTURE = "I see no picture. Please send one."
SYSTEM = SYSTEMS[0]


def pick(rng, items):
    return items[int(rng.integers(len(items)))]


def an(word):
    return ("an " if word[0] in "aeiou" else "a ") + word


def say(rng, kind, templates, answer, **words):
    """Fills a template; now and then without its capital or its last mark, as people type."""
    q = pick(rng, templates).format(**words).replace(" a orange", " an orange")
    if rng.random() < .12:
        q = q[0].lower() + q[1:]
    if rng.random() < .12:
        q = q.rstrip("?.")
    return kind, q, answer


def by(objects, **want):
    return [o for o in objects if all(o[k] == v for k, v in want.items())]


def named(rng, objects, o):
    """The shortest unambiguous name, or sometimes the full one: "star" or "red star"; None if neither is unique."""
    full = o["colour"] + " " + o["shape"]
    if len(by(objects, shape=o["shape"])) == 1 and rng.random() < .6:
        return o["shape"]
    return full if len(by(objects, shape=o["shape"], colour=o["colour"])) == 1 else None


def missing_shape(rng, objects):
    return pick(rng, [s for s in SHAPES if not by(objects, shape=s)])


def ask_colour(rng, a):
    objects, text = a["objects"], a["text"]
    if text and rng.random() < .6:
        return say(rng, "colour", COLOUR_Q, f"The {text['kind']} is {text['colour']}.", s=text["kind"])
    unique = [o for o in objects if len(by(objects, shape=o["shape"])) == 1]
    if not unique or rng.random() < .15:
        s = missing_shape(rng, objects)
        return say(rng, "absent", COLOUR_Q, f"The {s} is not there.", s=s)
    o = pick(rng, unique)
    return say(rng, "colour", COLOUR_Q, f"The {o['shape']} is {o['colour']}.", s=o["shape"])


def ask_shape(rng, a):
    objects, text = a["objects"], a["text"]
    used = {o["colour"] for o in objects} | ({text["colour"]} if text else set())
    unique = [o for o in objects if len(by(objects, colour=o["colour"])) == 1
              and not (text and text["colour"] == o["colour"])]
    if not unique or rng.random() < .15:
        c = pick(rng, [c for c in COLOUR_NAMES if c not in used])
        return say(rng, "absent", SHAPE_Q, f"The {c} shape is not there.", c=c)
    o = pick(rng, unique)
    return say(rng, "shape", SHAPE_Q, f"The {o['colour']} shape is a {o['shape']}.", c=o["colour"])


def ask_where(rng, a):
    objects, text = a["objects"], a["text"]
    if text and text["place"] >= 0 and rng.random() < .6:
        return say(rng, "where", WHERE_Q, f"The {text['kind']} is {PLACES[text['place']]}.", s=text["kind"])
    names = [(o, named(rng, objects, o)) for o in objects]
    names = [(o, n) for o, n in names if n]
    if not names or rng.random() < .15:
        s = missing_shape(rng, objects)
        return say(rng, "absent", WHERE_Q, f"The {s} is not there.", s=s)
    o, name = pick(rng, names)
    return say(rng, "where", WHERE_Q, f"The {name} is {PLACES[o['place']]}.", s=name)


def ask_count(rng, a):
    objects = a["objects"]
    which = rng.random()
    if which < .55:
        s = missing_shape(rng, objects) if not objects or rng.random() < .2 else pick(rng, objects)["shape"]
        n, one, many = len(by(objects, shape=s)), s, PLURAL[s]
    elif which < .75:
        c = pick(rng, COLOUR_NAMES) if not objects or rng.random() < .15 else pick(rng, objects)["colour"]
        n, one, many = len(by(objects, colour=c)), c + " shape", c + " shapes"
    else:
        n, one, many = len(objects), "shape", "shapes"
    answer = f"I count {n or 'no'} {one if n == 1 else many}."
    return say(rng, "count", COUNT_Q, answer, n=many)


def ask_at(rng, a):
    objects = a["objects"]
    if objects and rng.random() < .75:
        o = pick(rng, objects)
        return say(rng, "at", AT_Q, f"{an(o['colour']).capitalize()} {o['shape']}.",
                   p=pick(rng, PLACE_NAMES[o["place"]]))
    text = a["text"]
    if text:
        return ask_colour(rng, a)
    free = [p for p in range(9) if not by(objects, place=p)]
    return say(rng, "at", AT_Q, "Nothing.", p=pick(rng, PLACE_NAMES[pick(rng, free)]))


def ask_is(rng, a):
    objects = a["objects"]
    both = rng.random() < .6
    if objects and rng.random() < .5:
        o = pick(rng, objects)
        name = o["colour"] + " " + o["shape"] if both else o["shape"]
        return say(rng, "yesno", IS_Q, "Yes.", s=name)
    if objects and both:  # near misses: the shape in another colour, or the colour on another shape
        o = pick(rng, objects)
        for _ in range(8):
            s, c = (o["shape"], pick(rng, COLOUR_NAMES)) if rng.random() < .5 else (pick(rng, SHAPES), o["colour"])
            if not by(objects, shape=s, colour=c):
                return say(rng, "yesno", IS_Q, "No.", s=c + " " + s)
    s = missing_shape(rng, objects)
    return say(rng, "yesno", IS_Q, "No.", s=pick(rng, COLOUR_NAMES) + " " + s if both else s)


def ask_describe(rng, a):
    objects, text = a["objects"], a["text"]
    parts = []
    if text:
        parts.append(f'the word "{text["string"]}"' if text["kind"] == "word" else f"the number {text['string']}")
    if len(objects) > 2:
        parts.append(f"{len(objects)} shapes")
    else:
        parts += [f"{an(o['colour'])} {o['shape']} {PLACES[o['place']]}" for o in objects]
    if not parts:
        return say(rng, "describe", DESCRIBE_Q, "I see nothing.")
    answer = parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
    return say(rng, "describe", DESCRIBE_Q, "I see " + answer + ".")


def ask_number(rng, a):
    text = a["text"]
    if not text or text["kind"] != "number":
        return say(rng, "absent", NUMBER_Q + DIGIT_Q, "The number is not there.")
    templates = DIGIT_Q + NUMBER_Q if len(text["string"]) == 1 else NUMBER_Q
    return say(rng, "number", templates, f"The number is {text['string']}.")


def ask_word(rng, a):
    text = a["text"]
    if not text:
        return say(rng, "absent", WORD_Q, "It says nothing.")
    if text["kind"] == "number":
        return say(rng, "number", ["What does it say?", "What is written in the picture?", "Read the text.",
                                   "What does the text say?"], f'It says "{text["string"]}".')
    return say(rng, "word", WORD_Q, f'It says "{text["string"]}".')


ON_SHAPES = [(ask_colour, 2), (ask_shape, 1.6), (ask_where, 2.6), (ask_count, 2.6), (ask_at, 2.2), (ask_is, 1.6),
             (ask_describe, 1.4), (ask_number, .25), (ask_word, .25)]
ON_WORD = [(ask_word, 4), (ask_describe, 1), (ask_colour, 2), (ask_where, .8), (ask_number, .5), (ask_count, .3),
           (ask_is, .3), (ask_shape, .3)]
ON_NUMBER = [(ask_number, 4), (ask_word, .7), (ask_describe, 1), (ask_colour, 2), (ask_where, .8),
             (ask_count, .3), (ask_is, .3), (ask_shape, .3)]


def lies(a, question, answer):
    """-> centre (x, y) of the one thing that an answer speaks of, or of the middle character of text that it says the colour
    of, None when there is no such thing; and the answer's token from which on it has to be known, -1: the one before."""
    text, found, late = a["text"], [], 2
    asked = question.rstrip("?") + " "
    for o in a["objects"]:
        shape, full = o["shape"], o["colour"] + " " + o["shape"]
        if answer in (f"The {shape} is {PLACES[o['place']]}.", f"The {full} is {PLACES[o['place']]}.", f"The {shape} is {o['colour']}."):
            found.append((o["x"], o["y"]))
        elif answer in (f"The {o['colour']} shape is a {shape}.", f"{an(full).capitalize()}.") or answer == "Yes." and (
                f" {full} " in asked or f" {an(shape)} " in asked):
            found.append((o["x"], o["y"]))
            late = -1
    if text and text["place"] >= 0 and answer == f"The {text['kind']} is {PLACES[text['place']]}.":
        x0, y0, x1, y1 = text["box"]
        found.append(((x0 + x1) / 2, (y0 + y1) / 2))
    if text and answer == f"The {text['kind']} is {text['colour']}.":
        found.append(text["chars"][len(text["chars"]) // 2][1:])
    return (found[0], late) if len(found) == 1 else (None, 0)


def ask(rng, a):
    table = ON_SHAPES if not a["text"] else ON_WORD if a["text"]["kind"] == "word" else ON_NUMBER
    weights = [w for _, w in table]
    total, at = sum(weights), rng.random()
    for f, w in table:
        at -= w / total
        if at < 0:
            break
    return f(rng, a)


def ask_many(rng, a, n):
    """n questions, mostly different."""
    out, seen = [], set()
    for _ in range(n * 3):
        item = ask(rng, a)
        if item[1] not in seen:
            seen.add(item[1])
            out.append(item)
        if len(out) == n:
            break
    while len(out) < n:
        out.append(ask(rng, a))
    return out


def small_talk(rng, a=None):
    questions, answer = pick(rng, HELLO)
    return say(rng, "talk", questions, answer)


def without_picture(rng, a):
    """A picture question in a conversation that has none."""
    if rng.random() < .5:
        return small_talk(rng)
    return ("talk", ask(rng, a)[1], NO_PICTURE)
