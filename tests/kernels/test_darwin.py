"""macOS's side of the platform layer, as far as Linux shows it: calls, and code under qemu."""

import ctypes
import mmap
import os
import struct
import subprocess
import sys

import emulated
import llvmlite.binding as llvm
import numpy as np
import pytest

from tamis.jit_kernels.compile.elf import Image
from tamis.jit_kernels.cpu.lang import features
from tamis.platform import darwin, memory
from tamis.platform.waiting import WAIT_PRIVATE, WAKE_PRIVATE

# Stand-ins for __ulock_wait and __ulock_wake, which note at the word what they were called with,
# and a call as kernels make it for futex(2).
CALLS = """
target triple = "aarch64-unknown-linux-gnu"
@code = constant [64 x i8] c"{code}", align 8
define void @wait(i32 %operation, ptr %word, i64 %value, i32 %microseconds) {{
  %o = zext i32 %operation to i64
  %m = zext i32 %microseconds to i64
  store i64 1, ptr %word
  %p1 = getelementptr i64, ptr %word, i64 1
  store i64 %o, ptr %p1
  %p2 = getelementptr i64, ptr %word, i64 2
  store i64 %value, ptr %p2
  %p3 = getelementptr i64, ptr %word, i64 3
  store i64 %m, ptr %p3
  ret void
}}
define void @wake(i32 %operation, ptr %word, i64 %value) {{
  %o = zext i32 %operation to i64
  store i64 2, ptr %word
  %p1 = getelementptr i64, ptr %word, i64 1
  store i64 %o, ptr %p1
  %p2 = getelementptr i64, ptr %word, i64 2
  store i64 %value, ptr %p2
  ret void
}}
define void @f(ptr %word, i64 %operation) {{
  %done = call i64 (i64, ...) @code(i64 98, ptr %word, i64 %operation, i64 7, i64 0, i64 0, i64 0)
  ret void
}}
"""


class Library:
    """The C library of a macOS: it notes calls, and knows numbers of sysctl(3)."""

    def __init__(self, numbers=None, size=0, resident=0):
        self.calls, self.numbers, self.info = [], numbers or {}, (size, resident)

    def sysctlbyname(self, name, value, size, _new, _n):
        if name.decode() not in self.numbers:
            return -1
        ctypes.memmove(value, struct.pack("<Q", self.numbers[name.decode()]), 8)
        return 0

    def proc_pidinfo(self, pid, flavor, _arg, buffer, size):
        assert (pid, flavor, size) == (os.getpid(), 4, 96)
        struct.pack_into("<2Q", buffer, 0, *self.info)
        return size

    def pthread_jit_write_protect_np(self, on):
        self.calls.append(("protect", on))

    def sys_icache_invalidate(self, address, size):
        self.calls.append(("invalidate", address.value, size.value))


@pytest.fixture
def system(monkeypatch):
    library = Library()
    monkeypatch.setattr(darwin, "_library", lambda: library)
    monkeypatch.setattr(darwin, "_MAP_JIT", 0)  # Linux has no such flag
    return library


def object_of(code):
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    text = CALLS.format(code="".join(f"\\{byte:02x}" for byte in code))
    target = llvm.Target.from_triple("aarch64-unknown-linux-gnu")
    machine = target.create_target_machine(reloc="pic", codemodel="small")
    return machine.emit_object(llvm.parse_assembly(text))


@pytest.mark.skipif(not emulated.emulator(), reason="there is no qemu-aarch64")
@pytest.mark.parametrize(
    ("operation", "noted"),
    [(WAIT_PRIVATE, [1, 1, 7, 0]), (WAKE_PRIVATE, [2, 0x101, 0, -1])],
    ids=["wait", "wake"],
)
def test_the_code_of_futex_calls_with_the_arguments_of_ulock(operation, noted):
    image = Image({"f": object_of(bytes(64))}, "aarch64")
    places = image._objects[0].public()  # the same whatever the code is
    at = [emulated.CODE + emulated.GRAIN + places[name] for name in ("wait", "wake")]
    word = np.full(4, -1, np.int64)
    emulated.call("neon", object_of(darwin.futex_code(*at)), "f", word, operation)
    assert word.tolist() == noted


def test_instruction_sets_are_the_systems_features(system):
    assert darwin.instruction_sets() == {"neon"}
    names = "FEAT_DotProd", "FEAT_I8MM", "FEAT_LSE"
    system.numbers = {f"hw.optional.arm.{name}": 1 for name in names}
    assert darwin.instruction_sets() == {"neon", "dotprod", "i8mm", "lse"}
    system.numbers |= {"hw.optional.armv8_crc32": 1, "hw.cpufamily": 0x1B588BB3}
    sets = darwin.instruction_sets()
    levels = [level.name for level in features.LEVELS.values() if {*level.needs} <= sets]
    assert levels == ["generic", "neon", "neon-dotprod", "neon-i8mm"]
    assert darwin.identity() == "apple 0x1b588bb3 crc dotprod i8mm lse neon"


def test_memory_is_what_the_system_counts(system):
    system.numbers = {"vm.page_free_count": 100, "vm.page_speculative_count": 20}
    assert darwin.available_bytes() == 120 * mmap.PAGESIZE
    system.info = (5 << 30, 3 << 20)
    assert darwin.held_bytes() == (5 << 30, 3 << 20)


def test_dropped_memory_reads_as_zeros():
    whole = memory.huge_zeros((8, mmap.PAGESIZE), np.dtype(np.uint8))[1]
    whole[...] = 7
    darwin.zero(whole.ctypes.data + mmap.PAGESIZE, 2 * mmap.PAGESIZE)
    assert whole.any(axis=1).tolist() == [True, False, False, *[True] * 5]


def test_code_is_written_and_then_run_by_the_thread_that_wrote_it(system, monkeypatch):
    monkeypatch.setattr(darwin, "_functions", lambda: {"syscall": 1})
    pages, address = darwin.code_memory(100)
    assert system.calls == [("protect", 0)]
    pages[:4] = b"code"
    darwin.make_executable(pages, address)
    assert system.calls[1:] == [("protect", 1), ("invalidate", address, 100)]
    assert ctypes.string_at(address, 4) == b"code"


def test_kernels_find_what_they_call_by_linuxs_names(system, monkeypatch):
    addresses = {"__ulock_wait": 10, "__ulock_wake": 20, "pread": 30, "preadv": 40, "expf": 50}
    monkeypatch.setattr(darwin, "_address", addresses.get)
    darwin._functions.cache_clear()
    own = darwin.system_function("syscall")
    assert ctypes.string_at(own, 64) == darwin.futex_code(10, 20)
    advise = darwin.system_function("posix_fadvise64")
    assert ctypes.string_at(advise, 8) == bytes.fromhex("00008052 c0035fd6")  # mov w0, #0; ret
    names = "pread64", "preadv2", "expf", "nothing"
    assert [darwin.system_function(name) for name in names] == [30, 40, 50, None]
    assert system.calls[0] == ("protect", 0)
    darwin._functions.cache_clear()


def test_code_of_aarch64_leaves_macos_its_register():
    for name in ("neon", "neon-dotprod", "neon-i8mm"):
        assert "+reserve-x18" in features.target(features.LEVELS[name]).features.split(",")


STARTS = """
import os, sys
from tamis.platform import processor
processor.MACOS = True
for name in ("sched_getaffinity", "sched_setaffinity", "posix_fadvise"):
    delattr(os, name)
from tamis.platform import cores, memory, processes
assert processor.affinity() == set(range(os.cpu_count()))
with cores.pinned(0):
    pass
assert processes.usable_cpus() >= 1
processes.drop_privileges()
with open(sys.argv[1], "rb") as file:
    memory.read_ahead(file.fileno(), 0, 10)
    memory.read_at_random(file.fileno())
    memory.evict_file(file.fileno())
print(memory.darwin.__name__)
"""


def test_the_layer_does_without_what_macos_lacks():
    command = [sys.executable, "-c", STARTS, __file__]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "tamis.platform.darwin\n"


def test_apples_name_of_the_machine_is_linuxs():
    text = """
import platform
platform.machine = lambda: "arm64"
from tamis.platform import processor
print(processor.MACHINE)
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout == "aarch64\n"
    assert Image({}, "aarch64").size == 0
