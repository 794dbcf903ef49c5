"""How many processors a process may keep busy: its affinity, and what its cgroups grant."""

import math
import os

import pytest

from tamis.cli.options import common
from tamis.platform import processes
from tamis.platform.processes import granted_cpus, usable_cpus


def tree(root, membership, **quotas):
    """A system's files: /proc/self/cgroup, and each cgroup's limit."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(membership)
    for path, text in quotas.items():
        file = root / "sys/fs/cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


@pytest.mark.parametrize(
    ("membership", "quotas", "expected"),
    [
        ("0::/\n", {}, math.inf),
        ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
        ("0::/a/b\n", {"a/b/cpu.max": "250000 100000\n"}, 2.5),
        ("0::/a/b\n", {"a/cpu.max": "100000 100000", "a/b/cpu.max": "max 100000"}, 1.0),
        # A container whose own cgroup is the root of what it sees, and whose name is the host's.
        ("0::/docker/1\n", {"cpu.max": "300000 100000\n"}, 3.0),
        (
            "3:memory:/\n2:cpu,cpuacct:/x\n",
            {"cpu/x/cpu.cfs_quota_us": "50000\n", "cpu/x/cpu.cfs_period_us": "100000\n"},
            0.5,
        ),
        (
            "2:cpu:/\n",
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
            math.inf,
        ),
        ("0::/\n", {"cpu.max": "what is this\n"}, math.inf),
    ],
)
def test_the_least_quota_on_the_way_up_counts(tmp_path, membership, quotas, expected):
    assert granted_cpus(tree(tmp_path, membership, **quotas)) == expected


def test_where_there_are_no_cgroups_nothing_is_limited(tmp_path):
    assert granted_cpus(tmp_path) == math.inf


def test_a_quota_counts_where_it_is_less_than_the_affinity(monkeypatch):
    n = len(os.sched_getaffinity(0))
    for quota, expected in ((math.inf, n), (n + 5.0, n), (1.9, 1), (0.3, 1)):
        monkeypatch.setattr(processes, "granted_cpus", lambda root, quota=quota: quota)
        assert usable_cpus() == expected


def test_more_threads_than_processors_are_warned_of(monkeypatch, capsys):
    monkeypatch.setattr(processes, "usable_cpus", lambda: 2)
    for n_thread in (None, 1, 2):
        common.warn_of_threads(n_thread)
    assert capsys.readouterr().err == ""
    common.warn_of_threads(64)
    assert "may use 2 processors" in capsys.readouterr().err
