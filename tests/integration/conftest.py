import pytest

import lab


@pytest.fixture
def host(tmp_path):
    """A vision host with the bundled model; not yet started."""
    if lab.SSHD is None:
        pytest.skip("no sshd on this machine")
    h = lab.VisionHost(tmp_path / "host")
    yield h
    h.stop()
    if h.log.exists():
        lab.check_log(h.log)


@pytest.fixture
def servers(tmp_path):
    """Starts servers and ends them with the test."""
    running = []

    def start(*hosts, **config):
        running.append(lab.Server(tmp_path / f"server{len(running)}", hosts, **config))
        return running[-1]

    yield start
    for s in running:
        s.stop()
