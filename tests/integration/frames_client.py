"""A server's side of the frames, written from docs/PROTOCOL.md and sharing no code with Farsight: used by tests that stand in
for farsight-server before a vision host's programs."""
import json
import os
import select
import socket
import struct
import subprocess
import time

HELLO, ENC, DATA, ROWS, ERR, CANCEL, PING, PONG, STATE, BYE = range(1, 11)
F32, F16 = 0, 1
# enum fs_err, as positive numbers on the wire
EINVAL, EIO, EFORMAT, ETIMEOUT, ECANCELLED, EUNAVAILABLE, ELIMIT, ENOTSUP = 1, 3, 4, 5, 6, 7, 8, 9
LIMIT_S = 60  # of any single wait; generous, since nothing here measures time


class Gone(Exception):
    """The other side closed."""


class Channel:
    """Frames over two descriptors or a socket; the first line to a watchdog's socket is written by the caller."""

    def __init__(self, rfd, wfd, owner=None):
        self.rfd, self.wfd, self.owner = rfd, wfd, owner
        self.buf = b""
        self.seen = []  # frames read while another one was awaited

    def send(self, type_, id_=0, payload=b""):
        self.raw(struct.pack("<IBBHI", len(payload), type_, 0, 0, id_) + payload)

    def raw(self, data):
        view = memoryview(data)
        while view:
            view = view[os.write(self.wfd, view):]

    def read(self, limit=LIMIT_S):
        """The next frame as (type, id, payload), those put back first."""
        if self.seen:
            return self.seen.pop(0)
        return self._read(limit)

    def _read(self, limit):
        until = time.monotonic() + limit
        while True:
            if len(self.buf) >= 12:
                n, type_, flags, reserved, id_ = struct.unpack("<IBBHI", self.buf[:12])
                assert flags == 0 and reserved == 0 and n <= 256 * 1024, "malformed frame from the host"
                if len(self.buf) >= 12 + n:
                    frame = (type_, id_, self.buf[12:12 + n])
                    self.buf = self.buf[12 + n:]
                    return frame
            left = until - time.monotonic()
            if left <= 0 or not select.select([self.rfd], [], [], left)[0]:
                raise TimeoutError("no frame in time")
            try:
                got = os.read(self.rfd, 1 << 20)
            except ConnectionResetError:
                got = b""
            if not got:
                raise Gone()
            self.buf += got

    def expect(self, type_, id_=None):
        """The next frame of this type (and id); others stay for later. PINGs of the host are answered."""
        for i, f in enumerate(self.seen):
            if f[0] == type_ and id_ in (None, f[1]):
                return self.seen.pop(i)
        while True:
            f = self._read(LIMIT_S)
            if f[0] == type_ and id_ in (None, f[1]):
                return f
            if f[0] == PING:
                self.send(PONG, f[1], f[2])
            else:
                self.seen.append(f)

    def hello(self, lease="lease-a", **more):
        self.send(HELLO, 0, json.dumps({"version": 1, "program": "test", "lease": lease, **more}).encode())

    def await_ready(self):
        while True:
            h = json.loads(self.expect(HELLO)[2])
            if h["state"] == "ready":
                return h

    def enc(self, id_, picture, dtype=F32, deadline_ms=0, upload=True, tokens=(0, 0)):
        self.send(ENC, id_, struct.pack("<IIiiII", len(picture), dtype, tokens[0], tokens[1], deadline_ms, 0))
        if upload:
            for i in range(0, len(picture), 65536):
                self.send(DATA, id_, picture[i:i + 65536])

    def answer(self, id_):
        """("rows", (n, nx, ny, embd, dtype, encode_us, queue_us), bytes) or ("err", code, text)."""
        rows, data = None, b""
        keep = []
        try:
            while True:
                f = self.read()
                if f[0] == PING:
                    self.send(PONG, f[1], f[2])
                elif f[1] != id_ or f[0] not in (ROWS, DATA, ERR):
                    keep.append(f)
                elif f[0] == ERR:
                    return "err", struct.unpack("<I", f[2][:4])[0], f[2][4:].decode()
                elif f[0] == ROWS:
                    assert rows is None and len(f[2]) == 32
                    rows = struct.unpack("<iiiiIIII", f[2])
                else:
                    data += f[2]
                if rows and len(data) >= rows[0] * rows[3] * (2 if rows[4] == F16 else 4):
                    return "rows", rows[:7], data
        finally:
            self.seen = keep + self.seen

    def gone(self):
        """Waits for the end of the connection; the frames before it."""
        frames = []
        try:
            while True:
                frames.append(self.read())
        except Gone:
            return frames

    def close(self):
        for fd in {self.rfd, self.wfd}:
            try:
                os.close(fd)
            except OSError:
                pass
        if self.owner:
            self.owner.wait(LIMIT_S)


def connect(path, peer="-", greeting=None):
    """A channel to a watchdog's socket without an agent between."""
    s = socket.socket(socket.AF_UNIX)
    s.settimeout(LIMIT_S)
    s.connect(str(path))
    s.setblocking(True)
    s.sendall((greeting or f"FARSIGHT 1 channel {peer}\n").encode())
    fd = s.detach()
    return Channel(fd, fd)


def through_agent(argv, env):
    p = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, bufsize=0)
    rfd, wfd = os.dup(p.stdout.fileno()), os.dup(p.stdin.fileno())
    p.stdin.close()
    p.stdout.close()
    return Channel(rfd, wfd, p)


def wait_for(condition, what, limit=LIMIT_S):
    """Polls a condition; its value once it holds."""
    until = time.monotonic() + limit
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > until:
            raise AssertionError(f"not within {limit} s: {what}")
        time.sleep(0.01)
