"""The server's PC and a vision PC at work: how a picture is brought to a certain phase, and what must hold after every fault."""
import base64
import concurrent.futures
import itertools

import lab
import pcs
from pcs import wait_for

QUESTION = {"max_tokens": 3, "temperature": 0, "logprobs": True, "top_logprobs": 5}
PLAIN = (lab.TOP / "tests/data/cases/plain.png").read_bytes()
salts = itertools.count(1)


def picture(words="", size=0):
    """A fresh picture; all of its bytes decide its rows."""
    return lab.png_with(PLAIN, words, f"salt {next(salts)}" + "".join(f"{i:07x}\n" for i in range(size // 8)))


def ask(server, url, **more):
    return server.chat(lab.user("What is this?", url), **QUESTION, **more)


def facts(reply):
    """What the model made of the rows, to its probabilities."""
    tokens = reply["choices"][0]["logprobs"]["content"]
    return [{t["token"]: t["logprob"] for t in x["top_logprobs"]} for x in tokens]


def same(a, b):
    """Arithmetic in another order is allowed, as when a prompt's beginning was in the cache; other rows are not."""
    return len(a) == len(b) and all(
        len(set(x) & set(y)) >= 4 and all(abs(x[t] - y[t]) < 0.01 for t in set(x) & set(y)) for x, y in zip(a, b))


class Truth:
    """Answers of a server that no network disturbs: the same encoder is its child."""

    def __init__(self, tmp):
        encoder = tmp / "encoder"
        encoder.write_text(f'#!/bin/sh\nexec {lab.FAKE_ENCODER} --embd {pcs.EMBD} --rows 4x4 --noise "$@"\n')
        encoder.chmod(0o755)
        self.server = lab.Server(tmp, threads=1, context=2048, vision={"mmproj": str(lab.MMPROJ), "exe": str(encoder), "extended": "off"})

    def of(self, url):
        status, reply = ask(self.server, url)
        assert status == 200, reply
        return facts(reply)


class Pair:
    def __init__(self, lan, truth, host=None, wire=None, vision=None, server_env=None, host_env=None, before=None):
        self.lan, self.truth = lan, truth
        self.main = lan.pc("main", pcs.ServerPc)
        self.box = lan.pc("box", pcs.VisionPc, wire=wire, config=host)
        self.box.allow(self.main)
        self.main.trust(self.box)
        self.box.sshd_environment.update(host_env or {})
        if before:
            before(self)
        self.box.start_sshd()
        self.server = self.main.serve([self.box], vision=vision, env=server_env)
        self.server.wait_for_eyes()
        self.text = pcs.Text(self.server)
        self.pool = concurrent.futures.ThreadPoolExecutor(8)
        self.asked = 0

    # ---- pictures ----

    def begin(self, url):
        self.asked += 1
        return self.pool.submit(ask, self.server, url)

    def judge(self, url, result):
        """One right answer or one clear error; which of them."""
        status, reply = result
        if status == 200:
            assert same(facts(reply), self.truth.of(url)), "an answer from wrong rows"
            return "right"
        error = reply["error"]
        assert (status, error["code"]) == (400, "vision_unavailable"), reply
        assert self.box.address in error["message"], reply
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
        """A picture in that phase, and its answer to come; (None, None) when idle."""
        if phase == "idle":
            self.see()
            return None, None
        self.url = getattr(self, phase)()
        return self.url, self.answer

    def uploading(self):
        self.main.slow(8)
        url = picture(size=10 << 20)
        self.answer = self.begin(url)
        wait_for(lambda: self.box.status()["pictures"] == 1, "the upload's begin")
        assert self.box.encoder_state() == "ready" and not self.answer.done()
        return url

    def encoding(self):
        url = picture()
        self.box.order("delay=60000")
        self.answer = self.begin(url)
        wait_for(lambda: self.box.events("enc "), "the encode's begin")
        self.box.order("")
        return url

    def answering(self):
        self.box.slow(1)
        url = picture("rows=32x32")  # 786,432 bytes of rows
        self.answer = self.begin(url)
        wait_for(lambda: self.server.status()["vision"]["hosts"][0]["bytes_down"] > 65536, "the first rows")
        assert not self.answer.done()
        return url

    def at_full_speed(self):
        self.main.slow(None)
        self.box.slow(None)

    def again(self):
        """The server is started anew, as its service manager would."""
        self.server.start()
        self.asked = 0  # its books begin anew
        self.server.wait_for_eyes()
        self.text = pcs.Text(self.server)

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
            self.text.finish()
            rows = [r for r in self.server.history() if r.get("pictures")]
            assert len(rows) == self.asked, f"{self.asked} requests with pictures, {len(rows)} in the history"
            self.server.stop()
        self.pool.shutdown()
        if self.box.is_on():
            wait_for(lambda: not self.box.encoders(), "the encoder's end")
        for log in self.lan.folder.glob("*/**/*.log"):
            lab.check_log(log)
