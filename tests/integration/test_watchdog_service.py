"""farsight-watchdog as a service: what it tells its manager, settings read again, its place, and that it listens on no network."""
import contextlib
import os
import pathlib
import queue
import re
import shutil
import signal
import socket
import subprocess
import threading

import pytest

import frames_client as fc
import lab
from watchdog_lab import AGENT, WATCHDOG, alive, picture


class Manager:
    """The socket of a service manager, and what came to it. A thread takes it at once: such a socket may hold no more than ten messages, and the
    next ones are lost."""

    def __init__(self, name):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(name)
        self.name = name.replace("\0", "@")
        self.came, self.seen = queue.Queue(), []
        self.thread = threading.Thread(target=self.take, daemon=True)
        self.thread.start()

    def take(self):
        while message := self.socket.recv(4096):
            self.came.put(message.decode())

    def close(self):
        self.socket.shutdown(socket.SHUT_RDWR)
        self.thread.join(fc.LIMIT_S)
        self.socket.close()

    def until(self, word):
        """Reads on until a message begins with this word."""
        while True:
            self.seen.append(self.came.get(timeout=fc.LIMIT_S))
            if self.seen[-1].startswith(word):
                return self.seen[-1]


@pytest.fixture(params=["path", "abstract"])
def manager(request, tmp_path):
    m = Manager(str(tmp_path / "notify") if request.param == "path" else f"\0farsight-test-{os.getpid()}")
    yield m
    m.close()


def test_service_manager_is_told(watchdog, manager):
    h = watchdog().start(NOTIFY_SOCKET=manager.name, WATCHDOG_USEC="400000")
    manager.until("READY=1")
    assert manager.until("STATUS=") == "STATUS=encoder absent, 0 servers"
    c = h.channel()
    manager.until("STATUS=encoder ready, 1 server")
    for _ in range(3):
        manager.until("WATCHDOG=1")
    assert b"NOTIFY" not in pathlib.Path(f"/proc/{h.encoder_pid()}/environ").read_bytes(), "an encoder could speak for us"
    h.process.send_signal(signal.SIGHUP)
    assert re.fullmatch(r"RELOADING=1\nMONOTONIC_USEC=\d+", manager.until("RELOADING"))
    manager.until("READY=1")
    h.process.terminate()
    manager.until("STOPPING=1")
    assert h.process.wait(fc.LIMIT_S) == 0
    c.close()


def test_signs_of_life_only_where_they_are_meant_for_us(watchdog, tmp_path):
    m = Manager(str(tmp_path / "notify"))
    h = watchdog().start(NOTIFY_SOCKET=m.name, WATCHDOG_USEC="1000", WATCHDOG_PID="1")
    for state in ("absent", "ready"):
        m.until(f"STATUS=encoder {state}")
        c = h.channel()
    assert "WATCHDOG=1" not in m.seen
    c.close()
    m.close()


def test_unit(tmp_path):
    text = (lab.BUILD / "remote/watchdog/farsight-watchdog.service").read_text()
    assert "@" not in text and re.search(r"^ExecStart=/\S+/farsight-watchdog --service$", text, re.M)
    for line in ("Type=notify", "WatchdogSec=", "OOMPolicy=continue", "ExecReload=/bin/kill -HUP $MAINPID", "WantedBy=default.target"):
        assert f"\n{line}" in text
    if not shutil.which("systemd-analyze"):
        pytest.skip("no systemd-analyze on this machine")
    unit = tmp_path / "farsight-watchdog.service"
    unit.write_text(re.sub(r"ExecStart=\S+", f"ExecStart={WATCHDOG}", text))
    p = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True)
    assert p.returncode == 0 and "farsight" not in p.stderr, p.stderr


# ---- settings read again ----


def reload(h, **config):
    before = h.log.read_text().count("settings")
    if config:
        h.configure(**config)
    h.process.send_signal(signal.SIGHUP)
    fc.wait_for(lambda: h.log.read_text().count("settings") > before, "the settings to be read")


def test_reload_as_a_command(watchdog):
    h = watchdog()
    p = h.ask("reload")
    assert p.returncode == 0 and "no watchdog runs" in p.stdout
    h.start()
    c = h.channel()
    pid = h.encoder_pid()
    h.configure(max_queue=1)
    p = h.ask("reload")
    assert p.returncode == 0 and f"has read {h.config} again" in p.stdout, p
    c.enc(1, picture("delay=2000"))
    c.enc(2, picture())
    assert c.answer(2)[1] == fc.EUNAVAILABLE, "the new limit holds"
    assert c.answer(1)[0] == "rows" and h.encoder_pid() == pid
    h.config.write_text('{"mmproj": 5}')
    p = h.ask("reload")
    assert p.returncode == 1 and "stay as they were" in p.stderr and "mmproj" in p.stderr, p
    c.enc(3, picture())
    assert c.answer(3)[0] == "rows" and h.encoder_pid() == pid
    c.close()


def test_same_settings_keep_the_encoder(watchdog):
    h = watchdog().start()
    c = h.channel()
    pid = h.encoder_pid()
    reload(h)
    reload(h, max_queue=1, encode_timeout_s=7)
    c.enc(1, picture("delay=2000"))
    c.enc(2, picture())
    assert c.answer(2)[1] == fc.EUNAVAILABLE, "the new limit holds"
    assert c.answer(1)[0] == "rows" and h.encoder_pid() == pid
    c.close()


def test_new_arguments_wait_for_the_picture_under_way(watchdog):
    h = watchdog().start()
    c = h.channel()
    c.enc(1, picture("delay=500"))
    fc.wait_for(lambda: h.events("enc "), "the encode")
    old = h.encoder_pid()
    reload(h, threads=3)
    c.enc(2, picture("", 600))
    assert c.answer(1)[0] == "rows"
    c.await_ready()
    assert c.answer(2)[0] == "rows" and h.encoder_pid() != old and not alive(old)
    assert "arg 3" in h.events("arg ")
    assert len(h.events("start ")) == 2 and h.status()["encoder"]["failures"] == 0
    c.close()


def test_file_that_changed_is_taken_up(watchdog, tmp_path):
    model = tmp_path / "mmproj.gguf"
    model.write_text("one")
    h = watchdog(mmproj=str(model)).start()
    c = h.channel()
    old = h.encoder_pid()
    (tmp_path / "new").write_text("two")
    (tmp_path / "new").rename(model)
    reload(h)
    c.await_ready()
    assert h.encoder_pid() != old
    c.close()


def test_settings_read_while_a_failed_encoder_is_being_ended(watchdog):
    h = watchdog(encode_timeout_s=3, stop_grace_ms=2000, args=["--stubborn"]).start()
    c = h.channel()
    old = h.encoder_pid()
    c.enc(1, picture("hang"))
    assert c.answer(1)[1] == fc.ETIMEOUT
    reload(h, encode_timeout_s=3, stop_grace_ms=2000, args=[])
    assert alive(old)  # it ignores TERM, and is killed after the grace
    c.await_ready()
    assert not alive(old)
    c.enc(2, picture())
    assert c.answer(2)[0] == "rows"
    c.close()


def test_other_program_in_place_of_one_that_fails(watchdog):
    h = watchdog(args=["--exit", "7"]).start()
    c = h.channel(ready=False)
    fc.wait_for(lambda: len(h.events("start ")) >= 2, "failures")
    reload(h, args=[])
    c.await_ready()
    c.enc(1, picture())
    assert c.answer(1)[0] == "rows"
    c.close()


def test_wrong_settings_change_nothing(watchdog):
    h = watchdog().start()
    c = h.channel()
    pid = h.encoder_pid()
    h.config.write_text('{"mmproj": "/m", "gpus": true}')
    reload(h)
    assert 'unknown key "gpus"' in h.log.read_text()
    c.enc(1, picture())
    assert c.answer(1)[0] == "rows" and h.encoder_pid() == pid
    c.close()


def test_gpu_that_is_not_to_be_used_is_not_seen(watchdog):
    h = watchdog(gpu=False).start(CUDA_VISIBLE_DEVICES="5")
    c = h.channel()

    def cards():
        env = pathlib.Path(f"/proc/{h.encoder_pid()}/environ").read_bytes().split(b"\0")
        return [v for v in env if v.startswith(b"CUDA_VISIBLE_DEVICES")]

    assert cards() == [b"CUDA_VISIBLE_DEVICES=-1"]
    for config, value in (({"gpu": True}, b"5"), ({"gpu": True, "gpu_device": 3}, b"3"), ({"device": "cpu"}, b"-1"), ({"device": "cuda:4"}, b"4"),
                          ({"device": "cuda"}, b"5"), ({"device": "auto"}, b"-1"), ({"device": "cuda:2", "gpu": True}, b"2")):  # "auto" is a word of farsight-encoder's
        reload(h, **config)
        c.await_ready()
        assert cards() == [b"CUDA_VISIBLE_DEVICES=" + value]
    c.close()


# ---- its place ----


def test_of_many_starts_at_once_one_stays(watchdog):
    h = watchdog()
    started = [h.run() for _ in range(6)]
    fc.wait_for(h.try_status, "an answer to status")
    fc.wait_for(lambda: sum(p.poll() is None for p in started) == 1, "the others to give up")
    h.process = next(p for p in started if p.poll() is None)
    assert {p.returncode for p in started if p is not h.process} == {1}
    assert h.log.read_text().count("already runs") == 5 and h.status()["pid"] == h.process.pid


def test_service_waits_for_a_watchdog_that_serves(watchdog, tmp_path):
    h = watchdog().start()
    first = h.process
    c = h.channel()
    pid = h.encoder_pid()
    m = Manager(str(tmp_path / "notify"))
    service = h.run("--service", NOTIFY_SOCKET=m.name)
    m.until("READY=1")
    m.until("STATUS=waiting")
    c.enc(1, picture())
    assert c.answer(1)[0] == "rows" and h.encoder_pid() == pid and h.status()["retiring"]
    c.send(fc.BYE)
    c.gone()
    assert first.wait(fc.LIMIT_S) == 0
    h.process = service
    fc.wait_for(lambda: (h.try_status() or {}).get("pid") == service.pid, "the service to take the place")
    assert h.status()["service"]
    c = h.channel("lease-b")
    c.enc(1, picture())
    assert c.answer(1)[0] == "rows"
    c.close()
    m.close()


def test_service_that_waits_can_be_ended(watchdog, tmp_path):
    h = watchdog(keep_warm=True).start()
    c = h.channel()
    m = Manager(str(tmp_path / "notify"))
    service = h.run("--service", NOTIFY_SOCKET=m.name)
    m.until("STATUS=waiting")
    service.terminate()
    assert service.wait(fc.LIMIT_S) == 0 and h.process.poll() is None
    c.close()
    m.close()


def test_service_stays_although_it_serves_nobody(watchdog):
    h = watchdog(idle_exit_s=1).start("--service")
    c = h.channel()
    c.send(fc.BYE)
    c.gone()
    with pytest.raises(subprocess.TimeoutExpired):
        h.process.wait(2.5)
    assert h.status()["service"]


@contextlib.contextmanager
def stopped(process):
    """It looks after its place now and then: not in the middle of what is done to that."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def test_folder_that_was_swept_away_is_made_anew(watchdog):
    h = watchdog().start()
    c = h.channel()
    pid = h.encoder_pid()
    with stopped(h.process):
        shutil.rmtree(h.socket.parent)
    fc.wait_for(h.socket.exists, "the socket")
    fc.wait_for(h.try_status, "an answer to status")
    assert h.encoder_pid() == pid
    c.enc(1, picture())
    assert c.answer(1)[0] == "rows"
    assert h.run().wait(fc.LIMIT_S) == 1, "the place is taken"
    c.close()


def test_watchdog_that_lost_its_place_ends_with_its_last_channel(watchdog):
    h = watchdog(lease_grace_s=3600).start()
    first = h.process
    c = h.channel("lease-a")
    h.channel("lease-b").close()
    with stopped(first):
        shutil.rmtree(h.socket.parent)
        h.socket.parent.mkdir(mode=0o700)
        h.start()
    c.enc(1, picture())
    assert c.answer(1)[0] == "rows", "who is served goes on being served"
    fc.wait_for(lambda: "another watchdog has taken our place" in h.log.read_text(), "the loss to be noticed")
    c.close()
    assert first.wait(fc.LIMIT_S) == 0 and h.socket.exists()
    c = h.channel("lease-a")
    c.enc(1, picture())
    assert c.answer(1)[0] == "rows"
    c.close()


def test_status_for_people(watchdog):
    h = watchdog().start()
    c = h.channel(peer="127.0.0.1", liveness_port=lab.free_port())
    c.enc(1, picture())
    c.answer(1)
    text = h.ask("--text", "status").stdout
    assert text.startswith("farsight-watchdog ") and f"process {h.process.pid}" in text
    for words in ("encoder: ready", "on fake", "1 encoded, 0 failed", "servers: 1", "127.0.0.1: 1 channel", "has not answered"):
        assert words in text, text
    assert h.ask("--json", "status").stdout == h.ask("status").stdout
    c.close()
    h.process.terminate()
    h.process.wait(fc.LIMIT_S)
    p = h.ask("--text", "status")
    assert p.returncode == 1 and "no watchdog answers" in p.stderr


def listening(pids):
    """Sockets of these processes that wait for connections or datagrams from a network."""
    inodes = set()
    for pid in pids:
        for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(fd))
    found = []
    for name in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6"):
        with contextlib.suppress(OSError):
            for line in pathlib.Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                words = line.split()
                if f"socket:[{words[9]}]" in inodes and (words[3] == "0A" or "tcp" not in name):
                    found.append(line)
    return found


def test_nothing_listens_on_the_network(agent_host):
    own = socket.create_server(("127.0.0.1", 0))
    assert listening([os.getpid()]), "the look itself works"
    own.close()
    h = agent_host
    c = h.agent()
    c.enc(1, picture())
    assert c.answer(1)[0] == "rows"
    s = h.status()
    pids = [s["pid"], s["encoder"]["pid"], c.owner.pid]
    assert [os.readlink(f"/proc/{p}/exe") for p in pids[::2]] == [str(WATCHDOG.resolve()), str(AGENT.resolve())]
    assert listening(pids) == []
    c.close()
