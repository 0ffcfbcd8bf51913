/* One line per event.
 *
 * The message is formatted first and escaped as a whole afterwards: no caller has to remember which
 * of its arguments came from a client. The line is built in a buffer on the stack and leaves in one
 * write(), which keeps lines whole when threads log at once; a pipe or file that cannot take it
 * loses that line rather than stalling the loop.
 */
#include "server/log.h"

#include "server/clock.h"

#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define LINE_BYTES    1024
#define MESSAGE_BYTES 640

static struct {
    enum dkv_log_format format;
    enum dkv_log_level level;
    int fd;
} config = {DKV_LOG_TEXT, DKV_LOG_INFO, STDERR_FILENO};

static const char *const level_names[] = {"error", "warn", "info", "debug", "trace"};

void dkv_log_init(enum dkv_log_format format, enum dkv_log_level level, int fd)
{
    config.format = format;
    config.level = level;
    config.fd = fd;
}

enum dkv_log_level dkv_log_level_of(const char *name)
{
    static const char *const names[] = {"error", "warn", "info", "debug", "trace"};
    for (int i = 0; i < 5; i++)
        if (strcmp(name, names[i]) == 0)
            return (enum dkv_log_level)i;
    return DKV_LOG_INFO;
}

bool dkv_log_enabled(enum dkv_log_level level)
{
    return level <= config.level;
}

/* The escape of one byte: its text in `out` (at least 8 bytes), its length as result. */
static size_t escape_byte(char *out, unsigned char byte, enum dkv_log_format format)
{
    if (format == DKV_LOG_JSON) {
        if (byte == '"' || byte == '\\')
            return (size_t)snprintf(out, 8, "\\%c", byte);
        if (byte < 0x20 || byte >= 0x7f)
            return (size_t)snprintf(out, 8, "\\u%04x", byte);
    } else {
        if (byte == '\\')
            return (size_t)snprintf(out, 8, "\\\\");
        if (byte < 0x20 || byte >= 0x7f)
            return (size_t)snprintf(out, 8, "\\x%02x", byte);
    }
    out[0] = (char)byte;
    return 1;
}

size_t dkv_log_escape(char *out, size_t out_bytes, const char *text, enum dkv_log_format format)
{
    size_t used = 0;
    for (; *text != '\0'; text++) {
        char piece[8];
        size_t length = escape_byte(piece, (unsigned char)*text, format);
        if (used + length >= out_bytes)
            break;
        memcpy(out + used, piece, length);
        used += length;
    }
    out[used] = '\0';
    return used;
}

static void format_time(char *out, size_t out_bytes)
{
    struct timespec now;
    struct tm utc;
    char seconds[32];
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &utc);
    strftime(seconds, sizeof(seconds), "%Y-%m-%dT%H:%M:%S", &utc);
    snprintf(out, out_bytes, "%s.%03ldZ", seconds, now.tv_nsec / 1000000);
}

static void write_line(enum dkv_log_level level, const char *message)
{
    char time_text[48];
    char escaped[LINE_BYTES - 128];
    char line[LINE_BYTES];
    format_time(time_text, sizeof(time_text));
    dkv_log_escape(escaped, sizeof(escaped), message, config.format);
    int length = config.format == DKV_LOG_JSON
                     ? snprintf(line, sizeof(line),
                                "{\"time\":\"%s\",\"level\":\"%s\",\"message\":\"%s\"}\n",
                                time_text, level_names[level], escaped)
                     : snprintf(line, sizeof(line), "%s %-5s %s\n", time_text, level_names[level],
                                escaped);
    if (length > 0 && write(config.fd, line, (size_t)length) < 0)
        return; /* nowhere left to say so */
}

DKV_PRINTF(2, 0)
static void log_va(enum dkv_log_level level, const char *format, va_list args)
{
    char message[MESSAGE_BYTES];
    vsnprintf(message, sizeof(message), format, args);
    write_line(level, message);
}

void dkv_log(enum dkv_log_level level, const char *format, ...)
{
    va_list args;
    if (!dkv_log_enabled(level))
        return;
    va_start(args, format);
    log_va(level, format, args);
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
        return false;
    }
    limit->tokens_milli -= 1000;
    return true;
}

void dkv_log_limited(struct dkv_log_limit *limit, enum dkv_log_level level, const char *format, ...)
{
    va_list args;
    if (!dkv_log_enabled(level) || !dkv_log_limit_take(limit, dkv_clock_ms()))
        return;
    if (limit->held_back > 0) {
        dkv_log(level, "%llu lines like the next one were held back",
                (unsigned long long)limit->held_back);
        limit->held_back = 0;
    }
    va_start(args, format);
    log_va(level, format, args);
    va_end(args);
}
