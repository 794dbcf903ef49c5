"""Object code into memory: what a linker and a loader do, for kernels, and nothing more.

A kernel's object file (ELF64, x86-64, relocatable) has code and constants, no variables. It calls
itself and a few functions of the C library, and reads its constants by 32-bit offsets: all that is
loaded together lies in one piece of memory. LLVM's JIT linkers would do, at 40 MB a process.

Source: System V Application Binary Interface, AMD64 Architecture Processor Supplement.
"""

import contextlib
import ctypes
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQq")
_IDENT = b"\x7fELF\x02\x01\x01"  # 64 bits, little-endian, version 1
_RELOCATABLE, _X86_64 = 1, 62
_PROGBITS, _SYMTAB, _RELA = 1, 2, 4  # section types
_WRITE, _ALLOC = 1, 2  # section flags
_ABS64, _PC32, _PLT32 = 1, 2, 4  # relocation types
_LOCAL = 0
_UNDEFINED = 0  # section of symbols
# A call of a function that may be anywhere goes through `jmp [rip + 0]` and its address.
_STUB = struct.Struct("<6sQ2x")
_JUMP = b"\xff\x25\0\0\0\0"


class LinkError(ValueError):
    """Object code that cannot be loaded: not an object file of a kernel, or one that needs more."""


@dataclass(frozen=True, slots=True)
class _Section:
    type: int
    flags: int
    offset: int
    size: int
    link: int
    info: int
    align: int


class _Object:
    """An object file and where its parts go: offsets from the beginning of the memory."""

    def __init__(self, code: bytes, at: int) -> None:
        self.code = code
        self.sections = list(_sections(code))
        self.place: dict[int, int] = {}  # by section index
        for i, section in enumerate(self.sections):
            if section.type != _PROGBITS or not section.flags & _ALLOC:
                continue  # also unwind tables: no exception passes through a kernel
            if section.flags & _WRITE:
                raise LinkError(f"section {i} is writable: a kernel has no variables")
            at = -(-at // section.align) * section.align
            self.place[i] = at
            at += section.size
        self.symbols = list(self._symbols())
        self.stubs: dict[str, int] = {}
        for name, home, _ in self.symbols:
            if home == _UNDEFINED and name and name not in self.stubs:
                at = -(-at // _STUB.size) * _STUB.size
                self.stubs[name] = at
                at += _STUB.size
        self.end = at

    def _symbols(self) -> Iterator[tuple[str, int, int]]:
        """Name, section and value of each symbol of the table; local ones have no name here."""
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
        """Where the public functions are."""
        return {
            name: self.place[section] + value
            for name, section, value in self.symbols
            if name and section in self.place
        }

    def write(self, memory: mmap.mmap, base: int) -> None:
        """Copy and relocate into memory that is mapped at `base`."""
        for i, at in self.place.items():
            start, size = self.sections[i].offset, self.sections[i].size
            memory[at : at + size] = self.code[start : start + size]
        for name, at in self.stubs.items():
            _STUB.pack_into(memory, at, _JUMP, _function(name))
        for section in self.sections:
            if section.type != _RELA or section.info not in self.place:
                continue
            rows = self.code[section.offset : section.offset + section.size]
            for offset, info, addend in _RELOCATION.iter_unpack(rows):
                at = self.place[section.info] + offset
                target = self._target(info >> 32) + addend
                kind = info & 0xFFFFFFFF
                if kind in (_PC32, _PLT32):
                    struct.pack_into("<i", memory, at, target - at)
                elif kind == _ABS64:
                    struct.pack_into("<Q", memory, at, base + target)
                else:
                    raise LinkError(f"relocation of type {kind}, expected 1, 2 or 4")

    def _target(self, symbol: int) -> int:
        name, section, value = self.symbols[symbol]
        if section == _UNDEFINED:
            return self.stubs[name]
        if section not in self.place:
            raise LinkError(f"symbol {name or symbol} is in section {section}, which is not loaded")
        return self.place[section] + value


def _sections(code: bytes) -> Iterator[_Section]:
    ident, kind, machine, *rest = _HEADER.unpack_from(code)
    if not ident.startswith(_IDENT) or (kind, machine) != (_RELOCATABLE, _X86_64):
        raise LinkError("not an object file of x86-64 (ELF64, relocatable)")
    start, size, n = rest[3], rest[8], rest[9]
    for i in range(n):
        _, type_, flags, _, offset, length, link, info, align, _ = _SECTION.unpack_from(
            code, start + size * i
        )
        yield _Section(type_, flags, offset, length, link, info, max(1, align))


@cache
def _function(name: str) -> int:
    """Address of a function of the C library."""
    for library in (None, "libm.so.6"):
        with contextlib.suppress(AttributeError):
            function = getattr(ctypes.CDLL(library), name)
            if address := ctypes.cast(function, ctypes.c_void_p).value:
                return address
    raise LinkError(f"the C library has no function {name}")


def load_code(objects: Mapping[str, bytes]) -> dict[str, int]:
    """Load object files by the symbol that each must define; the addresses of these functions.

    They stay until the process ends: a thread may be in one while the interpreter goes down. The
    files come from a compiler and are whole: what is checked is whether they need more than there
    is here. Raises LinkError, also where a file lacks its symbol; OSError where memory may not be
    made executable.
    """
    placed: dict[str, _Object] = {}
    end = 0
    for symbol, code in objects.items():
        placed[symbol] = _Object(code, end)
        end = placed[symbol].end
    if not placed:
        return {}
    memory = mmap.mmap(-1, end, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    addresses = {}
    for symbol, file in placed.items():
        public = file.public()
        if symbol not in public:
            raise LinkError(f"{symbol}: the object file does not define it")
        file.write(memory, base)
        addresses[symbol] = base + public[symbol]
    _protect(base, len(memory), mmap.PROT_READ | mmap.PROT_EXEC)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
    return addresses


def _protect(address: int, size: int, protection: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), protection):
        raise OSError(ctypes.get_errno(), "memory for kernels cannot be made executable")
