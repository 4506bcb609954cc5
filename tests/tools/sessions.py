#!/usr/bin/env python3
"""Many conversations with several readers each, against the real server on loopback: is every answer whole for every reader, and what does it
cost in memory. Used by scripts/bench streams; see there.

Every session is a streamed answer of a fixed length whose client leaves at once; its readers attach while it waits for the engine, which another
request holds until all are there. Each must get the very bytes that the server says it kept.
"""
import argparse
import hashlib
import json
import pathlib
import resource
import selectors
import socket
import sys
import tempfile
import time

TOP = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(TOP / "tests/integration"))
import lab  # noqa: E402

LIMIT_S = 600


class Reader:
    """One GET of a stream; takes the chunked coding apart as it comes and keeps a sum of the events' bytes, comments left out."""

    def __init__(self, server, name):
        self.name, self.buffer, self.sum, self.n, self.head, self.left = name, b"", hashlib.sha256(), 0, False, None
        self.socket = server.send_raw("GET", f"/v1/stream/{name}")
        self.socket.setblocking(False)

    def take(self, piece):
        if piece == b": keep-alive\n\n":  # the server writes comments as chunks of their own
            return
        self.sum.update(piece)
        self.n += len(piece)

    def feed(self, data):
        """True at the end."""
        self.buffer += data
        if not self.head:
            head, found, rest = self.buffer.partition(b"\r\n\r\n")
            if not found:
                return False
            assert head.startswith(b"HTTP/1.1 200 "), head
            self.head, self.buffer = True, rest
        while True:
            line, found, rest = self.buffer.partition(b"\r\n")
            if not found:
                return False
            size = int(line, 16)
            if len(rest) < size + 2:
                return False
            if size == 0:
                return True
            self.take(rest[:size])
            self.buffer = rest[size + 2:]


def memory_kb(pid, key):
    with open(f"/proc/{pid}/status", encoding="utf-8") as f:
        return next(int(line.split()[1]) for line in f if line.startswith(key + ":"))


def begin(server, name, tokens):
    body = {"messages": [lab.user(f"Hello {name}!")], "stream": True, "max_tokens": tokens, "ignore_eos": True}
    client = server.send("/v1/chat/completions", body, **{"X-Conversation-Id": name})
    return client


def read_all(readers, selector, most_open):
    """Reads until at most so many are open."""
    until = time.monotonic() + LIMIT_S
    while len(readers) > most_open:
        assert time.monotonic() < until, f"{len(readers)} readers came to no end"
        for key, _ in selector.select(1):
            r = key.data
            data = r.socket.recv(1 << 18)
            assert data, f"{r.name} was cut off"
            if r.feed(data):
                selector.unregister(r.socket)
                r.socket.close()
                readers.discard(r)


def measure(a, tmp):
    connections = a.sessions * (a.readers + 1) + 64
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    want = 3 * connections  # the server holds a second descriptor of each socket
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, want), hard), hard))
    if want > hard:
        sys.exit(f"sessions: {want} open files are needed, {hard} are allowed")
    server = lab.Server(tmp, (), context=65536, timeout_s=3600, workers=a.sessions + 8, queue_depth=min(4096, a.sessions + 8), log_level="info",
                        max_connections=connections, streams={"max": 65536})
    server.chat(lab.user("Hello!"), max_tokens=1)
    pid, idle_kb, began = server.process.pid, memory_kb(server.process.pid, "VmRSS"), time.monotonic()
    readers, selector, everyone, status_ms = set(), selectors.DefaultSelector(), [], []
    holder = server.send("/v1/chat/completions", {"messages": [lab.user("Hello!")], "max_tokens": 1_000_000, "ignore_eos": True})
    lab.wait_for(lambda: server.phases() == ["decode"], "the engine at work")
    for i in range(a.sessions):
        client = begin(server, f"s{i}", a.tokens)
        lab.wait_for(lambda: server.request("/v1/streams/lookup", {"conversation_ids": [f"s{i}"]})[1], "the session")
        client.close()  # and is not heard of again
        for _ in range(a.readers):
            r = Reader(server, f"s{i}")
            selector.register(r.socket, selectors.EVENT_READ, r)
            readers.add(r)
            everyone.append(r)
        if i % 50 == 0:
            at = time.monotonic()
            server.status()
            status_ms.append((time.monotonic() - at) * 1e3)
    lab.wait_for(lambda: server.status()["streams"]["readers"] == len(everyone), "all readers, and the end of all first clients")
    opened, with_all_kb, full = time.monotonic(), memory_kb(pid, "VmRSS"), server.status()["streams"]
    holder.close()
    read_all(readers, selector, 0)
    ended = time.monotonic()
    kept = {row["conversation_id"]: row for k in range(0, a.sessions, 1000) for row in
            server.request("/v1/streams/lookup", {"conversation_ids": [f"s{i}" for i in range(k, min(k + 1000, a.sessions))]})[1]}
    lost = sum(r.n != kept.get(r.name, {}).get("total_bytes") for r in everyone)
    same = {name: set() for name in kept}
    for r in everyone:
        same[r.name].add(r.sum.digest())
    differ = sum(len(sums) != 1 for sums in same.values())
    after = server.status()["streams"]
    out = {"sessions": a.sessions, "readers": len(everyone), "bytes_kept": sum(r["total_bytes"] for r in kept.values()),
           "bytes_read": sum(r.n for r in everyone), "readers_that_lost_bytes": lost, "sessions_whose_readers_differ": differ,
           "live_at_most": full["live"], "readers_at_most": full["readers"], "ring_bytes": after["bytes"], "dropped_bytes": after["dropped_bytes"],
           "rss_idle_kb": idle_kb, "rss_all_open_kb": with_all_kb, "rss_peak_kb": memory_kb(pid, "VmHWM"), "rss_after_kb": memory_kb(pid, "VmRSS"),
           "status_ms_worst": round(max(status_ms), 1), "seconds_to_open": round(opened - began, 1), "seconds": round(ended - began, 1)}
    server.stop()
    return out


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--sessions", type=int, default=1000)
    p.add_argument("--readers", type=int, default=3)
    p.add_argument("--tokens", type=int, default=32)
    p.add_argument("--json", action="store_true")
    a = p.parse_args()
    with tempfile.TemporaryDirectory(prefix="farsight-sessions") as tmp:
        out = measure(a, tmp)
    if a.json:
        print(json.dumps(out, indent=1))
    else:
        print("\n".join(f"{k.replace('_', ' '):32}{v:>14,}" for k, v in out.items()))
    return 1 if out["readers_that_lost_bytes"] or out["sessions_whose_readers_differ"] else 0


sys.exit(main())
