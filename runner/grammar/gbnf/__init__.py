"""GBNF, llama.cpp's notation of grammars: read into trees, and written as llguidance's Lark."""
