"""A client that leaves, in every phase of its request: what it started ends, the next request is undisturbed, nothing is left behind, and the
history says in which phase it ended. How fast it all ends is measured by scripts/bench latency."""
import contextlib
import http.server
import json
import os
import socket
import threading

import pytest

import lab

PICTURE = (lab.TOP / "tests/data/pictures/two-shapes.png").read_bytes()
LONG = 1_000_000  # tokens: more than any test lets the engine make


@pytest.fixture
def slow_host(host, tmp_path):
    """A vision host whose encoder does what the words behind a picture say."""
    host.encoder_log = tmp_path / "encoder.log"
    host.encoder_log.touch()
    host.configure(encoder=str(lab.FAKE_ENCODER), extended=True,
                   encoder_args=["--embd", "192", "--rows", "6x6", "--log", str(host.encoder_log)])
    return host.start()


def picture(words="", salt=""):
    return lab.png_with(PICTURE, words, salt)


def chat(text, *pictures, **more):
    return {"messages": [lab.user(text, *pictures)], **more}


def spool_is_empty(host):
    """No picture and no rows lie about on the vision host."""
    return not os.listdir(host.status()["spool"])


def check_idle(server, phase, cause="client", end="cancel"):
    """The one request that ran is gone, and its row says how it ended."""
    lab.wait_for(lambda: not server.live(), "the end of the request")
    row = server.history()[0]
    assert (row["finish"], row["phase"], row.get("cause")) == (end, phase, cause), row
    assert server.ask("Hello!", max_tokens=4)
    assert [r["finish"] for r in server.history()[:2]] in (["stop", end], ["length", end])


def leave_in(server, phase, body, path="/v1/chat/completions"):
    """Sends the request, waits until it is in that phase, closes the socket."""
    client = server.send(path, body)
    lab.wait_for(lambda: phase in server.phases(), f"a request in {phase}")
    client.close()


def test_while_its_body_arrives(servers):
    server = servers()
    client = socket.create_connection(server.address())
    client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{")
    client.close()
    assert server.ask("Hello!", max_tokens=4)
    assert len(server.history()) == 1  # what never arrived whole is no request


def test_while_its_body_is_parsed(servers):
    server = servers(max_body_mb=64)
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "metadata": [0.1234567890123456] * 1_900_000})
    client = server.send("/v1/chat/completions", body)
    lab.wait_for(lambda: "parse" in server.phases() or server.history(), "a request in parse")
    client.close()
    check_idle(server, "parse")


class Silent(http.server.BaseHTTPRequestHandler):
    """Never answers; tells when its client is gone."""

    def do_GET(self):
        self.server.asked.set()
        with contextlib.suppress(OSError):
            while self.connection.recv(1):
                pass
        self.server.left.set()

    def log_message(self, *args):
        pass


def test_while_a_picture_is_fetched(slow_host, servers):
    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Silent)
    web.asked, web.left = threading.Event(), threading.Event()
    threading.Thread(target=web.serve_forever, daemon=True).start()
    port = web.server_address[1]
    server = servers(slow_host, fetch={"allow": [f"127.0.0.1:{port}"]}).wait_for_eyes()
    body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{port}/p.png"}}]}]}
    leave_in(server, "fetch", body)
    assert web.asked.wait(lab.LIMIT_S) and web.left.wait(lab.LIMIT_S)
    web.shutdown()
    check_idle(server, "fetch")


def test_while_a_picture_is_encoded(slow_host, servers):
    server = servers(slow_host).wait_for_eyes()
    client = server.send("/v1/chat/completions", chat("What is it?", picture("delay=600000")))
    lab.wait_for(lambda: lab.count_encodes(slow_host) == 1, "the encode")
    assert server.phases() == ["encode"]
    client.close()
    lab.wait_for(lambda: "cancel" in slow_host.encoder_log.read_text(), "the encoder's cancel")
    check_idle(server, "encode")
    lab.wait_for(lambda: spool_is_empty(slow_host), "an empty spool")
    status, _ = server.chat(lab.user("What is it?", picture()), max_tokens=4)
    assert status == 200


def test_one_of_two_who_wait_for_the_same_picture(slow_host, servers):
    """The encode goes on for the other one; when both are gone it ends."""
    server = servers(slow_host).wait_for_eyes()
    body = chat("What is it?", picture("delay=600000"))
    first, second = server.send("/v1/chat/completions", body), server.send("/v1/chat/completions", body)
    lab.wait_for(lambda: server.phases() == ["encode", "encode"], "two requests in encode")
    lab.wait_for(lambda: lab.count_encodes(slow_host) == 1, "the encode")
    first.close()
    lab.wait_for(lambda: len(server.live()) == 1, "the end of the first")
    assert server.phases() == ["encode"] and "cancel" not in slow_host.encoder_log.read_text()
    second.close()
    lab.wait_for(lambda: "cancel" in slow_host.encoder_log.read_text(), "the encoder's cancel")
    check_idle(server, "encode")
    assert lab.count_encodes(slow_host) == 1


def test_while_it_waits_for_its_turn(servers):
    server = servers(context=65536)
    holder = server.send("/v1/chat/completions", chat("Hello!", max_tokens=LONG, ignore_eos=True, stream=True))
    lab.wait_for(lambda: server.phases() == ["decode"], "the engine at work")
    leave_in(server, "queue", chat("Hello!"))
    lab.wait_for(lambda: len(server.live()) == 1, "the end of the one that waited")
    row = server.history()[0]
    assert (row["finish"], row["phase"], row.get("cause")) == ("cancel", "queue", "client")
    entries = server.status()["turn"]["entries"]
    assert server.phases() == ["decode"]  # the one that has the turn goes on
    holder.close()
    check_idle(server, "decode")
    assert server.status()["turn"]["entries"] == entries + 1  # of check_idle's own request: the one that left took none


def test_while_its_prompt_is_read(servers):
    server = servers(context=131072)
    leave_in(server, "prefill", chat("word " * 60000))
    check_idle(server, "prefill")


@pytest.mark.parametrize("stream", [False, True])
def test_while_it_is_answered(servers, stream):
    server = servers(context=65536)
    leave_in(server, "decode", chat("Hello!", max_tokens=LONG, ignore_eos=True, stream=stream))
    check_idle(server, "decode")


def test_a_half_closed_client_is_told(servers):
    """Closing the writing side counts as leaving; who still reads gets an answer that says so."""
    server = servers(context=65536)
    client = server.send("/v1/chat/completions", chat("Hello!", max_tokens=LONG, ignore_eos=True))
    lab.wait_for(lambda: server.phases() == ["decode"], "the engine at work")
    client.shutdown(socket.SHUT_WR)
    assert b"499" in client.makefile("rb").readline()
    check_idle(server, "decode")


def test_deadlines_end_requests(slow_host, servers):
    server = servers(slow_host).wait_for_eyes()
    status, reply = server.chat(lab.user("What is it?", picture("delay=600000")), timeout_s=3)
    assert status == 504 and reply["error"]["code"] == "timeout"
    check_idle(server, "encode", "deadline")


def test_shutdown_ends_requests(slow_host, servers):
    server = servers(slow_host, drain_s=0).wait_for_eyes()
    client = server.send("/v1/chat/completions", chat("What is it?", picture("delay=600000")))
    lab.wait_for(lambda: lab.count_encodes(slow_host) == 1, "the encode")
    server.stop()
    answer = client.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 503") and b"shutting_down" in answer
    lab.wait_for(lambda: "cancel" in slow_host.encoder_log.read_text(), "the encoder's cancel")


def test_a_client_that_does_not_read_is_dropped(servers):
    """Its answer would pile up without end; the row says why it ended."""
    server = servers(context=65536, peer_timeout_s=600)  # which is not what this is about
    request = chat("Hello!", max_tokens=20000, ignore_eos=True, stream=True, logprobs=True, top_logprobs=20)
    client = lab.SlowReader(server.send_raw("POST", "/v1/chat/completions", json.dumps(request).encode(), receive_buffer=4096,
                                            Connection="close"))
    lab.wait_for(lambda: server.history() and not server.live(), "the end of the answer", limit=300)
    row = server.history()[0]
    assert (row["finish"], row["cause"]) == ("disconnect", "unread"), row
    client.rest()
    assert server.ask("Hello!", max_tokens=4)
