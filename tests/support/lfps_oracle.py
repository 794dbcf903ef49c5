"""LFPS in NumPy float64: Eq. 4-10 of Yao and Wang, with a pass over all positions.

A row is one or several query heads that share a KV head, q [n_head, head_dim]: its weights are the
mean of the heads'.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Params:
    a: float
    r: float
    s: int
    budget: float
    epsilon: float
    sink: int
    local: int


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def mean_weights(q, k):
    """[n_head, head_dim] and [n, head_dim] -> the mean of the heads' weights, [n]."""
    return np.mean([softmax(k @ x * len(x) ** -0.5) for x in q], axis=0)


@dataclass
class Tables:
    """ver by position, sla by distance, both of all positions: entries outside the middle are 0.

    hot, warm: what is held to be above the threshold and above the mean, of both tables. They are
    renewed as entries change and, slice by slice of 64 entries, every `period` steps.
    """

    p: Params
    ver: np.ndarray
    sla: np.ndarray
    hot: np.ndarray
    warm: np.ndarray
    mean_key: np.ndarray
    mean_value: np.ndarray
    spread: list

    @staticmethod
    def mean_and_bar(x, a):
        """Eq. 8."""
        mean = x.mean()
        squares = (x - mean) ** 2
        if squares.sum() == 0:
            return mean, np.inf
        return mean, a * mean / ((squares**2).sum() / squares.sum() ** 2)

    def global_logit(self, q, n_kv, head=0):
        """Log of w_global, Eq. 5, of one head."""
        centre = q @ self.mean_key * len(q) ** -0.5
        return centre + q @ q * self.spread[head] / 2 + np.log(n_kv)

    def sparse(self, q, k):
        """Eq. 6, of all heads."""
        for head, x in enumerate(q):
            weights = np.exp(k @ x * len(x) ** -0.5)
            sinks, near = weights[: self.p.sink].sum(), weights[self.p.sink :][-6:].sum()
            rest = np.exp(self.global_logit(x, len(k), head))
            if not sinks / (sinks + rest + near) > self.p.epsilon:
                return False
        return True

    def renew(self, entries, table):
        """Compare the given positions or distances of table 0 or 1 with mean and threshold."""
        x = (self.ver, self.sla)[table][entries]
        mean, bar = self.levels[table]
        self.hot[table, entries], self.warm[table, entries] = x > bar, x > mean

    def turn(self, low, high, pos, period, capacity):
        """Renew this step's part: words of 64 entries, of the slash table from its far end on."""
        for table, shift in ((0, 0), (1, capacity - 65 - pos)):
            first, last = (low + shift) // 64, -(-(high + shift) // 64)
            at, n = pos % period, last - first
            begin, end = first + n * at // period, first + n * (at + 1) // period
            entries = np.arange(64 * begin, 64 * end)
            entries = entries if table == 0 else capacity - 65 - entries
            self.renew(entries[(entries >= 0) & (entries < len(self.ver))], table)

    def step(self, q, k, *, bypass, period=1, capacity=256):
        """The kept positions, and how many candidates were read, None for a bypassed row."""
        p, n_kv = self.p, len(k)
        low, high = p.sink, n_kv - p.local
        always = [*range(low), *range(high, n_kv)]
        middle = np.arange(low, high)
        distances = n_kv - 1 - middle
        self.levels = [
            self.mean_and_bar(self.ver[middle], p.a), self.mean_and_bar(self.sla[distances], p.a),
        ]  # fmt: skip
        self.turn(low, high, n_kv - 1, period, capacity)
        if bypass and self.sparse(q, k):
            return always, None
        first = middle[self.hot[0, middle] | self.hot[1, distances]]  # Eq. 7
        near = np.unique(first[:, None] + np.array([-1, 0, 1, 2]))  # Eq. 9
        near = near[(near >= low) & (near < high)]
        near = near[self.warm[0, near] | self.warm[1, n_kv - 1 - near]]
        chosen, gain = near, np.zeros(0)
        if len(near):
            weights = mean_weights(q, k[near])
            limit = max(1, int(float(np.float32(p.budget)) * n_kv))
            top = np.sort(np.argsort(-weights, kind="stable")[:limit])
            chosen = near[top]
            gain = weights[top] / weights[top].sum() - 1 / (2 * len(top))
        self.ver *= p.r
        self.sla *= p.r
        self.levels = [(mean * p.r, bar * p.r) for mean, bar in self.levels]
        self.ver[chosen] += gain  # Eq. 10
        self.sla[n_kv - 1 - chosen] += gain
        self.renew(chosen, 0)
        self.renew(n_kv - 1 - chosen, 1)
        return sorted([*always, *chosen.tolist()]), len(near)


def started(p, q, k, v, pos, n):
    """Eq. 4: tables before position `pos` from the n queries before it; None without a middle.

    q [n_q, n_head, head_dim]. The tables have room for 256 steps at least.
    """
    low, high = p.sink, pos + 1 - p.local
    if high <= low:
        return None
    rows = [i for i in range(pos - n, pos) if i + 1 - p.local > low] or [pos]
    size = pos + 512 - pos % 256
    ver, sla = np.zeros(size), np.zeros(size)
    for i in rows:
        middle = np.arange(low, i + 1 - p.local)
        weights = mean_weights(q[i], k[middle])
        ver[middle] += weights
        sla[i - middle] += weights
        logits = [k[middle] @ x * len(x) ** -0.5 for x in q[i]]
        spread = [x.var() / (y @ y) for x, y in zip(logits, q[i], strict=True)]
    share = 1 / (2 * len(rows) * (1 - p.r))
    means = k[low:high].mean(axis=0), v[low:high].mean(axis=0)
    none = np.zeros((2, size), bool)
    tables = Tables(p, ver * share, sla * share, none, none.copy(), *means, spread)
    middle = np.arange(low, high)
    tables.levels = [
        Tables.mean_and_bar(tables.ver[middle], p.a),
        Tables.mean_and_bar(tables.sla[pos - middle], p.a),
    ]
    for table in (0, 1):
        tables.renew(np.arange(size), table)
    return tables
