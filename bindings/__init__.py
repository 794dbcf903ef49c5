"""Interfaces for programs that embed tamis: class Llama, the functions of llama.h, the server."""
