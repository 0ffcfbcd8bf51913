/* What a line looks like in each format.
 *
 * A line is built in a buffer on the stack. What does not fit is left out field by field, and room
 * for the end is kept, so that a cut line is still one line, and still JSON.
 */
#include "server/log_priv.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define END_BYTES   4   /* closes any line */
#define VALUE_BYTES 800 /* of a message or a field, escaped */

struct line {
    char *text;
    size_t used;
};

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

/* Adds all of it or nothing. */
DKV_PRINTF(2, 3)
static void add(struct line *line, const char *format, ...)
{
    const size_t room = DKV_LOG_LINE_BYTES - END_BYTES - line->used;
    va_list args;
    va_start(args, format);
    const int n = vsnprintf(line->text + line->used, room, format, args);
    va_end(args);
    if (n > 0 && (size_t)n < room)
        line->used += (size_t)n;
}

static void end(struct line *line, const char *text)
{
    const size_t n = strlen(text);
    memcpy(line->text + line->used, text, n);
    line->used += n;
}

static void add_time(struct line *line, const char *before, const char *after)
{
    struct timespec now;
    struct tm utc;
    char seconds[32];
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &utc);
    strftime(seconds, sizeof(seconds), "%Y-%m-%dT%H:%M:%S", &utc);
    add(line, "%s%s.%03ldZ%s", before, seconds, now.tv_nsec / 1000000, after);
}

/* As syslog(3) numbers them. */
static int priority_of(enum dkv_log_level level)
{
    static const int priorities[] = {3, 4, 6, 7, 7};
    return priorities[level];
}

static void add_json(struct line *line, const struct dkv_log_event *event)
{
    char value[VALUE_BYTES];
    add_time(line, "{\"time\":\"", "\",");
    dkv_log_escape(value, sizeof(value), event->message, DKV_LOG_JSON);
    add(line, "\"level\":\"%s\",\"message\":\"%s\"", dkv_log_level_names[event->level], value);
    for (unsigned i = 0; i < event->n_fields; i++) {
        const struct dkv_log_field *field = &event->fields[i];
        if (field->text == NULL) {
            add(line, ",\"%s\":%llu", field->name, (unsigned long long)field->number);
            continue;
        }
        dkv_log_escape(value, sizeof(value), field->text, DKV_LOG_JSON);
        add(line, ",\"%s\":\"%s\"", field->name, value);
    }
    end(line, "}\n");
}

/* The message and its fields, for people. */
static void add_words(struct line *line, const struct dkv_log_event *event)
{
    char value[VALUE_BYTES];
    dkv_log_escape(value, sizeof(value), event->message, DKV_LOG_TEXT);
    add(line, "%s", value);
    for (unsigned i = 0; i < event->n_fields; i++) {
        const struct dkv_log_field *field = &event->fields[i];
        const char *before = i == 0 ? ":" : ",";
        if (field->text == NULL) {
            add(line, "%s %s %llu", before, field->name, (unsigned long long)field->number);
            continue;
        }
        dkv_log_escape(value, sizeof(value), field->text, DKV_LOG_TEXT);
        add(line, "%s %s %s", before, field->name, value);
    }
}

static void add_text(struct line *line, const struct dkv_log_event *event, bool priority)
{
    if (priority)
        add(line, "<%d>", priority_of(event->level));
    else
        add_time(line, "", " ");
    if (!priority)
        add(line, "%-5s ", dkv_log_level_names[event->level]);
    add_words(line, event);
    end(line, "\n");
}

/* The journal's native form: NAME=value lines. No value can hold a line's end, since all are
 * escaped, so its form for binary values is not needed. */
static void add_journal(struct line *line, const struct dkv_log_event *event)
{
    char value[VALUE_BYTES], name[48];
    add(line, "PRIORITY=%d\nSYSLOG_IDENTIFIER=dropkvd\nMESSAGE=", priority_of(event->level));
    add_words(line, event);
    for (unsigned i = 0; i < event->n_fields; i++) {
        const struct dkv_log_field *field = &event->fields[i];
        size_t n = 0;
        for (; field->name[n] != '\0' && n + 1 < sizeof(name); n++)
            name[n] = (char)toupper((unsigned char)field->name[n]);
        name[n] = '\0';
        if (field->text == NULL) {
            add(line, "\nDROPKV_%s=%llu", name, (unsigned long long)field->number);
            continue;
        }
        dkv_log_escape(value, sizeof(value), field->text, DKV_LOG_TEXT);
        add(line, "\nDROPKV_%s=%s", name, value);
    }
    end(line, "\n");
}

size_t dkv_log_line(const struct dkv_log_event *event, enum dkv_log_format format, bool priority,
                    char text[DKV_LOG_LINE_BYTES])
{
    struct line line = {text, 0};
    switch (format) {
    case DKV_LOG_JSON: add_json(&line, event); break;
    case DKV_LOG_JOURNALD: add_journal(&line, event); break;
    case DKV_LOG_TEXT: add_text(&line, event, priority); break;
    }
    return line.used;
}
