"""Sources of kernels' code: the package, the user's folder, or a compiler."""

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tamis.jit_kernels.compile.shipped import shipped
from tamis.jit_kernels.compile.store import (
    can_compile,
    open_folder,
    read_object,
    remedy,
    user_folder,
)
from tamis.jit_kernels.compile.workers import Command, CompileError, Progress, compile_specs
from tamis.jit_kernels.contract.program import KernelSpec
from tamis.jit_kernels.cpu.lang import features
from tamis.jit_kernels.cpu.lang.features import Features

if TYPE_CHECKING:
    from tamis.jit_kernels.cuda.lang.target import Target


def compiler_of(kind: str) -> tuple[str, dict[str, str]]:
    """The module that compiles kernels of a kind, and the environment that it needs."""
    environment = {"cpu": {"NUMBA_OPT": "0"}, "cuda": {}}[kind]  # see compile_kernel
    return f"tamis.jit_kernels.{kind}.runtime.compiler", environment


class KernelCode:
    """Object code of a level, or PTX of a target, by spec.

    Raises KernelStoreError if the user's folder cannot be used; if kernels came with the package,
    not before the folder is needed.
    """

    def __init__(self, level: "Features | Target", root: Path | None, n_worker: int) -> None:
        self._level, self._root, self._n_worker = level, root, n_worker
        on_gpu = not isinstance(level, Features)
        self._kind, vendor = ("cuda", "") if on_gpu else ("cpu", features.vendor())
        self._shipped = shipped(self._kind, level.name, vendor) if root is None else None
        if self._shipped is None:
            self._folder  # noqa: B018 - opened now: who asks learns at once what is wrong

    @cached_property
    def _folder(self) -> Path:
        return open_folder(self._root or user_folder(), self._level)

    def missing(self, specs: Iterable[KernelSpec]) -> list[KernelSpec]:
        """The kernels among `specs` that would have to be compiled."""
        return [spec for spec in specs if self._read(spec) is None]

    def take(
        self, specs: Iterable[KernelSpec], progress: Progress | None = None
    ) -> dict[str, bytes]:
        """The code of kernels by symbol, compiling the missing ones.

        progress(done, total) while compiling. Raises CompileError, KernelStoreError.
        """
        found = {spec: self._read(spec) for spec in specs}
        if missing := [spec for spec, code in found.items() if code is None]:
            self._compile(missing, progress)
            found |= {spec: read_object(self._folder, spec.symbol) for spec in missing}
        for spec, code in found.items():
            if code is None:
                raise CompileError(f"the compiler wrote no usable code for {spec.symbol}")
        if self._shipped is not None:
            self._shipped.drop()
        return {spec.symbol: code for spec, code in found.items() if code is not None}

    def _read(self, spec: KernelSpec) -> bytes | None:
        if self._shipped is not None:
            code = self._shipped.read(spec.symbol)
            if code is not None or not can_compile(self._kind):
                return code
        return read_object(self._folder, spec.symbol)

    def _compile(self, specs: list[KernelSpec], progress: Progress | None) -> None:
        if not can_compile(self._kind):
            more = f" (and {len(specs) - 1} more)" if len(specs) > 1 else ""
            first = min(spec.symbol for spec in specs)  # specs come from a set, in any order
            raise CompileError(
                f"kernel {first}{more} is not among those that come with tamis for "
                f"{self._level.name}: {remedy()}"
            )
        module, environment = compiler_of(self._kind)
        command = Command(self._folder, module, self._level.name, environment)
        compile_specs(command, specs, self._n_worker, progress)
