"""Special tokens and the chat template of a model's folder, as metadata."""

import re
from collections.abc import Mapping
from typing import Any

from tamis.make.checkpoint.keys import Keys
from tamis.make.checkpoint.source import Source

KINDS: tuple[str, ...] = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
# The names of keys; one is spelt so in all files.
KEYS = {
    "bos": "bos_token_id", "eos": "eos_token_id", "eot": "eot_token_id", "eom": "eom_token_id",
    "unk": "unknown_token_id", "sep": "seperator_token_id", "pad": "padding_token_id",
    "mask": "mask_token_id",
}  # fmt: skip


class Special:
    """What a folder says of special tokens. `ids` and `adds` may be changed before `add_to`.

    n_vocab: ids from it on are left out. merges: whether the file lists them.
    """

    def __init__(self, source: Source, *, n_vocab: int | None = None, merges: bool = False) -> None:
        self.ids: dict[str, int] = {}
        self.adds: dict[str, bool] = {}
        self.merges: list[str] = []
        self.template: Any = None
        self._kinds = KINDS
        self._n_vocab = n_vocab
        self._normalizer: dict[str, Any] = {}
        tokenizer = source.json("tokenizer.json")
        config = source.json("tokenizer_config.json")
        if tokenizer:
            if merges:
                self.merges = _merges(tokenizer.get("model", {}).get("merges") or [])
            self._read_normalizer(tokenizer.get("normalizer") or {})
            self._read_processors(tokenizer, config)
        if config:
            self._read_config(source, config, tokenizer.get("added_tokens") or [])
        text = source.config.get("text_config") or {}
        for kind in self._kinds:
            id = source.config.get(f"{kind}_token_id")
            self.propose(kind, text.get(f"{kind}_token_id") if id is None else id)
        if merges and not self.merges:
            self.merges = _merges_txt(source)

    def propose(self, kind: str, id: Any) -> None:
        """Set the id of a kind, unless it is set or is no id of the vocabulary."""
        if isinstance(id, int) and id >= 0 and (self._n_vocab is None or id < self._n_vocab):
            self.ids.setdefault(kind, id)

    def add_to(self, keys: Keys) -> None:
        """Set the metadata."""
        start = "tokenizer.ggml."
        if self.merges:
            keys.set(f"{start}merges", "str", self.merges)
        for kind, id in self.ids.items():
            if kind in KEYS:
                keys.set(start + KEYS[kind], "u32", id)
        for kind, adds in self.adds.items():
            keys.set(f"{start}add_{kind}_token", "bool", adds)
        self._add_template(keys)
        keys.set(f"{start}normalizer.lowercase", "bool", self._normalizer.get("lowercase"))
        keys.set(f"{start}normalizer.strip_accents", "bool", self._normalizer.get("strip_accents"))

    def _add_template(self, keys: Keys) -> None:
        if isinstance(self.template, str):
            keys.set("tokenizer.chat_template", "str", self.template)
            return
        named = {
            re.sub("[^A-Za-z0-9]", "_", each["name"]): each["template"]
            for each in self.template or []
            if each.get("name") and isinstance(each.get("template"), str)
        }
        others = [name for name in named if name != "default"]
        for name in others:
            keys.set(f"tokenizer.chat_template.{name}", "str", named[name])
        if others:
            keys.set("tokenizer.chat_templates", "str", others)
        keys.set("tokenizer.chat_template", "str", named.get("default"))

    def _read_normalizer(self, normalizer: Mapping[str, Any]) -> None:
        kind, found = normalizer.get("type"), self._normalizer
        if kind == "Lowercase":
            found["lowercase"] = True
        elif kind == "StripAccents":
            found["strip_accents"] = True
        elif kind == "BertNormalizer":
            for key in ("lowercase", "strip_accents"):
                if key in normalizer:
                    found[key] = normalizer[key]
        for each in normalizer.get("normalizers", []) if kind == "Sequence" else []:
            self._read_normalizer(each)

    def _read_processors(self, tokenizer: Mapping[str, Any], config: dict[str, Any]) -> None:
        """Which tokens are added around a text. Completes `config`, if there is one."""
        if config:
            for kind, other in (("bos", "cls"), ("eos", "sep")):
                if not config.get(f"{kind}_token") and config.get(f"{other}_token"):
                    config[f"{kind}_token"] = config[f"{other}_token"]
        first = tokenizer.get("post_processor")
        for processor in first.get("processors", [first]) if first else []:
            kind = processor.get("type")
            if kind == "ByteLevel":
                self.adds.setdefault("bos", False)
                self.adds.setdefault("eos", False)
            elif kind == "RobertaProcessing":
                self.adds.update(bos=True, eos=True, sep=True)
                for name, other in (("cls", "bos"), ("sep", "eos")):
                    if config and not config.get(f"{name}_token"):
                        config[f"{name}_token"] = processor.get(
                            name, [config.get(f"{other}_token")]
                        )[0]
            elif kind == "TemplateProcessing":
                self._read_template_processing(processor, config)

    def _read_template_processing(
        self, processor: Mapping[str, Any], config: dict[str, Any]
    ) -> None:
        single = processor.get("single", [])
        first = _special(single[0]) if len(single) > 1 else None
        last = _special(single[-1]) if len(single) > 1 else None
        known = {
            kind: _content(config.get(f"{kind}_token")) for kind in ("bos", "cls", "eos", "sep")
        }
        if first:
            if not config:
                known["bos"] = first
            elif first not in (known["bos"], known["cls"]):
                for kind in ("bos", "cls"):
                    if not known[kind]:
                        config[f"{kind}_token"] = known[kind] = first
            self.adds["bos"] = first in (known["bos"], known["cls"])
        if last:
            if config and last != known["eos"]:
                # What ended sequences by the config ends turns here.
                for kind in ("eot", "eom"):
                    if kind not in self._kinds:
                        self._kinds = (*self._kinds, kind)
                        config[f"{kind}_token"] = known["eos"]
                        break
                config["eos_token"] = last
            self.adds["eos"] = True
            known["eos"] = last
        self._read_pair(processor.get("pair", []), first, last, known, config)

    def _read_pair(
        self,
        pair: list[Mapping[str, Any]],
        first: str | None,
        last: str | None,
        known: Mapping[str, str | None],
        config: dict[str, Any],
    ) -> None:
        """Whether a separator stands between two texts."""
        if not pair:
            return
        begin = 1 if first and _special(pair[0]) == first else 0
        end = -1 if last and _special(pair[-1]) == last else None
        pair = pair[begin:end]
        between = pair[1:-1]
        if not between or [_sequence(pair[0]), _sequence(pair[-1])] != ["A", "B"]:
            return
        marks = (known["sep"], known["eos"])
        adds = _special(between[0]) in marks and not last
        if len(between) == 2 and _special(between[1]) in marks:
            adds = True
        self.adds["sep"] = adds
        if adds and not known["sep"] and config:
            config["sep_token"] = known["eos"]

    def _read_config(
        self, source: Source, config: Mapping[str, Any], added: list[Mapping[str, Any]]
    ) -> None:
        template = config.get("chat_template", _template_of_files(source))
        if template is None or isinstance(template, str | list):
            self.template = template
        ids = {token.get("content"): token.get("id") for token in reversed(added)}
        for kind in self._kinds:
            adds = config.get(f"add_{kind}_token")
            if isinstance(adds, bool):
                self.adds.setdefault(kind, adds)
            content = _content(config.get(f"{kind}_token"))
            if content is not None:
                self.propose(kind, ids.get(content))


def _template_of_files(source: Source) -> Any:
    """The template that lies in a file of its own, with others beside it."""
    path = source.folder / "chat_template.jinja"
    if not path.is_file():
        return source.json("chat_template.json").get("chat_template")
    text = path.read_text("utf-8")
    others = sorted((source.folder / "additional_chat_templates").glob("*.jinja"))
    if not others:
        return text
    named = [{"name": each.stem, "template": each.read_text("utf-8")} for each in others]
    return [{"name": "default", "template": text}, *named]


def _merges(merges: list[Any]) -> list[str]:
    """Merges with a space between their halves; one within a half is written as BPE does."""
    if merges and isinstance(merges[0], str):
        return merges
    return [" ".join(half.replace(" ", "\u0120") for half in pair) for pair in merges]


def _merges_txt(source: Source) -> list[str]:
    path = source.folder / "merges.txt"
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    pairs = [line.split() for line in lines if not line.startswith("#version")]
    return [" ".join(pair) for pair in pairs if len(pair) == 2]


def _content(token: Any) -> str | None:
    """The text of a token of tokenizer_config.json."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _special(part: Mapping[str, Any]) -> str | None:
    return (part.get("SpecialToken") or {}).get("id")


def _sequence(part: Mapping[str, Any]) -> str | None:
    return (part.get("Sequence") or {}).get("id")
