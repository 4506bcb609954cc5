"""farsight, the admin's command, against a real server and a real vision host: what it prints, where, and with which exit status."""
import array
import json
import os
import pathlib
import re
import struct
import subprocess

import pytest

import lab
from lab import TOP, wait_for

FARSIGHT = lab.BUILD / "server/cli/farsight"
PICTURES = TOP / "tests/data/pictures"
CASES = TOP / "tests/data/cases"
QUESTIONS = json.loads((PICTURES / "questions.json").read_text())
EMBD = 192


@pytest.fixture
def farsight(tmp_path):
    """Runs it with nothing of the tester's own configuration; (status, stdout, stderr)."""
    def run(*args, **env):
        clean = {k: v for k, v in os.environ.items() if not k.startswith("FARSIGHT_")}
        clean["XDG_CONFIG_HOME"] = str(tmp_path / "xdg")
        done = subprocess.run([FARSIGHT, *map(str, args)], env={**clean, **{k: str(v) for k, v in env.items()}}, capture_output=True, timeout=lab.LIMIT_S)
        err = done.stderr.decode()
        assert "Sanitizer" not in err and "runtime error" not in err, err
        return done.returncode, done.stdout.decode(), err
    return run


def fails(run, *args, status=1, **env):
    """What it says; a failure is on stderr alone, and each line has the program's name."""
    code, out, err = run(*args, **env)
    assert code == status and out == "", (code, out, err)
    assert err and all(line.startswith("farsight: ") for line in err.splitlines()), err
    return err


def rows_of(path):
    raw = pathlib.Path(path).read_bytes()
    magic, n, nx, ny, width = struct.unpack("<5i", raw[:20])
    assert magic == 0x31455653 and n == nx * ny and len(raw) == 20 + 4 * n * width
    return n, nx, ny, width, array.array("f", raw[20:])


# ---- the command line ----

def test_usage(farsight):
    code, out, err = farsight("--help")
    assert code == 0 and err == "" and out.startswith("usage: farsight ")
    assert farsight("--version")[1].startswith("farsight ")
    commands = re.findall(r"^  (\w+) +\w", out, re.M)
    assert {"host", "status", "ask", "encode", "stub"} == set(commands)
    for name in commands:
        code, out, err = farsight(name, "--help")
        assert code == 0 and err == "" and out.startswith(f"usage: farsight {name}")


@pytest.mark.parametrize("args, said", [
    (["asc"], 'did you mean "ask"'), (["xyzzy"], "no command"),
    (["ask"], "question is missing"), (["ask", "--max-tokens", "0", "x"], "--max-tokens"), (["ask", "--temperature", "hot", "x"], "--temperature"),
    (["ask", "--temperature", "3", "x"], "from 0 to 2"),
    (["encode"], "one picture"), (["encode", "a", "b"], "one picture"), (["encode", "--host", "a", "--mmproj", "b", "c"], "choose"),
    (["stub", "a"], "stub takes"), (["status", "x"], "status takes no"),
    (["ask", "--server", "127.0.0.1:1", "x"], "an http(s) URL"), (["status", "--server", "file:///etc/passwd"], "an http(s) URL"),
])
def test_wrong_command_lines(farsight, args, said):
    assert said in fails(farsight, *args, status=2)


def test_without_a_word(farsight):
    code, out, err = farsight()
    assert code == 2 and out == "" and err.startswith("usage: ")


# ---- ask ----

def test_ask_about_a_picture(host, servers, farsight):
    server = servers(host.start()).wait_for_eyes()
    q = QUESTIONS[0]
    args = ["ask", "--server", server.url + "/", "--temperature", "0", q["question"], PICTURES / q["picture"]]
    code, out, err = farsight(*args)
    assert code == 0 and err == "" and out.endswith("\n")
    assert out.strip().rstrip(".").lower() == q["answer"].strip().rstrip(".").lower()
    code, again, err = farsight(*args[:1], "--times", *args[1:])
    assert code == 0 and again == out
    assert re.search(r"^picture 1: [0-9]+ rows, seen before$", err, re.M) and re.search(r"^answer: [0-9]+ tokens in ", err, re.M)
    code, whole, err = farsight(*args[:1], "--json", *args[1:])
    assert code == 0 and json.loads(whole)["choices"][0]["message"]["content"].strip() == out.strip()


def test_ask_says_what_the_server_says(host, servers, farsight, tmp_path):
    server = servers(host)  # its host is not there
    wait_for(lambda: server.eyes()["hosts"][0]["state"] == "down", "the first attempt")
    err = fails(farsight, "ask", "--server", server.url, "What?", PICTURES / "word.png")
    assert "the image encoder is not available" in err and "127.0.0.1" in err
    assert "no-such.png" in fails(farsight, "ask", "--server", server.url, "What?", tmp_path / "no-such.png")
    (tmp_path / "empty.png").touch()
    assert "empty" in fails(farsight, "ask", "--server", server.url, "What?", tmp_path / "empty.png")
    os.mkfifo(tmp_path / "pipe.png")
    assert "no regular file" in fails(farsight, "ask", "--server", server.url, "What?", tmp_path / "pipe.png")
    (tmp_path / "text.png").write_text("no picture")
    assert fails(farsight, "ask", "--server", server.url, "What?", tmp_path / "text.png")
    code, out, err = farsight("ask", "--server", server.url, "--max-tokens", "1", "Hello")
    assert code == 0 and "cut at its most tokens" in err


def test_ask_without_a_server(farsight):
    err = fails(farsight, "ask", "--server", f"http://127.0.0.1:{lab.free_port()}", "Hello")
    assert "does farsight-server run there?" in err
    assert "http(s) URL" in fails(farsight, "ask", "Hello", FARSIGHT_SERVER="box:8080")


def test_server_and_key_of_the_config(servers, farsight, tmp_path):
    port = lab.free_port()
    server = servers(listen=f"127.0.0.1:{port}", api_key=["secret", "other"])
    assert "FARSIGHT_API_KEY" in fails(farsight, "status", "--server", server.url)
    assert "FARSIGHT_API_KEY" in fails(farsight, "status", "--server", server.url, FARSIGHT_API_KEY="wrong")
    assert farsight("status", "--server", server.url, FARSIGHT_API_KEY="other")[0] == 0
    assert farsight("status", "--config", server.config)[0] == 0
    assert farsight("status", FARSIGHT_CONFIG=server.config)[0] == 0
    (tmp_path / "xdg/farsight").mkdir(parents=True)
    (tmp_path / "xdg/farsight/server.json").write_text(server.config.read_text())
    assert farsight("status")[0] == 0
    assert farsight("ask", "--max-tokens", "2", "Hello")[0] == 0
    # The config's key is for its own server.
    assert "FARSIGHT_API_KEY" in fails(farsight, "status", "--server", f"http://localhost:{port}")
    assert "line break" in fails(farsight, "status", FARSIGHT_API_KEY="a\r\nb")
    (tmp_path / "broken.json").write_text("{")
    assert "broken.json" in fails(farsight, "status", "--config", tmp_path / "broken.json")
    assert "absent.json" in fails(farsight, "status", FARSIGHT_CONFIG=tmp_path / "absent.json")


# ---- status ----

def test_status(host, servers, farsight):
    server = servers(host.start()).wait_for_eyes()
    server.ask("What is this?", PICTURES / "word.png")
    code, out, err = farsight("status", FARSIGHT_SERVER=server.url)
    assert code == 0 and err == ""
    assert out.startswith(server.url + ": ") and "engine idle" in out and "stop 1" in out
    head = next(line.split() for line in out.splitlines() if "HOST" in line)
    line = next(line for line in out.splitlines() if re.match(r"  \S+@127.0.0.1 +up ", line))
    assert head[:2] == ["HOST", "STATE"] and re.search(r" [0-9]+ ms +1 +0 +0 ", line)
    code, out, err = farsight("status", "--json", FARSIGHT_SERVER=server.url)
    assert code == 0 and json.loads(out)["vision"]["hosts"][0]["encodes"] == 1


def test_status_without_vision(servers, farsight):
    assert "pictures are refused" in farsight("status", "--server", servers().url)[1]


def test_status_of_something_else(farsight, tmp_path):
    web = subprocess.Popen(["python3", "-m", "http.server", "--bind", "127.0.0.1", str(port := lab.free_port())], cwd=tmp_path,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        (tmp_path / "status").write_text('{"busy": true}')
        url = f"http://127.0.0.1:{port}"
        assert "farsight-server" in wait_for(lambda: "Couldn't connect" not in (err := fails(farsight, "status", "--server", url)) and err, "the web server")
        assert "status 501" in fails(farsight, "ask", "--server", url, "Hello")  # it knows no POST, and its answer is HTML
    finally:
        web.terminate()
        web.wait(lab.LIMIT_S)


# ---- encode ----

def test_encode_here_and_there_is_the_same(host, servers, farsight, tmp_path):
    host.start()
    config = tmp_path / "server.json"
    config.write_text(json.dumps({"vision": {"remote": True, "hosts": [host.connection()]}}))
    picture = PICTURES / "two-shapes.png"
    code, out, err = farsight("encode", picture, "--out", tmp_path / "there.sve", "--config", config)
    assert code == 0 and err == ""
    here = tmp_path / "here.json"
    here.write_text(json.dumps({"vision": {"exe": str(lab.ENCODER)}}))
    code, out_here, err = farsight("encode", picture, "--out", tmp_path / "here.sve", "--mmproj", lab.MMPROJ, "--config", here)
    assert code == 0 and err == ""
    n, nx, ny, width, rows = rows_of(tmp_path / "there.sve")
    assert f"{n} tokens, {nx} x {ny}, {width} values each, from " in out and "encoder " in out
    assert "from local" in out_here and rows_of(tmp_path / "here.sve") == (n, nx, ny, width, rows) and width == EMBD
    code, out, err = farsight("encode", picture, "--config", config, "--host", host.connection()["host"], "--max-tokens", "16")
    assert code == 0 and int(out.split()[0]) <= 16
    wait_for(lambda: not (host.status() or {})["leases"], "the end of the leases")
    assert sorted(p.name for p in tmp_path.glob("*.sve*")) == ["here.sve", "there.sve"]


def test_encode_errors(host, farsight, tmp_path):
    config = tmp_path / "server.json"
    config.write_text(json.dumps({"vision": {"remote": True, "hosts": [host.connection()]}}))
    picture = PICTURES / "word.png"
    assert "--host or --mmproj" in fails(farsight, "encode", picture)
    assert "nothing listens" in fails(farsight, "encode", picture, "--config", config)
    host.start()
    (tmp_path / "text.png").write_text("no picture")
    assert "picture" in fails(farsight, "encode", tmp_path / "text.png", "--config", config)
    assert "no/folder" in fails(farsight, "encode", picture, "--config", config, "--out", "/no/folder/x.sve")
    config.write_text(json.dumps({"vision": {"exe": str(lab.ENCODER), "mmproj": "/absent.gguf"}}))
    assert "/absent.gguf" in fails(farsight, "encode", picture, "--config", config)


# ---- stub ----

def test_stub(farsight, tmp_path):
    gguf = pytest.importorskip("gguf")
    out = tmp_path / "stub.gguf"
    code, said, err = farsight("stub", lab.TEXT_MODEL, out)
    assert code == 0 and err == "" and said.startswith(str(out))
    assert out.stat().st_size < lab.TEXT_MODEL.stat().st_size / 20
    full, stub = gguf.GGUFReader(lab.TEXT_MODEL), gguf.GGUFReader(out)
    own = {"split.no": 0, "split.count": 1, "split.tensors.count": len(full.tensors)}
    header = {"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count"}
    assert {k: stub.fields[k].contents() for k in own} == own
    assert set(stub.fields) == set(full.fields) | set(own)
    for name in set(full.fields) - header:
        assert stub.fields[name].contents() == full.fields[name].contents() and stub.fields[name].types == full.fields[name].types
    assert [t.name for t in stub.tensors] == [t.name for t in full.tensors]
    assert all(t.tensor_type == gguf.GGMLQuantizationType.F32 and t.n_elements == 1 for t in stub.tensors)
    assert [t.data_offset - stub.data_offset for t in stub.tensors] == [32 * i for i in range(len(stub.tensors))]
    assert out.stat().st_size == stub.data_offset + 32 * len(stub.tensors)


def test_stub_serves_an_encoder_as_its_text_model(farsight, tmp_path):
    out = tmp_path / "stub.gguf"
    assert farsight("stub", lab.TEXT_MODEL, out)[0] == 0
    done = subprocess.run([lab.ENCODER, "--mmproj", lab.MMPROJ, "--model", out], input=b"QUIT\n", capture_output=True, timeout=lab.LIMIT_S)
    assert done.stdout.startswith(b"READY "), done


def test_stub_errors(farsight, tmp_path):
    assert "no vocabulary" in fails(farsight, "stub", lab.MMPROJ, tmp_path / "x.gguf")
    assert "replace the model" in fails(farsight, "stub", lab.TEXT_MODEL, lab.TEXT_MODEL)
    assert "absent.gguf" in fails(farsight, "stub", "/absent.gguf", tmp_path / "x.gguf")
    assert not list(tmp_path.iterdir())
