/* The daemon's log: one line per event, as text, as JSON or to the journal.
 *
 *   2026-11-29T20:31:41.123Z info  listening on 127.0.0.1:8480
 *   2026-11-29T20:31:45.001Z debug answered request 12: transport http, stream chat-7, ...
 *   {"time":"2026-11-29T20:31:45.001Z","level":"debug","message":"answered request 12",
 *    "transport":"http","stream":"chat-7","blocks":6, ...}
 *
 * Levels: error (a person must act), warn (degraded, going on), info (start, stop, backend chosen),
 * debug (per request, per connection), trace (more of the same). Tensor values and tokens are never
 * logged.
 *
 * Thread  any: a line is one write(), so lines of several threads do not mix. init() or open()
 *         comes before the first thread.
 * Odd     bytes that are not printable ASCII leave as \xNN (text, journal) or \u00NN (JSON), so a
 *         client's text can neither start a line nor move a terminal's cursor. Long lines are cut,
 *         JSON still closed. A line that cannot be written is lost and counted; nothing waits.
 */
#ifndef DKV_SERVER_LOG_H
#define DKV_SERVER_LOG_H

#include "proto/types.h"

#define DKV_LOG_PATH_BYTES     256 /* of a log file's name, with its end */
#define DKV_LOG_JOURNAL_SOCKET "/run/systemd/journal/socket"

enum dkv_log_level {
    DKV_LOG_ERROR = 0,
    DKV_LOG_WARN,
    DKV_LOG_INFO,
    DKV_LOG_DEBUG,
    DKV_LOG_TRACE,
};

/* JOURNALD: the journal's own datagrams, in which every field can be searched for. TEXT knows a
 * standard error that leads to the journal ($JOURNAL_STREAM): its lines then bear the priority in
 * front, as sd-daemon(3) has it, and no time, which the journal adds itself. */
enum dkv_log_format { DKV_LOG_TEXT = 0, DKV_LOG_JSON, DKV_LOG_JOURNALD };

/* Something that belongs to an event and has a name of its own: "queue_us". In the journal it is
 * DROPKV_QUEUE_US. */
struct dkv_log_field {
    const char *name; /* lower case letters and _ */
    const char *text; /* or NULL: */
    uint64_t number;
};

/* Until this or open() is called: text, info, standard error. `fd` is borrowed. */
void dkv_log_init(enum dkv_log_format format, enum dkv_log_level level, int fd);

/* `path` "" is standard error, or the journal's socket; else a file to append to, or another socket
 * of a journal. IO, INVALID (name too long): nothing was changed. */
enum dkv_status dkv_log_open(enum dkv_log_format format, enum dkv_log_level level, const char *path,
                             struct dkv_error *err);

/* Goes on in a new file of the same name, after the old one was renamed: no line is lost or
 * split. False if it cannot be opened; then the old one stays. Also from a signal handler. */
bool dkv_log_reopen(void);

void dkv_log_set_level(enum dkv_log_level level);

/* "error", "warn", "info", "debug", "trace"; INFO for anything else. "text", "json", "journald";
 * TEXT for anything else. */
enum dkv_log_level dkv_log_level_of(const char *name);
enum dkv_log_format dkv_log_format_of(const char *name);

bool dkv_log_enabled(enum dkv_log_level level);

void dkv_log(enum dkv_log_level level, const char *format, ...) DKV_PRINTF(2, 3);

/* A message with fields behind it, which may be none. */
void dkv_log_event(enum dkv_log_level level, const struct dkv_log_field *fields, unsigned n_fields,
                   const char *format, ...) DKV_PRINTF(4, 5);

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

/* Asks for one line of `level`: true if it may be logged now, after a line about what was held
 * back before, if anything was. */
bool dkv_log_may(struct dkv_log_limit *limit, enum dkv_log_level level);

/* Since the start of the process: lines held back by limits, lines that could not be written. */
uint64_t dkv_log_n_held_back(void);
uint64_t dkv_log_n_lost(void);

/* Copies `text` with everything but printable ASCII escaped; always ends in NUL, cuts at an escape
 * boundary. Returns the length written. */
size_t dkv_log_escape(char *out, size_t out_bytes, const char *text, enum dkv_log_format format);

#endif
