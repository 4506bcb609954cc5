"""What the tests of farsight-watchdog and farsight-agent share: the real programs before an encoder that does as it is told
(tests/tools/fake_encoder.c), on a socket of the test. A host's finish() is the check that nothing is left: no process of the encoder, no
spool folder, no sanitizer report. The fixtures are conftest.py's: watchdog and agent_host."""
import json
import os
import pathlib
import socket
import struct
import subprocess

import frames_client as fc
import lab

WATCHDOG, AGENT, FAKE = lab.WATCHDOG, lab.AGENT, lab.FAKE_ENCODER


def picture(words="", size=1000):
    """Bytes whose sum the fake encoder puts into every row; words tell it what to do."""
    head = ("FAKE " + words + "\n").encode()
    return head + bytes((i * 7) % 256 for i in range(max(0, size - len(head))))


def expected(pic, n, embd, half=False):
    frac = sum(pic) % 256 / 256
    return struct.pack(f"<{n * embd}{'e' if half else 'f'}", *[k % 8 + frac for k in range(n * embd)])


def alive(pid):
    """Also as a zombie, unless it was left to the first process, which reaps nobody in some containers."""
    try:
        state, parent = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return False
    return (state, parent) != ("Z", "1")


class Host:
    def __init__(self, tmp, **config):
        self.tmp, self.log, self.enc_log = tmp, tmp / "watchdog.log", tmp / "encoder.log"
        run = tmp / "run"
        run.mkdir(mode=0o700)
        self.socket = run / "watchdog.sock"
        self.env = {**os.environ, "XDG_RUNTIME_DIR": str(tmp), "TMPDIR": str(tmp)}
        self.process = None
        self.program = WATCHDOG
        self.spools = set()
        self.configure(**config)

    def configure(self, args=(), **config):
        self.config = self.tmp / "vision-host.json"
        base = {"mmproj": "/nowhere/mmproj.gguf", "encoder": str(FAKE), "extended": True, "stop_grace_ms": 300,
                "encoder_args": ["--log", str(self.enc_log), *args], "log_level": "debug"}
        self.config.write_text(json.dumps({**base, **config}))

    def run(self, *args, before=(), **env):
        """A watchdog of this host, which need not become the one that serves."""
        return subprocess.Popen([*before, self.program, "--socket", self.socket, "--config", self.config, *args], env={**self.env, **env},
                                stderr=open(self.log, "ab"))

    def start(self, *args, **more):
        self.process = self.run(*args, **more)
        fc.wait_for(self.socket.exists, "the watchdog's socket")
        fc.wait_for(self.try_status, "an answer to status")
        return self

    def try_status(self):
        p = self.ask("status")
        return json.loads(p.stdout) if p.returncode == 0 and p.stdout else None

    def ask(self, *command, program=None):
        """The finished process of an admin's command."""
        return subprocess.run([program or self.program, "--socket", self.socket, *command], capture_output=True, text=True, env=self.env)

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


def listener():
    s = socket.create_server(("127.0.0.1", 0), backlog=1024)  # of probes that nobody accepts
    return s, s.getsockname()[1]


class AgentHost(Host):
    """No watchdog runs until an agent needs one."""

    def agent(self, *args, lease="lease-a", ready=True, env=None):
        c = fc.through_agent([AGENT, "--socket", self.socket, "--config", self.config, *args],
                             {**self.env, "SSH_CONNECTION": "127.0.0.1 5 127.0.0.1 22", **(env or {})})
        try:
            c.hello(lease)
        except BrokenPipeError:  # it has said why and gone
            assert not ready
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
