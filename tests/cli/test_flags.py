"""Errors of the library name parameters, those of the command line the flags that one types."""

import pytest

from tamis.cli.commands.run import add_arguments
from tamis.cli.options.errors import FLAGS, with_flags


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("n_ctx is 8: raise n_ctx to 9", "--ctx is 8: raise --ctx to 9"),
        ("leave out kv_ram, or offload_kqv=False.", "leave out --kv-ram, or -nkvo."),
        ("with device='cuda' or n_gpu_layers", "with --device cuda or -ngl"),
        ("leave out attn, min_mass and audit", "leave out --attn, --min-mass and --audit"),
        ("the model's attn takes dense, the user's type_k", None),
    ],
)
def test_parameters_become_flags(text: str, shown: str | None) -> None:
    shown = shown or "the model's --attn takes dense, the user's --cache-type-k"
    assert with_flags(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "'topk:prefill=3' has no prefill_rows",
        "no file /data/prefill/n_ctx.gguf",
        "tensor blk.0.attn.weight is missing",
        'method "attn" is not known',
        "the flag --kv-ram, -ngl",
    ],
)
def test_what_people_wrote_stays(text: str) -> None:
    assert with_flags(text) == text


def test_every_flag_is_one_of_the_command() -> None:
    import argparse

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    known = set(parser.format_help().replace(",", " ").split())
    assert {flag.split()[0] for flag in FLAGS.values()} - {"--length"} <= known  # of summarize
