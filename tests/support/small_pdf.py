"""PDF files with text, made without a library."""


def pdf(*pages: str) -> bytes:
    """A PDF whose pages have a line each."""
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    objects = [
        "<</Type/Catalog/Pages 2 0 R>>",
        f"<</Type/Pages/Kids[{kids}]/Count {len(pages)}>>",
        "<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    for i, text in enumerate(pages):
        content = f"BT /F1 12 Tf 50 700 Td ({text}) Tj ET" if text else ""
        objects.append(
            "<</Type/Page/Parent 2 0 R/MediaBox[0 0 600 800]/Resources<</Font<</F1 3 0 R>>>>"
            f"/Contents {5 + 2 * i} 0 R>>"
        )
        objects.append(f"<</Length {len(content)}>>stream\n{content}\nendstream")
    out, at = b"%PDF-1.4\n", []
    for number, text in enumerate(objects, 1):
        at.append(len(out))
        out += f"{number} 0 obj\n{text}\nendobj\n".encode()
    table = "".join(f"{offset:010} 00000 n \n" for offset in at)
    head = f"xref\n0 {len(at) + 1}\n0000000000 65535 f \n{table}"
    tail = f"trailer<</Size {len(at) + 1}/Root 1 0 R>>\nstartxref\n{len(out)}\n%%EOF"
    return out + (head + tail).encode()
