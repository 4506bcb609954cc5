"""Pictures encoded on the server's own machine: the real encoder, and a fake one that does what a test orders."""
import base64
import json
import os
import re
import shutil
import signal
import subprocess

import pytest

import lab
from lab import TOP, user, wait_for

PICTURES = TOP / "tests/data/pictures"
CASES = TOP / "tests/data/cases"
QUESTIONS = json.loads((PICTURES / "questions.json").read_text())
EMBD = 192  # of the bundled text model
REAL = {"mmproj": str(lab.MMPROJ), "exe": str(lab.ENCODER)}


class Fake:
    """fake_encoder behind a script, with its log."""

    def __init__(self, tmp, args=""):
        self.log = tmp / "encoder.log"
        self.exe = tmp / "any-encoder"
        self.exe.write_text(f'#!/bin/sh\nexec {lab.FAKE_ENCODER} --embd {EMBD} --log {self.log} {args} "$@"\n')
        self.exe.chmod(0o755)

    def vision(self, **more):
        return {"mmproj": "any.gguf", "exe": str(self.exe), "extended": "on", **more}

    def events(self, word=""):
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if line.startswith(word)]

    def pid(self):
        return int(self.events("start ")[-1].split()[1])


@pytest.fixture
def fake(tmp_path):
    return Fake(tmp_path)


def picture(words=""):
    """A data: URL of a real picture; the words behind it are for the fake encoder."""
    data = (CASES / "plain.png").read_bytes() + (f"FAKE {words}".encode() if words else b"")
    return "data:;base64," + base64.b64encode(data).decode()


def is_gone(pid):
    """Not there any more, or a zombie that nobody has reaped yet."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] in "ZX"
    except OSError:
        return True


def encoder_pid(server):
    pids = re.findall(r"encoder: started \S+, process (\d+)", server.log.read_text())
    return int(pids[-1]) if pids else None


def unavailable(reply, *words):
    status, body = reply
    assert status == 400 and body["error"]["code"] == "vision_unavailable", reply
    assert body["error"]["message"].startswith("the image encoder is not available: local: "), body
    for w in words:
        assert w in body["error"]["message"], body


def start_and_fail(tmp_path, vision):
    """What the server says when it refuses to start."""
    config = tmp_path / "refused.json"
    config.write_text(json.dumps({"model": str(lab.TEXT_MODEL), "listen": "127.0.0.1:0", "vision": vision}))
    p = subprocess.run([lab.SERVER, "--config", config], capture_output=True, text=True, timeout=lab.LIMIT_S)
    assert p.returncode == 1, p.stderr
    return p.stderr


# ---- the real encoder ----

def test_it_answers_as_a_vision_host_does(host, servers):
    remote = servers(host.start()).wait_for_eyes()
    local = servers(vision=REAL)
    for q in QUESTIONS[::4]:
        assert local.ask(q["question"], PICTURES / q["picture"]) == remote.ask(q["question"], PICTURES / q["picture"])
    h, = local.eyes()["hosts"]
    assert (h["host"], h["state"], h["device"]) == ("local", "up", "cpu")
    assert local.status()["turn"]["entries"] == len(QUESTIONS[::4])  # by answers alone


def test_the_encoder_is_found_in_path(servers, monkeypatch):
    monkeypatch.setenv("PATH", f"{lab.ENCODER.parent}:{os.environ['PATH']}")
    server = servers(vision={"mmproj": str(lab.MMPROJ)})
    assert server.ask(QUESTIONS[0]["question"], PICTURES / QUESTIONS[0]["picture"])


@pytest.mark.parametrize("limits", [{}, {"max_tokens": 64, "min_tokens": 8}])
def test_a_plain_encoder_is_asked_for_no_limits(fake, servers, limits):
    """It takes none but at its start: "detail" is a wish, and no reason to refuse the picture."""
    server = servers(vision=fake.vision(extended="off", **limits))
    for detail in ("low", "high"):
        part = {"type": "image_url", "image_url": {"url": picture(), "detail": detail}}
        status, reply = server.chat({"role": "user", "content": [part, {"type": "text", "text": "What is this?"}]}, max_tokens=2)
        assert status == 200, reply


def test_same_bytes_of_pixels_in_another_shape_are_another_picture(servers):
    """O18."""
    server = servers(vision=REAL)
    cached = []
    for name in ("same_30x150.png", "same_150x30.png", "same_30x150.png"):
        status, reply = server.chat(user("What is this?", CASES / name))
        assert status == 200, reply
        cached.append(reply["timings"]["pictures"][0]["cached"])
    assert cached == [False, False, True]


def test_pictures_of_tools_go_the_same_way(servers):
    """O19."""
    server = servers(vision=REAL)
    tool = {**user("", CASES / "plain.png"), "role": "tool", "tool_call_id": "call_1"}
    tool["content"] = tool["content"][:1]
    status, reply = server.chat(user("Look."), tool, user("What is it?"))
    assert status == 200, reply
    shown, = reply["timings"]["pictures"]
    assert shown["host"] == "local" and shown["tokens"] > 0


def test_elastic_comes_with_the_first_picture_and_goes(servers):
    server = servers(vision={**REAL, "elastic": True, "elastic_idle_s": 1})
    assert encoder_pid(server) is None and server.eyes()["available"]
    assert server.ask("Hello?") is not None
    assert encoder_pid(server) is None
    q = QUESTIONS[0]
    answer = server.ask(q["question"], PICTURES / q["picture"])
    pid = encoder_pid(server)
    wait_for(lambda: is_gone(pid), "the end of the idle encoder")
    other = QUESTIONS[-1]
    assert server.ask(other["question"], PICTURES / other["picture"])
    assert encoder_pid(server) != pid
    status, again = server.chat(user(q["question"], PICTURES / q["picture"]))
    assert status == 200 and again["choices"][0]["message"]["content"] == answer
    assert again["timings"]["pictures"][0]["cached"]  # its name did not change when the encoder came


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_no_encoder_stays_behind(servers, end):
    server = servers(vision=REAL)
    pid = encoder_pid(server)
    assert not is_gone(pid)
    server.process.send_signal(end)
    server.process.wait(lab.LIMIT_S)
    wait_for(lambda: is_gone(pid), "the encoder's end")
    if end == signal.SIGKILL:
        server.process.returncode = 0  # as ordered


def test_a_deaf_encoder_does_not_stay_behind_either(servers, fake):
    server = servers(vision=fake.vision())
    client = server.send("/v1/chat/completions", {"messages": [user("x", picture("delay=600000 deaf"))]})
    wait_for(lambda: fake.events("enc "), "the encode")
    pid = fake.pid()
    server.process.kill()
    server.process.wait(lab.LIMIT_S)
    client.close()
    wait_for(lambda: is_gone(pid), "the encoder's end")
    server.process.returncode = 0  # as ordered


# ---- faults ----

def test_a_death_in_the_middle_of_a_picture(servers, fake):
    server = servers(vision=fake.vision())
    client = server.send("/v1/chat/completions", {"messages": [user("x", picture("hang"))]})
    wait_for(lambda: fake.events("enc "), "the encode")
    assert server.ask("Hello?") is not None  # text lives while a picture is encoded
    os.kill(fake.pid(), signal.SIGKILL)
    status, _, body = lab.read_answer(client)
    client.close()
    unavailable((status, json.loads(body)), "ended by signal 9")
    unavailable(server.chat(user("x", picture("delay=0"))), "ended by signal 9")  # it backs off: at once
    assert server.ask("Hello?") is not None
    wait_for(lambda: server.eyes()["available"], "the next encoder")
    assert server.chat(user("x", picture("delay=1")))[0] == 200
    assert len(fake.events("start ")) == 2


@pytest.mark.parametrize("words, said", [("nonsense", "answered nonsense"), ("nan", "no good"), ("embd=7", "wrote 4 of 7")])
def test_nonsense_is_answered_for(servers, fake, words, said):
    server = servers(vision=fake.vision())
    unavailable(server.chat(user("x", picture(words))), said)
    assert server.ask("Hello?") is not None
    wait_for(lambda: server.eyes()["available"], "the next encoder")
    assert server.chat(user("x", picture("delay=0")))[0] == 200


def test_a_picture_that_it_can_not_read(servers, fake):
    server = servers(vision=fake.vision())
    status, reply = server.chat(user("x", picture("err=torn")))
    assert (status, reply["error"]["code"]) == (400, "picture_unreadable") and "torn" in reply["error"]["message"]
    assert reply["error"]["param"] == "messages[0].content[0].image_url.url"
    assert server.chat(user("x", picture()))[0] == 200 and len(fake.events("start ")) == 1


def test_a_client_that_leaves_frees_the_encoder(servers, fake):
    server = servers(vision=fake.vision())
    client = server.send("/v1/chat/completions", {"messages": [user("x", picture("hang"))]})
    wait_for(lambda: fake.events("enc "), "the encode")
    client.close()
    wait_for(lambda: fake.events("cancel"), "the cancel")
    assert server.chat(user("x", picture()))[0] == 200
    assert len(fake.events("start ")) == 1
    assert os.listdir(os.path.dirname(fake.events("file ")[0].split()[1])) == []


def test_one_encode_for_all_who_ask(servers, fake):
    server = servers(vision=fake.vision())
    body = {"messages": [user("x", picture("delay=400"))]}
    clients = [server.send("/v1/chat/completions", body) for _ in range(4)]
    assert [lab.read_answer(c)[0] for c in clients] == [200] * 4
    for c in clients:
        c.close()
    assert len(fake.events("enc ")) == 1
    clients = [server.send("/v1/chat/completions", {"messages": [user("x", picture("delay=5000 b"))]}) for _ in range(3)]
    wait_for(lambda: len(fake.events("enc ")) == 2 and server.phases() == ["encode"] * 3, "the encode, awaited by all")
    clients[0].close()
    assert [lab.read_answer(c)[0] for c in clients[1:]] == [200] * 2
    assert not fake.events("cancel") and len(fake.events("enc ")) == 2


# ---- the start ----

def test_what_can_not_start_ends_the_start(tmp_path):
    assert "/nowhere.gguf: No such file" in start_and_fail(tmp_path, {**REAL, "mmproj": "/nowhere.gguf"})
    assert "can not execute /nowhere/encoder" in start_and_fail(tmp_path, {**REAL, "exe": "/nowhere/encoder"})
    mute = {**REAL, "ready_timeout_s": 1, "exe": str(Fake(tmp_path, "--mute").exe)}
    assert "was not ready after 1 s" in start_and_fail(tmp_path, mute)
    assert "answered nonsense" in start_and_fail(tmp_path, {**REAL, "exe": shutil.which("echo")})
    assert f"rows of 7 values, the text model takes {EMBD}" in start_and_fail(tmp_path, {**REAL, "exe": str(Fake(tmp_path, "--embd 7").exe)})


def test_an_elastic_one_that_can_not_start_leaves_text_alone(servers):
    server = servers(vision={**REAL, "exe": "/nowhere/encoder", "elastic": True})
    unavailable(server.chat(user("x", picture())), "can not execute /nowhere/encoder")
    assert server.ask("Hello?") is not None


def test_one_kind_of_vision_at_a_time(tmp_path):
    said = start_and_fail(tmp_path, {**REAL, "remote": True, "hosts": "eyes"})
    assert "choose vision hosts or an encoder on this machine" in said
    assert '"vision.gpu" is about an encoder on this machine' in start_and_fail(tmp_path, {"gpu": True})
