/* Bearer tokens: who may use the HTTP front.
 *
 * The file has one token a line, at least 32 printable characters without spaces, optionally after
 * a client's name and a space; lines that are empty or start with # are skipped. It must be a
 * regular file that nobody but its owner can read (mode 0600 or 0400), or, where that
 * is another user, the group that the daemon runs as (0640 or 0440).
 *
 * Owner   load/fini. fini() wipes the tokens.
 * Thread  loop only.
 * Errors  IO, DENIED (mode), INVALID (content); the text never holds a token. A failed load leaves
 *         the tokens in force as they were, so that a reload cannot lock everybody out.
 */
#ifndef DKV_SERVER_AUTH_H
#define DKV_SERVER_AUTH_H

#include "proto/types.h"

#define DKV_TOKENS_MAX_COUNT  64
#define DKV_TOKEN_MIN_BYTES   32
#define DKV_TOKEN_MAX_BYTES   256
#define DKV_CLIENT_NAME_BYTES 32

struct dkv_token {
    char client[DKV_CLIENT_NAME_BYTES + 1];
    unsigned char bytes[DKV_TOKEN_MAX_BYTES];
    size_t n_bytes;
};

struct dkv_auth {
    bool required; /* false: no token file, everybody on loopback may */
    unsigned n_tokens;
    struct dkv_token tokens[DKV_TOKENS_MAX_COUNT];
};

/* `path` "" means no tokens. */
enum dkv_status dkv_auth_load(struct dkv_auth *auth, const char *path, struct dkv_error *err);
void dkv_auth_fini(struct dkv_auth *auth);

/* Judges an Authorization header (NULL: there is none). The time does not depend on where a wrong
 * token differs, nor on which of the tokens it resembles. Returns the client's name, or NULL. */
const char *dkv_auth_check(const struct dkv_auth *auth, const char *authorization);

/* The same for a token by itself, of `n` bytes: a password that a browser sent. */
const char *dkv_auth_check_token(const struct dkv_auth *auth, const char *token, size_t n);

#endif
