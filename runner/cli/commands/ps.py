"""`tamis ps`: the models that a running server has loaded."""

import argparse
import json
import sys
import urllib.error
import urllib.request
from datetime import UTC, datetime
from typing import Any

from tamis.cli.options import common
from tamis.cli.options.errors import UsageError
from tamis.cli.terminal import table

SECONDS = 10  # the time that a server may take to reply
COLUMNS = {
    "name": "model",
    "size": "size",
    "device": "device",
    "until": "loaded for",
    "requests": "requests",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.add_argument(
        "--host", default="127.0.0.1", help="address of the server (default: %(default)s)"
    )
    parser.add_argument(
        "--port",
        type=common.count,
        default=8080,
        help="TCP port of the server (default: %(default)s)",
    )
    parser.add_argument(
        "--api-key-file", metavar="FILE", help="file with the server's API key (default: no key)"
    )
    parser.add_argument("--json", action="store_true", help="print the server's reply as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print one line for each model. Raises OSError if there is no server."""
    host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    url = f"http://{host}:{arguments.port}/api/ps"
    headers = {}
    if arguments.api_key_file is not None:
        headers["Authorization"] = f"Bearer {_key(arguments.api_key_file)}"
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=SECONDS) as response:
            found = json.loads(response.read())
    except urllib.error.HTTPError as error:
        why = "it wants a key: --api-key-file" if error.code == 401 else f"status {error.code}"
        raise OSError(f"{url}: {why}") from None
    except urllib.error.URLError as error:
        raise OSError(f"{url}: no server answers: {error.reason}; start tamis serve") from None
    if arguments.json:
        sys.stdout.write(json.dumps(found) + "\n")
        return 0
    rows = [_row(model) for model in found["models"]]
    for line in table.lines(rows, COLUMNS) if rows else ["no model is loaded"]:
        sys.stdout.write(line + "\n")
    return 0


def _key(path: str) -> str:
    """The first key of a file, valid in a header. Raises UsageError, OSError, ValueError."""
    for line in common.read_text(path).split("\n"):
        if key := line.strip(" \t\r"):
            return key.encode().decode("latin-1")
    raise UsageError(f"{path} is empty, expected a key")


def _row(model: dict[str, Any]) -> dict[str, Any]:
    left = (datetime.fromisoformat(model["expires_at"]) - datetime.now(UTC)).total_seconds()
    until = "for ever" if model["for_ever"] else f"{max(0, left):.0f} s"
    row = {key: model[key] for key in COLUMNS if key in model}
    return row | {"size": f"{model['size'] / common.MIB:.0f} MiB", "until": until}
