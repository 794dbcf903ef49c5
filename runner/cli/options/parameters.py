"""What each parameter of each attention method does, for `tamis methods NAME`."""

ALL = {  # by names that methods share; a method's own entry takes precedence
    "budget": "tokens that a row of queries keeps; more is nearer to dense and slower",
    "sink": "first tokens of the context, always read",
    "recent": "last tokens, always read",
    "rows": "group: one set for the query heads that share a KV head; head: one a query head, "
    "as in the paper, which reads more keys",
    "period": "steps that a choice serves before it is made anew",
    "dense_layers": "first layers that read everything",
    "queries": "last queries of the prompt that the method starts from",
    "seed": "what random choices are drawn by",
    "block": "tokens that are chosen together",
}
OWN = {
    "auto": {
        "mass": "share of attention that each head holds, by estimate; 1 reads everything",
        "least": "tokens of context up to which everything is read",
        "part": "HiP chooses one token in so many of the longest context",
        "samples": "tokens drawn a row to estimate what was left out",
    },
    "beyond": {"least": "position up to which chunks of a prompt are dense"},
    "bigbird": {"random": "tokens drawn at random for each block of queries"},
    "cpe": {
        "period": "steps of a block in which heads share sets (CIS); 0: no sharing",
        "tau": "cosine of two queries above which a head reads the other's set",
        "join": "cosine below which a head retrieves with others that do; up to tau: as if alone",
        "r": "neighbours on each side that are added to a shared set's best third",
        "phi": "part of the past that the last layer sees (PSAW), where alpha is 1; 1: all",
        "alpha": "how fast the window shrinks with depth",
        "psi": "part of the prompt that the last layer updates (ETF), where gamma is 1; 1: all",
        "gamma": "how fast freezing grows with depth",
        "kv": "K and V of frozen tokens: project the layer's own, or reuse the layer's before",
        "rows": "union of the heads' sets, group: one decision for them, head: each its own",
    },
    "delta": {
        "gamma": "rows from one exact row of the prompt to the next",
        "mode": "delta: exact rows correct those after them; recompute: only themselves",
    },
    "double_sparsity": {"label": "share of the channels that keys are scored by"},
    "h2o": {"recent": "share of the budget that is the last tokens (the paper: half)"},
    "double_p": {
        "p1": "share of attention to the clusters that take part",
        "p2": "share of it that is read; the rest is estimated",
        "c": "tokens a cluster of keys",
        "n_iter": "rounds of clustering at most",
        "segment": "tokens clustered together; 0: all of them",
    },
    "hip": {
        "budget": "tokens that the tree chooses",
        "b_k": "keys of a block, the leaves of the tree",
        "b_sk": "every how manyth key of a block is scored, where rep is centre",
        "b_q": "queries of a prompt that share a set",
        "b_sq": "every how manyth of these queries chooses",
        "span": "tokens round each chosen block that are read too; 0: none",
        "rep": "what stands for a chunk: the mean of its keys, or its centre block (the paper)",
        "rows": "group: one tree for the heads that share a KV head; head: each its own",
    },
    "hshare": {
        "layers": "share of the layers that retrieve",
        "heads": "share of their heads that do",
    },
    "hyperattention": {
        "block": "keys that a query reads by its hash, in runs of sorted keys",
        "sample": "keys drawn from all others, each standing for many",
        "bits": "random planes of the hash",
        "size": "keys of a sorted run",
    },
    "lfps": {
        "budget": "part of the context that is kept, beside sink and recent",
        "a": "threshold of candidates; smaller proposes more (0.1 to 0.4)",
        "r": "decay of the score tables a step",
        "epsilon": "share of attention on the sinks from which a row is represented by a mean",
        "bypass": "what such a row reads",
        "renew": "steps in which each bit of the tables is compared anew; 1: the paper",
    },
    "magicpig": {
        "K": "bits of a code; more sample fewer keys",
        "L": "hash tables; more sample more keys",
        "period": "tokens after which new keys are hashed",
    },
    "metered": {
        "mass": "share of attention that each head holds, by estimate; 0: measure only",
        "samples": "tokens drawn a row to estimate what was left out",
        "even": "share of a token's chance to be drawn that is the same for all",
    },
    "quest": {"page": "tokens of a page, which is chosen by its keys' bounds"},
    "retroinfer": {
        "retrieve": "share of the clusters that is read",
        "estimate": "share of the clusters that is estimated",
        "c": "tokens a cluster of keys",
        "n_iter": "rounds of clustering at most",
        "segment": "tokens clustered together; 0: all of them",
    },
    "snapkv": {
        "budget": "tokens that a row keeps of a prompt",
        "recent": "last tokens of the prompt, whose queries choose",
        "kernel": "neighbours that weights are pooled over",
        "pool": "how they are pooled",
        "ada": "share of a layer's budget handed out by need (Ada-KV)",
        "beta": "how much more early layers get (PyramidKV); 1: the same",
    },
    "tail": {
        "epsilon": "relative error of a head's output that is accepted",
        "delta": "share of heads and steps in which it may be larger",
        "bound": "whose error: the output's, its two parts' (the paper), the denominator's",
        "samples": "first tokens drawn a row, from which the number of samples follows",
        "even": "share of a token's chance to be drawn that is the same for all; 1: the paper",
        "most": "share of what was left out from which all of it is read instead",
    },
    "tactic": {
        "P": "share of a head's attention to reach; 1 reads everything",
        "c": "tokens a cluster of keys",
        "n_iter": "rounds of K-means",
        "first": "share of the tokens whose weights are computed exactly",
        "period": "tokens after which new keys are clustered",
        "segment": "tokens clustered at a time; 0: all at once, the paper's",
        "sample": "tokens drawn to estimate weights in place of the curve; 0: the curve",
        "margin": "what is added to that estimate",
        "outside": "counted: sinks and last tokens count towards P; apart: they do not",
        "rows": "group: the union of the heads' sets; joint: one set, half as large; head: each",
        "reach": "with rows=joint: share of the heads that must reach P",
    },
    "twilight": {"p": "share of the attention to what METHOD chose that each head keeps"},
    "vertical_slash": {
        "n_vertical": "columns: positions that all queries read",
        "n_slash": "diagonals: distances at which all queries read",
        "queries": "last queries of each chunk that columns and diagonals are found by",
        "recent": "last distances, always read",
    },
}


def explained(method: str, parameter: str) -> str:
    """A sentence on a parameter; "" for one of another package."""
    return OWN.get(method, {}).get(parameter) or ALL.get(parameter, "")
