"""Object files in memory: relocations, calls of the C library, and what is refused."""

import ctypes
import math
import struct

import emulated
import llvmlite.binding as llvm
import numpy as np
import pytest

from tamis.jit_kernels.compile import elf
from tamis.jit_kernels.compile.elf import Image, LinkError, load_code

SINE = """
declare double @sin(double)
define void @{name}(ptr %x) {{
  %v = load double, ptr %x
  %s = call double @sin(double %v)
  %y = fmul double %s, {factor}
  store double %y, ptr %x
  ret void
}}"""


def compiled(text, codemodel="small", reloc="pic"):
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        reloc=reloc, codemodel=codemodel
    )
    return machine.emit_object(llvm.parse_assembly(text))


def called(address, x):
    value = ctypes.c_double(x)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(ctypes.addressof(value))
    return value.value


# Offsets of 32 bits, addresses of 64.
@pytest.mark.parametrize(("codemodel", "reloc"), [("small", "pic"), ("large", "static")])
def test_constants_and_functions_of_the_c_library_are_reached(codemodel, reloc):
    factors = {f"f{i}": 1.5 + i for i in range(40)}
    code = load_code(
        {
            name: compiled(SINE.format(name=name, factor=factor), codemodel, reloc)
            for name, factor in factors.items()
        }
    )
    for name, factor in factors.items():
        assert called(code[name], 0.3) == factor * math.sin(0.3)


def test_a_part_may_call_another_and_only_the_named_one_is_found():
    text = """
    define internal double @twice(double %v) noinline {
      %y = fmul double %v, 2.5
      ret double %y
    }
    define void @whole(ptr %x) {
      %v = load double, ptr %x
      %y = call double @twice(double %v)
      store double %y, ptr %x
      ret void
    }"""
    code = load_code({"whole": compiled(text)})
    assert list(code) == ["whole"]
    assert called(code["whole"], 3.0) == 7.5


def test_what_is_loaded_can_be_run_and_not_written():
    code = load_code({"f": compiled(SINE.format(name="f", factor=2.5))})
    address = code["f"]
    with open("/proc/self/maps") as maps:
        for line in maps:
            start, end = (int(x, 16) for x in line.split()[0].split("-"))
            if start <= address < end:
                assert line.split()[1] == "r-xp"
                return
    pytest.fail("not mapped")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SINE.format(name="g", factor=2.5), "f: the object file does not define it"),
        ("@v = global i32 7 define void @f() { ret void }", "section .* is writable"),
        (
            "declare void @no_such_function() define void @f() { call void @no_such_function() "
            "ret void }",
            "no function no_such_function",
        ),
        (
            "@environ = external global ptr "
            "define void @f() { store ptr null, ptr @environ ret void }",
            "relocation of type",
        ),
    ],
)
def test_code_that_needs_more_is_refused(text, message):
    with pytest.raises(LinkError, match=message):
        load_code({"f": compiled(text)})


# --- AArch64, on any machine ----------------------------------------------------------------------

ARM_KERNEL = """
@table = private constant [3 x double] [double 2.5, double 3.5, double 4.5], align 16
@byte = private constant [4 x i8] c"abcd", align 1
declare double @{callee}(double)
define internal double @part(double %v) noinline {{
  %y = fmul double %v, 1.25
  ret double %y
}}
define void @f(ptr %x, i64 %i) {{
  %v = load double, ptr %x
  %own = call double @part(double %v)
  %s = call double @{callee}(double %own)
  %p = getelementptr double, ptr @table, i64 %i
  %t = load double, ptr %p
  %q = getelementptr i8, ptr @byte, i64 3
  %c = load i8, ptr %q
  %d = uitofp i8 %c to double
  %y = fmul double %s, %t
  %z = fadd double %y, %d
  store double %z, ptr %x
  ret void
}}"""


def for_arm(text):
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple("aarch64-unknown-linux-gnu")
    machine = target.create_target_machine(reloc="pic", codemodel="small", opt=0)
    return machine.emit_object(llvm.parse_assembly(text))


def signed(value, bits):
    return value - (1 << bits) if value >> bits - 1 else value


def referred(words, base):
    """Where the branches with link of AArch64's instructions go, and what their ADRPs add up to."""
    branches, addresses, pages = [], [], {}
    for i, word in enumerate(words):
        place = base + 4 * i
        if word >> 26 == 0b100101:  # BL
            branches.append(place + 4 * signed(word & 0x3FFFFFF, 26))
        elif word & 0x9F000000 == 0x90000000:  # ADRP
            count = signed((word >> 5 & 0x7FFFF) << 2 | word >> 29 & 3, 21)
            pages[word & 31] = (place & ~0xFFF) + (count << 12)
        elif word & 0xFFC00000 == 0x91000000 and word >> 5 & 31 in pages:  # ADD, 64 bits
            addresses.append(pages[word >> 5 & 31] + (word >> 10 & 0xFFF))
        elif word & 0x3F400000 == 0x3D400000 and word >> 5 & 31 in pages:  # LDR of a vector
            scale = word >> 30 | (word >> 23 & 1) << 2
            addresses.append(pages[word >> 5 & 31] + ((word >> 10 & 0xFFF) << scale))
        elif word & 0xFFC00000 == 0x39400000 and word >> 5 & 31 in pages:  # LDRB
            addresses.append(pages[word >> 5 & 31] + (word >> 10 & 0xFFF))
    return branches, addresses


@pytest.mark.parametrize("base", [0x10000000, 0x7FFF_FFFF_F000])
def test_instructions_of_aarch64_refer_to_what_the_object_file_says(base):
    found = 0x1234_5678_9ABC
    image = Image({"f": for_arm(ARM_KERNEL.format(callee="sin"))}, "aarch64")
    code = bytearray(image.size)
    with memoryview(code) as view:
        image.write(view, base, {"sin": found}.get)
    branches, addresses = referred(struct.unpack_from(f"<{image.size // 4}I", code), base)
    own, far = sorted(branches)
    assert 0 <= own - base < image.size
    # ldr x16, . + 8; br x16; the address
    assert struct.unpack_from("<IIQ", code, far - base) == (0x58000050, 0xD61F0200, found)
    contents = {bytes(code[at - base : at - base + 8]) for at in addresses}
    assert struct.pack("<d", 2.5) in contents
    assert any(text.startswith((b"abcd", b"d")) for text in contents)


def test_a_branch_that_is_too_far_and_relocations_of_no_kernel_are_refused():
    place = memoryview(bytearray(struct.pack("<I", 0x94000000)) + bytes(4))
    relocate = elf._MACHINES["aarch64"].relocate
    relocate(283, place, 1 << 30, (1 << 30) - (1 << 27))
    assert struct.unpack_from("<I", place) == (0x94000000 | 1 << 25,)
    for to in (1 << 27, -(1 << 27) - 4):
        with pytest.raises(LinkError, match=r"a branch over 13421\d+ bytes"):
            relocate(283, place, 1 << 30, (1 << 30) + to)
    with pytest.raises(LinkError, match="relocation of type 311"):
        relocate(311, place, 0, 0)
    with pytest.raises(LinkError, match="not an object file of AArch64"):
        Image({"f": compiled(SINE.format(name="f", factor=2.5))}, "aarch64")
    with pytest.raises(LinkError, match="no kernels for riscv64"):
        Image({}, "riscv64")


@pytest.mark.skipif(not emulated.emulator(), reason="there is no qemu-aarch64")
def test_aarch64_runs_what_was_relocated():
    text = ARM_KERNEL.format(callee="llvm.sqrt.f64")
    x = np.array([3.0])
    emulated.call("neon", for_arm(text), "f", x, 1)
    assert x[0] == np.sqrt(3.0 * 1.25) * 3.5 + ord("d")


def test_other_files_are_refused():
    with pytest.raises(LinkError, match="not an object file"):
        load_code({"f": b"MZ" + bytes(100)})
    with open("/proc/self/exe", "rb") as program, pytest.raises(LinkError, match="not an object"):
        load_code({"f": program.read()})
