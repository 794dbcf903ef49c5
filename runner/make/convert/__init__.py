"""GGUF files from Hugging Face's folders, as llama.cpp's converter writes them: a file a family.

`writing` puts a file together; the other modules have classes' and tensors' names, sizes and
vocabularies of a family of models each, and are found by their place.
"""
