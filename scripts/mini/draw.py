"""Draws the pictures and says what is in them.

One picture is a dict: size, objects (shape, colour, centre, radius, place) and at most one piece of text
(kind word or number, string, colour, box, centre of every character); texts holds it, or the several of a crowd.
Coordinates are pixels of the finished picture. Everything random comes from the numpy generator that the caller gives.
"""
import math
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SHAPES = ["circle", "square", "triangle", "star", "heart", "cross", "ring", "diamond"]
COLOURS = {
    "red": (220, 35, 35), "green": (40, 160, 60), "blue": (40, 80, 220), "yellow": (245, 215, 40),
    "orange": (245, 135, 25), "purple": (130, 50, 170), "pink": (250, 140, 190), "black": (20, 20, 20),
    "white": (248, 248, 248), "grey": (130, 130, 130),
}
COLOUR_NAMES = list(COLOURS)
# Debian: fonts-dejavu-core, fonts-liberation, fonts-freefont-ttf.
FONT_DIR = "/usr/share/fonts/truetype/"
FONTS = [FONT_DIR + f for f in (
    "dejavu/DejaVuSans.ttf", "dejavu/DejaVuSans-Bold.ttf", "dejavu/DejaVuSerif.ttf",
    "dejavu/DejaVuSerif-Bold.ttf", "dejavu/DejaVuSansMono.ttf", "dejavu/DejaVuSansMono-Bold.ttf",
    "liberation/LiberationSans-Regular.ttf", "liberation/LiberationSans-Bold.ttf",
    "liberation/LiberationSerif-Regular.ttf", "liberation/LiberationSerif-Bold.ttf",
    "liberation/LiberationMono-Bold.ttf", "freefont/FreeSans.ttf", "freefont/FreeSansBold.ttf",
    "freefont/FreeSerifBold.ttf")]
CHARS = "0123456789abcdefghijklmnopqrstuvwxyz"
# 3 x 3 names, index = row * 3 + column.
PLACES = ["at the top left", "at the top", "at the top right", "at the left", "at the centre", "at the right",
          "at the bottom left", "at the bottom", "at the bottom right"]
WORDS = """go no up on in at we me he us my to do so it is hi ok yes stop open exit shop cat dog sun moon sea sky
red blue bus car box cup tea milk egg ice map key pen bed door book tree leaf rose fish bird bear lion wolf frog
duck cow pig hen fox bee ant hat shoe sock coat bag toy ball game play run walk jump swim sing read draw home
room wall roof road path park lake hill rain snow wind fire star gold iron rock sand salt rice corn cake soup
apple lemon bread sugar honey water juice music dance happy smile heart peace night light green black white
clock chair table phone paper plant house river ocean beach storm cloud earth horse mouse sheep tiger zebra
hello thank north south east west left right sale free taxi hotel cafe bank post help push pull hot cold new
old big fast slow""".split()
UNSEEN_WORDS = """yard gift wave pink kite lamp desk fork spoon knife grape melon queen king jazz quiz view vote
zero mix web gym joy jam oak owl van zoo bike boat train plane""".split()
SCALE = 2  # supersampling


@lru_cache(maxsize=512)
def font(index, size):
    return ImageFont.truetype(FONTS[index], size)


def place_of(x, y, w, h):
    """Place index, or -1 when the centre lies too near a border of the thirds to be named."""
    fx, fy = x / w * 3, y / h * 3
    for f in (fx, fy):
        if min(abs(f - 1), abs(f - 2)) < 0.15:
            return -1
    return min(int(fy), 2) * 3 + min(int(fx), 2)


def far(a, b, least):
    return math.dist(a, b) >= least


def jitter(rng, rgb, amount):
    return tuple(int(np.clip(c + rng.integers(-amount, amount + 1), 0, 255)) for c in rgb)


def background(rng, w, h):
    kind = rng.random()
    if kind < 0.40:
        base = int(rng.integers(200, 256))
        rgb = jitter(rng, (base, base, base), 6)
    elif kind < 0.58:
        base = int(rng.integers(0, 60))
        rgb = jitter(rng, (base, base, base), 6)
    elif kind < 0.82:
        rgb = tuple(int(v) for v in rng.integers(165, 250, 3))
    else:
        rgb = tuple(int(v) for v in rng.integers(10, 110, 3))
    image = Image.new("RGB", (w, h), rgb)
    if rng.random() < 0.2:
        end = np.array(jitter(rng, rgb, 35), np.float32)
        t = np.linspace(0, 1, h if rng.random() < 0.5 else w, dtype=np.float32)
        ramp = np.array(rgb, np.float32) * (1 - t[:, None]) + end * t[:, None]
        plane = np.broadcast_to(ramp[:, None] if len(t) == h else ramp[None], (h, w, 3))
        image = Image.fromarray(plane.astype(np.uint8))
    return image, rgb


def polygon(shape, turn):
    """Unit outline (radius about 1), y down."""
    if shape == "square":
        points = [(-.82, -.82), (.82, -.82), (.82, .82), (-.82, .82)]
    elif shape == "diamond":
        points = [(0, -1), (.72, 0), (0, 1), (-.72, 0)]
    elif shape == "triangle":
        points = [(0, -.95), (.95, .75), (-.95, .75)]
    elif shape == "star":
        points = [(math.sin(k * math.pi / 5) * (1, .42)[k % 2], -math.cos(k * math.pi / 5) * (1, .42)[k % 2])
                  for k in range(10)]
    elif shape == "cross":
        a = .32
        points = [(-a, -.95), (a, -.95), (a, -a), (.95, -a), (.95, a), (a, a), (a, .95), (-a, .95), (-a, a),
                  (-.95, a), (-.95, -a), (-a, -a)]
    else:
        points = []
        for k in range(40):
            t = k * math.pi / 20
            x = 16 * math.sin(t) ** 3
            y = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
            points.append((x / 17, -(y + 2.5) / 17))
    c, s = math.cos(turn), math.sin(turn)
    return [(x * c - y * s, x * s + y * c) for x, y in points]


def draw_shape(draw, shape, rgb, cx, cy, r, turn):
    cx, cy, r = cx * SCALE, cy * SCALE, r * SCALE
    if shape == "circle":
        draw.ellipse((cx - r, cy - r, cx + r, cy + r), fill=rgb)
    elif shape == "ring":
        draw.ellipse((cx - r, cy - r, cx + r, cy + r), outline=rgb, width=max(3, int(r * .34)))
    else:
        draw.polygon([(cx + x * r, cy + y * r) for x, y in polygon(shape, turn)], fill=rgb)


def place_text(rng, w, h, kind, string, usable):
    """Chooses font, size and position. Size at least 28 px where the whole string has room."""
    index = int(rng.integers(len(FONTS)))
    top = min(64 if len(string) < 3 else 48, h * .5)
    size = int(rng.uniform(28, max(29, top)))
    while size > 12:
        f = font(index, size)
        x0, y0, x1, y1 = f.getbbox(string)
        if x1 - x0 <= w - 8 and y1 - y0 <= h - 8:
            break
        size -= 1
    px = rng.uniform(4, max(4.1, w - 4 - (x1 - x0))) - x0
    py = rng.uniform(4, max(4.1, h - 4 - (y1 - y0))) - y0
    chars, baseline = [], (y0 + y1) / 2
    for k, ch in enumerate(string):
        left, right = f.getlength(string[:k]), f.getlength(string[:k + 1])
        chars.append((ch.lower(), px + (left + right) / 2, py + baseline))
    box = (px + x0, py + y0, px + x1, py + y1)
    cx, cy = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
    colour = usable[int(rng.integers(len(usable)))]
    return dict(kind=kind, string=string.lower(), drawn=string, colour=colour, box=box, chars=chars,
                place=place_of(cx, cy, w, h), font=index, size=size, at=(px, py))


def letters(rng, n):
    return "".join(chr(97 + int(c)) for c in rng.integers(0, 26, n))


def choose_text(rng, words, loose):
    if rng.random() < 0.45:
        n = int(rng.choice([1, 2, 3], p=[.4, .35, .25]))
        digits = rng.integers(0, 10, n)
        if n > 1 and digits[0] == 0:
            digits[0] = rng.integers(1, 10)
        return "number", "".join(map(str, digits))
    if words is None and rng.random() < loose:
        string = letters(rng, int(rng.integers(2, 6)))
    else:
        words = words or WORDS
        string = words[int(rng.integers(len(words)))]
    return "word", string.upper() if rng.random() < 0.3 else string


def meets(box, others):
    """Whether a box comes closer than 2 px to one of the others."""
    return any(box[2] > b[0] - 2 and box[0] < b[2] + 2 and box[3] > b[1] - 2 and box[1] < b[3] + 2 for b in others)


def add_objects(rng, w, h, n, usable, taken):
    """Up to n shapes, each with its centre well inside a cell of the 3 x 3 grid; taken: boxes to keep clear of."""
    objects = []
    main_shape, main_colour = rng.integers(len(SHAPES)), usable[int(rng.integers(len(usable)))]
    same_shape = rng.random() < 0.3
    same_colour = rng.random() < 0.25
    least = min(w, h)
    for cell in rng.permutation(9)[:n]:
        row, col = divmod(int(cell), 3)
        for _ in range(6):
            cx = ((col + .5) / 3 + rng.uniform(-.1, .1)) * w
            cy = ((row + .5) / 3 + rng.uniform(-.1, .1)) * h
            high = .17 if n > 3 else .24 if n > 1 else .32
            r = max(10.5, least * rng.uniform(.09, high))
            if cx - r < 1 or cy - r < 1 or cx + r > w - 1 or cy + r > h - 1:
                continue
            if any(math.dist((cx, cy), (o["x"], o["y"])) < r + o["r"] + 2 for o in objects):
                continue
            if meets((cx - r, cy - r, cx + r, cy + r), taken):
                continue
            shape = SHAPES[int(main_shape if same_shape and rng.random() < .65 else rng.integers(len(SHAPES)))]
            colour = main_colour if same_colour and rng.random() < .6 else usable[int(rng.integers(len(usable)))]
            objects.append(dict(shape=shape, colour=colour, x=cx, y=cy, r=r, place=row * 3 + col,
                                turn=rng.uniform(-.15, .15)))
            break
    objects.sort(key=lambda o: o["place"])
    return objects


def drawn_size(rng, w, h):
    """Size at which a picture for the grid size w x h is drawn: sometimes another, stretched afterwards, as the
    preprocessing does it."""
    other = rng.random()
    if other < 0.2:
        return w + int(rng.integers(-13, 14)), h + int(rng.integers(-13, 14))
    if other < 0.32:
        grow = rng.uniform(.75, 1.6)
        return int(w * grow), int(h * grow)
    return w, h


def paint(rng, image, objects, texts):
    """Draws things on a background of SCALE times the picture's size -> picture, sometimes with noise."""
    draw = ImageDraw.Draw(image)
    for o in objects:
        draw_shape(draw, o["shape"], jitter(rng, COLOURS[o["colour"]], 14), o["x"], o["y"], o["r"], o["turn"])
    for t in texts:
        draw.text((t["at"][0] * SCALE, t["at"][1] * SCALE), t["drawn"], font=font(t["font"], t["size"] * SCALE),
                  fill=jitter(rng, COLOURS[t["colour"]], 14))
    image = image.reduce(SCALE)
    if rng.random() < 0.25:
        noise = rng.normal(0, rng.uniform(2, 12), (image.height, image.width, 1 if rng.random() < .5 else 3))
        image = Image.fromarray(np.clip(np.asarray(image, np.float32) + noise, 0, 255).astype(np.uint8))
    return image


def scene(rng, w, h, level=1, want=None, words=None, loose=.1):
    """level 0: one or two things; 1: everything. want: "shapes" or "text" or None. words: what texts are taken from;
    loose: else the share of texts that are letters at random. -> (image RGB, description)."""
    dw, dh = drawn_size(rng, w, h)
    want = want or ("text" if rng.random() < 0.42 else "shapes")
    image, bg = background(rng, dw * SCALE, dh * SCALE)
    usable = [c for c in COLOUR_NAMES if far(bg, COLOURS[c], 120)]
    text, taken = None, []
    if want == "text":
        kind, string = choose_text(rng, words, loose)
        text = place_text(rng, dw, dh, kind, string, usable)
        taken.append(text["box"])
        n = int(rng.integers(1, 4)) if level and rng.random() < 0.25 else 0
    elif level == 0:
        n = int(rng.choice([1, 2], p=[.55, .45]))
    else:
        n = int(rng.choice(7, p=[.03, .17, .2, .2, .16, .13, .11]))
    objects = add_objects(rng, dw, dh, n, usable, taken)
    image = paint(rng, image, objects, [text] if text else [])
    about = dict(w=w, h=h, drawn_w=dw, drawn_h=dh, objects=objects, text=text, texts=[text] if text else [])
    return image, rescale(about, w / dw, h / dh)


def crowd(rng, w, h):
    """A picture as full of words, numbers and shapes as it will hold: nothing can be asked about it, but the tower sees
    many times more characters in it than in others. -> (image RGB, description with several texts)."""
    dw, dh = drawn_size(rng, w, h)
    image, bg = background(rng, dw * SCALE, dh * SCALE)
    usable = [c for c in COLOUR_NAMES if far(bg, COLOURS[c], 120)]
    texts = []
    for _ in range(14):
        kind, string = choose_text(rng, None, .6)
        text = place_text(rng, dw, dh, kind, string, usable)
        if not meets(text["box"], [t["box"] for t in texts]):
            texts.append(text)
    objects = add_objects(rng, dw, dh, int(rng.integers(0, 10)), usable, [t["box"] for t in texts])
    image = paint(rng, image, objects, texts)
    about = dict(w=w, h=h, drawn_w=dw, drawn_h=dh, objects=objects, text=None, texts=texts)
    return image, rescale(about, w / dw, h / dh)


def rescale(about, sx, sy):
    for o in about["objects"]:
        o["x"], o["y"], o["r"] = o["x"] * sx, o["y"] * sy, o["r"] * min(sx, sy)
    for t in about["texts"]:
        t["chars"] = [(c, x * sx, y * sy) for c, x, y in t["chars"]]
        t["box"] = (t["box"][0] * sx, t["box"][1] * sy, t["box"][2] * sx, t["box"][3] * sy)
    return about


def fitted(image, about):
    """Pixels [h, w, 3] u8 as the encoder sees them: stretched bicubically to the grid size."""
    if image.size != (about["w"], about["h"]):
        image = image.resize((about["w"], about["h"]), Image.BICUBIC)
    return np.asarray(image)


def patch_labels(about):
    """Per 14 px patch, int64 [h/14, w/14] each: shape (0 none), colour (0 none), character (0 none, -1 unclear), at the
    end the character's number from the left and from the right (1 up);
    per 28 px cell: shape, colour and place of the object whose centre is there, and the colour of characters."""
    gh, gw = about["h"] // 14, about["w"] // 14
    ys, xs = np.mgrid[0:gh, 0:gw] * 14 + 7.0
    shape, colour, char = (np.zeros((gh, gw), np.int64) for _ in range(3))
    nth, left = np.zeros((gh, gw), np.int64), np.zeros((gh, gw), np.int64)
    cell_shape, cell_colour, cell_place = (np.zeros((gh // 2, gw // 2), np.int64) for _ in range(3))
    for o in about["objects"]:
        inside = (xs - o["x"]) ** 2 + (ys - o["y"]) ** 2 < max(o["r"], 8) ** 2
        shape[inside] = SHAPES.index(o["shape"]) + 1
        colour[inside] = COLOUR_NAMES.index(o["colour"]) + 1
        cy, cx = min(int(o["y"] / 28), gh // 2 - 1), min(int(o["x"] / 28), gw // 2 - 1)
        cell_shape[cy, cx] = SHAPES.index(o["shape"]) + 1
        cell_colour[cy, cx] = COLOUR_NAMES.index(o["colour"]) + 1
        cell_place[cy, cx] = o["place"] + 1
    for text in about["texts"]:
        for k, (c, x, y) in enumerate(text["chars"]):
            py, px = min(max(int(y / 14), 0), gh - 1), min(max(int(x / 14), 0), gw - 1)
            char[py, px] = CHARS.index(c) + 1 if char[py, px] == 0 else -1
            nth[py, px], left[py, px] = k + 1, len(text["chars"]) - k
            colour[py, px] = COLOUR_NAMES.index(text["colour"]) + 1
            cell_colour[py // 2, px // 2] = colour[py, px]
    nth[char < 0], left[char < 0] = -1, -1
    return shape, colour, char, cell_shape, cell_colour, cell_place, nth, left
