"""A cable with faults, between two network namespaces: two TAP devices and this process, which carries their frames with delay, loss and
a rate. For kernels without sch_netem, which small virtual machines often have; losses come from a seed, so a run can be repeated.

usage: wire.py NETNS_A DEVICE_A NETNS_B DEVICE_B [--delay-ms N] [--loss FRACTION] [--rate-mbit N] [--seed N]
Says "ready" once both devices exist; carries until it is killed; then the devices are gone."""
import argparse
import collections
import ctypes
import fcntl
import os
import random
import select
import struct
import time

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
QUEUE = 1000  # frames on their way in one direction; more are dropped, as by any cable's switch
libc = ctypes.CDLL(None, use_errno=True)


def enter(netns):
    """For this thread alone."""
    fd = os.open(f"/run/netns/{netns}", os.O_RDONLY)
    rc = libc.setns(fd, CLONE_NEWNET)
    os.close(fd)
    if rc:
        raise OSError(ctypes.get_errno(), f"can not enter the network namespace {netns}")


def tap(netns, device):
    enter(netns)
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TAP | IFF_NO_PI))
    return fd


class Direction:
    def __init__(self, source, sink, o, seed):
        self.source, self.sink, self.o = source, sink, o
        self.random = random.Random(seed)
        self.free_at = 0.0  # when the last frame has left
        self.frames = collections.deque()  # (due, frame); dues only grow

    def take(self, now):
        for _ in range(64):  # the other direction wants its turn
            try:
                frame = os.read(self.source, 65536)
            except OSError:  # none left, or the device is down
                return
            if len(self.frames) >= QUEUE or self.random.random() < self.o.loss:
                continue
            self.free_at = max(now, self.free_at)
            if self.o.rate_mbit:
                self.free_at += len(frame) * 8 / (self.o.rate_mbit * 1e6)
            self.frames.append((self.free_at + self.o.delay_ms / 1000, frame))

    def give(self, now):
        while self.frames and self.frames[0][0] <= now:
            frame = self.frames.popleft()[1]
            try:
                os.write(self.sink, frame)
            except OSError:  # the other device is down: lost, as on any cable
                pass


def main():
    p = argparse.ArgumentParser()
    for name in ("netns_a", "device_a", "netns_b", "device_b"):
        p.add_argument(name)
    p.add_argument("--delay-ms", type=float, default=0)
    p.add_argument("--loss", type=float, default=0)
    p.add_argument("--rate-mbit", type=float, default=0)
    p.add_argument("--seed", type=int, default=1)
    o = p.parse_args()
    a, b = tap(o.netns_a, o.device_a), tap(o.netns_b, o.device_b)
    print("ready", flush=True)
    ways = [Direction(a, b, o, o.seed), Direction(b, a, o, o.seed + 1)]
    while True:
        due = min((w.frames[0][0] for w in ways if w.frames), default=None)
        wait = None if due is None else max(0.0, due - time.monotonic())
        readable = select.select([a, b], [], [], wait)[0]
        now = time.monotonic()
        for w in ways:
            if w.source in readable:
                w.take(now)
            w.give(now)


main()
