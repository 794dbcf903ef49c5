"""The parts of `tamis.bindings.compat`: what llama_cpp.Llama is made of, one file each."""
