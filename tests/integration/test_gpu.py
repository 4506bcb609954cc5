"""A GPU that fails below a running server, and below an encoder: tests/tools/fake_gpu.h, directed by files. Real programs otherwise."""
import http.client
import json
import subprocess
import threading

import pytest

import lab
from lab import TOP, user, wait_for

TOOLS = lab.BUILD / "tests/tools"
PICTURES = TOP / "tests/data/pictures"
QUESTIONS = json.loads((PICTURES / "questions.json").read_text())
PICTURE, QUESTION = PICTURES / QUESTIONS[0]["picture"], QUESTIONS[0]["question"]


@pytest.fixture
def card(tmp_path, monkeypatch):
    """The folder that directs the card, and the server that has it."""
    folder = tmp_path / "card"
    folder.mkdir()
    monkeypatch.setenv("FAKE_GPU", str(folder))
    monkeypatch.setattr(lab, "SERVER", TOOLS / "server_on_fake_gpu")
    return folder


def state(server):
    return server.status()["engine"]["state"]


def test_a_lost_card_costs_one_request(servers, card):
    server = servers()
    assert "cuda:0: a card of the tests" in server.status()["engine"]["device"]
    assert "needs " in server.log.read_text() and "of device memory: weights " in server.log.read_text()
    want = server.ask("What is this?", max_tokens=8)
    (card / "lose").touch()
    status, reply = server.chat(user("What is this?"), max_tokens=8)
    assert (status, reply["error"]["type"], reply["error"]["code"]) == (500, "server_error", "engine_unavailable"), reply
    assert "loading the model again" in reply["error"]["message"]
    wait_for(lambda: state(server) == "ready", "the engine")
    engine = server.status()["engine"]
    assert engine["device_losses"] == 1 and "illegal memory access" in engine["device_error"]
    assert server.ask("What is this?", max_tokens=8) == want
    assert server.request("/health")[0] == 200
    finish = server.status()["totals"]["finish"]
    assert finish["error"] == 1


def test_a_card_that_is_gone_is_told_and_then_replaced_by_the_cpu(servers, card):
    server = servers()  # device "auto"
    want = server.ask("What is this?", max_tokens=8)
    (card / "gone").touch()
    (card / "lose").touch()
    assert server.chat(user("What is this?"), max_tokens=8)[0] == 500
    status, headers, body = server.raw("POST", "/v1/chat/completions", json.dumps({"messages": [user("Hi")]}).encode())
    assert status == 503 and int(headers["retry-after"]) > 0, (status, body)
    error = json.loads(body)["error"]
    assert error["code"] == "engine_unavailable" and "try again" in error["message"]
    status, health = server.request("/health")
    assert (status, health["status"]) == (503, "reloading")
    assert "farsight_engine_ready 0" in server.raw("GET", "/metrics")[2].decode()
    wait_for(lambda: state(server) == "ready", "the CPU")
    assert server.status()["engine"]["device"].startswith("cpu")
    assert server.ask("What is this?", max_tokens=8) == want


def test_a_card_that_does_not_come_back_is_told_for_good(servers, card):
    server = servers(device="cuda")
    (card / "gone").touch()
    (card / "lose").touch()
    assert server.chat(user("What is this?"), max_tokens=8)[0] == 500
    wait_for(lambda: state(server) == "failed", "the end of the attempts")
    status, reply = server.chat(user("What is this?"), max_tokens=8)
    assert status == 503 and "must be restarted" in reply["error"]["message"]
    status, health = server.request("/health")
    assert (status, health["status"]) == (503, "failed")
    (card / "gone").unlink()
    assert server.chat(user("What is this?"))[0] == 503  # for good


def test_a_stream_that_has_begun_ends_with_an_error(servers, card):
    server = servers()
    client = server.send("/v1/chat/completions", {"messages": [user("Tell me a long story.")], "stream": True, "max_tokens": 4000,
                                                  "ignore_eos": True})
    answer = http.client.HTTPResponse(client)
    answer.begin()
    text = answer.read(1)
    (card / "lose").touch()
    text += answer.read()
    assert answer.status == 200 and b"loading the model again" in text, text[-600:]
    wait_for(lambda: state(server) == "ready", "the engine")


def test_waiting_requests_are_not_lost_with_the_card(servers, card):
    """They are refused at once, or answered by the card that comes back; none hangs."""
    server = servers()
    ends = []

    def ask():
        ends.append(server.chat(user("What is this?"), max_tokens=64)[0])

    (card / "lose").touch()
    threads = [threading.Thread(target=ask) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(lab.LIMIT_S)
    assert len(ends) == 6 and set(ends) <= {200, 500, 503} and ends.count(500) == 1, ends


def test_a_model_that_does_not_fit(servers, card, tmp_path):
    (card / "memory").write_text(str(64 << 20))
    config = tmp_path / "refused.json"
    config.write_text(json.dumps({"model": str(lab.TEXT_MODEL), "listen": "127.0.0.1:0", "device": "cuda"}))
    p = subprocess.run([lab.SERVER, "--config", config], capture_output=True, text=True, timeout=lab.LIMIT_S)
    assert p.returncode == 1
    assert "it needs " in p.stderr and "cuda:0 has 64.0 MiB of 64.0 MiB free" in p.stderr and "lower" in p.stderr, p.stderr
    server = servers()
    assert server.log.read_text().count("the CPU is used instead of a GPU: ") == 1
    assert server.ask("What is this?", max_tokens=4)


# ---- the encoder ----

def test_an_encoder_whose_card_is_lost_is_started_again(host, servers, card, monkeypatch):
    """The picture that it was lost under is encoded by the next one, since it was not at fault."""
    program = card / "encoder"
    program.write_text(f'#!/bin/sh\nFAKE_GPU={card} exec {TOOLS}/encoder_on_fake_gpu "$@"\n')
    program.chmod(0o755)
    host.configure(encoder=str(program), extended=True, device="cuda")
    monkeypatch.setattr(lab, "SERVER", lab.BUILD / "server/farsight-server")
    server = servers(host.start()).wait_for_eyes()
    h, = server.eyes()["hosts"]
    assert h["device"] == "cuda:0"
    want = server.ask(QUESTION, PICTURE)
    (card / "lose").touch()
    other = PICTURES / next(q["picture"] for q in QUESTIONS if q["picture"] != QUESTIONS[0]["picture"])
    assert server.ask(QUESTION, other)
    assert not (card / "lose").exists()
    assert server.ask(QUESTION, PICTURE) == want
    log = (host.socket.parent / "watchdog.log").read_text()
    assert "the encoder's GPU failed (status 75)" in log and "illegal memory access" in log, log[-3000:]


def test_an_encoder_on_this_machine_whose_card_is_lost(servers, card, monkeypatch):
    monkeypatch.setattr(lab, "SERVER", lab.BUILD / "server/farsight-server")
    server = servers(vision={"mmproj": str(lab.MMPROJ), "exe": str(TOOLS / "encoder_on_fake_gpu"), "extended": "on", "gpu": True})
    assert server.eyes()["hosts"][0]["device"] == "cuda:0"
    (card / "lose").touch()
    status, reply = server.chat(user(QUESTION, PICTURE))
    assert status == 400 and reply["error"]["code"] == "vision_unavailable" and "the encoder's GPU failed" in reply["error"]["message"], reply
    wait_for(lambda: server.eyes()["hosts"][0]["state"] == "up", "the encoder")
    assert server.ask(QUESTION, PICTURE)


@pytest.mark.parametrize("memory,device", [(8 << 30, "cuda:0"), (1 << 20, "cpu")])
def test_an_encoder_on_this_machine_takes_what_there_is(servers, card, monkeypatch, memory, device):
    """And its pictures queue with the answers when that is a GPU."""
    monkeypatch.setattr(lab, "SERVER", lab.BUILD / "server/farsight-server")
    (card / "memory").write_text(str(memory))
    program = card / "farsight-encoder"
    program.symlink_to(TOOLS / "encoder_on_fake_gpu")
    server = servers(vision={"mmproj": str(lab.MMPROJ), "exe": str(program), "device": "auto"})
    assert server.eyes()["hosts"][0]["device"] == device
    assert server.ask(QUESTION, PICTURE)
    assert server.status()["turn"]["entries"] == (2 if device == "cuda:0" else 1)
