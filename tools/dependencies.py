"""The dependencies of a run: a lock file with hashes, and a bill of materials (CycloneDX 1.5).

The lock file is next to this one: the program in one file is made of the packages that it names.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import uuid
from collections import defaultdict
from email.message import Message
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parents[1]  # of a source tree
LOCK = Path(__file__).with_name("requirements.lock")
EXTRAS = ("chat", "grammar", "hub", "pdf", "server")  # of the program in one file
PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")
_LINE = re.compile(r"^([\w.-]+)==(\S+)((?: --hash=sha256:[0-9a-f]{64})*)", re.MULTILINE)


def source_date() -> int:
    """The date of released files in seconds since 1970: $SOURCE_DATE_EPOCH or the last commit's."""
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        return int(given)
    command = ["git", "log", "-1", "--format=%ct"]
    return int(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)


def locked() -> dict[str, tuple[str, list[str]]]:
    """Version and SHA-256 digests of each package of the lock file."""
    text = LOCK.read_text().replace(" \\\n   ", "")
    return {
        name: (version, re.findall(r"sha256:(\w+)", hashes))
        for name, version, hashes in _LINE.findall(text)
    }


def requirements(extras: tuple[str, ...] = EXTRAS) -> list[str]:
    """What the tree's pyproject.toml asks for, with these extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], "pip"]  # pip: fetches models
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    return wanted


def renew_lock() -> None:
    """Resolve the requirements for each Python and machine, and write the lock file.

    All share one version of each package; otherwise subprocess.CalledProcessError has pip's
    message.
    """
    versions: dict[str, str] = {}
    hashes: defaultdict[str, set[str]] = defaultdict(set)
    for python in PYTHONS:
        for machine in MACHINES:
            pins = [f"{name}=={version}" for name, version in versions.items()]
            for item in _resolved(python, machine, pins):
                name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
                versions.setdefault(name, item["metadata"]["version"])
                hashes[name].add(item["download_info"]["archive_info"]["hashes"]["sha256"])
    lines = ["# Made by `python -m tamis.tools.release lock`: what a run with the extras of the"]
    lines += [f"# program in one file ({', '.join(EXTRAS)}) depends on.\n"]
    for name in sorted(versions):
        digests = "".join(f" \\\n    --hash=sha256:{h}" for h in sorted(hashes[name]))
        lines.append(f"{name}=={versions[name]}{digests}")
    LOCK.write_text("\n".join(lines) + "\n")


def _resolved(python: str, machine: str, pins: list[str]) -> list[dict[str, Any]]:
    """The packages that pip would install on a machine, from its report; nothing is installed."""
    platforms = [f"manylinux_2_{n}_{machine}" for n in range(17, 37)]
    platforms += [f"manylinux2014_{machine}"]  # of C libraries up to Debian 12's
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "pins.txt"
        constraints.write_text("\n".join(pins))
        command = [
            *(
                sys.executable,
                "-P",
                "-m",
                "pip",
                "install",
                "--dry-run",
                "--ignore-installed",
                "-q",
            ),
            *("--report", "-", "--target", folder, "--only-binary", ":all:"),
            *("--python-version", python, "--implementation", "cp", "-c", str(constraints)),
            *(word for name in platforms for word in ("--platform", name)),
            *requirements(),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return list(json.loads(done.stdout)["install"])


def materials(version: str, date: int) -> str:
    """The bill of materials of a version: every package of the lock file, JSON of CycloneDX 1.5."""
    root = {"type": "application", "name": "tamis", "version": version, "bom-ref": "tamis"}
    root["purl"] = f"pkg:pypi/tamis@{version}"
    components = [_component(name, *found) for name, found in sorted(locked().items())]
    content = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(date)),
            "component": root | {"licenses": [{"license": {"id": "Apache-2.0"}}]},
        },
        "components": components,
        "dependencies": [{"ref": "tamis", "dependsOn": [c["bom-ref"] for c in components]}],
    }
    text = json.dumps(content, sort_keys=True)
    content["serialNumber"] = f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, text)}"
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def _component(name: str, version: str, hashes: list[str]) -> dict[str, Any]:
    purl = f"pkg:pypi/{name}@{version}"
    files = [
        {"type": "distribution", "url": f"https://pypi.org/project/{name}/{version}/#files",
         "hashes": [{"alg": "SHA-256", "content": digest}]}
        for digest in hashes
    ]  # fmt: skip
    found = {"type": "library", "name": name, "version": version, "purl": purl, "bom-ref": purl}
    return found | {"externalReferences": files} | _licence(name)


def _licence(name: str) -> dict[str, Any]:
    """The licence that an installed package states; empty for one that is not installed."""
    try:
        metadata = cast(Message, importlib.metadata.metadata(name))
    except importlib.metadata.PackageNotFoundError:
        return {}
    if expression := metadata.get("License-Expression"):
        return {"licenses": [{"expression": expression}]}
    classes = [c.split(" :: ")[-1] for c in metadata.get_all("Classifier") or []
               if c.startswith("License :: ")]  # fmt: skip
    text = classes[0] if classes else (metadata.get("License") or "").split("\n")[0]
    return {"licenses": [{"license": {"name": text}}]} if text else {}
