"""What a request asks for, checked: the record between those who read it and those who run it.

A process that has read a stranger's request sends it as JSON; nothing else is taken from there.
"""

import json
from dataclasses import asdict, fields, replace
from typing import Any, NamedTuple

import numpy as np

from tamis.bindings.drop_in import chat
from tamis.bindings.drop_in.completion import Request
from tamis.bindings.drop_in.grammar import LlamaGrammar
from tamis.bindings.drop_in.sampling import Sampling

SEEDS = 1 << 32


class Task(NamedTuple):
    """A completion or chat completion, checked: one choice an entry of requests."""

    requests: list[Request]
    sampling: Sampling
    seed: int
    stream: bool
    include_usage: bool
    progress: bool
    wanted: chat.Wanted | None  # of a chat
    prompt_tokens: int
    salt: str = ""
    masked: bool = False  # its process sends masks for the choices

    @property
    def grammar(self) -> LlamaGrammar | None:
        """What the answers must look like."""
        return self.sampling.grammar


class Inputs(NamedTuple):
    """The texts of an embeddings request as tokens, and the form of the reply."""

    texts: list[list[int]]
    packed: bool  # base64
    dimensions: int | None


def to_json(task: Task) -> bytes:
    """A task without its grammar; choices of one prompt have its tokens once."""
    prompts: list[list[int]] = []
    places: dict[int, int] = {}
    requests = []
    for request in task.requests:
        if id(request.prompt) not in places:
            places[id(request.prompt)] = len(prompts)
            prompts.append(request.prompt)
        head = {f.name: getattr(request, f.name) for f in fields(request) if f.name != "prompt"}
        requests.append(head | {"prompt": places[id(request.prompt)]})
    sampling = asdict(replace(task.sampling, grammar=None))
    wanted = None if task.wanted is None else [task.wanted.tools, task.wanted.tool]
    rest: dict[str, Any] = {"requests": requests, "sampling": sampling, "wanted": wanted}
    rest["masked"] = task.grammar is not None
    return json.dumps(task._asdict() | rest | {"prompts": prompts}).encode()


def from_json(data: bytes, n_vocab: int) -> Task:
    """The task of `to_json`. Raises ValueError, TypeError, KeyError where it is none."""
    found = json.loads(data)
    prompts = [_ids(ids, n_vocab) for ids in found.pop("prompts")]
    requests = [
        Request(**{**each, "prompt": prompts[each["prompt"]], "stop": tuple(each["stop"])})
        for each in found["requests"]
    ]
    sampling = found["sampling"]
    bias = sampling["logit_bias"]
    if bias is not None:
        sampling["logit_bias"] = {int(token): value for token, value in bias.items()}
    wanted = None
    if found["wanted"] is not None:
        tools, tool = found["wanted"]
        wanted = chat.Wanted(tools, tool, None)
    parts = {"requests": requests, "sampling": Sampling(**sampling), "wanted": wanted}
    return Task(**{**found, **parts})


def inputs_to_json(inputs: Inputs) -> bytes:
    """An embeddings request as JSON."""
    return json.dumps(inputs).encode()


def inputs_from_json(data: bytes, n_vocab: int) -> Inputs:
    """The request of `inputs_to_json`. Raises as `from_json`."""
    texts, packed, dimensions = json.loads(data)
    return Inputs([_ids(ids, n_vocab) for ids in texts], packed=packed, dimensions=dimensions)


def _ids(ids: list[int], n_vocab: int) -> list[int]:
    array = np.array(ids, np.int64)
    if array.ndim != 1 or not len(array) or array.min() < 0 or array.max() >= n_vocab:
        raise ValueError("tokens outside the vocabulary")
    return ids
