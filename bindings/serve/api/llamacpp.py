"""llama.cpp's own API: completions with all their fields, infill, templates."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from tamis.bindings.drop_in.completion import Piece, TokenInfo
from tamis.bindings.drop_in.sampling import Sampling
from tamis.bindings.serve.body import Body
from tamis.bindings.serve.errors import invalid, too_long
from tamis.bindings.serve.jobs import Progress
from tamis.bindings.serve.media import MARKER
from tamis.bindings.serve.replies import About, Reply, timings
from tamis.bindings.serve.requests import (
    MAX_INPUTS,
    MAX_LOGPROBS,
    MOST_TOKENS,
    Reader,
    shown_ids,
    unheeded,
)
from tamis.bindings.serve.sampling import sampling_of
from tamis.bindings.serve.tasks import LEAST_SEED, MOST_SEED, Inputs, Task
from tamis.bindings.serve.text import TooManyTokens
from tamis.text import picture_marks
from tamis.text.pair import encode_pair

MAX_N_PROBS = 100
MAX_DOCUMENTS = 1024


def read_completion(reader: Reader, body: Body) -> Task:
    """The task of a request to /completion. Raises ApiError."""
    body = reader.with_usual(body)
    texts = reader.prompts(body.get("prompt"))
    given = body.get("prompt")
    many = isinstance(given, list) and not any(isinstance(item, int) for item in given)
    return _task(reader, body, [ids for _, ids in texts], many=many)


def read_infill(reader: Reader, body: Body) -> Task:
    """The task of /infill: the text between input_prefix with prompt, and input_suffix.

    Raises ApiError.
    """
    body = reader.with_usual(body)
    extra = []
    for each in body.records("input_extra", MAX_INPUTS):
        name, text = each.get("filename", "tmp"), each.get("text")
        if not isinstance(name, str) or not isinstance(text, str):
            raise invalid("input_extra has an entry without a filename and a text", "input_extra")
        extra.append((name, text))
    before = (body.text("input_prefix") or "") + (body.text("prompt") or "")
    ids = reader.infill(before, body.text("input_suffix") or "", tuple(extra))
    return _task(reader, body, [ids], many=False)


def _task(reader: Reader, body: Body, prompts: list[list[int]], *, many: bool) -> Task:
    n = body.integer("n_predict", -1, MOST_TOKENS)
    n = body.integer("max_tokens", -1, MOST_TOKENS) if n is None else n
    most = None if n in (None, -1) else n
    task = reader.task(body, prompts, most, ())
    n_probs = body.integer("n_probs", 0, MAX_N_PROBS) or body.integer("logprobs", 0, MAX_LOGPROBS)
    post = body.flag("post_sampling_probs")
    requests = [
        replace(request, logprobs=n_probs or None, post_sampling=post) for request in task.requests
    ]
    fields = body.get("response_fields")
    about = {
        "n_predict": -1 if n is None else n,
        "tokens": body.flag("return_tokens"),
        "fields": [str(name) for name in fields] if isinstance(fields, list) else [],
        "many": many or len(requests) > 1,
        "prompts": [shown_ids(reader.text, ids) for ids in prompts],
        "eog": sorted(reader.text.unbounded.eog),
    }
    sampling = replace(task.sampling, grammar=reader.grammar(body))
    task = task._replace(requests=requests, sampling=sampling, about=about)
    return reader.noted(task, body)


def detokenize(reader: Reader, body: Body) -> str:
    """/detokenize: the text of tokens. Raises ApiError."""
    ids = body.get("tokens")
    if ids in (None, []):
        return ""
    return reader.prompts(ids, "tokens")[0][0]


def tokenize(reader: Reader, body: Body) -> dict[str, Any]:
    """/tokenize: the ids of content, and with with_pieces their texts. Raises ApiError.

    A request with a prompt or messages has vLLM's form: the reply has their number, and with
    return_token_strs the pieces.
    """
    if body.get("messages") is not None or body.get("prompt") is not None:
        return _vllm_tokens(reader, body)
    ids = reader.tokens(body.text("content") or "", body, special=body.flag("add_special"))
    return {"tokens": _with_pieces(reader, ids) if body.flag("with_pieces") else list(ids)}


def _vllm_tokens(reader: Reader, body: Body) -> dict[str, Any]:
    if body.get("messages") is not None:
        ids = reader.chat_prompt(body)[1].ids
    else:
        special = body.switch("add_special_tokens") is not False
        ids = reader.tokens(body.text("prompt") or "", body, special=special)
    text = reader.text.unbounded
    pieces = [
        text.piece(i, special=True).decode("utf-8", "replace") if i >= 0 else MARKER for i in ids
    ]
    shown = {"token_strs": pieces if body.flag("return_token_strs") else None}
    return {"count": len(ids), "max_model_len": reader.limits.n_ctx, "tokens": list(ids)} | shown


def _with_pieces(reader: Reader, ids: Sequence[int]) -> list[dict[str, Any]]:
    found = []
    for i in ids:
        data = reader.text.unbounded.piece(i, special=True)
        try:
            found.append({"id": i, "piece": data.decode()})
        except UnicodeDecodeError:
            found.append({"id": i, "piece": list(data)})
    return found


def apply_template(reader: Reader, body: Body) -> str:
    """/apply-template: the text of a chat's prompt. Raises ApiError."""
    return picture_marks.shown(reader.chat_prompt(reader.with_usual(body))[1].text, MARKER)


def count_chat(reader: Reader, body: Body) -> int:
    """The prompt's tokens of a request to /v1/chat/completions/input_tokens. Raises ApiError."""
    return len(reader.chat_prompt(body)[1].ids)


def read_rerank(reader: Reader, body: Body) -> Inputs:
    """/rerank: the tokens of the query with each document. Raises ApiError."""
    query, most = body.text("query") or "", reader.limits.n_ctx
    found = []
    for document in documents(body):
        try:
            ids = encode_pair(reader.text.vocab, reader.text.tokenizer, query, document)
        except TooManyTokens as error:
            raise too_long(error.n, most, at_least=True) from None
        if len(ids) > most:
            raise too_long(len(ids), most)
        found.append(ids)
    for name in ("top_n", "return_text", "return_documents"):  # the route itself reads these
        body.get(name)
    return Inputs(found, ignored=unheeded(body))


def documents(body: Body) -> list[str]:
    """The texts that a request asks to rank; checks that it has a query. Raises ApiError."""
    if not isinstance(body.get("query"), str):
        raise invalid("query is no text", "query")
    name = "texts" if body.get("texts") is not None else "documents"
    given, found = body.get(name), []
    if not isinstance(given, list) or not given or len(given) > MAX_DOCUMENTS:
        raise invalid(f"{name} is no list of 1 to {MAX_DOCUMENTS} texts", name)
    for each in given:
        text = each.get("text") if isinstance(each, dict) else each
        if not isinstance(text, str):
            raise invalid(f"{name} has an entry that is no text", name)
        found.append(text)
    return found


def usual_settings(reader: Reader) -> dict[str, Any]:
    """The default settings of a completion, for /props."""
    body = reader.with_usual(Body({}))
    n = body.integer("n_predict", -1, MOST_TOKENS)
    seed = body.integer("seed", LEAST_SEED, MOST_SEED)
    eog = sorted(reader.text.unbounded.eog)
    return settings(sampling_of(body, reader.text), -1 if seed is None else seed, eog) | {
        "n_predict": -1 if n is None else n
    }


def settings(sampling: Sampling, seed: int, eog: Sequence[int]) -> dict[str, Any]:
    """generation_settings in llama.cpp's names; eog: the tokens that ignore_eos forbids."""
    s = asdict(replace(sampling, grammar=None, logits_processor=None))
    bias = (s.pop("logit_bias") or {}) | (dict.fromkeys(eog, -math.inf) if s["ignore_eos"] else {})
    s["temperature"] = s.pop("temp")
    s["mirostat"] = s.pop("mirostat_mode")
    s.pop("grammar")
    s.pop("logits_processor")
    repeat = s["repeat_last_n"]
    return s | {
        "seed": seed,
        "adaptive_target": -1.0,  # llama.cpp's sampler of that name does not exist here
        "adaptive_decay": 0.9,
        "repeat_last_n": 64 if repeat is None else repeat,
        "logit_bias": [
            {"token": i, "bias": None if b == -math.inf else b} for i, b in bias.items()
        ],
        "dry_sequence_breakers": list(sampling.dry_sequence_breakers),
    }


class Completion(Reply):
    """/completion and /infill."""

    closing = ""

    def __init__(self, task: Task, about: About) -> None:
        super().__init__(task, about)
        self._texts = [""] * len(task.requests)

    def piece(self, i: int, piece: Piece) -> Iterable[Any]:
        """The event of a piece: its text and tokens.

        The last one also reports on the whole answer.
        """
        self._texts[i] += piece.text
        if piece.text or piece.ids:
            found = {
                "index": i,
                "content": piece.text,
                "tokens": list(piece.ids),
                "stop": False,
                "id_slot": self.slots[i],
                "tokens_predicted": piece.counts.n_answer,
                "tokens_evaluated": len(self.task.requests[i].prompt),
            }
            if self.task.requests[i].logprobs is not None:
                found["completion_probabilities"] = self._likely(piece.tokens, i)
            if self.task.timings:
                found["timings"] = timings(piece.counts)
            if piece.tokens or self.task.requests[i].logprobs is None:
                yield found
        if piece.finish is not None:
            yield self._last(i, piece, "", [])

    def progress(self, i: int, event: Progress) -> Iterable[Any]:
        """The event of the prompt's progress, if the request asks for it."""
        if self.task.progress:
            yield {
                "index": i,
                "content": "",
                "tokens": [],
                "stop": False,
                **self.progress_of(event),
            }

    def whole(self, found: list[list[Piece]]) -> Any:
        """One object, or a list for a list of prompts."""
        replies = []
        for i, pieces in enumerate(found):
            text = "".join(piece.text for piece in pieces)
            self._texts[i] = text
            ids = [token for piece in pieces for token in piece.ids]
            tokens = [token for piece in pieces for token in piece.tokens]
            reply = self._last(i, pieces[-1], text, ids)
            if self.task.requests[i].logprobs is not None:
                reply["completion_probabilities"] = self._likely(tokens, i)
            replies.append(_chosen(reply, self.task.about["fields"]))
        return replies if self.task.about["many"] else replies[0]

    def _last(self, i: int, piece: Piece, text: str, ids: list[int]) -> dict[str, Any]:
        r, c, task = self.task.requests[i], piece.counts, self.task
        n_each = len(task.requests) // len(task.about["prompts"])
        n_prompt = len(r.prompt)
        kind = "limit" if piece.finish == "length" else "word" if piece.word else "eos"
        said = settings(task.sampling, task.seed_of(i), task.about["eog"]) | {
            "n_predict": task.about["n_predict"],
            "max_tokens": task.about["n_predict"],
            "stop": list(r.stop),
            "stream": task.stream,
            "n_probs": r.logprobs or 0,
            "post_sampling_probs": r.post_sampling,
            "timings_per_token": task.timings,
        }
        return {
            "index": i,
            "content": text,
            "tokens": ids if task.about["tokens"] else [],
            "id_slot": self.slots[i],
            "stop": True,
            "model": self.about.model,
            "tokens_predicted": c.n_answer,
            "tokens_evaluated": n_prompt,
            "generation_settings": said,
            "prompt": task.about["prompts"][i // n_each],
            "has_new_line": "\n" in self._texts[i],
            "truncated": kind == "limit" and n_prompt + c.n_answer >= self.about.n_ctx,
            "stop_type": kind,
            "stopping_word": piece.word or "",
            "tokens_cached": n_prompt + max(c.n_answer - 1, 0),
            "timings": timings(c),
        }

    def _likely(self, tokens: Sequence[TokenInfo], i: int) -> list[dict[str, Any]]:
        post = self.task.requests[i].post_sampling
        many = "top_probs" if post else "top_logprobs"

        def one(token: Any) -> dict[str, Any]:
            found = {"id": token.id, "token": token.text, "bytes": list(token.data)}
            if post:
                return found | {"prob": math.exp(token.logprob)}
            return found | {"logprob": token.logprob}

        return [one(token) | {many: [one(each) for each in token.top]} for token in tokens]


def _chosen(reply: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """The fields that a request asks for, inner ones as `outer/inner`; or all fields."""
    if not fields:
        return reply
    found = {}
    for name in fields:
        value: Any = reply
        for part in name.split("/"):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            found[name] = value
    return found
