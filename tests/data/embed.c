/* usage: embed MODEL PROMPT N: prints N greedy tokens, each in a line; then what errors give. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tamis.h"

static int n_asked = 0;

static bool never(void * data) {
    n_asked++;
    return data != NULL;
}

int main(int argc, char ** argv) {
    if (argc != 4) return 2;
    const char * prompt = argv[2];
    llama_backend_init();
    struct llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (model == NULL) {
        fprintf(stderr, "%s\n", tamis_last_error());
        return 1;
    }
    const struct llama_vocab * vocab_c = llama_model_get_vocab(model);
    struct llama_vocab * vocab = (struct llama_vocab *)vocab_c;
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = 256;
    params.abort_callback = never;
    struct llama_context * ctx = llama_init_from_model(model, params);

    int n = -llama_tokenize(vocab, prompt, (int32_t)strlen(prompt), NULL, 0, true, false);
    llama_token * tokens = malloc(sizeof(llama_token) * (size_t)n);
    if (llama_tokenize(vocab, prompt, (int32_t)strlen(prompt), tokens, n, true, false) != n) return 3;

    struct llama_sampler * chain = llama_sampler_chain_init(llama_sampler_chain_default_params());
    llama_sampler_chain_add(chain, llama_sampler_init_greedy());

    llama_batch first = llama_batch_init(n, 0, 1);
    first.n_tokens = n;
    for (int i = 0; i < n; i++) {
        first.token[i] = tokens[i];
        first.pos[i] = i;
        first.n_seq_id[i] = 1;
        first.seq_id[i][0] = 0;
        first.logits[i] = i == n - 1;
    }
    int code = llama_decode(ctx, first);
    llama_batch_free(first);
    llama_batch_free(first);
    for (int i = 0; code == 0 && i < atoi(argv[3]); i++) {
        llama_token token = llama_sampler_sample(chain, ctx, -1);
        const float * logits = llama_get_logits_ith(ctx, -1);
        for (int k = 0; k < llama_vocab_n_tokens(vocab); k++)
            if (logits[k] > logits[token]) return 4;
        char piece[64];
        int length = llama_token_to_piece(vocab, token, piece, sizeof piece, 0, true);
        printf("%d %.*s\n", token, length, piece);
        code = llama_decode(ctx, llama_batch_get_one(&token, 1));
    }

    struct llama_chat_message message = {"user", "hi"};
    char text[256];
    int length = llama_chat_apply_template(NULL, &message, 1, true, text, sizeof text);
    printf("chat %d\n", length);
    printf("position %d\n", llama_memory_seq_pos_max(llama_get_memory(ctx), 0));
    size_t size = llama_state_get_size(ctx);
    uint8_t * state = malloc(size);
    size_t got = llama_state_get_data(ctx, state, size);
    state[size / 2] ^= 1;
    printf("state %d %d\n", got == size, (int)llama_state_set_data(ctx, state, size));
    printf("asked %d\n", n_asked > 0);
    llama_sampler_free(chain);
    int once = llama_free(ctx);
    printf("free %d %d\n", once, llama_free(ctx));
    llama_model_free(model);
    int stale = llama_model_n_embd(model);
    printf("stale %d: %s\n", stale, tamis_last_error());
    free(tokens);
    free(state);
    return code;
}
