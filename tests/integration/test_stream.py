"""Answers that outlive their clients: the client is killed at every point and another one takes up the stream; the bytes of both are those of an
undisturbed answer. Statuses and texts are those that llama.cpp's server gives."""
import concurrent.futures
import json
import random
import re
import subprocess
import time
import urllib.parse
import urllib.request

import pytest

import lab

PICTURE = (lab.TOP / "tests/data/pictures/two-shapes.png").read_bytes()
QUESTION = "Describe the picture."


@pytest.fixture
def server(servers):
    return servers(context=65536)


def body(**more):
    return {"messages": [lab.user("Hello!")], "stream": True, **more}


def start(server, conversation, request=None, **headers):
    return server.send("/v1/chat/completions", request or body(), **{"X-Conversation-Id": conversation, **headers})


def get(server, conversation, start=0, query=False, **headers):
    name = urllib.parse.quote(conversation, safe="")
    path = f"/v1/stream?conv_id={name}&from={start}" if query else f"/v1/stream/{name}?from={start}"
    return server.raw("GET", path, headers=headers)


def lookup(server, *ids):
    return server.request("/v1/streams/lookup", {"conversation_ids": list(ids)})[1]


def finished(server, conversation):
    return lab.wait_for(lambda: [r for r in lookup(server, conversation) if r["is_done"]], "the end of the answer")[0]


def same_answer(a, b):
    """Equal but for what differs from request to request: the id, the second it was made, and comments while it waited."""
    def plain(x):
        x = x.replace(b": keep-alive\n\n", b"")
        return re.sub(rb'"(created|created_at)":\d+', b"", re.sub(rb"(chatcmpl|resp|msg|item)[-_][0-9a-f]+", b"", x))
    return plain(a) == plain(b)


def test_a_client_that_stays_gets_what_the_session_keeps(server):
    status, headers, whole = lab.read_answer(start(server, "c1"))
    assert status == 200 and headers["x-conversation-resumable"] == "yes"
    events = re.sub(rb": keep-alive\n\n", b"", whole)
    assert events.endswith(b"data: [DONE]\n\n")
    for query in (False, True):
        status, headers, kept = get(server, "c1", query=query)
        assert (status, kept) == (200, events) and headers["content-type"].startswith("text/event-stream")
    assert finished(server, "c1")["total_bytes"] == len(events)


@pytest.mark.parametrize("point", [0, 1, 37, 200, 700, -1])
def test_killed_and_taken_up_at_a_byte(server, point):
    """-1: in the last event."""
    request = body(max_tokens=40, ignore_eos=True, temperature=0)
    undisturbed = lab.read_answer(start(server, "whole", request))[2]
    client = start(server, "killed", request)
    length = len(undisturbed) - 5 if point < 0 else point
    first = lab.read_body_bytes(client, length) if length else b""
    client.close()
    status, _, rest = get(server, "killed", len(first))
    assert status == 200
    assert same_answer(first + rest, undisturbed)
    assert len(first + rest) == finished(server, "killed")["total_bytes"]
    assert server.history()[0]["finish"] == "length"


def test_killed_in_the_queue(server):
    undisturbed = lab.read_answer(start(server, "whole"))[2]
    holder = server.send("/v1/chat/completions", body(max_tokens=60000, ignore_eos=True))
    lab.wait_for(lambda: server.phases() == ["decode"], "the engine at work")
    client = start(server, "q")
    lab.wait_for(lambda: "queue" in server.phases(), "the second in the queue")
    client.close()
    holder.close()
    status, _, kept = get(server, "q")
    assert status == 200 and same_answer(kept, undisturbed)


def test_killed_in_the_encode(host, servers, tmp_path):
    host.configure(encoder=str(lab.FAKE_ENCODER), extended=True, encoder_args=["--embd", "192", "--rows", "6x6"])
    host.start()
    server = servers(host, cache_mb=0).wait_for_eyes()  # so that the same picture is encoded again
    request = {"messages": [lab.user(QUESTION, lab.png_with(PICTURE, "delay=3000"))], "stream": True, "max_tokens": 8, "temperature": 0}
    undisturbed = lab.read_answer(start(server, "whole", request))[2]
    client = start(server, "e/1", request)
    lab.wait_for(lambda: server.phases() == ["encode"], "the encode")
    client.close()
    status, _, kept = get(server, "e/1", query=True)
    assert status == 200 and same_answer(kept, undisturbed)
    assert server.history()[0]["finish"] in ("stop", "length")


@pytest.mark.parametrize("phase", ["encode", "queue", "decode"])
def test_delete_ends_the_work(host, servers, tmp_path, phase):
    host.encoder_log = tmp_path / "encoder.log"
    host.configure(encoder=str(lab.FAKE_ENCODER), extended=True, encoder_args=["--embd", "192", "--rows", "6x6", "--log", str(host.encoder_log)])
    host.start()
    server = servers(host, context=65536).wait_for_eyes()
    request = body(max_tokens=1_000_000, ignore_eos=True)
    holder = None
    if phase == "queue":
        holder = server.send("/v1/chat/completions", request)
        lab.wait_for(lambda: server.phases() == ["decode"], "the engine at work")
    if phase == "encode":
        request = {"messages": [lab.user(QUESTION, lab.png_with(PICTURE, "delay=600000"))], "stream": True}
    client = start(server, "d", request)
    lab.wait_for(lambda: phase in server.phases(), phase)
    if phase == "encode":
        lab.wait_for(lambda: lab.count_encodes(host) == 1, "the encode at the encoder")
    reader = server.send_raw("GET", "/v1/stream/d?from=0")
    status, _, nothing = server.raw("DELETE", "/v1/stream/d")
    assert (status, nothing) == (204, b"")
    for who in (reader, client):  # they come to an end, and are told
        assert b'"code":"conversation_deleted"' in lab.read_answer(who)[2]
    if holder:
        holder.close()
    lab.wait_for(lambda: not server.live(), "the end of the work")
    row = next(r for r in server.history() if r.get("cause") == "deleted")
    assert (row["finish"], row["phase"]) == ("cancel", phase)
    if phase == "encode":
        lab.wait_for(lambda: "cancel" in host.encoder_log.read_text(), "the encoder's cancel")
    assert get(server, "d")[0] == 404
    assert server.raw("DELETE", "/v1/stream/d")[0] == 204  # again: nothing happens
    assert server.raw("DELETE", "/v1/stream?conv_id=never")[0] == 204


@pytest.fixture
def slow_eyes(host, servers):
    """A server whose pictures take as long as they say."""
    host.configure(encoder=str(lab.FAKE_ENCODER), extended=True, encoder_args=["--embd", "192", "--rows", "6x6"])
    host.start()
    return lambda **config: servers(host, context=65536, **config).wait_for_eyes()


def slow_picture(ms, **more):
    return {"messages": [lab.user(QUESTION, lab.png_with(PICTURE, f"delay={ms}"))], "max_tokens": 4, **more}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("replaced", [True, False])
def test_who_still_waits_for_the_answer_is_told_of_its_end(slow_eyes, stream, replaced):
    server = slow_eyes()
    client = start(server, "w", slow_picture(600_000, stream=stream))
    lab.wait_for(lambda: server.phases() == ["encode"], "the encode")
    reader = server.send_raw("GET", "/v1/stream/w")
    lab.wait_for(lambda: server.status()["streams"]["readers"] == stream + 1, "the reader")
    if replaced:
        assert lab.read_answer(start(server, "w"))[0] == 200
    else:
        assert server.raw("DELETE", "/v1/stream/w")[0] == 204
    for who in (client, reader):
        status, headers, text = lab.read_answer(who)
        assert (status, headers["content-type"], json.loads(text)["error"]["code"]) == (499, "application/json", "conversation_deleted")


def test_a_reader_sees_life_while_a_picture_is_encoded(slow_eyes):
    server = slow_eyes()
    client = start(server, "k", slow_picture(8000, stream=True))
    lab.wait_for(lambda: server.phases() == ["encode"], "the encode")
    whole = server.raw("GET", "/v1/stream/k")[2]
    assert whole.startswith(b": keep-alive\n\ndata: ") and whole.endswith(b"data: [DONE]\n\n")
    assert lab.read_answer(client)[2] == whole
    assert get(server, "k")[2] == whole.removeprefix(b": keep-alive\n\n")


def test_the_last_words_of_a_late_answer_reach_all(servers):
    """The server's own timeout_s, which is the followers' as well."""
    server = servers(context=65536, timeout_s=2)
    client = start(server, "late", body(max_tokens=1_000_000, ignore_eos=True))
    reader = server.send_raw("GET", "/v1/stream/late")
    for who in (client, reader):
        assert b'"code":"timeout"' in lab.read_answer(who)[2].split(b"data: ")[-2]


def test_head_is_answered_at_once(server):
    client = start(server, "h", body(max_tokens=1_000_000, ignore_eos=True))
    lab.wait_for(lambda: server.phases() == ["decode"], "the engine at work")
    with server.send_raw("HEAD", "/v1/stream/h") as asking:
        head = asking.recv(4096)
    assert head.startswith(b"HTTP/1.1 200 ") and b"text/event-stream" in head
    client.close()
    server.raw("DELETE", "/v1/stream/h")
    assert server.send_raw("HEAD", "/v1/stream/h").recv(4096).startswith(b"HTTP/1.1 404 ")


def test_a_new_request_takes_the_place_of_the_old(server):
    old = start(server, "r", body(max_tokens=1_000_000, ignore_eos=True))
    lab.wait_for(lambda: server.phases() == ["decode"], "the engine at work")
    reader = server.send_raw("GET", "/v1/stream/r?from=0")
    status, _, new = lab.read_answer(start(server, "r"))
    assert status == 200 and new.endswith(b"data: [DONE]\n\n")
    assert not lab.read_answer(old)[2].endswith(new[-200:])
    lab.read_answer(reader)
    lab.wait_for(lambda: not server.live(), "the end of both")
    assert [r.get("cause") for r in server.history()[:2]].count("deleted") == 1
    assert get(server, "r")[2] == re.sub(rb": keep-alive\n\n", b"", new)


def test_many_readers_each_at_its_pace(server):
    request = body(max_tokens=800, ignore_eos=True, temperature=0)
    client = start(server, "m", request)
    readers = [server.send_raw("GET", f"/v1/stream/m?from={n}") for n in (0, 0, 0)]
    slow = server.send_raw("GET", "/v1/stream/m?from=0")  # does not read until the others are done
    answers = [lab.read_answer(r)[2] for r in readers]
    whole = re.sub(rb": keep-alive\n\n", b"", lab.read_answer(client)[2])
    assert all(re.sub(rb": keep-alive\n\n", b"", a) == whole for a in answers)
    assert re.sub(rb": keep-alive\n\n", b"", lab.read_answer(slow)[2]) == whole


def test_a_reader_that_falls_behind_is_told(servers):
    server = servers(context=65536, peer_timeout_s=600, streams={"ring_kb": 64})
    request = body(max_tokens=2500, ignore_eos=True, logprobs=True, top_logprobs=20)
    client = start(server, "slow", request)
    lab.wait_for(lambda: lookup(server, "slow") and lookup(server, "slow")[0]["total_bytes"] > 0, "the first bytes")
    slow = lab.SlowReader(server.send_raw("GET", "/v1/stream/slow?from=0", receive_buffer=4096, Connection="close"))
    lab.read_answer(client)
    assert b"Stream offset lost, please restart" in slow.rest()
    status, _, text = get(server, "slow", 0)
    assert (status, json.loads(text)["error"]["message"]) == (400, "Stream offset lost, please restart")
    total = finished(server, "slow")["total_bytes"]
    assert len(get(server, "slow", total - 1000)[2]) == 1000


def test_what_is_wrong_is_said(server):
    lab.read_answer(start(server, "a/b"))
    total = finished(server, "a/b")["total_bytes"]

    def error(path):
        status, headers, text = server.raw("GET", path)
        assert headers["content-type"] == "application/json; charset=utf-8"
        e = json.loads(text)["error"]
        assert e["code"] == status
        return status, e["message"], e["type"]

    missing = (400, "Missing conversation id in path", "invalid_request_error")
    gone = (404, "Stream not found or expired", "not_found_error")
    offset = (400, "Invalid 'from' offset", "invalid_request_error")
    assert error("/v1/stream") == missing and error("/v1/stream?conv_id=") == missing and error("/v1/stream?from=1") == missing
    assert error("/v1/stream/never") == gone and error("/v1/stream?conv_id=never&from=x") == gone
    assert error("/v1/stream?conv_id=a%2Fb&from=x") == offset and error("/v1/stream/a/b?from=") == offset
    assert server.raw("DELETE", "/v1/stream")[0] == 400
    whole = get(server, "a/b")[2]
    assert server.raw("GET", "/v1/stream/a/b")[2] == whole  # from absent: 0
    assert get(server, "a/b", total) [:1] == (200,) and get(server, "a/b", total)[2] == b""
    assert get(server, "a/b", total + 10)[2] == b""
    assert get(server, "a/b", "12abc")[2] == whole[12:]
    assert get(server, "a/b", "-1")[2] == b""
    assert error("/v1/stream/") == missing
    assert error("/v1/stream/a%2Fb%00c") == missing and error("/v1/stream?conv_id=a%2Fb%00") == missing  # no id holds a NUL
    assert server.raw("GET", "/v1/stream?x&conv_id=a%2Fb&")[2] == whole  # other parameters, of whatever shape


def test_last_event_id_is_an_offset(server):
    whole = lab.read_answer(start(server, "ids", **{"Last-Event-ID": "0"}))[2]
    whole = re.sub(rb": keep-alive\n\n", b"", whole)
    ids = [int(n) for n in re.findall(rb"^id: (\d+)$", whole, re.M)]
    assert ids and ids[-1] == len(whole)
    for offset in ids:
        assert server.raw("GET", "/v1/stream/ids", headers={"Last-Event-ID": str(offset)})[2] == whole[offset:]


def test_answers_that_are_no_stream_can_be_fetched(server):
    status, _, whole = lab.read_answer(start(server, "w", body(stream=False)))
    status2, headers, kept = get(server, "w")
    assert (status, status2) == (200, 200) and kept == whole and headers["content-type"] == "application/json"
    status, _, whole = lab.read_answer(start(server, "bad", {"messages": 5}))
    assert status == 400 and get(server, "bad")[::2] == (400, whole)
    client = start(server, "left", body(stream=False, max_tokens=1500, ignore_eos=True))
    lab.wait_for(lambda: server.phases() == ["decode"], "the engine at work")
    client.close()
    status, _, kept = get(server, "left")  # waits for it
    assert status == 200 and json.loads(kept)["usage"]["completion_tokens"] == 1500


def test_the_example_of_the_docs(server, tmp_path):
    section = (lab.TOP / "docs/API.md").read_text().split("## Resumable streams\n", 1)[1].split("\n## ", 1)[0]
    script = re.search(r"^```sh\n(.*?)^```$", section, re.M | re.S).group(1).replace("http://127.0.0.1:8080", server.url)
    done = subprocess.run(["sh", "-euc", script], cwd=tmp_path, capture_output=True, text=True, timeout=lab.LIMIT_S)
    assert done.returncode == 0, done.stderr
    row, = json.loads(done.stdout)
    part = (tmp_path / "part").read_bytes()
    assert row["is_done"] and row["total_bytes"] == len(part) and part.endswith(b"data: [DONE]\n\n")
    assert get(server, "chat/7")[0] == 404


def test_status_metrics_and_history_know_conversations(server):
    def both_pages():
        with urllib.request.urlopen(server.url + "/metrics", timeout=lab.LIMIT_S) as f:
            page = dict(line.rsplit(" ", 1) for line in f.read().decode().splitlines() if line.startswith("farsight_streams_"))
        status = server.status()["streams"]
        kinds = {k: ("" if k in ("live", "completed", "readers", "bytes") else "_total") for k in status}
        return {f"farsight_streams_{k}{kinds[k]}": v for k, v in status.items()} == {k: float(v) for k, v in page.items()} and status

    def figures():
        """What both say; readers may come to their end between the two."""
        return lab.wait_for(both_pages, "the same figures on both pages")

    assert set(figures().values()) == {0}
    client = start(server, "f", body(max_tokens=1_000_000, ignore_eos=True))
    lab.wait_for(lambda: server.phases() == ["decode"], "the engine at work")
    assert server.live()[0]["conversation"]
    now = lab.wait_for(lambda: (s := server.status()["streams"])["bytes"] > 0 and s, "the first bytes")
    assert (now["live"], now["completed"], now["readers"], now["opened"]) == (1, 0, 1, 1)
    lab.read_answer(start(server, "f"))
    lab.read_answer(client)
    server.chat(lab.user("Hello!"), max_tokens=1)
    lab.read_answer(start(server, "g"))
    server.raw("DELETE", "/v1/stream/g")
    then = lab.wait_for(lambda: (f := figures())["readers"] == 0 and f, "the end of all readers")
    assert {k: then[k] for k in ("live", "completed", "opened", "replaced", "deleted", "expired", "refused", "dropped_bytes")} == {
        "live": 0, "completed": 1, "opened": 3, "replaced": 1, "deleted": 1, "expired": 0, "refused": 0, "dropped_bytes": 0}
    assert [r["conversation"] for r in server.history()] == [True, False, True, True]


def test_lookup(server):
    for name in ("x", "x::mini", "xy"):
        lab.read_answer(start(server, name))
    rows = lookup(server, "x", "nothing", 5, "", "x")
    assert sorted(r["conversation_id"] for r in rows) == ["x", "x", "x::mini", "x::mini"]
    assert all(r["is_done"] and r["completed_at"] >= r["started_at"] > 0 and r["total_bytes"] > 0 for r in rows)
    assert lookup(server) == [] and server.request("/v1/streams/lookup", {"ids": 1}) == (200, [])
    status, reply = server.request("/v1/streams/lookup", raw=b"nonsense")
    assert status == 400 and reply["error"]["message"].startswith("invalid body: ")
    assert server.request("/v1/streams")[0] == 404  # nothing lists the ids of others
    for much in ({"conversation_ids": ["x"] * 1025}, {"conversation_ids": ["x" * 600_000]}, {"conversation_ids": [], "x": [{}] * 10_000}):  # it is answered on the server's loop
        status, reply = server.request("/v1/streams/lookup", much)
        assert status == 400 and reply["error"]["message"].startswith("invalid body: ")


def test_a_conversation_belongs_to_its_key(servers):
    server = servers(api_key=["anna", "bert"])
    anna, bert = {"Authorization": "Bearer anna"}, {"x-api-key": "bert"}
    lab.read_answer(start(server, "k", **anna))
    assert get(server, "k", **anna)[0] == 200
    assert get(server, "k", **bert)[0] == 404
    assert server.raw("DELETE", "/v1/stream/k", headers=bert)[0] == 204
    assert get(server, "k", **anna)[0] == 200
    assert get(server, "k")[0] == 401
    both = {"Authorization": "Bearer nonsense"}  # as clients send that must send something: the key that counts is the right one
    assert get(server, "k", **both, **{"x-api-key": "anna"})[0] == 200
    assert get(server, "k", **both, **bert)[0] == 404


def test_conversations_in_a_storm(servers):
    """Clients that ask, read, leave, replace and delete a few conversations at random: whoever stays gets an answer or is told why not."""
    server = servers(streams={"ring_kb": 64, "total_mb": 1}, max_connections=1024)
    until = time.monotonic() + 5
    wrong = []

    def check(sock, good):
        status, _, text = lab.read_answer(sock)
        if status not in good or not text or (status == 200 and not text.endswith((b"\n\n", b"}"))):
            wrong.append((status, text[-300:]))

    def visit(seed):
        rng = random.Random(seed)
        while time.monotonic() < until:
            name, what = f"c{rng.randrange(5)}", rng.random()
            if what < .4:
                request = body(max_tokens=rng.choice([1, 20, 200]), ignore_eos=True, stream=rng.random() < .7)
                sock, good = start(server, name, request), (200, 499)
            elif what < .8:
                sock, good = server.send_raw("GET", f"/v1/stream/{name}"), (200, 404, 499)
            else:
                server.raw("DELETE", f"/v1/stream/{name}")
                continue
            if rng.random() < .4:
                sock.close()
            else:
                check(sock, good)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(visit, range(8)))
    assert not wrong, wrong[:3]
    lab.wait_for(lambda: not server.live() and server.status()["streams"]["readers"] == 0, "the end of everything")
    assert server.ask("Hello!")


def test_without_room_the_answer_still_comes(servers):
    server = servers(context=65536, streams={"max": 1})
    first = lab.SlowReader(start(server, "one", body(max_tokens=5000, ignore_eos=True), Connection="close"))
    first.hurry.set()
    lab.wait_for(lambda: server.phases() == ["decode"], "the engine at work")
    status, headers, text = lab.read_answer(start(server, "two"))
    assert status == 200 and headers["x-conversation-resumable"] == "no" and text.endswith(b"data: [DONE]\n\n")
    assert b"data: [DONE]" in first.rest()


def test_shutdown_ends_sessions_and_readers(servers):
    server = servers(context=65536, drain_s=0)
    client = start(server, "s", body(max_tokens=1_000_000, ignore_eos=True))
    lab.wait_for(lambda: server.phases() == ["decode"], "the engine at work")
    other = start(server, "o")  # waits for the engine
    lab.wait_for(lambda: "queue" in server.phases(), "the second in the queue")
    readers = [server.send_raw("GET", f"/v1/stream/{name}?from=0") for name in "sso"]
    lab.wait_for(lambda: server.status()["streams"]["readers"] == 5, "them all")
    server.stop()
    for who in (client, *readers, other):
        status, _, text = lab.read_answer(who)
        assert b"the server is shutting down" in text and (status == 503 or text.endswith(b"data: [DONE]\n\n"))


@pytest.mark.parametrize("path,request_body,end", [
    ("/v1/completions", {"prompt": "Hello", "stream": True, "max_tokens": 5}, b"data: [DONE]\n\n"),
    ("/v1/responses", {"input": "Hello!", "stream": True}, b"\n\n"),
    ("/v1/messages", {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 20, "stream": True}, b"\n\n")])
def test_other_apis(server, path, request_body, end):
    client = server.send(path, request_body, **{"X-Conversation-Id": "api"})
    whole = re.sub(rb": keep-alive\n\n", b"", lab.read_answer(client)[2])
    assert whole.endswith(end) and get(server, "api")[2] == whole
