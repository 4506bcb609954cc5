"""`farsight host` and `farsight encode`: what the admin, the server and the watchdog may write in other ways than `host add` does, and what was
there before it."""
import json
import os
import re
import shutil
import stat
import subprocess
import time

import pytest

import lab
from test_cli import farsight, fails  # noqa: F401
from test_host_cli import box, lines  # noqa: F401

KEY = ".config/farsight/id_farsight"


def entries(box, *changed):
    """Puts the box's entry into the config once for each set of changes."""
    config = json.loads(box.config.read_text())
    entry = config["vision"]["hosts"][0]
    config["vision"]["hosts"] = [{**entry, **c} for c in changed]
    box.config.write_text(json.dumps(config))
    return config


def agents(box):
    """The lines of authorized_keys that run the agent."""
    return [line for line in box.keys.read_text().splitlines() if "farsight-agent" in line]


def another_group():
    """(user, group) that files made here do not have by themselves."""
    if os.getuid() == 0:
        return 65534, 65534
    groups = [g for g in os.getgroups() if g != os.getegid()]
    if not groups:
        pytest.skip("this user may give files to nobody")
    return os.getuid(), groups[0]


def test_the_config_keeps_its_owner(box):
    """A server that runs as another user reads it by its group."""
    box.start()
    user, group = another_group()
    os.chown(box.config, user, group)
    box.config.chmod(0o640)
    leftover = box.config.with_name("server.json.new")  # of a run that was killed
    leftover.write_text("half of it")
    leftover.chmod(0o666)

    def access():
        st = box.config.stat()
        return st.st_uid, st.st_gid, stat.S_IMODE(st.st_mode)

    box.added()
    assert "box" in box.config.read_text() and access() == (user, group, 0o640)
    status, said = box.run("remove", "box", "--config", str(box.config), "--here")
    assert status == 0, said
    assert "box" not in box.config.read_text() and access() == (user, group, 0o640)
    assert not leftover.exists()


def test_the_key_is_found_as_the_server_finds_it(box):
    box.start()
    box.added()
    for identity in ("~/" + KEY, "%d/" + KEY):
        entries(box, {"identity": identity})
        status, said = box.check()
        assert status == 0 and f"ok      own key: {box.main / KEY}" in said, said


def test_the_models_are_found_as_the_watchdog_finds_them(box):
    box.start()
    box.added()
    vocabulary = box.settings().parent / "vocabulary.gguf"
    shutil.copy(lab.MMPROJ, vocabulary)
    box.settings().write_text(json.dumps({"mmproj": "~/.local/farsight/models/" + lab.MMPROJ.name, "model": vocabulary.name}))
    status, said = box.check()
    assert status == 0 and lines(said, "ok      settings"), said
    elsewhere = box.home / "dotfiles/vision-host.json"  # a link's own folder counts
    elsewhere.parent.mkdir()
    box.settings().rename(elsewhere)
    box.settings().symlink_to(elsewhere)
    status, said = box.check()
    assert status == 0 and lines(said, "ok      settings"), said
    vocabulary.unlink()
    status, said = box.check()
    assert status == 1 and "vocabulary.gguf is missing there" in lines(said, "failed  settings")[0], said
    box.settings().write_text(json.dumps({"mmproj": "~/none.gguf"}))
    status, said = box.check()
    assert status == 1 and "~/none.gguf is missing there" in lines(said, "failed  settings")[0], said


def test_the_way_in_does_not_depend_on_the_folder(box, monkeypatch):
    box.start()
    monkeypatch.chdir(box.main / ".ssh")
    status, said = box.add("--yes", "--binary", str(box.binary), "--mmproj", str(lab.MMPROJ), "--known-hosts", "of-hosts", "--ssh-config", "config")
    assert status == 0, said
    entry, = json.loads(box.config.read_text())["vision"]["hosts"]
    assert (entry["known_hosts"], entry["ssh_config"]) == (str(box.main / ".ssh/of-hosts"), str(box.main / ".ssh/config"))
    monkeypatch.chdir(box.tmp)
    status, said = box.check()
    assert status == 0, said
    entries(box, {"known_hosts": "/old"})
    status, said = box.add("--yes", "--known-hosts", "~/.ssh/of-hosts")
    assert status == 0, said
    entry, = json.loads(box.config.read_text())["vision"]["hosts"]
    assert entry["known_hosts"] == "~/.ssh/of-hosts"


def test_a_host_that_the_server_sees_as_down_is_waited_for(box, servers, monkeypatch):
    """Its pause has grown long when the host is back, and what it says of it is old."""
    box.start()
    monkeypatch.setenv("HOME", str(box.main))
    box.added()
    box.process.terminate()
    box.process.wait(lab.LIMIT_S)
    server = servers(**{**json.loads(box.config.read_text()), "listen": f"127.0.0.1:{lab.free_port()}"})
    lab.wait_for(lambda: server.status()["vision"]["hosts"][0]["benched_s"] > 6, "a long pause")
    box.start()
    box.config = server.config
    said = box.added()
    assert any("uses box now" in line for line in lines(said, "ok      server")), said
    assert server.status()["config"]["reads"] == 1 and server.eyes()["available"]
    status, reply = server.request("/v1/reload", {})
    assert status == 200 and reply["hosts"] == {"added": 0, "removed": 0, "kept": 1}, reply


def test_main_pcs_of_one_name_keep_their_lines(box):
    """Images of machines are copied, and root@localhost is everywhere."""
    box.start()
    box.added()
    first, = agents(box)
    assert re.fullmatch(r".* farsight:\S+@\S+:[0-9a-f]{16}", first)
    (box.main / ".config").rename(box.main / "config-of-the-first")  # this is the second PC now
    said = box.added()
    assert "1 other lines" in said, said
    one, second = agents(box)
    assert one == first and first.rsplit(":", 1)[0] != second and first.rsplit(":", 1)[1] != second.rsplit(":", 1)[1]

    (box.main / KEY).unlink()  # a key that was lost leaves its line to the next one
    box.added()
    one, third = agents(box)
    assert one == first and third != second and third.rsplit(" ", 1)[1] == second.rsplit(" ", 1)[1]
    status, said = box.run("remove", "box", "--config", str(box.config), "--yes")
    assert status == 0 and "1 other machines" in said and agents(box) == [first], said


def test_keys_of_older_versions_stay(box):
    """Their comment has no tag."""
    box.start()
    box.added()
    line, = agents(box)
    comment = line.split()[-1].rsplit(":", 1)[0]
    subprocess.run(["ssh-keygen", "-q", "-c", "-P", "", "-C", comment, "-f", box.main / KEY], check=True)
    older = line.rsplit(":", 1)[0]
    box.keys.write_text(box.keys.read_text().replace(line, older))
    said = box.added()
    assert not lines(said, "done") and agents(box) == [older], said
    box.keys.write_text(box.keys.read_text().replace(older, line))  # the same key with whatever comment
    said = box.added()
    assert lines(said, "done    key on the host") and agents(box) == [older], said


def sshd_without_root_power(tmp):
    """Root may write what nobody may; its sessions here may not."""
    wrapper = tmp / "sshd"
    wrapper.write_text(f'#!/bin/sh\nexec setpriv --bounding-set=-dac_override {lab.SSHD} "$@"\n')
    wrapper.chmod(0o755)
    return wrapper


def test_authorized_keys_that_are_read_only(box, monkeypatch):
    if os.getuid() == 0:
        monkeypatch.setattr(lab, "SSHD", sshd_without_root_power(box.tmp))
    box.start()
    for mode in (0o400, 0o444, 0o600):
        box.keys.chmod(mode)
        leftover = box.keys.with_name("authorized_keys.farsight-new")
        leftover.write_text("half of it")
        leftover.chmod(0o400)
        box.added()
        assert len(agents(box)) == 1 and stat.S_IMODE(box.keys.stat().st_mode) == mode
        status, said = box.run("remove", "box", "--config", str(box.config), "--yes")
        assert status == 0 and not agents(box) and stat.S_IMODE(box.keys.stat().st_mode) == mode, said
        assert not leftover.exists() and "# keys of friends" in box.keys.read_text()


def test_list_and_check_of_hosts_of_one_name(box, servers, monkeypatch):
    box.start()
    monkeypatch.setenv("HOME", str(box.main))
    box.added()
    closed = lab.free_port()
    config = entries(box, {"port": closed}, {"port": box.port})
    server = servers(**config).wait_for_eyes()
    lab.wait_for(lambda: server.status()["vision"]["hosts"][0]["state"] == "down", "the first one's failure")
    box.config.write_text(json.dumps({**config, "listen": server.url.removeprefix("http://")}))
    status, said = box.run("list", "--config", str(box.config))
    assert status == 0 and [line.split()[:2] for line in said.splitlines()] == [[f"box:{closed}", "down"], [f"box:{box.port}", "up"]], said
    status, said = box.check()
    assert status == 1 and "the running server says up" in lines(said, "ok      server")[0], said
    assert lines(said, "box:") == [f"box:{closed}", f"box:{box.port}"]


def test_one_deadline_for_waiting_and_encoding(host, farsight, tmp_path):
    host.configure(encoder=str(lab.FAKE_ENCODER), encoder_args=["--ready-delay-ms", "7000"])
    host.start()
    config = tmp_path / "server.json"
    config.write_text(json.dumps({"vision": {"remote": True, "hosts": [host.connection()]}}))
    picture = tmp_path / "picture.png"
    picture.write_bytes(sorted((lab.TOP / "tests/data/pictures").glob("*.png"))[0].read_bytes() + b"FAKE hang\n")
    began = time.monotonic()
    said = fails(farsight, "encode", picture, "--config", config, "--timeout", "15")
    assert time.monotonic() - began < 21.5  # not 7 and then 15
    assert "not encoded within 15 s" in said and "127.0.0.1 is up" in said, said
    host.stop()
    host.start()
    said = fails(farsight, "encode", picture, "--config", config, "--timeout", "6")
    assert "not encoded within 6 s" in said and "is being started" in said, said
