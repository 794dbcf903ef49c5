"""Loads object code into memory: only the part of a linker and loader that kernels need.

A kernel's object file (ELF64, relocatable) has code and constants, no variables. It calls itself
and a few functions of the C library, and reads its constants by offsets: everything that is loaded
together lies in one block of memory. LLVM's JIT linkers would work, but take 40 MB a process.

Sources: System V Application Binary Interface, AMD64 Architecture Processor Supplement; ELF for the
Arm 64-bit Architecture (IHI 0056).
"""

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from tamis.platform.memory import code_memory, make_executable, system_function
from tamis.platform.processor import MACHINE

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQq")
_IDENT = b"\x7fELF\x02\x01\x01"  # 64 bits, little-endian, version 1
_RELOCATABLE = 1
_PROGBITS, _SYMTAB, _RELA = 1, 2, 4  # section types
_WRITE, _ALLOC = 1, 2  # section flags
_LOCAL = 0
_UNDEFINED = 0  # section of symbols
_UNWIND = b".eh_frame"  # no exception passes through a kernel
_STUB = 16  # bytes of a jump with its address, which may be anywhere


class LinkError(ValueError):
    """Object code cannot be loaded: it is not a kernel's, or needs unsupported features."""


def _relocate_x86(kind: int, memory: memoryview, place: int, to: int) -> None:
    if kind in (2, 4):  # PC32, PLT32
        struct.pack_into("<i", memory, 0, to - place)
    elif kind == 1:  # 64
        struct.pack_into("<Q", memory, 0, to)
    else:
        raise LinkError(f"relocation of type {kind}, expected 1, 2 or 4")


# By relocation type, the shift of an address in a load's or store's 12 bits; ADD's is 277.
_LOW_12 = {277: 0, 278: 0, 284: 1, 285: 2, 286: 3, 299: 4}
_FAR = 1 << 27  # the reach of a branch in bytes


def _relocate_arm(kind: int, memory: memoryview, place: int, to: int) -> None:
    if kind == 257:  # ABS64
        struct.pack_into("<Q", memory, 0, to)
        return
    if kind == 261:  # PREL32
        struct.pack_into("<i", memory, 0, to - place)
        return
    (word,) = struct.unpack_from("<I", memory)
    if kind == 275:  # ADR_PREL_PG_HI21: of ADRP, in pages of 4 KiB
        pages = (to >> 12) - (place >> 12)
        word = word & 0x9F00001F | (pages & 3) << 29 | (pages >> 2 & 0x7FFFF) << 5
    elif kind in _LOW_12:
        word = word & 0xFFC003FF | (to & 0xFFF) >> _LOW_12[kind] << 10
    elif kind in (282, 283):  # JUMP26, CALL26
        if not -_FAR <= to - place < _FAR:
            raise LinkError(f"a branch over {abs(to - place)} bytes, expected less than {_FAR}")
        word = word & 0xFC000000 | (to - place) >> 2 & 0x3FFFFFF
    else:
        raise LinkError(f"relocation of type {kind}, which code of kernels does not have")
    struct.pack_into("<I", memory, 0, word)


@dataclass(frozen=True, slots=True)
class _Machine:
    """What object files of a machine need. relocate(type, memory, place, to): takes addresses."""

    name: str
    number: int  # in an object file's header
    stub: struct.Struct
    jump: bytes  # a jump to the address that follows it
    relocate: Callable[[int, memoryview, int, int], None]


_MACHINES = {
    # jmp [rip + 0]
    "x86_64": _Machine("x86-64", 62, struct.Struct("<6sQ2x"), b"\xff\x25\0\0\0\0", _relocate_x86),
    # ldr x16, . + 8; br x16
    "aarch64": _Machine(
        "AArch64", 183, struct.Struct("<8sQ"), bytes.fromhex("50000058 00021fd6"), _relocate_arm
    ),
}


@dataclass(frozen=True, slots=True)
class _Section:
    name: bytes
    type: int
    flags: int
    offset: int
    size: int
    link: int
    info: int
    align: int


class _Object:
    """An object file and the offsets of its parts from the beginning of the memory."""

    def __init__(self, code: bytes, at: int, machine: _Machine) -> None:
        self.code, self.machine = code, machine
        self.sections = list(_sections(code, machine))
        self.place: dict[int, int] = {}  # by section index
        for i, section in enumerate(self.sections):
            if section.type != _PROGBITS or not section.flags & _ALLOC:
                continue
            if section.name == _UNWIND:
                continue
            if section.flags & _WRITE:
                raise LinkError(f"section {i} is writable: a kernel has no variables")
            at = -(-at // section.align) * section.align
            self.place[i] = at
            at += section.size
        self.symbols = list(self._symbols())
        self.stubs: dict[str, int] = {}
        for name, home, _ in self.symbols:
            if home == _UNDEFINED and name and name not in self.stubs:
                at = -(-at // _STUB) * _STUB
                self.stubs[name] = at
                at += _STUB
        self.end = at

    def _symbols(self) -> Iterator[tuple[str, int, int]]:
        """Yield name, section and value of each symbol of the table.

        Local ones have no name here.
        """
        for table in self.sections:
            if table.type != _SYMTAB:
                continue
            names = self.sections[table.link].offset
            rows = self.code[table.offset : table.offset + table.size]
            for name_at, info, _, section, value, _ in _SYMBOL.iter_unpack(rows):
                start = names + name_at
                named = info >> 4 != _LOCAL
                name = self.code[start : self.code.index(b"\0", start)].decode() if named else ""
                yield name, section, value

    def public(self) -> dict[str, int]:
        """The offsets of the public functions."""
        return {
            name: self.place[section] + value
            for name, section, value in self.symbols
            if name and section in self.place
        }

    def write(self, memory: memoryview, base: int, function: Callable[[str], int | None]) -> None:
        """Copy and relocate into memory that is mapped at `base`."""
        for i, at in self.place.items():
            start, size = self.sections[i].offset, self.sections[i].size
            memory[at : at + size] = self.code[start : start + size]
        for name, at in self.stubs.items():
            if (address := function(name)) is None:
                raise LinkError(f"the C library has no function {name}")
            self.machine.stub.pack_into(memory, at, self.machine.jump, address)
        for section in self.sections:
            if section.type != _RELA or section.info not in self.place:
                continue
            rows = self.code[section.offset : section.offset + section.size]
            for offset, info, addend in _RELOCATION.iter_unpack(rows):
                at = self.place[section.info] + offset
                to = base + self._target(info >> 32) + addend
                self.machine.relocate(info & 0xFFFFFFFF, memory[at : at + 8], base + at, to)

    def _target(self, symbol: int) -> int:
        name, section, value = self.symbols[symbol]
        if section == _UNDEFINED:
            return self.stubs[name]
        if section not in self.place:
            raise LinkError(f"symbol {name or symbol} is in section {section}, which is not loaded")
        return self.place[section] + value


def _sections(code: bytes, machine: _Machine) -> Iterator[_Section]:
    ident, kind, number, *rest = _HEADER.unpack_from(code)
    if not ident.startswith(_IDENT) or (kind, number) != (_RELOCATABLE, machine.number):
        raise LinkError(f"not an object file of {machine.name} (ELF64, relocatable)")
    start, size, n, names = rest[3], rest[8], rest[9], rest[10]
    rows = [_SECTION.unpack_from(code, start + size * i) for i in range(n)]
    for name_at, type_, flags, _, offset, length, link, info, align, _ in rows:
        first = rows[names][4] + name_at
        name = code[first : code.index(b"\0", first)]
        yield _Section(name, type_, flags, offset, length, link, info, max(1, align))


class Image:
    """Object files placed one after another, by the symbol that each must define.

    They come from a compiler and are complete; only unsupported features are checked. machine: the
    system's name of it. Raises LinkError, also if a file lacks its symbol.
    """

    def __init__(self, objects: Mapping[str, bytes], machine: str = MACHINE) -> None:
        if machine not in _MACHINES:
            raise LinkError(f"no kernels for {machine}, expected {' or '.join(_MACHINES)}")
        self.size = 0
        self.offsets: dict[str, int] = {}  # of the symbols
        self._objects: list[_Object] = []
        for symbol, code in objects.items():
            placed = _Object(code, self.size, _MACHINES[machine])
            if symbol not in (public := placed.public()):
                raise LinkError(f"{symbol}: the object file does not define it")
            self.offsets[symbol], self.size = public[symbol], placed.end
            self._objects.append(placed)

    def write(self, memory: memoryview, base: int, function: Callable[[str], int | None]) -> None:
        """Fill memory that will be run at `base`; function(name): addresses of the C library."""
        for placed in self._objects:
            placed.write(memory, base, function)


def load_code(objects: Mapping[str, bytes]) -> dict[str, int]:
    """Load object files by the symbol that each must define.

    Returns the addresses of these functions.

    They stay until the process ends: a thread may be in one while the interpreter shuts down.
    Raises LinkError; OSError if memory must not be made executable.
    """
    if not objects:
        return {}
    image = Image(objects)
    memory, base = code_memory(image.size)
    with memoryview(memory) as view:
        image.write(view, base, system_function)
    make_executable(memory, base)
    return {symbol: base + offset for symbol, offset in image.offsets.items()}
