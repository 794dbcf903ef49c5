"""Token mixers other than attention of plain heads: latent attention, delta rules, Mamba."""
