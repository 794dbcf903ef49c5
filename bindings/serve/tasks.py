"""A checked request: the record that its readers pass to its runners.

A process that has read a stranger's request sends it as JSON; nothing else is accepted from it.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from tamis.bindings.drop_in import chat
from tamis.bindings.drop_in.completion import Budget, Request
from tamis.bindings.drop_in.grammar import LlamaGrammar
from tamis.bindings.drop_in.sampling import Sampling
from tamis.bindings.serve.media import Tile

LEAST_SEED, MOST_SEED = -(1 << 63), (1 << 63) - 1  # as OpenAI's API has it: int64


class Task(NamedTuple):
    """A completion or chat completion, checked: one choice for each entry of requests."""

    requests: list[Request]
    sampling: Sampling
    seed: int
    stream: bool
    include_usage: bool
    progress: bool
    wanted: chat.Wanted | None  # of a chat
    prompt_tokens: int
    salt: str = ""
    masked: bool = False  # whether its helper process sends masks for the choices
    running_usage: bool = False  # whether every part of a stream has the usage so far
    timings: bool = False  # whether every part of a stream has them
    slot: int | None = None  # the slot to run in
    cached: bool = True  # whether tokens that a slot holds may be reused
    reuse: int = 0  # the least chunk of tokens that may be reused at other positions; 0: none
    tiles: tuple[Tile, ...] = ()  # of the pictures that negative ids of prompts stand for
    lora: list[dict[str, Any]] | None = None  # scales of LoRA adapters as {id, scale}
    ignored: tuple[str, ...] = ()  # fields without effect that could have changed the answer
    about: Mapping[str, Any] = MappingProxyType({})  # JSON that the reply repeats

    def seed_of(self, i: int) -> int:
        """The seed of choice i: the first one's plus i, modulo 64 bits."""
        return (self.seed + i - LEAST_SEED) % (1 << 64) + LEAST_SEED

    @property
    def grammar(self) -> LlamaGrammar | None:
        """The grammar of the answers; None for none."""
        return self.sampling.grammar


class Inputs(NamedTuple):
    """The texts of an embeddings request as tokens, and the form of the reply."""

    texts: list[list[int]]
    packed: bool = False  # base64
    dimensions: int | None = None
    norm: int | None = None  # as in `formats.norms.normalized`; None: the default
    ignored: tuple[str, ...] = ()  # fields without effect that could have changed the reply
    tiles: tuple[Tile, ...] = ()  # of the pictures that negative ids stand for


def to_json(task: Task) -> bytes:
    """A task without its grammar as JSON; choices of one prompt contain its tokens once."""
    prompts: list[list[int]] = []
    places: dict[int, int] = {}
    requests = []
    for request in task.requests:
        if id(request.prompt) not in places:
            places[id(request.prompt)] = len(prompts)
            prompts.append(request.prompt)
        requests.append(request_record(request) | {"prompt": places[id(request.prompt)]})
    sampling = asdict(replace(task.sampling, grammar=None))
    wanted = None if task.wanted is None else task.wanted._replace(grammar=None)._asdict()
    rest: dict[str, Any] = {"requests": requests, "sampling": sampling, "wanted": wanted}
    rest |= {"masked": task.grammar is not None, "about": dict(task.about)}
    return json.dumps(task._asdict() | rest | {"prompts": prompts}).encode()


def from_json(data: bytes, n_vocab: int) -> Task:
    """The task that `to_json` wrote. Raises ValueError, TypeError, KeyError if it is malformed."""
    found = json.loads(data)
    tiles = _tiles(found["tiles"])
    prompts = [_ids(ids, n_vocab, seen=bool(tiles)) for ids in found.pop("prompts")]
    requests = []
    for each in found["requests"]:
        for mark in (each["budget"] or [0, [], []])[1:3]:
            _ids(mark or [0], n_vocab)
        requests.append(request_of(each, prompts[each["prompt"]]))
    wanted = None if found["wanted"] is None else chat.Wanted(**found["wanted"])
    parts = {"requests": requests, "sampling": sampling_of(found["sampling"]), "wanted": wanted}
    return Task(**{**found, **parts, "ignored": tuple(found["ignored"]), "tiles": tiles})


def request_record(request: Request) -> dict[str, Any]:
    """A request for JSON, without its prompt."""
    head = {f.name: getattr(request, f.name) for f in fields(request) if f.name != "prompt"}
    return head | {"shown": sorted(request.shown)}


def request_of(record: dict[str, Any], prompt: list[int]) -> Request:
    """The request of a record of `request_record`. Raises what `from_json` raises."""
    budget = None if record["budget"] is None else Budget(*record["budget"])
    parts = {"stop": tuple(record["stop"]), "shown": frozenset(record["shown"]), "budget": budget}
    return Request(**{**record, **parts, "prompt": prompt})


def sampling_of(record: dict[str, Any]) -> Sampling:
    """The sampling arguments of a JSON record. Raises what `from_json` raises."""
    bias = record["logit_bias"]
    found = None if bias is None else {int(token): value for token, value in bias.items()}
    breakers = tuple(record["dry_sequence_breakers"])
    return Sampling(**{**record, "logit_bias": found, "dry_sequence_breakers": breakers})


def inputs_to_json(inputs: Inputs) -> bytes:
    """An embeddings request as JSON."""
    return json.dumps(inputs).encode()


def inputs_from_json(data: bytes, n_vocab: int) -> Inputs:
    """The request that `inputs_to_json` wrote. Raises what `from_json` raises."""
    texts, packed, dimensions, norm, ignored, given = json.loads(data)
    tiles = _tiles(given)
    found = [_ids(ids, n_vocab, seen=bool(tiles)) for ids in texts]
    return Inputs(found, packed, dimensions, norm, tuple(map(str, ignored)), tiles)


def _ids(ids: list[int], n_vocab: int, *, seen: bool = False) -> list[int]:
    """Ids of a vocabulary; seen: also those of pictures, which the model's process checks."""
    array, least = np.array(ids, np.int64), -1 << 31 if seen else 0
    if array.ndim != 1 or not len(array) or array.min() < least or array.max() >= n_vocab:
        raise ValueError("tokens outside the vocabulary")
    return ids


def _tiles(given: list[Any]) -> tuple[Tile, ...]:
    return tuple((int(height), int(width), str(data)) for height, width, data in given)
