"""Encoders that fail: what the watchdog tells of them, and that it ends them and has another one."""
import json
import os
import signal
import struct

import pytest

import frames_client as fc
from watchdog_lab import FAKE, alive, expected, picture


@pytest.mark.parametrize("words,cause", [("die", "signal 9"), ("nonsense", "nonsense"), ("longline", "line of more"),
                                         ("twice", "")])
def test_encoder_misbehaves(watchdog, words, cause):
    h = watchdog().start()
    c = h.channel()
    c.enc(1, picture(words))
    kind, code, text = c.answer(1)
    if cause:
        assert (kind, code) == ("err", fc.EUNAVAILABLE) and cause in text
    c.await_ready()
    c.enc(2, picture())
    assert c.answer(2)[0] == "rows" and len(h.events("start ")) == 2
    c.close()


def test_encoder_killed_while_others_wait(watchdog):
    h = watchdog().start()
    c = h.channel()
    c.enc(1, picture("delay=60000"))
    fc.wait_for(lambda: h.events("enc "), "the encode")
    c.enc(2, picture("waits", 600))
    fc.wait_for(lambda: h.status()["pictures"] == 2, "both pictures")
    os.kill(h.encoder_pid(), signal.SIGKILL)
    kind, code, text = c.answer(1)
    assert (kind, code) == ("err", fc.EUNAVAILABLE) and "signal 9" in text
    assert c.answer(2)[0] == "rows"
    c.close()


def test_silent_encoder_is_ended_with_its_group(watchdog):
    h = watchdog(encode_timeout_s=3, args=["--child", "--stubborn"]).start()
    c = h.channel()
    pid = h.encoder_pid()
    child = h.events("child ")[0].split()[1]
    c.enc(1, picture("hang"))
    kind, code, text = c.answer(1)
    assert (kind, code) == ("err", fc.ETIMEOUT) and "said nothing for 3 s" in text
    fc.wait_for(lambda: not alive(pid) and not alive(child), "the end of the whole group")
    c.await_ready()
    c.enc(2, picture())
    assert c.answer(2)[0] == "rows"
    c.close()


@pytest.mark.parametrize("words,cause", [("norows", "can not be read"), ("short", "rows")])
def test_bad_rows_file(watchdog, words, cause):
    h = watchdog().start()
    c = h.channel()
    c.enc(1, picture(words))
    kind, code, text = c.answer(1)
    assert (kind, code) == ("err", fc.EUNAVAILABLE) and cause in text, text
    c.enc(2, picture())
    assert c.answer(2)[0] == "rows"
    c.close()


def test_nan_is_passed_on_for_the_server_to_refuse(watchdog):
    h = watchdog().start()
    c = h.channel()
    c.enc(1, picture("nan"))
    kind, _, data = c.answer(1)
    assert kind == "rows" and data[-4:] == struct.pack("<f", float("nan"))
    c.close()


@pytest.mark.parametrize("args,patience_s,cause", [(["--exit", "7"], 60, "status 7: the fake model is broken"),
                                                   (["--start-err", "no card"], 60, "no card"),
                                                   (["--mute"], 1, "not ready after 1 s")])
def test_encoder_that_does_not_start(watchdog, args, patience_s, cause):
    h = watchdog(args=args, ready_timeout_s=patience_s).start()
    c = h.channel(ready=False)
    while True:
        hello = json.loads(c.expect(fc.HELLO)[2])
        if hello["state"] == "failed":
            break
    assert cause in hello["cause"]
    c.enc(1, picture())
    kind, code, text = c.answer(1)
    assert (kind, code) == ("err", fc.EUNAVAILABLE) and cause in text
    fc.wait_for(lambda: len(h.events("start ")) >= 2, "another attempt")
    c.close()


def test_encoder_missing_then_there(watchdog, tmp_path):
    h = watchdog(encoder=str(tmp_path / "encoder"), extended=True).start()
    c = h.channel(ready=False)
    hello = json.loads(c.expect(fc.HELLO)[2])
    assert hello["state"] == "failed" and "can not execute" in hello["cause"]
    os.symlink(FAKE, tmp_path / "encoder")
    c.await_ready()
    c.close()


def test_failed_start_is_repeated(watchdog, tmp_path):
    h = watchdog(args=["--fail-once", str(tmp_path / "failed")]).start()
    c = h.channel()
    assert len(h.events("start ")) == 2
    c.close()


def test_stopped_encoder_is_ended_and_replaced(watchdog):
    """SIGSTOP: neither QUIT nor TERM reach it."""
    h = watchdog(encode_timeout_s=3).start()
    c = h.channel()
    pid = h.encoder_pid()
    os.kill(pid, signal.SIGSTOP)
    c.enc(1, picture())
    kind, code, text = c.answer(1)
    assert (kind, code) == ("err", fc.ETIMEOUT) and "said nothing" in text
    c.await_ready()
    c.enc(2, picture())
    assert c.answer(2)[0] == "rows" and not alive(pid)
    c.close()


def test_killed_from_outside_is_told_as_such(watchdog):
    h = watchdog().start()
    c = h.channel()
    os.kill(h.encoder_pid(), signal.SIGKILL)
    fc.wait_for(lambda: h.status()["encoder"]["failures"] == 1, "the loss to be noticed")
    assert "signal 9 (killed from outside; the kernel does so when memory runs out)" in h.status()["encoder"]["cause"]
    c.await_ready()
    c.close()


def test_another_program_as_the_encoder(watchdog, tmp_path):
    """Any program of the plain protocol, by its own name: no word on its command line that the protocol does not have."""
    program = tmp_path / "strata-vision"
    os.symlink(FAKE, program)
    h = watchdog(encoder=str(program), extended="auto", model="/models/text.gguf", gpu=True, threads=4, max_tokens=256, min_tokens=8)
    h.start()
    c = h.channel()
    pic = picture("rows=7x3")
    c.enc(1, pic, tokens=(4, 64))
    assert c.answer(1)[2] == expected(pic, 21, 8)
    words = [line.partition(" ")[2] for line in h.events("arg ")]
    assert words == ["--mmproj", "/nowhere/mmproj.gguf", "--model", "/models/text.gguf", "--gpu", "--threads", "4", "--max-tokens", "256",
                     "--min-tokens", "8", "--log", str(h.enc_log)]
    c.send(fc.BYE)
    c.gone()
    assert h.events("end quit")
