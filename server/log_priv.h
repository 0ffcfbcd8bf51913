/* What the files of the log share: log.c (levels, limits), log_line.c (what a line looks like),
 * log_sink.c (where it goes). Nobody else includes this. */
#ifndef DKV_SERVER_LOG_PRIV_H
#define DKV_SERVER_LOG_PRIV_H

#include "server/log.h"

#define DKV_LOG_LINE_BYTES    2048
#define DKV_LOG_MESSAGE_BYTES 640

struct dkv_log_event {
    enum dkv_log_level level;
    const char *message; /* not escaped yet */
    const struct dkv_log_field *fields;
    unsigned n_fields;
};

/* Writes the line into `line`, without a NUL; its length. `priority`: text with the journal's
 * prefix instead of the time. */
size_t dkv_log_line(const struct dkv_log_event *event, enum dkv_log_format format, bool priority,
                    char line[DKV_LOG_LINE_BYTES]);

extern const char *const dkv_log_level_names[5];

void dkv_log_sink_use(enum dkv_log_format format, int fd);

/* One line, formatted as the sink wants it. */
void dkv_log_sink_write(const struct dkv_log_event *event);

#endif
