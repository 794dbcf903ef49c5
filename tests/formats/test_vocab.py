"""The vocabulary: what is read, what is found by the text of a token, what is refused."""

import numpy as np
import pytest
from gguf_files import array, boolean, f32, gguf_bytes, i32, kv, text, u32, write_bytes

from tamis.formats.gguf import GGUFError, GGUFFile
from tamis.formats.vocab import TokenType, Vocab, byte_of_token


@pytest.fixture
def load(tmp_path):
    """Vocabulary of a file with these keys after ``tokenizer.ggml.``; None leaves one out."""

    def load_vocab(vocabulary, /, **keys):
        values = {"model": text("gpt2"), "tokens": array(text, vocabulary)}
        values["merges"] = array(text, ["a b"])
        records = [kv(f"tokenizer.ggml.{k}", v) for k, v in (values | keys).items() if v]
        with GGUFFile(write_bytes(tmp_path / "v.gguf", gguf_bytes(records))) as f:
            return Vocab.from_gguf(f)

    return load_vocab


def test_a_bpe_vocabulary(load):
    vocab = load(
        ["a", "b", "ab", "<s>"],
        pre=text("qwen2"),
        merges=array(text, ["a b"]),
        token_type=array(i32, [1, 1, 1, 3]),
        bos_token_id=u32(3),
        add_bos_token=boolean(False),
    )
    assert (vocab.model, vocab.pre, len(vocab)) == ("gpt2", "qwen2", 4)
    assert vocab.tokens == ["a", "b", "ab", "<s>"]
    assert vocab.token_types.dtype == np.int32
    assert vocab.token_types.tolist() == [1, 1, 1, 3]
    assert vocab.merges == ["a b"]
    assert vocab.scores is None
    assert vocab.bos == 3
    assert vocab.add_bos is False
    assert vocab.add_space_prefix is False


def test_an_spm_vocabulary(load):
    vocab = load(["<unk>", "▁a"], model=text("llama"), scores=array(f32, [0.0, -1.5]))
    assert vocab.scores.dtype == np.float32
    assert vocab.scores.tolist() == [0.0, -1.5]
    assert vocab.add_space_prefix is True
    assert vocab.merges == []
    assert vocab.pre == "default"


@pytest.mark.parametrize("pre", ["jina-v2-de", "jina-v2-es", "jina-v2-code", "qwen2"])
def test_a_mask_takes_the_white_space_before_it_where_the_words_are_jinas(load, pre):
    vocab = load(["a", "<mask>"], pre=text(pre))
    assert vocab.lstrip == (frozenset() if pre == "qwen2" else {1})
    assert vocab.rstrip == frozenset()


def test_what_the_file_leaves_open_is_none(load):
    vocab = load(["a"])
    assert vocab.add_bos is None
    assert vocab.add_eos is None
    assert vocab.chat_template is None
    assert [vocab.bos, vocab.eos, vocab.eot, vocab.eom, vocab.unk, vocab.pad, vocab.sep] == [
        None
    ] * 7
    assert vocab.eog == frozenset()
    assert vocab.token_types.tolist() == [TokenType.NORMAL]


def test_a_token_id_of_minus_one_means_none(load):
    assert load(["a"], seperator_token_id=u32(2**32 - 1), padding_token_id=i32(-1)).sep is None


def test_end_of_generation_is_eos_and_every_token_known_by_its_text(load):
    vocab = load(["<|im_end|>", "x", "end", "<|endoftext|>", "<|eom_id|>"], eos_token_id=u32(2))
    assert vocab.eog == {0, 2, 3, 4}
    assert (vocab.eot, vocab.eom) == (0, 4)
    # They are control tokens even if the converter did not know.
    assert vocab.token_types.tolist() == [3, 1, 1, 3, 3]


def test_the_keys_of_the_file_go_before_texts(load):
    assert load(["<|eot_id|>", "x"], eot_token_id=u32(1)).eot == 1


def test_fill_in_the_middle_tokens_end_an_answer_too(load):
    vocab = load(["<|fim_prefix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"])
    assert vocab.fim == {"pre": 0, "pad": 1, "rep": 2, "sep": 3}
    assert vocab.eog == {1, 2, 3}


def test_in_gpt_oss_end_is_the_end_of_a_channel_only(load):
    vocab = load(["<|return|>", "<|call|>", "<|end|>", "<|channel|>"])
    assert vocab.eog == {0, 1}
    assert vocab.token_types[2] == TokenType.USER_DEFINED
    assert vocab.token_types[3] == TokenType.USER_DEFINED


def test_a_strike_tag_of_html_ends_nothing(load):
    tokens, types = ["<s>", "</s>"], [3, 4]
    assert load(tokens, token_type=array(i32, types)).eog == frozenset()
    assert load(tokens, token_type=array(i32, [3, 3])).eog == {1}


@pytest.mark.parametrize(
    ("token", "byte"),
    [
        ("<0x0A>", 10),
        ("<0xff>", 255),
        ("<0x-1>", None),
        ("<0x+1>", None),
        ("<0x100>", None),
        ("<0x_1>", None),
        ("<0x>", None),
        ("<0x0A>\n", None),
        ("a", None),
    ],
)
def test_byte_tokens(load, token, byte):
    assert byte_of_token(token) == byte
    assert load([token], model=text("llama")).tokens == [token]


@pytest.mark.parametrize(
    ("keys", "key", "message"),
    [
        ({"model": text("other")}, "model", "'other' is not supported"),
        ({"model": None}, "model", "lacks a key"),
        ({"tokens": None}, "tokens", "lacks a key"),
        ({"tokens": array(text, [])}, "tokens", "is empty"),
        ({"tokens": array(u32, [1, 2])}, "tokens", "expected Strings, got ndarray"),
        ({"merges": None}, "merges", "lacks a key"),
        ({"merges": array(u32, [1])}, "merges", "expected Strings, got ndarray"),
        ({"token_type": array(i32, [1])}, "token_type", "1 token types for 2 tokens"),
        ({"token_type": array(i32, [1, 7])}, "token_type", "token 1 has type 7"),
        ({"token_type": array(i32, [1, -1])}, "token_type", "token 1 has type -1"),
        ({"token_type": array(f32, [1, 1])}, "token_type", "array of integers"),
        ({"scores": array(f32, [1, 2, 3])}, "scores", "3 scores for 2 tokens"),
        ({"scores": array(f32, [1, float("nan")])}, "scores", "token 1 is NaN"),
        ({"scores": array(u32, [1, 2])}, "scores", "float32 or int32"),
        ({"eos_token_id": text("b")}, "eos_token_id", "expected int, got str"),
        ({"add_bos_token": u32(1)}, "add_bos_token", "expected bool, got int"),
    ],
)
def test_inconsistent_vocabularies_are_refused_naming_the_key(load, keys, key, message):
    with pytest.raises(GGUFError, match=message) as caught:
        load(["a", "b"], **keys)
    assert caught.value.key == f"tokenizer.ggml.{key}"


@pytest.mark.parametrize("name", ["bos", "eos", "padding", "unknown", "seperator", "mask", "eot"])
@pytest.mark.parametrize("token", [u32(2), i32(-2), u32(151643)])
def test_a_special_token_outside_the_vocabulary_is_a_warning_and_none(load, name, token):
    with pytest.warns(UserWarning, match=f"{name}_token_id is .*outside the vocabulary of 2"):
        vocab = load(["a", "b"], **{f"{name}_token_id": token})
    field = {"padding": "pad", "unknown": "unk", "seperator": "sep"}.get(name, name)
    assert getattr(vocab, field) is None
    assert not vocab.eog


def test_such_a_token_has_the_usual_one_of_its_kind_where_there_is_one(load):
    with pytest.warns(UserWarning, match="padding_token_id is 4, outside the vocabulary of 2"):
        vocab = load(["[PAD]", "a"], model=text("bert"), padding_token_id=u32(4))
    assert vocab.pad == 0
    with pytest.warns(UserWarning, match="fim_pad_token_id"):
        assert load(["a", "<PAD>"], fim_pad_token_id=u32(9)).fim["pad"] == 1, "found by its text"


@pytest.mark.model
@pytest.mark.parametrize(
    ("name", "model", "pre", "n_vocab", "eog"),
    [
        (
            "smollm2",
            "gpt2",
            "smollm",
            49152,
            {"<|endoftext|>", "<|im_end|>", "<reponame>"},
        ),
        ("gemma3-270m", "llama", "default", 262144, {"<eos>", "<end_of_turn>"}),
        (
            "qwen2.5-coder-0.5b",
            "gpt2",
            "qwen2",
            151936,
            {"<|endoftext|>", "<|im_end|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"},
        ),
    ],
)
def test_vocabularies_of_real_models(model_path, name, model, pre, n_vocab, eog):
    with GGUFFile(model_path(name)) as f:
        vocab = Vocab.from_gguf(f)
    assert (vocab.model, vocab.pre, len(vocab)) == (model, pre, n_vocab)
    assert {vocab.tokens[i] for i in vocab.eog} == eog
    assert vocab.eos in vocab.eog
