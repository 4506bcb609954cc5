"""Encoders that can write their rows into a FIFO: the rows are the same, go out while they are written, and may still end in an ERR."""
import os
import shutil

import pytest

import frames_client as fc
from watchdog_lab import WATCHDOG, expected, picture

ENOUGH = "rows=256x256"  # 2 MiB of floats: more than pipes and sockets hold


@pytest.fixture
def host(watchdog):
    return watchdog(args=["--pipe"]).start()


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("rows,n", [("rows=1x1", 1), ("rows=64x64", 4096), (ENOUGH, 65536)])
def test_rows_are_the_same(host, rows, n, half):
    c = host.channel()
    for id_ in (1, 2):
        pic = picture(f"{rows} number={id_}")
        c.enc(id_, pic, dtype=fc.F16 if half else fc.F32)
        kind, head, data = c.answer(id_)
        assert kind == "rows" and head[0] == n and head[3:5] == (8, fc.F16 if half else fc.F32)
        assert data == expected(pic, n, 8, half)
    assert host.events("out ") == ["out fifo"] * 2
    assert os.listdir(host.status()["spool"]) == [] and host.status()["encodes"] == 2
    c.close()


def test_rows_go_out_while_they_are_written(host):
    c = host.channel()
    c.enc(1, picture(ENOUGH + " mid=hang"))
    c.expect(fc.ROWS, 1)
    for _ in range(8):
        c.expect(fc.DATA, 1)
    assert host.status()["encoder"]["state"] == "busy"
    c.send(fc.CANCEL, 1)
    kind, code, _ = c.answer(1)
    assert (kind, code) == ("err", fc.ECANCELLED)
    pic = picture("the next one")
    c.enc(2, pic)  # waits for another encoder: this one does not hear a CANCEL
    assert c.answer(2)[2] == expected(pic, 4, 8)
    c.close()


@pytest.mark.parametrize("words,code,text,starts", [
    ("mid=err", fc.EINVAL, "broken off", 1), ("mid=die", fc.EUNAVAILABLE, "signal 9", 2), ("short", fc.EUNAVAILABLE, "cut off", 1),
    ("more", fc.EUNAVAILABLE, "more rows than it announced", 1), ("norows", fc.EUNAVAILABLE, "cut off", 1),
    ("embd=9", fc.EUNAVAILABLE, "9 values instead of 8", 1)])
@pytest.mark.parametrize("rows", ["rows=2x2", ENOUGH])
def test_rows_that_can_not_be_had(host, rows, words, code, text, starts):
    """The last of them are never sent, so that nobody takes them for whole."""
    c = host.channel()
    c.enc(1, picture(f"{rows} {words}"))
    kind, got, why = c.answer(1)
    assert (kind, got) == ("err", code) and text in why, why
    pic = picture(ENOUGH)
    c.enc(2, pic)
    assert c.answer(2)[2] == expected(pic, 65536, 8)
    assert len(host.events("start ")) == starts and os.listdir(host.status()["spool"]) == []
    c.close()


def test_server_that_does_not_read_holds_no_encoder(host):
    a, b = host.channel("lease-a"), host.channel("lease-b")
    pic = picture(ENOUGH + " a")
    a.enc(1, pic)
    fc.wait_for(lambda: host.events("ok"), "the end of the encode")
    for id_ in (1, 2, 3):
        other = picture(f"rows=64x64 b{id_}")
        b.enc(id_, other)
        assert b.answer(id_)[2] == expected(other, 4096, 8)
    assert a.answer(1)[2] == expected(pic, 65536, 8)
    a.close()
    b.close()


@pytest.mark.parametrize("ends", ["channel", "picture"])
def test_given_up_while_rows_are_written(host, ends):
    a, b = host.channel("lease-a"), host.channel("lease-b")
    for id_ in range(1, 6):
        a.enc(id_, picture(f"{ENOUGH} {id_}"))
    a.expect(fc.ROWS, 1)
    if ends == "channel":
        a.close()
    else:
        for id_ in range(1, 6):
            a.send(fc.CANCEL, id_)
        for id_ in range(2, 6):
            assert a.answer(id_)[0] == "err"
    pic = picture(ENOUGH + " b")
    b.enc(1, pic)
    assert b.answer(1)[2] == expected(pic, 65536, 8)
    fc.wait_for(lambda: host.status()["pictures"] == 0, "the end of all pictures")
    assert len(host.events("start ")) == 1 and os.listdir(host.status()["spool"]) == []
    if ends == "picture":
        a.close()
    b.close()


def test_another_watchdog_knows_it_too(host, tmp_path):
    c = host.channel()
    program = shutil.copy(WATCHDOG, tmp_path / "farsight-watchdog")
    p = host.ask("replace", program=program)
    assert p.returncode == 0 and "took over from" in p.stdout, p.stdout + p.stderr
    pic = picture(ENOUGH)
    c.enc(1, pic)
    assert c.answer(1)[2] == expected(pic, 65536, 8)
    assert host.events("out ") == ["out fifo"] and len(host.events("start ")) == 1
    c.close()


def test_a_file_where_no_fifo_is_wanted(watchdog):
    h = watchdog().start()
    c = h.channel()
    c.enc(1, picture())
    assert c.answer(1)[0] == "rows" and h.events("out ") == ["out file"]
    c.close()
