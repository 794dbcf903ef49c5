"""`tamis serve`: OpenAI's API over HTTP, and a chat page, for programs on this machine.

Without -m it offers all installed models.
"""

import argparse
import contextlib
import json
import math
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tamis.cli.options import Parser, common, context, draft, presets, settings
from tamis.cli.options.errors import UsageError
from tamis.cli.terminal import note

GIB = 1 << 30
MOST_CHOICES = 8  # of one request


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.epilog = (
        "--ctx is the context length of one request: each of the --parallel slots has that much"
    )
    common.add_model_arguments(parser, shared=True)
    parser.set_defaults(ends_at_once=True)
    _add_pictures(parser)
    common.add_context_arguments(parser)
    _add_reached(parser)
    parser.add_argument(
        "--parallel",
        type=common.count,
        default=4,
        metavar="N",
        help="number of slots: requests that are answered at the same time (default: %(default)s)",
    )
    parser.add_argument(
        "--queue",
        type=common.count,
        default=64,
        metavar="N",
        help="number of requests that may wait for a slot; further requests get status 429 "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--ubatch",
        type=common.count,
        default=128,
        metavar="N",
        help="tokens of a prompt that are processed between two decode steps of other requests "
        "(default: %(default)s)",
    )
    _add_access(parser)
    parser.add_argument(
        "--max-body",
        type=common.size,
        default=4 << 20,
        metavar="SIZE",
        help="largest body of a request (default: 4MiB, 32MiB where a model takes pictures)",
    )
    _add_cache(parser)
    _add_answers(parser)
    _add_prompts(parser)
    _add_limits(parser)
    _add_models(parser)
    _add_names(parser)
    draft.add_arguments(parser)
    parser.add_argument(
        "--metrics", action="store_true", help="serve Prometheus metrics at /metrics"
    )
    common.add_adapter_arguments(parser)


def _add_pictures(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the encoder of pictures, and of where pictures come from."""
    encoder = parser.add_mutually_exclusive_group()
    encoder.add_argument(
        "-mm",
        "--mmproj",
        metavar="FILE",
        help="the model's encoder of pictures, a GGUF file: requests may then have pictures "
        "(default: the file beside the model whose name has mmproj and the model's)",
    )
    encoder.add_argument(
        "--no-mmproj",
        action="store_true",
        help="take no pictures, even if there is an mmproj file beside the model",
    )
    parser.add_argument(
        "--media-path",
        metavar="DIR",
        help="folder whose pictures requests may name as file:// URLs (default: none)",
    )
    parser.add_argument(
        "--media-url",
        action="append",
        default=[],
        metavar="HOST",
        help="host, or HOST:PORT, whose pictures requests may name as http:// and https:// URLs, "
        "which the server then fetches; may be repeated (default: none)",
    )


def _add_names(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the model's names in replies."""
    parser.add_argument(
        "--alias",
        type=_names,
        metavar="NAME",
        help="name of the model in replies, or several separated by commas: the alphabetically "
        "first is used in replies, all are listed (default: the name of its file)",
    )
    parser.add_argument(
        "--tags",
        type=_names,
        default=(),
        metavar="TAG",
        help="tags of the model in /v1/models, separated by commas (default: none)",
    )


def _add_models(parser: argparse.ArgumentParser) -> None:
    """Add the flags of how long models stay loaded, and how many."""
    parser.add_argument(
        "--sleep-idle-seconds",
        type=_idle_seconds,
        default=math.inf,
        metavar="SECONDS",
        help="with -m: seconds without a request after which the model's memory is freed, that of "
        "slots and --cache-ram included; the next request loads it again; -1: never (default: -1)",
    )
    parser.add_argument(
        "--keep-alive",
        type=_keep_alive,
        default="5m",
        metavar="TIME",
        help="without -m: time that an unused model stays loaded, such as 300 (seconds), 5m or "
        "1h30m; -1: for ever (default: %(default)s)",
    )
    parser.add_argument(
        "--memory",
        type=common.size,
        metavar="SIZE",
        help="without -m: most memory for all loaded models together (default: all memory that is "
        "free)",
    )
    parser.add_argument(
        "--models-max",
        type=common.count,
        metavar="N",
        help="without -m: most models that are loaded at the same time (default: as many as "
        "--memory allows)",
    )
    parser.add_argument(
        "--models-preset",
        metavar="FILE",
        help="without -m: INI file with flags for each model, as llama-server has it: a section is "
        "an installed model or a name for the file of its model, [*] is for all; it is read again "
        "on GET /models?reload=1 (default: none)",
    )
    parser.add_argument(
        "--no-models-autoload",
        action="store_true",
        help="without -m: load a model only on a request to /models/load",
    )


def _add_cache(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the cache for prompts that slots no longer hold."""
    parser.add_argument(
        "--cache-ram",
        type=common.cache_size,
        metavar="SIZE",
        help="memory for the prompt cache of a model: the KV cache of conversations that slots no "
        "longer hold, which are then not read again; 0: none (default: a quarter of the memory "
        "that slots leave of what is free, or of --memory)",
    )
    parser.add_argument(
        "--cache-dir",
        metavar="DIR",
        help="folder in which the prompt cache is also kept, for later starts and for other "
        "servers of this user; it holds what clients wrote (default: none)",
    )
    parser.add_argument(
        "--cache-disk",
        type=common.size,
        metavar="SIZE",
        help="most disk space for --cache-dir (default: a quarter of what is free there)",
    )


def _add_access(parser: argparse.ArgumentParser) -> None:
    """Add the flags of access, and of what requests may share."""
    key = parser.add_mutually_exclusive_group()
    key.add_argument(
        "--api-key",
        help="key that clients must send; other users of this machine can see it in the process "
        "list, so prefer --api-key-file (default: no key)",
    )
    key.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="file with the keys that clients must send, one on each line (default: no key)",
    )
    parser.add_argument(
        "--isolate",
        action="store_true",
        help="do not share the cache of a prompt's prefix between requests, or, with several keys, "
        "between keys",
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="host name, besides localhost, that requests may name; may be repeated (default: "
        "none)",
    )
    parser.add_argument(
        "--cors-origins",
        type=_names,
        default=(),
        metavar="ORIGIN",
        help="origins of web pages that may use this server from a browser, separated by commas, "
        "such as https://chat.example or app://obsidian.md. localhost: every page of this "
        "machine; *: every page, which requires an API key (default: only this server's own "
        "page)",
    )


def _add_reached(parser: argparse.ArgumentParser) -> None:
    """Add the flags of addresses, TLS, and the path before all others."""
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on, or several separated by commas; one with a slash, or that ends "
        "with .sock, is the path of a Unix socket, which this user alone may use (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--port",
        type=common.port,
        default=8080,
        help="TCP port; 0: any free port (default: %(default)s)",
    )
    parser.add_argument(
        "--ssl-cert-file",
        metavar="FILE",
        help="PEM file with the certificate for TLS, and those that vouch for it: replies are "
        "encrypted (default: no TLS)",
    )
    parser.add_argument(
        "--ssl-key-file",
        metavar="FILE",
        help="PEM file with the private key of --ssl-cert-file (default: none)",
    )
    parser.add_argument(
        "--api-prefix",
        type=_prefix,
        default="",
        metavar="PATH",
        help="path, such as /llm, before all paths of the server, for a proxy that serves others "
        "beside them (default: none)",
    )


def _add_answers(parser: argparse.ArgumentParser) -> None:
    """Add the flags of how answers are generated."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        type=field,
        metavar="NAME=VALUE",
        help="default of a request field, such as temperature=0, n_predict=256 or "
        "enable_thinking=false; may be repeated (default: none)",
    )
    template = parser.add_mutually_exclusive_group()
    template.add_argument(
        "--chat-template-file",
        metavar="FILE",
        help="file with a Jinja chat template, used instead of the model file's (default: none)",
    )
    template.add_argument(
        "--chat-template",
        metavar="TEXT",
        help="Jinja chat template, or the name of a built-in one such as chatml, llama3 or gemma, "
        "used instead of the model file's (default: none)",
    )
    parser.add_argument(
        "--pooling",
        choices=("none", "mean", "cls", "last", "rank"),
        help="how the token embeddings of a text become one embedding; rank: serve /rerank and no "
        "embeddings (default: what the model file says, else mean)",
    )
    parser.add_argument(
        "--reranking",
        "--rerank",
        dest="pooling",
        action="store_const",
        const="rank",
        help="the same as --pooling rank",
    )
    parser.add_argument(
        "--page", choices=["on", "off"], default="on", help="serve a chat page at / (default: on)"
    )
    parser.add_argument(
        "--no-page",
        "--no-ui",
        "--no-webui",
        dest="page",
        action="store_const",
        const="off",
        help="the same as --page off",
    )
    parser.add_argument(
        "--no-slots", action="store_true", help="do not serve the state of the slots at /slots"
    )
    parser.add_argument(
        "--slot-save-path",
        metavar="DIR",
        help="folder in which clients may save and restore the KV cache of a slot (default: not "
        "allowed)",
    )


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    """What is left out of prompts, by default or for want of room."""
    parser.add_argument(
        "--context-shift",
        action="store_true",
        help="when the context of a request is full, remove the oldest tokens but its n_keep first "
        "ones and go on; the same as --set context_shift=true (default: the answer ends)",
    )
    parser.add_argument(
        "--cache-reuse",
        type=common.count_or_zero,
        default=0,
        metavar="N",
        help="reuse what a slot holds of a prompt after a part that is gone, in chunks of at least "
        "N tokens: answers are near those of a prompt that is read whole, not the same; 0: never; "
        "the same as --set n_cache_reuse=N (default: %(default)s)",
    )
    parser.add_argument(
        "--keep-markers",
        action="store_true",
        help="leave in prompts what agents change in them with every request, such as Claude "
        "Code's count of tokens left: each turn is then read whole (default: it is left out)",
    )


def field(text: str) -> tuple[str, Any]:
    """A field of requests and its value, which is JSON or else a text."""
    name, sign, value = text.partition("=")
    if not sign or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value


def _add_limits(parser: argparse.ArgumentParser) -> None:
    """Add the flags of limits for each client."""
    for name, default, text in (
        ("--timeout-header", 10, "most time until the header of a request is complete"),
        ("--timeout-request", 60, "most time until the body of a request is received and prepared"),
        (
            "--timeout-prepare",
            20,
            "most processor time for the template, tokens and grammar of a request",
        ),
        (
            "--timeout-step",
            900,
            "most time of one step of the model, after which its process is restarted",
        ),
    ):
        parser.add_argument(
            name,
            type=common.count,
            default=default,
            metavar="SECONDS",
            help=f"{text} (default: %(default)s)",
        )
    parser.add_argument(
        "--memory-prepare",
        type=common.size,
        default=GIB,
        metavar="SIZE",
        help="most memory for the template, tokens and grammar of a request (default: 1GiB)",
    )
    parser.add_argument(
        "--max-connections",
        type=common.count,
        default=512,
        metavar="N",
        help="most open connections (default: %(default)s)",
    )
    parser.add_argument(
        "--max-connections-per-address",
        type=common.count,
        default=256,
        metavar="N",
        help="most open connections from one address (default: %(default)s)",
    )


def defaults() -> dict[str, Any]:
    """The defaults of this command's flags."""
    parser = Parser()
    add_arguments(parser)
    return {action.dest: action.default for action in parser._actions if action.dest != "help"}


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    try:
        from tamis.bindings.serve import models
        from tamis.bindings.serve.http import listen, router
    except ImportError as error:
        raise ImportError(f"serve needs {error.name}: pip install 'tamis[server]'") from error
    access = _access(arguments)
    tls = _tls(arguments.ssl_cert_file, arguments.ssl_key_file)
    of_server = _settings(arguments, access)
    source = Source(arguments, of_server)
    keep = math.inf if source.only is not None else arguments.keep_alive
    served = models.Models(
        source,
        keep=keep,
        n_byte=arguments.memory,
        n_queue=arguments.queue,
        log=_log,
        n_model=arguments.models_max,
        autoload=not arguments.no_models_autoload,
    )
    if source.only is None:
        n = len(source.offers())
        what = f"{n} model{'s' if n > 1 else ''}"
    else:
        served.adopt(source.only, *source.load(source.only))
        what = source.only.name

    def ready(url: str) -> None:
        for offer in source.loaded_first():
            served.load(offer)
        note(f"serving {what} at {url}: {arguments.parallel} answers at once, Ctrl-C ends")

    connections = listen.Connections(
        arguments.max_connections,
        arguments.max_connections_per_address,
        arguments.timeout_header,
        arguments.timeout_request,
    )
    server = router.Router(served, source.with_media(of_server), _log, source.only)
    listen.serve(
        server,
        arguments.host,
        arguments.port,
        connections=connections,
        ready=ready,
        log=_log,
        address=listen.Address(access.hosts, tls, arguments.api_prefix),
    )
    return 0


def field_defaults(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of --set. Raises UsageError for one that every request would be refused for."""
    from tamis.bindings.serve.errors import ApiError
    from tamis.bindings.serve.sampling import check_defaults

    fields = dict(arguments.set)
    try:
        check_defaults(fields)
    except ApiError as error:
        raise UsageError(f"--set: {error.message}") from error
    return fields


def _settings(arguments: argparse.Namespace, access: Any) -> Any:
    """The server's settings. Raises UsageError."""
    from tamis.bindings.serve.http.app import Settings

    asked = {"context_shift": arguments.context_shift, "keep_markers": arguments.keep_markers}
    usual: dict[str, Any] = {name: True for name, is_asked in asked.items() if is_asked}
    usual |= {"n_cache_reuse": arguments.cache_reuse} if arguments.cache_reuse else {}
    return Settings(
        n_queue=arguments.queue,
        n_choices=min(MOST_CHOICES, arguments.queue),
        max_body=arguments.max_body,
        metrics=arguments.metrics,
        access=access,
        isolate=arguments.isolate,
        timeout_request=arguments.timeout_request,
        timeout_prepare=arguments.timeout_prepare,
        helper_bytes=arguments.memory_prepare,
        usual=usual | field_defaults(arguments),
        pooling=arguments.pooling,
        page=arguments.page == "on",
        slots=not arguments.no_slots,
        slot_folder=_folder("--slot-save-path", arguments.slot_save_path),
        loras=common.adapter_files(arguments).loras,
        aliases=arguments.alias or (),
        tags=arguments.tags,
        prefix=arguments.api_prefix,
    )


@dataclass(frozen=True, slots=True)
class _How:
    """What a model is started with: checked arguments, and what follows from them."""

    arguments: argparse.Namespace
    settings: Any
    where: Any  # devices
    rope: Any
    adapters: Any
    cache: Any  # sizes of the prompt cache, or None
    template: str | None
    draft: list[Any] | None

    @staticmethod
    def of(arguments: argparse.Namespace, settings: Any) -> "_How":
        """Check the flags; arguments.model: None for a server of all models.

        Raises UsageError, ModelError.
        """
        draft.check(arguments, alone=())  # a slot settles its drafts before its context shifts
        common.check_methods(arguments.attn, context.prefill(arguments.prefill, 0))
        adapters = common.adapter_files(arguments)
        if any(adapters) and arguments.model is None:
            raise UsageError("--lora and --control-vector are of one model: name that with -m")
        drafter: list[Any] | None = None
        if arguments.model_draft is not None:
            if arguments.model is None:
                raise UsageError("--model-draft drafts for one model: name that with -m")
            drafter = ["model", arguments.draft_max, str(draft.draft_file(arguments))]
        elif arguments.draft_mtp:
            drafter = ["mtp", arguments.draft_max]
        elif arguments.draft_attn is not None:
            drafter = ["attn", arguments.draft_max]
        if arguments.mmproj is not None:
            if arguments.model is None:
                raise UsageError("--mmproj is of one model: name that with -m")
            if not Path(arguments.mmproj).is_file():
                raise UsageError(f"--mmproj {arguments.mmproj} is no file")
        _folder("--media-path", arguments.media_path)
        template = _template(arguments.chat_template_file, arguments.chat_template)
        where, rope = common.devices(arguments), common.rope_scaling(arguments)
        cache = _cache_sizes(arguments)
        return _How(arguments, settings, where, rope, adapters, cache, template, drafter)

    def media(self, path: str) -> Any:
        """What pictures the model of a file takes."""
        from tamis.bindings.serve.media import Rules

        given = self.arguments
        given.shows_pictures = True
        found = None if given.no_mmproj else common.mmproj_file(given, Path(path))
        if found is None:
            return Rules()
        hosts = tuple(host.lower() for host in given.media_url)
        folder = _folder("--media-path", given.media_path)
        return Rules(str(found.absolute()), "" if folder is None else str(folder), hosts)


class Source:
    """The model of -m, or all installed ones and those of presets; each has its own process."""

    def __init__(self, arguments: argparse.Namespace, settings: Any) -> None:
        """Check the flags. Raises UsageError, ModelError."""
        from tamis.bindings.serve.models import Offer
        from tamis.fetch.registry import installed

        common.warn_of_threads(arguments.threads)
        self._usual = _How.of(arguments, settings)
        self._own: dict[str, _How] = {}  # by a model's name, where it has a preset
        self._progress: common.Progress | None = common.Progress()
        self.only: Any = None
        if arguments.model is not None and arguments.models_preset is not None:
            raise UsageError("--models-preset is of several models: leave out -m")
        if arguments.model is not None or not (installed() or arguments.models_preset):
            path = common.model_file(arguments.model, self._progress).absolute()
            if arguments.model is not None:
                state = path.stat()
                name = arguments.alias[0] if arguments.alias else path.stem
                self.only = Offer(name, str(path), state.st_size, state.st_mtime)
        if arguments.model is None and arguments.sleep_idle_seconds < math.inf:
            raise UsageError(
                "--sleep-idle-seconds is of -m: without -m, --keep-alive unloads models"
            )
        if self.only is None and arguments.alias is not None:
            raise UsageError("--alias is the name of one model: name that with -m")
        self._presets: presets.Presets | None = None
        self.reload()

    def reload(self) -> None:
        """Read the presets anew. Raises UsageError, SettingsError, OSError; all then stays."""
        from tamis.fetch.registry import installed

        given = self._usual.arguments
        if given.models_preset is None:
            return
        parser = Parser()
        add_arguments(parser)
        read = presets.Presets(Path(given.models_preset), settings.named(parser))
        own = {}
        of_files = {model.name: str(model.path) for model in installed()}
        for name in {*read.names, *of_files}:
            if (preset := read.of(name)) is not None:
                own[name] = self._with(preset, of_files.get(name))
        self._presets, self._own = read, own

    def _with(self, preset: presets.Preset, path: str | None) -> _How:
        """How a model is started that has a preset; path: its file, if it is an installed model.

        Raises UsageError, SettingsError, OSError.
        """
        where = f"{self._usual.arguments.models_preset} [{preset.name}]"
        if path is None and "model" not in preset.flags:
            raise UsageError(f"{where}: no such model is installed: add model = FILE or hf-repo")
        found = presets.arguments_of(add_arguments, self._usual.arguments.argv, preset)
        found.model = found.model or path
        try:
            return _How.of(found, _settings(found, self._usual.settings.access))
        except (ValueError, RuntimeError) as error:
            raise UsageError(f"{where}: {error}") from error

    def sees(self, offer: Any) -> bool:
        """Whether a model takes pictures: what lies beside its file is looked at."""
        return bool(self._how(offer).media(offer.path).mmproj)

    def offers(self) -> list[Any]:
        """All offered models; one that was removed meanwhile is left out. No file is opened."""
        from tamis.bindings.serve.models import Offer
        from tamis.fetch.registry import installed

        if self.only is not None:
            return [self.only]
        found = {}
        for model in installed():
            with contextlib.suppress(OSError):
                changed = model.path.stat().st_mtime
                found[model.name] = Offer(model.name, str(model.path), model.n_bytes, changed)
        return list(found.values()) if self._presets is None else self._with_presets(found)

    def _with_presets(self, found: dict[str, Any]) -> list[Any]:
        """The offers of installed models and of presets."""
        from tamis.bindings.serve.models import Offer
        from tamis.fetch.registry import ModelError, resolve

        assert self._presets is not None
        used = set()
        for name, how in self._own.items():
            preset = self._presets.of(name)
            assert preset is not None
            offer = found.get(name)
            if "model" in preset.flags:
                path, n_byte, changed = str(how.arguments.model), 0, 0.0
                with contextlib.suppress(OSError, ModelError):
                    path = str(resolve(path).absolute())
                    n_byte, changed = Path(path).stat().st_size, Path(path).stat().st_mtime
                offer = Offer(name, path, n_byte, changed)
            if offer is None:  # removed meanwhile
                continue
            names = how.arguments.alias or ()
            found[name] = offer._replace(
                aliases=tuple(names), tags=tuple(how.arguments.tags), args=preset.words
            )
            if preset.hides:
                used |= {offer.path, *(how.draft[2:] if how.draft else [])}
        return [
            o._replace(hidden=o.path in used and not self._is_section(o)) for o in found.values()
        ]

    def _is_section(self, offer: Any) -> bool:
        return self._presets is not None and offer.name in self._presets.names

    def loaded_first(self) -> list[Any]:
        """The offers of presets that are loaded when the server starts."""
        found = self._presets
        if found is None:
            return []
        return [o for o in self.offers() if (p := found.of(o.name)) is not None and p.load]

    def with_media(self, given: Any) -> Any:
        """Settings of the whole server, with those of a model that takes pictures, if any does."""
        found = (self._how(offer).media(offer.path) for offer in self.offers())
        return replace(given, media=next((m for m in found if m.mmproj), given.media))

    def _how(self, offer: Any) -> _How:
        return self._own.get(offer.name, self._usual)

    def start(self, offer: Any) -> Any:
        """The supervisor of a model's process, which begins to load the model."""
        from dataclasses import asdict

        from tamis.bindings.serve.supervisor import ModelProcess, Start, Supervisor
        from tamis.bindings.serve.wire import identity

        how = self._how(offer)
        given = how.arguments
        session = {
            "n_ctx": given.ctx,
            "n_ubatch": given.ubatch,
            "attn": given.attn,
            "min_mass": given.min_mass,
            "prefill": given.prefill,
            "type_k": given.cache_type_k,
            "type_v": given.cache_type_v,
            "kv_ram": given.kv_ram,
            "kv_dir": given.kv_dir and str(Path(given.kv_dir).absolute()),
            "kv_unit": given.kv_unit,
            "kv_vram": given.kv_vram,
            "key_copy": common.key_copy(given),
        }
        rope = None if how.rope is None else asdict(how.rope)
        with_what = (
            *(given.threads, rope, how.where, session, given.parallel),
            *(how.adapters, how.draft, draft.ngram(given), how.cache, how.media(offer.path).mmproj),
        )
        start = Start(offer.path, identity(offer.path), *with_what)
        return Supervisor(
            lambda: ModelProcess(start),
            given.queue,
            max(len(how.settings.access.keys), 1),
            log=_log,
            progress=self._progress or _silent,
            step_seconds=given.timeout_step,
            idle_seconds=given.sleep_idle_seconds,
        )

    def text(self, offer: Any, n_ctx: int = 0) -> Any:
        """The vocabulary and template of a model.

        n_ctx limits the texts that its tokenizer takes.
        """
        from tamis.bindings.serve.text import TextModel

        return TextModel.load(offer.path, n_ctx, self._how(offer).template)

    def serve(self, offer: Any, worker: Any) -> Any:
        """The application of a loaded model."""
        from tamis.bindings.serve.http.application import application
        from tamis.bindings.serve.models import Model

        loaded = worker.wait()
        text = self.text(offer, loaded.n_ctx)
        # The router logs a line for each request already.
        model = Model(offer.name, offer.path, text, loaded, worker)
        how = self._how(offer)
        settings = replace(how.settings, media=how.media(offer.path))
        return application(model, settings, lambda line: None)

    def load(self, offer: Any) -> tuple[Any, Any]:
        """The supervisor and application of a model, loaded with progress shown.

        Raises LoadError.
        """
        worker = self.start(offer)
        try:
            worker.wait()
            served = self.serve(offer, worker)
        except BaseException:
            worker.stop()
            worker.join()
            raise
        assert self._progress is not None
        self._progress.clear()
        self._progress = None
        return worker, served


def _keep_alive(text: str) -> float:
    """The seconds of an argument such as 5m."""
    from tamis.bindings.serve.body import seconds_of

    try:
        return seconds_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _idle_seconds(text: str) -> float:
    """The seconds of an argument, -1 for ever."""
    if text == "-1":
        return math.inf
    return common.count(text)


def _names(text: str) -> tuple[str, ...]:
    """Names separated by commas, without repetitions, sorted."""
    found = sorted({name.strip() for name in text.split(",")} - {""})
    if not found:
        raise argparse.ArgumentTypeError("expected a name")
    return tuple(found)


def _prefix(text: str) -> str:
    """A path of an argument, without slashes at its end; "" for / alone."""
    path = text.rstrip("/")
    if path and not re.fullmatch(r"(/[\w.~-]+)+", path, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is no path such as /llm")
    return path


def _tls(cert: str | None, key: str | None) -> Any:
    """The TLS context of a certificate and its key, None without them.

    Raises UsageError, OSError.
    """
    import ssl

    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise UsageError("TLS takes a certificate and its key: --ssl-cert-file and --ssl-key-file")
    for path in (cert, key):
        with Path(path).open("rb"):  # an error of load_cert_chain does not say which file
            pass
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # A function, as OpenSSL otherwise asks the terminal for the password of a key.
        context.load_cert_chain(cert, key, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise UsageError(
            f"{cert} and {key} are no certificate with its own unencrypted key in PEM ({reason})"
        ) from None
    return context


def _silent(stage: str, done: int, total: int | None) -> None:
    """Show no progress: the model is loaded for a client."""


def _template(path: str | None, text: str | None) -> str | None:
    """A template from a file, or from a text that is one or names one.

    Raises OSError, UsageError.
    """
    if path is not None:
        return Path(path).read_text(encoding="utf-8")
    if text is None or not re.fullmatch(r"[\w.-]+", text):
        return text
    from tamis.bindings.flat.named_formats import NAMED

    known = {name.replace("-", ""): template for name, (template, _) in NAMED.items()}
    if (found := known.get(text.replace("-", ""))) is None:
        names = ", ".join(sorted(NAMED))
        raise UsageError(f"--chat-template {text} is no template and no name of one: {names}")
    return found


def _cache_sizes(arguments: argparse.Namespace) -> Any:
    """The sizes of the prompt cache, None without one. Raises UsageError."""
    from tamis.bindings.serve.supervisor import CacheSizes

    folder = arguments.cache_dir
    if arguments.cache_disk is not None and folder is None:
        raise UsageError("--cache-disk is the space of --cache-dir: name that folder too")
    if arguments.isolate:  # requests share nothing
        if folder is not None or arguments.cache_ram:
            raise UsageError("--isolate keeps no prompts: leave out --cache-ram and --cache-dir")
        return None
    path = None if folder is None else str(Path(folder).absolute())
    return CacheSizes(arguments.cache_ram, path, arguments.cache_disk, arguments.memory)


def _folder(flag: str, path: str | None) -> Path | None:
    """The folder that a flag names. Raises UsageError if it is not a folder."""
    if path is not None and not Path(path).is_dir():
        raise UsageError(f"{flag} {path} is no folder")
    return None if path is None else Path(path).absolute()


def _access(arguments: argparse.Namespace) -> Any:
    """The host names and keys. Raises UsageError for a public address without a key."""
    from tamis.bindings.serve.http.guard import ANY, LOCAL, Access, is_local
    from tamis.bindings.serve.http.listen import hosts_of, is_path

    key = _keys(arguments.api_key, arguments.api_key_file)
    hosts = [host for host in hosts_of(arguments.host) if not is_path(host)]
    if not all(name.strip() for name in arguments.allow_host):
        raise UsageError("--allow-host is empty, expected a name")
    if not all(map(is_local, hosts)) and not key:
        raise UsageError(f"--host {arguments.host} lets other machines in: add --api-key-file")
    names = (*LOCAL, *hosts, *arguments.allow_host)
    origins = tuple(origin.lower().rstrip("/") for origin in arguments.cors_origins)
    if ANY in origins and not key:
        raise UsageError("--cors-origins * lets any site's page in: add --api-key-file")
    return Access(tuple(name.lower() for name in names), key, origins)


def _keys(key: str | None, path: str | None) -> str:
    """The keys of --api-key or --api-key-file, "" if neither is given. Raises UsageError.

    An empty key, as from an unset variable, is an error and does not mean a server without a key.
    """
    from tamis.bindings.serve.http.guard import keys_of

    if path is not None:
        key, name = common.read_text(path) if path else "", path or "--api-key-file"
    elif key is not None:
        name = "--api-key"
    else:
        return ""
    if not (found := keys_of(key)):
        raise UsageError(f"{name} is empty, expected a key")
    if any(c in "\0\v\f\r" for each in found for c in each):
        raise UsageError(f"{name} has a key with a control character, which no header can have")
    return "\n".join(found)


def _log(line: str) -> None:
    note(f"{time.strftime('%H:%M:%S')} {line}")
