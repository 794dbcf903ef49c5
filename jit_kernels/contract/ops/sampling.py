"""The largest logits and their log-sum, without the rest of the vocabulary."""

from tamis.jit_kernels.contract.op import op

# The n_best largest of logits f32 [n_vocab], of equal ones those with the lowest ids, and what
# makes probabilities of them. The vocabulary is cut in n_part even parts (the last ones may be
# shorter, or empty): of each, ids int32 and values f32 [n_part, n_best] in an order of the
# backend's own, id -1 and -inf where it has fewer; sums f32 [n_part, 2]: the largest logit x (at
# least -3e38), and the sum of exp(logit - x). An impossible token, whose logit is -inf, may be
# left out.
LOGIT_PARTS = op("linear.logits", "logit_parts", "", "logits ids values sums n_vocab n_best n_part")

# The same of all parts: best_ids int32 and best_values f32 [n_best], total f32 [2].
LOGIT_BEST = op(
    "linear.logits", "logit_best", "", "ids values sums best_ids best_values total n_best n_part"
)
