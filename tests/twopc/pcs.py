"""PCs that are network namespaces, and the switch between them.

A Pc has its own network, processes, mounts, home, run folder and addresses; what runs on it is started inside and dies with it. Pcs hang on one
bridge, each by a veth cable, or by a cable with faults (wire.py). Cables are cut (carrier lost), made to drop all silently, and slowed down. Needs root."""
import contextlib
import ctypes
import json
import os
import pathlib
import shutil
import signal
import struct
import subprocess
import sys
import threading

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "integration"))
import lab  # noqa: E402  (the folder above is what makes it importable)

wait_for = lab.wait_for
CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1
DISABLED, FORWARDING = "0", "3"  # states of a bridge's port
EMBD = 192  # of the bundled text model: rows of another width are refused
libc = ctypes.CDLL(None, use_errno=True)


def sh(*argv):
    p = subprocess.run([str(a) for a in argv], capture_output=True, text=True)
    assert p.returncode == 0, f"{' '.join(map(str, argv))}: {p.stderr.strip()}"
    return p.stdout


def die_with_us():
    """In a child before exec: a test run that is killed leaves no PCs behind."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def remove_stale():
    """Namespaces whose test run is gone. They hold no processes any more."""
    for name in sh("ip", "netns", "list").split():
        run = name[2:].split("-")[0]
        if name.startswith("fs") and run.isdigit() and not os.path.exists(f"/proc/{run}"):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def why_not():
    """Why this machine can not do it; None when it can."""
    if os.getuid() != 0:
        return "network namespaces need root"
    if lab.SSHD is None:
        return "no sshd on this machine"
    for program in ("ip", "tc", "bridge", "unshare", "nsenter"):
        if not shutil.which(program):
            return f"{program} is missing (scripts/install-deps)"
    probe = f"fs{os.getpid()}-probe"
    try:
        remove_stale()
        sh("ip", "netns", "add", probe)
        sh("ip", "-n", probe, "link", "add", "br0", "type", "bridge")
        sh("ip", "-n", probe, "link", "add", "a0", "type", "veth", "peer", "name", "b0")
        sh("ip", "netns", "exec", probe, "unshare", "--mount", "--pid", "--fork", "--mount-proc", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
    except AssertionError as e:
        return f"no network namespaces here: {e}"
    finally:
        subprocess.run(["ip", "netns", "del", probe], capture_output=True)
    return None


def children(pid):
    try:
        return [int(p) for p in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def read_proc(pid, name):
    try:
        return pathlib.Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


class Process:
    """A program on a Pc. pid is the machine's number of it, not the one inside."""

    def __init__(self, pc, argv, log, env, group):
        enter = None
        if group:
            def enter():
                with open(group, "w") as f:
                    f.write(str(os.getpid()))
        inside = ["nsenter", "-t", str(pc.init), "-n", "-m", "-p", "--", *map(str, argv)]
        with open(log, "ab") as f:
            self.outer = subprocess.Popen(inside, stdin=subprocess.DEVNULL, stdout=f, stderr=f, env=env, preexec_fn=enter)
        self.pid = wait_for(self.find, "the start of " + str(argv[0]))

    def find(self):
        assert self.outer.poll() is None, "it ended at once"
        return (children(self.outer.pid) or [None])[0]

    def kill(self, sig=signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, sig)

    def running(self):
        return self.outer.poll() is None

    def wait(self):
        return self.outer.wait(lab.LIMIT_S)


class Pc:
    def __init__(self, lan, name, number, wire):
        self.lan, self.name, self.address = lan, name, f"10.77.0.{number}"
        self.called = None  # by others, instead of by its address
        self.netns, self.port = f"{lan.id}-{name}", f"port{number}"
        self.folder = lan.folder / name
        self.home, self.run = self.folder / "home", self.folder / "run"
        self.tmp = self.folder / "tmp"
        for f in (self.home / ".ssh", self.home / ".config/farsight", self.run, self.tmp):
            f.mkdir(parents=True)
            f.chmod(0o700)
        self.environment = {"HOME": str(self.home), "XDG_RUNTIME_DIR": str(self.run), "TMPDIR": str(self.tmp)}
        self.group = self.wire = None
        self.muted, self.processes = False, []
        sh("ip", "netns", "add", self.netns)
        self.plug_in(wire)
        self.boot()

    # ---- network ----

    def plug_in(self, wire):
        if wire:
            argv = [sys.executable, HERE / "wire.py", self.netns, "eth0", self.lan.netns, self.port]
            for key, value in wire.items():
                argv += ["--" + key.replace("_", "-"), str(value)]
            self.wire = subprocess.Popen([str(a) for a in argv], stdout=subprocess.PIPE, text=True, preexec_fn=die_with_us)
            assert self.wire.stdout.readline() == "ready\n"
        else:
            sh("ip", "-n", self.netns, "link", "add", "eth0", "type", "veth", "peer", "name", self.port, "netns", self.lan.netns)
        sh("ip", "-n", self.lan.netns, "link", "set", self.port, "master", "br0", "up")
        sh("ip", "-n", self.netns, "link", "set", "lo", "up")
        sh("ip", "-n", self.netns, "address", "add", self.address + "/24", "dev", "eth0")
        sh("ip", "-n", self.netns, "link", "set", "eth0", "up")

    def cut(self):
        """The cable is out: no carrier, and the kernel takes the addresses' routes away."""
        sh("ip", "-n", self.netns, "link", "set", "eth0", "down")

    def move(self, address):
        sh("ip", "-n", self.netns, "address", "del", self.address + "/24", "dev", "eth0")
        sh("ip", "-n", self.netns, "address", "add", address + "/24", "dev", "eth0")
        self.address = address

    def name_hosts(self, names):
        """What names mean on this PC."""
        file = self.folder / "hosts"
        known = file.exists()
        file.write_text("127.0.0.1 localhost\n" + "".join(f"{a} {n}\n" for n, a in names.items()))
        if not known:
            self.do("mount", "--bind", file, "/etc/hosts")

    def mute(self):
        """All that comes and goes is dropped, and nobody is told."""
        sh("bridge", "-n", self.lan.netns, "link", "set", "dev", self.port, "state", DISABLED)
        self.muted = True

    def repair(self):
        """After cut or mute."""
        sh("ip", "-n", self.netns, "link", "set", "eth0", "up")
        if self.muted:
            sh("bridge", "-n", self.lan.netns, "link", "set", "dev", self.port, "state", FORWARDING)
            self.muted = False

    def slow(self, mbit):
        """What this PC sends; None: no limit any more."""
        subprocess.run(["tc", "-n", self.netns, "qdisc", "del", "dev", "eth0", "root"], capture_output=True)
        if mbit:
            sh("tc", "-n", self.netns, "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", f"{mbit}mbit", "burst", "16k", "latency", "300ms")

    @contextlib.contextmanager
    def inside(self):
        """This thread's new sockets are this PC's."""
        back = os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY)
        there = os.open(f"/run/netns/{self.netns}", os.O_RDONLY)
        try:
            assert libc.setns(there, CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
            yield
        finally:
            assert libc.setns(back, CLONE_NEWNET) == 0
            os.close(there)
            os.close(back)

    # ---- processes and mounts ----

    def boot(self):
        """The first process of the PC, whose end is the end of all others; it reaps what is left to it."""
        self.holder = subprocess.Popen(
            ["ip", "netns", "exec", self.netns, "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
             "sh", "-c", f"mount -t tmpfs -o size=700m tmpfs /dev/shm && touch {self.folder}/up && trap '' CHLD && exec sleep infinity"], preexec_fn=die_with_us)
        wait_for((self.folder / "up").exists, "the PC's start")
        (self.folder / "up").unlink()
        self.init, = children(self.holder.pid)

    def start(self, *argv, log, **env):
        self.processes.append(Process(self, argv, self.folder / log, {**os.environ, **self.environment, **env}, self.group))
        return self.processes[-1]

    def do(self, *argv):
        return sh("nsenter", "-t", self.init, "-n", "-m", "-p", "--", *argv)

    def size(self, folder, size):
        """A file system of memory, mounted there for this PC alone; or its new size."""
        if os.path.ismount(f"/proc/{self.init}/root{folder}"):
            self.do("mount", "-o", f"remount,size={size}", folder)
        else:
            self.do("mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", folder)

    def limit_memory(self, mib):
        """For what is started from now on. A reason when this machine can not."""
        v1, v2 = pathlib.Path("/sys/fs/cgroup/memory"), pathlib.Path("/sys/fs/cgroup")
        root, limit = (v1, "memory.limit_in_bytes") if v1.is_dir() else (v2, "memory.max")
        self.cgroup = root / f"{self.lan.id}-{self.name}"
        try:
            self.cgroup.mkdir()
            (self.cgroup / limit).write_text(str(mib << 20))
        except OSError as e:
            return f"no control group of memory here: {e}"
        self.group = self.cgroup / "cgroup.procs"
        return None

    def pids(self, name=None):
        """Of all living processes of this PC, or of those whose program has that name."""
        mine, found = os.readlink(f"/proc/{self.init}/ns/pid") if self.is_on() else None, []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/ns/pid") == mine and b"\nState:\tZ" not in read_proc(pid, "status") and \
                        (name is None or os.path.basename(os.readlink(f"/proc/{pid}/exe")) == name):
                    found.append(int(pid))
        return found

    def is_on(self):
        return self.holder.poll() is None

    def signal_all(self, sig):
        inside = [p for p in self.pids() if p != self.init]
        outer = [p.outer.pid for p in self.processes if p.running()]  # nsenter stops with its child, but does not go on with it
        for pid in inside + (outer if sig == signal.SIGCONT else []):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sig)

    def power_off(self):
        """At once, and nobody on the network is told."""
        self.cut()
        self.holder.kill()
        self.holder.wait()

    def close(self):
        if self.is_on():
            self.signal_all(signal.SIGCONT)
            self.holder.kill()
            self.holder.wait()
        if self.wire:
            self.wire.kill()
            self.wire.wait()
        subprocess.run(["ip", "netns", "del", self.netns], capture_output=True)
        if self.group:
            wait_for(lambda: not self.group.read_text().split(), "the end of all processes")
            self.cgroup.rmdir()


class Lan:
    """The switch, and all PCs on it. Logs are kept when keep is set before the end."""

    def __init__(self, folder, number):
        self.folder, self.id = pathlib.Path(folder), f"fs{os.getpid()}-{number}"
        self.netns, self.pcs = self.id, []
        sh("ip", "netns", "add", self.netns)
        sh("ip", "-n", self.netns, "link", "add", "br0", "type", "bridge", "forward_delay", "0")
        sh("ip", "-n", self.netns, "link", "set", "br0", "up")

    def pc(self, name, kind=Pc, wire=None, **more):
        made = kind(self, name, len(self.pcs) + 1, wire, **more)
        self.pcs.append(made)
        return made

    def close(self):
        for pc in self.pcs:
            pc.close()
        subprocess.run(["ip", "netns", "del", self.netns], capture_output=True)


class VisionPc(Pc):
    """sshd, and what its sessions start; the encoder is tests/tools/fake_encoder.c with rows that hang on every byte of the picture."""

    LIMITS = {"silence_s": 3, "probe_interval_s": 1, "probe_fails": 2, "lease_grace_s": 2, "stop_grace_ms": 500}

    def __init__(self, lan, name, number, wire, config=None):
        super().__init__(lan, name, number, wire)
        self.encoder_log, self.control = self.folder / "encoder.log", self.folder / "control"
        self.socket = self.run / "farsight/watchdog.sock"
        self.configure(**(config or {}))
        self.make_key("host_key")
        self.sshd_environment, self.sshd_options = {}, []
        self.sshd = None

    def configure(self, **config):
        base = {"mmproj": str(lab.MMPROJ), "encoder": str(lab.FAKE_ENCODER), "extended": True, "log_level": "debug",
                "encoder_args": ["--embd", str(EMBD), "--rows", "16x16", "--noise", "--log", str(self.encoder_log), "--control", str(self.control)]}
        (self.home / ".config/farsight/vision-host.json").write_text(json.dumps({**base, **self.LIMITS, **config}))

    def make_key(self, name):
        for f in (self.folder / name, self.folder / (name + ".pub")):
            f.unlink(missing_ok=True)
        sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / name, "-C", name)

    def allow(self, *servers):
        keys = [(s.home / ".ssh/id_ed25519.pub").read_text() for s in servers]
        path = self.home / ".ssh/authorized_keys"
        path.write_text("".join(f'restrict,command="{lab.AGENT} --watchdog {lab.WATCHDOG}" {k}' for k in keys))
        path.chmod(0o600)

    def start_sshd(self):
        names = {**self.environment, **self.sshd_environment}
        (self.folder / "sshd_config").write_text(
            f"ListenAddress 0.0.0.0:22\nHostKey {self.folder}/host_key\nAuthorizedKeysFile {self.home}/.ssh/authorized_keys\n"
            + lab.sshd_common() + "SetEnv " + " ".join(f'"{k}={v}"' for k, v in names.items()) + "\n" +
            "".join(line + "\n" for line in self.sshd_options))
        os.makedirs("/run/sshd", exist_ok=True)
        self.sshd = self.start(lab.SSHD, "-D", "-e", "-f", self.folder / "sshd_config", log="sshd.log")
        wait_for(lambda: b"Server listening" in (self.folder / "sshd.log").read_bytes(), "sshd")
        return self

    def stop_sshd(self, sessions=True):
        victims = [p for p in self.pids("sshd") if p != self.sshd.pid] if sessions else []
        self.sshd.kill(signal.SIGTERM)
        self.sshd.wait()
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def status(self):
        inside = ["nsenter", "-t", str(self.init), "-m", "-p", "--"]  # the run folder may be a mount
        out = subprocess.run([*inside, lab.WATCHDOG, "--socket", self.socket, "status"], capture_output=True, text=True, timeout=lab.LIMIT_S)
        return json.loads(out.stdout) if out.returncode == 0 else {"pictures": 0, "leases": [], "encoder": {"state": "none"}}

    def encoder_state(self):
        return self.status()["encoder"]["state"]

    def encoders(self):
        return self.pids("fake_encoder")

    def events(self, word):
        lines = self.encoder_log.read_text().splitlines() if self.encoder_log.exists() else []
        return [line for line in lines if line.startswith(word)]

    def order(self, words):
        """What the encoder does with every picture from now on; "": nothing special."""
        fresh = self.control.with_suffix(".new")
        fresh.write_text(words)
        fresh.replace(self.control)

    def inner(self, folder):
        """A folder of this PC's mounts, as seen from outside."""
        return pathlib.Path(f"/proc/{self.init}/root{folder}")

    def spooled(self):
        """Pictures and rows that lie on the host."""
        folders = [f for top in ("/dev/shm", self.tmp) for f in self.inner(top).glob("farsight-spool-*")]
        return [f for folder in folders for f in folder.iterdir()]

    def fill(self, folder):
        with open(self.inner(folder) / "filler", "wb", buffering=0) as f, contextlib.suppress(OSError):
            for size in (65536, 512):
                with contextlib.suppress(OSError):
                    while True:
                        f.write(bytes(size))

    def free(self, folder):
        (self.inner(folder) / "filler").unlink()

    def watchdog_log(self):
        path = self.inner(self.run) / "farsight/watchdog.log"
        return path.read_text(errors="replace") if path.exists() else ""



class ServerPc(Pc):
    PORT = 8080
    VISION = {"remote": True, "connect_timeout_s": 3, "ping_interval_s": 1, "dead_after_s": 3, "encode_timeout_s": 120}

    def __init__(self, lan, name, number, wire):
        super().__init__(lan, name, number, wire)
        sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.home / ".ssh/id_ed25519", "-C", name)

    def trust(self, *hosts):
        (self.home / ".ssh/known_hosts").write_text("".join(
            f"{h.called or h.address} {' '.join((h.folder / 'host_key.pub').read_text().split()[:2])}\n" for h in hosts))

    def serve(self, hosts, vision=None, env=None, **config):
        return Server(self, hosts, vision or {}, env or {}, config)


class Server(lab.Server):
    """farsight-server on a Pc; asked over that PC's loopback, so that no cut cable keeps clients away."""

    def __init__(self, pc, hosts, vision, env, config):
        self.pc, self.log = pc, pc.folder / "server.log"
        connect = [{"host": f"root@{h.called or h.address}", "identity": str(pc.home / ".ssh/id_ed25519"),
                    "known_hosts": str(pc.home / ".ssh/known_hosts"), "ssh_config": "/dev/null"} for h in hosts]
        self.config = pc.folder / "server.json"
        self.config.write_text(json.dumps({
            "model": str(lab.TEXT_MODEL), "listen": f"0.0.0.0:{pc.PORT}", "open_to_network_without_key": True, "threads": 1, "context": 2048,
            "log_level": "debug", "drain_s": 1, "vision": {**pc.VISION, "hosts": connect, **vision}, **config}))
        self.url = f"http://127.0.0.1:{pc.PORT}"
        self.start(env)

    def start(self, env=None):
        at = self.log.stat().st_size if self.log.exists() else 0
        self.process = self.pc.start(lab.SERVER, "--config", self.config, log="server.log", **(env or {}))
        wait_for(lambda: b"listening on" in self.log.read_bytes()[at:], "the server")

    def request(self, *args, **kw):
        with self.pc.inside():
            return super().request(*args, **kw)

    def send_raw(self, *args, **kw):
        with self.pc.inside():
            return super().send_raw(*args, **kw)

    def host_state(self, i=0):
        return self.eyes()["hosts"][i]["state"]

    def stop(self):
        if self.process.running():
            self.process.kill(signal.SIGTERM)
            assert self.process.wait() == 0, self.log.read_text()[-4000:]


class Text:
    """Asks for text every 100 ms, as a user who knows nothing of pictures; each answer must be right."""

    BODY = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2, "temperature": 0}

    def __init__(self, server):
        self.server, self.answers, self.over = server, [], threading.Event()
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def work(self):
        while not self.over.wait(0.1):
            try:
                status, reply = self.server.request("/v1/chat/completions", self.BODY)
                self.answers.append((status, reply["choices"][0]["message"]["content"] if status == 200 else str(reply)))
            except Exception as e:  # whatever went wrong, it is what the test must see
                self.answers.append((0, repr(e)))

    def finish(self):
        """After at least two answers more."""
        n = len(self.answers) + 2
        wait_for(lambda: len(self.answers) >= n, "answers to text")
        self.over.set()
        self.thread.join(lab.LIMIT_S)
        assert len(set(self.answers)) == 1 and self.answers[0][0] == 200, set(self.answers)


def clock_shift(folder):
    """Builds the library that shifts a program's wall clock; (environment, function that sets the shift in seconds)."""
    library, cell = pathlib.Path(folder) / "clock_shift.so", pathlib.Path(folder) / "clock"
    sh("gcc", "-std=gnu17", "-D_GNU_SOURCE", "-shared", "-fPIC", "-O1", "-o", library, HERE / "clock_shift.c")
    cell.write_bytes(bytes(8))

    def jump(seconds):
        with open(cell, "r+b") as f:
            f.write(struct.pack("<q", seconds))

    sanitizer = os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0"  # a library that is preloaded comes before it
    return {"LD_PRELOAD": str(library), "CLOCK_SHIFT": str(cell), "ASAN_OPTIONS": sanitizer}, jump
