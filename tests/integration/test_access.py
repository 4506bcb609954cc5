"""Who may ask and how much: keys, names and origins, sizes, strictness, through the real server and its config. The rules themselves are tested
one by one in tests/unit/test_http_head.c and test_http_limits.c."""
import http.client
import json
import re
import socket
import subprocess

import pytest

import lab

CHAT = "/v1/chat/completions"
HELLO = {"messages": [lab.user("Hello!")], "max_tokens": 4}
MIB = 1 << 20


def ask(server, method, path, body=None, chunks=None, **headers):
    """(status, headers, parsed JSON or None), on a connection of its own."""
    c = http.client.HTTPConnection(*server.address(), timeout=lab.LIMIT_S)
    try:
        if chunks is None:
            c.request(method, path, body, headers)
        else:
            c.request(method, path, iter(chunks), {**headers, "Transfer-Encoding": "chunked"}, encode_chunked=True)
        r = c.getresponse()
        text = r.read()
        return r.status, {k.lower(): v for k, v in r.getheaders()}, json.loads(text) if text else None
    finally:
        c.close()


def read_all(client):
    """What comes to the end, which must be an orderly one."""
    client.settimeout(lab.LIMIT_S)
    with client:
        return b"".join(iter(lambda: client.recv(1 << 16), b""))


def chat(server, **headers):
    return ask(server, "POST", CHAT, json.dumps(HELLO), **headers)


def start_fails(tmp_path, **config):
    """What a server that does not start says."""
    path = tmp_path / "refused.json"
    path.write_text(json.dumps({"model": str(lab.TEXT_MODEL), "listen": "127.0.0.1:0", **config}))
    p = subprocess.run([lab.SERVER, "--config", path], capture_output=True, text=True, timeout=lab.LIMIT_S)
    assert p.returncode == 1
    return p.stderr.splitlines()[-1]


def test_a_key_is_wanted_everywhere_but_for_health(servers):
    server = servers(api_key=["one", "two"])
    for method, path in ("POST", CHAT), ("POST", "/v1/messages"), ("GET", "/v1/models"), ("GET", "/status"), ("GET", "/metrics"), \
            ("DELETE", "/v1/stream/x"), ("GET", "/nothing"):
        for headers in {}, {"Authorization": "Bearer three"}, {"x-api-key": "on"}:
            status, got, reply = ask(server, method, path, **headers)
            assert status == 401 and got["www-authenticate"] == "Bearer"
            assert reply["error"]["type"] == "authentication_error"
            assert (reply.get("type") == "error") == path.startswith("/v1/messages")  # in the API's own envelope
    assert ask(server, "GET", "/health")[0] == 200
    assert ask(server, "OPTIONS", CHAT)[0] == 204
    assert chat(server, Authorization="Bearer one")[0] == 200
    assert chat(server, **{"x-api-key": "two"})[0] == 200


def test_the_official_clients_bring_their_key(servers):
    openai, anthropic = pytest.importorskip("openai"), pytest.importorskip("anthropic")
    server = servers(api_key="secret")
    say = {"model": "any", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
    ours = openai.OpenAI(base_url=server.url + "/v1", api_key="secret", max_retries=0)
    assert ours.chat.completions.create(**say).choices
    with pytest.raises(openai.AuthenticationError) as e:
        openai.OpenAI(base_url=server.url + "/v1", api_key="guess", max_retries=0).chat.completions.create(**say)
    assert e.value.code == "invalid_api_key"
    assert anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0).messages.create(**say).content
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=server.url, api_key="guess", max_retries=0).messages.create(**say)


def test_web_pages_are_kept_out_without_a_key(servers):
    server = servers(allowed_hosts="mainpc.lan", cors_origins=["https://app.example"])
    port = server.address()[1]
    for host in "127.0.0.1", f"localhost:{port}", "mainpc.lan":
        assert chat(server, Host=host)[0] == 200
    for method, path in ("POST", CHAT), ("GET", "/v1/models"), ("GET", "/health"), ("OPTIONS", CHAT):
        status, _, reply = ask(server, method, path, Host="evil.example")
        assert (status, reply["error"]["code"]) == (403, "host_not_allowed")
        assert "allowed_hosts" in reply["error"]["message"]
    for origin in f"http://127.0.0.1:{port}", "http://localhost:3000", "https://app.example":
        assert chat(server, Origin=origin)[0] == 200
    for origin in "null", "https://evil.example", "http://app.example":
        status, _, reply = chat(server, Origin=origin)
        assert (status, reply["error"]["code"]) == (403, "origin_not_allowed")
    assert ask(server, "POST", "/v1/messages", "{}", Origin="null")[2]["type"] == "error"


def test_cors_for_listed_origins_only(servers):
    server = servers(cors_origins="https://app.example")
    wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    status, headers, _ = ask(server, "OPTIONS", CHAT, Origin="https://app.example", **wanted)
    assert status == 204 and headers["access-control-allow-origin"] == "https://app.example"
    assert headers["access-control-allow-headers"] == "authorization,content-type" and "POST" in headers["access-control-allow-methods"]
    status, headers, _ = ask(server, "OPTIONS", CHAT, Origin="https://evil.example", **wanted)
    assert status == 204 and not [h for h in headers if h.startswith("access-control")]
    for status, headers, _ in chat(server, Origin="https://app.example"), ask(server, "GET", "/nothing", Origin="https://app.example"):
        assert headers["access-control-allow-origin"] == "https://app.example" and headers["vary"] == "Origin"
    assert "access-control-allow-origin" not in ask(server, "GET", "/v1/models", Origin="https://evil.example")[1]


def test_a_start_that_would_be_open_or_senseless_is_refused(tmp_path, servers):
    text = start_fails(tmp_path, listen="0.0.0.0:0")
    assert "api_key" in text and '"open_to_network_without_key": true' in text
    assert "blank" in start_fails(tmp_path, api_key="")
    assert "blank" in start_fails(tmp_path, api_key=["good", "  "])
    assert "cors_origins" in start_fails(tmp_path, cors_origins="app.example")
    assert "allowed_hosts" in start_fails(tmp_path, allowed_hosts="http://box")
    assert "max_bodies_mb" in start_fails(tmp_path, max_bodies_mb=8)
    assert chat(servers(listen="0.0.0.0:0", open_to_network_without_key=True))[0] == 200
    assert chat(servers(listen="0.0.0.0:0", api_key="k"), **{"x-api-key": "k"})[0] == 200


def padded(size):
    """The same request, as large as wanted."""
    text = json.dumps(HELLO).encode()
    return text[:-1] + b" " * (size - len(text)) + b"}"


def pieces(body):
    return [body[i:i + 65536] for i in range(0, len(body), 65536)]


def test_bodies_up_to_the_documented_limit(servers):
    server = servers(max_body_mb=32)
    assert "| `max_body_mb` | integer, 1 to 1024 | `64` |" in (lab.TOP / "docs/CONFIG.md").read_text()
    for size in MIB, 8 * MIB, 31 * MIB, 32 * MIB:
        assert ask(server, "POST", CHAT, padded(size))[0] == 200
        assert ask(server, "POST", CHAT, chunks=pieces(padded(size)))[0] == 200
    over = padded(32 * MIB + 1)
    for how in {"body": over}, {"chunks": pieces(over)}:
        try:
            status, _, reply = ask(server, "POST", CHAT, **how)
        except (BrokenPipeError, ConnectionResetError) as e:  # the client gives up sending before it reads; see below
            pytest.fail(f"the answer was lost: {e}")
        assert status == 413 and reply["error"]["code"] == "request_too_large" and str(32 * MIB) in reply["error"]["message"]
    # Before any of the body, when the client asks first.
    c = socket.create_connection(server.address())
    c.sendall(b"POST %s HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(over)))
    assert read_all(c).startswith(b"HTTP/1.1 413 ")
    assert chat(server)[0] == 200


def test_a_pipelined_request_waits_for_its_turn(servers):
    """Two requests on one connection, the second while the first generates: answered in order, nothing dies of it."""
    server = servers()
    one, two = json.dumps({**HELLO, "max_tokens": 1000, "ignore_eos": True}).encode(), json.dumps(HELLO).encode()
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\n%sContent-Length: %d\r\n\r\n"
    c = socket.create_connection(server.address())
    c.sendall(head % (CHAT.encode(), b"", len(one)) + one)
    lab.wait_for(lambda: "decode" in server.phases(), "a running answer")
    c.sendall(head % (CHAT.encode(), b"Connection: close\r\n", len(two)) + two)
    both = read_all(c)
    assert both.count(b"HTTP/1.1 200 OK") == 2
    assert [int(n) for n in re.findall(rb'"completion_tokens":\s*(\d+)', both)][0] == 1000
    assert chat(server)[0] == 200


def test_what_is_ambiguous_is_refused_in_json(servers):
    server = servers()
    for text in (b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{} ",
                 b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0x2\r\n{}\r\n0\r\n\r\n",
                 b"GET /health HTTP/1.1\nHost: localhost\n\n",
                 b"\x16\x03\x01\x00\xa5\x01\x00\x00"):
        c = socket.create_connection(server.address())
        c.sendall(text)
        head, _, reply = read_all(c).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ") and b"Connection: close" in head
        assert json.loads(reply)["error"]["type"] == "invalid_request_error"
    assert chat(server)[0] == 200


def test_slow_senders_and_crowds_are_told_so(servers):
    server = servers(read_timeout_s=5, max_connections=3)
    crowd = [socket.create_connection(server.address()) for _ in range(3)]
    for c in crowd:
        c.sendall(b"GET /health HTTP/1.1\r\nHost: local")
    status, headers, reply = lab.wait_for(lambda: next((a for a in [chat(server)] if a[0] == 503), None), "a full server")
    assert reply["error"]["code"] == "too_many_connections" and int(headers["retry-after"]) > 0
    for c in crowd:
        assert read_all(c).startswith(b"HTTP/1.1 408 ")
    assert lab.wait_for(lambda: chat(server)[0] == 200, "room for a request")
