"""/status, /v1/history and /metrics: what they show while requests run, and of how they ended. The encoder is one that does as it is told."""
import concurrent.futures
import urllib.request

import pytest

import lab
from lab import wait_for

PICTURE = (lab.TOP / "tests/data/pictures/two-shapes.png").read_bytes()
CHAT = "/v1/chat/completions"
PHASES = ["accept", "parse", "fetch", "encode", "queue", "prefill", "decode"]
HELLO = {"role": "user", "content": "Hello"}


@pytest.fixture
def slow_host(host, tmp_path):
    """A vision host whose encoder does what the words behind a picture say."""
    host.configure(encoder=str(lab.FAKE_ENCODER), extended=True, encoder_args=["--embd", "192", "--rows", "6x6"])
    return host.start()


def with_picture(words="", **more):
    return {"messages": [lab.user("What is this?", lab.png_with(PICTURE, words))], "max_tokens": 4, **more}


def metrics(server):
    """{(name, label values…): value}, read by Prometheus' own parser."""
    parser = pytest.importorskip("prometheus_client.parser", reason="the prometheus_client package is not installed")
    with urllib.request.urlopen(server.url + "/metrics", timeout=lab.LIMIT_S) as f:
        assert f.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = f.read().decode()
    families = list(parser.text_string_to_metric_families(text))
    assert all(f.documentation and f.type in ("counter", "gauge", "histogram") for f in families)
    return {(s.name, *s.labels.values()): s.value for f in families for s in f.samples}


def check_row(row):
    """What holds for every row: the phases are all there and make up the whole time."""
    assert list(row["phases_ms"]) == PHASES
    assert sum(row["phases_ms"].values()) == pytest.approx(row["duration_ms"], abs=0.01)
    assert row["phase"] in PHASES and row["began"] > 1.7e9


def passed(row):
    return [p for p in PHASES if row["phases_ms"][p] > 0]


def test_a_row_for_every_end(slow_host, servers):
    server = servers(slow_host).wait_for_eyes()
    status, text = server.chat(HELLO, max_tokens=3)
    assert status == 200
    server.chat({"role": "robot", "content": "x"})
    client = server.send(CHAT, with_picture("delay=600000"))
    wait_for(lambda: server.phases() == ["encode"], "the encode")
    client.close()
    wait_for(lambda: len(server.history()) == 3, "the end of the request whose client left")
    status, seen = server.request(CHAT, with_picture())
    assert status == 200
    picture, left, refused, short = server.history()
    for row in (picture, left, refused, short):
        check_row(row)
        assert row["api"] == "chat.completions"
    assert (short["id"], short["finish"], short["phase"], short["status"]) == (text["id"], "length", "decode", 200)
    assert passed(short) == ["accept", "parse", "queue", "prefill", "decode"] and "error" not in short and "cause" not in short
    assert (short["prompt_tokens"], short["completion_tokens"], short["max_tokens"]) == (text["usage"]["prompt_tokens"], 3, 3)
    assert (refused["finish"], refused["phase"], refused["status"]) == ("refused", "parse", 400)
    assert "messages[0].role" in refused["error"] and passed(refused) == ["accept", "parse"]
    assert (left["finish"], left["phase"], left["cause"], left["pictures"]) == ("cancel", "encode", "client", 1)
    assert passed(left)[-1] == "encode" and left["completion_tokens"] == 0
    assert (picture["id"], picture["phase"], picture["pictures"]) == (seen["id"], "decode", 1)
    assert {"encode", "queue", "prefill", "decode"} <= set(passed(picture))
    totals = server.status()["totals"]
    assert totals["requests"] == 4 and totals["pictures"] == 2
    assert totals["finish"] == {**dict.fromkeys(totals["finish"], 0), "length": totals["finish"]["length"], "stop": totals["finish"]["stop"],
                                "cancel": 1, "refused": 1} and totals["finish"]["length"] + totals["finish"]["stop"] == 2


def test_a_body_makes_room_once_its_prompt_is_made(slow_host, servers):
    """While the engine answers one, another picture comes in; both together are more than bodies may take."""
    server = servers(slow_host, context=65536, max_body_mb=1, max_bodies_mb=1).wait_for_eyes()
    large = lambda salt: with_picture("", max_tokens=60000, ignore_eos=True, messages=[lab.user("?", lab.png_with(PICTURE, "", salt * 600_000))])
    first = server.send(CHAT, large("a"))
    wait_for(lambda: server.phases() == ["decode"], "the answer")
    second = server.send(CHAT, large("b"))
    wait_for(lambda: server.phases() == ["decode", "queue"], "the second request")
    first.close()
    second.close()
    wait_for(lambda: not server.live(), "the end of both")
    assert server.status()["turned_away"] == {}


def test_what_is_turned_away_is_counted_and_in_no_row(servers):
    server = servers(max_body_mb=1)
    for method, path, data, want in [("POST", CHAT, b"x" * (2 << 20), 413), ("GET", "/nothing", b"", 404), ("GET", CHAT, b"", 405)]:
        assert server.raw(method, path, data)[0] == want
    assert server.raw("GET", "/health", headers={"Expect": "the moon"})[0] == 417
    assert server.status()["turned_away"] == {"413": 1, "404": 1, "405": 1, "417": 1}
    assert metrics(server)["farsight_turned_away_total", "413"] == 1
    assert server.history() == [] and server.status()["totals"]["requests"] == 0


def test_limits_of_the_history(servers):
    server = servers()
    assert server.request("/v1/history") == (200, {"object": "list", "data": []})
    for i in range(3):
        server.chat({"role": f"robot {i}", "content": "x"})
    rows = server.request("/v1/history?limit=2")[1]["data"]
    assert [("robot 2" in rows[0]["error"]), ("robot 1" in rows[1]["error"]), len(rows)] == [True, True, 2]
    assert len(server.request("/v1/history?x=1&limit=9999")[1]["data"]) == 3
    for bad in ("limit=0", "limit=", "limit=-1", "limit=two", "limit=2x"):
        status, reply = server.request("/v1/history?" + bad)
        assert (status, reply["error"]["param"]) == (400, "limit"), bad


def test_status_shows_a_picture_and_who_has_the_turn(slow_host, servers):
    server = servers(slow_host, context=65536).wait_for_eyes()
    host, = server.status()["vision"]["hosts"]
    assert host["state"] == "up" and host["device"] == "fake" and host["outstanding"] == 0
    waits = server.send(CHAT, with_picture("delay=600000"))
    wait_for(lambda: server.phases() == ["encode"], "the encode")
    status = server.status()
    row, = status["requests"]
    assert status["busy"] and status["turn"] == {"held": False, "holder": None, "waiting": 0, "depth": 64, "entries": 0}
    assert row["pictures"] == 1 and row["age_s"] >= row["phase_age_s"] >= 0 and not row["holds_turn"]
    assert wait_for(lambda: server.status()["vision"]["hosts"][0]["outstanding"] == 1, "the encode on the host")

    runs = server.send("/v1/messages", {"messages": [HELLO], "max_tokens": 1000000, "ignore_eos": True, "stream": True})
    wait_for(lambda: "decode" in server.phases(), "the answer")
    behind = server.send(CHAT, {"messages": [HELLO]})
    status = wait_for(lambda: (s := server.status())["turn"]["waiting"] == 1 and s, "one that waits")
    rows = {r["phase"]: r for r in status["requests"]}
    assert set(rows) == {"encode", "decode", "queue"}
    assert status["turn"]["held"] and status["turn"]["entries"] == 1
    assert status["turn"]["holder"] == {"id": rows["decode"]["id"], "api": "messages"} and rows["decode"]["holds_turn"]
    assert rows["decode"]["stream"] and rows["decode"]["prompt_done"] == rows["decode"]["prompt_tokens"] > 0
    n = rows["decode"]["completion_tokens"]
    more = wait_for(lambda: next((r for r in server.live() if r["phase"] == "decode" and r["completion_tokens"] > n), None), "more tokens")
    assert more["tokens_per_s"] > 0 and more["tokens_per_s_mean"] > 0
    got = metrics(server)
    assert got["farsight_queue_length",] == 1 and got["farsight_turn_held",] == 1
    assert [got["farsight_requests_live", p] for p in PHASES] == [0, 0, 0, 1, 1, 0, 1]
    behind.close()  # first and by itself: it must not get the turn of the one that runs
    wait_for(lambda: len(server.live()) == 2, "the end of the one that waits")
    runs.close()
    waits.close()
    wait_for(lambda: not server.live(), "the end of all three")
    assert {r["phase"] for r in server.history()} == {"encode", "decode", "queue"}
    assert {r["finish"] for r in server.history()} == {"cancel"}
    assert not server.status()["busy"] and not server.status()["turn"]["held"]


def test_metrics_count_requests_and_nothing_else(slow_host, servers):
    """S04."""
    server = servers(slow_host).wait_for_eyes()
    before = metrics(server)
    for path in ("/health", "/status", "/v1/models", "/v1/history", "/metrics"):
        for _ in range(5):
            urllib.request.urlopen(server.url + path, timeout=lab.LIMIT_S).read()
    still = metrics(server)
    counts = [k for k in before if k[0].startswith(("farsight_phase", "farsight_request", "farsight_first", "farsight_pict", "farsight_prompt"))]
    assert counts and all(before[k] == still[k] == 0 for k in counts)

    assert server.request(CHAT, with_picture())[0] == 200
    server.chat({"role": "robot", "content": "x"})
    row = server.history()[1]
    got = metrics(server)
    assert [got["farsight_phase_seconds_count", p] for p in PHASES] == [2, 2, 0, 1, 1, 1, 1]
    assert got["farsight_request_seconds_count",] == 2 and got["farsight_first_token_seconds_count",] == 1
    assert got["farsight_phase_seconds_sum", "encode"] == pytest.approx(row["phases_ms"]["encode"] / 1e3, abs=1e-5)
    assert sum(got["farsight_phase_seconds_sum", p] for p in PHASES) == pytest.approx(got["farsight_request_seconds_sum",], abs=1e-5)
    for p in PHASES:
        buckets = [v for k, v in got.items() if k[:2] == ("farsight_phase_seconds_bucket", p)]
        assert len(buckets) == 23 and buckets == sorted(buckets) and buckets[-1] == got["farsight_phase_seconds_count", p]
    assert got["farsight_requests_total", "refused"] == 1 and got["farsight_pictures_total",] == 1
    assert got["farsight_prompt_tokens_total",] == row["prompt_tokens"] and got["farsight_completion_tokens_total",] == row["completion_tokens"]
    name = server.eyes()["hosts"][0]["host"]
    assert got["farsight_host_up", name] == 1 and got["farsight_host_encodes_total", name] == 1 and got["farsight_host_errors_total", name] == 0
    assert got["farsight_host_sent_bytes_total", name] > len(PICTURE) and got["farsight_host_outstanding", name] == 0
    for kind in ("queue", "transfer", "encode"):
        buckets = [v for k, v in got.items() if k[:2] == (f"farsight_host_{kind}_seconds_bucket", name)]
        assert len(buckets) == 18 and buckets == sorted(buckets) and buckets[-1] == got[f"farsight_host_{kind}_seconds_count", name] == 1
        assert server.status()["vision"]["hosts"][0][f"{kind}_ms"] == pytest.approx(got[f"farsight_host_{kind}_seconds_sum", name] * 1e3)
    assert ("farsight_host_vram_free_bytes", name) not in got  # it has no GPU
    assert server.status()["vision"]["hosts"][0]["vram_free_mb"] is None
    wait_for(lambda: metrics(server)["farsight_host_received_bytes_total", name] > 36 * 192 * 2, "the count of the bytes that came")

    assert server.request(CHAT, with_picture())[0] == 200  # the same picture: its rows are there
    got = metrics(server)
    assert (got["farsight_cache_hits_total",], got["farsight_cache_misses_total",], got["farsight_encodes_total",]) == (1, 1, 1)
    assert got["farsight_pictures_cached_total",] == 1 and server.history()[0]["pictures_cached"] == 1
    cache = server.status()["cache"]
    assert got["farsight_cache_bytes",] == cache["bytes"] > 36 * 192 * 4 and cache["entries"] == 1 and cache["limit_bytes"] > cache["bytes"]


def test_a_host_that_is_not_there(servers):
    """It is told with its cause, and its label is quoted as Prometheus has it."""
    name = 'a"b\\c@host.invalid'
    server = servers(vision={"remote": True, "hosts": [{"host": name, "ssh_config": "/dev/null"}]})
    wait_for(lambda: server.status()["vision"]["hosts"][0]["state"] == "down", "the failure")
    host, = server.status()["vision"]["hosts"]
    assert host["cause"] and host["state_age_s"] >= 0 and host["host"].startswith('a"b\\c@')
    got = metrics(server)
    assert got["farsight_host_up", host["host"]] == 0 and got["farsight_host_encode_seconds_count", host["host"]] == 0
    assert host["queue_ms"] is host["transfer_ms"] is host["encode_ms"] is None


def test_the_pages_do_not_wait_for_anything(slow_host, servers):
    """S11: with every worker and the engine taken, they are answered."""
    server = servers(slow_host, workers=3, context=65536).wait_for_eyes()
    clients = [server.send(CHAT, with_picture(f"delay=60000{i}")) for i in range(2)]
    clients.append(server.send(CHAT, {"messages": [HELLO], "max_tokens": 1000000, "ignore_eos": True}))
    wait_for(lambda: server.phases() == ["decode", "encode", "encode"], "three requests")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for path in ("/status", "/v1/history", "/health", "/v1/models"):
            assert {status for status, _ in pool.map(lambda _: server.request(path), range(8))} == {200}
    assert metrics(server)["farsight_requests_live", "encode"] == 2
    status, reply = server.request("/v1/messages", {"messages": [HELLO], "max_tokens": 1})
    assert (status, reply["error"]["type"], reply["error"]["code"]) == (503, "overloaded_error", "queue_full")
    assert server.history()[0]["finish"] == "refused" and server.history()[0]["phase"] == "accept"
    for client in clients:
        client.close()
    wait_for(lambda: not server.live(), "their end")


def test_a_model_whose_name_is_no_text(servers, tmp_path):
    """Its name stands in every answer; bytes that no JSON can hold must not end them all."""
    model = tmp_path / "odd.gguf"
    model.write_bytes(lab.TEXT_MODEL.read_bytes().replace(b"Farsight mini", b"\xff\xfe\"\nsight\x00\xc3(n", 1))
    server = servers(model=str(model))
    status, reply = server.chat(HELLO, max_tokens=2)
    assert status == 200 and reply["model"] == server.status()["engine"]["model"] == '??"?sight??(n'
    assert server.request("/v1/models")[0] == 200
