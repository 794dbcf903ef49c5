"""Models of the hub, against a stand-in that answers as the hub does. Needs no network."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from hub_stand_in import HubStandIn

from tamis.fetch import hub
from tamis.fetch import registry as models
from tamis.fetch.base import ModelError

REPO = "someone/Some-GGUF"

# The library reads HF_ENDPOINT when it is imported, hence a process for each pull.
PULL = """
import json, sys
from tamis.fetch import registry as models
seen = []
try:
    path = str(models.pull(sys.argv[1], progress=lambda *a: seen.append(a)))
    print(json.dumps({"path": path, "error": None, "seen": seen}))
except models.ModelError as e:
    print(json.dumps({"path": None, "error": str(e), "seen": seen}))
"""


@dataclass
class Result:
    path: Path
    error: str | None
    seen: list[list[object]]
    stderr: str


def pull(spec: str, folder: Path, endpoint: str, extra: Mapping[str, str] | None = None) -> Result:
    env = dict(os.environ) | {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(folder / "hf-home"),
        "TAMIS_MODELS": str(folder),
        "NO_PROXY": "127.0.0.1",
    }
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN"):
        env.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", PULL, spec],
        env=env | dict(extra or {}),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    answer = json.loads(done.stdout)
    return Result(Path(answer["path"] or ""), answer["error"], answer["seen"], done.stderr)


NAMES = [
    "m-BF16.gguf",
    "m-F16.gguf",
    "m-IQ4_XS.gguf",
    "m-Q4_K_M.gguf",
    "m-Q4_K_S.gguf",
    "mmproj-F16.gguf",
    "big/m-Q8_0-00001-of-00002.gguf",
    "big/m-Q8_0-00002-of-00002.gguf",
    "README.md",
]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("q4_k_m", ["m-Q4_K_M.gguf"]),
        ("F16", ["m-F16.gguf"]),  # neither BF16 nor the image projector
        ("Q8_0", NAMES[6:8]),
    ],
)
def test_quantisation_is_a_whole_word_in_any_case(spec: str, expected: list[str]) -> None:
    assert hub.pick(NAMES, hub.HubSpec.parse(f"hf:{REPO}:{spec}")) == expected


def test_a_part_of_a_split_file_means_all_of_it() -> None:
    spec = hub.HubSpec.parse(f"hf:{REPO}/big/m-Q8_0-00002-of-00002.gguf")
    assert hub.pick(NAMES, spec) == NAMES[6:8]


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        (f"hf:{REPO}:Q4_K", "matches nothing"),
        (f"hf:{REPO}:m", "more than one"),
        (f"hf:{REPO}", "more than one"),
        (f"hf:{REPO}/none.gguf", "matches nothing"),
    ],
)
def test_no_or_several_matches_list_the_candidates(spec: str, complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint) as e:
        hub.pick(NAMES, hub.HubSpec.parse(spec))
    assert "m-Q4_K_M.gguf" in str(e.value)


def test_a_missing_part_of_a_split_file_is_an_error() -> None:
    with pytest.raises(ModelError, match="split in 3 parts"):
        hub.pick(["m-00001-of-00003.gguf"], hub.HubSpec.parse(f"hf:{REPO}"))


@pytest.mark.parametrize(
    "text",
    [
        "hf:",
        "hf:one",
        "hf:a/b/../../c.gguf",
        "hf:a/../b:Q4_0",
        "hf:-a/b:Q4_0",
        "hf:a/b:",
        "hf:a/b/c",
    ],
)
def test_a_spec_that_cannot_be_read_is_an_error(text: str) -> None:
    with pytest.raises(ModelError, match="expected hf:owner/repo"):
        hub.HubSpec.parse(text)


def test_pull_puts_the_file_under_its_repository_and_finds_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HubStandIn(REPO, {"m-Q4_K_M.gguf": b"four", "m-Q8_0.gguf": b"eight"}) as stand_in:
        result = pull(f"hf:{REPO}:Q4_K_M", tmp_path, stand_in.url)
    assert (result.error, result.stderr) == (None, "")
    assert result.path == tmp_path / REPO / "m-Q4_K_M.gguf"
    assert result.path.read_bytes() == b"four"
    assert result.seen[-1] == ["download", 4, 4]
    # Found again without the hub, which is gone by now; asking for another file needs it.
    assert pull(f"hf:{REPO}:q4_k_m", tmp_path, stand_in.url).path == result.path
    assert "does not answer" in (pull(f"hf:{REPO}:Q8_0", tmp_path, stand_in.url).error or "")
    monkeypatch.setenv("TAMIS_MODELS", str(tmp_path))
    assert models.resolve(f"hf:{REPO}:Q4_K_M") == result.path
    (entry,) = models.installed()
    assert entry == models.Installed(f"hf:{REPO}/m-Q4_K_M.gguf", result.path, 4)
    assert models.resolve(entry.name) == result.path


def test_all_parts_of_a_split_file_are_fetched(tmp_path: Path) -> None:
    files = {name: name.encode() for name in NAMES}
    with HubStandIn(REPO, files) as stand_in:
        result = pull(f"hf:{REPO}:Q8_0", tmp_path, stand_in.url)
    assert result.path.name == "m-Q8_0-00001-of-00002.gguf"
    assert sorted(p.name for p in result.path.parent.iterdir()) == [
        "m-Q8_0-00001-of-00002.gguf",
        "m-Q8_0-00002-of-00002.gguf",
    ]


# huggingface_hub writes in pieces of 10 MiB; what it holds when a connection breaks is lost.
BIG = os.urandom(1 << 20) * 25


def test_a_connection_that_breaks_half_way_is_continued_in_silence(tmp_path: Path) -> None:
    with HubStandIn(REPO, {"m.gguf": BIG}, breaks=[22 << 20]) as stand_in:
        result = pull(f"hf:{REPO}", tmp_path, stand_in.url)
    assert (result.error, result.stderr) == (None, "")
    assert result.path.read_bytes() == BIG
    assert stand_in.downloads() == [None, f"bytes={20 << 20}-"]


def test_a_later_pull_continues_at_the_byte_where_an_earlier_one_stopped(tmp_path: Path) -> None:
    part = tmp_path / ".partial" / REPO
    with HubStandIn(REPO, {"m.gguf": BIG}) as stand_in:
        sha256 = stand_in.listing()["siblings"][0]["lfs"]["sha256"]
        part.mkdir(parents=True)
        (part / f"{sha256[:16]}-m.gguf.part").write_bytes(BIG[: 3 << 20])
        result = pull(f"hf:{REPO}", tmp_path, stand_in.url)
    assert result.path.read_bytes() == BIG
    assert stand_in.downloads() == [f"bytes={3 << 20}-"]
    assert ["download", 3 << 20, 25 << 20] in result.seen


def test_a_hub_that_dies_leaves_what_it_sent_for_the_next_pull(tmp_path: Path) -> None:
    with HubStandIn(REPO, {"m.gguf": BIG}, breaks=[22 << 20] + [0] * 20) as stand_in:
        result = pull(f"hf:{REPO}", tmp_path, stand_in.url)
        assert "pull again" in (result.error or "")
        assert result.stderr == ""
        stand_in.breaks.clear()
        stand_in.requests.clear()
        assert pull(f"hf:{REPO}", tmp_path, stand_in.url).path.read_bytes() == BIG
        assert stand_in.downloads() == [f"bytes={20 << 20}-"]


def test_a_server_without_ranges_is_read_from_the_start(tmp_path: Path) -> None:
    with HubStandIn(REPO, {"m.gguf": BIG}, breaks=[22 << 20], ranges=False) as stand_in:
        assert pull(f"hf:{REPO}", tmp_path, stand_in.url).path.read_bytes() == BIG


def test_contents_with_another_digest_never_get_the_name(tmp_path: Path) -> None:
    with HubStandIn(REPO, {"m.gguf": b"bytes"}, wrong_sha256=True) as stand_in:
        result = pull(f"hf:{REPO}", tmp_path, stand_in.url)
    assert "SHA-256" in (result.error or "")
    assert not list(tmp_path.rglob("*.gguf*"))


@pytest.mark.parametrize("name", ["../m.gguf", "/m.gguf", "a/../../m.gguf", "a\\m.gguf"])
def test_a_name_that_leads_out_of_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    with HubStandIn(REPO, {name: b"bytes"}) as stand_in:
        result = pull(f"hf:{REPO}", tmp_path, stand_in.url)
    assert "no plain path" in (result.error or "")


def test_an_unknown_repository_is_named(tmp_path: Path) -> None:
    with HubStandIn(REPO, {}) as stand_in:
        result = pull("hf:someone/else:Q4_0", tmp_path, stand_in.url)
    assert "the hub has no someone/else" in (result.error or "")


@pytest.mark.parametrize("extra", [{"HF_HUB_OFFLINE": "1"}, {}])
def test_a_hub_out_of_reach_is_said_to_be(tmp_path: Path, extra: dict[str, str]) -> None:
    with HubStandIn(REPO, {"m.gguf": b"bytes"}, down=True) as stand_in:
        result = pull(f"hf:{REPO}", tmp_path, stand_in.url, extra)
    assert "does not answer" in (result.error or "")
    assert result.stderr == ""


def test_the_missing_library_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match=r"pip install tamis\[hub\]"):
        models.pull(f"hf:{REPO}:Q4_0")
