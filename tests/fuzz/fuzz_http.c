/* The first bytes of a connection: the scan, and behind it guard and route table, as the door and
 * the intake use them. Held besides memory safety: a header that is good was never bad on its way
 * in, a header that the scan calls good has lines that can be split, and what the guard accepts has
 * one meaning: a length or chunks, never both. */
#include "server/http_scan.h"
#include "server/routes.h"
#include "server/trace.h"
#include "tests/fuzz/fuzz.h"

#include <stdlib.h>
#include <string.h>

#define HOLDS(condition)  \
    do {                  \
        if (!(condition)) \
            abort();      \
    } while (0)

/* Splits a line at `mark`, both halves 0-terminated in place; NULL if it is not there. */
static char *split(char *line, char mark)
{
    char *at = strchr(line, mark);
    if (at != NULL)
        *at++ = '\0';
    return at;
}

static void add_field(struct dkv_http_head *head, char *line)
{
    char *value = split(line, ':');
    HOLDS(value != NULL);
    while (*value == ' ' || *value == '\t')
        value++;
    if (head->n_fields < DKV_HTTP_FIELDS_MAX)
        head->fields[head->n_fields] = (struct dkv_http_field){line, strlen(line), value,
                                                               strlen(value)};
    head->n_fields++;
}

/* In a place of its own, so that reading past its end is noticed. What is taken is what the header
 * says, and nothing of what is not taken stays. */
static void judge_trace(const char *value)
{
    static const struct dkv_trace none;
    struct dkv_trace trace;
    char *copy = strdup(value);
    HOLDS(copy != NULL);
    if (dkv_trace_parse(copy, &trace)) {
        HOLDS(strlen(trace.trace_id) == 32 && strlen(trace.parent_id) == 16);
        HOLDS(strlen(trace.text) == 55 && strncmp(trace.text, copy, 55) == 0);
        HOLDS(strspn(trace.text, "0123456789abcdef-") == 55);
        HOLDS(memcmp(trace.text + 3, trace.trace_id, 32) == 0);
    } else {
        HOLDS(memcmp(&trace, &none, sizeof(none)) == 0);
    }
    free(copy);
}

/* A header that the scan called good, as a 0-terminated copy. */
static void judge(char *text)
{
    const struct dkv_http_rules rules = {.max_body_bytes = 1u << 20, .local_names_only = true};
    struct dkv_http_head head = {0};
    struct dkv_route_match match;
    const char *allow = NULL;
    char *line = text;
    while (strncmp(line, "\r\n", 2) == 0)
        line += 2;
    char *next = strstr(line, "\r\n");
    HOLDS(next != NULL);
    *next = '\0';
    head.method = line;
    char *target = split(line, ' ');
    HOLDS(target != NULL);
    char *version = split(target, ' ');
    HOLDS(version != NULL);
    head.target = target;
    head.version = version;
    for (line = next + 2; strncmp(line, "\r\n", 2) != 0; line = next + 2) {
        next = strstr(line, "\r\n");
        HOLDS(next != NULL);
        *next = '\0';
        add_field(&head, line);
    }
    if (dkv_http_guard(&head, &rules).http_status == 0) {
        HOLDS(!(head.has_length && head.chunked));
        HOLDS(head.content_length <= rules.max_body_bytes);
        HOLDS(!head.has_length || !head.has_json_length || head.json_length <= head.content_length);
    }
    if (head.traceparent != NULL)
        judge_trace(head.traceparent);
    dkv_route_find(head.method, head.target, &match, &allow);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    const char *bytes = (const char *)data;
    struct dkv_http_verdict verdict = {0};
    const enum dkv_http_scan_result result = dkv_http_scan(bytes, n_bytes, &verdict);
    if (result == DKV_HTTP_SCAN_BAD) {
        HOLDS(verdict.http_status >= 400 && verdict.text != NULL);
        return 0;
    }
    for (size_t n = 0; n < n_bytes; n += 1 + n_bytes / 64)
        HOLDS(dkv_http_scan(bytes, n, &verdict) != DKV_HTTP_SCAN_BAD);
    if (result == DKV_HTTP_SCAN_GOOD) {
        char *text = calloc(1, n_bytes + 1);
        HOLDS(text != NULL);
        memcpy(text, bytes, n_bytes);
        judge(text);
        free(text);
    }
    return 0;
}
