"""The main job, end to end and real: HTTP, ssh, sshd, watchdog, encoder, vision tower, rows, language model, answer."""
import base64
import concurrent.futures
import contextlib
import http.client
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import urllib.parse

import pytest
from PIL import Image

import lab
from lab import TOP, user, wait_for

PICTURES = TOP / "tests/data/pictures"
CASES = TOP / "tests/data/cases"
QUESTIONS = json.loads((PICTURES / "questions.json").read_text())


def ask_question(server, q):
    return server.ask(q["question"], PICTURES / q["picture"]).strip().rstrip(".").lower()


def wanted(q):
    return q["answer"].strip().rstrip(".").lower()


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """question -> what an undisturbed pair of PCs answers; tests of faults want just that."""
    if lab.SSHD is None:
        pytest.skip("no sshd on this machine")
    tmp = tmp_path_factory.mktemp("truth")
    host = lab.VisionHost(tmp / "host").start()
    server = lab.Server(tmp / "server", [host])
    try:
        server.wait_for_eyes()
        yield {(q["picture"], q["question"]): ask_question(server, q) for q in QUESTIONS}
    finally:
        server.stop()
        host.stop()


def right(truth, q):
    return truth[q["picture"], q["question"]]


def test_every_shipped_question_is_answered_rightly(truth):
    assert truth == {(q["picture"], q["question"]): wanted(q) for q in QUESTIONS}


def test_reply_says_where_the_time_went(host, servers):
    server = servers(host.start(), name="mini").wait_for_eyes()
    q = QUESTIONS[0]
    status, reply = server.chat(user(q["question"], PICTURES / q["picture"]))
    assert status == 200
    assert reply["object"] == "chat.completion" and reply["model"] == "mini"
    assert reply["choices"][0]["finish_reason"] == "stop"
    usage = reply["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    picture, = reply["timings"]["pictures"]
    assert picture["host"].endswith("127.0.0.1") and picture["tokens"] > 0
    assert picture["total_ms"] >= picture["encode_ms"] > 0
    # The same question again takes the prompt from the cache, the picture's rows included.
    status, again = server.chat(user(q["question"], PICTURES / q["picture"]))
    assert again["choices"][0]["message"] == reply["choices"][0]["message"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= picture["tokens"]


def read_stream(server, body):
    url = urllib.parse.urlparse(server.url)
    c = http.client.HTTPConnection(url.hostname, url.port, timeout=lab.LIMIT_S)
    c.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    r = c.getresponse()
    assert r.status == 200 and r.getheader("Content-Type").startswith("text/event-stream")
    events = [e for e in r.read().decode().split("\n\n") if e]
    c.close()
    assert all(e.startswith("data: ") or e.startswith(":") for e in events)
    data = [e[6:] for e in events if e.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(d) for d in data[:-1]]


def test_a_stream_is_the_whole_answer_in_pieces(host, servers):
    server = servers(host.start()).wait_for_eyes()
    q = QUESTIONS[0]
    message = user(q["question"], PICTURES / q["picture"])
    chunks = read_stream(server, {"messages": [message], "stream": True, "stream_options": {"include_usage": True}})
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])
    assert text == server.ask(q["question"], PICTURES / q["picture"])
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]][-1] == "stop"
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] > 0
    assert len({c["id"] for c in chunks}) == 1


def test_models_and_health(host, servers):
    server = servers(host.start(), name="mini").wait_for_eyes()
    status, models = server.request("/v1/models")
    assert status == 200 and [m["id"] for m in models["data"]] == ["mini"]
    assert models["data"][0]["architecture"]["input_modalities"] == ["text", "image"]
    status, health = server.request("/health")
    assert (status, health["status"], health["images"]) == (200, "ok", True)
    assert server.request("/nowhere")[0] == 404
    assert server.request("/v1/chat/completions")[0] == 405


def test_data_urls_of_every_shape(host, servers):
    """O08."""
    server = servers(host.start()).wait_for_eyes()
    b64 = base64.b64encode((CASES / "plain.png").read_bytes()).decode()
    answers = {server.ask("What is in the picture?", prefix + b64)
               for prefix in ("data:image/png;charset=utf-8;base64,", "DATA:image/PNG;BASE64,", "data:;base64,", "data:text/plain;base64,")}
    assert len(answers) == 1
    status, reply = server.chat(user("x", "data:image/png,abc"))
    assert status == 400 and reply["error"]["param"] == "messages[0].content[0].image_url.url"


def variants(path, tmp):
    """The picture in each format, and turned with a tag that says so."""
    im = Image.open(path).convert("RGB")
    turned = Image.Exif()
    turned[0x112] = 6  # stored as it looks after a quarter turn to the left
    alpha = im.convert("RGBA")
    alpha.putalpha(Image.new("L", im.size, 255))
    for name, (one, options) in {
            "palette.png": (im.quantize(256), {}), "alpha.png": (alpha, {}), "one.gif": (im.quantize(256), {}), "lossless.webp": (im, {"lossless": True}),
            "lossy.webp": (im, {"quality": 95}), "one.jpg": (im, {"quality": 95, "subsampling": 0}),
            "turned.jpg": (im.transpose(Image.Transpose.ROTATE_90), {"quality": 95, "subsampling": 0, "exif": turned})}.items():
        one.save(tmp / name, **options)
        yield tmp / name


def test_each_format_is_answered_rightly(truth, host, servers, tmp_path):
    server = servers(host.start()).wait_for_eyes()
    q = next(q for q in QUESTIONS if q["picture"] == "places.png")
    for path in variants(PICTURES / q["picture"], tmp_path):
        assert server.ask(q["question"], path).strip().rstrip(".").lower() == right(truth, q), path.name


@pytest.mark.parametrize("name", ["bomb_20000.png", "bomb_header.png", "bomb_text.png"])
def test_bombs_are_refused_by_their_headers(host, servers, name):
    """O06: nothing is unpacked, nothing is sent."""
    server = servers(host.start()).wait_for_eyes()
    server.ask("What is in the picture?", CASES / "plain.png")
    sent, before = (server.status()["vision"]["hosts"][0]["bytes_up"], peak_kb(server.process.pid, forget=True))
    status, reply = server.chat(user("What is this?", CASES / name))
    assert (status, reply["error"]["code"]) == (400, "picture_too_large") and "at most" in reply["error"]["message"]
    assert server.status()["vision"]["hosts"][0]["bytes_up"] - sent < 200  # a ping at most
    assert peak_kb(server.process.pid) - before < 16 * 1024


def peak_kb(pid, forget=False):
    if forget:
        pathlib.Path(f"/proc/{pid}/clear_refs").write_text("5")
    return int(re.search(r"VmHWM:\s+(\d+)", pathlib.Path(f"/proc/{pid}/status").read_text())[1])


@pytest.mark.parametrize("name", ["truncated.jpg", "truncated.png", "bomb_20000.png", "bomb_header.png"])
def test_bad_pictures_are_refused_and_the_next_one_works(truth, host, servers, name):
    """O04, O06."""
    server = servers(host.start()).wait_for_eyes()
    pid = host.encoder_pid()
    status, reply = server.chat(user("What is this?", CASES / name))
    assert status == 400, reply
    assert reply["error"]["type"] == "invalid_request_error" and reply["error"]["code"] in ("picture_unreadable", "picture_too_large")
    q = QUESTIONS[0]
    assert ask_question(server, q) == right(truth, q)
    assert host.encoder_pid() == pid


def test_tiny_pictures_do_not_end_the_encoder(host, servers):
    """O05."""
    server = servers(host.start()).wait_for_eyes()
    pid = host.encoder_pid()
    for name in ("1x1.png", "2x1.png", "plain.png"):
        status, reply = server.chat(user("What is this?", CASES / name))
        assert status in (200, 400) and (status == 200 or reply["error"]["message"])
    assert host.encoder_pid() == pid


def test_too_many_and_too_large(host, servers):
    server = servers(host.start(), max_pictures=2, max_picture_mpx=1).wait_for_eyes()
    status, reply = server.chat(user("x", *[CASES / "plain.png"] * 3))
    assert (status, reply["error"]["code"]) == (400, "too_many_pictures")
    assert reply["error"]["param"] == "messages[0].content[2].image_url.url"
    status, reply = server.chat(user("x", CASES / "bomb_20000.png"))
    assert (status, reply["error"]["code"]) == (400, "picture_too_large")
    assert "at most" in reply["error"]["message"]


def test_bad_requests_name_the_field(servers):
    server = servers()
    status, reply = server.request("/v1/chat/completions", raw=b"{\"messages\": [")
    assert status == 400 and reply["error"]["code"] == "invalid_json"
    status, reply = server.chat({"role": "robot", "content": "x"})
    assert (status, reply["error"]["param"]) == (400, "messages[0].role")
    status, reply = server.chat({"role": "r" + "\u00e9" * 30, "content": "x"})  # quoted only in part, cut within a character
    assert (status, reply["error"]["param"]) == (400, "messages[0].role"), reply
    for words in (3000, 5000000):
        status, reply = server.chat({"role": "user", "content": "word " * words})
        assert (status, reply["error"]["code"]) == (400, "context_length_exceeded"), reply
    assert server.ask("Hello")


def test_without_eyes_pictures_are_refused_and_text_is_served(servers):
    server = servers()
    status, reply = server.chat(user("x", CASES / "plain.png"))
    assert (status, reply["error"]["code"]) == (400, "vision_unavailable")
    assert server.request("/health")[1]["images"] is False
    assert server.ask("Hello")


def test_host_absent_at_start_then_there(truth, host, servers):
    server = servers(host)
    q = QUESTIONS[0]
    message = user(q["question"], PICTURES / q["picture"])
    status, reply = server.chat(message)
    assert (status, reply["error"]["code"], reply["error"]["type"]) == (400, "vision_unavailable", "invalid_request_error")
    assert reply["error"]["message"].startswith("the image encoder is not available: ") and "127.0.0.1" in reply["error"]["message"]
    assert server.ask("Hello")
    host.start()
    server.wait_for_eyes()
    assert ask_question(server, q) == right(truth, q)


def test_host_goes_away_and_comes_back(truth, host, servers):
    server = servers(host.start()).wait_for_eyes()
    q = QUESTIONS[0]
    assert ask_question(server, q) == right(truth, q)
    host.stop_sshd()
    wait_for(lambda: not server.eyes()["available"], "the loss to be noticed")
    status, reply = server.chat(user(q["question"], PICTURES / QUESTIONS[-1]["picture"]))
    assert (status, reply["error"]["code"]) == (400, "vision_unavailable")
    assert server.ask("Hello")
    host.start()
    server.wait_for_eyes()
    assert ask_question(server, q) == right(truth, q)


def test_changed_host_key_is_refused_by_name(host, servers):
    host.make_key("host_key")  # known_hosts still holds the old one
    server = servers(host.start())
    status, reply = server.chat(user("x", CASES / "plain.png"))
    assert (status, reply["error"]["code"]) == (400, "vision_unavailable")
    assert "host key" in reply["error"]["message"].lower() and "known_hosts" in reply["error"]["message"]
    assert host.encoder_pid() is None
    assert server.ask("Hello")
    host.trust()
    server.wait_for_eyes()


def test_a_host_that_floods_stderr_is_left(host, servers):
    host.allow("yes noise >&2")
    server = servers(host.start(), vision={"dead_after_s": 2, "ping_interval_s": 1})
    wait_for(lambda: server.eyes()["hosts"][0]["state"] == "down", "the host to be given up")
    status, reply = server.chat(user("x", CASES / "plain.png"))
    assert (status, reply["error"]["code"]) == (400, "vision_unavailable")
    assert server.ask("Hello")


def test_encoder_killed_mid_picture(truth, host, servers):
    server = servers(host.start()).wait_for_eyes()
    q = QUESTIONS[0]
    pid = wait_for(host.encoder_pid, "the encoder")
    os.kill(pid, signal.SIGSTOP)  # so that the picture is surely in it when it dies
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answer = pool.submit(server.chat, user(q["question"], PICTURES / q["picture"]))
        wait_for(lambda: host.encoder()["state"] == "busy", "the encode to start")
        assert server.ask("Hello")  # text does not wait for the picture
        os.kill(pid, signal.SIGKILL)
        status, reply = answer.result(lab.LIMIT_S)
    assert status in (200, 400), reply
    if status == 200:
        assert reply["choices"][0]["message"]["content"].strip().rstrip(".").lower() == right(truth, q)
    else:
        assert reply["error"]["code"] == "vision_unavailable"
    server.wait_for_eyes()
    wait_for(lambda: ask_question(server, q) == right(truth, q), "a right answer after the restart")
    assert host.encoder_pid() not in (None, pid)


def test_a_request_past_its_time_says_so(host, servers):
    server = servers(host.start(), timeout_s=1).wait_for_eyes()
    os.kill(wait_for(host.encoder_pid, "the encoder"), signal.SIGSTOP)
    for _ in range(2):  # request and encode have one deadline: whichever is noticed first, the answer is the same
        status, reply = server.chat(user("x", CASES / "plain.png"))
        assert (status, reply["error"]["code"]) == (504, "timeout"), reply


def test_two_requests_at_once(truth, host, servers):
    server = servers(host.start()).wait_for_eyes()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda q: ask_question(server, q), QUESTIONS * 2))
    assert answers == [right(truth, q) for q in QUESTIONS * 2]


def test_two_servers_share_a_host(truth, host, servers):
    a, b = servers(host.start()), servers(host)
    a.wait_for_eyes()
    b.wait_for_eyes()
    q = QUESTIONS[0]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda s: ask_question(s, q), [a, b, a, b])) == {right(truth, q)}


def test_a_client_that_leaves_harms_nobody(truth, host, servers):
    server = servers(host.start()).wait_for_eyes()
    url = urllib.parse.urlparse(server.url)
    q = QUESTIONS[0]
    body = json.dumps({"messages": [user(q["question"], PICTURES / q["picture"])], "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    for part in (len(head) // 2, len(head) + len(body) // 2, len(head) + len(body)):
        with socket.create_connection((url.hostname, url.port)) as s:
            s.sendall((head + body)[:part])
    assert ask_question(server, q) == right(truth, q)


def test_the_encoder_ends_with_its_server(host, servers):
    server = servers(host.start()).wait_for_eyes()
    assert wait_for(host.encoder_pid, "the encoder")
    server.stop()
    wait_for(lambda: host.encoder_pid() is None, "the encoder's end after BYE")


def test_a_killed_server_that_comes_again_leaves_no_lease_behind(truth, host, servers):
    host.start()
    listen = f"127.0.0.1:{lab.free_port()}"
    first = servers(host, listen=listen).wait_for_eyes()
    old, = [l["lease"] for l in host.status()["leases"]]
    pid = host.encoder_pid()
    first.process.kill()
    first.process.wait()
    first.process.returncode = 0  # as ordered
    second = servers(host, listen=listen).wait_for_eyes()
    wait_for(lambda: [l["lease"] == old for l in host.status()["leases"]] == [False], "the end of the first one's lease")
    assert host.encoder_pid() == pid and ask_question(second, QUESTIONS[0]) == right(truth, QUESTIONS[0])
    second.stop()
    wait_for(lambda: host.encoder_pid() is None, "the encoder's end")


def test_a_text_model_that_is_cut_in_use_is_named(servers, tmp_path):
    model = tmp_path / "text.gguf"
    shutil.copy(lab.TEXT_MODEL, model)
    server = servers(model=str(model))
    assert server.ask("Hello")
    os.truncate(model, 0)
    with contextlib.suppress(OSError, http.client.HTTPException):
        server.chat(user("Hello again"))
    assert server.process.wait(lab.LIMIT_S) == 74
    assert f"the model file {model} was changed while it was in use" in server.log.read_text()
    server.process.returncode = 0  # as it should be


def test_an_mmproj_that_is_cut_in_use_makes_no_wrong_rows(truth, host, servers, tmp_path):
    """Weights that were copied stay right; where the file itself is read, the encoder ends with its name."""
    mmproj = tmp_path / "mmproj.gguf"
    shutil.copy(lab.MMPROJ, mmproj)
    host.configure(mmproj=str(mmproj))
    server = servers(host.start()).wait_for_eyes()
    assert ask_question(server, QUESTIONS[0]) == right(truth, QUESTIONS[0])
    os.truncate(mmproj, 0)
    q = QUESTIONS[1]
    status, reply = server.chat(user(q["question"], PICTURES / q["picture"]))
    if status == 200:
        assert reply["choices"][0]["message"]["content"].strip().rstrip(".").lower() == right(truth, q)
    else:
        assert reply["error"]["code"] == "vision_unavailable" and "was changed while it was in use" in host.watchdog_log()
    shutil.copyfile(lab.MMPROJ, mmproj)
    if host.encoder_pid():
        os.kill(host.encoder_pid(), signal.SIGKILL)
    wait_for(lambda: server.eyes()["available"] and host.encoder().get("state") == "ready", "the encoder with the file that is whole again")
    assert ask_question(server, QUESTIONS[-1]) == right(truth, QUESTIONS[-1])


def test_rows_as_halves(truth, host, servers):
    server = servers(host.start(), vision={"rows_dtype": "f16"}).wait_for_eyes()
    assert [ask_question(server, q) for q in QUESTIONS] == [right(truth, q) for q in QUESTIONS]


def test_the_official_client(truth, host, servers):
    openai = pytest.importorskip("openai", reason="the openai package is not installed")
    server = servers(host.start(), name="mini").wait_for_eyes()
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    q = QUESTIONS[0]
    message = user(q["question"], PICTURES / q["picture"])
    whole = client.chat.completions.create(model="mini", messages=[message], temperature=0)
    assert whole.choices[0].message.content.strip().rstrip(".").lower() == right(truth, q)
    stream = client.chat.completions.create(model="mini", messages=[message], temperature=0, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices) == whole.choices[0].message.content
    with pytest.raises(openai.BadRequestError) as e:
        client.chat.completions.create(model="mini", messages=[{"role": "robot", "content": "x"}])
    assert e.value.body["param"] == "messages[0].role"
    assert [m.id for m in client.models.list()] == ["mini"]


def test_start_up_errors_are_clear(tmp_path):
    import subprocess
    for args, part in ((["--set", "modle=x"], 'did you mean "model"?'), ([], "no text model"),
                       (["--model", "/nonexistent.gguf"], "/nonexistent.gguf"),
                       (["--model", str(pathlib.Path(lab.MMPROJ))], "clip")):
        out = subprocess.run([lab.SERVER, *args], capture_output=True, text=True, timeout=lab.LIMIT_S)
        assert out.returncode == 1 and part in out.stderr, out.stderr
