"""JSON schemas (draft 2020-12) as grammars: read, merged, and written as llguidance's Lark."""
