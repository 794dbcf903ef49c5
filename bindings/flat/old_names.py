"""llama.h's deprecated names, which programs still call: each is an alias of today's name."""

from tamis.bindings.flat import decode, facts, model, state, vocab

llama_load_model_from_file = model.llama_model_load_from_file
llama_free_model = model.llama_model_free
llama_new_context_with_model = decode.llama_init_from_model
llama_n_ctx_train = model.llama_model_n_ctx_train
llama_n_embd = model.llama_model_n_embd
llama_n_layer = model.llama_model_n_layer
llama_n_head = model.llama_model_n_head
llama_rope_type = facts.llama_model_rope_type
llama_n_vocab = vocab.llama_vocab_n_tokens
llama_vocab_cls = vocab.llama_vocab_bos  # as BERT has it
llama_add_bos_token = vocab.llama_vocab_get_add_bos
llama_add_eos_token = vocab.llama_vocab_get_add_eos
llama_token_get_text = vocab.llama_vocab_get_text
llama_token_get_score = vocab.llama_vocab_get_score
llama_token_get_attr = vocab.llama_vocab_get_attr
llama_token_is_eog = vocab.llama_vocab_is_eog
llama_token_is_control = vocab.llama_vocab_is_control
llama_token_bos = llama_token_cls = vocab.llama_vocab_bos
llama_token_eos = vocab.llama_vocab_eos
llama_token_eot = vocab.llama_vocab_eot
llama_token_sep = vocab.llama_vocab_sep
llama_token_nl = vocab.llama_vocab_nl
llama_token_pad = vocab.llama_vocab_pad
llama_token_fim_pre = vocab.llama_vocab_fim_pre
llama_token_fim_suf = vocab.llama_vocab_fim_suf
llama_token_fim_mid = vocab.llama_vocab_fim_mid
llama_token_fim_pad = vocab.llama_vocab_fim_pad
llama_token_fim_rep = vocab.llama_vocab_fim_rep
llama_token_fim_sep = vocab.llama_vocab_fim_sep
llama_get_state_size = state.llama_state_get_size
llama_copy_state_data = state.llama_state_get_data
llama_set_state_data = state.llama_state_set_data
llama_save_session_file = state.llama_state_save_file
llama_load_session_file = state.llama_state_load_file
