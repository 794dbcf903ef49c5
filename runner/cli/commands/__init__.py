"""One file a subcommand of `tamis`, each with `add_arguments(parser)` and `run(arguments)`."""

# The help is here, so that `tamis --help` and `--version` import no command.
COMMANDS = {
    "chat": "talk with a model in the terminal",
    "run": "answer one prompt",
    "serve": "answer programs over HTTP, as OpenAI's API does",
    "batch": "answer a file of requests in OpenAI's batch format",
    "ps": "list the models that a running server has loaded",
    "summarize": "summarize documents of any length, or answer questions about them",
    "pull": "fetch a model",
    "inspect": "show metadata, tensors and the memory plan of a model",
    "bench": "measure prefill and decode",
    "perplexity": "perplexity of a text",
    "list": "list the models that are here",
    "show": "show what a model is, and what memory its contexts take",
    "rm": "remove models",
    "cache": "show or clear what is kept on disk",
    "config": "show or set defaults of flags",
    "eval": "measure what attention methods keep of quality",
    "tokenize": "show the tokens of a text",
    "methods": "list the attention methods of --attn and --prefill",
    "warmup": "compile the kernels of a model now",
    "completion": "print a shell's completion",
    "man": "print the manual page",
}
