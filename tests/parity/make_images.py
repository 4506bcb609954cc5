"""tests/data/cases: pictures of every kind that a decoder meets, and what Pillow decodes them to (expected.json).

With --keep (make_all.sh uses it) pictures that exist are left alone and only the facts are made anew: the ones from reports are
not drawn by this script, and encoders differ between versions."""

import argparse
import hashlib
import io
import json
import os
import struct
import zlib

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageOps

import goldens as G

CASES = os.path.join(G.DATA, "cases")


def scene(w, h, seed=1):
    """Smooth colours with two hard-edged shapes; kind to JPEG away from the edges."""
    y, x = np.mgrid[0:h, 0:w].astype(float)
    r = 40 + 180 * x / max(1, w - 1)
    g = 200 - 150 * y / max(1, h - 1)
    b = 128 + 60 * np.sin((x + y) / 9 + seed)
    im = Image.fromarray(np.stack([r, g, b], -1).round().astype(np.uint8))
    d = ImageDraw.Draw(im)
    d.rectangle([w // 8, h // 8, w // 3, h // 3], fill=(230, 40, 30))
    d.ellipse([w // 2, h // 2, w - 1 - w // 8, h - 1 - h // 8], fill=(20, 60, 220))
    return im


def alpha_ramp(w, h):
    y, x = np.mgrid[0:h, 0:w]
    a = (x * 255 // max(1, w - 1)).astype(np.uint8)
    a[: h // 4] = 0
    a[-(h // 4):] = 255
    return a


# ---- PNG kinds that Pillow does not write: 16 bits a channel, Adam7 -------------------------------------------------

def chunk(tag, data):
    return struct.pack(">I", len(data)) + tag + data + struct.pack(">I", zlib.crc32(tag + data))


def pack_rows(samples, depth):
    """[h][w][channels] -> PNG scanlines with filter 0."""
    h = samples.shape[0]
    if depth == 16:
        rows = samples.astype(">u2").reshape(h, -1).view(np.uint8)
    elif depth == 8:
        rows = samples.astype(np.uint8).reshape(h, -1)
    else:
        bits = np.unpackbits(samples.astype(np.uint8).reshape(h, -1, 1), axis=2)[:, :, 8 - depth:]
        rows = np.packbits(bits.reshape(h, -1), axis=1)
    return b"".join(b"\0" + r.tobytes() for r in rows)


ADAM7 = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]


def png(samples, depth, colour, interlace=False, extra=b""):
    h, w = samples.shape[:2]
    if interlace:
        raw = b"".join(pack_rows(samples[y0::dy, x0::dx], depth) for x0, y0, dx, dy in ADAM7 if samples[y0::dy, x0::dx].size)
    else:
        raw = pack_rows(samples, depth)
    head = struct.pack(">IIBBBBB", w, h, depth, colour, 0, 0, int(interlace))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + extra + chunk(b"IDAT", zlib.compress(raw, 9)) + chunk(b"IEND", b"")


def bomb_of_text():
    """16000 x 16000 by its header; in front of the pixels two comments that unpack to 15 MiB each."""
    head = struct.pack(">IIBBBBB", 16000, 16000, 8, 2, 0, 0, 0)
    comment = chunk(b"zTXt", b"note\0\0" + zlib.compress(bytes(15 << 20), 9))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + comment * 2 + chunk(b"IDAT", zlib.compress(bytes(4))) + chunk(b"IEND", b"")


def wide_samples(w, h, channels, seed):
    return np.random.default_rng(seed).integers(0, 65536, (h, w, channels))


def over_white(rgb, a, top):
    """round((c*a + top*(top-a)) / top), in integers."""
    return (rgb * a + top * (top - a) + top // 2) // top


def to8(v):
    return (v * 255 + 32767) // 65535


def sixteen(samples, colour, interlace=False):
    """A 16-bit PNG and its RGB: each sample to 8 bits first, then alpha over white."""
    v = to8(samples)
    a = v[..., -1:] if colour in (4, 6) else np.full(v.shape[:2] + (1,), 255)
    c = v[..., :-1] if colour in (4, 6) else v
    rgb = over_white(np.repeat(c, 3, -1) if c.shape[-1] == 1 else c, a, 255)
    return png(samples, 16, colour, interlace), rgb.astype(np.uint8)


# ---- the extra pictures ----------------------------------------------------------------------------------------------

def save(im, fmt, **kw):
    f = io.BytesIO()
    im.save(f, fmt, **kw)
    return f.getvalue()


def pngs():
    im = scene(61, 47)
    rgb = np.asarray(im)
    a = alpha_ramp(61, 47)
    out = {
        "rgb16.png": sixteen(wide_samples(33, 21, 3, 1), 2), "rgba16.png": sixteen(wide_samples(33, 21, 4, 2), 6),
        "gray16.png": sixteen(wide_samples(33, 21, 1, 3), 0), "graya16.png": sixteen(wide_samples(17, 9, 2, 4), 4),
        "rgba16_adam7.png": sixteen(wide_samples(19, 13, 4, 5), 6, True),
    }
    pal = im.quantize(37)
    plain = {"palette.png": pal, "palette4.png": im.quantize(11), "gray.png": im.convert("L"), "bit1.png": im.convert("1"), "rgba.png": Image.merge("RGBA", [*im.split(), Image.fromarray(a)]),
             "graya.png": Image.merge("LA", [im.convert("L"), Image.fromarray(a)])}
    out |= {n: save(p, "PNG") for n, p in plain.items()}
    alphas = bytes(int(v) for v in np.linspace(0, 255, 37).round())
    out["palette_trns.png"] = save(pal, "PNG", transparency=alphas)
    out["palette_trns_one.png"] = save(pal, "PNG", transparency=5)
    # tRNS on RGB and grey: one exact colour is transparent.
    key = tuple(int(v) for v in rgb[10, 10])
    out["rgb_trns.png"] = png(rgb, 8, 2, extra=chunk(b"tRNS", struct.pack(">HHH", *key)))
    out["gray_trns.png"] = png(np.asarray(im.convert("L"))[..., None], 8, 0, extra=chunk(b"tRNS", struct.pack(">H", int(np.asarray(im.convert("L"))[10, 10]))))
    exif = Image.Exif()
    exif[0x112] = 3
    out["exif3.png"] = save(im, "PNG", exif=exif)
    out["rgb_adam7.png"] = png(rgb, 8, 2, True)
    out["gray2.png"] = png((np.asarray(im.convert("L"))[..., None] >> 6), 2, 0)
    out["gray4_adam7.png"] = png((np.asarray(im.convert("L"))[..., None] >> 4), 4, 0, True)
    return out


def jpegs():
    im = scene(61, 47)
    out = {"cmyk_adobe.jpg": save(im.convert("CMYK"), "JPEG", quality=92)}
    out["cmyk_plain.jpg"] = drop_adobe(save(ImageChops.invert(im.convert("CMYK")), "JPEG", quality=92))
    out["ycck_adobe.jpg"] = ycck(im)
    out["progressive2.jpg"] = save(im, "JPEG", quality=90, progressive=True)
    out["gray2.jpg"] = save(im.convert("L"), "JPEG", quality=90)
    out["sub444.jpg"] = save(im, "JPEG", quality=90, subsampling=0)
    out["sub422.jpg"] = save(im, "JPEG", quality=90, subsampling=1)
    out["restart.jpg"] = save(im, "JPEG", quality=90, restart_marker_blocks=2)
    exif = Image.Exif()
    exif[0x112] = 6
    out["exif6_progressive.jpg"] = save(im, "JPEG", quality=90, progressive=True, exif=exif)
    for i, size in enumerate([(1, 1), (2, 3), (7, 5), (8, 8), (9, 16), (15, 17), (16, 1), (1, 33), (63, 2), (97, 61), (127, 3), (31, 65)]):
        out[f"odd_{size[0]}x{size[1]}.jpg"] = save(scene(*size, seed=i), "JPEG", quality=90)
    return out


def ycck(im):
    """Adobe transform 2: C, M, Y as YCbCr. Pillow stores 255 - x of each band."""
    c, m, y, k = im.convert("CMYK").split()
    bands = [ImageChops.invert(b) for b in Image.merge("RGB", (c, m, y)).convert("YCbCr").split()]
    d = bytearray(save(Image.merge("CMYK", (*bands, k)), "JPEG", quality=92))
    i = d.index(b"\xff\xee")
    assert d[i + 4:i + 9] == b"Adobe" and d[i + 15] == 0
    d[i + 15] = 2
    return bytes(d)


def drop_adobe(data):
    """Without APP14 a 4-component JPEG is plain CMYK, 0 = no ink; Pillow itself takes all for Adobe's inverted ones."""
    i = data.index(b"\xff\xee")
    n = struct.unpack(">H", data[i + 2:i + 4])[0]
    return data[:i] + data[i + 2 + n:]


def webps():
    im = scene(61, 47)
    rgba = Image.merge("RGBA", [*im.split(), Image.fromarray(alpha_ramp(61, 47))])
    exif = Image.Exif()
    exif[0x112] = 8
    return {"alpha_lossless.webp": save(rgba, "WEBP", lossless=True, exact=True), "alpha_lossy.webp": save(rgba, "WEBP", quality=85),
            "odd_33x7.webp": save(scene(33, 7), "WEBP", lossless=True),
            "exif8.webp": save(im, "WEBP", lossless=True, exif=exif)}


def gifs():
    """A whole canvas; one with transparency; a first frame smaller than its canvas, at an offset; interlaced."""
    frames = [scene(61, 47, s).quantize(29) for s in (1, 4)]
    out = {"animated.gif": save(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=80, loop=0),
           "interlaced.gif": save(frames[0], "GIF", interlace=1), "plain.gif": save(frames[0], "GIF", interlace=0)}
    clear = frames[0].copy()
    clear.paste(7, (0, 0, 20, 47))
    out["transparent.gif"] = save(clear, "GIF", transparency=7, interlace=0)
    for name, trans in (("offset.gif", None), ("offset_transparent.gif", 3)):
        small = scene(23, 17).quantize(13)
        if trans is not None:
            small.paste(trans, (2, 3, 9, 9))
        data = save(small, "GIF", interlace=0, **({} if trans is None else {"transparency": trans}))
        out[name] = move_frame(data, (40, 30), (11, 8))
    return out


def move_frame(data, canvas, at):
    """Enlarges the canvas of a one-frame GIF and moves the frame: Pillow itself always writes them alike."""
    d = bytearray(data)
    w, h = struct.unpack("<HH", d[6:10])
    d[6:10] = struct.pack("<HH", *canvas)
    i = d.index(b"\x2c\0\0\0\0" + struct.pack("<HH", w, h))
    d[i + 1:i + 5] = struct.pack("<HH", *at)
    return bytes(d)


# ---- what to expect ---------------------------------------------------------------------------------------------------

LOSSY = {".jpg"}
BAD = {"truncated.jpg": "damaged", "truncated.png": "damaged", "bomb_20000.png": "pixels", "bomb_header.png": "pixels",
       "bomb_text.png": "pixels"}
# Largest difference of one channel that a correct decoder may show: IDCT and chroma upsampling variants, CMYK arithmetic.
TOLERANCE = {"cmyk.jpg": 12, "cmyk_adobe.jpg": 12, "cmyk_plain.jpg": 12, "ycck_adobe.jpg": 12}
# Where Pillow is no reference: its answer for the twin of the same picture is.
TWIN = {"cmyk_plain.jpg": "cmyk_adobe.jpg"}


def decode(path):
    """Pillow: first frame, EXIF orientation, RGB with alpha over white. (RGB array, mode as stored)."""
    im = Image.open(path)
    im.seek(0)
    mode = im.mode
    im.load()
    im = ImageOps.exif_transpose(im)
    if im.mode.startswith("I;16") or im.mode == "I":
        v = to8(np.asarray(im).astype(np.int64) & 0xFFFF)
        return np.repeat(v[..., None], 3, -1).astype(np.uint8), mode
    if im.mode in ("RGBA", "LA", "PA") or "transparency" in im.info:
        v = np.asarray(im.convert("RGBA")).astype(np.int64)
        return over_white(v[..., :3], v[..., 3:], 255).astype(np.uint8), mode
    return np.asarray(im.convert("RGB")), mode


def gif_canvas(path):
    """Outside of the first frame a viewer shows nothing, so white; Pillow leaves colour 0 of the palette there."""
    im = Image.open(path)
    box = im.dispose_extent if hasattr(im, "dispose_extent") else (0, 0, *im.size)
    rgb, mode = decode(path)
    out = np.full_like(rgb, 255)
    x0, y0, x1, y1 = box
    out[y0:y1, x0:x1] = rgb[y0:y1, x0:x1]
    return out, mode


def lossy(name, path):
    if name.endswith(".webp"):
        data = open(path, "rb").read()
        return b"VP8 " in data[:64] or b"VP8 " in data
    return os.path.splitext(name)[1] in LOSSY


def facts(name, exact):
    path = os.path.join(CASES, name)
    if name in BAD:
        with Image.open(path) as im:
            size = list(im.size)
        return {"file": name, "error": BAD[name], "size": size}
    twin = os.path.join(CASES, TWIN.get(name, name))
    rgb, mode = gif_canvas(path) if name.endswith(".gif") else decode(twin)
    if name in exact:
        rgb = exact[name]
    h, w = rgb.shape[:2]
    out = {"file": name, "size": [w, h], "mode": mode, "lossy": lossy(name, path)}
    with Image.open(path) as im:
        out["orientation"] = im.getexif().get(0x112, 1)
    if out["lossy"]:
        out["tolerance"] = TOLERANCE.get(name, 4)
    else:
        out["sha256"] = hashlib.sha256(rgb.tobytes()).hexdigest()
    points = sorted({(0, 0), (w - 1, 0), (0, h - 1), (w - 1, h - 1), (w // 2, h // 2), (w // 4, h // 4), (w // 5, 3 * h // 4), (w // 3, h // 2)})
    out["pixels"] = [[x, y, *(int(v) for v in rgb[y, x])] for x, y in points]
    out["mean"] = [round(float(v), 3) for v in rgb.reshape(-1, 3).mean(0)]
    return out


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--keep", action="store_true", help="leave pictures that exist as they are")
    keep = ap.parse_args().keep
    os.makedirs(CASES, exist_ok=True)
    exact = {}
    for name, made in {"bomb_text.png": bomb_of_text(), **pngs(), **jpegs(), **webps(), **gifs()}.items():
        data, rgb = made if isinstance(made, tuple) else (made, None)
        if rgb is not None:
            exact[name] = rgb
        path = os.path.join(CASES, name)
        if not (keep and os.path.exists(path)):
            with open(path, "wb") as f:
                f.write(data)
    names = sorted(n for n in os.listdir(CASES) if n.rsplit(".", 1)[-1] in ("png", "jpg", "webp", "gif"))
    Image.MAX_IMAGE_PIXELS = None
    rows = [facts(n, exact) for n in names]
    with open(os.path.join(CASES, "expected.json"), "w") as f:
        f.write("[\n" + ",\n".join(json.dumps(r) for r in rows) + "\n]\n")
    print(f"  {len(rows)} pictures, {sum(os.path.getsize(os.path.join(CASES, n)) for n in names)} bytes")


if __name__ == "__main__":
    main()
