"""GGUF files from Hugging Face's folders of safetensors, as llama.cpp's converter writes them.

`source` reads a folder, `families` has one file a family with its names and sizes, `vocab` the
tokenizers, `writing` puts a file together.
"""
