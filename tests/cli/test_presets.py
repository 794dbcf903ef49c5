"""Presets of a server's models: what an INI file says, and what it becomes."""

import pytest

from tamis.cli.commands import serve
from tamis.cli.options import Parser, presets, settings
from tamis.cli.options.errors import UsageError


def names():
    parser = Parser()
    serve.add_arguments(parser)
    return settings.named(parser)


def read(tmp_path, text):
    path = tmp_path / "models.ini"
    path.write_text(text)
    return presets.Presets(path, names())


def arguments(tmp_path, text, name="a", words=()):
    preset = read(tmp_path, text).of(name)
    return presets.arguments_of(serve.add_arguments, words, preset)


FILE = """
version = 1
; for all
[*]
c = 2048
temp = 0.5

[a]
model = /m/a.gguf
parallel = 2 ; two
LLAMA_ARG_CTX_SIZE = 512
top-k = 7
metered = no
"""


def test_a_section_has_the_flags_of_all_and_its_own_before_them(tmp_path):
    found = arguments(tmp_path, FILE.replace("metered = no\n", "jinja = true\n"))
    assert (found.model, found.ctx, found.parallel) == ("/m/a.gguf", 512, 2)
    assert found.set == [("temperature", 0.5), ("top_k", 7)]
    other = arguments(tmp_path, FILE.replace("metered = no\n", ""), "not there")
    assert (other.model, other.ctx, other.parallel) == (None, 2048, 4)


def test_the_command_line_goes_before_a_section(tmp_path):
    text = FILE.replace("metered = no\n", "")
    found = arguments(tmp_path, text, words=["-c", "64", "--set", "top_k=9"])
    assert (found.ctx, found.parallel) == (64, 2)
    assert dict(found.set) == {"temperature": 0.5, "top_k": 9}


def test_without_a_section_and_one_for_all_there_is_no_preset(tmp_path):
    assert read(tmp_path, "[a]\nc = 5\n").of("b") is None


@pytest.mark.parametrize(
    ("lines", "model", "draft"),
    [
        ("hf-repo = o/r:Q4_K_M", "hf:o/r:Q4_K_M", None),
        ("hf = hf:o/r", "hf:o/r", None),
        ("hf-repo = o/r:Q8_0\nhf-file = f.gguf", "hf:o/r/f.gguf", None),
        ("hf-repo = o/r\nhf-file = f.gguf", "hf:o/r/f.gguf", None),
        ("m = x.gguf\nspec-draft-hf = o/d:Q8_0", "x.gguf", "hf:o/d:Q8_0"),
        ("m = x.gguf\nspec-draft-model = d.gguf", "x.gguf", "d.gguf"),
    ],
)
def test_models_are_named_by_files_and_repositories(tmp_path, lines, model, draft):
    found = arguments(tmp_path, f"[a]\n{lines}\n")
    assert (found.model, found.model_draft) == (model, draft)


@pytest.mark.parametrize(
    ("text", "load", "hides"),
    [
        ("[a]\nload-on-startup = true\n", True, False),
        ("[a]\nload-on-startup = 0\ndedup-cache-models = on\n", False, True),
        ("[*]\ndedup-cache-models = 1\n[a]\nc = 1\n", False, True),
        ("[*]\ndedup-cache-models = 1\n[a]\ndedup-cache-models = 0\n", False, False),
    ],
)
def test_what_is_of_presets_alone(tmp_path, text, load, hides):
    found = read(tmp_path, text).of("a")
    assert (found.load, found.hides) == (load, hides)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a]\nmetered = 1\n", r"\[a\]: there is no flag --metered"),
        ("[a]\nparalell = 1\n", "did you mean parallel"),
        ("[a]\nport = 1\n", "port is of the whole server"),
        ("[a]\nLLAMA_ARG_HOST = b\n", "LLAMA_ARG_HOST is of the whole server"),
        ("[a]\nload-on-startup = maybe\n", "load-on-startup is 'maybe', expected true or false"),
        ("[a]\nhf-file = f.gguf\n", "expected hf-repo before it"),
        ("c = 5\n[a]\n", "'c = 5' is in no section"),
        ("[a]\nc = 1\nc = 2\n", "no INI file: .*option 'c'"),
        ("[a]\nc\n", "no INI file"),
        ("[a]\nc = 1\n[a]\n", "section 'a' already exists"),
    ],
)
def test_a_file_that_says_something_else_is_refused(tmp_path, text, message):
    with pytest.raises(UsageError, match=message):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("c = many", r"models.ini \[a\]: --ctx is 'many'"),
        ("page = maybe", "--page is 'maybe'.*invalid choice"),
        ("context-shift = maybe", "--context-shift is 'maybe', expected true or false"),
    ],
)
def test_a_value_that_a_flag_does_not_take_is_refused_with_its_section(tmp_path, line, message):
    with pytest.raises(settings.SettingsError, match=message):
        arguments(tmp_path, f"[a]\n{line}\n")


# --- the source of models -------------------------------------------------------------------------
@pytest.fixture
def models(tmp_path, monkeypatch):
    """A folder with two installed models, and one beside it."""
    folder = tmp_path / "models"
    folder.mkdir()
    monkeypatch.setenv("TAMIS_MODELS", str(folder))
    for path in (folder / "x.gguf", folder / "y.gguf", tmp_path / "z.gguf"):
        path.write_bytes(b"GGUF")
    return tmp_path


def source(folder, text, *words):
    (folder / "models.ini").write_text(text)
    words = ["--models-preset", str(folder / "models.ini"), *words]
    parser = Parser()
    serve.add_arguments(parser)
    given = parser.parse_args(words)
    given.argv = words
    return serve.Source(given, serve._settings(given, serve._access(given)))


def offered(found):
    return {offer.name: offer for offer in found.offers() if not offer.hidden}


def test_presets_join_the_installed_models(models):
    text = f"[x.gguf]\nc = 64\n[own]\nmodel = {models / 'z.gguf'}\nalias = mine\ntags = t\n"
    found = source(models, text)
    offers = offered(found)
    assert list(offers) == ["x.gguf", "y.gguf", "own"]
    assert offers["own"].path == str(models / "z.gguf")
    assert (offers["own"].aliases, offers["own"].tags) == (("mine",), ("t",))
    assert [offers[name].args for name in ("x.gguf", "y.gguf")] == [("--ctx=64",), ()]
    assert found._how(offers["x.gguf"]).arguments.ctx == 64
    assert found._how(offers["y.gguf"]).arguments.ctx is None


def test_a_reload_takes_what_the_file_says_now_or_leaves_all_as_it_was(models):
    found = source(models, f"[a]\nmodel = {models / 'z.gguf'}\n[b]\nmodel = y.gguf\n")
    assert {"a", "b"} <= offered(found).keys()
    (models / "models.ini").write_text("[b]\nmodel = y.gguf\nc = 64\n[c]\nmodel = x.gguf\n")
    found.reload()
    assert offered(found).keys() == {"x.gguf", "y.gguf", "b", "c"}
    assert offered(found)["b"].args == ("--model=y.gguf", "--ctx=64")
    (models / "models.ini").write_text("[d]\nc = 64\n")
    with pytest.raises(UsageError, match=r"\[d\]: no such model is installed"):
        found.reload()
    assert {"b", "c"} <= offered(found).keys()


def test_a_preset_may_hide_the_installed_model_that_it_is_of(models):
    text = "[own]\nmodel = x.gguf\ndedup-cache-models = 1\n"
    assert offered(source(models, text)).keys() == {"y.gguf", "own"}
    hidden = [offer.name for offer in source(models, text).offers() if offer.hidden]
    assert hidden == ["x.gguf"]


def test_models_of_presets_are_loaded_first_if_they_say_so(models):
    text = "[x.gguf]\nload-on-startup = 1\n[y.gguf]\nc = 64\n"
    assert [offer.name for offer in source(models, text).loaded_first()] == ["x.gguf"]


def test_a_model_that_is_missing_is_offered_and_says_so_when_it_is_loaded(models):
    offer = offered(source(models, "[own]\nhf-repo = o/r:Q4_0\n"))["own"]
    assert (offer.path, offer.n_byte) == ("hf:o/r:Q4_0", 0)


def test_presets_are_of_several_models(models):
    with pytest.raises(UsageError, match="leave out -m"):
        source(models, "[a]\nc = 1\n", "-m", str(models / "z.gguf"))
