"""Token mixers beyond attention of plain heads: latent attention, delta rules, Mamba."""
