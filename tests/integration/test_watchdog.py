"""farsight-watchdog and farsight-agent, the real programs, before an encoder that does as it is told (tests/tools/fake_encoder.c).
Each test ends with the check that nothing is left: no process of the encoder, no spool folder, no sanitizer report."""
import json
import os
import pathlib
import signal
import socket
import struct
import subprocess

import pytest

import frames_client as fc
import lab

BUILD = pathlib.Path(os.environ.get("FARSIGHT_BUILD", pathlib.Path(__file__).parents[2] / "build-plain"))
WATCHDOG = BUILD / "remote/watchdog/farsight-watchdog"
AGENT = BUILD / "remote/agent/farsight-agent"
FAKE = BUILD / "tests/tools/fake_encoder"


def picture(words="", size=1000):
    """Bytes whose sum the fake encoder puts into every row; words tell it what to do."""
    head = ("FAKE " + words + "\n").encode()
    return head + bytes((i * 7) % 256 for i in range(max(0, size - len(head))))


def expected(pic, n, embd, half=False):
    frac = sum(pic) % 256 / 256
    return struct.pack(f"<{n * embd}{'e' if half else 'f'}", *[k % 8 + frac for k in range(n * embd)])


def alive(pid):
    return os.path.exists(f"/proc/{pid}")


class Host:
    def __init__(self, tmp, **config):
        self.tmp, self.log, self.enc_log = tmp, tmp / "watchdog.log", tmp / "encoder.log"
        run = tmp / "run"
        run.mkdir(mode=0o700)
        self.socket = run / "watchdog.sock"
        self.env = {**os.environ, "XDG_RUNTIME_DIR": str(tmp), "TMPDIR": str(tmp)}
        self.process = None
        self.pids = set()
        self.spools = set()
        self.configure(**config)

    def configure(self, args=(), **config):
        self.config = self.tmp / "vision-host.json"
        base = {"mmproj": "/nowhere/mmproj.gguf", "encoder": str(FAKE), "extended": True, "stop_grace_ms": 300,
                "encoder_args": ["--log", str(self.enc_log), *args], "log_level": "debug"}
        self.config.write_text(json.dumps({**base, **config}))

    def start(self):
        self.process = subprocess.Popen([WATCHDOG, "--socket", self.socket, "--config", self.config], env=self.env,
                                        stderr=open(self.log, "ab"))
        fc.wait_for(self.socket.exists, "the watchdog's socket")
        fc.wait_for(self.try_status, "an answer to status")
        return self

    def try_status(self):
        p = subprocess.run([WATCHDOG, "--socket", self.socket, "status"], capture_output=True, text=True, env=self.env)
        return json.loads(p.stdout) if p.returncode == 0 and p.stdout else None

    def status(self):
        s = self.try_status()
        assert s, "no status"
        self.spools.add(s["spool"])
        return s

    def encoder_pid(self):
        return self.status()["encoder"]["pid"]

    def channel(self, lease="lease-a", ready=True, **more):
        c = fc.connect(self.socket, more.pop("peer", "-"))
        c.hello(lease, **more)
        if ready:
            c.await_ready()
        return c

    def events(self, word=""):
        lines = self.enc_log.read_text().splitlines() if self.enc_log.exists() else []
        return [line for line in lines if line.startswith(word)]

    def wait_state(self, state):
        return fc.wait_for(lambda: self.status()["encoder"]["state"] == state, f"encoder {state}")

    def finish(self):
        if self.process and self.process.poll() is None:
            self.status()
            self.process.terminate()
            assert self.process.wait(fc.LIMIT_S) == 0, self.log.read_text()
        for line in self.events("start ") + self.events("child "):
            pid = line.split()[1]
            fc.wait_for(lambda: not alive(pid), f"the end of {line}")
        for folder in self.spools:
            assert not os.path.exists(folder), f"left behind: {folder}"
        assert not self.socket.exists()
        for log in [self.log, *self.tmp.glob("**/watchdog.log")]:
            text = log.read_text(errors="replace") if log.exists() else ""
            assert "Sanitizer" not in text and "runtime error" not in text and "assert" not in text, text


@pytest.fixture
def host(tmp_path):
    made = []

    def make(**config):
        made.append(Host(tmp_path, **config))
        return made[-1]

    yield make
    for h in made:
        h.finish()


# ---- the main job ----


def test_hello_and_encode(host):
    h = host().start()
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
def test_half_floats(host, extended):
    h = host(extended=extended).start()
    c = h.channel()
    pic = picture("rows=64x64")  # 4096 x 8 halves are 64 KiB: more than one chunk of floats
    c.enc(1, pic, dtype=fc.F16)
    kind, head, data = c.answer(1)
    assert kind == "rows" and head[4] == fc.F16
    assert data == expected(pic, 4096, 8, half=True)
    assert h.events("enc ")[0].endswith("f16" if extended else "f32")
    c.close()


def test_large_rows_and_ping_between_chunks(host):
    h = host().start()
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


def test_two_requests_interleave(host):
    h = host().start()
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


def test_two_servers_take_turns(host):
    h = host().start()
    a, b = h.channel("lease-a"), h.channel("lease-b")
    a.enc(100, picture("delay=300"))
    fc.wait_for(lambda: h.events("enc "), "the first encode")
    for i in range(3):
        a.enc(i + 1, picture(f"a{i}", 500 + i))
    b.enc(1, picture("b", 700))
    for c, ids in ((a, (100, 1, 2, 3)), (b, (1,))):
        for i in ids:
            assert c.answer(i)[0] == "rows"
    sizes = [line.split()[1] for line in h.events("enc ")]
    assert sizes == ["1000", "700", "500", "501", "502"], "b does not wait behind all of a"
    assert len(h.events("start ")) == 1
    # the end of one server is no end for the other
    a.send(fc.BYE)
    a.gone()
    b.enc(2, picture())
    assert b.answer(2)[0] == "rows"
    b.close()


def test_plain_encoder_gets_the_plain_protocol(host):
    h = host(extended=False, mmproj=str(lab.TOP / "tests/parity/quants.gguf")).start()
    c = h.channel(ready=False)
    assert len(c.await_ready()["fingerprint"]) == 32  # not told by the encoder: read from the model's file
    pic = picture("rows=5x1")
    c.enc(1, pic, tokens=(4, 64))
    assert c.answer(1)[2] == expected(pic, 5, 8)
    c.close()


def test_encoder_refuses_the_picture(host):
    h = host().start()
    c = h.channel()
    c.enc(1, picture("err=no-picture"))
    assert c.answer(1) == ("err", fc.EINVAL, "no-picture")
    c.enc(2, picture())
    assert c.answer(2)[0] == "rows" and len(h.events("start ")) == 1
    c.close()


# ---- cancel ----


def test_cancel_queued_running_and_receiving(host):
    h = host().start()
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


def test_cancel_of_a_plain_encoder_drops_the_result(host):
    h = host(extended=False).start()
    c = h.channel()
    c.enc(1, picture("delay=300"))
    fc.wait_for(lambda: h.events("enc "), "the first encode")
    c.send(fc.CANCEL, 1)
    assert c.answer(1)[1] == fc.ECANCELLED
    pic = picture("next", 600)
    c.enc(2, pic)
    assert c.answer(2)[2] == expected(pic, 4, 8)
    assert not h.events("cancel") and len(h.events("start ")) == 1
    c.close()


@pytest.mark.parametrize("config", [{"extended": False, "cancel_kill_s": 0}, {"extended": True}])
def test_cancel_that_is_not_obeyed_ends_the_encoder(host, config):
    h = host(**config).start()
    c = h.channel()
    c.enc(1, picture("delay=60000 deaf"))
    fc.wait_for(lambda: h.events("enc "), "the first encode")
    c.send(fc.CANCEL, 1)
    assert c.answer(1)[1] == fc.ECANCELLED
    c.enc(2, picture())
    assert c.answer(2)[0] == "rows" and len(h.events("start ")) == 2
    c.close()


def test_deadline_of_a_request(host):
    h = host().start()
    c = h.channel()
    c.enc(1, picture("delay=60000"), deadline_ms=200)
    kind, code, _ = c.answer(1)
    assert (kind, code) == ("err", fc.ETIMEOUT)
    fc.wait_for(lambda: h.events("cancel"), "the cancel")
    c.close()


def test_lost_channel_cancels_its_work(host):
    h = host().start()
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


# ---- an encoder that fails ----


@pytest.mark.parametrize("words,cause", [("die", "signal 9"), ("nonsense", "nonsense"), ("longline", "line of more"),
                                         ("twice", "")])
def test_encoder_misbehaves(host, words, cause):
    h = host().start()
    c = h.channel()
    c.enc(1, picture(words))
    kind, code, text = c.answer(1)
    if cause:
        assert (kind, code) == ("err", fc.EUNAVAILABLE) and cause in text
    c.await_ready()
    c.enc(2, picture())
    assert c.answer(2)[0] == "rows" and len(h.events("start ")) == 2
    c.close()


def test_encoder_killed_while_others_wait(host):
    h = host().start()
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


def test_silent_encoder_is_ended_with_its_group(host):
    h = host(encode_timeout_s=1, args=["--child", "--stubborn"]).start()
    c = h.channel()
    pid = h.encoder_pid()
    child = h.events("child ")[0].split()[1]
    c.enc(1, picture("hang"))
    kind, code, text = c.answer(1)
    assert (kind, code) == ("err", fc.ETIMEOUT) and "said nothing for 1 s" in text
    fc.wait_for(lambda: not alive(pid) and not alive(child), "the end of the whole group")
    c.await_ready()
    c.enc(2, picture())
    assert c.answer(2)[0] == "rows"
    c.close()


@pytest.mark.parametrize("words,cause", [("norows", "can not be read"), ("short", "rows")])
def test_bad_rows_file(host, words, cause):
    h = host().start()
    c = h.channel()
    c.enc(1, picture(words))
    kind, code, text = c.answer(1)
    assert (kind, code) == ("err", fc.EUNAVAILABLE) and cause in text, text
    c.enc(2, picture())
    assert c.answer(2)[0] == "rows"
    c.close()


def test_nan_is_passed_on_for_the_server_to_refuse(host):
    h = host().start()
    c = h.channel()
    c.enc(1, picture("nan"))
    kind, _, data = c.answer(1)
    assert kind == "rows" and data[-4:] == struct.pack("<f", float("nan"))
    c.close()


@pytest.mark.parametrize("args,cause", [(["--exit", "7"], "status 7: the fake model is broken"),
                                        (["--start-err", "no card"], "no card"),
                                        (["--mute"], "not ready after 1 s")])
def test_encoder_that_does_not_start(host, args, cause):
    h = host(args=args, ready_timeout_s=1).start()
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


def test_encoder_missing_then_there(host, tmp_path):
    h = host(encoder=str(tmp_path / "encoder"), extended=True).start()
    c = h.channel(ready=False)
    hello = json.loads(c.expect(fc.HELLO)[2])
    assert hello["state"] == "failed" and "can not execute" in hello["cause"]
    os.symlink(FAKE, tmp_path / "encoder")
    c.await_ready()
    c.close()


def test_failed_start_is_repeated(host, tmp_path):
    h = host(args=["--fail-once", str(tmp_path / "failed")]).start()
    c = h.channel()
    assert len(h.events("start ")) == 2
    c.close()


# ---- leases ----


def test_channel_opened_anew_takes_the_encoder_from_the_older_one(host):
    """The older connection stands and its picture takes a minute; another channel of the same lease is not touched."""
    h = host().start()
    bystander = h.channel(channel=2)
    old = h.channel(channel=1)
    old.enc(1, picture("delay=60000"))
    fc.wait_for(lambda: h.events("enc "), "the encoder's work")
    bystander.enc(1, picture("rows=4x4"))
    new = h.channel(channel=1)
    assert not [f for f in old.gone() if f[0] in (fc.ROWS, fc.DATA)]
    new.enc(1, picture("rows=2x2"))
    assert bystander.answer(1)[0] == "rows" and new.answer(1)[0] == "rows"
    assert [(x["lease"], x["channels"]) for x in h.status()["leases"]] == [("lease-a", 2)]
    h.channel(channel=0).close()
    unnamed = [h.channel("lease-b") for _ in range(2)]
    assert [x["channels"] for x in h.status()["leases"] if x["lease"] == "lease-b"] == [2]
    for c in (*unnamed, new, bystander):
        c.close()


def listener():
    s = socket.create_server(("127.0.0.1", 0))
    return s, s.getsockname()[1]


def test_reconnect_finds_the_same_encoder(host):
    h = host().start()
    c = h.channel("lease-a")
    pid = h.encoder_pid()
    for _ in range(3):
        c.close()
        fc.wait_for(lambda: h.status()["leases"][0]["channels"] == 0, "the loss to be noticed")
        c = h.channel("lease-a")
        assert h.encoder_pid() == pid and len(h.status()["leases"]) == 1
    c.close()


def test_bye_ends_lease_and_encoder(host):
    h = host().start()
    c = h.channel()
    pid = h.encoder_pid()
    c.send(fc.BYE)
    c.gone()
    h.wait_state("absent")
    assert not alive(pid) and h.status()["leases"] == []
    # and a new server starts a new one
    c = h.channel("lease-b")
    assert h.encoder_pid() != pid
    c.close()


def test_probe_failures_end_the_lease_of_a_lost_channel(host):
    h = host(lease_grace_s=3600).start()
    s, port = listener()
    c = h.channel(liveness_port=port, probe_interval_ms=50, probe_fails=3, peer="127.0.0.1")
    pid = h.encoder_pid()
    fc.wait_for(lambda: h.status()["leases"][0]["port_answered"], "a probe that is answered")
    c.close()
    fc.wait_for(lambda: h.status()["leases"][0]["channels"] == 0, "the loss to be noticed")
    for _ in range(5):  # the port answers: the lease stays, however many probes pass
        s.accept()[0].close()
    assert h.encoder_pid() == pid
    s.close()
    h.wait_state("absent")
    assert not alive(pid)
    assert "failed probe 3 of 3" in h.log.read_text() and "failed probe 4" not in h.log.read_text()


def test_probe_failures_do_not_count_while_the_channel_lives(host):
    h = host(lease_grace_s=3600).start()
    s, port = listener()
    c = h.channel(liveness_port=port, probe_interval_ms=50, probe_fails=2, peer="127.0.0.1")
    fc.wait_for(lambda: h.status()["leases"][0]["port_answered"], "a probe that is answered")
    s.close()
    for i in range(20):
        c.send(fc.PING, 0, b"%08d" % i)
        assert c.expect(fc.PONG)[2] == b"%08d" % i
    assert h.status()["leases"][0]["probe_fails"] == 0
    c.enc(1, picture("delay=300"))
    assert c.answer(1)[0] == "rows" and len(h.events("start ")) == 1
    c.send(fc.BYE)
    c.close()


def test_port_that_never_answered_is_told_once_and_does_not_count(host):
    h = host(lease_grace_s=3600).start()
    s, port = listener()
    s.close()
    c = h.channel(liveness_port=port, probe_interval_ms=50, probe_fails=2, peer="127.0.0.1")
    c.close()
    fc.wait_for(lambda: h.status()["leases"][0]["channels"] == 0, "the loss to be noticed")
    s = socket.create_server(("127.0.0.1", port))  # counts from its first answer on
    fc.wait_for(lambda: h.status()["leases"][0]["port_answered"], "a probe that is answered")
    assert h.log.read_text().count("does not answer (") <= 1
    s.close()
    h.wait_state("absent")


def test_grace_without_a_port(host):
    h = host(lease_grace_s=1).start()
    c = h.channel()
    pid = h.encoder_pid()
    c.close()
    fc.wait_for(lambda: h.status()["leases"] == [], "the end of the lease")
    h.wait_state("absent")
    assert not alive(pid)


def test_silent_channel_is_pinged_and_then_given_up(host):
    h = host(silence_s=1, lease_grace_s=0).start()
    c = h.channel()
    c.expect(fc.PING)  # not answered
    frames = c.gone()
    assert frames[-1][0] == fc.ERR and b"lease has ended" in frames[-1][2]
    h.wait_state("absent")


def test_keep_warm(host):
    h = host(keep_warm=True).start()
    c = h.channel()
    pid = h.encoder_pid()
    c.send(fc.BYE)
    c.gone()
    fc.wait_for(lambda: h.status()["leases"] == [], "the end of the lease")
    c = h.channel("lease-b")
    assert h.encoder_pid() == pid
    c.close()


def test_idle_encoder_sleeps_and_wakes(host):
    h = host(encoder_idle_s=1).start()
    c = h.channel()
    h.wait_state("absent")
    c.enc(1, picture())
    assert c.answer(1)[0] == "rows" and len(h.events("start ")) == 2
    c.close()


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
def test_malformed_frames_drop_only_their_connection(host, what, data):
    h = host().start()
    good, bad = h.channel("good"), h.channel("bad")
    good.enc(1, picture("delay=200"))
    bad.raw(data)
    frames = bad.gone()
    assert frames[-1][0] == fc.ERR and frames[-1][1] == 0, what
    assert good.answer(1)[0] == "rows"
    good.close()


def test_hello_is_checked(host):
    h = host().start()
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


def test_queue_limit(host):
    h = host(max_queue=2).start()
    c = h.channel()
    c.enc(1, picture("delay=60000"))
    c.enc(2, picture())
    c.enc(3, picture())
    kind, code, text = c.answer(3)
    assert (kind, code) == ("err", fc.ELIMIT) and "2 pictures" in text
    c.send(fc.CANCEL, 1)
    assert c.answer(2)[0] == "rows"
    c.close()


def test_server_that_does_not_read_holds_no_memory(host):
    h = host().start()
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


def test_one_watchdog_a_socket(host):
    h = host().start()
    p = subprocess.run([WATCHDOG, "--socket", h.socket, "--config", h.config], capture_output=True, text=True, env=h.env)
    assert p.returncode == 1 and "already runs" in p.stderr
    assert h.status()["pid"] == h.process.pid


def test_stop_and_what_it_leaves(host):
    h = host().start()
    c = h.channel()
    h.status()
    p = subprocess.run([WATCHDOG, "--socket", h.socket, "stop"], capture_output=True, text=True, env=h.env)
    assert p.returncode == 0 and json.loads(p.stdout)["stopping"] is True
    assert h.process.wait(fc.LIMIT_S) == 0
    assert c.gone()[-1][0] == fc.BYE
    c.close()


def test_spool_of_a_dead_watchdog_is_removed(host):
    h = host().start()
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


def test_folder_open_to_others_is_refused(host):
    h = host()
    h.socket.parent.chmod(0o755)
    p = subprocess.run([WATCHDOG, "--socket", h.socket, "--config", h.config], capture_output=True, text=True, env=h.env)
    assert p.returncode == 1 and "chmod 700" in p.stderr
    h.socket.parent.chmod(0o700)


@pytest.mark.parametrize("text,error", [
    ('{"mmproj": "/m", "thread": 4}', 'unknown key "thread"; the nearest known one is "threads"'),
    ('{"mmproj": "/m", "threads": "4"}', '"threads": must be a whole number from 0 to 1024'),
    ('{"mmproj": "/m", "threads": 4000}', '"threads": must be a whole number'),
    ('{"mmproj": "/m", "gpu": 1}', '"gpu": must be true or false'),
    ('{"mmproj": 5}', '"mmproj": must be a path'),
    ('{"model": "/m"}', '"mmproj" is missing'),
    ('{"mmproj": "/m", "min_tokens": 9, "max_tokens": 8}', "above"),
    ('{"mmproj": "/m", "encoder_args": ["a", 1]}', '"encoder_args": must be a list of strings'),
    ('{"mmproj": "/m", "mmproj": "/n"}', "duplicate"),
    ('[]', "object"),
    ('{"mmproj": ', "line 1"),
])
def test_configuration_errors(host, text, error):
    h = host()
    h.config.write_text(text)
    p = subprocess.run([WATCHDOG, "--socket", h.socket, "--config", h.config], capture_output=True, text=True, env=h.env)
    assert p.returncode == 1 and error in p.stderr and str(h.config) in p.stderr, p.stderr


def test_idle_watchdog_ends(host):
    h = host(idle_exit_s=1).start()
    c = h.channel()
    c.send(fc.BYE)
    c.gone()
    assert h.process.wait(fc.LIMIT_S) == 0


# ---- the agent ----


class AgentHost(Host):
    """No watchdog runs until an agent needs one."""

    def agent(self, *args, lease="lease-a", ready=True, env=None):
        c = fc.through_agent([AGENT, "--socket", self.socket, "--config", self.config, *args],
                             {**self.env, "SSH_CONNECTION": "127.0.0.1 5 127.0.0.1 22", **(env or {})})
        c.hello(lease)
        if ready:
            c.await_ready()
        return c

    def finish(self):
        s = self.try_status()
        if s:
            self.spools.add(s["spool"])
            subprocess.run([WATCHDOG, "--socket", self.socket, "stop"], check=True, env=self.env, capture_output=True)
            fc.wait_for(lambda: not alive(s["pid"]), "the end of the watchdog")
        super().finish()


@pytest.fixture
def agent_host(tmp_path):
    h = AgentHost(tmp_path)
    yield h
    h.finish()


def test_agent_starts_the_watchdog_and_hands_over(agent_host):
    h = agent_host
    c = h.agent()
    s = h.status()
    assert s["leases"][0]["peer"] == "127.0.0.1"
    assert os.getsid(s["pid"]) != os.getsid(0) and open(f"/proc/{s['pid']}/stat").read().split()[3] == "1"
    pic = picture("rows=256x256", 300000)
    c.enc(1, pic)
    assert c.answer(1)[2] == expected(pic, 65536, 8)
    pid = s["encoder"]["pid"]
    c.close()
    assert c.owner.returncode == 0
    c = h.agent()  # the watchdog outlived its agent, and the encoder with it
    assert h.encoder_pid() == pid and h.status()["pid"] == s["pid"]
    c.close()


def test_many_agents_at_once_start_one_watchdog(agent_host):
    h = agent_host
    cs = [h.agent(lease=f"lease-{i}", ready=False) for i in range(8)]
    for c in cs:
        c.await_ready()
    assert h.status()["connections"] >= 8 and len(h.events("start ")) == 1
    for c in cs:
        c.close()


def test_agent_as_forced_command_ignores_what_was_asked_for(agent_host, tmp_path):
    h = agent_host
    trap = tmp_path / "trap"
    c = h.agent(env={"SSH_ORIGINAL_COMMAND": f"touch {trap}; farsight-agent --socket /nowhere/x"})
    c.enc(1, picture())
    assert c.answer(1)[0] == "rows" and not trap.exists()
    env = open(f"/proc/{h.status()['pid']}/environ").read()
    assert "SSH_" not in env
    c.close()


def test_agent_delivers_bye_before_it_ends(agent_host):
    h = agent_host
    c = h.agent()
    c.send(fc.BYE)
    c.close()
    fc.wait_for(lambda: h.status()["leases"] == [], "the end of the lease")


def test_agent_reports_why_no_watchdog_runs(agent_host, tmp_path):
    h = agent_host
    config = h.config.read_text()
    for prepare, text in ((lambda: h.config.write_text('{"mmproj": "/m", "gpus": true}'), 'unknown key "gpus"'),
                          (lambda: h.config.unlink(), "not set up")):
        prepare()
        c = h.agent(ready=False)
        err = c.gone()[-1]
        assert err[:2] == (fc.ERR, 0) and text in err[2][4:].decode()
        c.close()
        assert c.owner.returncode == 1 and text in c.owner.stderr.read().decode()
    c = h.agent("--watchdog", str(tmp_path / "none"), ready=False)
    assert b"can not execute" in c.gone()[-1][2]
    c.close()
    h.config.write_text(config)
    h.agent().close()  # the next attempt needs nobody's help


def test_agent_ends_when_the_watchdog_does(agent_host):
    h = agent_host
    c = h.agent()
    h.status()
    subprocess.run([WATCHDOG, "--socket", h.socket, "stop"], check=True, env=h.env, capture_output=True)
    assert c.gone()[-1][0] == fc.BYE
    c.close()
    assert c.owner.returncode == 3


def test_agent_that_is_killed_is_missed_although_the_channel_stands(agent_host):
    h = agent_host
    c = h.agent()
    c.owner.kill()
    assert c.gone() == []
    fc.wait_for(lambda: h.status()["leases"][0]["channels"] == 0, "the loss to be noticed")
    c.close()


def test_agent_ends_with_its_session_when_the_watchdog_hangs(agent_host):
    h = agent_host
    c = h.agent()
    pid = h.status()["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        c.close()
        assert c.owner.returncode == 0
    finally:
        os.kill(pid, signal.SIGCONT)
    fc.wait_for(lambda: h.status()["leases"][0]["channels"] == 0, "the loss to be noticed")


def test_descriptors_that_are_no_channel_are_closed(host):
    h = host().start()
    h.channel().close()
    for n, purpose in ((1, "channel"), (3, "channel"), (2, "status")):
        ours, theirs = zip(*[socket.socketpair() for _ in range(n)])
        with socket.socket(socket.AF_UNIX) as s:
            s.settimeout(fc.LIMIT_S)
            s.connect(str(h.socket))
            socket.send_fds(s, [f"FARSIGHT 1 {purpose} -\n".encode()], [x.fileno() for x in theirs])
            for x in theirs:
                x.close()
            for x in ours:
                x.settimeout(fc.LIMIT_S)
                assert x.recv(1) == b""
                x.close()
            if purpose == "channel":
                c = fc.Channel(s.fileno(), s.fileno())
                s.setblocking(True)
                c.hello("lease-b")
                c.await_ready()
            else:
                assert json.loads(s.makefile().readline())["connections"] >= 1


def test_forced_command_of_a_real_sshd(tmp_path):
    """A key that may do nothing but run the agent; the session is killed, and the next one finds the same encoder."""
    log = tmp_path / "encoder.log"
    h = lab.VisionHost(tmp_path / "host", encoder=str(FAKE), extended=True, encoder_args=["--log", str(log)]).start()
    trap = tmp_path / "trap"
    argv = ["ssh", "-T", "-F", "/dev/null", "-p", str(h.port), "-i", h.tmp / "user_key", "-o", "IdentitiesOnly=yes", "-o", "BatchMode=yes",
            "-o", f"UserKnownHostsFile={h.tmp}/known_hosts", "127.0.0.1", f"touch {trap}"]
    try:
        pids = set()
        for i in range(2):
            c = fc.through_agent(argv, dict(os.environ))
            c.hello("lease-a")
            c.await_ready()
            s = h.status()
            assert [(x["peer"], x["channels"]) for x in s["leases"]] == [("127.0.0.1", 1)]
            pids.add(s["encoder"]["pid"])
            pic = picture("rows=128x128", 200000 + i)
            c.enc(1, pic)
            assert c.answer(1)[2] == expected(pic, 16384, 8)
            c.owner.kill()
            c.close()
            fc.wait_for(lambda: h.status()["leases"][0]["channels"] == 0, "the loss to be noticed")
        assert len(pids) == 1 and not trap.exists()
    finally:
        h.stop()
    fc.wait_for(lambda: not any(alive(p) for p in pids), "the end of the encoder")
    text = "".join(f.read_text(errors="replace") for f in tmp_path.glob("**/watchdog.log"))
    assert text and "Sanitizer" not in text and "runtime error" not in text, text
