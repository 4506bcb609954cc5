"""Anthropic's Messages API, asked by its official client, unmodified: the real server, a real vision host, the bundled model."""
import base64
import json
import os
import pathlib
import re
import signal
import urllib.request

import pytest

import lab
from lab import TOP

anthropic = pytest.importorskip("anthropic", reason="the anthropic package is not installed")

PICTURES = TOP / "tests/data/pictures"
CASES = TOP / "tests/data/cases"
QUESTIONS = json.loads((PICTURES / "questions.json").read_text())


def picture(path):
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(pathlib.Path(path).read_bytes()).decode()}}


def user(text, *pictures):
    return {"role": "user", "content": [picture(p) for p in pictures] + [{"type": "text", "text": text}]}


def plain(text):
    return text.strip().rstrip(".").lower()


@pytest.fixture(scope="module")
def eyes(tmp_path_factory):
    """(server, client) with a vision host behind them."""
    if lab.SSHD is None:
        pytest.skip("no sshd on this machine")
    tmp = tmp_path_factory.mktemp("anthropic")
    host = lab.VisionHost(tmp / "host").start()
    server = lab.Server(tmp / "server", [host], name="mini")
    try:
        server.wait_for_eyes()
        yield server, anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    finally:
        server.stop()
        host.stop()


@pytest.fixture
def client(eyes):
    return eyes[1]


def ask(client, *messages, **params):
    return client.messages.create(**{"model": "mini", "max_tokens": 64, "messages": list(messages), **params})


def the_text(message):
    block, = message.content
    assert block.type == "text"
    return block.text


@pytest.mark.parametrize("q", QUESTIONS, ids=lambda q: q["question"])
def test_pictures_are_answered_as_by_the_other_api(eyes, q):
    server, client = eyes
    message = ask(client, user(q["question"], PICTURES / q["picture"]))
    assert (message.type, message.role, message.model, message.stop_reason, message.stop_sequence) == (
        "message", "assistant", "mini", "end_turn", None)
    assert message.id.startswith("msg_") and message._request_id == message.id
    assert the_text(message) == server.ask(q["question"], PICTURES / q["picture"])
    assert plain(the_text(message)) == plain(q["answer"])


def test_usage_counts_what_was_reused_apart(eyes):
    server, client = eyes
    message = {"role": "user", "content": "What is the weather like on the far side of the hill?"}
    first = ask(client, message, max_tokens=4)
    again = ask(client, message, max_tokens=4)
    whole = client.messages.count_tokens(model="mini", messages=[message]).input_tokens
    for u in (first.usage, again.usage):
        assert u.input_tokens + u.cache_read_input_tokens + u.cache_creation_input_tokens == whole
    assert again.usage.cache_read_input_tokens == whole - 1 and again.usage.input_tokens == 1
    assert again.usage.output_tokens == first.usage.output_tokens > 0


def test_a_stream_is_the_whole_answer_in_pieces(client):
    q = QUESTIONS[0]
    asked = user(q["question"], PICTURES / q["picture"])
    whole = ask(client, asked)
    with client.messages.stream(model="mini", max_tokens=64, messages=[asked]) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == the_text(whole) == the_text(final)
    assert final.stop_reason == whole.stop_reason and final.role == "assistant" and final.model == "mini"
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.usage.input_tokens + final.usage.cache_read_input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


def test_events_come_in_the_documented_order(client):
    q = QUESTIONS[0]
    events = list(ask(client, user(q["question"], PICTURES / q["picture"]), stream=True))
    kinds = [e.type for e in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    start, delta = events[0].message, events[-2]
    assert start.content == [] and start.stop_reason is None and start.usage.output_tokens == 0
    assert start.usage.input_tokens + start.usage.cache_read_input_tokens > 0
    assert (delta.usage.input_tokens, delta.usage.cache_read_input_tokens) == (start.usage.input_tokens, start.usage.cache_read_input_tokens)
    assert delta.delta.stop_reason == "end_turn" and delta.usage.output_tokens > 0
    blocks = [e for e in events if e.type.startswith("content_block")]
    assert [b.type for b in blocks[:1] + blocks[-1:]] == ["content_block_start", "content_block_stop"]
    assert {b.index for b in blocks} == {0} and {b.type for b in blocks[1:-1]} == {"content_block_delta"}


def raw_stream(server, body):
    """[(event, data)] as they are on the wire; the official client hides some."""
    data = json.dumps({"max_tokens": 16, "stream": True, **body}).encode()
    with urllib.request.urlopen(urllib.request.Request(server.url + "/v1/messages", data), timeout=lab.LIMIT_S) as f:
        assert f.headers["Content-Type"].startswith("text/event-stream") and f.headers["request-id"].startswith("msg_")
        events = [e for e in f.read().decode().split("\n\n") if e and not e.startswith(":")]
    pairs = [re.fullmatch(r"event: (\w+)\ndata: (.*)", e) for e in events]
    return [(m[1], json.loads(m[2])) for m in pairs]


def test_the_wire_names_every_event(eyes):
    events = raw_stream(eyes[0], {"messages": [{"role": "user", "content": "Hello"}]})
    assert all(name == data["type"] for name, data in events)
    assert ("ping", {"type": "ping"}) in events


def test_ends_have_their_reasons(client):
    hello = {"role": "user", "content": "What colour is a clear sky?"}
    whole = ask(client, hello, max_tokens=200)
    short = ask(client, hello, max_tokens=1)
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 1)
    stop = the_text(whole)[1:3]
    stopped = ask(client, hello, max_tokens=200, stop_sequences=["never seen", stop])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert "".join(b.text for b in stopped.content) == the_text(whole).split(stop)[0]
    with client.messages.stream(model="mini", max_tokens=200, messages=[hello], stop_sequences=[stop]) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", stop)


TOOL = {"name": "look", "description": "Takes a picture with the camera.", "input_schema": {"type": "object", "properties": {"where": {"type": "string"}}}}


def with_result(content, text="What do you see?"):
    return [{"role": "user", "content": "Look at the desk."},
            {"role": "assistant", "content": [{"type": "text", "text": "I look."}, {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"where": "desk"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": content}, {"type": "text", "text": text}]}]


def encodes(server):
    return server.status()["vision"]["hosts"][0]["encodes"]


def test_pictures_in_results_of_tools(eyes):
    """O19: encoded once, and at its place in that turn."""
    server, client = eyes
    before = encodes(server)
    q = QUESTIONS[-1]
    asked = with_result([{"type": "text", "text": "taken"}, picture(CASES / "plain.png"), picture(PICTURES / q["picture"])], q["question"])
    message = ask(client, *asked, tools=[TOOL])
    assert message.stop_reason in ("end_turn", "max_tokens", "tool_use")
    row = server.history()[0]
    assert (row["id"], row["api"], row["pictures"]) == (message.id, "messages", 2) and row["finish"] in ("stop", "length")
    assert encodes(server) <= before + 2
    tokens = client.messages.count_tokens(model="mini", messages=asked, tools=[TOOL]).input_tokens
    without = client.messages.count_tokens(model="mini", messages=with_result([{"type": "text", "text": "taken"}], q["question"]), tools=[TOOL]).input_tokens
    assert tokens - without >= 8  # the rows of both


def test_tools_are_counted_and_called_when_they_must_be(client):
    hello = [{"role": "user", "content": "Look at the desk."}]
    with_tool = client.messages.count_tokens(model="mini", messages=hello, tools=[TOOL]).input_tokens
    assert with_tool > client.messages.count_tokens(model="mini", messages=hello).input_tokens
    # The bundled model does not know how to call; what it is made to begin comes out as text when it is no call.
    message = ask(client, *hello, tools=[TOOL], tool_choice={"type": "tool", "name": "look"}, max_tokens=8)
    if message.stop_reason == "tool_use":
        assert message.content[-1].name == "look"
    else:
        assert message.content[0].text.lstrip().startswith("<tool_call>")


@pytest.mark.parametrize("change, part", [
    ({"max_tokens": 0}, "max_tokens"), ({"extra_body": {"temperature": 2}}, "temperature"), ({"messages": []}, "messages"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.type"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "("}]}, "messages[1]"),
])
def test_refusals_are_the_client_s_own_exceptions(client, change, part):
    with pytest.raises(anthropic.BadRequestError) as e:
        ask(client, *change.pop("messages", [{"role": "user", "content": "x"}]), **change)
    assert e.value.body["type"] == "error" and e.value.body["error"]["type"] == "invalid_request_error" == e.value.type
    assert f'"{part}"' in e.value.body["error"]["message"] and e.value.body["error"]["param"] == part
    assert e.value.request_id.startswith("msg_")
    assert ask(client, {"role": "user", "content": "Hello"}).role == "assistant"


def test_without_max_tokens_nothing_is_made(eyes):
    server, _ = eyes
    status, reply = server.request("/v1/messages", {"messages": [{"role": "user", "content": "x"}]})
    assert (status, reply["type"], reply["error"]["param"]) == (400, "error", "max_tokens")
    assert server.request("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x"}]})[0] == 200
    status, reply = server.request("/v1/messages", raw=b"{")
    assert (status, reply["error"]["code"]) == (400, "invalid_json")


def test_bad_pictures_are_named(client):
    with pytest.raises(anthropic.BadRequestError) as e:
        ask(client, user("x", CASES / "truncated.png"))
    assert e.value.body["error"]["code"] == "picture_unreadable"
    assert e.value.body["error"]["param"] == "messages[0].content[0].source.data"
    with pytest.raises(anthropic.BadRequestError) as e:
        client.messages.count_tokens(model="mini", messages=[user("x", CASES / "truncated.png")])
    assert e.value.body["error"]["code"] == "picture_unreadable"


def test_without_eyes_the_cause_is_told(servers):
    server = servers()
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    with pytest.raises(anthropic.BadRequestError) as e:
        ask(client, user("x", CASES / "plain.png"))
    assert e.value.body["error"]["code"] == "vision_unavailable"
    assert ask(client, {"role": "user", "content": "Hello"}).role == "assistant"


def test_pictures_are_counted(client):
    text = client.messages.count_tokens(model="mini", messages=[user("x")]).input_tokens
    both = client.messages.count_tokens(model="mini", messages=[user("x", CASES / "plain.png")], system="Be brief.").input_tokens
    assert both > text + 4
    message = ask(client, user("x", CASES / "plain.png"), system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}])
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == both


def test_what_goes_wrong_after_the_headers_is_an_error_event(host, servers):
    """The stream began by itself while the encoder worked; what comes then is an event of this API."""
    server = servers(host.start(), timeout_s=7).wait_for_eyes()
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    os.kill(lab.wait_for(host.encoder_pid, "the encoder"), signal.SIGSTOP)
    with pytest.raises(anthropic.APIStatusError) as e:
        list(ask(client, user("x", CASES / "plain.png"), stream=True))
    assert e.value.status_code == 200 and e.value.body["type"] == "error"
    assert (e.value.body["error"]["type"], e.value.body["error"]["code"]) == ("timeout_error", "timeout")


def examples():
    """{path: body} of the requests that docs/API.md shows for this API: the first block of JSON of each section."""
    found = {}
    for section in re.split(r"^## ", (TOP / "docs/API.md").read_text(), flags=re.M):
        path = re.match(r"POST (/v1/messages\S*)", section)
        if path:
            found[path[1]] = json.loads(section.split("```json\n")[1].split("```")[0])
    return found


def test_the_examples_of_the_documentation(eyes):
    bodies = examples()
    status, reply = eyes[0].request("/v1/messages", bodies["/v1/messages"])
    assert status == 200 and reply["type"] == "message" and reply["usage"]["input_tokens"] > 0, reply
    status, reply = eyes[0].request("/v1/messages/count_tokens", bodies["/v1/messages/count_tokens"])
    assert (status, list(reply)) == (200, ["input_tokens"]) and reply["input_tokens"] > 0
