import pytest

import lab
import watchdog_lab


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


@pytest.fixture
def watchdog(tmp_path):
    """Makes hosts of the watchdog alone, with a fake encoder; not yet started, and checked at the end."""
    made = []

    def make(**config):
        made.append(watchdog_lab.Host(tmp_path, **config))
        return made[-1]

    yield make
    for h in made:
        h.finish()


@pytest.fixture
def agent_host(tmp_path):
    """No watchdog runs until an agent needs one."""
    h = watchdog_lab.AgentHost(tmp_path)
    yield h
    h.finish()
