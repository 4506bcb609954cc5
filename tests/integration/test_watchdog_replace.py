"""Another farsight-watchdog for the process that runs: encoder, leases and channels go on, and there is never a second encoder."""
import os
import shutil
import threading

import pytest

import frames_client as fc
from watchdog_lab import WATCHDOG, expected, picture


@pytest.fixture
def copies(tmp_path):
    """Programs of the same content in other files, as an installation makes them."""
    made = []

    def copy(name="farsight-watchdog"):
        made.append(shutil.copy(WATCHDOG, tmp_path / f"copy{len(made)}"))
        path = tmp_path / name
        os.rename(made[-1], path)
        return path

    return copy


def program_of(pid):
    """The inode: a path may have got another file."""
    return os.stat(f"/proc/{pid}/exe").st_ino


def replaced(h, program):
    p = h.ask("replace", program=program)
    assert p.returncode == 0 and "took over from" in p.stdout and str(h.process.pid) in p.stdout, p.stdout + p.stderr
    assert program_of(h.process.pid) == os.stat(program).st_ino


def test_encoder_leases_and_channels_go_on(watchdog, copies):
    h = watchdog().start()
    a, b = h.channel("lease-a", channel=1), h.channel("lease-b")
    lost = h.channel("lease-c", peer="127.0.0.1", liveness_port=1)
    lost.close()
    fc.wait_for(lambda: [x["channels"] for x in h.status()["leases"] if x["lease"] == "lease-c"] == [0], "the loss to be noticed")
    a.enc(1, picture())
    assert a.answer(1)[0] == "rows"
    before = h.status()
    for name in ("first", "second"):
        replaced(h, copies(name))
    after = h.status()
    for key in ("pid", "spool", "encodes", "errors", "leases"):
        assert after[key] == before[key], key
    assert after["encoder"] == before["encoder"]
    for c in (a, b):
        pic = picture("rows=64x64", 100000)
        c.enc(2, pic)
        assert c.answer(2)[2] == expected(pic, 4096, 8)
    assert not [f for c in (a, b) for f in c.seen], "servers notice nothing"
    a.send(fc.BYE)
    a.gone()
    assert sorted(x["lease"] for x in h.status()["leases"]) == ["lease-b", "lease-c"]
    assert len(h.events("start ")) == 1
    b.close()


def test_pictures_under_way_are_finished_first(watchdog, copies):
    h = watchdog().start()
    c = h.channel()
    new = copies()
    c.enc(1, picture("delay=700"))
    c.enc(2, picture("delay=100 rows=256x256", 600))
    fc.wait_for(lambda: h.status()["pictures"] == 2, "both pictures")
    results = []
    t = threading.Thread(target=lambda: results.append(h.ask("replace", program=new)))
    t.start()
    fc.wait_for(lambda: "asks to take over" in h.log.read_text(), "the request")
    assert c.answer(1)[0] == "rows"
    kind, _, data = c.answer(2)
    assert kind == "rows" and len(data) == 256 * 256 * 32
    t.join(fc.LIMIT_S)
    assert results[0].returncode == 0, results[0].stderr
    assert program_of(h.process.pid) == os.stat(new).st_ino
    c.enc(3, picture())
    assert c.answer(3)[0] == "rows" and len(h.events("start ")) == 1
    c.close()


def test_two_who_ask_at_once_are_both_served(watchdog, copies):
    """An admin's command, and the newer file that the watchdog has found itself."""
    h = watchdog().start()
    c = h.channel()
    programs = [copies("a"), copies("b")]
    c.enc(1, picture("delay=1500"))
    fc.wait_for(lambda: h.events("enc "), "the encode")
    results = []
    threads = [threading.Thread(target=lambda p=p: results.append(h.ask("replace", program=p))) for p in programs]
    for n, t in enumerate(threads):
        t.start()
        fc.wait_for(lambda: h.log.read_text().count("asks to take over") == n + 1, "the request")
    assert c.answer(1)[0] == "rows"
    for t in threads:
        t.join(fc.LIMIT_S)
    assert [r.returncode for r in results] == [0, 0], results
    assert program_of(h.process.pid) == os.stat(programs[1]).st_ino
    c.enc(2, picture())
    assert c.answer(2)[0] == "rows" and len(h.events("start ")) == 1
    c.close()


def test_newer_file_in_place_of_the_running_one_is_taken_up(watchdog, copies):
    h = watchdog()
    h.program = copies()
    h.start()
    c = h.channel()
    pid, old = h.encoder_pid(), program_of(h.process.pid)
    copies()
    new = os.stat(h.program).st_ino
    assert new != old
    fc.wait_for(lambda: h.status() and program_of(h.process.pid) == new, "the newer program")
    c.enc(1, picture())
    assert c.answer(1)[0] == "rows" and h.encoder_pid() == pid
    c.close()
    fc.wait_for(lambda: not [p for p in os.listdir("/proc") if p.isdigit() and is_zombie_of(p, h.process.pid)], "no child left")
    assert "did not take over" not in h.log.read_text()


def is_zombie_of(pid, parent):
    try:
        state, ppid = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[:2]
    except OSError:
        return False
    return state == "Z" and int(ppid) == parent


def test_file_that_is_no_program_is_left_alone(watchdog, copies, tmp_path):
    h = watchdog()
    h.program = copies()
    h.start()
    c = h.channel()
    half = tmp_path / "half"
    half.write_text("half of an installation")
    half.chmod(0o755)
    os.rename(half, h.program)
    h.program = WATCHDOG
    fc.wait_for(lambda: h.status() and "another program lies at" in h.log.read_text(), "the look at it")
    c.enc(1, picture())
    assert c.answer(1)[0] == "rows" and len(h.events("start ")) == 1
    c.close()


def test_other_settings_come_with_the_other_program(watchdog, copies):
    h = watchdog().start()
    c = h.channel()
    old = h.encoder_pid()
    h.configure(threads=3)
    replaced(h, copies())
    c.await_ready()
    assert h.encoder_pid() != old and "arg 3" in h.events("arg ")
    c.close()


def test_wrong_settings_keep_the_running_program(watchdog, copies):
    h = watchdog().start()
    c = h.channel()
    good = h.config.read_text()
    old = program_of(h.process.pid)
    h.config.write_text("{}")
    p = h.ask("replace", program=copies())
    assert p.returncode == 1 and '"mmproj" is missing' in p.stderr
    h.config.write_text(good)
    assert program_of(h.process.pid) == old
    c.enc(1, picture())
    assert c.answer(1)[0] == "rows" and len(h.events("start ")) == 1
    c.close()


def test_sleeping_encoder_is_not_woken(watchdog, copies):
    h = watchdog(encoder_idle_s=1).start()
    c = h.channel()
    h.wait_state("absent")
    replaced(h, copies())
    assert h.status()["encoder"]["state"] == "absent" and h.status()["encoder"]["starts"] == 1
    c.enc(1, picture())
    assert c.answer(1)[0] == "rows" and len(h.events("start ")) == 2
    c.close()


def test_encoder_that_died_meanwhile_is_missed(watchdog, copies):
    h = watchdog().start()
    c = h.channel()
    replaced(h, copies())
    os.kill(h.encoder_pid(), 9)
    c.await_ready()
    c.enc(1, picture())
    assert c.answer(1)[0] == "rows" and len(h.events("start ")) == 2
    c.close()


def test_service_that_waits_holds_nothing_up(watchdog, copies):
    h = watchdog().start()
    c = h.channel()
    service = h.run("--service")
    fc.wait_for(lambda: h.status()["retiring"], "the service to ask for the place")
    replaced(h, copies())
    assert service.poll() is None and h.status()["retiring"]
    c.enc(1, picture())
    assert c.answer(1)[0] == "rows" and len(h.events("start ")) == 1
    c.send(fc.BYE)
    c.gone()
    assert h.process.wait(fc.LIMIT_S) == 0
    h.process = service
    fc.wait_for(lambda: (h.try_status() or {}).get("pid") == service.pid, "the service to take the place")


def test_nothing_to_replace(watchdog):
    p = watchdog().ask("replace")
    assert p.returncode == 0 and "nothing to replace" in p.stdout


@pytest.mark.parametrize("order", ["status", "stop"])
def test_nobody_is_asked(watchdog, tmp_path, order):
    h = watchdog()
    p = h.ask(order)
    assert p.returncode == 1 and "no watchdog" in p.stderr and str(h.socket) in p.stderr


def test_channels_of_agents_go_on(agent_host, copies):
    h = agent_host
    c = h.agent()
    pid = h.encoder_pid()
    wd = h.status()["pid"]
    p = h.ask("replace", program=copies())
    assert p.returncode == 0, p.stderr
    assert h.status()["pid"] == wd
    pic = picture("rows=128x128", 200000)
    c.enc(1, pic)
    assert c.answer(1)[2] == expected(pic, 16384, 8) and h.encoder_pid() == pid
    c.close()
    assert c.owner.returncode == 0
    fc.wait_for(lambda: h.status()["leases"][0]["channels"] == 0, "the loss to be noticed")
