"""LFPS's tables with bits that are compared anew slice by slice, as the kernels keep them."""

import numpy as np

from tamis.select.lfps import Tables, threshold


class Renewed(Tables):
    """Algorithm 1 with `renew`: what is above a threshold or mean is held in bits.

    Bits are renewed as entries change and, in slices of 64 entries, every `p.renew` steps.
    `capacity` is that of the kernels' tables.
    """

    def begin(self, n, capacity=256):
        """Compare all entries before the step at position n - 1."""
        self.capacity, self.bits = capacity, np.zeros((2, 2, len(self.ver)), bool)
        self.compare_levels(n)
        for table in (0, 1):
            self.renew(np.arange(len(self.ver)), table)
        return self

    def compare_levels(self, n):
        middle = np.arange(self.p.sink, n - self.p.local)
        tables = self.ver[middle], self.sla[n - 1 - middle]
        self.levels = [(threshold(x, self.p.a), x.mean()) for x in tables]

    def renew(self, entries, table):
        x = (self.ver, self.sla)[table][entries]
        for bits, level in zip(self.bits[table], self.levels[table], strict=True):
            bits[entries] = x > level

    def step(self, q, k):
        self.compare_levels(len(k))
        pos = len(k) - 1
        for table, shift in ((0, 0), (1, self.capacity - 65 - pos)):
            first = (self.p.sink + shift) // 64
            n = -(-(len(k) - self.p.local + shift) // 64) - first
            at = pos % self.p.renew
            begin, end = (first + n * i // self.p.renew for i in (at, at + 1))
            entries = np.arange(64 * begin, 64 * end)
            entries = entries if table == 0 else self.capacity - 65 - entries
            self.renew(entries[(entries >= 0) & (entries < len(self.ver))], table)
        return super().step(q, k)

    def compared(self, middle, distances):
        ver, sla = self.bits
        return tuple(ver[:, middle] | sla[:, distances])

    def learn(self, kept, gain, n):
        super().learn(kept, gain, n)
        self.levels = [(level * self.p.r, mean * self.p.r) for level, mean in self.levels]
        self.renew(kept, 0)
        self.renew(n - 1 - kept, 1)
