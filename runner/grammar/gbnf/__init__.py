"""GBNF, llama.cpp's notation of grammars: parsed into trees, and written as llguidance's Lark."""
