"""Faults between two PCs, and of each of them. After every one: text was served throughout, each picture got one right answer or one clear
error, none was answered from wrong rows, the next picture after the repair works with nobody restarting anything, and encoders live as
long as their server, not longer (pair.py checks the first three at the end of every test)."""
import os
import signal
import time

import pytest

import lab
import pcs
from pair import ask, facts, picture, same
from pcs import wait_for

PATIENT = {"probe_fails": 600}  # such a host keeps its encoder through all that a test does to the network


def test_the_comparison_can_fail(truth):
    url = picture()
    assert same(truth.of(url), truth.of(url))
    assert not same(truth.of(url), truth.of(picture()))


# ---- the network ----


@pytest.mark.parametrize("phase", ["idle", "uploading", "encoding", "answering"])
@pytest.mark.parametrize("fault", ["cut", "mute"])
def test_link_lost_and_restored(pair, fault, phase):
    """cut: the server's cable, so that its kernel knows; mute: the host's, so that nobody knows."""
    p = pair(host=PATIENT)
    encoder, = p.box.encoders()
    url, answer = p.reach(phase)
    at = p.main if fault == "cut" else p.box
    getattr(at, fault)()
    wait_for(lambda: p.server.host_state() != "up", "the loss to be noticed")
    p.at_full_speed()
    at.repair()
    if url:
        p.judge(url, answer.result(lab.LIMIT_S))
    p.recover()
    assert p.box.encoders() == [encoder], "the encoder was lost although its server lived"
