/* What the daemon tells: lines of the log, which clients cannot forge, and counters. */
#include "server/log.h"
#include "server/metrics.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>
#include <jansson.h>

/* ---- log ---- */

/* The line that one message becomes, without its time. */
static void logged(enum dkv_log_format format, const char *message, char *line, size_t line_bytes)
{
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    dkv_log_init(format, DKV_LOG_INFO, ends[1]);
    dkv_log(DKV_LOG_INFO, "%s", message);
    dkv_log_init(DKV_LOG_TEXT, DKV_LOG_INFO, STDERR_FILENO);
    close(ends[1]);
    ssize_t n = read(ends[0], line, line_bytes - 1);
    assert_true(n > 0);
    line[n] = '\0';
    close(ends[0]);
}

static void a_client_cannot_start_a_line_of_its_own(void **unused)
{
    char line[2048];
    (void)unused;
    logged(DKV_LOG_TEXT, "a\r\nb\x1b[31m\\\xff", line, sizeof(line));
    assert_non_null(strstr(line, "info  a\\x0d\\x0ab\\x1b[31m\\\\\\xff\n"));
    assert_ptr_equal(strchr(line, '\n'), line + strlen(line) - 1);
    logged(DKV_LOG_JSON, "\"\\\n\x1b", line, sizeof(line));
    assert_non_null(strstr(line, "\"message\":\"\\\"\\\\\\u000a\\u001b\"}\n"));
}

static void a_long_message_is_cut_and_stays_one_line(void **unused)
{
    char message[4096], line[4096];
    (void)unused;
    memset(message, '\n', sizeof(message) - 1);
    message[sizeof(message) - 1] = '\0';
    logged(DKV_LOG_JSON, message, line, sizeof(line));
    assert_int_equal(strlen(line) - strcspn(line, "\n"), 1);
    assert_string_equal(line + strlen(line) - 3, "\"}\n");
}

static void escapes_are_never_cut_in_two(void **unused)
{
    char out[16];
    (void)unused;
    for (size_t room = 1; room <= sizeof(out); room++) {
        size_t n = dkv_log_escape(out, room, "\n\n\n\n\n", DKV_LOG_TEXT);
        assert_true(n < room);
        assert_int_equal(n % 4, 0);
    }
}

static void a_budget_lets_a_burst_and_then_a_rate_pass(void **unused)
{
    struct dkv_log_limit limit = {.burst = 3, .per_s = 2};
    unsigned passed = 0;
    (void)unused;
    for (int i = 0; i < 100; i++)
        passed += dkv_log_limit_take(&limit, 1000);
    assert_int_equal(passed, 3);
    assert_int_equal(limit.held_back, 97);
    assert_false(dkv_log_limit_take(&limit, 1499));
    assert_true(dkv_log_limit_take(&limit, 1500));
    assert_false(dkv_log_limit_take(&limit, 1501));
    passed = 0;
    for (int i = 0; i < 10; i++)
        passed += dkv_log_limit_take(&limit, 1000000);
    assert_int_equal(passed, 3);
}

static void a_line_that_is_cut_stays_json(void **unused)
{
    char line[4096];
    char text[700];
    struct dkv_log_field fields[8];
    int ends[2];
    (void)unused;
    memset(text, '"', sizeof(text) - 1);
    text[sizeof(text) - 1] = '\0';
    for (unsigned i = 0; i < 8; i++)
        fields[i] = (struct dkv_log_field){.name = "field", .text = text};
    fields[7] = (struct dkv_log_field){.name = "last", .number = 7};
    assert_int_equal(pipe(ends), 0);
    dkv_log_init(DKV_LOG_JSON, DKV_LOG_INFO, ends[1]);
    dkv_log_event(DKV_LOG_INFO, fields, 8, "m");
    dkv_log_init(DKV_LOG_TEXT, DKV_LOG_INFO, STDERR_FILENO);
    const ssize_t n = read(ends[0], line, sizeof(line) - 1);
    assert_true(n > 0 && n <= 2048);
    line[n] = '\0';
    json_error_t error;
    json_t *root = json_loads(line, 0, &error);
    assert_non_null(root);
    assert_int_equal(json_integer_value(json_object_get(root, "last")), 7);
    json_decref(root);
    close(ends[0]);
    close(ends[1]);
}

/* ---- metrics ---- */

static char *metrics_text(const struct dkv_metrics *metrics, bool nv_names)
{
    const struct dkv_admission_stats queue = {.level[1] = {.n_waiting = 3, .oldest_us = 1500}};
    const struct dkv_worker_facts worker = {.device = "cpu", .restarts = 2, .busy_ns = 1500000000};
    const uint64_t regions[DKV_LOAN_KINDS] = {4, 0, 0};
    const struct dkv_gauges gauges = {.workers = &worker,
                                      .n_workers = 1,
                                      .queue = &queue,
                                      .n_levels = 2,
                                      .regions = regions,
                                      .region_bytes = regions,
                                      .queue_requests = 3,
                                      .ready = true};
    char *text = NULL;
    size_t n;
    FILE *out = open_memstream(&text, &n);
    dkv_metrics_write(metrics, &gauges, nv_names, out);
    fclose(out);
    return text;
}

static void every_counter_is_there_before_the_first_request(void **unused)
{
    struct dkv_metrics metrics;
    (void)unused;
    dkv_metrics_init(&metrics, "cpu/test");
    char *text = metrics_text(&metrics, true);
    static const char *const lines[] = {
        "dropkv_backend_info{backend=\"cpu/test\"} 1\n",
        "dropkv_requests_total{outcome=\"ok\"} 0\n",
        "dropkv_requests_total{outcome=\"cancelled\"} 0\n",
        "dropkv_http_refused_total{reason=\"framing\"} 0\n",
        "dropkv_queue_depth 3\n",
        "dropkv_queue_waiting{priority=\"1\"} 0\n",
        "dropkv_queue_waiting{priority=\"2\"} 3\n",
        "dropkv_queue_age_seconds{priority=\"2\"} 0.001500\n",
        "dropkv_admission_total{verdict=\"quota\"} 0\n",
        "dropkv_degraded_total 0\n",
        "dropkv_worker_up{worker=\"0\",device=\"cpu\"} 0\n",
        "dropkv_worker_restarts_total{worker=\"0\",device=\"cpu\"} 2\n",
        "dropkv_replayed_total 0\n",
        "dropkv_worker_busy_seconds_total{worker=\"0\",device=\"cpu\"} 1.5\n",
        "dropkv_regions{kind=\"sealed\"} 4\n",
        "dropkv_regions{kind=\"device\"} 0\n",
        "dropkv_regions_released_total{reason=\"disconnect\"} 0\n",
        "dropkv_bytes_in_total{transport=\"shared\"} 0\n",
        "dropkv_answered_total{transport=\"device\"} 0\n",
        "dropkv_nonfinite_inputs_total{action=\"masked\"} 0\n",
        "dropkv_connections{transport=\"socket\"} 0\n",
        "dropkv_queue_seconds_bucket{le=\"+Inf\"} 0\n",
        "dropkv_compute_seconds_count 0\n",
        "dropkv_request_seconds_sum 0\n",
        "nv_inference_request_failure{model=\"dropkv\",version=\"1\",reason=\"REJECTED\"} 0\n",
    };
    for (size_t i = 0; i < sizeof(lines) / sizeof(lines[0]); i++)
        if (strstr(text, lines[i]) == NULL)
            fail_msg("missing: %s", lines[i]);
    free(text);
    text = metrics_text(&metrics, false);
    assert_null(strstr(text, "nv_"));
    free(text);
}

static void histogram_bounds_are_inclusive_and_cumulative(void **unused)
{
    struct dkv_metrics metrics;
    (void)unused;
    dkv_metrics_init(&metrics, "x");
    dkv_histogram_add(&metrics.batch_items, 1);
    dkv_histogram_add(&metrics.batch_items, 1.5);
    dkv_histogram_add(&metrics.batch_items, 4096);
    dkv_histogram_add(&metrics.batch_items, 4097);
    char *text = metrics_text(&metrics, false);
    assert_non_null(strstr(text, "dropkv_batch_items_bucket{le=\"1\"} 1\n"));
    assert_non_null(strstr(text, "dropkv_batch_items_bucket{le=\"2\"} 2\n"));
    assert_non_null(strstr(text, "dropkv_batch_items_bucket{le=\"4096\"} 3\n"));
    assert_non_null(strstr(text, "dropkv_batch_items_bucket{le=\"+Inf\"} 4\n"));
    assert_non_null(strstr(text, "dropkv_batch_items_count 4\n"));
    free(text);
}

static void a_request_counts_in_one_outcome_and_its_durations(void **unused)
{
    struct dkv_metrics metrics;
    const struct dkv_timing timing = {3000000, 1000000, 500000, 1500000, 10};
    (void)unused;
    dkv_metrics_init(&metrics, "x");
    dkv_metrics_request(&metrics, DKV_OUTCOME_OK, &timing);
    dkv_metrics_request(&metrics, DKV_OUTCOME_TIMEOUT, &timing);
    assert_int_equal(metrics.requests[DKV_OUTCOME_OK], 1);
    assert_int_equal(metrics.requests[DKV_OUTCOME_TIMEOUT], 1);
    assert_int_equal(metrics.stats.success.count, 1);
    assert_int_equal(metrics.stats.fail.count, 1);
    assert_int_equal(metrics.stats.queue.ns, 1000000);
    assert_int_equal(metrics.stats.compute_infer.ns, 1500000);
    assert_true(metrics.stats.last_inference_ms > 0);
}

static void every_status_has_an_outcome(void **unused)
{
    (void)unused;
    assert_int_equal(dkv_outcome_of(DKV_E_INVALID), DKV_OUTCOME_INVALID);
    assert_int_equal(dkv_outcome_of(DKV_E_TOO_LARGE), DKV_OUTCOME_INVALID);
    assert_int_equal(dkv_outcome_of(DKV_E_BUSY), DKV_OUTCOME_BUSY);
    assert_int_equal(dkv_outcome_of(DKV_E_NOMEM), DKV_OUTCOME_FAILED);
    assert_int_equal(dkv_outcome_of(DKV_E_DEVICE), DKV_OUTCOME_FAILED);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_client_cannot_start_a_line_of_its_own),
        cmocka_unit_test(a_long_message_is_cut_and_stays_one_line),
        cmocka_unit_test(escapes_are_never_cut_in_two),
        cmocka_unit_test(a_budget_lets_a_burst_and_then_a_rate_pass),
        cmocka_unit_test(a_line_that_is_cut_stays_json),
        cmocka_unit_test(every_counter_is_there_before_the_first_request),
        cmocka_unit_test(histogram_bounds_are_inclusive_and_cumulative),
        cmocka_unit_test(a_request_counts_in_one_outcome_and_its_durations),
        cmocka_unit_test(every_status_has_an_outcome),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
