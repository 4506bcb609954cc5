"""Hundreds of clients that connect, send and leave at random points: afterwards the server holds nothing of them and answers as before. Seeds are
fixed; what the threads meet is not, which is the point. Sanitizer builds look for leaks and races in it."""
import contextlib
import json
import os
import random
import socket
import threading
import time

import lab

CLIENTS = 500
AT_ONCE = 40
PICTURE = (lab.TOP / "tests/data/pictures/two-shapes.png").read_bytes()


def body(rng):
    kind = rng.random()
    more = {"max_tokens": rng.choice([1, 20, 400]), "ignore_eos": True, "stream": rng.random() < .5}
    if kind < .3:
        return {"messages": [lab.user("Hello! " * rng.randrange(1, 400))], **more}
    if kind < .8:  # few different pictures, so that clients share encodes and find rows in the cache
        words = f"delay={rng.choice([0, 30, 300])}"
        pictures = [lab.png_with(PICTURE, words, str(rng.randrange(12))) for _ in range(rng.choice([1, 1, 2, 3]))]
        return {"messages": [lab.user("What is it?", *pictures)], **more}
    if kind < .9:
        return {"messages": [lab.user("What is it?", lab.png_with(PICTURE, "die" if kind < .82 else "err=broken", str(rng.random())))], **more}
    return {"messages": "nonsense"}


def visit(server, seed):
    """One client: sends some or all of a request, reads for a while, leaves or stays to the end."""
    rng = random.Random(seed)
    data = json.dumps(body(rng)).encode()
    head = (f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n").encode()
    with contextlib.suppress(OSError), socket.create_connection(server.address(), 60) as s:
        s.settimeout(120)
        if rng.random() < .1:
            s.sendall((head + data)[:rng.randrange(len(head) + len(data))])
            return
        s.sendall(head + data)
        leave = rng.random()
        if leave < .6:
            time.sleep(rng.random() * rng.choice([.01, .1, 1]))
            if leave < .2:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset instead of an orderly end
            return
        while s.recv(65536):
            pass


def visits(server, seeds):
    for seed in seeds:
        visit(server, seed)


def descriptors(server):
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def test_a_storm_of_clients_leaves_nothing(host, servers, tmp_path):
    host.encoder_log = tmp_path / "encoder.log"
    host.configure(encoder=str(lab.FAKE_ENCODER), extended=True,
                   encoder_args=["--embd", "192", "--rows", "6x6", "--log", str(host.encoder_log)])
    host.start()
    server = servers(host, log_level="info").wait_for_eyes()
    assert server.ask("Hello!", max_tokens=4)
    before = descriptors(server)
    threads = [threading.Thread(target=visits, args=(server, range(k, CLIENTS, AT_ONCE))) for k in range(AT_ONCE)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(600)
        assert not t.is_alive(), "a client was left waiting"
    lab.wait_for(lambda: not server.live(), "the end of all requests", limit=120)
    status = server.status()
    assert status["turn"]["waiting"] == 0 and not status["turn"].get("holder")
    lab.wait_for(lambda: not os.listdir(host.status()["spool"]), "an empty spool")
    lab.wait_for(lambda: descriptors(server) <= before + 1, "closed sockets")  # one more for the connection that asks
    server.wait_for_eyes()
    assert server.ask("Hello!", max_tokens=4)
    code, reply = server.chat(lab.user("What is it?", lab.png_with(PICTURE, "delay=0", "afterwards")), max_tokens=4)
    assert code == 200, reply
