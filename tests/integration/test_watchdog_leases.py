"""Leases: how long the encoder stays for servers that come, go silent, or are gone."""
import socket

import frames_client as fc
from watchdog_lab import alive, listener, picture


def test_channel_opened_anew_takes_the_encoder_from_the_older_one(watchdog):
    """The older connection stands and its picture takes a minute; another channel of the same lease is not touched."""
    h = watchdog().start()
    bystander = h.channel(channel=2)
    old = h.channel(channel=1)
    old.enc(1, picture("delay=60000"))
    fc.wait_for(lambda: h.events("enc "), "the encoder's work")
    bystander.enc(1, picture("rows=4x4"))
    new = h.channel(channel=1)
    assert not [f for f in old.gone() if f[0] in (fc.ROWS, fc.DATA)]
    new.enc(1, picture("rows=2x2"))
    assert bystander.answer(1)[0] == "rows" and new.answer(1)[0] == "rows"
    assert [(x["lease"], x["channels"]) for x in h.status()["leases"]] == [("lease-a", 2)]
    h.channel(channel=0).close()
    unnamed = [h.channel("lease-b") for _ in range(2)]
    assert [x["channels"] for x in h.status()["leases"] if x["lease"] == "lease-b"] == [2]
    for c in (*unnamed, new, bystander):
        c.close()


def test_reconnect_finds_the_same_encoder(watchdog):
    h = watchdog().start()
    c = h.channel("lease-a")
    pid = h.encoder_pid()
    for _ in range(3):
        c.close()
        fc.wait_for(lambda: h.status()["leases"][0]["channels"] == 0, "the loss to be noticed")
        c = h.channel("lease-a")
        assert h.encoder_pid() == pid and len(h.status()["leases"]) == 1
    c.close()


def test_bye_ends_lease_and_encoder(watchdog):
    h = watchdog().start()
    c = h.channel()
    pid = h.encoder_pid()
    c.send(fc.BYE)
    c.gone()
    h.wait_state("absent")
    assert not alive(pid) and h.status()["leases"] == []
    # and a new server starts a new one
    c = h.channel("lease-b")
    assert h.encoder_pid() != pid
    c.close()


def test_bye_of_one_of_two_channels_leaves_the_other_one_alone(watchdog):
    h = watchdog().start()
    a, b = h.channel(channel=1), h.channel(channel=2)
    pid = h.encoder_pid()
    a.send(fc.BYE)
    a.gone()
    assert [l["channels"] for l in h.status()["leases"]] == [1]
    b.enc(1, picture())
    assert b.answer(1)[0] == "rows" and h.encoder_pid() == pid
    b.send(fc.BYE)
    b.gone()
    h.wait_state("absent")
    assert not alive(pid) and h.status()["leases"] == []


def test_probe_failures_end_the_lease_of_a_lost_channel(watchdog):
    h = watchdog(lease_grace_s=3600).start()
    s, port = listener()
    c = h.channel(liveness_port=port, probe_interval_ms=50, probe_fails=3, peer="127.0.0.1")
    pid = h.encoder_pid()
    fc.wait_for(lambda: h.status()["leases"][0]["port_answered"], "a probe that is answered")
    c.close()
    fc.wait_for(lambda: h.status()["leases"][0]["channels"] == 0, "the loss to be noticed")
    for _ in range(5):  # the port answers: the lease stays, however many probes pass
        s.accept()[0].close()
    assert h.encoder_pid() == pid
    s.close()
    h.wait_state("absent")
    assert not alive(pid)
    assert "failed probe 3 of 3" in h.log.read_text() and "failed probe 4" not in h.log.read_text()


def test_probe_failures_do_not_count_while_the_channel_lives(watchdog):
    h = watchdog(lease_grace_s=3600).start()
    s, port = listener()
    c = h.channel(liveness_port=port, probe_interval_ms=50, probe_fails=2, peer="127.0.0.1")
    fc.wait_for(lambda: h.status()["leases"][0]["port_answered"], "a probe that is answered")
    s.close()
    for i in range(20):
        c.send(fc.PING, 0, b"%08d" % i)
        assert c.expect(fc.PONG)[2] == b"%08d" % i
    assert h.status()["leases"][0]["probe_fails"] == 0
    c.enc(1, picture("delay=300"))
    assert c.answer(1)[0] == "rows" and len(h.events("start ")) == 1
    c.send(fc.BYE)
    c.close()


def leases(h):
    return sorted(l["lease"] for l in h.status()["leases"])


def test_a_server_that_was_killed_and_came_again_has_one_lease(watchdog):
    h = watchdog(lease_grace_s=3600).start()
    s, port = listener()
    same = {"liveness_port": port, "probe_interval_ms": 50, "peer": "127.0.0.1"}
    a = h.channel("lease-a", **same)
    pid = h.encoder_pid()
    fc.wait_for(lambda: h.status()["leases"][0]["port_answered"], "a probe that is answered")
    a.close()
    fc.wait_for(lambda: h.status()["leases"][0]["channels"] == 0, "the loss to be noticed")
    b = h.channel("lease-b", **same)  # the port answers all the time
    fc.wait_for(lambda: leases(h) == ["lease-b"], "the end of the lease that nobody has any more")
    assert h.encoder_pid() == pid
    b.send(fc.BYE)
    b.gone()
    h.wait_state("absent")
    s.close()


def test_servers_that_only_look_alike_keep_their_leases(watchdog):
    """Two behind one address with different ports; one whose address differs; one without a port."""
    h = watchdog(lease_grace_s=3600).start()
    (s, port), (s2, port2) = listener(), listener()
    fast = {"probe_interval_ms": 50}
    chans = [h.channel("a", liveness_port=port, peer="127.0.0.1", **fast), h.channel("b", liveness_port=port2, peer="127.0.0.1", **fast),
             h.channel("c", liveness_port=port, peer="127.0.0.2", **fast), h.channel("d")]
    for c in chans:
        c.close()
    fc.wait_for(lambda: all(l["channels"] == 0 for l in h.status()["leases"]), "the losses to be noticed")
    probes = len(h.log.read_text())
    e = h.channel("e", liveness_port=port2 + 1, peer="127.0.0.1")
    for _ in range(3):
        s.accept()[0].close()
    assert leases(h) == ["a", "b", "c", "d", "e"], h.log.read_text()[probes:]
    e.close()
    s.close()
    s2.close()


def test_a_lease_with_a_channel_outlives_another_server_with_its_port(watchdog):
    """Two servers behind one address that chose the same port, one of them with two channels."""
    h = watchdog(lease_grace_s=3600).start()
    s, port = listener()
    same = {"liveness_port": port, "probe_interval_ms": 50, "peer": "127.0.0.1"}
    a, a2, b = h.channel("a", channel=1, **same), h.channel("a", channel=2, **same), h.channel("b", **same)
    a.close()
    fc.wait_for(lambda: sorted(l["channels"] for l in h.status()["leases"]) == [1, 1], "the loss to be noticed")
    a2.enc(1, picture())
    assert a2.answer(1)[0] == "rows" and leases(h) == ["a", "b"]
    a2.close()
    fc.wait_for(lambda: leases(h) == ["b"], "the end of the older one, since its last channel is gone")
    a = h.channel("a", **same)  # it was alive: it comes again, and now it is the newer one
    a.enc(1, picture())
    assert a.answer(1)[0] == "rows" and len(h.events("start ")) == 1
    b.send(fc.BYE)
    b.gone()
    a.close()
    fc.wait_for(lambda: h.status()["leases"][0]["channels"] == 0, "the loss to be noticed")
    for _ in range(3):
        s.accept()[0].close()
    assert leases(h) == ["a"]  # nobody else is there any more: its port counts again
    s.close()
    h.wait_state("absent")


def test_port_that_never_answered_is_told_once_and_does_not_count(watchdog):
    h = watchdog(lease_grace_s=3600).start()
    s, port = listener()
    s.close()
    c = h.channel(liveness_port=port, probe_interval_ms=50, probe_fails=2, peer="127.0.0.1")
    c.close()
    fc.wait_for(lambda: h.status()["leases"][0]["channels"] == 0, "the loss to be noticed")
    s = socket.create_server(("127.0.0.1", port))  # counts from its first answer on
    fc.wait_for(lambda: h.status()["leases"][0]["port_answered"], "a probe that is answered")
    assert h.log.read_text().count("does not answer (") <= 1
    s.close()
    h.wait_state("absent")


def test_grace_without_a_port(watchdog):
    h = watchdog(lease_grace_s=1).start()
    c = h.channel()
    pid = h.encoder_pid()
    c.close()
    fc.wait_for(lambda: h.status()["leases"] == [], "the end of the lease")
    h.wait_state("absent")
    assert not alive(pid)


def test_silent_channel_is_pinged_and_then_given_up(watchdog):
    h = watchdog(silence_s=1, lease_grace_s=0).start()
    c = h.channel()
    c.expect(fc.PING)  # not answered
    frames = c.gone()
    assert frames[-1][0] == fc.ERR and b"lease has ended" in frames[-1][2]
    h.wait_state("absent")


def test_keep_warm(watchdog):
    h = watchdog(keep_warm=True).start()
    c = h.channel()
    pid = h.encoder_pid()
    c.send(fc.BYE)
    c.gone()
    fc.wait_for(lambda: h.status()["leases"] == [], "the end of the lease")
    c = h.channel("lease-b")
    assert h.encoder_pid() == pid
    c.close()


def test_idle_encoder_sleeps_and_wakes(watchdog):
    h = watchdog(encoder_idle_s=1).start()
    c = h.channel()
    h.wait_state("absent")
    c.enc(1, picture())
    assert c.answer(1)[0] == "rows" and len(h.events("start ")) == 2
    c.close()


def test_one_lost_probe_is_forgiven(watchdog):
    """Failures count in a row: a port that answers again begins anew, and the encoder stays warm."""
    h = watchdog(lease_grace_s=3600).start()
    s, port = listener()
    c = h.channel(liveness_port=port, probe_interval_ms=100, probe_fails=100, peer="127.0.0.1")
    pid = h.encoder_pid()
    fc.wait_for(lambda: h.status()["leases"][0]["port_answered"], "a probe that is answered")
    c.close()
    for _ in range(2):
        s.close()
        fc.wait_for(lambda: h.status()["leases"][0]["probe_fails"] >= 1, "a probe that fails")
        s = socket.create_server(("127.0.0.1", port))
        fc.wait_for(lambda: h.status()["leases"][0]["probe_fails"] == 0, "a probe that is answered again")
    assert h.encoder_pid() == pid and h.log.read_text().count("failed probe 1 of 100") == 2
    s.close()
    h.wait_state("absent")


def test_end_of_one_server_is_none_for_others(watchdog):
    """Three servers end in three ways while a fourth has its pictures encoded by the same encoder all the time."""
    h = watchdog(lease_grace_s=1).start()
    s, port = listener()
    probed = h.channel("probed", liveness_port=port, probe_interval_ms=50, probe_fails=2, peer="127.0.0.1")
    polite, lost, stays = h.channel("polite"), h.channel("lost"), h.channel("stays")
    fc.wait_for(lambda: any(x["port_answered"] for x in h.status()["leases"]), "a probe that is answered")
    pid = h.encoder_pid()
    probed.enc(1, picture("delay=60000"))
    fc.wait_for(lambda: h.events("enc "), "the encode")
    lost.enc(1, picture("delay=60000", 700))
    stays.enc(1, picture("", 600))
    polite.send(fc.BYE)
    polite.gone()
    s.close()
    probed.close()
    lost.close()
    assert stays.answer(1)[0] == "rows"
    fc.wait_for(lambda: [x["lease"] for x in h.status()["leases"]] == ["stays"], "the ends of the others")
    stays.enc(2, picture())
    assert stays.answer(2)[0] == "rows" and h.encoder_pid() == pid and len(h.events("start ")) == 1
    stays.close()


def test_end_after_goodbye_tells_that_the_memory_is_free(watchdog):
    h = watchdog(args=["--stubborn", "--child"]).start()
    a, b = h.channel("lease-a"), h.channel("lease-b")
    pid, child = h.encoder_pid(), h.events("child ")[0].split()[1]
    a.send(fc.BYE)
    a.gone()  # at once: somebody else needs the encoder
    assert alive(pid)
    b.send(fc.BYE)
    b.gone()
    assert not alive(pid)
    fc.wait_for(lambda: not alive(child), "the rest of its group, which was killed with it")
