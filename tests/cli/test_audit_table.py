"""The table of an audit: means first, then the heads that retain least."""

import pytest
from tiny_models import TinySpec, write_tiny_model

from tamis.cli.terminal import audit
from tamis.engine.engine import Engine


@pytest.mark.parametrize("layers", [2, 4])
def test_the_means_come_first_and_then_the_five_heads_that_retain_least(tmp_path, capsys, layers):
    path = write_tiny_model(tmp_path / "tiny.gguf", TinySpec(layers=layers))
    with Engine.load(path, n_threads=1) as engine:
        session = engine.session(n_ctx=256, attn="window:sink=4,recent=16", audit=1)
        session.prefill([5 + i % 40 for i in range(150)])
        session.decode(7)
        mass = sorted(round(group.mass, 4) for group in session.audit.groups())
        mean = round(session.audit.total().mass, 4)
        audit.write(session.audit)
    rows = [line.split("|")[1:4] for line in capsys.readouterr().err.splitlines() if "|" in line]
    found = [(layer.strip(), float(m)) for layer, _, m in rows[2:]]
    assert found[0] == ("all", mean)
    assert [m for _, m in found[1:]] == mass[:5]


def test_every_head_has_a_line_where_the_table_is_asked_for(tmp_path, capsys):
    path = write_tiny_model(tmp_path / "tiny.gguf", TinySpec(layers=4))
    with Engine.load(path, n_threads=1) as engine:
        session = engine.session(n_ctx=256, attn="window:sink=4,recent=16", audit=1)
        session.prefill([5 + i % 40 for i in range(150)])
        session.decode(7)
        audit.write(session.audit)
        assert "--audit-table: all" in capsys.readouterr().err
        audit.write(session.audit, every_head=True)
        n_head = len(session.audit.groups())
    said = capsys.readouterr().err
    assert len([line for line in said.splitlines() if "|" in line]) == 2 + 1 + n_head
    assert "--audit-table" not in said
