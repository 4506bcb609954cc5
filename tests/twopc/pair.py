"""The server's PC and its vision PCs at work: how a picture is brought to a certain phase, and what must hold after every fault."""
import base64
import concurrent.futures
import hashlib
import itertools
import re

import lab
import pcs
from pcs import wait_for

QUESTION = {"max_tokens": 3, "temperature": 0}
PLAIN = (lab.TOP / "tests/data/cases/plain.png").read_bytes()
salts = itertools.count(1)


def picture(words="", size=0):
    """A fresh picture; all of its bytes decide its rows."""
    return lab.png_with(PLAIN, words, f"salt {next(salts)}" + "".join(f"{i:07x}\n" for i in range(size // 8)))


def ask(server, url, **more):
    return server.chat(lab.user("What is this?", url), **QUESTION, **more)


def sums(server, url):
    """Of the rows that a server used for a picture, each time that it did: its log tells, at the level of debug."""
    name = hashlib.sha256(base64.b64decode(url.split(",")[1])).hexdigest()[:16]
    return re.findall(f"picture {name}: ([^,]*, sum [0-9a-f]*),", server.log.read_text())


class Truth:
    """The rows of a server that no network disturbs: the same encoder is its child."""

    def __init__(self, tmp):
        encoder = tmp / "encoder"
        encoder.write_text(f'#!/bin/sh\nexec {lab.FAKE_ENCODER} --embd {pcs.EMBD} --rows 16x16 --noise "$@"\n')
        encoder.chmod(0o755)
        self.server = lab.Server(tmp, threads=1, context=2048, vision={"mmproj": str(lab.MMPROJ), "exe": str(encoder), "extended": "off"})

    def of(self, url):
        if not sums(self.server, url):
            status, reply = ask(self.server, url)
            assert status == 200, reply
        return sums(self.server, url)[0]


class Pair:
    def __init__(self, lan, truth, host=None, wire=None, vision=None, server_env=None, host_env=None, before=None, boxes=1):
        self.lan, self.truth = lan, truth
        self.main = lan.pc("main", pcs.ServerPc)
        self.boxes = [lan.pc(f"box{i}", pcs.VisionPc, wire=wire, config=host) for i in range(boxes)]
        self.box = self.boxes[0]
        self.main.trust(*self.boxes)
        for box in self.boxes:
            box.allow(self.main)
            box.sshd_environment.update(host_env or {})
        if before:
            before(self)
        for box in self.boxes:
            box.start_sshd()
        self.server = self.main.serve(self.boxes, vision=vision, env=server_env)
        self.server.wait_for_eyes()
        self.pool = concurrent.futures.ThreadPoolExecutor(8)
        self.asked = self.talked = 0
        self.talk()

    def talk(self):
        """Text is asked for from now on, all the time."""
        self.text = pcs.Text(self.server)

    def quiet(self):
        """Until talk; what was answered so far must be right."""
        self.text.finish()
        self.talked += len(self.text.answers)

    # ---- pictures ----

    def begin(self, url):
        self.asked += 1
        return self.pool.submit(ask, self.server, url)

    def judge(self, url, result):
        """One right answer or one clear error; which of them."""
        status, reply = result
        if status == 200:
            assert reply["usage"]["completion_tokens"] > 0
            assert set(sums(self.server, url)) == {self.truth.of(url)}, "an answer from wrong rows"
            return "right"
        error = reply["error"]
        assert (status, error["code"]) == (400, "vision_unavailable"), reply
        assert any((box.called or box.address) in error["message"] for box in self.boxes), reply
        return error["message"]

    def see(self, url=None):
        """A picture is answered, rightly."""
        url = url or picture()
        assert self.judge(url, self.begin(url).result(lab.LIMIT_S)) == "right"

    def refused(self):
        """A picture is refused; the cause."""
        url = picture()
        got = self.judge(url, self.begin(url).result(lab.LIMIT_S))
        assert got != "right"
        return got

    # ---- phases ----

    def reach(self, phase):
        """A picture in that phase, and its answer to come; (None, None) when idle. self.box is the PC that has it."""
        if phase == "idle":
            self.see()
            return None, None
        self.url = getattr(self, phase)()
        return self.url, self.answer

    def uploading(self):
        self.main.slow(8)
        url = picture(size=10 << 20)
        self.answer = self.begin(url)
        self.find(lambda box: box.status()["pictures"] == 1, "the upload's begin")
        assert self.box.encoder_state() == "ready" and not self.answer.done()
        return url

    def encoding(self):
        url = picture()
        for box in self.boxes:
            box.order("delay=60000")
        self.answer = self.begin(url)
        self.find(lambda box: box.events("enc "), "the encode's begin")
        for box in self.boxes:
            box.order("")
        return url

    def answering(self):
        for box in self.boxes:
            box.slow(1)
        url = picture("rows=32x32")  # 786,432 bytes of rows
        self.answer = self.begin(url)
        self.find(lambda box: self.server.status()["vision"]["hosts"][self.boxes.index(box)]["bytes_down"] > 65536, "the first rows")
        assert not self.answer.done()
        return url

    def at_full_speed(self):
        for pc in filter(pcs.Pc.is_on, (self.main, *self.boxes)):
            pc.slow(None)

    def find(self, has_it, what):
        self.box = wait_for(lambda: next(filter(has_it, self.boxes), None), what)

    def again(self):
        """The server is started anew, as its service manager would."""
        self.server.start()
        self.asked = self.talked = 0  # its books begin anew
        self.server.wait_for_eyes()
        self.talk()

    # ---- the end ----

    def recover(self):
        """Nobody restarts anything: the host comes back, and the next picture is answered."""
        self.server.wait_for_eyes()
        self.see()

    def abandon(self):
        """After a failure: what is left is killed with its PC."""
        self.text.over.set()
        self.pool.shutdown(wait=False, cancel_futures=True)

    def finish(self):
        """Books, and an orderly end; text must have been served all the time."""
        if self.server.process.running():
            self.quiet()
            totals = self.server.status()["totals"]["requests"]
            assert totals == self.asked + self.talked, f"{self.asked} pictures and {self.talked} texts, {totals} in the books"
            self.server.stop()
        self.pool.shutdown()
        for box in filter(pcs.Pc.is_on, self.boxes):
            wait_for(lambda: not box.encoders(), "the encoder's end")
            assert box.spooled() == []
        for log in self.lan.folder.glob("*/**/*.log"):
            lab.check_log(log)
