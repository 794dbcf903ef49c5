"""The CUDA runtime: compiler, driver, PTX library and launches."""
