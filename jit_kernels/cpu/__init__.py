"""CPU kernels: functions over addresses and integers, compiled by Numba to object code."""
