"""Long texts in parts: nothing lost, nothing twice, none too long, cut at borders."""

import random

import pytest
from tiny_models import TinySpec, write_tiny_model

from tamis.formats.gguf import GGUFFile
from tamis.formats.vocab import Vocab
from tamis.summary.chunks import pack, split
from tamis.text.tokenizer import tokenizer_for


def n_words(text):
    return len(text.split())


def test_a_text_that_fits_is_one_part():
    assert split("a b c", n_words, 3) == ["a b c"]


def test_sections_come_before_paragraphs_before_lines_before_words():
    text = "# A\n\none two\nthree\n\nfour five\n\n# B\n\nsix\n"
    assert split(text, n_words, 7) == ["# A\n\none two\nthree\n\nfour five\n\n", "# B\n\nsix\n"]
    assert split(text, n_words, 5)[0] == "# A\n\none two\nthree\n\n"
    assert split("One two. Three four. Five", n_words, 3) == ["One two.", " Three four. Five"]
    assert split("aa bb cc dd", n_words, 2) == ["aa bb ", "cc dd"]


def test_a_word_alone_too_long_is_cut_inside():
    assert split("abcdefgh", len, 3) == ["ab", "cd", "ef", "gh"]
    with pytest.raises(ValueError, match="takes 2 tokens, a part has room for 1: raise n_ctx"):
        split("aü", lambda text: len(text.encode()), 1)


@pytest.mark.parametrize("bit", ["\n", " \n", " ", "=\n", "a" * 9 + "\n---\n", ". ", "#"])
def test_a_monotonous_text_takes_no_longer_than_another(bit):
    """Seconds would be hours here if a border were looked for from every character on."""
    text = bit * (30_000 // len(bit))
    assert "".join(split("a\n" + text, len, 2000)) == "a\n" + text


def test_parts_are_even_where_the_borders_allow_it():
    parts = split("w " * 101, n_words, 50)
    assert [n_words(part) for part in parts] == [34, 34, 33]


def test_no_part_is_over_even_where_units_take_more_tokens_together():
    def count(text):
        return n_words(text) + (n_words(text) > 3)

    assert max(map(count, split("w " * 30, count, 5))) <= 5


@pytest.mark.parametrize("seed", range(20))
def test_groups_are_the_fewest_and_hold_everything_in_order(seed):
    rng = random.Random(seed)
    sizes = [rng.randrange(1, 12) for _ in range(rng.randrange(1, 30))]
    groups = pack(sizes, 12)
    assert [i for first, end in groups for i in range(first, end)] == list(range(len(sizes)))
    assert all(sum(sizes[first:end]) <= 12 for first, end in groups)
    # The fewest: each group with the first of the next would be too much for some limit of 12.
    first_fit, room = 0, 0
    for size in sizes:
        first_fit, room = (first_fit, room - size) if size <= room else (first_fit + 1, 12 - size)
    assert len(groups) == first_fit
    assert pack([20, 1], 12) == [(0, 1), (1, 2)]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def tokenizer(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    with GGUFFile(write_tiny_model(path, TinySpec(request.param))) as file:
        return tokenizer_for(Vocab.from_gguf(file))


@pytest.mark.parametrize("seed", range(10))
def test_every_token_of_any_text_is_in_exactly_one_part(tokenizer, seed):
    """The parts' own tokens, decoded and joined, are the text."""
    rng = random.Random(seed)
    bits = ["the ", "thing", "\n", "\n\n", "# then\n", "ü", "! ", "。", "\f", "  ", "x" * 60, "🙂"]
    text = "".join(rng.choice(bits) for _ in range(rng.randrange(1, 200)))

    def count(part):
        return len(tokenizer.encode(part, add_special=False))

    n_max = rng.randrange(8, 80)
    parts = split(text, count, n_max)
    assert "".join(parts) == text
    assert all(0 < count(part) <= n_max for part in parts)
    ids = [tokenizer.encode(part, add_special=False) for part in parts]
    assert "".join(tokenizer.decode(part) for part in ids) == text
