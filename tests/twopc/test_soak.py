"""Many faults in a row, drawn from a seed, under a load of pictures: two vision PCs, one of which is in trouble most of the time. Then the
books are compared: every picture has one end, and nothing is left of it anywhere."""
import os
import random
import signal
import threading

import pytest

import lab
import pcs
from pair import picture
from pcs import wait_for

STEPS = 14
CLIENTS = 3


def kill(name, sig=signal.SIGKILL):
    def do(p, box):
        for pid in box.pids(name):
            if box.sshd.pid != pid:
                os.kill(pid, sig)
    return do


def restart_sshd(p, box):
    box.stop_sshd()
    box.start_sshd()


FAULTS = {  # what begins it, what ends it
    "cut": (lambda p, box: p.main.cut(), lambda p, box: p.main.repair()),
    "mute": (lambda p, box: box.mute(), lambda p, box: box.repair()),
    "slow": (lambda p, box: (box.slow(1), p.main.slow(2)), lambda p, box: p.at_full_speed()),
    "encoder killed": (kill("fake_encoder"), None),
    "encoder stopped": (kill("fake_encoder", signal.SIGSTOP), kill("fake_encoder", signal.SIGCONT)),
    "watchdog killed": (kill("farsight-watchdog"), None),
    "sessions killed": (kill("sshd"), None),
    "sshd restarted": (restart_sshd, None),
    "disk full": (lambda p, box: box.size("/dev/shm", "64k"), lambda p, box: box.size("/dev/shm", "700m")),
}


class Client:
    """One picture after the other, now and then one that was asked about before."""

    def __init__(self, p, seed, over):
        self.random, self.p, self.over = random.Random(seed), p, over
        self.pictures, self.results = [], []
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def work(self):
        while not self.over.is_set():
            again = self.pictures and self.random.random() < 0.2
            url = self.random.choice(self.pictures) if again else picture("", self.random.choice((0, 50000, 500000)))
            self.pictures.append(url)
            self.results.append((url, self.p.begin(url).result(2 * lab.LIMIT_S)))
            self.over.wait(0.05)


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
def test_soak(pair, seed):
    p = pair(boxes=2, host={"encode_timeout_s": 3, "probe_fails": 5})
    dice, over = random.Random(seed), threading.Event()
    for box in p.boxes:
        box.order("delay=50")
    clients = [Client(p, seed * 100 + i, over) for i in range(CLIENTS)]
    for _ in range(STEPS):
        name = dice.choice(sorted(FAULTS))
        box, hold, pause = dice.choice(p.boxes), dice.uniform(0.1, 3.5), dice.uniform(0.1, 1.5)
        begin, end = FAULTS[name]
        begin(p, box)
        over.wait(hold)
        if end:
            end(p, box)
        over.wait(pause)
    over.set()
    for c in clients:
        c.thread.join(4 * lab.LIMIT_S)
        assert not c.thread.is_alive(), "a picture got no answer"
    wait_for(lambda: [h["state"] for h in p.server.eyes()["hosts"]] == ["up", "up"], "both hosts", 2 * lab.LIMIT_S)
    ends = [p.judge(url, result) for c in clients for url, result in c.results]
    assert ends.count("right") > len(ends) / 4, ends
    for _ in range(4):
        p.see()
    wait_for(lambda: not p.server.live() or all(r["pictures"] == 0 for r in p.server.live()), "the end of all pictures")
    for host, box in zip(p.server.status()["vision"]["hosts"], p.boxes):
        assert host["outstanding"] == 0
        assert host["encodes"] <= len(box.events("ok")), "rows that no encoder made"
        wait_for(lambda: box.status()["pictures"] == 0 and not box.spooled(), "an idle host")
        assert len(box.encoders()) == 1 and len(box.pids("farsight-watchdog")) == 1
    totals = p.server.status()["totals"]
    assert totals["finish"].get("error", 0) + totals["finish"].get("refused", 0) == len(ends) - ends.count("right"), totals
