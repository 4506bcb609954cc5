"""A minute of faults at random over three vision hosts, while a server's clients and a second program ask for pictures without a pause: afterwards
every picture is accounted for once, no rows were another picture's, and nothing is left over. The seeds are fixed; what the processes meet is
not, which is the point."""
import contextlib
import json
import os
import pathlib
import random
import signal
import subprocess
import threading
import time

import pytest

import lab

POOL_CLIENT = lab.BUILD / "tests/tools/pool_client"
PICTURE = (lab.TOP / "tests/data/pictures/two-shapes.png").read_bytes()
SECONDS = float(os.environ.get("FARSIGHT_SOAK_S", 60))
VISION = {"connect_timeout_s": 10, "ping_interval_s": 1, "dead_after_s": 4, "encode_timeout_s": 60}


def children(pid):
    out = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout.split()
    return [int(p) for p in out] + [q for p in out for q in children(int(p))]


def tell(pids, sig):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sig)


def sessions(host):
    return children(host.process.pid)


def encoder(host):
    pid = host.encoder_pid()
    return [pid] if pid else []


def watchdog(host):
    return [(host.status() or {}).get("pid")] if host.status() else []


def stop_and_go(pids, seconds):
    tell(pids, signal.SIGSTOP)
    time.sleep(seconds)
    tell(pids, signal.SIGCONT)


def restart_sshd(host, seconds):
    host.stop_sshd()
    time.sleep(seconds)
    host.start()


FAULTS = {
    "encoder killed": lambda host, rng: tell(encoder(host), signal.SIGKILL),
    "encoder stopped": lambda host, rng: stop_and_go(encoder(host), rng.uniform(.1, 3)),
    "sessions killed": lambda host, rng: tell(sessions(host), signal.SIGKILL),
    "sessions stopped": lambda host, rng: stop_and_go(sessions(host), rng.uniform(.1, 6)),
    "sshd restarted": lambda host, rng: restart_sshd(host, rng.uniform(0, 2)),
    "watchdog killed": lambda host, rng: tell(watchdog(host), signal.SIGKILL),
}


class Askers:
    """Clients of the server: most pictures are good, some are refused by the encoder."""

    def __init__(self, server, n, seed):
        self.server, self.stop, self.ends, self.odd = server, False, {}, []
        self.lock = threading.Lock()
        self.threads = [threading.Thread(target=self.ask, args=(random.Random(seed * 1000 + k), k), daemon=True) for k in range(n)]
        for t in self.threads:
            t.start()

    def ask(self, rng, k):
        count = 0
        while not self.stop:
            count += 1
            bad = rng.random() < .1
            words = f"delay={rng.randrange(60)} " + ("err=bad-picture" if bad else "")
            pictures = [lab.png_with(PICTURE, words, f"{k} {count} {i}") for i in range(rng.choice([1, 1, 3]))]
            status, reply = self.server.chat(lab.user("What is it?", *pictures), max_tokens=2)
            code = "ok" if status == 200 else reply["error"]["code"]
            with self.lock:
                self.ends[code] = self.ends.get(code, 0) + 1
                expected = ("picture_unreadable", "vision_unavailable") if bad else ("ok", "vision_unavailable")
                if code not in expected or (code != "ok" and not reply["error"]["message"]):
                    self.odd.append((bad, status, reply))
            if code == "vision_unavailable":
                time.sleep(.1)

    def join(self):
        self.stop = True
        for t in self.threads:
            t.join(180)
            assert not t.is_alive(), "a client was left waiting"
        assert not self.odd, self.odd[:3]
        return self.ends


def break_things(hosts, rng, seconds):
    done = {name: 0 for name in FAULTS}
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        name, host = rng.choice(list(FAULTS)), rng.choice(hosts)
        FAULTS[name](host, rng)
        done[name] += 1
        time.sleep(rng.uniform(.2, 2))
    return done


def check_client(got):
    ok, refused, unavailable, timeout = (got[k] for k in ("ok", "refused", "unavailable", "timeout"))
    hosts = got["hosts"]
    assert got["wrong"] == 0
    assert got["sent"] == ok + refused + unavailable + timeout
    assert ok > 100 and refused > 0
    assert all(h["outstanding"] == 0 for h in hosts)
    hedged = sum(h["hedged"] for h in hosts)  # some of them were encoded, or lost, by both hosts
    assert sum(h["hedge_wins"] for h in hosts) <= hedged
    assert ok <= sum(h["encodes"] for h in hosts) <= ok + hedged
    assert sum(h["errors_by"]["picture"] for h in hosts) == refused
    lost, retried = sum(h["errors"] for h in hosts), sum(h["retries"] for h in hosts)
    assert 0 <= lost - retried <= unavailable + timeout + hedged
    assert lost == sum(h["errors_by"][k] for h in hosts for k in ("lost", "encoder", "timeout", "rows"))


def check_server(server, ends):
    lab.wait_for(lambda: not server.live(), "the end of all requests")
    status = server.status()
    totals, hosts = status["totals"], status["vision"]["hosts"]
    assert totals["requests"] == sum(ends.values()) == sum(totals["finish"].values())
    assert totals["finish"]["stop"] + totals["finish"]["length"] == ends["ok"]
    assert totals["finish"]["error"] == totals["finish"]["cancel"] == totals["finish"]["disconnect"] == 0
    assert all(h["outstanding"] == 0 for h in hosts) and status["cache"]["encoding"] == 0
    assert not status["turn"]["held"] and status["turn"]["waiting"] == 0


def running_below(folder):
    """Command lines that name the folder: encoders, agents and watchdogs of the hosts there."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(folder) in line:
                found.append(line)
    return found


@pytest.fixture
def three_hosts(tmp_path):
    if lab.SSHD is None:
        pytest.skip("no sshd on this machine")
    hosts = []
    for i in range(3):
        h = lab.VisionHost(tmp_path / f"host{i}")
        h.configure(encoder=str(lab.FAKE_ENCODER), extended=True, encoder_args=["--embd", "192", "--rows", "6x6", "--log", str(h.tmp / "encoder.log")])
        hosts.append(h.start())
    yield hosts
    for h in hosts:
        h.stop()
        lab.check_log(h.log)
    for i in range(3):
        lab.wait_for(lambda i=i: not running_below(tmp_path / f"host{i}"), "the end of what the host started")


@pytest.mark.parametrize("hedge", [0, 3])
def test_faults_lose_no_picture_and_mix_none_up(three_hosts, servers, tmp_path, hedge):
    rng = random.Random(17 + hedge)
    server = servers(*three_hosts, vision={**VISION, "hedge": hedge}, log_level="info")
    lab.wait_for(lambda: all(h["state"] == "up" for h in server.eyes()["hosts"]), "all hosts")
    log = tmp_path / "pool_client.log"
    client = subprocess.Popen([POOL_CLIENT, server.config, "--threads", "8", "--seed", str(hedge)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              stderr=open(log, "wb"), text=True)
    askers = Askers(server, 6, seed=hedge)
    faults = break_things(three_hosts, rng, SECONDS / 2)
    lab.wait_for(lambda: all(h["state"] == "up" for h in server.eyes()["hosts"]), "all hosts again", limit=120)
    ends = askers.join()
    got = json.loads(client.communicate(timeout=180)[0])
    print(faults, ends, got, sep="\n")
    lab.check_log(log)
    assert client.returncode == 0, log.read_text()[-2000:]
    check_client(got)
    check_server(server, ends)
    for h in three_hosts:  # and the next picture works everywhere
        lab.wait_for(lambda h=h: h.encoder().get("state") == "ready", "the encoder")
        lab.wait_for(lambda h=h: not os.listdir(h.status()["spool"]), "an empty spool")
    assert server.chat(lab.user("What is it?", lab.png_with(PICTURE, "", "afterwards")), max_tokens=2)[0] == 200
