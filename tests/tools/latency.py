#!/usr/bin/env python3
"""What requests cost each other: text beside long encodes, how soon everything is idle after a client left, and how soon a picture is refused
when its host is known to be down. Runs the real server and vision host's programs on loopback, with tests/tools/fake_encoder as the encoder, so
that an encode takes as long as it is told and no CPU. Used by scripts/bench latency; see there.

Every comparison is made within this run, in turns, so that other load on the machine meets both sides.
"""
import argparse
import contextlib
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

TOP = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(TOP / "tests/integration"))
import lab  # noqa: E402

PICTURE = (TOP / "tests/data/pictures/two-shapes.png").read_bytes()
ENCODER_ARGS = ["--embd", "192", "--rows", "6x6"]
LONG = 600_000  # ms or tokens: longer than anything here waits
POLL_S = 0.001


def now():
    return time.monotonic() * 1e3


def picture(delay_ms, salt):
    return lab.png_with(PICTURE, f"delay={delay_ms}", salt)


def chat(text, *pictures, **more):
    return {"messages": [lab.user(text, *pictures)], **more}


def until(condition, limit_s=30):
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the measured thing did not happen")
        time.sleep(POLL_S)
    return now()


def fake_host(tmp):
    host = lab.VisionHost(tmp)
    host.encoder_log = host.tmp / "encoder.log"
    host.encoder_log.touch()
    host.configure(encoder=str(lab.FAKE_ENCODER), extended=True, encoder_args=[*ENCODER_ARGS, "--log", str(host.encoder_log)])
    return host.start()


def text_times(server, n):
    out = []
    for k in range(n):
        begin = now()
        status, _ = server.chat(lab.user(f"How many shapes are there? {k}"), max_tokens=16, ignore_eos=True)
        assert status == 200
        out.append(now() - begin)
    return out


def beside_encodes(server, rounds, each, name):
    """Text times on an idle server and during an encode, in turns."""
    idle, during = [], []
    text_times(server, each)
    for r in range(rounds):
        idle += text_times(server, each)
        client = server.send("/v1/chat/completions", chat("What is it?", picture(LONG, f"{name}{r}")))
        until(lambda: server.phases() == ["encode"])
        during += text_times(server, each)
        client.close()
        until(lambda: not server.live())
    return idle, during


def cancel_times(server, rounds, body, phase, also=lambda: True):
    """From the close of the client's socket until the server is idle (and `also` holds)."""
    out = []
    for r in range(rounds):
        client = server.send("/v1/chat/completions", body(r))
        until(lambda: phase in server.phases())
        time.sleep(0.05)
        begin = now()
        client.close()
        out.append(until(lambda: not server.live() and also()) - begin)
    return out


def cancels(server, host, rounds):
    def encoder_idle():
        words = host.encoder_log.read_text().split()
        return words.count("cancel") >= words.count("enc")

    phases = {
        "encode": (lambda r: chat("What is it?", picture(LONG, f"cancel{r}")), encoder_idle),
        "prefill": (lambda r: chat(f"{r} " + "word " * 40000), lambda: True),
        "decode": (lambda r: chat("Hello!", max_tokens=LONG, ignore_eos=True), lambda: True),
    }
    out = {name: cancel_times(server, rounds, body, name, also) for name, (body, also) in phases.items()}
    holder = server.send("/v1/chat/completions", chat("Hello!", max_tokens=LONG, ignore_eos=True))
    until(lambda: server.phases() == ["decode"])
    out["queue"] = []
    for _ in range(rounds):
        client = server.send("/v1/chat/completions", chat("Hello!"))
        until(lambda: "queue" in server.phases())
        begin = now()
        client.close()
        out["queue"].append(until(lambda: server.phases() == ["decode"]) - begin)
    holder.close()
    until(lambda: not server.live())
    return out


def known_down(server, host, rounds):
    host.stop_sshd()
    until(lambda: server.eyes()["hosts"][0]["state"] == "down", 60)
    out = []
    for r in range(rounds):
        begin = now()
        status, reply = server.chat(lab.user("What is it?", picture(0, f"down{r}")))
        out.append(now() - begin)
        assert status == 400 and reply["error"]["code"] == "vision_unavailable", reply
    return out


def figure(times):
    return {"median_ms": round(statistics.median(times), 2), "worst_ms": round(max(times), 2), "n": len(times)}


def local_server(tmp):
    exe = tmp / "encoder"
    exe.write_text(f"#!/bin/sh\nexec {lab.FAKE_ENCODER} {' '.join(ENCODER_ARGS)} \"$@\"\n")
    exe.chmod(0o755)
    return lab.Server(tmp / "local", vision={"exe": str(exe), "mmproj": str(lab.MMPROJ), "gpu": False, "extended": "off"})


def measure(rounds, tmp):
    with contextlib.ExitStack() as running:
        host = fake_host(tmp / "host")
        running.callback(host.stop)
        server = lab.Server(tmp / "remote", [host], context=65536)
        running.callback(server.stop)
        local = local_server(tmp)
        running.callback(local.stop)
        server.wait_for_eyes()
        idle, during = beside_encodes(server, rounds, 12, "remote")
        local_idle, local_during = beside_encodes(local, rounds, 12, "local")
        by_phase = cancels(server, host, rounds)
        down = known_down(server, host, rounds * 5)
    return {
        "text_during_remote_encode_ratio": round(statistics.median(during) / statistics.median(idle), 3),
        "text_during_local_cpu_encode_ratio": round(statistics.median(local_during) / statistics.median(local_idle), 3),
        "cancel_to_idle_ms_worst": round(max(max(t) for t in by_phase.values()), 2),
        "refused_known_down_ms_worst": round(max(down), 2),
        "text_idle": figure(idle), "text_during_remote_encode": figure(during),
        "text_idle_local": figure(local_idle), "text_during_local_cpu_encode": figure(local_during),
        "cancel_to_idle": {name: figure(t) for name, t in by_phase.items()},
        "refused_known_down": figure(down),
    }


def table(r):
    print(f"{'what':44}{'median ms':>10}{'worst ms':>10}{'n':>6}")
    rows = [("text, idle server", r["text_idle"]), ("text during a remote encode", r["text_during_remote_encode"]),
            ("text, idle server with a local encoder", r["text_idle_local"]),
            ("text during a local CPU encode", r["text_during_local_cpu_encode"])]
    rows += [(f"client leaves in {p}: all idle after", f) for p, f in r["cancel_to_idle"].items()]
    rows += [("picture refused, host known to be down", r["refused_known_down"])]
    for name, f in rows:
        print(f"{name:44}{f['median_ms']:10.2f}{f['worst_ms']:10.2f}{f['n']:6}")
    for key in ("text_during_remote_encode_ratio", "text_during_local_cpu_encode_ratio", "cancel_to_idle_ms_worst", "refused_known_down_ms_worst"):
        print(f"{key} {r[key]}")


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--rounds", type=int, default=10)
    p.add_argument("--json", action="store_true")
    a = p.parse_args()
    with tempfile.TemporaryDirectory(prefix="fs-latency-") as tmp:
        r = measure(a.rounds, pathlib.Path(tmp))
    if a.json:
        print(json.dumps(r))
    else:
        table(r)


main()
