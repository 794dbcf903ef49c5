"""LFPS of one head in NumPy float64: Eq. 4-10 of Yao and Wang, with a pass over all positions."""

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


@dataclass
class Tables:
    """ver by position, sla by distance, both of all positions: entries outside the middle are 0."""

    p: Params
    ver: np.ndarray
    sla: np.ndarray
    mean_key: np.ndarray
    mean_value: np.ndarray
    spread: float

    @staticmethod
    def mean_and_bar(x, a):
        """Eq. 8."""
        mean = x.mean()
        squares = (x - mean) ** 2
        if squares.sum() == 0:
            return mean, np.inf
        return mean, a * mean / ((squares**2).sum() / squares.sum() ** 2)

    def global_logit(self, q, n_kv):
        """Log of w_global, Eq. 5."""
        return q @ self.mean_key * len(q) ** -0.5 + q @ q * self.spread / 2 + np.log(n_kv)

    def sparse(self, q, k):
        """Eq. 6."""
        weights = np.exp(k @ q * len(q) ** -0.5)
        sinks, near = weights[: self.p.sink].sum(), weights[self.p.sink :][-6:].sum()
        return sinks / (sinks + np.exp(self.global_logit(q, len(k))) + near) > self.p.epsilon

    def step(self, q, k, *, bypass):
        """The kept positions, and how many candidates were read, None for a bypassed head."""
        p, n_kv = self.p, len(k)
        low, high = p.sink, n_kv - p.local
        always = [*range(low), *range(high, n_kv)]
        if bypass and self.sparse(q, k):
            return always, None
        middle = np.arange(low, high)
        distances = n_kv - 1 - middle
        mean_ver, bar_ver = self.mean_and_bar(self.ver[middle], p.a)
        mean_sla, bar_sla = self.mean_and_bar(self.sla[distances], p.a)
        first = middle[(self.ver[middle] > bar_ver) | (self.sla[distances] > bar_sla)]  # Eq. 7
        near = np.unique(first[:, None] + np.array([-1, 0, 1, 2]))  # Eq. 9
        near = near[(near >= low) & (near < high)]
        above = (self.ver[near] > mean_ver) | (self.sla[n_kv - 1 - near] > mean_sla)
        near = near[above]
        logits = k[near] @ q * len(q) ** -0.5
        limit = max(1, int(float(np.float32(p.budget)) * n_kv))
        top = np.sort(np.argsort(-logits, kind="stable")[:limit])
        chosen = near[top]
        self.ver *= p.r
        self.sla *= p.r
        if len(chosen):  # Eq. 10
            gain = softmax(logits[top]) - 1 / (2 * len(chosen))
            self.ver[chosen] += gain
            self.sla[n_kv - 1 - chosen] += gain
        return sorted([*always, *chosen.tolist()]), len(near)


def started(p, q, k, v, pos, n):
    """Eq. 4: tables before position `pos` from the n queries before it; None without a middle."""
    low, high = p.sink, pos + 1 - p.local
    if high <= low:
        return None
    rows = [i for i in range(pos - n, pos) if i + 1 - p.local > low] or [pos]
    ver, sla = np.zeros(512), np.zeros(512)
    for i in rows:
        middle = np.arange(low, i + 1 - p.local)
        logits = k[middle] @ q[i] * q.shape[1] ** -0.5
        ver[middle] += softmax(logits)
        sla[i - middle] += softmax(logits)
        spread = logits.var() / (q[i] @ q[i])
    share = 1 / (2 * len(rows) * (1 - p.r))
    means = k[low:high].mean(axis=0), v[low:high].mean(axis=0)
    return Tables(p, ver * share, sla * share, *means, spread)
