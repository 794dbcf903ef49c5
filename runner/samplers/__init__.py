"""The samplers, one small record each; `tamis.sampler` puts them in a chain and names them all."""
