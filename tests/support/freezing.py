"""The text of a prefill method that freezes tokens."""

ETF = "cpe:s=0,phi=1,sink=4,psi=0.3"
