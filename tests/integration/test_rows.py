"""Pictures of every format and orientation give the same rows as their plain twins (cases O01 to O03), through the real encoder's line protocol."""
import json
import pathlib
import struct
import subprocess

import pytest
from PIL import Image, ImageOps

import lab

CASES = lab.TOP / "tests/data/cases"


class Encoder:
    def __init__(self, tmp):
        self.tmp = pathlib.Path(tmp)
        self.p = subprocess.Popen([lab.ENCODER, "--mmproj", lab.MMPROJ], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                  stderr=open(self.tmp / "encoder.log", "wb"), text=True)
        self.n_embd = int(self.p.stdout.readline().split()[1])

    def rows(self, path):
        out = self.tmp / "rows"
        self.p.stdin.write(f"ENC {path} {out}\n")
        self.p.stdin.flush()
        answer = self.p.stdout.readline().split()
        assert answer[0] == "OK", answer
        data = out.read_bytes()
        magic, n, nx, ny, n_embd = struct.unpack("<5i", data[:20])
        assert (magic, n, n_embd) == (0x31455653, nx * ny, self.n_embd) and [str(v) for v in (n, nx, ny)] == answer[1:4]
        return (nx, ny), struct.unpack(f"<{n * n_embd}f", data[20:])

    def stop(self):
        self.p.stdin.write("QUIT\n")
        self.p.stdin.close()
        assert self.p.wait(lab.LIMIT_S) == 0
        lab.check_log(self.tmp / "encoder.log")


@pytest.fixture
def encoder(tmp_path):
    e = Encoder(tmp_path)
    yield e
    e.stop()


def distance(a, b):
    """Relative root-mean-square difference."""
    return (sum((x - y) ** 2 for x, y in zip(a, b)) / sum(y * y for y in b)) ** 0.5


@pytest.mark.parametrize("twin", [f"exif{i}.jpg" for i in range(1, 9)])
def test_orientation(encoder, twin):
    grid, rows = encoder.rows(CASES / twin)
    plain_grid, plain = encoder.rows(CASES / "plain.jpg")
    assert grid == plain_grid
    # The twins were compressed after turning: their pixels differ by up to 4 of 255.
    assert distance(rows, plain) < 0.05


def test_lossless_formats_are_the_same_picture(encoder):
    assert encoder.rows(CASES / "lossless.webp") == encoder.rows(CASES / "plain.png")


@pytest.mark.parametrize("name", ["lossy.webp", "progressive.jpg"])
def test_lossy_formats_are_close(encoder, name):
    grid, rows = encoder.rows(CASES / name)
    plain_grid, plain = encoder.rows(CASES / "plain.png")
    assert grid == plain_grid
    assert distance(rows, plain) < 0.35  # 0.22 measured; the picture upside down or mirrored is further than 0.6


# But for those of which Pillow is no reference (tests/parity/make_images.py).
GOOD = [f for f in json.loads((CASES / "expected.json").read_text())
        if "error" not in f and not f["file"].startswith("offset") and f["file"] != "cmyk_plain.jpg"]
# Of two JPEG decoders' pixels, up to 12 of 255 apart where CMYK is involved. Different pictures are further than 0.5 apart.
LOSSY = 0.1


def over_white(im):
    """What every reader of ours is to show, as Pillow sees it."""
    im = ImageOps.exif_transpose(im)
    if im.mode.startswith("I"):
        return im.point(lambda v: v * (255 / 65535)).convert("L").convert("RGB")
    im = im.convert("RGBA")
    white = Image.new("RGBA", im.size, "white")
    white.alpha_composite(im)
    return white.convert("RGB")


@pytest.mark.parametrize("fact", GOOD, ids=lambda f: f["file"])
def test_every_picture_gives_the_rows_of_its_plain_twin(encoder, tmp_path, fact):
    """Formats, colour models, depths, alpha, orientations: beside an 8-bit RGB PNG that another decoder made of it."""
    with Image.open(CASES / fact["file"]) as im:
        im.seek(0)
        over_white(im).save(tmp_path / "twin.png")
    grid, rows = encoder.rows(CASES / fact["file"])
    twin_grid, twin = encoder.rows(tmp_path / "twin.png")
    assert grid == twin_grid
    assert distance(rows, twin) <= (LOSSY if fact["lossy"] or "16" in fact["file"] else 0)
