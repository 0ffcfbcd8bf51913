/* Levels and limits. The message is formatted first and escaped as a whole afterwards: no caller
 * has to remember which of its arguments came from a client. */
#include "server/clock.h"
#include "server/log_priv.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static _Atomic int level_in_force = DKV_LOG_INFO;
static _Atomic uint64_t n_held_back;

const char *const dkv_log_level_names[5] = {"error", "warn", "info", "debug", "trace"};

void dkv_log_init(enum dkv_log_format format, enum dkv_log_level level, int fd)
{
    dkv_log_set_level(level);
    dkv_log_sink_use(format, fd);
}

void dkv_log_set_level(enum dkv_log_level level)
{
    level_in_force = level;
}

enum dkv_log_level dkv_log_level_of(const char *name)
{
    for (int i = 0; i < 5; i++)
        if (strcmp(name, dkv_log_level_names[i]) == 0)
            return (enum dkv_log_level)i;
    return DKV_LOG_INFO;
}

enum dkv_log_format dkv_log_format_of(const char *name)
{
    if (strcmp(name, "json") == 0)
        return DKV_LOG_JSON;
    return strcmp(name, "journald") == 0 ? DKV_LOG_JOURNALD : DKV_LOG_TEXT;
}

bool dkv_log_enabled(enum dkv_log_level level)
{
    return (int)level <= level_in_force;
}

DKV_PRINTF(4, 0)
static void log_va(enum dkv_log_level level, const struct dkv_log_field *fields, unsigned n_fields,
                   const char *format, va_list args)
{
    char message[DKV_LOG_MESSAGE_BYTES];
    vsnprintf(message, sizeof(message), format, args);
    const struct dkv_log_event event = {level, message, fields, n_fields};
    dkv_log_sink_write(&event);
}

void dkv_log(enum dkv_log_level level, const char *format, ...)
{
    va_list args;
    if (!dkv_log_enabled(level))
        return;
    va_start(args, format);
    log_va(level, NULL, 0, format, args);
    va_end(args);
}

void dkv_log_event(enum dkv_log_level level, const struct dkv_log_field *fields, unsigned n_fields,
                   const char *format, ...)
{
    va_list args;
    if (!dkv_log_enabled(level))
        return;
    va_start(args, format);
    log_va(level, fields, n_fields, format, args);
    va_end(args);
}

bool dkv_log_limit_take(struct dkv_log_limit *limit, uint64_t now_ms)
{
    if (limit->burst == 0) {
        limit->burst = 10;
        limit->per_s = 2;
    }
    const uint64_t full = (uint64_t)limit->burst * 1000;
    if (limit->last_ms == 0) {
        limit->tokens_milli = full;
    } else {
        /* A minute fills any bucket; the bound keeps the product small. */
        uint64_t elapsed_ms = now_ms - limit->last_ms;
        elapsed_ms = elapsed_ms < 60000 ? elapsed_ms : 60000;
        limit->tokens_milli += elapsed_ms * limit->per_s;
        limit->tokens_milli = limit->tokens_milli < full ? limit->tokens_milli : full;
    }
    limit->last_ms = now_ms;
    if (limit->tokens_milli < 1000) {
        limit->held_back++;
        n_held_back++;
        return false;
    }
    limit->tokens_milli -= 1000;
    return true;
}

bool dkv_log_may(struct dkv_log_limit *limit, enum dkv_log_level level)
{
    if (!dkv_log_enabled(level) || !dkv_log_limit_take(limit, dkv_clock_ms()))
        return false;
    if (limit->held_back > 0) {
        dkv_log(level, "%llu lines like the next one were held back",
                (unsigned long long)limit->held_back);
        limit->held_back = 0;
    }
    return true;
}

void dkv_log_limited(struct dkv_log_limit *limit, enum dkv_log_level level, const char *format, ...)
{
    va_list args;
    if (!dkv_log_may(limit, level))
        return;
    va_start(args, format);
    log_va(level, NULL, 0, format, args);
    va_end(args);
}

uint64_t dkv_log_n_held_back(void)
{
    return n_held_back;
}
