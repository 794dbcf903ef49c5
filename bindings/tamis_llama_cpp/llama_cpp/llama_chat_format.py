"""Chat formats: formatters, handlers, and their registry."""

from typing import Any

from tamis.bindings.drop_in.formatters import (
    ChatFormatter,
    ChatFormatterResponse,
    Jinja2ChatFormatter,
    LlamaChatCompletionHandler,
    LlamaChatCompletionHandlerNotFoundException,
    LlamaChatCompletionHandlerRegistry,
    chat_formatter_to_chat_completion_handler,
    get_chat_completion_handler,
    guess_chat_format_from_gguf_metadata,
    hf_tokenizer_config_to_chat_completion_handler,
    hf_tokenizer_config_to_chat_formatter,
    named_formatter,
    register_chat_completion_handler,
    register_chat_format,
)
from tamis.bindings.drop_in.pictures import MTMDChatHandler
from tamis.bindings.flat.named_formats import NAMED

CHATML_CHAT_TEMPLATE = NAMED["chatml"][0]
CHATML_BOS_TOKEN, CHATML_EOS_TOKEN = "<s>", "<|im_end|>"
MISTRAL_INSTRUCT_CHAT_TEMPLATE = MIXTRAL_INSTRUCT_CHAT_TEMPLATE = NAMED["mistral-instruct"][0]
MISTRAL_INSTRUCT_BOS_TOKEN, MISTRAL_INSTRUCT_EOS_TOKEN = "<s>", "</s>"
LLAMA3_INSTRUCT_CHAT_TEMPLATE = NAMED["llama-3"][0]

format_alpaca = named_formatter("alpaca")
format_baichuan = named_formatter("baichuan")
format_baichuan2 = named_formatter("baichuan-2")
format_chatglm3 = named_formatter("chatglm3")
format_chatml = named_formatter("chatml")
format_gemma = named_formatter("gemma")
format_intel = named_formatter("intel")
format_llama2 = named_formatter("llama-2")
format_llama3 = named_formatter("llama-3")
format_mistral_instruct = named_formatter("mistral-instruct")
format_mistrallite = named_formatter("mistrallite")
format_oasst_llama = named_formatter("oasst_llama")
format_open_orca = named_formatter("open-orca")
format_openbuddy = named_formatter("openbuddy")
format_openchat = named_formatter("openchat")
format_phind = named_formatter("phind")
format_pygmalion = named_formatter("pygmalion")
format_qwen = named_formatter("qwen")
format_redpajama_incite = named_formatter("redpajama-incite")
format_saiga = named_formatter("saiga")
format_snoozy = named_formatter("snoozy")
format_zephyr = named_formatter("zephyr")
format = named_formatter("vicuna")  # its name in llama_cpp
chatml_function_calling = get_chat_completion_handler("chatml-function-calling")


def hf_autotokenizer_to_chat_formatter(pretrained_model_name_or_path: str) -> ChatFormatter:
    """A formatter of the package transformers. Raises ImportError without it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(pretrained_model_name_or_path)

    def formatter(*, messages: Any, **kwargs: Any) -> ChatFormatterResponse:
        tokenizer.use_default_system_prompt = False
        prompt = tokenizer.apply_chat_template(list(messages), tokenize=False)
        return ChatFormatterResponse(prompt, tokenizer.eos_token, added_special=True)

    return formatter


def hf_autotokenizer_to_chat_completion_handler(
    pretrained_model_name_or_path: str,
) -> LlamaChatCompletionHandler:
    """A handler of the package transformers. Raises ImportError without it."""
    formatter = hf_autotokenizer_to_chat_formatter(pretrained_model_name_or_path)
    return chat_formatter_to_chat_completion_handler(formatter)


# The mmproj file says how pictures are cut, whatever the family's handler is called.
Llava15ChatHandler = MTMDChatHandler
Llava16ChatHandler = MTMDChatHandler
Gemma4ChatHandler = MTMDChatHandler
ObsidianChatHandler = MTMDChatHandler
MoondreamChatHandler = MTMDChatHandler
NanoLlavaChatHandler = MTMDChatHandler
Llama3VisionAlphaChatHandler = MTMDChatHandler
MiniCPMv26ChatHandler = MTMDChatHandler
Qwen25VLChatHandler = MTMDChatHandler
Llama3VisionAlpha = MTMDChatHandler

__all__ = [
    "ChatFormatter",
    "ChatFormatterResponse",
    "Jinja2ChatFormatter",
    "LlamaChatCompletionHandler",
    "LlamaChatCompletionHandlerNotFoundException",
    "LlamaChatCompletionHandlerRegistry",
    "MTMDChatHandler",
    "chat_formatter_to_chat_completion_handler",
    "get_chat_completion_handler",
    "guess_chat_format_from_gguf_metadata",
    "hf_autotokenizer_to_chat_completion_handler",
    "hf_autotokenizer_to_chat_formatter",
    "hf_tokenizer_config_to_chat_completion_handler",
    "hf_tokenizer_config_to_chat_formatter",
    "register_chat_completion_handler",
    "register_chat_format",
]
