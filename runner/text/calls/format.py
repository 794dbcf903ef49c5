"""The notation of calls, as their readers need to know it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

GEMMA_QUOTE = '<|"|>'
FLAT = {"name": ("name",), "arguments": ("arguments",)}


@dataclass(frozen=True)
class Argument:
    r"""The notation of an argument between marks.

    ``before`` precedes its key, the marks in ``front`` are between key and value, ``closing``
    follows the value ("\0" stands for the key). ``margin`` and ``end_margin`` are white space
    around the value that does not belong to it. If ``kind_end`` is given, the text up to it names
    the kind of value: "true" or "string" for text. ``has_cdata``: texts may be written as XML's
    CDATA.
    """

    before: str = ""
    front: tuple[str, ...] = ()
    closing: str = ""
    margin: str = ""
    end_margin: str = ""
    kind_end: str = ""
    has_cdata: bool = False


@dataclass(frozen=True)
class ToolFormat:
    """How calls are written.

    ``style`` is "json" (an object with name and arguments), "tag" (the name between marks, then a
    JSON object), "tagged" (each argument between marks), "elements" (marks of elements within
    elements, all after ``argument.before``), "xtml" (tags with attributes), "python" (a list of
    calls), "gemma", or "harmony". ``openers`` and ``closers`` are the marks before a name, or an
    object, and after its arguments; ``triggers`` are the openers that begin calls within text.
    Without triggers a call is all of the answer. ``middle`` are the marks between a name and what
    it is called with. ``fields`` are the paths of name, arguments and id in the object; name
    ``("*",)`` is a key whose value the arguments are. ``python_words``: True, False and None are
    written as Python has them.
    """

    style: str
    openers: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()
    triggers: tuple[str, ...] = ()
    fields: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    middle: tuple[str, ...] = ()
    argument: Argument = Argument()
    python_words: bool = False
