"""Object files in memory: relocations, calls of the C library, and what is refused."""

import ctypes
import math

import llvmlite.binding as llvm
import pytest

from tamis.jit_kernels.compile.elf import LinkError, load_code

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


def test_other_files_are_refused():
    with pytest.raises(LinkError, match="not an object file"):
        load_code({"f": b"MZ" + bytes(100)})
    with open("/proc/self/exe", "rb") as program, pytest.raises(LinkError, match="not an object"):
        load_code({"f": program.read()})
