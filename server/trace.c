/* OTLP/JSON by hand would be easy to get wrong in the quoting, so jansson makes it. Numbers of 64
 * bits are strings there, identifiers hexadecimal, enumerations numbers: that is the standard's
 * JSON, not protobuf's. */
#include "server/trace.h"

#include "server/clock.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

enum { SPAN_INTERNAL = 1, SPAN_SERVER = 2 };
enum { STATUS_OK = 1, STATUS_ERROR = 2 };

/* ---- the header ---- */

/* `n` lower case hexadecimal digits followed by `end`, not all 0 unless that is allowed. */
static bool is_hex(const char *text, size_t n, bool may_be_zero)
{
    return strspn(text, "0123456789abcdef") >= n && (may_be_zero || strspn(text, "0") < n);
}

bool dkv_trace_parse(const char *text, struct dkv_trace *trace_out)
{
    *trace_out = (struct dkv_trace){0};
    const size_t n = strlen(text);
    const bool version_0 = strncmp(text, "00", 2) == 0;
    if (n < 55 || (version_0 && n != 55) || (n > 55 && text[55] != '-'))
        return false;
    if (!is_hex(text, 2, true) || strncmp(text, "ff", 2) == 0 || text[2] != '-' ||
        !is_hex(text + 3, 32, false) || text[35] != '-' || !is_hex(text + 36, 16, false) ||
        text[52] != '-' || !is_hex(text + 53, 2, true))
        return false;
    memcpy(trace_out->trace_id, text + 3, 32);
    memcpy(trace_out->parent_id, text + 36, 16);
    memcpy(trace_out->text, text, 55);
    const char low = text[54];
    trace_out->sampled = ((low <= '9' ? low - '0' : low - 'a' + 10) & 1) != 0;
    return true;
}

/* ---- the file ---- */

static int open_file(const char *path)
{
    return open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOCTTY | O_NONBLOCK, 0640);
}

enum dkv_status dkv_trace_open(struct dkv_trace_file *file, const char *path, uint64_t every,
                               struct dkv_error *err)
{
    *file = (struct dkv_trace_file){.fd = -1, .every = every};
    if (*path == '\0')
        return DKV_OK;
    if (strlen(path) >= sizeof(file->path))
        return dkv_error_set(err, DKV_E_INVALID, "trace_file: %zu characters, at most %zu",
                             strlen(path), sizeof(file->path) - 1);
    strcpy(file->path, path);
    return dkv_trace_reopen(file, err);
}

enum dkv_status dkv_trace_reopen(struct dkv_trace_file *file, struct dkv_error *err)
{
    if (*file->path == '\0')
        return DKV_OK;
    const int fd = open_file(file->path);
    if (fd < 0)
        return dkv_error_set(err, DKV_E_IO, "trace_file: cannot open %.120s: %s", file->path,
                             strerror(errno));
    if (file->fd >= 0)
        close(file->fd);
    file->fd = fd;
    return DKV_OK;
}

void dkv_trace_close(struct dkv_trace_file *file)
{
    if (*file->path != '\0' && file->fd >= 0)
        close(file->fd);
    file->fd = -1;
}

/* ---- spans ---- */

static void random_hex(char *out, size_t n_digits)
{
    unsigned char bytes[16];
    if (getrandom(bytes, n_digits / 2, 0) != (ssize_t)(n_digits / 2))
        memset(bytes, 1, sizeof(bytes)); /* cannot happen once the system is up */
    for (size_t i = 0; i < n_digits / 2; i++)
        snprintf(out + 2 * i, 3, "%02x", bytes[i]);
}

static json_t *text_attribute(const char *key, const char *value)
{
    return json_pack("{s:s, s:{s:s}}", "key", key, "value", "stringValue", value);
}

static json_t *number_attribute(const char *key, uint64_t value)
{
    char digits[24];
    snprintf(digits, sizeof(digits), "%llu", (unsigned long long)value);
    return json_pack("{s:s, s:{s:s}}", "key", key, "value", "intValue", digits);
}

/* Wall clock of a moment of the monotonic one. */
struct clocks {
    uint64_t real_ns, monotonic_ns;
};

static struct clocks read_clocks(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (struct clocks){(uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec,
                           dkv_clock_ns()};
}

static json_t *time_text(const struct clocks *clocks, uint64_t at_ns)
{
    char digits[24];
    snprintf(digits, sizeof(digits), "%llu",
             (unsigned long long)(clocks->real_ns - (clocks->monotonic_ns - at_ns)));
    return json_string(digits);
}

static json_t *new_span(const char *trace_id, const char *parent_id, const char *id,
                        const char *name, int kind, const struct clocks *clocks, uint64_t from_ns,
                        uint64_t to_ns)
{
    json_t *span = json_pack("{s:s, s:s, s:s, s:i, s:o, s:o}", "traceId", trace_id, "spanId", id,
                             "name", name, "kind", kind, "startTimeUnixNano",
                             time_text(clocks, from_ns), "endTimeUnixNano",
                             time_text(clocks, to_ns));
    if (parent_id != NULL)
        json_object_set_new(span, "parentSpanId", json_string(parent_id));
    return span;
}

static void add_stage(json_t *spans, const char *trace_id, const char *parent_id, const char *name,
                      const struct clocks *clocks, uint64_t from_ns, uint64_t to_ns)
{
    char id[17];
    if (from_ns == 0 || to_ns < from_ns)
        return; /* never reached */
    random_hex(id, 16);
    json_array_append_new(
        spans, new_span(trace_id, parent_id, id, name, SPAN_INTERNAL, clocks, from_ns, to_ns));
}

static json_t *attributes_of(const struct dkv_trace_request *request)
{
    json_t *list = json_array();
    json_array_append_new(list, text_attribute("dropkv.outcome", request->outcome));
    json_array_append_new(list, text_attribute("dropkv.transport", request->transport));
    json_array_append_new(list, number_attribute("dropkv.request", request->number));
    if (*request->stream != '\0')
        json_array_append_new(list, text_attribute("dropkv.stream", request->stream));
    json_array_append_new(list, number_attribute("dropkv.blocks", request->blocks));
    json_array_append_new(list, number_attribute("dropkv.tokens", request->tokens));
    json_array_append_new(list, number_attribute("dropkv.kept", request->kept));
    json_array_append_new(list, number_attribute("dropkv.bytes", request->bytes));
    return list;
}

static json_t *spans_of(const struct dkv_trace_request *request)
{
    const struct clocks clocks = read_clocks();
    const bool has_parent = request->trace != NULL && *request->trace->trace_id != '\0';
    char trace_id[33], id[17];
    json_t *spans = json_array();
    random_hex(id, 16);
    if (has_parent)
        memcpy(trace_id, request->trace->trace_id, sizeof(trace_id));
    else
        random_hex(trace_id, 32);
    json_t *root = new_span(trace_id, has_parent ? request->trace->parent_id : NULL, id,
                            "dropkv.score", SPAN_SERVER, &clocks,
                            request->started_ns != 0 ? request->started_ns : clocks.monotonic_ns,
                            clocks.monotonic_ns);
    json_object_set_new(root, "attributes", attributes_of(request));
    json_object_set_new(root, "status",
                        request->error == NULL ? json_pack("{s:i}", "code", STATUS_OK)
                                               : json_pack("{s:i, s:s}", "code", STATUS_ERROR,
                                                           "message", request->error));
    json_array_append_new(spans, root);
    add_stage(spans, trace_id, id, "dropkv.receive", &clocks, request->started_ns,
              request->queued_ns);
    add_stage(spans, trace_id, id, "dropkv.queue", &clocks, request->queued_ns,
              request->launched_ns);
    add_stage(spans, trace_id, id, "dropkv.device", &clocks, request->launched_ns,
              request->finished_ns);
    return spans;
}

static bool is_wanted(struct dkv_trace_file *file, const struct dkv_trace *trace)
{
    if (file->fd < 0)
        return false;
    if (trace != NULL && *trace->trace_id != '\0')
        return trace->sampled;
    return file->every != 0 && file->n_untraced++ % file->every == 0;
}

void dkv_trace_write(struct dkv_trace_file *file, const struct dkv_trace_request *request)
{
    if (!is_wanted(file, request->trace))
        return;
    json_t *spans = spans_of(request);
    const size_t n_spans = json_array_size(spans);
    json_t *root = json_pack("{s:[{s:{s:[o, o]}, s:[{s:{s:s, s:s}, s:o}]}]}", "resourceSpans",
                             "resource", "attributes", text_attribute("service.name", "dropkvd"),
                             text_attribute("service.version", DKV_VERSION), "scopeSpans", "scope",
                             "name", "dropkvd", "version", DKV_VERSION, "spans", spans);
    char *text = json_dumps(root, JSON_COMPACT);
    json_decref(root);
    const size_t n = text != NULL ? strlen(text) : 0;
    if (n > 0)
        text[n] = '\n'; /* over the NUL: the line leaves by its length */
    if (n > 0 && write(file->fd, text, n + 1) == (ssize_t)n + 1)
        file->n_spans += n_spans;
    else
        file->n_lost += n_spans;
    free(text);
}
