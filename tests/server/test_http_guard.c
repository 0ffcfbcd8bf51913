/* Unit tests of the header guard and the route table, which need no socket. */
#include "server/http_guard.h"
#include "server/http_scan.h"
#include "server/routes.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static const struct dkv_http_rules local = {.max_body_bytes = 1000, .local_names_only = true};
static const struct dkv_http_rules open_rules = {.max_body_bytes = 1000};

static void add(struct dkv_http_head *head, const char *name, const char *value)
{
    if (head->n_fields < DKV_HTTP_FIELDS_MAX)
        head->fields[head->n_fields] = (struct dkv_http_field){name, strlen(name), value,
                                                               strlen(value)};
    head->n_fields++;
}

/* A header with a Host and up to three more fields, "Name: value" split by the caller. */
static struct dkv_http_head head_of(const char *method, const char *const fields[][2], size_t n)
{
    struct dkv_http_head head = {.method = method, .target = "/v2", .version = "HTTP/1.1"};
    add(&head, "Host", "127.0.0.1:8480");
    for (size_t i = 0; i < n; i++)
        add(&head, fields[i][0], fields[i][1]);
    return head;
}

static unsigned judge(const char *method, const char *name, const char *value)
{
    const char *const fields[][2] = {{name, value}};
    struct dkv_http_head head = head_of(method, fields, 1);
    return dkv_http_guard(&head, &local).http_status;
}

static void a_plain_request_passes_and_its_fields_are_found(void **unused)
{
    const char *const fields[][2] = {{"content-length", "120"},
                                     {"inference-header-content-length", "20"},
                                     {"authorization", "Bearer x"}};
    struct dkv_http_head head = head_of("POST", fields, 3);
    (void)unused;
    assert_int_equal(dkv_http_guard(&head, &local).http_status, 0);
    assert_true(head.has_length && head.has_json_length && !head.chunked);
    assert_int_equal(head.content_length, 120);
    assert_int_equal(head.json_length, 20);
    assert_string_equal(head.authorization, "Bearer x");
}

static void lengths_are_plain_digits(void **unused)
{
    static const char *const bad[] = {"",    "+5",  "-1",  "5,5", "5 5",
                                      "0x5", "5.0", "1e3", " 5",  "5 "};
    (void)unused;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_int_equal(judge("POST", "Content-Length", bad[i]), 400);
    assert_int_equal(judge("POST", "Content-Length", "18446744073709551615"), 413);
    assert_int_equal(judge("POST", "Content-Length", "18446744073709551616"), 413);
    assert_int_equal(judge("POST", "Content-Length", "99999999999999999999999999"), 413);
    assert_int_equal(judge("POST", "Content-Length", "1000"), 0);
    assert_int_equal(judge("POST", "Content-Length", "1001"), 413);
    assert_int_equal(judge("POST", "Content-Length", "0"), 0);
}

static void only_chunked_is_a_transfer_coding(void **unused)
{
    static const char *const bad[] = {
        "identity", "gzip, chunked", "chunked, chunked", "xchunked", "chunked;q=1", "", "chunked "};
    (void)unused;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_int_equal(judge("POST", "Transfer-Encoding", bad[i]), 400);
    assert_int_equal(judge("POST", "Transfer-Encoding", "Chunked"), 0);
    assert_int_equal(judge("GET", "Transfer-Encoding", "chunked"), 400);
}

static void fields_that_delimit_stand_once(void **unused)
{
    static const char *const pairs[][2] = {
        {"Content-Length", "1"},
        {"Transfer-Encoding", "chunked"},
        {"Host", "localhost"},
        {"Authorization", "x"},
        {"Origin", "http://localhost"},
        {"Expect", "100-continue"},
        {"Inference-Header-Content-Length", "1"},
        {"Content-Encoding", "identity"},
    };
    (void)unused;
    for (size_t i = 0; i < sizeof(pairs) / sizeof(pairs[0]); i++) {
        const char *const fields[][2] = {
            {"Content-Length", "1"}, {pairs[i][0], pairs[i][1]}, {pairs[i][0], pairs[i][1]}};
        bool is_length = i == 0;
        struct dkv_http_head head = head_of("POST", is_length ? fields + 1 : fields,
                                            is_length ? 2 : 3);
        assert_int_equal(dkv_http_guard(&head, &local).http_status, 400);
    }
}

static void names_are_tokens_and_values_hold_no_control_characters(void **unused)
{
    (void)unused;
    assert_int_equal(judge("GET", "X ", "1"), 400);
    assert_int_equal(judge("GET", "X\t", "1"), 400);
    assert_int_equal(judge("GET", "X:", "1"), 400);
    assert_int_equal(judge("GET", "", "1"), 400);
    assert_int_equal(judge("GET", "X(y)", "1"), 400);
    assert_int_equal(judge("GET", "X", "a\001b"), 400);
    assert_int_equal(judge("GET", "X", "a\177b"), 400);
    assert_int_equal(judge("GET", "X", "a\tb"), 0);
    assert_int_equal(judge("GET", "X-y.z~", "\xc3\xa9"), 0);
}

static void line_ends_are_seen_behind_the_values(void **unused)
{
    /* As the library leaves them in its buffer: a NUL over each byte of the line's end. */
    static const struct {
        char text[32];
        size_t host; /* where the value of Host starts; it has 1 byte */
        size_t end;  /* of the header */
        unsigned status;
    } rows[] = {
        {"HTTP/1.1\0\0Host\0h\0\0\0\0", 15, 20, 0},    /* CR LF CR LF */
        {"HTTP/1.1\0Host\0h\0\0\0\0x", 14, 19, 400},   /* LF behind the request line */
        {"HTTP/1.1\0\0Host\0h\0X\0\0\0", 15, 20, 400}, /* LF behind the value, then a line */
        {"HTTP/1.1\0\0Host\0h\0\0GET", 15, 18, 400},   /* LF LF */
        {"HTTP/1.1\0\0Host\0h\0\0\0GE", 15, 19, 400},  /* CR LF LF */
        {"HTTP/1.1\0\0Host\0h\0\0\0\0", 15, 18, 400},  /* LF LF, and zeros behind it */
        {"HTTP/1.1\0\0Host\0h\0\0\0\0", 15, 19, 400},  /* CR LF LF, and a zero */
    };
    (void)unused;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct dkv_http_head head = {.method = "GET",
                                     .target = "/v2",
                                     .version = rows[i].text,
                                     .end = rows[i].text + rows[i].end};
        head.fields[0] = (struct dkv_http_field){"Host", 4, rows[i].text + rows[i].host, 1};
        head.n_fields = 1;
        assert_int_equal(dkv_http_guard(&head, &open_rules).http_status, rows[i].status);
    }
}

static void names_of_this_machine_are_known(void **unused)
{
    static const char *const ours[] = {"localhost",      "LOCALHOST:80", "127.0.0.1",
                                       "127.1.2.3:8480", "[::1]",        "[::1]:8480"};
    static const char *const foreign[] = {"",           "evil.example",  "localhost.evil.example",
                                          "1270.0.0.1", "128.0.0.1",     "127.0.0.1.evil.example",
                                          "[::2]",      "[::1]evil",     "10.0.0.1:80",
                                          "::1",        "localhost@evil"};
    (void)unused;
    for (size_t i = 0; i < sizeof(ours) / sizeof(ours[0]); i++)
        assert_true(dkv_http_host_is_local(ours[i], strlen(ours[i])));
    for (size_t i = 0; i < sizeof(foreign) / sizeof(foreign[0]); i++)
        assert_false(dkv_http_host_is_local(foreign[i], strlen(foreign[i])));
    assert_int_equal(judge("GET", "Origin", "http://127.0.0.1:3000"), 0);
    assert_int_equal(judge("GET", "Origin", "http://evil.example"), 403);
    assert_int_equal(judge("GET", "Origin", "null"), 403);
}

static void a_target_holds_no_space(void **unused)
{
    static const char *const bad[] = {" /v2", "/v2 ", "/v\t2", "/v2\177", "/\001"};
    (void)unused;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct dkv_http_head head = head_of("GET", NULL, 0);
        head.target = bad[i];
        assert_int_equal(dkv_http_guard(&head, &local).http_status, 400);
    }
}

static void too_many_fields_are_refused(void **unused)
{
    struct dkv_http_head head = {.method = "GET", .target = "/v2", .version = "HTTP/1.1"};
    (void)unused;
    add(&head, "Host", "localhost");
    while (head.n_fields < DKV_HTTP_FIELDS_MAX)
        add(&head, "X", "1");
    assert_int_equal(dkv_http_guard(&head, &local).http_status, 0);
    add(&head, "X", "1");
    assert_int_equal(dkv_http_guard(&head, &local).http_status, 431);
}

/* ---- the scan of raw bytes ---- */

#define GOOD_HEAD "POST /v2 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 12 \r\n\r\n"

static enum dkv_http_scan_result scan(const char *text, size_t n_bytes, unsigned *http_status)
{
    struct dkv_http_verdict verdict = {0};
    enum dkv_http_scan_result result = dkv_http_scan(text, n_bytes, &verdict);
    *http_status = verdict.http_status;
    return result;
}

static void a_header_is_good_once_it_is_complete(void **unused)
{
    static const char head[] = GOOD_HEAD "\0\n: body that nobody looks at";
    const size_t n_head = sizeof(GOOD_HEAD) - 1;
    unsigned http_status;
    (void)unused;
    for (size_t n = 0; n < n_head; n++)
        assert_int_equal(scan(head, n, &http_status), DKV_HTTP_SCAN_MORE);
    for (size_t n = n_head; n < sizeof(head); n++)
        assert_int_equal(scan(head, n, &http_status), DKV_HTTP_SCAN_GOOD);
    assert_int_equal(scan("\r\n" GOOD_HEAD, n_head + 2, &http_status), DKV_HTTP_SCAN_GOOD);
}

static void what_makes_a_header_bad_is_seen_as_soon_as_it_is_there(void **unused)
{
    static const struct {
        char text[96];
        unsigned http_status;
    } rows[] = {
        {"GET /v2 HTTP/1.1\n", 400},
        {"GET /v2\r\n", 400},
        {"GET /v2 HTTP/2.0\r\n", 400},
        {"GET  /v2 HTTP/1.1\r\n", 400},
        {" /v2 HTTP/1.1\r\n", 400},
        {"GET  HTTP/1.1\r\n", 400},
        {"GET HTTP/1.1\r\n", 400},
        {"GET /v2 HTTP/1.1\r\nX: a\rb\r\n", 400},
        {"GET /v2 HTTP/1.1\r\nX\r\n", 400},
        {"GET /v2 HTTP/1.1\r\n: x\r\n", 400},
        {"GET /v2 HTTP/1.1\r\nX: a\r\n b\r\n", 400},
        {"GET /v2 HTTP/1.1\r\ncontent-LENGTH: -1\r\n", 400},
        {"GET /v2 HTTP/1.1\r\nContent-Length:\r\n", 400},
        {"GET /v2 HTTP/1.1\r\nContent-Length: 18446744073709551616\r\n", 413},
    };
    unsigned http_status;
    (void)unused;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        if (scan(rows[i].text, strlen(rows[i].text), &http_status) != DKV_HTTP_SCAN_BAD)
            fail_msg("%s", rows[i].text);
        assert_int_equal(http_status, rows[i].http_status);
    }
    assert_int_equal(scan("GET\0", 4, &http_status), DKV_HTTP_SCAN_BAD);
}

static void a_header_without_end_is_too_large(void **unused)
{
    static char text[DKV_HTTP_HEAD_BYTES_MAX + 1];
    unsigned http_status;
    (void)unused;
    memset(text, 'a', sizeof(text));
    assert_int_equal(scan(text, sizeof(text) - 1, &http_status), DKV_HTTP_SCAN_MORE);
    assert_int_equal(scan(text, sizeof(text), &http_status), DKV_HTTP_SCAN_BAD);
    assert_int_equal(http_status, 431);
}

/* ---- routes ---- */

static void every_route_of_the_table_is_found_under_its_own_path(void **unused)
{
    (void)unused;
    for (size_t i = 0; i < dkv_n_routes; i++) {
        char path[128] = "";
        struct dkv_route_match match;
        const char *allow = NULL;
        for (const char *at = dkv_routes[i].pattern; *at != '\0';) {
            if (strncmp(at, "{version}", 9) == 0) {
                strcat(path, "1");
                at += 9;
            } else if (*at == '{') {
                strcat(path, "name");
                at = strchr(at, '}') + 1;
            } else {
                strncat(path, at++, 1);
            }
        }
        const bool post = dkv_routes[i].method == DKV_ROUTE_POST;
        assert_int_equal(dkv_route_find(post ? "POST" : "GET", path, &match, &allow),
                         DKV_ROUTE_FOUND);
        assert_ptr_equal(match.route, &dkv_routes[i]);
        assert_int_equal(dkv_route_find(post ? "GET" : "POST", path, &match, &allow),
                         DKV_ROUTE_WRONG_METHOD);
        assert_string_equal(allow, post ? "POST" : "GET, HEAD");
    }
}

static void only_health_is_open(void **unused)
{
    (void)unused;
    for (size_t i = 0; i < dkv_n_routes; i++)
        assert_int_equal(dkv_routes[i].open,
                         strncmp(dkv_routes[i].pattern, "/v2/health/", 11) == 0);
}

static void an_escaped_slash_is_part_of_a_name(void **unused)
{
    struct dkv_route_match match;
    const char *allow;
    (void)unused;
    assert_int_equal(
        dkv_route_find("GET", "/v2/systemsharedmemory/region/a%2Fb%2f%25/status", &match, &allow),
        DKV_ROUTE_FOUND);
    assert_string_equal(match.region, "a/b/%");
    assert_int_equal(
        dkv_route_find("GET", "/v2/systemsharedmemory/region/a/b/status", &match, &allow),
        DKV_ROUTE_NONE);
}

static void names_that_do_not_fit_are_not_found(void **unused)
{
    char path[256];
    struct dkv_route_match match;
    const char *allow;
    (void)unused;
    for (int extra = 0; extra < 2; extra++) {
        snprintf(path, sizeof(path), "/v2/models/%0*d", DKV_ROUTE_NAME_BYTES + extra, 0);
        assert_int_equal(dkv_route_find("GET", path, &match, &allow),
                         extra ? DKV_ROUTE_NONE : DKV_ROUTE_FOUND);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_plain_request_passes_and_its_fields_are_found),
        cmocka_unit_test(lengths_are_plain_digits),
        cmocka_unit_test(only_chunked_is_a_transfer_coding),
        cmocka_unit_test(fields_that_delimit_stand_once),
        cmocka_unit_test(names_are_tokens_and_values_hold_no_control_characters),
        cmocka_unit_test(line_ends_are_seen_behind_the_values),
        cmocka_unit_test(names_of_this_machine_are_known),
        cmocka_unit_test(a_target_holds_no_space),
        cmocka_unit_test(too_many_fields_are_refused),
        cmocka_unit_test(a_header_is_good_once_it_is_complete),
        cmocka_unit_test(what_makes_a_header_bad_is_seen_as_soon_as_it_is_there),
        cmocka_unit_test(a_header_without_end_is_too_large),
        cmocka_unit_test(every_route_of_the_table_is_found_under_its_own_path),
        cmocka_unit_test(only_health_is_open),
        cmocka_unit_test(an_escaped_slash_is_part_of_a_name),
        cmocka_unit_test(names_that_do_not_fit_are_not_found),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
