"""The largest logits and their log-sum, without the rest of the vocabulary."""

from tamis.jit_kernels.contract.op import Address, Out, op


class LogitParts:
    """The n_best largest logits of each part of the vocabulary; of equal ones the lowest ids.

    The vocabulary is divided into n_part even parts; the last ones may be shorter, or empty. A
    token whose logit is -inf may be left out.
    """

    logits: Address  # f32 [n_vocab]
    # int32 [n_part, n_best], in an order of the backend's own; -1: a part has fewer
    ids: Out[Address]
    values: Out[Address]  # f32 [n_part, n_best]; -inf where ids is -1
    # f32 [n_part, 2]: the largest logit x, at least -3e38; sum of exp(logit - x)
    sums: Out[Address]
    n_vocab: int
    n_best: int
    n_part: int


LOGIT_PARTS = op("linear.logits", LogitParts)


class LogitBest:
    """The n_best largest of all parts, by falling logit."""

    ids: Address  # as LOGIT_PARTS left them
    values: Address
    sums: Address
    best_ids: Out[Address]  # int32 [n_best]
    best_values: Out[Address]  # f32 [n_best]
    total: Out[Address]  # f32 [2]: largest logit and sum, as in sums
    n_best: int
    n_part: int


LOGIT_BEST = op("linear.logits", LogitBest)
