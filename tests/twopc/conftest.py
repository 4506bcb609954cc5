import itertools
import os
import pathlib
import shutil
import tempfile

import pytest

import pcs
from pair import Pair, Truth

KEEP = os.environ.get("FARSIGHT_KEEP_LOGS")
numbers = itertools.count(1)


def pytest_configure(config):
    config.addinivalue_line("markers", "long: takes long, and is left out of the default run of scripts/test")


@pytest.fixture(scope="session")
def able():
    reason = pcs.why_not()
    if reason:
        print(f"tests/twopc is skipped: {reason}")
        pytest.skip(reason)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    item.failed = getattr(item, "failed", False) or report.failed


@pytest.fixture
def lan(able, request):
    """A switch without PCs. Its folder has a short path, for unix sockets, and is kept when the test fails, or when
    FARSIGHT_KEEP_LOGS is set."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="farsight-twopc-"))
    made = None
    try:
        made = pcs.Lan(folder, next(numbers))
        yield made
    finally:
        if made:
            made.close()
        if getattr(request.node, "failed", True) or KEEP:
            print(f"logs of {request.node.name}: {folder}")
        else:
            shutil.rmtree(folder)


@pytest.fixture(scope="session")
def truth(able, tmp_path_factory):
    t = Truth(tmp_path_factory.mktemp("truth"))
    yield t
    t.server.stop()


@pytest.fixture
def pair(lan, truth, request):
    """Makes the server's PC and the vision PC, both running."""
    made = []

    def make(**options):
        made.append(Pair(lan, truth, **options))
        return made[-1]

    yield make
    for p in made:
        if getattr(request.node, "failed", True):
            p.abandon()
            continue
        try:
            p.finish()
        except BaseException:
            request.node.failed = True
            raise
