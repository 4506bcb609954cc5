"""farsight-watchdog's main job: pictures of servers through one encoder, in turn, and what becomes of those that are given up."""
import json
import os
import struct

import pytest

import frames_client as fc
import lab
from watchdog_lab import expected, picture


def test_hello_and_encode(watchdog):
    h = watchdog().start()
    c = h.channel(ready=False)
    first = json.loads(c.expect(fc.HELLO)[2])
    assert first["version"] == 1 and first["state"] == "starting"
    facts = c.await_ready()
    assert facts["n_embd"] == 8 and facts["device"] == "fake"
    assert facts["fingerprint"] == "00112233445566778899aabbccddeeff"
    assert (facts["min_tokens"], facts["max_tokens"], facts["max_picture_bytes"]) == (4, 1024, 64 << 20)
    pic = picture("rows=3x2", 200000)
    c.enc(1, pic)
    kind, head, data = c.answer(1)
    assert kind == "rows" and head[:5] == (6, 3, 2, 8, fc.F32) and head[5] == 1500
    assert data == expected(pic, 6, 8)
    assert os.listdir(h.status()["spool"]) == []
    c.close()


@pytest.mark.parametrize("extended", [True, False])
def test_half_floats(watchdog, extended):
    h = watchdog(extended=extended).start()
    c = h.channel()
    pic = picture("rows=64x64")  # 4096 x 8 halves are 64 KiB: more than one chunk of floats
    c.enc(1, pic, dtype=fc.F16)
    kind, head, data = c.answer(1)
    assert kind == "rows" and head[4] == fc.F16
    assert data == expected(pic, 4096, 8, half=True)
    assert h.events("enc ")[0].endswith("f16" if extended else "f32")
    c.close()


def test_large_rows_and_ping_between_chunks(watchdog):
    h = watchdog().start()
    c = h.channel()
    pic = picture("rows=64x16 embd=2560 delay=0")
    h2 = picture("rows=1x1")
    c.enc(1, h2)
    assert c.answer(1)[0] == "rows"
    # the width is the encoder's own: another one is refused, and the encoder lives on
    c.enc(2, pic)
    kind, code, text = c.answer(2)
    assert (kind, code) == ("err", fc.EUNAVAILABLE) and "2560" in text
    pic = picture("rows=256x256")  # 2 MiB of floats
    c.enc(3, pic)
    rows = c.expect(fc.ROWS, 3)
    c.send(fc.PING, 0, b"12345678")
    # not read until all buffers are full: the PONG must come before the end of the rows
    types = []
    data = b""
    while len(data) < 256 * 256 * 8 * 4:
        f = c.read()
        types.append(f[0])
        data += f[2] if f[0] == fc.DATA else b""
    assert rows[2][:4] == struct.pack("<i", 65536) and data == expected(pic, 65536, 8)
    assert fc.PONG in types[:-1]
    assert len(h.events("start ")) == 1
    c.close()


def test_two_requests_interleave(watchdog):
    h = watchdog().start()
    c = h.channel()
    a, b = picture("rows=128x128"), picture("rows=128x128", 999)
    c.enc(1, a)
    c.enc(2, b)
    fc.wait_for(lambda: h.status()["encodes"] == 2, "both encodes")
    order, data = [], {1: b"", 2: b""}
    while min(map(len, data.values())) < 128 * 128 * 32:
        f = c.read()
        if f[0] == fc.DATA:
            order.append(f[1])
            data[f[1]] += f[2]
    assert data[1] == expected(a, 16384, 8) and data[2] == expected(b, 16384, 8)
    last_of_1 = len(order) - 1 - order[::-1].index(1)
    assert 2 in order[:last_of_1], order
    c.close()


def test_two_servers_take_turns(watchdog):
    h = watchdog().start()
    a, b = h.channel("lease-a"), h.channel("lease-b")
    a.enc(100, picture("delay=60000"))
    fc.wait_for(lambda: h.events("enc "), "the first encode")
    for i in range(3):
        a.enc(i + 1, picture(f"a{i}", 500 + i))
    b.enc(1, picture("b", 700))
    fc.wait_for(lambda: h.status()["pictures"] == 5, "all of them in the queue")
    a.send(fc.CANCEL, 100)
    for c, ids in ((a, (1, 2, 3)), (b, (1,))):
        for i in ids:
            assert c.answer(i)[0] == "rows"
    assert a.answer(100)[1] == fc.ECANCELLED
    sizes = [line.split()[1] for line in h.events("enc ")]
    assert sizes == ["1000", "700", "500", "501", "502"], "b does not wait behind all of a"
    assert len(h.events("start ")) == 1
    # the end of one server is no end for the other
    a.send(fc.BYE)
    a.gone()
    b.enc(2, picture())
    assert b.answer(2)[0] == "rows"
    b.close()


def test_plain_encoder_gets_the_plain_protocol(watchdog):
    h = watchdog(extended=False, mmproj=str(lab.TOP / "tests/parity/quants.gguf")).start()
    c = h.channel(ready=False)
    assert len(c.await_ready()["fingerprint"]) == 32  # not told by the encoder: read from the model's file
    pic = picture("rows=5x1")
    c.enc(1, pic, tokens=(4, 64))
    assert c.answer(1)[2] == expected(pic, 5, 8)
    c.close()


def test_encoder_refuses_the_picture(watchdog):
    h = watchdog().start()
    c = h.channel()
    c.enc(1, picture("err=no-picture"))
    assert c.answer(1) == ("err", fc.EINVAL, "no-picture")
    c.enc(2, picture())
    assert c.answer(2)[0] == "rows" and len(h.events("start ")) == 1
    c.close()


# ---- cancel ----


def test_cancel_queued_running_and_receiving(watchdog):
    h = watchdog().start()
    c = h.channel()
    c.enc(1, picture("delay=60000"))
    fc.wait_for(lambda: h.events("enc "), "the first encode")
    c.enc(2, picture("second", 400))
    c.enc(3, picture("third", 300), upload=False)
    c.send(fc.CANCEL, 2)
    assert c.answer(2) == ("err", fc.ECANCELLED, "cancelled")
    c.send(fc.CANCEL, 3)
    assert c.answer(3)[1] == fc.ECANCELLED
    c.send(fc.DATA, 3, b"late")  # may cross the answer: no error
    c.send(fc.CANCEL, 1)
    assert c.answer(1)[1] == fc.ECANCELLED
    c.enc(4, picture("fourth", 600))
    assert c.answer(4)[0] == "rows"
    assert [line.split()[1] for line in h.events("enc ")] == ["1000", "600"]
    assert h.events("cancel") and len(h.events("start ")) == 1
    c.close()


def test_cancel_of_a_plain_encoder_drops_the_result(watchdog):
    h = watchdog(extended=False).start()
    c = h.channel()
    c.enc(1, picture("delay=2000"))
    fc.wait_for(lambda: h.events("enc "), "the first encode")
    c.send(fc.CANCEL, 1)
    assert c.answer(1)[1] == fc.ECANCELLED
    pic = picture("next", 600)
    c.enc(2, pic)
    assert c.answer(2)[2] == expected(pic, 4, 8)
    assert not h.events("cancel") and len(h.events("start ")) == 1
    c.close()


@pytest.mark.parametrize("config", [{"extended": False, "cancel_kill_s": 0}, {"extended": True}])
def test_cancel_that_is_not_obeyed_ends_the_encoder(watchdog, config):
    h = watchdog(**config).start()
    c = h.channel()
    c.enc(1, picture("delay=60000 deaf"))
    fc.wait_for(lambda: h.events("enc "), "the first encode")
    c.send(fc.CANCEL, 1)
    assert c.answer(1)[1] == fc.ECANCELLED
    c.enc(2, picture())
    assert c.answer(2)[0] == "rows" and len(h.events("start ")) == 2
    c.close()


def test_deadline_of_a_request(watchdog):
    h = watchdog().start()
    c = h.channel()
    c.enc(1, picture("delay=60000"), deadline_ms=2000)
    kind, code, _ = c.answer(1)
    assert (kind, code) == ("err", fc.ETIMEOUT)
    fc.wait_for(lambda: h.events("cancel"), "the cancel")
    c.close()


def test_lost_channel_cancels_its_work(watchdog):
    h = watchdog().start()
    c = h.channel()
    c.enc(1, picture("delay=60000"))
    fc.wait_for(lambda: h.events("enc "), "the encode")
    pid = h.encoder_pid()
    c.close()
    fc.wait_for(lambda: h.events("cancel"), "the cancel")
    fc.wait_for(lambda: h.status()["pictures"] == 0, "no picture left")
    d = h.channel()
    d.enc(1, picture())
    assert d.answer(1)[0] == "rows" and h.encoder_pid() == pid
    d.close()
