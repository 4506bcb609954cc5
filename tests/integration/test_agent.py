"""farsight-agent: starts the watchdog, hands the channel over, and ends with it."""
import json
import os
import signal
import socket
import subprocess

import pytest

import frames_client as fc
import lab
from watchdog_lab import FAKE, WATCHDOG, alive, expected, picture


def test_agent_starts_the_watchdog_and_hands_over(agent_host):
    h = agent_host
    c = h.agent()
    s = h.status()
    assert s["leases"][0]["peer"] == "127.0.0.1"
    assert os.getsid(s["pid"]) != os.getsid(0) and open(f"/proc/{s['pid']}/stat").read().split()[3] not in (str(c.owner.pid), str(os.getpid()))
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


def test_agent_says_when_the_watchdog_does_not_take_the_channel(agent_host):
    """One that hangs, or is from before the hand-over: it would wait for frames on the agent's socket."""
    h = agent_host
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(h.socket))
        old.listen()
        c = h.agent(ready=False)
        s, _ = old.accept()
        assert s.recv(4096).startswith(b"FARSIGHT 1 channel 127.0.0.1")
        frame = c.expect(fc.ERR)
        assert b"does not take the channel" in frame[2] and b"older" in frame[2] and b"farsight-watchdog stop" in frame[2]
        assert c.owner.wait(fc.LIMIT_S) == 1 and s.recv(1) == b""
        c.close()
    h.socket.unlink()


def test_agent_is_content_with_a_watchdog_that_takes_and_says_nothing(agent_host):
    """As those did from the hand-over's first release."""
    h = agent_host
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(h.socket))
        old.listen()
        c = h.agent(ready=False)
        s, _ = old.accept()
        _, fds, _, _ = socket.recv_fds(s, 4096, 2)
        assert os.read(fds[0], 4096)  # the HELLO
        assert c.owner.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            c.owner.wait(6)  # longer than the agent looks
        s.close()
        assert c.owner.wait(fc.LIMIT_S) == 3
        for fd in fds:
            os.close(fd)
        c.close()
    h.socket.unlink()


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


def test_descriptors_that_are_no_channel_are_closed(watchdog):
    h = watchdog().start()
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
