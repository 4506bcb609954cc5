"""What scripts/bench pool measures, small: four hosts share the work, and one that loses its power in the middle of it takes no picture along."""
import json
import subprocess
import sys

import pytest

import lab


def test_four_hosts_share_the_work_and_one_is_lost():
    if lab.SSHD is None:
        pytest.skip("no sshd on this machine")
    p = subprocess.run([sys.executable, lab.TOP / "tests/tools/pool.py", "--json", "--pictures", "12", "--encode-ms", "400"], capture_output=True,
                       text=True, timeout=20 * lab.LIMIT_S)
    assert p.returncode == 0, p.stderr[-4000:]
    r = json.loads(p.stdout)
    assert r["lost_when_one_killed"] == 0 and r["on_the_killed_host"] > 0, r
    assert all(share > 0 for share in r["encodes_by_host"]), r
    assert r["speedup_4_hosts"] > 2, r  # of 4; one after the other would be 1
