"""scripts/bench compute and transport at sizes of a test: what they tell fits together. No figure is judged."""
import json
import subprocess

import pytest

import lab

SHAPES = ["tiny-q4_k_m", "tiny-q8_0"]


def check_yardsticks(measured):
    rows = {r["what"]: r for r in measured["operations"]["rows"]}
    s = measured["shares"]
    assert s["copy_gbs"] == rows["copy"]["gbs"] > 0 and s["plain_gflops"] == rows["plain"]["gflops"] > 0
    assert set(rows) == {"copy", "plain", "few"} and rows["plain"]["type"] == "BF16"


def check_shares(measured):
    s = measured["shares"]
    assert [t["model"] for t in measured["text"]] == SHAPES and list(s["decode"]) == list(s["prefill"]) == SHAPES
    for t in measured["text"]:
        assert t["device"].startswith("cpu")
        assert s["decode"][t["model"]] == pytest.approx(t["decode_gbs"] / s["copy_gbs"])
        assert s["prefill"][t["model"]] == pytest.approx(t["prefill_gflops"] / s["plain_gflops"])
    picture, = measured["encode"]["pictures"]
    assert (picture["width"], picture["height"], picture["rows"]) == (112, 112, 16)
    assert 0 < picture["tower_ms"] <= picture["encode_ms_max"]
    assert s["encode"] == {"112x112": pytest.approx(picture["gflops"] / s["plain_gflops"])}


def check_bytes(measured):
    """A decode step reads all weights but the embedding table once, and half-way's KV cache."""
    q4, q8 = measured["text"]
    for t, embedding in ((q4, 2048 * 512 * 144 // 256), (q8, 2048 * 512 * 34 // 32)):
        a_token = t["decode_gbs"] * 1e9 / t["decode_tokens_per_s"]["median"]
        kv = 2 * 4 * 2 * 64 * 2 * (256 + 32 / 2)
        assert a_token == pytest.approx(t["weight_bytes"] - embedding + kv, rel=0.01)


def test_compute(tmp_path):
    command = [lab.TOP / "scripts/bench", "compute", "--build", str(lab.BUILD), "--quick", "--device", "cpu", "--threads", "1", "--random", "tiny",
               "--operations", "few", "--models", str(tmp_path)]
    r = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=600)
    assert r.returncode == 0, r.stderr
    measured = json.loads(r.stdout)
    check_yardsticks(measured)
    check_shares(measured)
    check_bytes(measured)


@pytest.mark.skipif(lab.SSHD is None, reason="no sshd on this machine")
def test_transport():
    r = subprocess.run([lab.TOP / "scripts/bench", "transport", "--build", str(lab.BUILD), "--rounds", "2", "--json"], capture_output=True, text=True,
                       timeout=600)
    assert r.returncode == 0, r.stderr
    m = json.loads(r.stdout)
    assert (m["rounds"], m["bytes_up"], m["bytes_down"], m["host"]) == (2, 200000, 4 * 1024 * 2560, "loopback")
    for way in ("ours", "openssh", "base64"):
        assert 0 < m[f"{way}_min_ms"] <= m[f"{way}_ms"]
    assert m["ratio_openssh"] == pytest.approx(m["ours_ms"] / m["openssh_ms"])
    assert m["ratio_base64"] == pytest.approx(m["ours_ms"] / m["base64_ms"])
