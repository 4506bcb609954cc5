#!/usr/bin/env python3
"""What several vision hosts are worth: pictures a second of four against one, and what becomes of requests when one of four is killed under
load. Runs the real server and vision hosts' programs on loopback, with tests/tools/fake_encoder as the encoder: an encode takes a fixed time
and no CPU, so that what is measured is how the server spreads and feeds them. Used by scripts/bench pool; see there.

Pictures are asked for by count_tokens, which encodes and generates nothing: the engine has no part in it.
"""
import argparse
import contextlib
import itertools
import json
import os
import pathlib
import signal
import sys
import tempfile
import threading
import time

TOP = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(TOP / "tests/integration"))
import lab  # noqa: E402

PICTURE = (TOP / "tests/data/pictures/two-shapes.png").read_bytes()
CLIENTS = 24  # more than all hosts take at once


def fake_host(tmp):
    host = lab.VisionHost(tmp)
    host.configure(encoder=str(lab.FAKE_ENCODER), extended=True, encoder_args=["--embd", "192", "--rows", "6x6"], log_level="warn")
    return host.start()


def one_request(server, delay_ms, salt):
    data = lab.png_with(PICTURE, f"delay={delay_ms}", salt).split(",", 1)[1]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    body = {"model": "any", "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}
    return server.request("/v1/messages/count_tokens", body)


class Load:
    """Clients that ask for one picture after the other until so many are answered."""

    def __init__(self, server, n, delay_ms, name):
        self.server, self.delay_ms, self.name = server, delay_ms, name
        self.numbers = itertools.count()
        self.n = n
        self.lock = threading.Lock()
        self.ended, self.lost = [], []
        self.threads = [threading.Thread(target=self.client, daemon=True) for _ in range(CLIENTS)]
        for t in self.threads:
            t.start()

    def client(self):
        while True:
            with self.lock:
                k = next(self.numbers)
            if k >= self.n:
                return
            status, reply = one_request(self.server, self.delay_ms, f"{self.name} {k}")
            with self.lock:
                self.ended.append(time.monotonic())
                if status != 200:
                    self.lost.append(reply)

    def join(self):
        for t in self.threads:
            t.join(300)
            assert not t.is_alive(), "a client was left waiting"
        return self

    def rate(self):
        """Pictures a second between the first tenth and the last, when all hosts are busy."""
        ends = sorted(self.ended)
        a, b = len(ends) // 10, len(ends) - len(ends) // 10 - 1
        return (b - a) / (ends[b] - ends[a])


def start_server(tmp, hosts):
    server = lab.Server(tmp, hosts, log_level="info", cache_mb=0)
    lab.wait_for(lambda: all(h["state"] == "up" for h in server.eyes()["hosts"]), "all hosts")
    return server


def switch_off(host):
    """As a machine that loses its power: nothing there says goodbye."""
    status = host.status()
    host.stop_sshd()
    for pid in (status["encoder"]["pid"], status["pid"]):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def measure(tmp, n, delay_ms):
    with contextlib.ExitStack() as running:
        hosts = [fake_host(tmp / f"host{i}") for i in range(4)]
        for h in hosts:
            running.callback(h.stop)
        one, four = start_server(tmp / "one", hosts[:1]), start_server(tmp / "four", hosts)
        running.callback(one.stop)
        running.callback(four.stop)
        alone = Load(one, n, delay_ms, "one").join()
        together = Load(four, 4 * n, delay_ms, "four").join()
        assert not alone.lost and not together.lost, (alone.lost + together.lost)[0]
        shares = [h["encodes"] for h in four.status()["vision"]["hosts"]]
        killed = Load(four, 4 * n, delay_ms, "killed")
        lab.wait_for(lambda: len(killed.ended) > n, "half of the load")
        victim = four.status()["vision"]["hosts"][2]
        switch_off(hosts[2])
        killed.join()
        after = four.status()["vision"]["hosts"][2]
    return {
        "speedup_4_hosts": round(together.rate() / alone.rate(), 3),
        "lost_when_one_killed": len(killed.lost),
        "encode_ms": delay_ms,
        "pictures_per_s_1_host": round(alone.rate(), 2),
        "pictures_per_s_4_hosts": round(together.rate(), 2),
        "encodes_by_host": shares,
        "asked_while_killed": len(killed.ended),
        "on_the_killed_host": victim["outstanding"],
        "retried": after["retries"],
        "why": killed.lost[:3],
    }


def table(r):
    print(f"{'hosts':10}{'pictures/s':>12}{'of the possible':>18}")
    for name, rate, n in [("one", r["pictures_per_s_1_host"], 1), ("four", r["pictures_per_s_4_hosts"], 4)]:
        print(f"{name:10}{rate:12.2f}{rate * r['encode_ms'] / 10 / n:17.1f}%")
    print(f"encodes of {r['encode_ms']} ms by host: {r['encodes_by_host']}")
    print(f"one of four killed under load: {r['asked_while_killed']} pictures asked for, {r['on_the_killed_host']} on that host, {r['retried']} tried again elsewhere")
    for key in ("speedup_4_hosts", "lost_when_one_killed"):
        print(f"{key} {r[key]}")


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--pictures", type=int, default=60, help="for each host")
    p.add_argument("--encode-ms", type=int, default=150)
    p.add_argument("--json", action="store_true")
    a = p.parse_args()
    with tempfile.TemporaryDirectory(prefix="fs-pool-") as tmp:
        r = measure(pathlib.Path(tmp), a.pictures, a.encode_ms)
    if a.json:
        print(json.dumps(r))
    else:
        table(r)


main()
