"""The parts of `tamis.bindings.compat`: one file for each part of llama_cpp.Llama."""
