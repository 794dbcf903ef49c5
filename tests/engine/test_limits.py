"""Limits that a process sets for itself, tried in a process of their own."""

import subprocess
import sys

SET = """
import resource
from tamis.platform.limits import KINDS, allow_cpu, limit, lower, most_open_files
lower("files", 50)
lower("files", 90)  # it stays at 50
print(most_open_files(), resource.getrlimit(resource.RLIMIT_NOFILE)[1] > 50)
limit("files", 40)
limit("files", 90)
print(resource.getrlimit(resource.RLIMIT_NOFILE))
limit("cpu", 1000)
allow_cpu(7)
soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
used = resource.getrusage(resource.RUSAGE_SELF)
print(int(used.ru_utime + used.ru_stime) + 7 - soft, hard)
allow_cpu(5000)
print(resource.getrlimit(resource.RLIMIT_CPU))
"""


def test_a_limit_is_only_ever_lowered() -> None:
    done = subprocess.run([sys.executable, "-c", SET], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["50 True", "(40, 40)", "0 1000", "(1000, 1000)"]


FORK = """
import os
from tamis.platform.processes import start_fork
def answer(): os.write(1, b"fork\\n")
def fail(): raise ValueError
for run in (answer, fail):
    pid = start_fork(run)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def test_a_fork_ends_with_what_it_was_started_for() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["fork", "0", "1"]
