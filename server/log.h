/* The daemon's log: one line per event on one file descriptor, as text or JSON.
 *
 *   2026-11-29T20:31:41.123Z info  listening on 127.0.0.1:8480
 *   {"time":"2026-11-29T20:31:41.123Z","level":"info","message":"listening on 127.0.0.1:8480"}
 *
 * Levels: error (a person must act), warn (degraded, going on), info (start, stop, backend chosen),
 * debug (per connection), trace (per request). Tensor values and tokens are never logged.
 *
 * Thread  any: a line is one write(), so lines of several threads do not mix. dkv_log_init() comes
 *         before the first thread.
 * Odd     bytes that are not printable ASCII leave as \xNN (text) or \u00NN (JSON), so a client's
 *         text can neither start a line nor move a terminal's cursor. Long lines are cut.
 */
#ifndef DKV_SERVER_LOG_H
#define DKV_SERVER_LOG_H

#include "proto/types.h"

enum dkv_log_level {
    DKV_LOG_ERROR = 0,
    DKV_LOG_WARN,
    DKV_LOG_INFO,
    DKV_LOG_DEBUG,
    DKV_LOG_TRACE,
};

enum dkv_log_format { DKV_LOG_TEXT = 0, DKV_LOG_JSON };

/* Until this is called: text, info, standard error. `fd` is borrowed. */
void dkv_log_init(enum dkv_log_format format, enum dkv_log_level level, int fd);

/* "error", "warn", "info", "debug", "trace"; INFO for anything else. */
enum dkv_log_level dkv_log_level_of(const char *name);

bool dkv_log_enabled(enum dkv_log_level level);

void dkv_log(enum dkv_log_level level, const char *format, ...) DKV_PRINTF(2, 3);

/* A budget for lines that clients can cause: at most `burst` at once, `per_s` a second on average.
 * What was held back is told in one line when the next one passes. Zero is an unused budget with
 * the defaults (10 and 2). One thread at a time per budget. */
struct dkv_log_limit {
    unsigned burst;
    unsigned per_s;
    uint64_t tokens_milli; /* lines left, in thousandths */
    uint64_t last_ms;
    uint64_t held_back;
};

void dkv_log_limited(struct dkv_log_limit *limit, enum dkv_log_level level, const char *format, ...)
    DKV_PRINTF(3, 4);

/* True if a line may pass at `now_ms`; counts it as held back otherwise. */
bool dkv_log_limit_take(struct dkv_log_limit *limit, uint64_t now_ms);

/* Copies `text` with everything but printable ASCII escaped; always ends in NUL, cuts at an escape
 * boundary. Returns the length written. */
size_t dkv_log_escape(char *out, size_t out_bytes, const char *text, enum dkv_log_format format);

#endif
