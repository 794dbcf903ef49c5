"""Shared fixtures. Tests marked `model` use the real models, fetched on first use."""

import contextlib
import fcntl
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from quick_cases import quick_cases
from quick_kernels import constants_of, needed

from tamis.fetch import registry as models
from tamis.fetch.base import Unreachable
from tamis.jit_kernels.compile import store
from tamis.jit_kernels.compile.library import shared
from tamis.jit_kernels.compile.workers import CompileError
from tamis.jit_kernels.contract.program import KernelSpec
from tamis.platform.private_files import private_folder

ROOT = Path(__file__).resolve().parents[1]
os.environ["TAMIS_CONFIG"] = ""  # tests run without the user's settings

# `python -m pytest` puts the working directory first: from the root of the tree, `runner` would be
# importable beside the installed `tamis`, and a module would exist twice.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

# A shell without a terminal starts what is to run in the background so that it ignores Ctrl-C, and
# so would the programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the source tree."""
    return ROOT


@pytest.fixture(scope="session")
def model_path() -> Callable[[str], Path]:
    """model_path("smollm2"): the file of a real model, fetched once into the per-user folder.

    Without a network the test is skipped; where the environment variable CI is set, it fails, so
    that a green run always means that the real models were run.
    """

    def path_of(name: str) -> Path:
        try:
            return models.pull(name)
        except Unreachable as e:
            if os.environ.get("CI"):
                pytest.fail(f"{name} cannot be fetched: {e}")
            pytest.skip(f"{name} cannot be fetched: {e}")

    return path_of


# Files whose tests take long: they compile for every level or target, start servers and browsers,
# build the package or the site, or kill processes over and over.
SLOW_FILES = {
    "bindings/serve/test_serve_connections.py", "bindings/serve/test_serve_isolation.py",
    "bindings/serve/test_serve_long.py", "bindings/serve/test_serve_openai.py",
    "bindings/serve/test_serve_page.py",
    "bindings/serve/test_serve_supervisor.py", "bindings/test_capi.py",
    "bindings/test_examples.py", "cuda/test_cuda.py", "cuda/test_cuda_on_threads.py",
    "cuda/test_gemv_epilogue.py", "cuda/test_kernels_cuda.py", "engine/test_faults.py",
    "formats/test_gguf_fuzz.py", "fuzz/test_targets.py", "kernels/test_compile_limits.py",
    "kernels/test_levels.py", "kv/test_gpu_page_cache.py", "tree/test_docs.py",
    "tree/test_packaging.py", "tree/test_release.py",
}  # fmt: skip
# Single tests that take long in files that do not.
SLOW_TESTS = {
    "bindings/serve/test_serve_blocking.py::test_no_input_at_its_limit_keeps_the_loop_from_others",
    "bindings/serve/test_serve_front.py::test_a_blocked_loop_is_healthy_and_ends",
    "bindings/serve/test_serve_models.py::test_two_real_models_with_a_budget_for_one",
    "bindings/test_front_door.py::test_a_users_program_and_the_code_of_the_docs_pass_mypy_strict",
    "bindings/test_flat_api.py::test_any_arguments_give_codes_and_later_calls_are_right",
    "cuda/test_key_copy_cuda.py::test_scores_thread_by_thread",
    "evals/test_eval_store.py::test_a_run_that_is_killed_ten_times_loses_nothing_and_doubles_nothing",
    "fetch/test_registry.py::test_a_zip_bomb_is_given_up_at_the_size_of_the_model",
    "kernels/test_compiler.py::test_object_code_is_the_same_in_any_order_and_with_shared_functions",
    "kernels/test_kernel_library.py::"
    "test_two_processes_compile_at_once_and_the_compilers_stay_out_of_them",
    "kernels/test_shipped.py::test_every_op_of_a_cpu_is_in_the_set_with_every_type",
    "kernels/test_team.py::test_a_dropped_backend_ends_its_threads",
    "make/test_convert.py::test_a_vocabulary_is_recognised_by_what_becomes_of_a_text",
    "methods/test_lfps.py::test_a_head_that_looks_at_its_sinks_is_bypassed_and_keeps_its_output",
    "methods/test_lfps.py::test_fixed_positions_and_fixed_distances_are_found_without_reading_the_keys",
    "methods/test_lfps.py::test_recorded_attention_is_predicted_from_the_past",
    "summary/test_summarize.py::test_killed_at_random_ten_times_it_loses_no_answer_and_makes_none_twice",
    "text/test_pretokenize.py::test_words_are_those_of_the_published_patterns",
    "tree/test_temporary_names.py::test_a_run_of_the_tests_opens_nothing_through_a_link",
}
# Folders and files whose cases take milliseconds: all of them are quick, for any may be the one
# that notices a fault.
ALL_CASES = (
    "bindings/serve/test_guard.py", "bindings/serve/test_serve_anthropic.py",
    "bindings/serve/test_serve_checks.py", "bindings/serve/test_serve_forms.py",
    "bindings/serve/test_serve_front_steps.py", "bindings/serve/test_serve_llamacpp.py",
    "bindings/serve/test_serve_models_steps.py", "bindings/serve/test_serve_ollama.py",
    "bindings/serve/test_serve_parts.py", "bindings/serve/test_serve_requests.py",
    "bindings/serve/test_serve_responses.py", "bindings/serve/test_serve_rules.py",
    "bindings/serve/test_serve_slots.py",
    "bindings/serve/test_serve_taking.py", "cli/test_messages.py", "engine/test_adapter_files.py",
    "engine/test_adapter_values.py",
    "engine/test_context_flags.py", "engine/test_draft_steps.py", "engine/test_kept_prompts.py",
    "engine/test_memory_plan.py",
    "engine/test_private_files.py", "engine/test_private_ways.py", "engine/test_processors.py",
    "engine/test_session_file.py", "fetch/", "formats/", "kernels/test_prepared.py",
    "kv/test_access_spans.py", "kv/test_any_cache.py", "kv/test_kv_layers.py",
    "kv/test_page_files.py", "kv/test_recurrent_states.py", "kv/test_tier_bookkeeping.py",
    "methods/test_cpe.py", "methods/test_metered.py", "methods/test_method_costs.py",
    "methods/test_notation_names.py", "methods/test_numpy_methods.py",
    "methods/test_recorded_ops.py", "methods/test_select_hip.py", "methods/test_select_tactic.py",
    "methods/test_selector_base.py", "methods/test_wrapped_hooks.py", "text/", "tree/",
)  # fmt: skip
# Tests in them whose cases take long all the same.
THINNED = {
    "formats/test_documents.py::test_a_page_takes_time_by_its_length",
    "text/test_chat_template.py::test_long_templates_that_take_all_are_stopped",
    "text/test_chat_template.py::test_templates_that_never_end_or_take_all_memory_are_stopped",
    "text/test_chat_template.py::test_tests_and_filters_count_against_the_budget",
    "text/test_encoders.py::test_a_long_text_is_encoded_in_time_in_proportion",
    "text/test_pretokenize.py::test_a_hundred_times_the_text_takes_about_a_hundred_times_as_long",
    "text/test_tool_calls.py::test_any_text_is_parsed_the_same_in_any_pieces_and_never_fails",
    "text/test_tool_calls.py::test_long_answers_take_time_in_proportion",
    "text/test_tool_calls.py::test_what_a_template_writes_is_read_back_however_it_is_cut",
}
VALUES: dict[ModuleType | None, list[object]] = {}  # of the cases of each module
CASES = 4  # of another test with more of them, these are quick: see quick_cases


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--whole-kit`: more than CI has the time for. `--device cuda`: where there is a GPU."""
    parser.addoption(
        "--whole-kit", action="store_true", help="each architecture's models in all five ways"
    )
    parser.addoption("--device", default="cpu", help="the device of the architectures' models")


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is not of the quick tier: real models, GPUs, slow files, all but some cases.

    Files with slow tests come first, so that no process has one left when the other has none.
    """
    cases: dict[str, list[pytest.Item]] = {}
    first = set[Path]()
    for item in items:
        _values(item).extend(_parameters(item).values())
        file = item.path.relative_to(ROOT / "tests").as_posix()
        marked = any(item.get_closest_marker(name) for name in ("model", "gpu"))
        test = item.nodeid.partition("[")[0].removeprefix("tests/")
        if marked or file in SLOW_FILES or test in SLOW_TESTS:
            item.add_marker(pytest.mark.slow)
            first.add(item.path)
        elif not file.startswith(ALL_CASES) or test in THINNED:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for each in cases.values():
        quick = quick_cases([_parameters(item) for item in each], CASES)
        for i, item in enumerate(each):
            if i not in quick:
                item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.path not in first)


@contextlib.contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Wait for other processes, and say so: the second one finds what the first has compiled.

    The name is in a folder of this user's own, where nobody else can make it a link.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    turn = os.open(path, flags, 0o600)
    try:
        try:
            fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another run of tests, which compiles kernels", file=sys.stderr)
            fcntl.flock(turn, fcntl.LOCK_EX)
        yield
    finally:
        os.close(turn)


def _values(item: pytest.Item) -> list[object]:
    """The parameters of all cases of an item's module, chosen or not."""
    return VALUES.setdefault(getattr(item, "module", None), [])


def _parameters(item: pytest.Item) -> dict[str, object]:
    """The parameters of a case, by their names; none of a test without cases."""
    return dict(item.callspec.params) if hasattr(item, "callspec") else {}


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compile the kernels of all modules of op tests that will run, with one start of compilers."""
    if session.config.option.collectonly:
        return
    chosen: dict[ModuleType, list[object]] = {}
    for item in session.items:
        if isinstance(item, pytest.Function) and hasattr(item.module, "KERNELS"):
            own = [*_parameters(item).values(), *constants_of(item.function)]
            chosen.setdefault(item.module, []).extend(own)
    specs = set[KernelSpec]()
    for module, values in chosen.items():
        listed = [KernelSpec(op, tuple(constants)) for op, constants in module.KERNELS]
        specs |= needed(listed, values, VALUES[module])
    turn = contextlib.ExitStack()
    if shared().missing(specs):
        turn.enter_context(only_one(private_folder(store.user_folder().parent) / "tests.lock"))
    with turn, contextlib.suppress(CompileError):  # the tests that need the kernel will say so
        if missing := shared().missing(specs):
            session.config.get_terminal_writer().line(f"compiling {len(missing)} kernels")
        shared().load(specs)
