"""`farsight host`: two homes on one machine with a real sshd between them. The vision host's home is what sshd's SetEnv says, so that nothing of the
user's is read or written."""
import contextlib
import fcntl
import getpass
import hashlib
import json
import os
import pathlib
import pty
import re
import select
import shutil
import socket
import subprocess
import termios
import threading

import pytest

import lab

CLI = lab.BUILD / "server/cli/farsight"
BUILD_LIMIT_S = 1800  # only a build that hangs takes so long
LIMIT_S = 5 * lab.LIMIT_S  # of a command, which takes many steps


class Box:
    """A bare machine: sshd, a home with the admin's key in authorized_keys, and nothing else."""

    def __init__(self, tmp):
        self.tmp = tmp
        self.home, self.main = tmp / "host-home", tmp / "main-home"
        self.port = lab.free_port()
        self.process = None
        for d in (self.home / ".ssh", self.main / ".ssh", tmp / "run"):
            d.mkdir(parents=True, mode=0o700)
        self.keygen(tmp / "host_key")
        self.keygen(self.main / ".ssh/id_ed25519")
        self.keys = self.home / ".ssh/authorized_keys"
        self.keys.write_text("# keys of friends\n" + (self.main / ".ssh/id_ed25519.pub").read_text() + "ssh-ed25519 AAAAnot-a-key somebody")
        self.keys.chmod(0o600)
        self.known = self.main / ".ssh/known_hosts"
        (self.main / ".ssh/config").write_text(f"Host box\n  HostName 127.0.0.1\n  Port {self.port}\n  User {getpass.getuser()}\n")
        self.config = self.main / "server.json"
        self.config.write_text(json.dumps({"model": str(lab.TEXT_MODEL), "listen": "127.0.0.1:0", "sampling": {"temperature": 0}}))
        self.binary = tmp / "binary"
        self.binary.mkdir()
        for program in (lab.AGENT, lab.WATCHDOG, lab.ENCODER):
            shutil.copy(program, self.binary)
        self.environment = {"HOME": self.home, "XDG_RUNTIME_DIR": tmp / "run"}

    @staticmethod
    def keygen(path):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)

    def start(self, **environment):
        variables = " ".join(f'"{k}={v}"' for k, v in {**self.environment, **environment}.items())
        (self.tmp / "sshd_config").write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {self.tmp}/host_key\nAuthorizedKeysFile {self.keys}\nSetEnv {variables}\n"
            + lab.sshd_common())
        if os.getuid() == 0:
            os.makedirs("/run/sshd", exist_ok=True)
        self.process = subprocess.Popen([lab.SSHD, "-D", "-e", "-f", self.tmp / "sshd_config"], stderr=open(self.tmp / "sshd.log", "ab"))
        lab.wait_for(self.listens, "sshd")
        return self

    def listens(self):
        assert self.process.poll() is None, (self.tmp / "sshd.log").read_text()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def stop(self):
        watchdog = self.home / ".local/farsight/bin/farsight-watchdog"
        if watchdog.exists():
            subprocess.run([watchdog, "stop"], env={**os.environ, **{k: str(v) for k, v in self.environment.items()}}, capture_output=True)
        if self.process:
            self.process.terminate()
            self.process.wait(lab.LIMIT_S)

    def run(self, *args, limit=LIMIT_S):
        env = {k: v for k, v in os.environ.items() if not k.startswith(("XDG_", "SSH_", "FARSIGHT_"))}
        done = subprocess.run([CLI, "host", *args], env={**env, "HOME": str(self.main)}, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit)
        (self.tmp / "cli.log").write_text(done.stdout)
        lab.check_log(self.tmp / "cli.log")
        return done.returncode, done.stdout

    def add(self, *args, name="box", limit=LIMIT_S):
        return self.run("add", name, "--config", str(self.config), *args, limit=limit)

    def added(self):
        """A host that is set up, with programs that lie ready."""
        status, said = self.add("--yes", "--binary", str(self.binary), "--mmproj", str(lab.MMPROJ))
        assert status == 0, said
        return said

    def check(self):
        return self.run("check", "--config", str(self.config))

    def remove(self, *args, name="box"):
        return self.run("remove", name, "--config", str(self.config), *args)

    def watchdog(self):
        """Its status."""
        env = {**os.environ, **{k: str(v) for k, v in self.environment.items()}}
        return json.loads(subprocess.run([self.home / ".local/farsight/bin/farsight-watchdog", "status"], env=env, capture_output=True, text=True,
                                         check=True).stdout)

    def tool(self, name, text):
        """A program that stands for the host's own, with start(PATH=box.tool_path())."""
        path = self.tmp / "tools" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("#!/bin/sh\n" + text + "\n")
        path.chmod(0o755)

    def tool_path(self):
        return f"{self.tmp / 'tools'}:/usr/local/bin:/usr/bin:/bin"

    def files(self):
        """What lies in the host's home: names, modes and contents."""
        return {str(p.relative_to(self.home)): (oct(p.stat().st_mode), p.read_bytes() if p.is_file() else None)
                for p in sorted(self.home.rglob("*"))}

    def settings(self):
        return self.home / ".config/farsight/vision-host.json"


@pytest.fixture
def box(tmp_path):
    if lab.SSHD is None:
        pytest.skip("no sshd on this machine")
    b = Box(tmp_path)
    yield b
    b.stop()


def lines(said, mark):
    return [line for line in said.splitlines() if line.startswith(mark)]


def test_from_nothing_to_an_answer(box, servers, monkeypatch):
    """The whole way, with sources that are built on the host."""
    ccache = pathlib.Path(os.environ.get("CCACHE_DIR", pathlib.Path.home() / ".cache/ccache"))
    box.start(**({"CCACHE_DIR": ccache} if ccache.is_dir() else {}))
    status, said = box.add("--yes", "--mmproj", str(lab.MMPROJ), limit=BUILD_LIMIT_S)
    assert status == 0, said
    assert not lines(said, "failed"), said
    for step in ("host key", "own key", "key on the host", "sources", "programs", "mmproj", "settings", "config"):
        assert any(line.startswith(f"done    {step}:") for line in said.splitlines()), (step, said)
    assert (box.main / ".config/farsight/id_farsight").stat().st_mode & 0o777 == 0o600
    assert "restrict,command=" in box.keys.read_text()
    monkeypatch.setenv("HOME", str(box.main))
    server = servers(**json.loads(box.config.read_text()))
    server.wait_for_eyes()
    picture = sorted((lab.TOP / "tests/data/pictures").glob("*.png"))[0]
    assert server.ask("What is in this picture?", picture)

    status, said = box.add("--yes", "--mmproj", str(lab.MMPROJ))
    assert status == 0, said
    assert not lines(said, "done"), said  # everything was there


def test_programs_built_elsewhere_and_twice(box):
    box.start()
    box.added()
    assert json.loads(box.settings().read_text()) == {"mmproj": str(box.home / ".local/farsight/models" / lab.MMPROJ.name)}
    before, config = box.files(), box.config.read_text()
    said = box.added()
    assert not lines(said, "done"), said
    assert box.config.read_text() == config
    assert {k: v for k, v in box.files().items() if "watchdog.log" not in k} == before
    entry = json.loads(config)["vision"]
    assert entry == {"remote": True, "hosts": [{"host": "box", "identity": str(box.main / ".config/farsight/id_farsight")}]}
    assert json.loads(config)["sampling"] == {"temperature": 0}  # the rest stays
    status, said = box.check()
    assert status == 0, said
    assert "works" in said


def test_the_key_opens_nothing_but_the_agent(box):
    box.start()
    box.added()
    out = subprocess.run(["ssh", "-p", str(box.port), "-i", box.main / ".config/farsight/id_farsight", "-o", "IdentitiesOnly=yes", "-o",
                          f"UserKnownHostsFile={box.known}", "-F", "/dev/null", "127.0.0.1", "echo open"],
                         stdin=subprocess.DEVNULL, capture_output=True, timeout=lab.LIMIT_S)
    assert b"open" not in out.stdout
    assert box.keys.read_text().startswith("# keys of friends\n")
    assert len(box.keys.read_text().splitlines()) == 4


def test_host_keys_are_never_taken_silently(box):
    box.start()
    before = box.files()
    status, said = box.add("--mmproj", str(lab.MMPROJ))
    assert status == 1 and lines(said, "failed  host key"), said
    status, said = box.add("--fingerprint", "SHA256:" + "A" * 43)
    assert status == 1 and lines(said, "failed  host key"), said
    assert not box.known.exists() and box.files() == before
    right = subprocess.run(["ssh-keygen", "-lf", box.tmp / "host_key.pub"], capture_output=True, text=True, check=True).stdout.split()[1]
    status, said = box.add("--fingerprint", right, "--binary", str(box.binary), "--mmproj", str(lab.MMPROJ))
    assert status == 0, said
    assert f"[127.0.0.1]:{box.port} ssh-ed25519" in box.known.read_text()


def test_a_changed_host_key_is_refused(box):
    box.start()
    other = (box.main / ".ssh/id_ed25519.pub").read_text().split()[1]
    box.known.write_text(f"[127.0.0.1]:{box.port} ssh-ed25519 {other}\n")
    before = box.files()
    status, said = box.add("--yes", "--mmproj", str(lab.MMPROJ))
    assert status == 1 and "has changed" in said, said
    assert box.files() == before
    assert other in box.known.read_text() and len(box.known.read_text().splitlines()) == 1


def test_a_wrong_user_and_a_wrong_port(box):
    box.start()
    status, said = box.add("--yes", "--port", str(box.port), name="nobody-of-that-name@127.0.0.1")
    assert status == 1 and lines(said, "failed  sign-in"), said
    assert f"ssh-copy-id -p {box.port} nobody-of-that-name@127.0.0.1" in said
    status, said = box.add("--yes", "--port", str(lab.free_port()))
    assert status == 1 and lines(said, "failed  connection"), said


def test_changed_sources_and_a_card_that_comes_later_are_built(box):
    """A tree of two files, which ninja copies, stands for the sources; whether it does shows what would have been compiled."""
    tree, notes = box.tmp / "tree", box.tmp / "notes"
    for folder in ("common", "remote", "scripts"):
        (tree / folder).mkdir(parents=True)
    for name in ("LICENSE", "meson.build", "meson_options.txt", "remote/x", "scripts/install-deps"):
        (tree / name).touch()
    (tree / "common/stays").write_text("old")
    (tree / "common/changes").write_text("old")
    (tree / "scripts/remote-build").write_text(f"""set -e
mkdir -p "$4" "$2/bin"
cp -f {box.binary}/* "$2/bin"
printf 'rule copy\n command = cp $in $out; echo $out >> {notes}\nbuild stays: copy %s/common/stays\nbuild changes: copy %s/common/changes\n' \
	"$PWD" "$PWD" > "$4/build.ninja"
ninja -C "$4"
""")
    for program in ("cc", "meson"):
        box.tool(program, "exit 1")
    box.tool("nvidia-smi", "exit 1")
    box.start(PATH=box.tool_path())
    share, build = box.home / ".local/farsight/share", box.home / ".local/farsight/build"

    def built(*files):
        notes.write_text("")
        status, said = box.add("--yes", "--sources", str(tree), "--mmproj", str(lab.MMPROJ))
        assert status == 0, said
        assert sorted(notes.read_text().split()) == list(files), said
        assert {f: (build / f).read_text() for f in ("stays", "changes")} == {f: (tree / "common" / f).read_text() for f in ("stays", "changes")}
        return any(line.startswith("done    programs") for line in said.splitlines())

    assert built("changes", "stays")
    assert not built()
    (tree / "common/changes").write_text("new")
    assert built("changes")
    assert not built()

    box.tool("nvidia-smi", 'case "$*" in *compute_cap*) echo 9.0 ;; *) echo "A card, 1 MiB" ;; esac')
    assert built() and not built()
    box.tool("nvcc", "exit 1")
    assert built() and not built()

    (share / "built").write_text((share / "sources").read_text())  # an older release was here: all files of one age, and programs that may be old
    (share / "src/.dated").unlink()
    for f in share.joinpath("src").rglob("*"):
        os.utime(f, (0, 0))
    (build / "changes").write_text("stale")
    assert built("changes", "stays") and not built()


def test_no_compiler(box):
    path = box.tmp / "path"
    path.mkdir()
    for folder in ("/bin", "/usr/bin"):
        for program in os.listdir(folder):
            if not any(word in program for word in ("cc", "gcc", "clang", "c99", "c89", "apt", "sudo", "meson")) and not (path / program).exists():
                (path / program).symlink_to(f"{folder}/{program}")
    box.start(PATH=path)
    status, said = box.add("--yes", "--mmproj", str(lab.MMPROJ))
    assert status == 1, said
    assert "a C compiler, meson" in lines(said, "failed  build tools")[0]
    assert "apt-get install" in said


def test_missing_packages(box):
    """Tools that say what the test wants stand for Debian's."""
    tools = box.tmp / "tools"
    tools.mkdir()

    def tool(name, text):
        (tools / name).write_text("#!/bin/sh\n" + text + "\n")
        (tools / name).chmod(0o755)

    tool("dpkg-query", 'for a; do last=$a; done; [ "$last" = libgif-dev ] || echo "install ok installed"')
    tool("apt-get", f'echo "$*" >> {box.tmp}/apt; [ "$1" = update ] || {{ echo "E: no network here"; exit 100; }}')
    tool("sudo", "exit 1")
    tool("id", 'case "$1" in -u) echo 1000 ;; *) exec /usr/bin/id "$@" ;; esac')
    box.start(PATH=f"{tools}:/usr/bin:/bin")
    status, said = box.add("--yes", "--mmproj", str(lab.MMPROJ))
    assert status == 1 and "may not install" in lines(said, "failed  build tools")[0], said
    assert "type: sudo apt-get install -y libgif-dev\n" in said
    (tools / "id").unlink()
    if os.getuid() == 0:
        status, said = box.add("--mmproj", str(lab.MMPROJ))
        assert status == 1 and not (box.tmp / "apt").exists(), said  # nobody has agreed
        status, said = box.add("--yes", "--mmproj", str(lab.MMPROJ))
        assert status == 1 and "E: no network here" in lines(said, "failed  build tools")[0], said
        assert (box.tmp / "apt").read_text().splitlines() == ["update -q", "install -y -q --no-install-recommends libgif-dev"]


def test_programs_that_do_not_run_there_replace_none(box):
    box.start()
    box.added()
    good = (box.home / ".local/farsight/bin/farsight-agent").read_bytes()
    (box.binary / "farsight-encoder").unlink()
    (box.binary / "farsight-encoder").write_text("#!/bin/sh\necho libsomething.so is missing >&2\nexit 127\n")
    (box.binary / "farsight-encoder").chmod(0o755)
    status, said = box.add("--yes", "--binary", str(box.binary))
    assert status == 1 and "libsomething.so is missing" in lines(said, "failed  programs")[0], said
    assert (box.home / ".local/farsight/bin/farsight-agent").read_bytes() == good
    assert box.check()[0] == 0


class Proxy:
    """Carries connections to the host; cuts one off that has sent more than limit bytes."""

    def __init__(self, port):
        self.target, self.limit = port, None
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        with contextlib.suppress(OSError):
            while True:
                near = self.listener.accept()[0]
                far = socket.create_connection(("127.0.0.1", self.target))
                threading.Thread(target=self.carry, args=(near, far, True), daemon=True).start()
                threading.Thread(target=self.carry, args=(far, near, False), daemon=True).start()

    def carry(self, source, sink, counted):
        n = 0
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                n += len(data)
                if counted and self.limit and n > self.limit:
                    break
                sink.sendall(data)
        for s in (source, sink):
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)


def test_an_interrupted_transfer_goes_on(box):
    box.start()
    proxy = Proxy(box.port)
    common = ("--yes", "--port", str(proxy.port), "--binary", str(box.binary))
    status, said = box.add(*common)
    assert status == 1 and "--mmproj FILE" in said, said  # programs are there, no model is
    proxy.limit = 2 << 20
    models = box.home / ".local/farsight/models"

    def broken_off():
        status, said = box.add(*common, "--mmproj", str(lab.MMPROJ))
        assert status == 1 and lines(said, "failed  mmproj"), said
        part, = models.glob(".*.part")
        return part if part.stat().st_size else None
    # sshd may end what writes before it has written anything
    part = lab.wait_for(broken_off, "a part of the file")
    assert part.stat().st_size < 2 << 20
    assert lab.MMPROJ.read_bytes().startswith(part.read_bytes())
    proxy.limit = None
    status, said = box.add(*common, "--mmproj", str(lab.MMPROJ))
    assert status == 0 and "going on from there" in said, said
    assert (models / lab.MMPROJ.name).read_bytes() == lab.MMPROJ.read_bytes()
    assert not list(models.glob(".*"))


def test_a_damaged_part_is_never_used(box):
    box.start()
    assert box.add("--yes", "--binary", str(box.binary))[0] == 1
    models = box.home / ".local/farsight/models"
    models.mkdir(parents=True)
    tag = hashlib.sha256(lab.MMPROJ.read_bytes()).hexdigest()[:16]
    (models / f".{lab.MMPROJ.name}.{tag}.part").write_bytes(b"x" * 100000)
    (models / f".{lab.MMPROJ.name}.0123456789abcdef.part").write_bytes(b"of another file")
    status, said = box.add("--yes", "--binary", str(box.binary), "--mmproj", str(lab.MMPROJ))
    assert status == 1 and "another checksum" in lines(said, "failed  mmproj")[0], said
    assert not list(models.iterdir())
    box.added()


def test_files_that_are_no_vision_model_stop_it_early(box):
    """Nothing is sent or changed for them, and what works goes on working."""
    box.start()
    junk = box.tmp / "junk.gguf"
    junk.write_bytes(b"GGUF, it says")
    for path, cause in ((lab.TEXT_MODEL, "no vision model"), (junk, "junk.gguf"), (box.tmp / "none.gguf", "No such file")):
        status, said = box.add("--yes", "--binary", str(box.binary), "--mmproj", str(path))
        assert status == 1 and cause in lines(said, "failed  mmproj")[0], said
        assert not lines(said, "ok") and not (box.home / ".local").exists(), said
    box.added()
    settings = box.settings().read_bytes()
    for path, cause in (("/no/such.gguf", "no GGUF file"), (str(box.keys), "no GGUF file"), ("a.gguf", "no absolute path")):
        status, said = box.add("--yes", "--binary", str(box.binary), "--host-mmproj", path)
        assert status == 1 and cause in lines(said, "failed  mmproj")[0], said
    assert box.settings().read_bytes() == settings and box.check()[0] == 0
    there = box.tmp / "it's there.gguf"
    shutil.copy(lab.MMPROJ, there)
    status, said = box.add("--yes", "--binary", str(box.binary), "--host-mmproj", str(there))
    assert status == 0 and json.loads(box.settings().read_text())["mmproj"] == str(there), said


def test_settings_of_the_admin_stay(box):
    box.start()
    box.settings().parent.mkdir(parents=True)
    box.settings().write_text('{"mmproj": "/old.gguf", "keep_warm": true}')
    status, said = box.add("--fingerprint", "x", "--binary", str(box.binary))
    assert status == 1
    subprocess.run(["ssh-keyscan", "-p", str(box.port), "127.0.0.1"], stdout=open(box.known, "w"), stderr=subprocess.DEVNULL)
    status, said = box.add("--binary", str(box.binary), "--mmproj", str(lab.MMPROJ))
    assert status == 1 and "/old.gguf" in said and lines(said, "failed  settings"), said
    assert "/old.gguf" in box.settings().read_text()
    said = box.added()
    now = json.loads(box.settings().read_text())
    assert now["keep_warm"] is True and now["mmproj"].endswith(lab.MMPROJ.name)
    status, said = box.run("remove", "box", "--config", str(box.config), "--yes")
    assert status == 0, said
    assert box.settings().read_text() == '{"mmproj": "/old.gguf", "keep_warm": true}'


def test_settings_from_before_come_back_once(box):
    """Also where add had nothing to change in them."""
    box.start()
    box.settings().parent.mkdir(parents=True)
    own = json.dumps({"mmproj": str(lab.MMPROJ), "keep_warm": True})
    box.settings().write_text(own)
    status, said = box.add("--yes", "--binary", str(box.binary), "--host-mmproj", str(lab.MMPROJ))
    assert status == 0 and box.settings().read_text() == own, said
    status, said = box.add("--yes", "--threads", "1")
    assert status == 0 and box.settings().read_text() != own, said
    status, said = box.remove()
    assert status == 0 and box.settings().read_text() == own, said
    assert (box.main / ".config/farsight/id_farsight").exists()  # nobody agreed that it goes
    status, said = box.remove("--yes")
    assert status == 0 and box.settings().read_text() == own, said


def test_settings_that_add_made_do_not_come_back(box):
    box.start()
    before = box.settings().with_name("vision-host.json.before-farsight")
    for older in (False, True):
        box.added()
        if older:  # such a release of add kept nothing when there was nothing
            before.unlink()
        status, said = box.add("--yes", "--threads", "1")
        assert status == 0 and before.read_bytes() == b"", said
        status, said = box.remove("--yes")
        assert status == 0 and not box.settings().parent.exists(), said


def test_a_linked_settings_file(box):
    """A link to where the admin keeps such files stays one."""
    box.start()
    kept = box.home / "dotfiles/vision-host.json"
    for folder in (kept.parent, box.settings().parent):
        folder.mkdir(parents=True)
    kept.write_text('{"mmproj": "/old.gguf"}')
    box.settings().symlink_to(kept)
    box.added()
    status, said = box.remove("--yes")
    assert status == 0 and box.settings().is_symlink(), said
    assert kept.read_text() == '{"mmproj": "/old.gguf"}' and list(kept.parent.iterdir()) == [kept]


def test_a_stub_of_the_text_model_and_another_encoder(box):
    box.start()
    encoder = box.tmp / "encoder"
    encoder.symlink_to(lab.FAKE_ENCODER)
    status, said = box.add("--yes", "--binary", str(box.binary), "--mmproj", str(lab.MMPROJ), "--model", str(lab.TEXT_MODEL),
                           "--encoder", str(encoder), "--encoder-arg=--embd", "--threads", "2")
    settings = json.loads(box.settings().read_text())
    assert settings["encoder"] == str(encoder) and settings["encoder_args"] == ["--embd"] and settings["threads"] == 2
    stub = pathlib.Path(settings["model"])
    assert stub.parent == box.home / ".local/farsight/models" and stub.name == lab.TEXT_MODEL.stem + "-vocabulary.gguf"
    assert stub.read_bytes()[:4] == b"GGUF" and stub.stat().st_size < lab.TEXT_MODEL.stat().st_size


def test_a_user_manager_keeps_the_watchdog(box):
    """A systemctl that takes notes stands for the real one."""
    tools, notes = box.tmp / "tools", box.tmp / "notes"
    tools.mkdir()
    (tools / "systemctl").write_text(f'#!/bin/sh\necho "$*" >> {notes}\n[ ! -e {tools}/broken ] || [ "$2" != start ]\n')
    (tools / "systemctl").chmod(0o755)
    box.start(PATH=f"{tools}:/usr/bin:/bin")
    said = box.added()
    assert "the agent starts it" in said  # programs without a unit
    unit = box.home / ".local/farsight/lib/systemd/user/farsight-watchdog.service"
    unit.parent.mkdir(parents=True)
    unit.write_text("[Service]\n")
    status, said = box.add("--yes", "--threads", "2")
    assert status == 0 and "a systemd service" in said and "sent earlier" in said, said
    assert notes.read_text().splitlines()[-3:] == [f"--user enable {unit}", "--user daemon-reload", "--user start farsight-watchdog"]
    (tools / "broken").touch()
    status, said = box.add("--yes", "--threads", "1")
    assert status == 0 and "the agent starts it" in said, said


def test_check_says_what_is_wrong(box):
    box.start()
    status, said = box.check()
    assert status == 0 and "names no vision host" in said
    box.added()
    mmproj = box.home / ".local/farsight/models" / lab.MMPROJ.name
    mmproj.rename(mmproj.with_suffix(".away"))
    status, said = box.check()
    assert status == 1 and "is missing there" in lines(said, "failed  settings")[0], said
    mmproj.with_suffix(".away").rename(mmproj)
    status, said = box.check()
    assert status == 0, said
    keys = box.keys.read_text()
    box.keys.write_text("".join(line for line in keys.splitlines(True) if "restrict" not in line))
    status, said = box.check()
    assert status == 1 and lines(said, "failed  own key's sign-in"), said
    assert lines(said, "ok      programs"), said  # the rest is looked at all the same
    box.keys.write_text("\n".join(line.split(" ", 2)[2] if "restrict" in line else line for line in keys.splitlines()))
    status, said = box.check()
    assert status == 1 and "not restricted" in lines(said, "failed  key's limits")[0], said
    box.keys.write_text(keys)
    box.process.terminate()
    box.process.wait(lab.LIMIT_S)
    status, said = box.check()
    assert status == 1 and lines(said, "failed  connection"), said
    box.process = None
    assert box.run("check", "other", "--config", str(box.config))[0] == 1


def test_list_with_a_server_and_without(box, servers, monkeypatch):
    box.start()
    box.added()
    status, said = box.run("list", "--config", str(box.config))
    assert status == 0 and said.split()[0] == "box" and "no server" in said
    monkeypatch.setenv("HOME", str(box.main))
    server = servers(**json.loads(box.config.read_text())).wait_for_eyes()
    config = json.loads(box.config.read_text())
    box.config.write_text(json.dumps({**config, "listen": server.url.removeprefix("http://")}))
    status, said = box.run("list", "--config", str(box.config))
    assert status == 0 and said.split()[:2] == ["box", "up"], said
    status, said = box.check()
    assert status == 0 and lines(said, "ok      server"), said


def test_a_running_server_takes_the_host_and_lets_go_of_it(box, servers, monkeypatch):
    box.start()
    monkeypatch.setenv("HOME", str(box.main))
    server = servers(listen=f"127.0.0.1:{lab.free_port()}")
    box.config = server.config
    said = box.added()
    assert any("uses box now" in line for line in lines(said, "ok      server")), said
    assert server.eyes()["available"]
    picture = sorted((lab.TOP / "tests/data/pictures").glob("*.png"))[0]
    assert server.ask("What is in this picture?", picture)

    config = json.loads(server.config.read_text())  # what else was changed is told
    server.config.write_text(json.dumps({**config, "workers": 9}))
    said = box.added()
    assert any("uses box now" in line for line in lines(said, "ok      server")) and '"workers"' in said, said

    status, said = box.run("remove", "box", "--config", str(box.config), "--yes")
    assert status == 0 and "has let go of box" in said, said
    assert said.index("has let go") < said.index("watchdog ended")
    assert server.request("/status")[1]["vision"]["hosts"] == []
    log = server.log.read_text()
    assert "vision host box is let go" in log and "box was lost" not in log


def test_new_programs_take_over_under_a_server(box, servers, monkeypatch):
    """Watchdog, lease and encoder of a server survive an upgrade and other settings."""
    box.start()
    monkeypatch.setenv("HOME", str(box.main))
    box.added()
    server = servers(**json.loads(box.config.read_text()))
    server.wait_for_eyes()
    picture = sorted((lab.TOP / "tests/data/pictures").glob("*.png"))[0]
    first = server.ask("What is in this picture?", picture)

    there = box.watchdog

    def of_server():
        lease, = [x for x in there()["leases"] if x["port"]]
        return lease["lease"]

    before, lease = there(), of_server()
    up_since = server.status()["vision"]["hosts"][0]["state_age_s"]
    for program in ("farsight-watchdog", "farsight-agent"):
        with open(box.binary / program, "ab") as f:
            f.write(b"another build")
    said = box.added()
    assert any("took over" in line for line in lines(said, "done    watchdog")), said
    after = there()
    assert after["pid"] == before["pid"] and after["encoder"]["pid"] == before["encoder"]["pid"] and of_server() == lease
    status, said = box.add("--yes", "--threads", "1", "--binary", str(box.binary), "--mmproj", str(lab.MMPROJ))
    assert status == 0, said
    lab.wait_for(lambda: there()["encoder"]["state"] == "ready" and there()["encoder"]["pid"] != before["encoder"]["pid"], "the encoder with its new settings")
    assert there()["pid"] == before["pid"] and of_server() == lease
    assert server.status()["vision"]["hosts"][0]["host"] == "box" and up_since >= 0
    server.wait_for_eyes()
    assert server.ask("What is in this picture? ", picture) and first
    assert "was lost" not in server.log.read_text()


def test_a_new_model_of_the_same_name_is_loaded(box, servers, monkeypatch):
    box.start()
    monkeypatch.setenv("HOME", str(box.main))
    mmproj = box.tmp / "mmproj.gguf"
    shutil.copy(lab.MMPROJ, mmproj)
    status, said = box.add("--yes", "--binary", str(box.binary), "--mmproj", str(mmproj))
    assert status == 0, said
    server = servers(**json.loads(box.config.read_text())).wait_for_eyes()
    before = box.watchdog()["encoder"]["pid"]
    assert before
    status, said = box.add("--yes", "--binary", str(box.binary), "--mmproj", str(mmproj))
    assert status == 0 and box.watchdog()["encoder"]["pid"] == before, said  # the same one stays warm
    with open(mmproj, "ab") as f:
        f.write(bytes(32))
    status, said = box.add("--yes", "--binary", str(box.binary), "--mmproj", str(mmproj))
    assert status == 0 and not any("settings" in line for line in lines(said, "done")), said
    lab.wait_for(lambda: box.watchdog()["encoder"]["pid"] not in (0, before), "an encoder with the new model")
    server.wait_for_eyes()

    before = box.watchdog()["encoder"]["pid"]
    settings = json.loads(box.settings().read_text())  # as an add leaves them that is broken off before it tells the watchdog
    box.settings().write_text(json.dumps({**settings, "threads": 1}))
    status, said = box.add("--yes", "--threads", "1")
    assert status == 0 and not any("settings" in line for line in lines(said, "done")), said
    lab.wait_for(lambda: box.watchdog()["encoder"]["pid"] not in (0, before), "an encoder with the new settings")


def test_a_server_with_another_config_is_not_taken_for_ours(box, servers, monkeypatch):
    box.start()
    monkeypatch.setenv("HOME", str(box.main))
    server = servers(listen=f"127.0.0.1:{lab.free_port()}")
    box.config.write_text(server.config.read_text())
    said = box.added()
    assert f"reads {server.config}" in said and "did not read its config again" in said, said
    assert not server.eyes()["configured"]


def test_remove_leaves_nothing(box):
    box.start()
    before, config = box.files(), json.loads(box.config.read_text())
    box.added()
    status, said = box.run("remove", "box", "--config", str(box.config), "--yes")
    assert status == 0 and not lines(said, "failed"), said
    after = box.files()
    for folder in (".local", ".config"):  # others put things there too
        assert not any(k.startswith(folder + "/") for k in after), after.keys()
        after.pop(folder, None)
    mode, keys = after.pop(".ssh/authorized_keys")
    assert (mode, keys.rstrip(b"\n")) == before.pop(".ssh/authorized_keys")  # a last line without newline has got one
    assert after == before
    assert not list((box.tmp / "run").iterdir())
    assert json.loads(box.config.read_text()) == config
    assert not (box.main / ".config/farsight/id_farsight").exists()
    lab.wait_for(lambda: not subprocess.run(["pgrep", "-f", str(box.home)], capture_output=True, text=True).stdout, "the end of all that ran there")
    status, said = box.run("remove", "box", "--config", str(box.config), "--here")
    assert status == 0 and "does not name" in said, said


def test_one_of_two_main_pcs_leaves(box):
    box.start()
    box.added()
    other = (box.main / ".ssh/id_ed25519.pub").read_text().split()[1][:-4] + "AAAA"
    with open(box.keys, "a") as f:
        f.write(f'restrict,command="exec \\"$HOME/.local/farsight/bin/farsight-agent\\"" ssh-ed25519 {other} farsight:you@there\n')
    status, said = box.run("remove", "box", "--config", str(box.config), "--yes")
    assert status == 0 and "1 other machines" in said, said
    assert (box.home / ".local/farsight/bin/farsight-agent").exists()
    assert "farsight:you@there" in box.keys.read_text() and box.keys.read_text().count("restrict") == 1


def test_the_entry_tells_the_way_in(box):
    """Port, ssh_config, known_hosts and the key's place are given once."""
    (box.main / ".ssh/config").rename(box.tmp / "ssh_config")
    text = (box.tmp / "ssh_config").read_text()
    (box.tmp / "ssh_config").write_text(text.replace(f"Port {box.port}", "Port 9"))
    box.start()
    status, said = box.add("--yes", "--port", str(box.port), "--ssh-config", str(box.tmp / "ssh_config"), "--known-hosts", str(box.tmp / "known"),
                           "--binary", str(box.binary), "--mmproj", str(lab.MMPROJ))
    assert status == 0, said
    elsewhere = box.tmp / "keys/id_farsight"
    elsewhere.parent.mkdir()
    (box.main / ".config/farsight/id_farsight").rename(elsewhere)
    config = json.loads(box.config.read_text())
    config["vision"]["hosts"][0]["identity"] = str(elsewhere)
    box.config.write_text(json.dumps(config))
    status, said = box.add()
    assert status == 0 and not lines(said, "done"), said
    assert json.loads(box.config.read_text()) == config
    assert box.check()[0] == 0
    status, said = box.remove("--yes")
    assert status == 0, said
    assert not elsewhere.exists() and "restrict" not in box.keys.read_text() and not (box.home / ".local/farsight").exists()


def test_a_key_of_the_admin_in_the_entry_is_left_alone(box):
    box.start()
    box.added()
    keys = box.keys.read_text()
    config = json.loads(box.config.read_text())
    config["vision"]["hosts"][0]["identity"] = str(box.main / ".ssh/id_ed25519")
    box.config.write_text(json.dumps(config))
    status, said = box.add("--yes")
    assert status == 0 and box.keys.read_text() == keys, said
    status, said = box.remove("--yes")
    assert status == 0, said
    assert (box.main / ".ssh/id_ed25519").exists() and (box.main / ".ssh/id_ed25519.pub").read_text() in box.keys.read_text()


def test_a_removal_that_broke_off_goes_on(box):
    """Its entry is gone by then. The key stays, since another host needs it."""
    box.tool("rm", f'[ ! -e {box.tmp}/broken ] || case "$*" in *.local/farsight) echo "rm: no" >&2; exit 1 ;; esac; exec /bin/rm "$@"')
    box.start(PATH=box.tool_path())
    status, said = box.add("--yes", "--port", str(box.port), "--binary", str(box.binary), "--mmproj", str(lab.MMPROJ), name="127.0.0.1")
    assert status == 0, said
    config = json.loads(box.config.read_text())
    config["vision"]["hosts"].append({"host": "other", "identity": config["vision"]["hosts"][0]["identity"]})
    box.config.write_text(json.dumps(config))
    (box.tmp / "broken").touch()
    status, said = box.remove("--yes", name="127.0.0.1")
    again = f"farsight host remove '127.0.0.1' --port {box.port} --config '{box.config}' --yes"
    assert status == 1 and "rm: no" in said and again in said, said
    (box.tmp / "broken").unlink()
    status, said = box.remove("--port", str(box.port), name="127.0.0.1")
    assert status == 1 and "it names other" in said and "--yes" in lines(said, "        ->")[0], said  # there is nobody to ask
    assert (box.home / ".local/farsight").exists()
    status, said = box.remove("--port", str(box.port), "--yes", name="127.0.0.1")
    assert status == 0, said
    assert not (box.home / ".local/farsight").exists() and (box.main / ".config/farsight/id_farsight").exists()


def test_programs_of_a_watchdog_that_does_not_end_stay(box):
    box.start()
    box.added()
    program = box.home / ".local/farsight/bin/farsight-watchdog"
    program.rename(program.with_name("real"))
    program.write_text('#!/bin/sh\n[ "$1" = stop ] && exit 1\nexec "$HOME/.local/farsight/bin/real" "$@"\n')
    program.chmod(0o755)
    status, said = box.remove("--yes")
    assert status == 1 and "the watchdog does not end" in said and "farsight host remove 'box'" in said, said
    assert box.watchdog()["pid"]
    program.with_name("real").rename(program)
    status, said = box.remove("--yes")
    assert status == 0 and not program.exists(), said


def test_a_host_is_not_removed_by_another_name(box):
    box.start()
    name = f"{getpass.getuser()}@127.0.0.1"
    status, said = box.add("--yes", "--port", str(box.port), "--binary", str(box.binary), "--mmproj", str(lab.MMPROJ), name=name)
    assert status == 0, said
    before, config = box.files(), box.config.read_text()
    for other in ("127.0.0.1", "box"):
        status, said = box.remove("--yes", "--port", str(box.port), name=other)
        assert status == 1 and f"names that host {name}" in lines(said, "failed  config")[0], said
        assert f"farsight host remove {name}" in said
    status, said = box.remove("--port", str(box.port), name="localhost")
    assert status == 1 and f"it names {name}" in said and lines(said, "failed  config"), said
    assert box.files() == before and box.config.read_text() == config
    assert box.check()[0] == 0


def test_remove_outwaits_the_watchdog():
    """The encoder's end may take as long as the watchdog says; programs that run are not taken away, nor is it called a failure."""
    def number(file, pattern):
        return int(re.search(pattern, (lab.TOP / file).read_text()).group(1))

    stop = number("remote/watchdog/client.c", r"#define STOP_MS (\d+)") / 1000
    service = number("remote/watchdog/farsight-watchdog.service.in", r"TimeoutStopSec=(\d+)")
    assert number("server/cli/host_remove.c", r"#define END_S (\d+)") > stop + service


class Terminal:
    """farsight host add at a terminal."""

    def __init__(self, box, *args):
        self.said = b""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("XDG_", "SSH_", "FARSIGHT_"))}
        master, slave = pty.openpty()
        self.process = subprocess.Popen([CLI, "host", "add", "box", "--config", box.config, *args], env={**env, "HOME": str(box.main)}, stdin=slave,
                                        stdout=slave, stderr=slave, start_new_session=True,
                                        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))
        os.close(slave)
        self.fd = master

    def read(self):
        try:
            data = os.read(self.fd, 65536) if select.select([self.fd], [], [], 0.1)[0] else b""
        except OSError:  # its other end is closed
            return False
        self.said += data
        return True

    def until(self, word):
        lab.wait_for(lambda: self.read() and word in self.said, word, LIMIT_S)
        self.said = self.said.split(word, 1)[1]

    def type(self, text):
        os.write(self.fd, text)

    def end(self):
        lab.wait_for(lambda: not self.read(), "the end", LIMIT_S)
        os.close(self.fd)
        return self.process.wait(lab.LIMIT_S)


def test_questions_at_a_terminal(box):
    box.start()
    t = Terminal(box)
    t.until(b"[y/N]")
    t.type(b"n\n")
    assert t.end() == 1 and b"not agreed" in t.said
    t = Terminal(box)
    t.until(b"[y/N]")
    t.type(b"\x03")
    assert t.end() == 1 and b"stopped" in t.said
    assert not box.known.exists()
    t = Terminal(box, "--binary", box.binary, "--mmproj", lab.MMPROJ)
    t.until(b"[y/N]")
    t.type(b"y\n")
    assert t.end() == 0
    assert b"mmproj [####" in t.said and b"\033[K" in t.said


def test_wrong_command_lines(box):
    for args in ((), ("ad", "box"), ("add",), ("add", "box", "--mmproj", "a", "--host-mmproj", "b"), ("add", "box", "--port", "0"), ("list", "x"),
                 ("remove",)):
        assert box.run(*args)[0] == 2, args
    assert box.run("--help")[0] == 0
