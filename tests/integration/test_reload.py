"""A server reads its config again, on SIGHUP and when it is asked to: vision hosts come and go under running requests, the rest is told."""
import json
import os
import pty
import signal
import subprocess
import threading
import urllib.request

import lab

PICTURES = sorted((lab.TOP / "tests/data/pictures").glob("*.png"))
QUESTION = "What is in this picture?"


def change(server, **keys):
    config = json.loads(server.config.read_text())
    for k, v in keys.items():
        config.pop(k, None)
        if v is not None:
            config[k] = v
    server.config.write_text(json.dumps(config))


def hangup(server):
    """SIGHUP, and what the server then says of its config."""
    before = server.status()["config"]["reads"]
    server.process.send_signal(signal.SIGHUP)
    lab.wait_for(lambda: server.status()["config"]["reads"] > before, "the config to be read again")
    return server.status()["config"]


def vision(*hosts):
    return {"remote": True, "hosts": [h.connection() for h in hosts]}


def test_a_text_server_gets_eyes_and_loses_them(host, servers):
    host.start()
    server = servers()
    assert server.status()["vision"] == {"configured": False, "available": False, "hosts": [], "leaving": 0}
    status, reply = server.chat(lab.user(QUESTION, PICTURES[0]))
    assert status == 400 and "no image encoder" in reply["error"]["message"]
    assert server.request("/health")[1]["images"] is False
    assert server.request("/v1/models")[1]["data"][0]["architecture"]["input_modalities"] == ["text"]
    said = []
    talk = threading.Thread(target=lambda: said.append(server.chat(lab.user("Tell me a long story."), max_tokens=300, ignore_eos=True)))
    talk.start()
    change(server, vision=vision(host))
    assert hangup(server)["error"] is None
    server.wait_for_eyes()
    first = server.ask(QUESTION, PICTURES[0])
    assert first and server.request("/health")[1]["images"] is True
    pid = host.encoder_pid()
    assert hangup(server)["error"] is None  # nothing changed: nothing happens
    assert server.ask(QUESTION, PICTURES[1]) and host.encoder_pid() == pid
    change(server, vision=None)
    assert hangup(server)["error"] is None
    status, reply = server.chat(lab.user(QUESTION, PICTURES[0]))
    assert status == 400 and "no image encoder" in reply["error"]["message"]
    lab.wait_for(lambda: host.encoder_pid() is None, "the end of the encoder that nobody needs")
    lab.wait_for(lambda: server.status()["vision"]["leaving"] == 0, "the host to be let go")
    talk.join(lab.LIMIT_S)
    assert said[0][0] == 200, said


def test_what_is_wrong_changes_nothing(host, servers):
    host.start()
    server = servers(host).wait_for_eyes()
    good = server.config.read_text()
    for text, want in (("{ half of it", "line 1"), (json.dumps({**json.loads(good), "modle": 1}), "did you mean"),
                       (json.dumps({**json.loads(good), "vision": {"remote": True}}), "names no host"),
                       (json.dumps({**json.loads(good), "vision": {"remote": True, "hosts": [{"host": "x", "wol": "y"}]}}), "MAC address")):
        server.config.write_text(text)
        told = hangup(server)
        assert want in told["error"], told
        status, reply = server.request("/v1/reload", {})
        assert status == 409 and want in reply["error"]["message"], reply
        assert server.ask(QUESTION, PICTURES[0])
    assert "the one from before stays" in server.log.read_text()
    server.config.write_text(good)
    status, reply = server.request("/v1/reload", {"config": str(server.config)})
    assert status == 200 and reply["hosts"] == {"added": 0, "removed": 0, "kept": 1}, reply
    assert server.status()["config"]["error"] is None
    assert server.status()["vision"]["hosts"][0]["encodes"] >= 1  # the host was never let go


def test_what_needs_a_restart_is_named(servers):
    server = servers()
    change(server, workers=7, log_level="error", queue_depth=9)
    status, reply = server.request("/v1/reload", {})
    assert status == 200 and sorted(reply["restart"]) == ["queue_depth", "workers"], reply
    assert server.status()["config"]["restart"] == reply["restart"]
    named = [line for line in server.log.read_text().splitlines() if "need a restart" in line]
    assert named == []  # "error" holds already
    change(server, log_level="info")
    assert sorted(hangup(server)["restart"]) == ["queue_depth", "workers"]
    named = [line for line in server.log.read_text().splitlines() if "need a restart" in line]
    assert len(named) == 1 and "workers" in named[0] and "queue_depth" in named[0] and "log_level" not in named[0]
    change(server, workers=None, queue_depth=None)
    assert hangup(server)["restart"] == []


def test_only_its_own_config_is_read(servers, tmp_path):
    server = servers()
    other = tmp_path / "other.json"
    other.write_text("{}")
    status, reply = server.request("/v1/reload", {"config": str(other)})
    assert status == 409 and str(server.config) in reply["error"]["message"], reply
    assert server.request("/v1/reload", {"config": 5})[0] == 400
    assert server.request("/v1/reload")[0] in (404, 405)
    assert server.status()["config"]["reads"] == 0
    link = tmp_path / "link.json"
    link.symlink_to(server.config)
    assert server.request("/v1/reload", {"config": str(link)})[0] == 200


def test_another_kind_of_vision_needs_a_restart(host, servers):
    server = servers(vision={"mmproj": str(lab.MMPROJ), "exe": str(lab.ENCODER)})
    change(server, vision=vision(host))
    told = hangup(server)
    assert told["error"] is None and {"vision.mmproj", "vision.exe", "vision.hosts and vision.remote"} == set(told["restart"])
    assert server.status()["vision"]["hosts"][0]["host"] == "local"


def start_in_window(tmp_path, *before):
    """A server with a terminal of its own, the other end of that, and the server's log."""
    config = tmp_path / "server.json"
    config.write_text(json.dumps({"model": str(lab.TEXT_MODEL), "listen": "127.0.0.1:0"}))
    log = tmp_path / "log"
    leader, follower = pty.openpty()
    # as a login shell leaves it, whatever the tests themselves were started by
    words = ["env", "--default-signal=HUP", "setsid", "--ctty", *before, lab.SERVER, "--config", config]
    p = subprocess.Popen(words, stdin=follower, stderr=open(log, "ab"))
    os.close(follower)
    lab.wait_for(lambda: "listening on" in log.read_text(), "the server")
    return p, leader, log


def test_a_closed_window_still_ends_it(tmp_path):
    p, leader, log = start_in_window(tmp_path)
    os.close(leader)
    p.wait(lab.LIMIT_S)
    assert "stopping" in log.read_text()


def test_one_that_was_told_to_outlive_its_window_does(tmp_path):
    p, leader, log = start_in_window(tmp_path, "nohup")
    os.close(leader)
    lab.wait_for(lambda: "was read again" in log.read_text(), "the end of the window, which is a SIGHUP like others")
    assert "stopping" not in log.read_text()
    p.terminate()
    p.wait(lab.LIMIT_S)
    assert "stopping" in log.read_text()


def test_one_in_the_background_of_a_session_that_is_over_is_not_ended(tmp_path):
    config = tmp_path / "server.json"
    port = lab.free_port()
    config.write_text(json.dumps({"model": str(lab.TEXT_MODEL), "listen": f"127.0.0.1:{port}"}))
    log = tmp_path / "log"
    leader, follower = pty.openpty()
    script = f'set -m; {lab.SERVER} --config {config} 2> {log} < /dev/null & echo $! > {tmp_path}/pid; read word'
    shell = subprocess.Popen(["env", "--default-signal=HUP", "setsid", "--ctty", "sh", "-c", script], stdin=follower, stdout=follower, stderr=follower)
    os.close(follower)
    lab.wait_for(lambda: log.exists() and "listening on" in log.read_text(), "the server")
    os.write(leader, b"logout\n")
    shell.wait(lab.LIMIT_S)
    os.close(leader)
    pid = int((tmp_path / "pid").read_text())
    try:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/reload", b"{}", {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=lab.LIMIT_S) as f:
            assert f.status == 200
        os.kill(pid, signal.SIGHUP)
        lab.wait_for(lambda: log.read_text().count("was read again") == 2, "the config to be read again")
        assert "stopping" not in log.read_text()
    finally:
        os.kill(pid, signal.SIGTERM)
    lab.wait_for(lambda: "stopping" in log.read_text(), "the end")


def test_a_host_may_be_given_another_model(host, servers, tmp_path):
    """A new file in the old one's place, and the watchdog told of it: nothing else is restarted, and no rows of the old model are used for the new one's."""
    mmproj = tmp_path / "mmproj.gguf"
    old = lab.MMPROJ.read_bytes()
    mmproj.write_bytes(old)
    host.configure(mmproj=str(mmproj))
    host.start()
    server = servers(host).wait_for_eyes()
    assert server.ask(QUESTION, PICTURES[0])
    before = server.status()["vision"]["hosts"][0]
    fresh = tmp_path / "fresh.gguf"
    fresh.write_bytes(old.replace(b"Farsight", b"Nearsigh", 1))
    fresh.rename(mmproj)
    subprocess.run([lab.WATCHDOG, "--socket", host.socket, "reload"], check=True, stdout=subprocess.DEVNULL)
    lab.wait_for(lambda: server.status()["vision"]["hosts"][0].get("fingerprint") != before["fingerprint"], "the other model")
    server.wait_for_eyes()
    assert server.ask(QUESTION, PICTURES[0])
    after = server.status()["vision"]["hosts"][0]
    assert after["encodes"] == before["encodes"] + 1 and after["errors_by"]["connect"] == before["errors_by"]["connect"]
