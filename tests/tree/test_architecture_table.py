"""docs/reference/architectures.md has the architectures that there are."""

from architecture_table import BEGIN, END, PAGE, table


def test_the_page_has_every_architecture_as_its_file_says():
    page = PAGE.read_text()
    found = page.partition(BEGIN)[2].partition(END)[0]
    remedy = "run python tests/support/architecture_table.py"
    assert found == table(), remedy
