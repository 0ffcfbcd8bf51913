/* The table of fields and the rules that judge their values.
 *
 * Every source ends in dkv_config_set() with text, also the JSON file: one parser, one set of
 * messages, and a number too large for one source is too large for all. A field is added with one
 * member, one row, and nothing else.
 */
#include "server/config.h"

#include "proto/oip.h"
#include "server/backend.h"
#include "server/listen.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#define KIB (UINT64_C(1) << 10)
#define MIB (UINT64_C(1) << 20)
#define GIB (UINT64_C(1) << 30)
#define TIB (UINT64_C(1) << 40)

static const char *const log_formats[] = {"text", "json", "journald", NULL};
static const char *const log_levels[] = {"error", "warn", "info", "debug", "trace", NULL};

#define TEXT(member, default_text, choices, help)                                          \
    {                                                                                      \
#member, DKV_CONFIG_TEXT, offsetof(struct dkv_config, member), default_text, 0, 0, \
            choices, "", help, false                                                       \
    }
#define LIST(member, default_text, help)                                                         \
    {                                                                                            \
#member, DKV_CONFIG_TEXT, offsetof(struct dkv_config, member), default_text, 0, 0, NULL, \
            "", help, true                                                                       \
    }
#define FLAG(member, default_text, help)                                                         \
    {                                                                                            \
#member, DKV_CONFIG_BOOL, offsetof(struct dkv_config, member), default_text, 0, 0, NULL, \
            "", help, false                                                                      \
    }
#define NUMBER(member, default_text, min, max, unit, help)                                    \
    {                                                                                         \
#member, DKV_CONFIG_U64, offsetof(struct dkv_config, member), default_text, min, max, \
            NULL, unit, help, false                                                           \
    }

const struct dkv_config_field dkv_config_fields[DKV_CONFIG_FIELDS] = {
    TEXT(http, "127.0.0.1:8480", NULL, "Where to listen for HTTP: ADDRESS:PORT, or off"),
    TEXT(socket, "", NULL,
         "Path of the local socket, or off; none: $XDG_RUNTIME_DIR/dropkv/dropkvd.sock, else "
         "/run/dropkv/dropkvd.sock"),
    TEXT(socket_group, "", NULL,
         "Group, by name or number, whose members may connect to the local socket too"),
    TEXT(port_file, "", NULL, "Write the port in use to this file once listening"),
    LIST(device, "cpu", "Device that computes: cpu, or cuda:N; may be given several times"),
    TEXT(cpu_mask, "", NULL, "Instruction sets the CPU engine may use, as DKV_CPU_MASK"),
    TEXT(token_file, "", NULL, "File of bearer tokens, one a line, mode 0600 or 0400"),
    TEXT(log_format, "text", log_formats, "Form of the log"),
    TEXT(log_level, "info", log_levels, "How much to log"),
    TEXT(log_file, "", NULL,
         "Append the log to this file, or send it to this journal socket; none: standard error, or "
         "the system's journal"),
    TEXT(trace_file, "", NULL, "Append spans of requests to this file, as OTLP/JSON lines"),
    FLAG(behind_proxy, "false",
         "A TLS-terminating proxy stands before an address that is not "
         "loopback"),
    FLAG(allow_client_shm, "false",
         "HTTP clients may name shared memory of the daemon's user, and CUDA handles"),
    FLAG(allow_shm_names, "false",
         "Clients of the local socket may name POSIX shared memory instead of passing descriptors"),
    FLAG(nv_metrics, "false", "Also offer the metric names that perf_analyzer reads"),
    FLAG(show_keep_sets, "false",
         "Let the status page show where the tokens lie that each stream kept last"),
    FLAG(fallback_cpu, "false", "Let the CPU compute in place of a device that cannot be had"),
    FLAG(test_hooks, "false", "Let tests break workers, by DROPKVD_DIE_AT in the environment"),
    NUMBER(threads, "0", 0, 1024, "", "Threads of the CPU engine; 0: one per CPU"),
    NUMBER(max_body_bytes, "4GiB", 4 * KIB, 16 * TIB, "bytes", "Largest request body"),
    NUMBER(max_json_bytes, "16MiB", KIB, DKV_OIP_JSON_BYTES_MAX, "bytes",
           "Largest body that is JSON alone"),
    NUMBER(max_connections, "256", 1, 65536, "", "Connections open at once"),
    NUMBER(max_queue_requests, "256", 1, 1048576, "", "Requests accepted and not answered yet"),
    NUMBER(max_queue_bytes, "0", 0, 64 * TIB, "bytes",
           "Memory of all bodies and answers of requests in progress; 0: half of what there is"),
    NUMBER(max_client_bytes, "0", 0, 64 * TIB, "bytes",
           "Memory of one client's bodies and answers; 0: half of max_queue_bytes"),
    NUMBER(max_queue_read_bytes, "1TiB", 1, 64 * TIB, "bytes",
           "Tensor bytes that all requests accepted and not answered yet will read"),
    NUMBER(max_client_requests, "0", 0, 1048576, "",
           "Requests of one client accepted and not answered yet; 0: half of max_queue_requests"),
    NUMBER(max_client_read_bytes, "0", 0, 64 * TIB, "bytes",
           "Tensor bytes of one client's requests; 0: half of max_queue_read_bytes"),
    NUMBER(priorities, "4", 1, DKV_ADMISSION_LEVELS_MAX, "", "Priorities; 1 is served first"),
    NUMBER(default_priority, "2", 1, DKV_ADMISSION_LEVELS_MAX, "",
           "Priority of requests that name none, or one that there is not"),
    NUMBER(aging_batches, "16", 1, 1u << 30, "",
           "A priority passed over by so many batches comes next"),
    NUMBER(quantum_bytes, "8MiB", 1, TIB, "bytes",
           "What a client may have read before the next client's turn"),
    NUMBER(max_batch_items, "64", 1, 4096, "", "Blocks of one engine batch"),
    NUMBER(max_batch_tokens, "65536", 1, 1u << 30, "tokens",
           "Stored tokens of one engine batch of several requests"),
    NUMBER(max_batch_bytes, "1GiB", 1, 64 * TIB, "bytes",
           "Tensor bytes that one engine batch of several requests reads"),
    NUMBER(max_queue_delay_us, "100", 0, 10000000, "us",
           "How long a busy device's next batch may wait to become fuller"),
    NUMBER(batches_in_flight, "0", 0, DKV_ADMISSION_FLIGHT_MAX, "",
           "Batches that a device is given at once; 0: 2 for a GPU, 1 for the CPU"),
    NUMBER(busy_poll_us, "0", 0, 1000000, "us",
           "How long to look for more work before sleeping, which takes two processors while "
           "requests come; 0: 200 with a GPU and 4 processors, else up to 150 where that is "
           "found to be sooner; 1: hardly"),
    NUMBER(worker_deaths, "5", 1, 1000, "",
           "Workers of a device that may end in a row before the device is given up"),
    NUMBER(worker_stuck_ms, "0", 0, 86400000, "ms",
           "How long a batch may take before its worker is killed; 0: twice request_timeout_ms"),
    NUMBER(header_timeout_ms, "5000", 1, 3600000, "ms", "Time for a request's header to arrive"),
    NUMBER(keepalive_timeout_ms, "75000", 1, 3600000, "ms", "Time between two requests"),
    NUMBER(body_grace_ms, "2000", 0, 3600000, "ms", "Time before a body's rate is judged"),
    NUMBER(body_min_bytes_per_s, "1MiB", 1, 64 * GIB, "bytes",
           "Rate at which a body must arrive "
           "and a reply must be read"),
    NUMBER(request_timeout_ms, "30000", 1, 3600000, "ms",
           "Time for a received request to be answered"),
    NUMBER(drain_delay_ms, "0", 0, 3600000, "ms",
           "Time at shutdown in which readiness says no and requests are accepted still"),
    NUMBER(drain_timeout_ms, "30000", 0, 3600000, "ms", "Time for accepted requests at shutdown"),
    NUMBER(trace_every, "1", 0, 1u << 30, "",
           "Of requests without a traceparent, one in so many is written to trace_file; 0: none"),
    NUMBER(max_streams, "1024", 1, 65536, "", "Streams that the status page remembers"),
};

static void *member_of(struct dkv_config *config, const struct dkv_config_field *field)
{
    return (char *)config + field->offset;
}

static const void *member_of_const(const struct dkv_config *config,
                                   const struct dkv_config_field *field)
{
    return (const char *)config + field->offset;
}

void dkv_config_init(struct dkv_config_state *state)
{
    memset(state, 0, sizeof(*state));
    for (int i = 0; i < DKV_CONFIG_FIELDS; i++) {
        struct dkv_error err;
        if (dkv_config_set(state, i, dkv_config_fields[i].default_text, DKV_SOURCE_DEFAULT,
                           dkv_config_fields[i].name, &err) != DKV_OK) {
            fprintf(stderr, "dropkvd: default of %s\n", err.text);
            abort();
        }
    }
}

void dkv_config_fini(struct dkv_config_state *state)
{
    for (int i = 0; i < DKV_CONFIG_FIELDS; i++)
        if (dkv_config_fields[i].kind == DKV_CONFIG_TEXT)
            free(*(char **)member_of(&state->config, &dkv_config_fields[i]));
    memset(state, 0, sizeof(*state));
}

static bool same_name(const char *a, const char *b)
{
    for (; *a != '\0' && *b != '\0'; a++, b++) {
        char x = *a == '-' ? '_' : *a;
        char y = *b == '-' ? '_' : *b;
        if (x != y)
            return false;
    }
    return *a == *b;
}

int dkv_config_find(const char *name)
{
    for (int i = 0; i < DKV_CONFIG_FIELDS; i++)
        if (same_name(name, dkv_config_fields[i].name))
            return i;
    return -1;
}

/* "4096", "64KiB": digits only, so that neither a sign nor a space nor hexadecimal slips in. */
static bool parse_u64(const char *text, uint64_t *out)
{
    static const struct {
        const char *suffix;
        uint64_t factor;
    } units[] = {{"", 1}, {"KiB", KIB}, {"MiB", MIB}, {"GiB", GIB}, {"TiB", TIB}};
    uint64_t value = 0;
    if (!isdigit((unsigned char)*text))
        return false;
    for (; isdigit((unsigned char)*text); text++)
        if (!dkv_mul_u64(value, 10, &value) || !dkv_add_u64(value, (uint64_t)(*text - '0'), &value))
            return false;
    for (size_t i = 0; i < sizeof(units) / sizeof(units[0]); i++)
        if (strcmp(text, units[i].suffix) == 0)
            return dkv_mul_u64(value, units[i].factor, out);
    return false;
}

static bool parse_bool(const char *text, bool *out)
{
    if (strcmp(text, "true") == 0 || strcmp(text, "1") == 0 || strcmp(text, "on") == 0)
        *out = true;
    else if (strcmp(text, "false") == 0 || strcmp(text, "0") == 0 || strcmp(text, "off") == 0)
        *out = false;
    else
        return false;
    return true;
}

static bool is_choice(const char *const *choices, const char *text)
{
    for (; *choices != NULL; choices++)
        if (strcmp(*choices, text) == 0)
            return true;
    return false;
}

static void join_choices(const char *const *choices, char *out, size_t out_bytes)
{
    size_t used = 0;
    out[0] = '\0';
    for (; *choices != NULL && used < out_bytes; choices++)
        used += (size_t)snprintf(out + used, out_bytes - used, "%s%s", used == 0 ? "" : " | ",
                                 *choices);
}

static enum dkv_status set_text(char **member, const struct dkv_config_field *field,
                                const char *text, const char *origin, struct dkv_error *err)
{
    if (field->choices != NULL && !is_choice(field->choices, text)) {
        char words[96];
        join_choices(field->choices, words, sizeof(words));
        return dkv_error_set(err, DKV_E_INVALID, "%s: '%.40s' is not one of %s", origin, text,
                             words);
    }
    char *copy = strdup(text);
    if (copy == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "%s: out of memory", origin);
    free(*member);
    *member = copy;
    return DKV_OK;
}

/* One more argument of a list. */
static enum dkv_status add_text(char **member, const char *text, const char *origin,
                                struct dkv_error *err)
{
    char *joined;
    if (asprintf(&joined, "%s,%s", *member, text) < 0)
        return dkv_error_set(err, DKV_E_NOMEM, "%s: out of memory", origin);
    free(*member);
    *member = joined;
    return DKV_OK;
}

enum dkv_status dkv_config_set(struct dkv_config_state *state, int field_index, const char *text,
                               enum dkv_config_source source, const char *origin,
                               struct dkv_error *err)
{
    const struct dkv_config_field *field = &dkv_config_fields[field_index];
    void *member = member_of(&state->config, field);
    enum dkv_status status = DKV_OK;
    uint64_t number;
    switch (field->kind) {
    case DKV_CONFIG_TEXT:
        if (field->is_list && source == DKV_SOURCE_ARG && state->sources[field_index] == source)
            status = add_text(member, text, origin, err);
        else
            status = set_text(member, field, text, origin, err);
        break;
    case DKV_CONFIG_BOOL:
        if (!parse_bool(text, member))
            status = dkv_error_set(err, DKV_E_INVALID, "%s: '%.40s' is neither true nor false",
                                   origin, text);
        break;
    case DKV_CONFIG_U64:
        if (!parse_u64(text, &number) || number < field->min || number > field->max)
            return dkv_error_set(
                err, DKV_E_INVALID, "%s: '%.40s' is not a whole number in %llu..%llu%s%s", origin,
                text, (unsigned long long)field->min, (unsigned long long)field->max,
                *field->unit ? " " : "", field->unit);
        *(uint64_t *)member = number;
        break;
    }
    if (status == DKV_OK)
        state->sources[field_index] = source;
    return status;
}

enum dkv_status dkv_config_load_env(struct dkv_config_state *state, struct dkv_error *err)
{
    for (int i = 0; i < DKV_CONFIG_FIELDS; i++) {
        char name[64];
        snprintf(name, sizeof(name), "DROPKVD_%s", dkv_config_fields[i].name);
        for (char *c = name; *c != '\0'; c++)
            *c = (char)toupper((unsigned char)*c);
        const char *text = getenv(name);
        if (text == NULL)
            continue;
        enum dkv_status status = dkv_config_set(state, i, text, DKV_SOURCE_ENV, name, err);
        if (status != DKV_OK)
            return status;
    }
    return DKV_OK;
}

bool dkv_config_device(const struct dkv_config *config, unsigned index,
                       char name_out[DKV_DEVICE_NAME_BYTES])
{
    const char *at = config->device;
    for (; index > 0; index--) {
        at = strchr(at, ',');
        if (at == NULL)
            return false;
        at++;
    }
    snprintf(name_out, DKV_DEVICE_NAME_BYTES, "%.*s", (int)strcspn(at, ","), at);
    return true;
}

/* Names are judged by the worker that opens the device; here only their number. */
static enum dkv_status check_devices(const struct dkv_config *config, struct dkv_error *err)
{
    char name[DKV_DEVICE_NAME_BYTES], other[DKV_DEVICE_NAME_BYTES];
    unsigned n = 0;
    for (; dkv_config_device(config, n, name); n++) {
        if (*name == '\0')
            return dkv_error_set(err, DKV_E_INVALID, "device: '%.60s' has an empty name in it",
                                 config->device);
        for (unsigned i = 0; i < n && dkv_config_device(config, i, other); i++)
            if (strcmp(name, other) == 0)
                return dkv_error_set(err, DKV_E_INVALID, "device: %s is named twice", name);
    }
    if (n > DKV_ADMISSION_DEVICES_MAX)
        return dkv_error_set(err, DKV_E_INVALID, "device: %u are named, at most %u can be", n,
                             DKV_ADMISSION_DEVICES_MAX);
    return DKV_OK;
}

enum dkv_status dkv_config_check_reach(const struct dkv_config *config, bool loopback,
                                       const char *text, struct dkv_error *err)
{
    if (!loopback && *config->token_file == '\0')
        return dkv_error_set(err, DKV_E_INVALID,
                             "http: %.64s is not a loopback address; that needs token_file", text);
    if (!loopback && !config->behind_proxy)
        return dkv_error_set(err, DKV_E_INVALID,
                             "http: %.64s is not a loopback address; tokens must not cross a "
                             "network unencrypted, so that needs a TLS proxy and behind_proxy",
                             text);
    return DKV_OK;
}

/* Longer names could be opened, but not be told to workers. */
static enum dkv_status check_path(const char *field, const char *path, struct dkv_error *err)
{
    const size_t n = strlen(path);
    if (n < DKV_LOG_PATH_BYTES)
        return DKV_OK;
    return dkv_error_set(err, DKV_E_INVALID, "%s: %zu characters, at most %d are allowed", field, n,
                         DKV_LOG_PATH_BYTES - 1);
}

uint64_t dkv_config_client_bytes(const struct dkv_config *config, uint64_t queue_bytes)
{
    const uint64_t bytes = config->max_client_bytes != 0 ? config->max_client_bytes
                                                         : queue_bytes - queue_bytes / 2;
    return bytes < queue_bytes ? bytes : queue_bytes;
}

/* Where memory is bounded by a number, a body above it could never be accepted. Where it is what
 * the machine has, bodies are bounded by that, too (loop.c). */
static enum dkv_status check_memory(const struct dkv_config *config, struct dkv_error *err)
{
    const uint64_t queue_bytes = config->max_queue_bytes != 0 ? config->max_queue_bytes
                                                              : UINT64_MAX;
    const uint64_t client_bytes = dkv_config_client_bytes(config, queue_bytes);
    if (config->max_body_bytes <= client_bytes)
        return DKV_OK;
    return dkv_error_set(err, DKV_E_INVALID,
                         "max_body_bytes: %llu is above %llu, what one client may hold "
                         "(max_client_bytes, else half of max_queue_bytes), so such a body could "
                         "never be accepted",
                         (unsigned long long)config->max_body_bytes,
                         (unsigned long long)client_bytes);
}

enum dkv_status dkv_config_check(const struct dkv_config *config, struct dkv_error *err)
{
    if (check_memory(config, err) != DKV_OK)
        return DKV_E_INVALID;
    if (config->max_json_bytes > config->max_body_bytes)
        return dkv_error_set(
            err, DKV_E_INVALID, "max_json_bytes: %llu is above max_body_bytes %llu",
            (unsigned long long)config->max_json_bytes, (unsigned long long)config->max_body_bytes);
    struct dkv_admission_config limits;
    if (check_devices(config, err) != DKV_OK)
        return DKV_E_INVALID;
    if (check_path("log_file", config->log_file, err) != DKV_OK ||
        check_path("trace_file", config->trace_file, err) != DKV_OK)
        return DKV_E_INVALID;
    if (dkv_backend_limits(config, &limits, err) != DKV_OK)
        return DKV_E_INVALID;
    if (strcmp(config->http, "off") == 0)
        return strcmp(config->socket, "off") != 0
                   ? DKV_OK
                   : dkv_error_set(err, DKV_E_INVALID,
                                   "http: 'off' beside socket 'off' leaves nothing to serve");
    struct dkv_listen_address address;
    enum dkv_status status = dkv_listen_parse(config->http, &address, err);
    if (status != DKV_OK)
        return status;
    return dkv_config_check_reach(config, address.loopback, config->http, err);
}

static void print_json_text(const char *text, FILE *out)
{
    fputc('"', out);
    for (; *text != '\0'; text++) {
        unsigned char c = (unsigned char)*text;
        if (c == '"' || c == '\\')
            fprintf(out, "\\%c", c);
        else if (c < 0x20)
            fprintf(out, "\\u%04x", c);
        else
            fputc(c, out);
    }
    fputc('"', out);
}

static void print_value(const struct dkv_config *config, const struct dkv_config_field *field,
                        FILE *out)
{
    const void *member = member_of_const(config, field);
    switch (field->kind) {
    case DKV_CONFIG_TEXT: print_json_text(*(char *const *)member, out); break;
    case DKV_CONFIG_BOOL: fputs(*(const bool *)member ? "true" : "false", out); break;
    case DKV_CONFIG_U64: fprintf(out, "%llu", (unsigned long long)*(const uint64_t *)member); break;
    }
}

void dkv_config_print(const struct dkv_config_state *state, bool sources, FILE *out)
{
    static const char *const source_names[] = {"default", "file", "environment", "argument"};
    fputs("{\n", out);
    for (int i = 0; i < DKV_CONFIG_FIELDS; i++) {
        const struct dkv_config_field *field = &dkv_config_fields[i];
        fprintf(out, sources ? "  \"%s\": {\"value\": " : "  \"%s\": ", field->name);
        print_value(&state->config, field, out);
        if (sources)
            fprintf(out, ", \"source\": \"%s\"}", source_names[state->sources[i]]);
        fputs(i + 1 < DKV_CONFIG_FIELDS ? ",\n" : "\n", out);
    }
    fputs("}\n", out);
}
