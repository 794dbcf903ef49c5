"""The server's limits are those of its guide, and hold at the number itself. No model."""

import asyncio
import re

import pytest

from tamis.bindings.serve import helpers, masks, wire
from tamis.bindings.serve.api import document
from tamis.bindings.serve.body import Body
from tamis.bindings.serve.errors import ApiError
from tamis.bindings.serve.fair_semaphore import FairSemaphore
from tamis.bindings.serve.http import helper, listen
from tamis.bindings.serve.http.app import Settings
from tamis.bindings.serve.http.front import MOST_HEAD, Asked, judge
from tamis.bindings.serve.http.json_reply import LONGEST_NAME, MOST_NAMES, told

HOSTS = frozenset([b"localhost"])
PREPARED = Settings()
# Rows of the guide's table, and what the code has.
ROWS = {
    "connection between requests": f"{listen.IDLE_SECONDS} s",
    "body of a request": f"{PREPARED.timeout_request} s",
    "... processor time": f"{PREPARED.timeout_prepare} s",
    "... of it to compile a grammar": f"{wire.GRAMMAR_SECONDS} s",
    "... memory": f"{PREPARED.helper_bytes >> 30} GiB",
    "... forks at once": f"{helpers.AT_ONCE}, fair by key or address",
    "a grammar's memory while it is followed": f"{helper.KEPT_BYTES >> 20} MiB",
    "... time for a token": f"{masks.MASK_SECONDS} s, {helper.STEP_SECONDS} s of processor time",
    "requests that wait": f"{PREPARED.n_queue}",
    "`n` times the prompts": f"{PREPARED.n_choices}",
}


def test_the_guide_has_the_limits_of_the_code(root):
    text = (root / "docs/guides/server.md").read_text().partition("### Limits")[2]
    table = [[cell.strip() for cell in re.split(r"\|", row)[1:3]] for row in text.splitlines()]
    told = {cells[0]: cells[1] for cells in table if len(cells) == 2}
    assert {row: told.get(row) for row in ROWS} == ROWS


def head(n):
    """A head of /health that is n bytes and has not come whole."""
    start = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "
    return start + b"a" * (n - len(start))


def test_a_head_without_an_end_is_waited_for_up_to_its_limit():
    assert judge(head(MOST_HEAD - 1), HOSTS) is True
    assert judge(head(MOST_HEAD), HOSTS) is False
    whole = head(MOST_HEAD - 4) + b"\r\n\r\n"
    assert judge(whole, HOSTS) == Asked(MOST_HEAD, has_body=True, keeps=True)


@pytest.mark.parametrize(
    ("n", "shown"), [(MOST_NAMES, MOST_NAMES), (MOST_NAMES + 1, MOST_NAMES), (99, MOST_NAMES)]
)
def test_names_of_fields_are_counted_from_the_limit_on(n, shown):
    names = [f"f{i}" for i in range(n)]
    found = told(names)["x-tamis-ignored"].split(", ")
    assert len(found) == shown
    if n == shown:
        assert found == names
    else:
        assert found == [*names[: MOST_NAMES - 1], f"{n - MOST_NAMES + 1} more"]


@pytest.mark.parametrize("n", [LONGEST_NAME, LONGEST_NAME + 1])
def test_a_long_name_is_cut_to_its_limit(n):
    found = told(["n" * n])["x-tamis-ignored"]
    assert len(found) == LONGEST_NAME
    assert found.endswith("...") == (n > LONGEST_NAME)


@pytest.mark.parametrize(
    ("value", "is_right"),
    [
        ("a", True),
        ("aaa", True),
        (["a", "bb"], True),
        ("", False),  # at least one character where nothing else is asked for
        ("aaaa", False),
        (["a", "b", "c"], False),
        (["a", ""], False),
        ([1], False),
        ({"a": 1}, False),
    ],
)
def test_texts_are_as_many_and_as_long_as_they_may_be(value, is_right):
    body = Body({"words": value})
    if is_right:
        assert body.texts("words", 2, 3) == ((value,) if isinstance(value, str) else tuple(value))
    else:
        with pytest.raises(ApiError, match=r"words .*, expected"):
            body.texts("words", 2, 3)


def test_texts_may_be_empty_where_that_is_said():
    assert Body({"words": ["", "a"]}).texts("words", 2, 3, least=0) == ("", "a")


def test_the_end_of_a_files_name_says_its_kind():
    long = {"name": "a" * 1000 + ".html", "data": "PGI+eDwvYj4="}
    assert document.read(None, Body(long)) == {"text": "x", "kind": "html"}


def test_permits_that_were_given_back_count_no_more():
    """Who had many turns and holds none is as near the next one as who never had any."""

    async def run():
        semaphore, order = FairSemaphore(1), []

        async def work(owner):
            await semaphore.acquire(owner)
            order.append(owner)
            semaphore.release(owner)

        for _ in range(3):
            await work("often")
        await semaphore.acquire("now")
        tasks = [asyncio.create_task(work(owner)) for owner in ("often", "new")]
        await asyncio.sleep(0)
        semaphore.release("now")
        await asyncio.gather(*tasks)
        return order

    assert asyncio.run(run()) == ["often"] * 4 + ["new"]
