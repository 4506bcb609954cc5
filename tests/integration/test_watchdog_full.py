"""A vision host that runs out of room: full file systems for pictures and rows, and memory that the encoder took."""
import contextlib
import os
import pathlib
import subprocess

import pytest

import frames_client as fc
from watchdog_lab import expected, picture


@pytest.fixture
def small(tmp_path):
    """Makes file systems of one MiB."""
    made = []

    def make(name):
        folder = tmp_path / name
        folder.mkdir()
        p = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "none", folder], capture_output=True, text=True)
        if p.returncode:
            pytest.skip(f"no file system of a test's own here: {p.stderr.strip()}")
        made.append(folder)
        return folder

    yield make
    for folder in made:
        subprocess.run(["umount", "-l", folder], check=True)


def files(folder):
    return [str(p) for p in pathlib.Path(folder).glob("farsight-spool-*/*")]


def test_picture_goes_elsewhere_while_the_spool_is_full(watchdog, small):
    spool = small("spool")
    h = watchdog(spool=str(spool)).start()
    c = h.channel()
    assert h.status()["spool"].startswith(str(spool))
    for i, size in enumerate((1000, 3 << 20, 1001)):
        pic = picture("", size)
        c.enc(i + 1, pic)
        assert c.answer(i + 1)[2] == expected(pic, 4, 8)
    where = [line.split()[1].startswith(str(spool)) for line in h.events("file ")]
    assert where == [True, False, True], "only what does not fit goes elsewhere"
    assert h.log.read_text().count("is full: pictures go to") == 1 and files(spool) == []
    c.close()


def test_rows_go_elsewhere_once_the_encoder_found_no_room(watchdog, small):
    h = watchdog(spool=str(small("spool"))).start()
    c = h.channel()
    pic = picture("rows=256x256")  # 2 MiB
    c.enc(1, pic)
    assert c.answer(1)[2] == expected(pic, 65536, 8)
    assert len(h.events("full")) == 1 and len(h.events("enc ")) == 2
    c.enc(2, pic)  # known by now: not tried there again
    assert c.answer(2)[2] == expected(pic, 65536, 8)
    assert len(h.events("full")) == 1 and len(h.events("start ")) == 1
    c.close()


def test_nowhere_is_room(watchdog, small):
    """All places are full: refused with the cause, as the host's fault, and the next picture that fits works."""
    shm, tmp = small("shm"), small("tmp")
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("no mounts of a program's own here")
    h = watchdog()
    before = ["unshare", "-m", "sh", "-c", f'mount --bind {shm} /dev/shm && exec "$@"', "sh"]
    h.start(before=before, TMPDIR=str(tmp))
    c = h.channel()
    c.enc(1, picture("", 3 << 20))
    kind, code, text = c.answer(1)
    assert (kind, code) == ("err", fc.EUNAVAILABLE) and "can not store the picture" in text and "No space left" in text
    c.enc(2, picture("rows=256x256"))
    kind, code, text = c.answer(2)
    assert (kind, code) == ("err", fc.EUNAVAILABLE) and "No space left" in text, text
    pic = picture("rows=16x16")
    c.enc(3, pic)
    assert c.answer(3)[2] == expected(pic, 256, 8)
    assert len(h.events("start ")) == 1 and files(shm) == files(tmp) == []
    c.close()


def test_folder_for_pictures_that_is_not_there(watchdog, tmp_path):
    h = watchdog(spool=str(tmp_path / "none"))
    assert h.run().wait(fc.LIMIT_S) == 1
    assert f"can not make a folder in {tmp_path}/none: No such file" in h.log.read_text()


@pytest.fixture
def memory_group(tmp_path):
    """A control group of 48 MiB; version 1 or 2, whichever this machine lets us make."""
    name = f"farsight-test-{os.getpid()}"
    for root, limit, value in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes", 48 << 20), ("/sys/fs/cgroup", "memory.max", 48 << 20)):
        group = pathlib.Path(root) / name
        with contextlib.suppress(OSError):
            group.mkdir()
            try:
                (group / limit).write_text(str(value))
            except OSError:
                group.rmdir()
                continue
            with contextlib.suppress(OSError):
                (group / "memory.swap.max").write_text("0")
            yield group
            fc.wait_for(lambda: not (group / "cgroup.procs").read_text(), "the group to be empty")
            group.rmdir()
            return
    pytest.skip("no memory control group can be made here")


def test_encoder_out_of_memory(watchdog, memory_group):
    h = watchdog().start()
    c = h.channel()
    (memory_group / "cgroup.procs").write_text(str(h.encoder_pid()))
    c.enc(1, picture("grow"))
    kind, code, text = c.answer(1)
    assert (kind, code) == ("err", fc.EUNAVAILABLE) and "signal 9 (out of memory" in text
    c.await_ready()
    c.enc(2, picture())
    assert c.answer(2)[0] == "rows" and len(h.events("start ")) == 2
    c.close()
