"""Extraction of a file's text, for clients that ask about a document: tamis's own /extract."""

import base64
from typing import Any

from tamis.bindings.serve.body import Body
from tamis.bindings.serve.errors import invalid
from tamis.bindings.serve.requests import Reader
from tamis.formats.documents import DocumentError, read_document

MOST_BYTES = 32 << 20  # the size of a request; base64 makes four bytes of three
_NAME_LENGTH = 200


def read(_reader: Reader, body: Body) -> dict[str, Any]:
    """{"name": "a.pdf", "data": base64} to {"text", "kind"}; kind: "text", "html" or "pdf".

    Raises ApiError; ImportError where PDF needs its extra.
    """
    name, data = body.text("name") or "the file", body.text("data")
    if data is None:
        raise invalid("data is missing, expected a file's bytes in base64", "data")
    try:
        content = base64.b64decode(data, validate=True)
    except ValueError as error:  # binascii.Error is one
        raise invalid(f"data is no base64: {error}", "data") from None
    try:
        document = read_document(name[-_NAME_LENGTH:], content)
    except DocumentError as error:
        raise invalid(str(error), "data") from None
    return {"text": document.text, "kind": document.kind}
