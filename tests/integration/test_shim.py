"""farsight-remote, driven as a server with an encoder child of its own drives it: lines on pipes, a private folder, file names relative to
it, and that server's checks of the rows file. The far end is real: sshd, agent, watchdog and encoder."""
import array
import contextlib
import getpass
import json
import math
import os
import pathlib
import queue
import re
import signal
import socket
import struct
import subprocess
import sys
import threading

import pytest

import lab
from lab import TOP, user, wait_for

REMOTE = lab.BUILD / "server/shim/farsight-remote"
PICTURES = TOP / "tests/data/pictures"
CASES = TOP / "tests/data/cases"
EMBD = 192  # of the bundled model
REAL = ("--mmproj", str(lab.MMPROJ))
MAGIC = 0x31455653


def environment(host, **more):
    """That of a server which was set up for its own wrapper; nothing of the tester's home is read."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("STRATA_", "FARSIGHT_"))}
    env["XDG_CONFIG_HOME"] = str(host.tmp / "no-config")
    env["STRATA_VISION_SSH"] = f"{getpass.getuser()}@127.0.0.1"
    env["STRATA_VISION_SSH_OPTS"] = f"-p {host.port} -i '{host.tmp}/user_key' -o UserKnownHostsFile={host.tmp}/known_hosts -F /dev/null"
    env.update({k: str(v) for k, v in more.items()})
    return {k: v for k, v in env.items() if v != ""}


class Child:
    """The server's side of the pipes. Answers come through a thread, so that every wait has an end."""

    def __init__(self, folder, env, *args, program=REMOTE):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "log"
        self.process = subprocess.Popen([program, "--mmproj", "mmproj.gguf", "--model", "text.gguf", *args], cwd=folder, env=env,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=open(self.log, "ab"))
        self.lines = queue.Queue()
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(b"")

    def write(self, line):
        self.process.stdin.write(line)
        self.process.stdin.flush()

    def answer(self):
        line = self.lines.get(timeout=lab.LIMIT_S)
        assert line == b"" or line.endswith(b"\n")
        return line.decode().rstrip("\n")

    def ready(self):
        line = self.answer()
        assert re.fullmatch(r"READY [1-9][0-9]*", line), line
        return int(line.split()[1])

    def order(self, picture, name="0123456789abcdef"):
        """ENC as that server writes it; the picture lies in the private folder."""
        (self.folder / f"{name}.img").write_bytes(picture)
        self.write(f"ENC {name}.img {name}.sve\n".encode())
        return self.folder / f"{name}.sve"

    def encode(self, picture, name="0123456789abcdef"):
        return check(self.answer_of(picture, name), self.folder / f"{name}.sve")

    def answer_of(self, picture, name="0123456789abcdef"):
        self.order(picture, name)
        return self.answer()

    def wait(self):
        return self.process.wait(lab.LIMIT_S)

    def close(self):
        if self.process.poll() is None:
            with contextlib.suppress(OSError):
                self.write(b"QUIT\n")
            self.wait()
        lab.check_log(self.log)


def check(line, path):
    """What that server and its engine look at; the rows."""
    found = re.fullmatch(r"OK ([0-9]+) ([0-9]+) ([0-9]+) ([0-9]+(?:\.[0-9]+)?)", line)
    assert found, line
    n, nx, ny = map(int, found.groups()[:3])
    raw = path.read_bytes()
    magic, *head, width = struct.unpack("<5i", raw[:20])
    assert magic == MAGIC and head == [n, nx, ny] and width == EMBD
    assert nx >= 1 and ny >= 1 and nx * ny == n
    assert len(raw) == 20 + 4 * n * width
    rows = array.array("f", raw[20:])
    assert all(map(math.isfinite, rows)) and any(rows)
    assert path.stat().st_mode & 0o777 == 0o600
    return n, nx, ny, rows


@pytest.fixture
def start(tmp_path):
    children = []

    def make(host, *args, env=None, **more):
        children.append(Child(tmp_path / f"strata-vision-{len(children)}", env or environment(host, **more), *args))
        return children[-1]

    yield make
    for c in children:
        c.close()


@pytest.fixture
def fake_host(host):
    """A vision host whose encoder does what the bytes behind a picture say."""
    host.encoder_log = host.tmp / "encoder.log"
    host.configure(encoder=str(lab.FAKE_ENCODER), extended=True, encoder_args=["--embd", str(EMBD), "--rows", "3x2", "--log", str(host.encoder_log)])
    return host.start()


def fake(words=""):
    return (CASES / "plain.png").read_bytes() + (f"FAKE {words}\n".encode() if words else b"")


def leases(host):
    return (host.status() or {}).get("leases", [])


def is_gone(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except OSError:
        return True


def plain_encoder_rows(tmp_path, picture):
    child = Child(tmp_path / "plain", dict(os.environ), *REAL, "--model", str(lab.TEXT_MODEL), program=lab.ENCODER)
    assert child.ready() == EMBD
    got = child.encode(picture)
    child.close()
    return got


# ---- the protocol ----

def test_ready_pictures_and_quit(host, start, tmp_path):
    child = start(host.start(), *REAL, "--gpu", "--threads", "1")
    assert child.ready() == EMBD
    for name in ("two-shapes.png", "word.png"):
        picture = (PICTURES / name).read_bytes()
        assert child.encode(picture) == plain_encoder_rows(tmp_path, picture)
    child.write(b"QUIT\n")
    assert child.wait() == 0 and child.answer() == ""
    wait_for(lambda: not leases(host), "the end of the lease")


def test_line_splits_at_its_last_space(fake_host, start):
    child = start(fake_host)
    child.ready()
    picture = child.folder / "my  picture of a cat.img"
    picture.write_bytes(fake())
    child.write(f"ENC {picture} out.sve\n".encode())
    assert check(child.answer(), child.folder / "out.sve")[:3] == (6, 3, 2)
    child.write(b"ENC my  picture of a cat.img again.sve\r\n")
    check(child.answer(), child.folder / "again.sve")


def test_limits_of_the_command_line_reach_the_encoder(host, start):
    child = start(host.start(), "--max-tokens", "16", "--min-tokens", "4")
    child.ready()
    n, *_ = child.encode((PICTURES / "many-shapes.png").read_bytes())
    assert 4 <= n <= 16


def test_what_is_wrong_with_a_picture_is_its_own_error(host, start):
    child = start(host.start())
    child.ready()
    good = (PICTURES / "number.png").read_bytes()
    rows = child.encode(good)
    assert child.answer_of(b"no picture", "broken").startswith("ERR ")
    assert child.answer_of(b"", "empty").startswith("ERR ")
    child.write(b"ENC missing.img missing.sve\n")
    assert re.match("ERR .*missing.img", child.answer())
    child.write(b"HELLO\n")
    assert child.answer().startswith("ERR ")
    child.write(b"ENC " + b"x" * 9000 + b" y\n")
    assert child.answer().startswith("ERR ")
    (child.folder / "0123456789abcdef.img").write_bytes(good)
    child.write(b"ENC 0123456789abcdef.img no/such/folder/x.sve\n")
    assert re.match("ERR .*no/such/folder/x.sve", child.answer())
    assert child.encode(good) == rows
    assert sorted(p.name for p in child.folder.iterdir() if not p.name.endswith(".img")) == ["0123456789abcdef.sve", "log"]


def test_orders_are_answered_in_their_order(fake_host, start):
    child = start(fake_host)
    child.ready()
    for i in range(40):  # more than it keeps
        child.order(fake(f"rows={i % 5 + 1}x1 delay={10 if i < 3 else 0}"), f"k{i}")
    for i in range(40):
        assert check(child.answer(), child.folder / f"k{i}.sve")[:3] == (i % 5 + 1, i % 5 + 1, 1)


def test_rows_of_another_width_are_refused(fake_host, start):
    child = start(fake_host)
    child.ready()
    assert child.answer_of(fake("embd=64")).startswith("ERR ")
    child.encode(fake())


# ---- the host goes and comes ----

def test_host_lost_and_back(fake_host, start):
    child = start(fake_host)
    child.ready()
    child.encode(fake())
    fake_host.stop_sshd()
    line = child.answer_of(fake())
    assert line.startswith("ERR ") and "127.0.0.1" in line
    fake_host.start()
    child.encode(fake("rows=2x2"))


def test_host_lost_while_it_encodes(fake_host, start):
    child = start(fake_host)
    child.ready()
    child.order(fake("delay=1500 rows=4x1"))
    wait_for(lambda: lab.count_encodes(fake_host), "the encode")
    fake_host.stop_sshd()
    fake_host.start()
    assert check(child.answer(), child.folder / "0123456789abcdef.sve")[:3] == (4, 4, 1)


def test_encoder_that_dies_is_one_error(fake_host, start):
    child = start(fake_host)
    child.ready()
    assert child.answer_of(fake("die")).startswith("ERR ")
    child.encode(fake())


def test_a_picture_has_a_deadline(fake_host, start):
    child = start(fake_host, STRATA_VISION_TIMEOUT="4")
    child.ready()
    line = child.answer_of(fake("delay=60000"))
    assert line.startswith("ERR ") and "was not encoded within" in line  # whoever of the two notices first
    child.encode(fake())


def test_host_that_is_down_at_the_start(host, start):
    child = start(host)
    line = child.answer()
    assert line.startswith("ERR ") and "nothing listens" in line
    assert child.wait() == 1 and child.answer() == ""


def test_host_that_comes_up_during_the_start(host, start):
    child = start(host)
    wait_for(lambda: "is down" in child.log.read_text(), "the first attempt")
    host.start()
    assert child.ready() == EMBD


def test_the_start_has_a_deadline(host, start):
    host.configure(encoder=str(lab.FAKE_ENCODER), extended=True, encoder_args=["--mute"])
    child = start(host.start(), STRATA_VISION_START_TIMEOUT="2")
    line = child.answer()
    assert line.startswith("ERR ") and "not ready in time" in line
    assert child.wait() == 1


# ---- settings ----

def test_no_host_is_a_clear_error(host, start):
    child = start(host, env=environment(host, STRATA_VISION_SSH=""))
    line = child.answer()
    assert line.startswith("ERR ") and "STRATA_VISION_SSH" in line
    assert child.wait() == 2


@pytest.mark.parametrize("name, value, said", [
    ("STRATA_VISION_SSH_OPTS", "-p 99999", "port"),
    ("STRATA_VISION_SSH_OPTS", "-i 'open", "quote"),
    ("STRATA_VISION_LIVENESS_PORT", "70000", "STRATA_VISION_LIVENESS_PORT"),
    ("STRATA_VISION_PROBE_FAILS", "0.5", "STRATA_VISION_PROBE_FAILS"),
])
def test_wrong_settings_are_named(host, start, name, value, said):
    child = start(host, **{name: value})
    line = child.answer()
    assert line.startswith("ERR ") and said in line
    assert child.wait() == 2


def test_wrong_key_is_named(host, start):
    host.start()
    host.make_key("user_key")  # not the one that is authorised
    child = start(host)
    line = child.answer()
    assert line.startswith("ERR ") and "key" in line
    assert child.wait() == 1


def test_options_without_a_meaning_are_warned_of(fake_host, start):
    env = environment(fake_host)
    env["STRATA_VISION_SSH_OPTS"] += " -J jump -v -o ConnectTimeout=5"
    child = start(fake_host, env=env)
    child.ready()
    log = child.log.read_text()
    assert "-J has no meaning" in log and "-v has no meaning" in log and "ConnectTimeout has no meaning" in log


def test_user_and_port_by_o_options(fake_host, start):
    env = environment(fake_host, STRATA_VISION_SSH="127.0.0.1")
    env["STRATA_VISION_SSH_OPTS"] = (f'-oUser={getpass.getuser()} -o "Port {fake_host.port}" -o IdentityFile={fake_host.tmp}/user_key '
                                     f'-oUserKnownHostsFile="{fake_host.tmp}/known_hosts" -F/dev/null')
    assert start(fake_host, env=env).ready() == EMBD


def test_agent_below_a_root(host, start):
    """Without a forced command, what is asked for is run: bin/farsight-agent below the root."""
    root = host.tmp / "its root"
    (root / "bin").mkdir(parents=True)
    agent = root / "bin/farsight-agent"
    agent.write_text(f'#!/bin/sh\nexec {lab.AGENT} --socket {host.socket} --watchdog {lab.WATCHDOG} --config {host.config}\n')
    agent.chmod(0o755)
    (host.tmp / "authorized_keys").write_text((host.tmp / "user_key.pub").read_text())
    assert start(host.start(), STRATA_VISION_ROOT=root).ready() == EMBD


def test_another_model_is_refused_by_name(host, start):
    child = start(host.start(), "--mmproj", str(lab.TEXT_MODEL))
    line = child.answer()
    assert line.startswith("ERR ") and "another mmproj" in line
    assert child.wait() == 1


def test_hosts_of_the_config(fake_host, start, tmp_path):
    config = tmp_path / "server.json"
    config.write_text(json.dumps({"vision": {"remote": True, "hosts": [fake_host.connection()]}}))
    child = start(fake_host, "--config", str(config), env=environment(fake_host, STRATA_VISION_SSH="", STRATA_VISION_SSH_OPTS=""))
    child.ready()
    child.encode(fake())


def test_host_is_told_how_to_probe(fake_host, start):
    port = lab.free_port()
    child = start(fake_host, STRATA_VISION_LIVENESS_PORT=port, STRATA_VISION_PROBE_FAILS="7")
    child.ready()
    assert [lease["port"] for lease in leases(fake_host)] == [port]


def test_a_start_wakes_a_host_that_sleeps(host, start, tmp_path):
    """A name that leads nowhere is a host that does not answer; the packet goes to a socket of the test."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ether:
        ether.bind(("127.0.0.1", 0))
        ether.settimeout(lab.LIMIT_S)
        sleeper = {**host.connection(), "host": f"{getpass.getuser()}@192.0.2.1", "wol": "02:00:00:00:00:07",
                   "wol_broadcast": f"127.0.0.1:{ether.getsockname()[1]}"}
        config = tmp_path / "server.json"
        config.write_text(json.dumps({"vision": {"remote": True, "hosts": [sleeper], "connect_timeout_s": 1}}))
        child = start(host, "--config", str(config), env=environment(host, STRATA_VISION_SSH="", STRATA_VISION_START_TIMEOUT="9"))
        assert ether.recv(200) == b"\xff" * 6 + bytes.fromhex("020000000007") * 16
        assert child.answer().startswith("ERR ")
        assert child.wait() == 1


# ---- the end ----

def test_end_of_stdin_ends_it_and_its_lease(fake_host, start):
    child = start(fake_host)
    child.ready()
    assert len(leases(fake_host)) == 1
    child.process.stdin.close()
    assert child.wait() == 0
    wait_for(lambda: not leases(fake_host), "the end of the lease")


@pytest.mark.parametrize("how", ["eof", "term", "hangup"])
def test_end_in_the_middle_of_a_picture(fake_host, start, how):
    child = start(fake_host)
    child.ready()
    path = child.order(fake("delay=60000"))
    wait_for(lambda: lab.count_encodes(fake_host), "the encode")
    if how == "eof":
        child.process.stdin.close()
    else:
        child.process.send_signal(signal.SIGTERM if how == "term" else signal.SIGHUP)
    assert child.wait() == 0
    assert child.answer() == "" and not path.exists()
    wait_for(lambda: not leases(fake_host), "the end of the lease")


def test_end_of_stdin_before_ready(host, start):
    child = start(host)
    child.process.stdin.close()
    assert child.wait() == 0


PARENT = """
import subprocess, sys, time
child = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE)
print(child.pid, child.stdout.readline().decode(), flush=True)
time.sleep(600)
"""


def test_death_of_the_parent(fake_host, tmp_path):
    """Its stdin stays open: the test holds the other end of that pipe too."""
    with open(tmp_path / "log", "wb") as log:
        parent = subprocess.Popen([sys.executable, "-c", PARENT, REMOTE, "--mmproj", "mmproj.gguf"], env=environment(fake_host),
                                  stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
    words = parent.stdout.readline().split()
    assert words[1:] == [b"READY", str(EMBD).encode()]
    assert len(leases(fake_host)) == 1
    parent.kill()
    parent.wait(lab.LIMIT_S)
    wait_for(lambda: is_gone(int(words[0])), "the end of farsight-remote")
    wait_for(lambda: not leases(fake_host), "the end of the lease")
    parent.stdin.close()
    parent.stdout.close()
    lab.check_log(tmp_path / "log")


def test_end_of_the_thread_that_started_it_means_nothing(fake_host, start):
    """The kernel tells the death of the starting thread as if it were the parent's."""
    made = []
    thread = threading.Thread(target=lambda: made.append(start(fake_host)))
    thread.start()
    thread.join()
    child, = made
    child.ready()
    child.encode(fake())


def test_killed_and_started_again(fake_host, start):
    child = start(fake_host)
    child.ready()
    child.process.kill()
    child.wait()  # nothing was said to the host: its watchdog ends the lease in its own time
    assert len(leases(fake_host)) == 1
    child = start(fake_host)
    child.ready()
    child.encode(fake())


# ---- before a server ----

def test_farsight_server_with_it_as_its_encoder(host, servers, monkeypatch):
    questions = json.loads((PICTURES / "questions.json").read_text())
    for name, value in environment(host.start()).items():
        monkeypatch.setenv(name, value)
    server = servers(vision={"mmproj": str(lab.MMPROJ), "exe": str(REMOTE)})
    wait_for(lambda: server.eyes()["available"], "the encoder")
    q = questions[0]
    assert server.ask(q["question"], PICTURES / q["picture"]).strip().rstrip(".").lower() == q["answer"].strip().rstrip(".").lower()
    status, reply = server.chat(user("What is this?", "data:;base64,AAAA"))
    assert status == 400, reply
