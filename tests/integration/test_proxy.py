"""Debian's nginx between the clients and the server: a plain proxy_pass, with nothing said about buffering. What the server's own headers and
comments have to do: streams come through as they are written, a silent encode outlives the proxy's patience, and a client that leaves the proxy
ends its work."""
import contextlib
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess

import pytest

import lab

NGINX = shutil.which("nginx", path="/usr/sbin:" + os.environ.get("PATH", ""))
PICTURE = (lab.TOP / "tests/data/pictures/two-shapes.png").read_bytes()
CHAT = "/v1/chat/completions"
PATIENCE_S = 15  # the proxy's; the server's comments come every 10 s

pytestmark = pytest.mark.skipif(NGINX is None, reason="no nginx on this machine (scripts/install-deps --proxy)")


class Proxy(lab.Server):
    """nginx in front of a server; what can be asked of a server can be asked of it."""

    def __init__(self, tmp, server):
        self.tmp = pathlib.Path(tmp)
        self.tmp.mkdir()
        self.port = lab.free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        folders = "".join(f"{kind}_temp_path {self.tmp}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        user = "user root;" if os.getuid() == 0 else ""
        (self.tmp / "nginx.conf").write_text(
            f"{user} daemon off; worker_processes 1; pid {self.tmp}/pid; error_log {self.tmp}/error.log;\n"
            "events { worker_connections 64; }\n"
            f"http {{ access_log off; {folders} client_max_body_size 64m;\n"
            f"server {{ listen 127.0.0.1:{self.port}; location / {{ proxy_pass {server.url}; proxy_http_version 1.1;\n"
            f"proxy_set_header Connection \"\"; proxy_set_header Host localhost; proxy_read_timeout {PATIENCE_S}s; }} }} }}\n")
        self.process = subprocess.Popen([NGINX, "-p", self.tmp, "-e", self.tmp / "error.log", "-c", self.tmp / "nginx.conf"])
        lab.wait_for(self.listens, "nginx")

    def listens(self):
        assert self.process.poll() is None, (self.tmp / "error.log").read_text()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def stop(self):
        self.process.terminate()
        self.process.wait(lab.LIMIT_S)


@pytest.fixture
def proxied(host, servers, tmp_path):
    """(server, the proxy in front of it)"""
    host.configure(encoder=str(lab.FAKE_ENCODER), extended=True, encoder_args=["--embd", "192", "--rows", "6x6"])
    host.start()
    server = servers(host, context=65536).wait_for_eyes()
    proxy = Proxy(tmp_path / "nginx", server)
    yield server, proxy
    proxy.stop()


def endless(**more):
    return {"messages": [lab.user("Hello!")], "stream": True, "max_tokens": 1_000_000, "ignore_eos": True, **more}


def with_picture(ms, **more):
    return {"messages": [lab.user("What is this?", lab.png_with(PICTURE, f"delay={ms}"))], "max_tokens": 4, **more}


def test_a_stream_comes_through_as_it_is_written(proxied):
    server, proxy = proxied
    with proxy.send(CHAT, endless()) as client:
        assert lab.read_body_bytes(client, 300).startswith(b"data: ")  # of an answer that has no end
        assert server.phases() == ["decode"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_the_proxy_ends_its_work(proxied, stream):
    server, proxy = proxied
    client = proxy.send(CHAT, endless(stream=stream))
    lab.wait_for(lambda: server.phases() == ["decode"], "the engine at work")
    client.close()
    lab.wait_for(lambda: not server.live(), "the end of the work")
    assert [server.history()[0][k] for k in ("finish", "cause")] == ["cancel", "client"]


def test_it_ends_a_picture_nobody_waits_for(proxied):
    server, proxy = proxied
    client = proxy.send(CHAT, with_picture(600_000, stream=True))
    lab.wait_for(lambda: server.phases() == ["encode"], "the encode")
    client.close()
    lab.wait_for(lambda: not server.live(), "the end of the work")
    assert server.history()[0]["phase"] == "encode"


def test_comments_outlast_the_patience_of_the_proxy(proxied):
    server, proxy = proxied
    status, _, body = lab.read_answer(proxy.send(CHAT, with_picture((PATIENCE_S + 10) * 1000, stream=True)))
    assert status == 200 and body.count(b": keep-alive\n\n") >= 2 and body.endswith(b"data: [DONE]\n\n")
    assert server.history()[0]["finish"] in ("stop", "length")


def test_an_answer_is_taken_up_again_through_it(proxied):
    server, proxy = proxied
    request = endless(max_tokens=300, temperature=0)
    with proxy.send(CHAT, request, **{"X-Conversation-Id": "a/b"}) as client:
        first = lab.read_body_bytes(client, 500)
    status, headers, rest = proxy.raw("GET", f"/v1/stream/a%2Fb?from={len(first)}")
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    whole = first + rest
    assert whole == server.raw("GET", "/v1/stream?conv_id=a%2Fb")[2] and whole.endswith(b"data: [DONE]\n\n")
    events = [json.loads(e) for e in re.findall(rb"^data: (\{.*)$", whole, re.M)]
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert proxy.raw("DELETE", "/v1/stream/a%2Fb")[0] == 204 and server.raw("GET", "/v1/stream/a%2Fb")[0] == 404
