"""One command from a PC with sshd and a compiler to a host that answers; and back. The programs are built there, from what is sent."""
import json
import os
import pathlib
import subprocess

import pytest

import lab
import pcs
from pcs import wait_for

BUILD_LIMIT_S = 1800  # only a build that hangs takes so long


def farsight(main, *args):
    """On the server's PC; what it said."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("XDG_", "SSH_", "FARSIGHT_"))}
    inside = ["nsenter", "-t", str(main.init), "-n", "-m", "-p", "--", str(lab.BUILD / "server/cli/farsight"), *map(str, args)]
    done = subprocess.run(inside, env={**kept, "HOME": str(main.home)}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, timeout=BUILD_LIMIT_S)
    (main.folder / "cli.log").write_text(done.stdout)
    lab.check_log(main.folder / "cli.log")
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.long
def test_from_a_bare_pc_to_an_answer_and_back(lan):
    main, box = lan.pc("main", pcs.ServerPc), lan.pc("box", pcs.VisionPc)
    (box.home / ".config/farsight/vision-host.json").unlink()
    keys = box.home / ".ssh/authorized_keys"
    keys.write_text((main.home / ".ssh/id_ed25519.pub").read_text())
    keys.chmod(0o600)
    cache = pathlib.Path(os.environ.get("CCACHE_DIR", pathlib.Path.home() / ".cache/ccache"))
    if cache.is_dir():
        box.sshd_environment["CCACHE_DIR"] = str(cache)
    box.start_sshd()
    before = {str(p.relative_to(box.home)) for p in box.home.rglob("*") if p.is_file()}
    config = main.home / ".config/farsight/server.json"
    config.write_text(json.dumps({"model": str(lab.TEXT_MODEL), "threads": 1, "context": 2048}))

    name = f"root@{box.address}"
    said = farsight(main, "host", "add", name, "--yes", "--mmproj", lab.MMPROJ)
    assert "done    programs: built" in said and "ok      test picture" in said, said
    assert json.loads(config.read_text())["vision"]["hosts"][0]["host"] == name

    server = main.serve([], vision=json.loads(config.read_text())["vision"])
    server.wait_for_eyes()
    assert server.ask("What is in this picture?", sorted((lab.TOP / "tests/data/pictures").glob("*.png"))[0])
    assert "failed" not in farsight(main, "host", "check")
    server.stop()
    wait_for(lambda: not box.pids("farsight-encoder"), "the encoder's end")

    farsight(main, "host", "remove", name, "--yes")
    assert not box.pids("farsight-watchdog")
    assert {str(p.relative_to(box.home)) for p in box.home.rglob("*") if p.is_file()} == before
    assert keys.read_text() == (main.home / ".ssh/id_ed25519.pub").read_text()
