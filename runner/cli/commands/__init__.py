"""One file a subcommand of `tamis`, each with `add_arguments(parser)` and `run(arguments)`."""

# The help is here, so that `tamis --help` and `--version` import no command.
COMMANDS = {
    "chat": "chat with a model in the terminal",
    "run": "answer one prompt",
    "serve": "serve the HTTP APIs of OpenAI, Anthropic, ollama and llama.cpp, and a chat page",
    "batch": "answer a file of requests in OpenAI's batch format",
    "ps": "list the models that a running server has loaded",
    "summarize": "summarize documents of any length, or answer questions about them",
    "mcp": "summarize documents and answer questions about them for agents (MCP)",
    "pull": "fetch a model",
    "convert": "write a GGUF file of a folder of safetensors",
    "convert-lora": "write a GGUF file of a LoRA adapter",
    "imatrix": "measure which weights matter, for quantize",
    "quantize": "write a copy of a model with its weights in smaller types",
    "split": "write a model as several files",
    "merge": "write a model of several files as one",
    "edit": "write a copy of a model with other metadata",
    "inspect": "show metadata, tensors and the memory plan of a model",
    "bench": "measure the speed of prompts and decode steps",
    "perplexity": "measure the perplexity of a text",
    "list": "list the installed models",
    "show": "show the properties of a model and the memory that its contexts take",
    "rm": "remove models",
    "cache": "show or clear the caches on disk",
    "config": "show or set the defaults of flags",
    "eval": "measure the quality of attention methods beside dense attention",
    "tokenize": "print the tokens of a text",
    "methods": "list the attention methods of --attn and --prefill",
    "warmup": "compile the kernels of a model ahead of its first use",
    "completion": "print a completion script for a shell",
    "man": "print the manual page",
}


def module_of(command: str) -> str:
    """The name of a command's module."""
    return f"tamis.cli.commands.{command.replace('-', '_')}"
