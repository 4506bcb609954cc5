"""How the server ends: the first signal lets running answers end, the second ends them at once, and no program that it started is left."""
import http.client
import json
import os
import signal
import socket
import subprocess
import time

import pytest

import lab

CHAT = "/v1/chat/completions"
CONTEXT = 131072  # tokens, which no machine makes in less than many seconds
LONG = {"messages": [lab.user("Hello!")], "max_tokens": CONTEXT, "ignore_eos": True}


def read_until(client, mark):
    got = b""
    while mark not in got:
        more = client.recv(1 << 16)
        assert more, got
        got += more
    return got


def rest(client):
    with client:
        return b"".join(iter(lambda: client.recv(1 << 16), b""))


def stopped_accepting(server):
    try:
        socket.create_connection(server.address(), 1).close()
        return False
    except ConnectionRefusedError:
        return True
    except ConnectionResetError:  # just while it closed
        return False


def children(pid):
    return [int(p) for p in subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout.split()]


def is_gone(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as f:
            return f.read().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def test_running_answers_end_after_the_first_signal(servers):
    server = servers(drain_s=3600, context=CONTEXT)
    request = {**LONG, "max_tokens": 4000}
    streaming = server.send(CHAT, {**request, "stream": True})
    first = read_until(streaming, b"data: ")
    whole = server.send(CHAT, {**request, "max_tokens": 20})
    lab.wait_for(lambda: len(server.live()) == 2, "both requests")
    idle = http.client.HTTPConnection(*server.address(), timeout=lab.LIMIT_S)
    idle.request("GET", "/health")
    idle.getresponse().read()
    server.process.terminate()
    lab.wait_for(lambda: stopped_accepting(server), "the end of accepting")
    assert idle.sock.recv(1) == b""  # it waited for nothing
    answer = first + rest(streaming)
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") and b'"finish_reason":"length"' in answer.replace(b": ", b":")
    status, headers, body = lab.read_answer(whole)
    assert status == 200 and json.loads(body)["usage"]["completion_tokens"] == 20 and headers["connection"] == "close"
    assert server.process.wait(lab.LIMIT_S) == 0


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_ends_them_at_once(servers, sig):
    server = servers(drain_s=3600, context=CONTEXT)
    streaming = server.send(CHAT, {**LONG, "stream": True})
    read_until(streaming, b"data: ")
    whole = server.send(CHAT, LONG)
    lab.wait_for(lambda: len(server.live()) == 2, "both requests")
    server.process.send_signal(sig)
    lab.wait_for(lambda: stopped_accepting(server), "the end of accepting")
    read_until(streaming, b"data: ")  # it still runs
    assert server.process.poll() is None
    server.process.send_signal(sig)
    answer = rest(streaming)
    assert b"shutting down" in answer and answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    status, headers, body = lab.read_answer(whole)
    assert status == 503 and json.loads(body)["error"]["code"] == "shutting_down" and "retry-after" in headers
    assert server.process.wait(lab.LIMIT_S) == 0


def test_the_time_of_running_answers_is_limited(servers):
    server = servers(drain_s=1, context=CONTEXT)
    streaming = server.send(CHAT, {**LONG, "stream": True})
    read_until(streaming, b"data: ")
    server.process.terminate()
    assert b"shutting down" in rest(streaming)
    assert server.process.wait(lab.LIMIT_S) == 0


def test_a_client_that_does_not_read_can_not_hold_it(servers):
    server = servers(drain_s=3600, context=CONTEXT)
    deaf = server.send_raw("POST", CHAT, json.dumps({**LONG, "stream": True}).encode(), receive_buffer=4096)
    lab.wait_for(lambda: "decode" in server.phases(), "a running answer")
    time.sleep(.5)  # so that something waits for it
    server.process.terminate()
    lab.wait_for(lambda: stopped_accepting(server), "the end of accepting")
    server.process.terminate()
    assert server.process.wait(lab.LIMIT_S) == 0
    deaf.close()


def test_requests_that_are_still_arriving_are_told(servers):
    server = servers(drain_s=3600, context=CONTEXT)
    streaming = server.send(CHAT, {**LONG, "stream": True})
    read_until(streaming, b"data: ")
    late = socket.create_connection(server.address())
    late.sendall(b"POST %s HTTP/1.1\r\nHost: localhost\r\n" % CHAT.encode())
    server.request("/health")  # by now the server has read that
    server.process.terminate()
    lab.wait_for(lambda: stopped_accepting(server), "the end of accepting")
    late.sendall(b"Content-Length: 100\r\n\r\n")
    answer = rest(late)
    assert answer.startswith(b"HTTP/1.1 503 ") and b'"shutting_down"' in answer and b"Connection: close" in answer
    streaming.close()  # nobody else is left to wait for
    assert server.process.wait(lab.LIMIT_S) == 0


@pytest.mark.parametrize("busy", [False, True])
def test_no_encoder_of_ours_is_left(servers, tmp_path, busy):
    exe = tmp_path / "encoder"
    exe.write_text(f'#!/bin/sh\nexec {lab.FAKE_ENCODER} --embd 192 --rows 6x6 "$@"\n')
    exe.chmod(0o755)
    server = servers(drain_s=3600, vision={"mmproj": str(lab.MMPROJ), "exe": str(exe)})
    encoders = lab.wait_for(lambda: children(server.process.pid), "the encoder")
    if busy:
        picture = lab.png_with((lab.TOP / "tests/data/pictures/two-shapes.png").read_bytes(), "hang")
        asking = server.send(CHAT, {"messages": [lab.user("What is this?", picture)]})
        lab.wait_for(lambda: "encode" in server.phases(), "the picture's encode")
        server.process.terminate()
        lab.wait_for(lambda: stopped_accepting(server), "the end of accepting")
    server.process.terminate()
    assert server.process.wait(lab.LIMIT_S) == 0
    assert not busy or lab.read_answer(asking)[0] == 503
    lab.wait_for(lambda: all(is_gone(p) for p in encoders), "the encoder's end")


def test_a_vision_hosts_encoder_ends_after_its_server(host, servers):
    server = servers(host.start())
    server.wait_for_eyes()
    pid = lab.wait_for(host.encoder_pid, "the encoder")
    server.process.terminate()
    assert server.process.wait(lab.LIMIT_S) == 0
    lab.wait_for(lambda: is_gone(pid), "the encoder's end")
