"""Methods of decode steps that draft by a model's own attention."""

METHODS = [
    "hip:k=16,b_k=2,l_d=0,local=16,sink=2",
    "quest:budget=64,page=16,dense=0,sink=2,recent=2",
    "topk:budget=24,sink=2,recent=8",
    "tactic",
    "cpe",
    "lfps",
    "window:recent=16",
    "topk:budget=16,sink=2,recent=8@0+window:recent=16@1",
]
