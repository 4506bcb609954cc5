"""The server's config is read again while both PCs are at work."""
import json
import signal
import urllib.error
import urllib.request

import lab
from pair import picture
from pcs import wait_for


def hangup(server, hosts):
    config = json.loads(server.config.read_text())
    config["vision"]["hosts"] = hosts
    server.config.write_text(json.dumps(config))
    before = server.status()["config"]["reads"]
    server.process.kill(signal.SIGHUP)
    wait_for(lambda: server.status()["config"]["reads"] > before, "the config to be read again")
    assert server.status()["config"]["error"] is None


def test_a_host_leaves_and_comes_again_under_load(pair):
    p = pair(boxes=2)
    hosts = json.loads(p.server.config.read_text())["vision"]["hosts"]
    stays, = p.boxes[0].encoders()
    for box in p.boxes:
        box.order("delay=400")
    urls = [picture() for _ in range(10)]
    answers = [p.begin(url) for url in urls]
    wait_for(lambda: all(box.events("enc ") for box in p.boxes), "both at work")
    hangup(p.server, hosts[:1])
    assert [p.judge(url, a.result(lab.LIMIT_S)) for url, a in zip(urls, answers)] == ["right"] * len(urls)
    wait_for(lambda: not p.boxes[1].encoders(), "the end of the encoder that nobody needs any more")
    wait_for(lambda: p.server.status()["vision"]["leaving"] == 0, "the end of its channel")
    for box in p.boxes:
        box.order("")
    p.see()
    hangup(p.server, hosts)
    wait_for(lambda: p.server.host_state(1) == "up", "the host that came again")
    p.see()
    assert list(p.boxes[0].encoders()) == [stays]
    assert "was lost" not in p.server.log.read_text()


def test_only_programs_on_the_servers_pc_may_have_it_read(pair):
    p = pair()

    def post(pc):
        with pc.inside():
            try:
                request = urllib.request.Request(f"http://{p.main.address}:{p.main.PORT}/v1/reload", b"", {"Content-Type": "application/json"})
                with urllib.request.urlopen(request, timeout=lab.LIMIT_S) as f:
                    return f.status
            except urllib.error.HTTPError as e:
                return e.code

    assert post(p.box) == 403 and p.server.status()["config"]["reads"] == 0
    assert post(p.main) == 200 and p.server.status()["config"]["reads"] == 1
    p.see()
