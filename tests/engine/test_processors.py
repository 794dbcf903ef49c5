"""How many processors a process may keep busy: its affinity, and what its cgroups grant."""

import contextlib
import math
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from guarded import step_of
from tiny_models import TinySpec, write_tiny_model

from tamis.cli.options import common
from tamis.engine import engine
from tamis.engine.engine import Engine
from tamis.jit_kernels.backends import cpu
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import Program
from tamis.platform import cores, processes
from tamis.platform.memory import huge_zeros
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


def test_an_engine_has_no_more_threads_than_processors(tmp_path, monkeypatch):
    path = write_tiny_model(tmp_path / "m.gguf", TinySpec("llama", "F32"))
    monkeypatch.setattr(engine, "usable_cpus", lambda: 2)
    for asked, expected in ((None, 2), (1, 1), (2, 2), (64, 2)):
        with Engine.load(path, n_threads=asked) as found:
            assert found.n_threads == expected
    with pytest.raises(ValueError, match="n_threads is 1025, expected 1 to 1024"):
        Engine.load(path, n_threads=1025)


def machine(root, siblings, nodes, has_memory):
    """A system's files: which processors share a core, and which are on each node."""
    for i, text in siblings.items():
        folder = root / f"sys/devices/system/cpu/cpu{i}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{text}\n")
    top = root / "sys/devices/system/node"
    for i, text in nodes.items():
        (top / f"node{i}").mkdir(parents=True)
        (top / f"node{i}/cpulist").write_text(f"{text}\n")
    if nodes:
        (top / "has_memory").write_text(f"{has_memory}\n")
    return root


# Two sockets of two cores of two threads: siblings are 0 and 4, 1 and 5, and so on.
TWO_SOCKETS = (
    {i: f"{i % 4},{i % 4 + 4}" for i in range(8)}, {0: "0-1,4-5", 1: "2-3,6-7"}, "0-1"
)  # fmt: skip
NEIGHBOURS = ({i: f"{i // 2 * 2}-{i // 2 * 2 + 1}" for i in range(4)}, {0: "0-3"}, "0")
PLAIN = ({i: str(i) for i in range(4)}, {0: "0-3"}, "0")


@pytest.mark.parametrize(
    ("files", "cpus", "order", "n_core", "nodes"),
    [
        (TWO_SOCKETS, range(8), (0, 1, 2, 3, 4, 5, 6, 7), 4, (0, 1)),
        (NEIGHBOURS, range(4), (0, 2, 1, 3), 2, (0,)),
        (PLAIN, range(4), (0, 1, 2, 3), 4, (0,)),
        # The affinity leaves one thread of the first core, and the second core whole.
        (NEIGHBOURS, (1, 2, 3), (1, 2, 3), 2, (0,)),
        (TWO_SOCKETS, (2, 3, 6, 7), (2, 3, 6, 7), 2, (1,)),
        # A node without memory, as of some accelerators, and a system that tells nothing.
        ((TWO_SOCKETS[0], TWO_SOCKETS[1], "1"), range(8), (0, 1, 2, 3, 4, 5, 6, 7), 4, (1,)),
        (({}, {}, ""), (0, 3), (0, 3), 2, ()),
    ],
)
def test_one_thread_of_each_core_comes_before_its_siblings(
    tmp_path, files, cpus, order, n_core, nodes
):
    assert cores.topology(set(cpus), machine(tmp_path, *files)) == (order, n_core, nodes)


def test_a_team_is_pinned_where_it_fills_the_cores_and_places_differ(tmp_path):
    neighbours = cores.topology(set(range(4)), machine(tmp_path / "a", *NEIGHBOURS))
    assert [neighbours.places(n) for n in (1, 2, 3, 4, 5)] == [
        (), (0, 2), (0, 2, 1), (0, 2, 1, 3), ()
    ]  # fmt: skip
    plain = cores.topology(set(range(4)), machine(tmp_path / "b", *PLAIN))
    assert not any(plain.places(n) for n in range(1, 6))
    one_each = ({i: str(i) for i in range(2)}, {0: "0", 1: "1"}, "0-1")
    sockets = cores.topology({0, 1}, machine(tmp_path / "c", *one_each))
    assert sockets.places(2) == (0, 1)


def allowed(task):
    """Processors that a thread of this process may run on."""
    return os.sched_getaffinity(int(task))


def test_pinned_threads_stay_and_the_caller_gets_its_own_back(monkeypatch):
    cpus = sorted(os.sched_getaffinity(0))
    places = [cpus[-1], cpus[0]]
    monkeypatch.setattr(cpu, "places", lambda n_thread: places[:n_thread])
    seen = []
    monkeypatch.setattr(cpu, "pinned", lambda i: (seen.append(i), cores.pinned(i))[1])
    backend, program = cpu.CpuBackend(2), Program()
    x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(4, 16)
    program.add(ops.GATE, ("silu",), step=step_of(4), gate=x, up=x, y=np.zeros_like(x), n=16)
    before = set(os.listdir("/proc/self/task"))
    backend.run(backend.link(program))
    (worker,) = set(os.listdir("/proc/self/task")) - before
    assert allowed(worker) == {cpus[0]}
    assert seen == [cpus[-1]]
    assert os.sched_getaffinity(0) == set(cpus)
    backend.close()


def test_pinned_holds_within_and_after_an_error_not():
    cpus = os.sched_getaffinity(0)
    seen = []
    with contextlib.suppress(KeyError), cores.pinned(max(cpus)):
        seen.append(os.sched_getaffinity(0))
        raise KeyError
    assert seen == [{max(cpus)}]
    assert os.sched_getaffinity(0) == cpus
    cores.pin(1 << 14)  # no such processor: the thread stays where it may run
    assert os.sched_getaffinity(0) == cpus


def in_thread(work):
    """What `work` returns on a thread of its own, whose policy ends with it."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


@pytest.mark.skipif(cores.policy() != 0, reason="the system does not tell its policies")
def test_memory_and_files_come_from_all_nodes(monkeypatch):
    plain = huge_zeros((4096,), np.dtype(np.uint8))[1]
    assert cores.policy(plain) == 0 or len(cores.memory_nodes(os.sched_getaffinity(0))) > 1
    monkeypatch.setattr(cores, "_nodes", lambda: (0, 1))
    interleave = 3  # of numa(7)
    spread = huge_zeros((4096,), np.dtype(np.uint8))[1]
    assert cores.policy(spread) == interleave
    assert not spread.any()

    def of_thread():
        cores.spread_files()
        return cores.policy(), cores._node_mask()

    # A policy that was chosen, here for the thread, is left alone.
    assert in_thread(of_thread) == (interleave, None)
    assert cores.policy() == 0
