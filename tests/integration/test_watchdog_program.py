"""farsight-watchdog as a program: what servers may not do to it, its place, its settings, its end."""
import json
import os
import re
import socket
import struct
import subprocess

import pytest

import frames_client as fc
import lab
from watchdog_lab import WATCHDOG, alive, picture


# ---- what a server may not do ----


BAD = [
    ("type", struct.pack("<IBBHI", 0, 99, 0, 0, 0)),
    ("flags", struct.pack("<IBBHI", 0, fc.PING, 1, 0, 0)),
    ("length", struct.pack("<IBBHI", 1 << 30, fc.DATA, 0, 0, 1)),
    ("host's frame", struct.pack("<IBBHI", 0, fc.ROWS, 0, 0, 1)),
    ("second HELLO", struct.pack("<IBBHI", 2, fc.HELLO, 0, 0, 0) + b"{}"),
    ("ENC of no size", struct.pack("<IBBHI", 24, fc.ENC, 0, 0, 9) + bytes(24)),
    ("short ENC", struct.pack("<IBBHI", 3, fc.ENC, 0, 0, 9) + bytes(3)),
    ("ENC with id 0", struct.pack("<IBBHI", 24, fc.ENC, 0, 0, 0) + struct.pack("<6I", 10, 0, 0, 0, 0, 0)),
    ("too much DATA", struct.pack("<IBBHI", 24, fc.ENC, 0, 0, 9) + struct.pack("<6I", 2, 0, 0, 0, 0, 0) +
     struct.pack("<IBBHI", 3, fc.DATA, 0, 0, 9) + b"abc"),
    ("odd PING", struct.pack("<IBBHI", 3, fc.PING, 0, 0, 0) + b"abc"),
]


@pytest.mark.parametrize("what,data", BAD, ids=[b[0] for b in BAD])
def test_malformed_frames_drop_only_their_connection(watchdog, what, data):
    h = watchdog().start()
    good, bad = h.channel("good"), h.channel("bad")
    good.enc(1, picture("delay=200"))
    bad.raw(data)
    frames = bad.gone()
    assert frames[-1][0] == fc.ERR and frames[-1][1] == 0, what
    assert good.answer(1)[0] == "rows"
    good.close()


def test_hello_is_checked(watchdog):
    h = watchdog().start()
    for hello, text in ((b"{", "HELLO"), (b'{"version": 2, "lease": "a"}', "version 1"), (b'{"version": 1, "lease": "a b"}', "lease")):
        c = fc.connect(h.socket)
        c.send(fc.HELLO, 0, hello)
        err = c.gone()[-1]
        assert err[0] == fc.ERR and text in err[2][4:].decode()
    c = fc.connect(h.socket)
    c.send(fc.PING, 0, bytes(8))
    assert c.gone()[-1][0] == fc.ERR
    s = socket.socket(socket.AF_UNIX)
    s.connect(str(h.socket))
    s.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert b"expected" in s.recv(1000)
    s.close()
    assert h.status()["leases"] == [] and not h.events("start ")


def test_agent_of_another_release_is_told_why(watchdog):
    h = watchdog().start()
    c = fc.connect(h.socket, greeting="FARSIGHT 2 channel -\n")
    kind, id_, payload = c.gone()[-1]
    assert (kind, id_) == (fc.ERR, 0) and struct.unpack("<I", payload[:4])[0] == fc.ENOTSUP
    assert "version 2, this watchdog knows 1; install both programs from one release" in payload[4:].decode()


def test_queue_limit(watchdog):
    h = watchdog(max_queue=2).start()
    c = h.channel()
    c.enc(1, picture("delay=60000"))
    c.enc(2, picture())
    c.enc(3, picture())
    kind, code, text = c.answer(3)
    assert (kind, code) == ("err", fc.EUNAVAILABLE) and "2 pictures" in text
    c.send(fc.CANCEL, 1)
    assert c.answer(2)[0] == "rows"
    c.close()


def test_server_that_does_not_read_holds_no_memory(watchdog):
    h = watchdog().start()
    c = h.channel()
    before = int(next(x for x in open(f"/proc/{h.process.pid}/status") if x.startswith("VmRSS")).split()[1])
    for i in range(1, 9):
        c.enc(i, picture("rows=256x256"))  # 2 MiB of rows each
    fc.wait_for(lambda: h.status()["encodes"] >= 4, "the encodes")
    assert h.status()["encodes"] <= 5, "results pile up although nobody reads them"
    after = int(next(x for x in open(f"/proc/{h.process.pid}/status") if x.startswith("VmRSS")).split()[1])
    assert after - before < 6000, f"{after - before} KiB more for 16 MiB of rows"
    other = h.channel("other")
    other.enc(1, picture())
    assert other.answer(1)[0] == "rows"
    for i in range(1, 9):
        assert c.answer(i)[0] == "rows"
    other.close()
    c.close()


# ---- the program itself ----


def test_one_watchdog_a_socket(watchdog):
    h = watchdog().start()
    p = subprocess.run([WATCHDOG, "--socket", h.socket, "--config", h.config], capture_output=True, text=True, env=h.env)
    assert p.returncode == 1 and "already runs" in p.stderr
    assert h.status()["pid"] == h.process.pid


def test_stop_and_what_it_leaves(watchdog):
    h = watchdog().start()
    c = h.channel()
    h.status()
    p = subprocess.run([WATCHDOG, "--socket", h.socket, "stop"], capture_output=True, text=True, env=h.env)
    assert p.returncode == 0 and json.loads(p.stdout)["stopping"] is True
    assert h.process.wait(fc.LIMIT_S) == 0
    assert c.gone()[-1][0] == fc.BYE
    c.close()


def test_spool_of_a_dead_watchdog_is_removed(watchdog):
    h = watchdog().start()
    c = h.channel()
    c.enc(1, picture("delay=60000"))
    fc.wait_for(lambda: h.events("enc "), "the encode")
    spool = h.status()["spool"]
    encoder = h.encoder_pid()
    assert os.stat(spool).st_mode & 0o777 == 0o700
    assert all(os.stat(f"{spool}/{f}").st_mode & 0o777 == 0o600 for f in os.listdir(spool)) and os.listdir(spool)
    h.process.kill()
    h.process.wait()
    fc.wait_for(lambda: not alive(encoder), "the encoder to see the end of its input")
    h.start()
    assert not os.path.exists(spool)
    c.close()


def test_folder_open_to_others_is_refused(watchdog):
    h = watchdog()
    h.socket.parent.chmod(0o755)
    p = subprocess.run([WATCHDOG, "--socket", h.socket, "--config", h.config], capture_output=True, text=True, env=h.env)
    assert p.returncode == 1 and "chmod 700" in p.stderr
    h.socket.parent.chmod(0o700)


@pytest.mark.parametrize("text,error", [
    ('{"mmproj": "/m", "thread": 4}', 'unknown key "thread"; the nearest known one is "threads"'),
    ('{"mmproj": "/m", "threads": "4"}', '"threads": must be a whole number from 0 to 1024'),
    ('{"mmproj": "/m", "threads": 4000}', '"threads": must be a whole number'),
    ('{"mmproj": "/m", "gpu": 1}', '"gpu": must be true or false'),
    ('{"mmproj": "/m", "device": "gpu"}', '"device": must be "auto", "cpu", "cuda" or "cuda:N"'),
    ('{"mmproj": "/m", "device": "cuda:1x"}', '"device": must be'),
    ('{"mmproj": "/m", "device": 1}', '"device": must be'),
    ('{"mmproj": "/m", "device": "cpu", "gpu": true}', '"device" is "cpu", "gpu" and "gpu_device" say "cuda"'),
    ('{"mmproj": "/m", "device": "cuda:1", "gpu": true, "gpu_device": 2}', 'say "cuda:2"'),
    ('{"mmproj": "/m", "device": "cuda", "gpu": false}', 'say "cpu"'),
    ('{"mmproj": "/m", "gpu_device": 1}', 'write "device": "cuda:1"'),
    ('{"mmproj": 5}', '"mmproj": must be a path'),
    ('{"model": "/m"}', '"mmproj" is missing'),
    ('{"mmproj": "/m", "min_tokens": 9, "max_tokens": 8}', "above"),
    ('{"mmproj": "/m", "encoder_args": ["a", 1]}', '"encoder_args": must be a list of strings'),
    ('{"mmproj": "/m", "mmproj": "/n"}', "duplicate"),
    ('[]', "object"),
    ('{"mmproj": ', "line 1"),
])
def test_configuration_errors(watchdog, text, error):
    h = watchdog()
    h.config.write_text(text)
    p = subprocess.run([WATCHDOG, "--socket", h.socket, "--config", h.config], capture_output=True, text=True, env=h.env)
    assert p.returncode == 1 and error in p.stderr and str(h.config) in p.stderr, p.stderr


def test_settings_are_documented():
    """docs/VISION_HOST.md has the rows of the one table, in its words."""
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \|$", (lab.TOP / "docs/VISION_HOST.md").read_text(), re.M)
    lines = subprocess.run([WATCHDOG, "--help-config"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert [r[0] for r in rows] == [line.split()[0] for line in lines]
    for (_, default, meaning), line in zip(rows, lines):
        _, text = line.split(None, 1)
        bounds = re.search(r" \((?:(false)|(-?\d+); (-?\d+ to \d+))\)$", text)
        assert meaning == (text[:bounds.start()] if bounds else text)
        if bounds:
            assert default == (f"`{bounds[1]}`" if bounds[1] else f"`{bounds[2]}` ({bounds[3]})")


def test_idle_watchdog_ends(watchdog):
    h = watchdog(idle_exit_s=5).start()  # enough to be asked for a channel before
    c = h.channel()
    c.send(fc.BYE)
    c.gone()
    assert h.process.wait(fc.LIMIT_S) == 0
