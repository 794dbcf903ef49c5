"""Other shapes of a kit's model: widths, heads, depths, experts, indexers, by a seed.

What does not fit together llama.cpp refuses; which tensors a shape asks for it says itself.
"""

import hashlib
import json
from typing import Any

import numpy as np

Spec = dict[str, Any]
# Elements of a head, and how many query heads share a KV head: a kernel of attention each.
HEADS = {16: (1, 2), 32: (1, 2, 3, 4, 7), 40: (1, 3), 64: (1, 2, 4), 80: (1, 2), 128: (1, 2, 3, 4)}
# Architectures whose layers may have other numbers of heads, and other widths of feed-forward.
HEADS_DIFFER = {"deci", "openelm", "granite", "granitemoe", "granite_swa", "laguna", "mimo2"}
HEADS_DIFFER |= {"plamo3", "spark2_5", "step35", "gemma4"}
WIDTHS_DIFFER = {"deci", "openelm", "plamo3", "gemma4", "nemotron_h", "hunyuan-moe", "qwen3next"}
# Latent attention: ranks of keys, of what is rotated, the rest of a key, values.
LATENT = ((64, 32, 64, 32), (128, 64, 64, 64), (512, 64, 128, 128))
LISTS = {True: 7, False: 4}  # GGUF's types of flags and of unsigned integers


class Mutation:
    """Draws other values of a spec's keys; each is another with probability boldness."""

    def __init__(self, spec: Spec, seed: str, boldness: float) -> None:
        self.spec: Spec = json.loads(json.dumps(spec))
        self.kv, self.arch = self.spec["kv"], spec["arch"]
        digest = hashlib.sha256(seed.encode()).digest()
        self.rng, self.p = np.random.default_rng(int.from_bytes(digest[:8], "little")), boldness

    def get(self, key: str) -> Any:
        """The value of a key, None where it is absent."""
        found = self.kv.get(f"{self.arch}.{key}")
        return found[1] if found else None

    def set(self, key: str, value: Any) -> None:
        """Change the value of a key that there is; one value may become a list of each layer's."""
        if found := self.kv.get(f"{self.arch}.{key}"):
            if isinstance(value, list) and len(found[0]) == 1:
                found[0] = [9, LISTS[isinstance(value[0], bool)]]
            found[1] = value

    def pick(self, *choices: Any) -> Any:
        """One of the choices."""
        return choices[self.rng.integers(len(choices))]

    def lucky(self) -> bool:
        """True with probability boldness."""
        return bool(self.rng.random() < self.p)

    def again(self, key: str, *choices: Any) -> None:
        """Perhaps give a key whose value is not 0 another one; a list's zeros stay."""
        old = self.get(key)
        if not (any(old) if isinstance(old, list) else old) or not self.lucky():
            return
        new = self.pick(*choices)
        self.set(key, [new if x else x for x in old] if isinstance(old, list) else new)

    def drawn(self) -> Spec:
        """The spec of another shape; its tensors are still the old one's."""
        for part in (self._depth, self._heads, self._widths, self._latent, self._experts):
            part()
        for part in (self._indexer, self._recurrent, self._windows, self._rope, self._vocab):
            part()
        return self.spec

    def changed(self, values: dict[str, Any]) -> Spec:
        """The spec with these values, nothing drawn."""
        if "block_count" in values:
            self._set_depth(self.n_layer, values["block_count"])
        for key, value in values.items():
            assert self.get(key) is not None, key
            self.set(key, value)
        return self.spec

    @property
    def n_layer(self) -> int:
        """Layers."""
        return int(self.get("block_count"))

    def _depth(self) -> None:
        old = self.n_layer
        if not self.lucky() or self.get("hrm.layers_per_stack"):
            return
        new = old + self.pick(-1, 1, 1, 2, 3)
        if new >= 2:
            self._set_depth(old, new)

    def _set_depth(self, old: int, new: int) -> None:
        for key, (types, value) in self.kv.items():
            if len(types) < 2 or not isinstance(value, list) or len(value) != old:
                continue
            if old != 4 or not key.endswith("sections"):  # of rotary pairs, of any depth
                self.kv[key][1] = [value[i % old] for i in range(new)]
        self.set("block_count", new)
        self.spec["depths"] = [old, new]

    def _heads(self) -> None:
        if self.get("attention.kv_lora_rank"):
            return
        if self.get("attention.key_length") and self.lucky():
            self._head_dim(self.pick(*HEADS))
        if self.lucky():
            groups = HEADS.get(self.get("attention.key_length") or 0, (1, 2, 4))
            n_kv, group = self.pick(1, 2, 3, 4, 5), self.pick(*groups)
            self._set_heads([n_kv * group] * self.n_layer, [n_kv] * self.n_layer)
        if self.arch in HEADS_DIFFER and self.lucky():
            kv = [self.pick(1, 2, 3) for _ in range(self.n_layer)]
            self._set_heads([n * self.pick(1, 2) for n in kv], kv, apart=True)

    def _set_heads(self, q: list[int], kv: list[int], *, apart: bool = False) -> None:
        """Of each layer; one number where all are the same, and 0 where a layer has none."""
        for key, new in (("head_count", q), ("head_count_kv", kv)):
            old = self.get(f"attention.{key}")
            if isinstance(old, list):
                self.set(f"attention.{key}", [n * (x > 0) for n, x in zip(new, old, strict=True)])
            else:
                self.set(f"attention.{key}", new if apart else new[0])

    def _head_dim(self, n: int) -> None:
        old = self.get("attention.key_length")
        for end in ("", "_swa"):
            for key in ("attention.key_length", "attention.value_length"):
                if self.get(key + end) == old:
                    self.set(key + end, n)
            if self.get(f"rope.dimension_count{end}"):
                self.set(f"rope.dimension_count{end}", self.pick(n, n, n // 2))
        self.set("attention.key_length", n)
        sections = self.get("rope.dimension_sections")
        if sections and sum(sections) > n // 2 and self.lucky():
            self.set("rope.dimension_sections", [max(s * n // old // 2, 1) for s in sections])

    def _widths(self) -> None:
        if self.lucky():
            n = self.pick(64, 96, 128, 160, 192, 256, 320, 48, 72, 100, 132)
            heads = self.get("attention.head_count")
            if self.lucky() and self.get("attention.key_length") and heads:
                joint = int(np.max(heads)) * self.get("attention.key_length")  # what some expect
                n = joint if joint % 4 == 0 and joint <= 512 else n
            self.set("embedding_length", n)
        for key in ("feed_forward_length", "expert_feed_forward_length"):
            self.again(key, 96, 128, 160, 224, 288)
        self.again("expert_shared_feed_forward_length", 64, 96, 160, 256)
        self.again("expert_latent_length", 96, 128, 192)
        self.again("expert_chunk_feed_forward_length", 64, 96, 128)
        if self.arch in WIDTHS_DIFFER and self.get("feed_forward_length") and self.lucky():
            old = self.get("feed_forward_length")
            old = old if isinstance(old, list) else [old] * self.n_layer
            self.set("feed_forward_length", [self.pick(96, 160, 256) * (x > 0) for x in old])

    def _latent(self) -> None:
        if not self.get("attention.kv_lora_rank") or not self.lucky():
            return
        n_head = self.pick(1, 2, 3, 4, 5)
        n_latent, n_rot, plain, n_value = self.pick(*LATENT)
        n_rot = n_rot if self.get("rope.dimension_count") else 0
        old = self.get("attention.head_count")
        heads = [n_head * (x > 0) for x in old] if isinstance(old, list) else n_head
        self.set("attention.head_count", heads)
        if isinstance(self.get("attention.head_count_kv"), list) and self.lucky():
            kv = self.get("attention.head_count_kv")
            self.set("attention.head_count_kv", [n_head * (x > 0) for x in kv])
        is_mla = self.get("attention.key_length_mla")
        for end in ("", "_swa"):
            self.set(f"attention.kv_lora_rank{end}", n_latent)
            self.set(f"rope.dimension_count{end}", n_rot)
            if is_mla:
                self.set(f"attention.key_length_mla{end}", plain + n_rot)
                self.set(f"attention.value_length_mla{end}", n_value)
                self.set(f"attention.key_length{end}", n_latent + n_rot)
                self.set(f"attention.value_length{end}", n_latent)
            else:
                self.set(f"attention.key_length{end}", plain + n_rot)
                self.set(f"attention.value_length{end}", n_value)
        self.again("attention.q_lora_rank", 64, 96, 160)

    def _experts(self) -> None:
        if not self.get("expert_count"):
            return
        if self.lucky():
            n = self.pick(2, 3, 4, 5, 7, 8, 8, 12, 16)
            self.set("expert_count", n)
            used = min(self.pick(1, 2, 3, 4, 6), n)
            self.set("expert_used_count", used)
            groups = self.pick(1, 2, 4)
            if groups > 1 and n % groups == 0 and n // groups >= 2 and self.lucky():
                n_chosen = self.pick(*range(1, groups))
                self.set("expert_group_count", groups)
                self.set("expert_group_used_count", n_chosen)
                self.set("expert_used_count", min(used, n_chosen * n // groups))
            self.again("experts_per_group", *(g for g in (1, 2, 4) if n % g == 0))
        for key, values in (
            ("expert_shared_count", (0, 1, 2, 3)),
            ("leading_dense_block_count", tuple(range(self.n_layer + 1))),
            ("interleave_moe_layer_step", (1, 2, 3, 4)),
            ("moe_every_n_layers", (1, 2, 3)),
            ("expert_group_scale", (0.05, 1.0, 2.0)),
        ):
            self.again(key, *values)
        if self.lucky():
            self.set("expert_weights_norm", self.pick(False, True))
        if self.lucky():
            self.set("expert_weights_scale", self.pick(0.0, 1.0, 2.5))
        self.again("expert_gating_func", 1, 2, *((4,) if self.arch == "deepseek4" else ()))
        self.again("swiglu_clamp_exp", 1.5, 4.0, 7.0)
        self.again("swiglu_clamp_shexp", 1.5, 4.0, 7.0)

    def _indexer(self) -> None:
        if not self.get("attention.indexer.top_k"):
            return
        name = "attention.indexer."
        n_kv = self.get("attention.head_count_kv")
        per_head = self.arch == "minimax-m3"  # each KV head has one of its own
        self.again(name + "head_count", *((n_kv,) if per_head else (8, 16, 64)))
        if per_head and self.lucky():
            self.set(name + "head_count", n_kv)
        self.again(name + "key_length", 32, 64, 128)
        blocks = self.get("attention.compress_ratios")
        if self.arch == "qwen4exp" and isinstance(blocks, list) and self.lucky():
            block = self.pick(2, 3, 4, 8)
            self.set("attention.compress_ratios", [block] * self.n_layer)
            self.set(name + "top_k", block * self.pick(1, 2, 4, 5))
        elif self.arch == "deepseek4" and self.lucky():
            ratios = [self.pick(0, 4, 4, 128) for _ in range(self.n_layer)]
            self.set("attention.compress_ratios", ratios)
            self.again(name + "top_k", 2, 4, 8, 131072)
        else:
            self.again(name + "top_k", 4, 8, 16, 24, 32, 131072)
        self.again(name + "block_size", 2, 4, 8)
        self.again(name + "local_blocks", 1, 2, 3)
        self.again(name + "kpool", 2, 4, 8)
        if isinstance(types := self.get(name + "types"), list) and self.lucky():
            self.set(name + "types", [1] + [self.pick(0, 1) for _ in types[1:]])

    def _recurrent(self) -> None:
        if self.get("ssm.inner_size") and self.lucky():
            n_head, n_group, head = self.pick(2, 3, 4, 8), self.pick(1, 2), self.pick(32, 64)
            self.again("ssm.time_step_rank", n_head)
            self.again("ssm.group_count", n_group)
            n_inner = self.pick(n_head * head, n_head * head, 2 * self.get("embedding_length"))
            self.set("ssm.inner_size", n_inner)
            self.set("ssm.state_size", self.pick(16, 64, n_inner // n_head))
        for key in ("ssm.conv_kernel", "shortconv.l_cache", "ple.conv_kernel"):
            self.again(key, 2, 3, 4, 5)
        self.again("kda.head_dim", 64, 128)
        if self.get("wkv.head_size"):
            self.set("wkv.head_size", 64)  # of 32, llama.cpp's kernel for AVX-512 reads 64 at once
        self.again("hyper_connection.count", 2, 3, 4)
        self.again("hyper_connection.low_rank", 4, 8, 16)
        self.again("hyper_connection.sinkhorn_iterations", 1, 2, 5)
        self.again("full_attention_interval", 2, 3, 4)
        self.again("attn_res.block_size", 1, 2, 3, 12)
        if isinstance(self.get("attention.recurrent_layers"), list) and self.lucky():
            self._other_layers_recurrent()

    def _other_layers_recurrent(self) -> None:
        """Another order of what layers are."""
        keys = ("attention.recurrent_layers", "attention.head_count", "attention.head_count_kv")
        keys += ("feed_forward_length",)
        order = self.rng.permutation(self.n_layer).tolist()
        for key in keys:
            if isinstance(old := self.get(key), list) and len(old) == self.n_layer:
                self.set(key, [old[i] for i in order])

    def _windows(self) -> None:
        self.again("attention.sliding_window", 8, 20, 32, 50)
        pattern = self.get("attention.sliding_window_pattern")
        if isinstance(pattern, list) and len(pattern) > 1 and self.lucky():
            same = {True: (False, True), False: (0, 1)}[isinstance(pattern[0], bool)]
            self.set("attention.sliding_window_pattern", [self.pick(*same) for _ in pattern])
        for key in ("final_logit_softcapping", "attn_logit_softcapping"):
            self.again(key, 10.0, 30.0, 50.0)
        self.again("router_logit_softcapping", 10.0, 30.0, 50.0)
        for key in ("residual_scale", "embedding_scale", "logit_scale", "attention.clamp_kqv"):
            self.again(key, *((self.get(key) or 0) * factor for factor in (0.5, 0.75, 1.5)))
        self.again("attention.temperature_length", 16, 32)
        if self.get("expert_count") == 0 and self.get("use_parallel_residual") is False:
            self.set("use_parallel_residual", self.pick(True, False))

    def _rope(self) -> None:
        for key in ("rope.freq_base", "rope.freq_base_swa"):
            self.again(key, 5000.0, 10000.0, 1e6)
        if self.rng.random() < self.p / 4 and self.get("rope.dimension_count"):
            n = self.get("rope.dimension_count")
            self.set("rope.dimension_count", self.pick(max(n // 2, 2), max(n // 4 * 2, 2)))
        if self.rng.random() < self.p / 6:
            self.set("rope.scaling.type", self.pick("linear", "yarn"))
            self.set("rope.scaling.factor", self.pick(2.0, 4.0))
            self.set("rope.scaling.original_context_length", self.pick(32, 64))

    def _vocab(self) -> None:
        if self.get("ple.layers") is None and self.lucky():
            n = self.pick(100, 128, 150, 257)
            self.set("vocab_size", n)
            for name, shape, _ in self.spec["tensors"]:
                if name == "token_embd.weight":
                    shape[1] = n
