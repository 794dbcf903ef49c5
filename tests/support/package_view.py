"""The package as links, for tools that do not read the folder mapping of pyproject.toml."""

from pathlib import Path

PACKAGES = ("formats", "jit_kernels", "bindings", "tools")  # of tamis, beside runner


def package_view(root: Path) -> Path:
    """A folder with `tamis` in it: made anew, below the ignored folder .cache."""
    view = root / ".cache" / "typed" / "tamis"
    view.mkdir(parents=True, exist_ok=True)
    for old in view.iterdir():
        if old.is_symlink():
            old.unlink()
    for path in [*(root / "runner").iterdir(), *(root / name for name in PACKAGES)]:
        if path.name != "__pycache__":
            (view / path.name).symlink_to(path)
    return view.parent


if __name__ == "__main__":
    print(package_view(Path(__file__).resolve().parents[2]))
