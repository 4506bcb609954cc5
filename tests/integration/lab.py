"""Two PCs in one: a private sshd on loopback in front of the real vision host's programs, and the real farsight-server in front of that.
Everything runs on free ports with its own keys in a folder of the test; nothing of the user's ssh is read."""
import base64
import contextlib
import getpass
import http.client
import itertools
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request

TOP = pathlib.Path(__file__).parents[2]
BUILD = pathlib.Path(os.environ.get("FARSIGHT_BUILD", TOP / "build-plain"))
SERVER = BUILD / "server/farsight-server"
AGENT = BUILD / "remote/agent/farsight-agent"
WATCHDOG = BUILD / "remote/watchdog/farsight-watchdog"
ENCODER = BUILD / "remote/encoder/farsight-encoder"
FAKE_ENCODER = BUILD / "tests/tools/fake_encoder"
TEXT_MODEL = TOP / "models/farsight-mini-text.gguf"
MMPROJ = TOP / "models/farsight-mini-mmproj.gguf"
SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:" + os.environ.get("PATH", ""))
LIMIT_S = 60  # of any single wait; nothing here measures time
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 16  # one of those that run tests side by side
ports = itertools.count(os.getpid() * 61)


def wait_for(condition, what, limit=LIMIT_S):
    until = time.monotonic() + limit
    while True:
        got = condition()
        if got:
            return got
        assert time.monotonic() < until, f"{what} did not come in {limit} s"
        time.sleep(0.02)


def free_port():
    """Below those that the kernel gives to whoever asks for any, and not one of another worker: it is free still when a program takes it, and
    while that program is away."""
    lowest = int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(1024 if lowest >= 20000 else 0):
        port = lowest - 1 - (next(ports) * 16 + WORKER) % 16384
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def data_url(path):
    return "data:;base64," + base64.b64encode(pathlib.Path(path).read_bytes()).decode()


def user(text, *pictures):
    """A user message: pictures (paths or URLs) first, then the text."""
    parts = [{"type": "image_url", "image_url": {"url": p if str(p).lower().startswith("data:") else data_url(p)}} for p in pictures]
    return {"role": "user", "content": parts + [{"type": "text", "text": text}]}


def png_with(png, words="", salt=""):
    """A data: URL of a picture that tells the fake encoder what to do (tests/tools/fake_encoder.c); decoders stop before the words."""
    return "data:;base64," + base64.b64encode(png + f"FAKE {words}\n{salt}".encode()).decode()


def count_encodes(host):
    """Pictures that the host's fake encoder was asked for."""
    return sum(line.startswith("enc") for line in host.encoder_log.read_text().splitlines())


def read_answer(client):
    """(status, headers with small letters, body)"""
    answer = http.client.HTTPResponse(client)
    answer.begin()
    body = answer.read()
    return answer.status, {k.lower(): v for k, v in answer.getheaders()}, body


def read_body_bytes(client, n):
    """The body's first n bytes."""
    answer = http.client.HTTPResponse(client)
    answer.begin()
    return answer.read(n)


class SlowReader(threading.Thread):
    """Takes an answer in drops, so that its connection is alive and always full; in one gulp once it may."""

    def __init__(self, client):
        super().__init__(daemon=True)
        self.client, self.got, self.hurry = client, bytearray(), threading.Event()
        self.start()

    def run(self):
        with contextlib.suppress(OSError):
            while piece := self.client.recv(1 << 16 if self.hurry.is_set() else 256):
                self.got += piece
                self.hurry.wait(0.2)

    def rest(self):
        """All bytes that came, when no more come."""
        self.hurry.set()
        self.join(LIMIT_S)
        assert not self.is_alive()
        return bytes(self.got)


def drain(client):
    """Reads whatever comes to the end."""
    with contextlib.suppress(OSError):
        while client.recv(1 << 16):
            pass
    client.close()


def sshd_common():
    """Options of every sshd of the tests. Without PAM sshd lets nobody in whose password is locked, as root's often is."""
    locked = os.getuid() == 0 and subprocess.run(["getent", "shadow", "root"], capture_output=True, text=True).stdout.startswith("root:!")
    return (f"PidFile none\nUsePAM {'yes' if locked else 'no'}\nStrictModes no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
            "PermitRootLogin prohibit-password\nLogLevel VERBOSE\n")


class VisionHost:
    """sshd, and what it starts."""

    def __init__(self, tmp, **config):
        self.tmp = pathlib.Path(tmp)
        self.tmp.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.process = None
        self.log = self.tmp / "sshd.log"
        self.socket = self.tmp / "run/watchdog.sock"
        self.socket.parent.mkdir(mode=0o700, exist_ok=True)
        self.config = self.tmp / "vision-host.json"
        self.configure(**config)
        self.make_key("host_key")
        self.make_key("user_key")
        self.allow()
        self.trust()
        (self.tmp / "sshd_config").write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {self.tmp}/host_key\nAuthorizedKeysFile {self.tmp}/authorized_keys\n"
            f"{sshd_common()}"
            "SetEnv SHLVL=2\n")  # bash then passes over the user's .bashrc, which may take long and print
        if os.getuid() == 0:
            os.makedirs("/run/sshd", exist_ok=True)

    def configure(self, **config):
        base = {"mmproj": str(MMPROJ), "encoder": str(ENCODER), "log_level": "debug", "stop_grace_ms": 500}
        self.config.write_text(json.dumps({**base, **config}))

    def make_key(self, name):
        for f in (self.tmp / name, self.tmp / (name + ".pub")):
            f.unlink(missing_ok=True)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.tmp / name, "-C", name], check=True)

    def allow(self, command=None):
        key = (self.tmp / "user_key.pub").read_text()
        command = command or f"{AGENT} --socket {self.socket} --watchdog {WATCHDOG} --config {self.config}"
        path = self.tmp / "authorized_keys"
        path.write_text(f'restrict,command="{command}" {key}')
        path.chmod(0o600)

    def trust(self):
        kind, key = (self.tmp / "host_key.pub").read_text().split()[:2]
        (self.tmp / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {kind} {key}\n")

    def start(self):
        self.process = subprocess.Popen([SSHD, "-D", "-e", "-f", self.tmp / "sshd_config"], stderr=open(self.log, "ab"))
        wait_for(self.listens, "sshd")
        return self

    def listens(self):
        assert self.process.poll() is None, self.log.read_text()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def status(self):
        out = subprocess.run([WATCHDOG, "--socket", self.socket, "status"], capture_output=True, text=True, timeout=LIMIT_S)
        return json.loads(out.stdout) if out.returncode == 0 else None

    def encoder(self):
        """What the watchdog says of its encoder; {} when no watchdog runs."""
        return (self.status() or {}).get("encoder", {})

    def encoder_pid(self):
        return self.encoder().get("pid") or None

    def watchdog_log(self):
        log = self.socket.parent / "watchdog.log"
        return log.read_text(errors="replace") if log.exists() else ""

    def connection(self):
        return {"host": f"{getpass.getuser()}@127.0.0.1", "port": self.port, "identity": str(self.tmp / "user_key"),
                "known_hosts": str(self.tmp / "known_hosts"), "ssh_config": "/dev/null"}

    def stop_sshd(self):
        """Ends sshd and its sessions, as a machine that is switched off would."""
        if self.process:
            children = subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True).stdout.split()
            self.process.terminate()
            self.process.wait(LIMIT_S)
            for pid in children:
                with contextlib.suppress(OSError):
                    os.kill(int(pid), signal.SIGKILL)
            self.process = None

    def stop(self):
        subprocess.run([WATCHDOG, "--socket", self.socket, "stop"], capture_output=True, timeout=LIMIT_S)
        self.stop_sshd()
        wait_for(lambda: self.encoder_pid() is None, "the encoder's end")


class Server:
    def __init__(self, tmp, hosts=(), **config):
        self.tmp = pathlib.Path(tmp)
        self.tmp.mkdir(parents=True, exist_ok=True)
        self.log = self.tmp / "server.log"
        vision = {"remote": True, "hosts": [h.connection() for h in hosts], **config.pop("vision", {})} if hosts else {}
        base = {"model": str(TEXT_MODEL), "listen": "127.0.0.1:0", "sampling": {"temperature": 0}, "log_level": "debug", "drain_s": 1}
        self.config = self.tmp / "server.json"
        self.config.write_text(json.dumps({**base, **({"vision": vision} if vision else {}), **config}))
        self.process = subprocess.Popen([SERVER, "--config", self.config], stderr=open(self.log, "ab"))
        self.url = wait_for(self.find_url, "the server's address")

    def find_url(self):
        assert self.process.poll() is None, self.log.read_text()
        for line in self.log.read_text().splitlines(keepends=True):
            if "listening on" in line and line.endswith("\n"):
                return "http://127.0.0.1:" + line.split()[-1]
        return None

    def request(self, path, body=None, timeout=LIMIT_S, raw=None):
        """(status, parsed JSON)"""
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        req = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(req, timeout=timeout) as f:
                return f.status, json.load(f)
        except urllib.error.HTTPError as e:
            return e.code, json.loads(e.read())

    def chat(self, *messages, **params):
        return self.request("/v1/chat/completions", {"messages": list(messages), **params})

    def ask(self, text, *pictures, **params):
        """The answer's text; fails the test when there is none."""
        status, reply = self.chat(user(text, *pictures), **params)
        assert status == 200, reply
        return reply["choices"][0]["message"]["content"]

    def address(self):
        return "127.0.0.1", int(self.url.rsplit(":", 1)[1])

    def send_on(self, client, method, path, data=b"", **headers):
        lines = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": len(data), **headers}
        head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items())
        client.sendall(head.encode() + b"\r\n" + data)
        return client

    def send_raw(self, method, path, data=b"", receive_buffer=0, **headers):
        client = socket.socket()
        if receive_buffer:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.connect(self.address())
        client.settimeout(LIMIT_S)
        return self.send_on(client, method, path, data, **headers)

    def send(self, path, body, **headers):
        """The socket of a request whose answer nobody has read yet."""
        return self.send_raw("POST", path, (body if isinstance(body, str) else json.dumps(body)).encode(), **headers)

    def raw(self, method, path, data=b"", headers=None):
        """(status, headers, body)"""
        with self.send_raw(method, path, data, **(headers or {})) as client:
            return read_answer(client)

    def status(self):
        return self.request("/status")[1]

    def live(self):
        return self.status()["requests"]

    def phases(self):
        return sorted(r["phase"] for r in self.live())

    def history(self):
        """Rows of requests that ended, the newest first."""
        return self.request("/v1/history")[1]["data"]

    def eyes(self):
        return self.request("/health")[1]["vision"]

    def wait_for_eyes(self):
        wait_for(lambda: self.eyes()["available"], "the vision host")
        return self

    def stop(self):
        """Ends it as systemd would; the exit must be orderly and the log free of sanitizer reports."""
        if self.process.poll() is None:
            self.process.terminate()
        assert self.process.wait(LIMIT_S) == 0, self.log.read_text()[-4000:]
        check_log(self.log)


def check_log(path):
    text = pathlib.Path(path).read_text(errors="replace")
    for word in ("AddressSanitizer", "LeakSanitizer", "runtime error:", "ThreadSanitizer", "invariant broken"):
        assert word not in text, text[-6000:]
