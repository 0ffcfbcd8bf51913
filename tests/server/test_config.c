/* Unit tests of server/config: the table, its sources and their order, the messages. */
#include "server/cli.h"
#include "server/config.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static struct dkv_config_state state;
static struct dkv_error err;
static enum dkv_cli_action action;

static int fresh(void **unused)
{
    (void)unused;
    dkv_config_init(&state);
    memset(&err, 0, sizeof(err));
    return 0;
}

static int drop(void **unused)
{
    (void)unused;
    unsetenv("DROPKVD_THREADS");
    unsetenv("DROPKVD_CONFIG");
    unsetenv("DROPKVD_SERVICE_PORT");
    dkv_config_fini(&state);
    return 0;
}

/* A temporary file with `text`, deleted by the caller; the name is static. */
static const char *file_with(const char *text)
{
    static char path[32];
    strcpy(path, "/tmp/dropkvd-test-XXXXXX");
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), (ssize_t)strlen(text));
    close(fd);
    return path;
}

static enum dkv_status load(const char *text)
{
    const char *path = file_with(text);
    enum dkv_status status = dkv_config_load_file(&state, path, &err);
    unlink(path);
    return status;
}

static enum dkv_status arguments(const char *one, const char *two)
{
    const char *argv[] = {"dropkvd", one, two, NULL};
    int argc = one == NULL ? 1 : two == NULL ? 2 : 3;
    return dkv_cli_read(argc, argv, &state, &action, &err);
}

static void the_defaults_are_good(void **unused)
{
    (void)unused;
    assert_int_equal(dkv_config_check(&state.config, &err), DKV_OK);
    assert_string_equal(state.config.http, "127.0.0.1:8480");
    assert_int_equal(state.config.max_body_bytes, UINT64_C(4) << 30);
}

static void every_field_has_a_name_a_help_and_a_range(void **unused)
{
    (void)unused;
    for (int i = 0; i < DKV_CONFIG_FIELDS; i++) {
        assert_non_null(dkv_config_fields[i].name);
        assert_true(strlen(dkv_config_fields[i].help) > 10);
        assert_int_equal(dkv_config_find(dkv_config_fields[i].name), i);
        if (dkv_config_fields[i].kind == DKV_CONFIG_U64)
            assert_true(dkv_config_fields[i].min < dkv_config_fields[i].max);
    }
    assert_int_equal(dkv_config_find("nothing"), -1);
    assert_int_equal(dkv_config_find("log-level"), dkv_config_find("log_level"));
}

static void a_later_source_wins(void **unused)
{
    (void)unused;
    const char *path = file_with(
        "{\"threads\": 3, \"max_connections\": 7, \"log_level\": \"warn\"}");
    setenv("DROPKVD_THREADS", "5", 1);
    setenv("DROPKVD_CONFIG", path, 1);
    assert_int_equal(arguments("--log-level=debug", NULL), DKV_OK);
    unlink(path);
    assert_int_equal(state.config.threads, 5);
    assert_int_equal(state.config.max_connections, 7);
    assert_string_equal(state.config.log_level, "debug");
    assert_int_equal(state.sources[dkv_config_find("threads")], DKV_SOURCE_ENV);
    assert_int_equal(state.sources[dkv_config_find("max_connections")], DKV_SOURCE_FILE);
    assert_int_equal(state.sources[dkv_config_find("log_level")], DKV_SOURCE_ARG);
    assert_int_equal(state.sources[dkv_config_find("http")], DKV_SOURCE_DEFAULT);
}

static void variables_that_a_platform_makes_up_are_ignored(void **unused)
{
    (void)unused;
    setenv("DROPKVD_SERVICE_PORT", "tcp://10.0.0.1:80", 1);
    assert_int_equal(arguments(NULL, NULL), DKV_OK);
}

static void an_argument_overrides_the_file_that_another_names(void **unused)
{
    (void)unused;
    char option[64];
    const char *path = file_with("{\"threads\": 3}");
    snprintf(option, sizeof(option), "--config=%s", path);
    assert_int_equal(arguments("--threads=4", option), DKV_OK);
    unlink(path);
    assert_int_equal(state.config.threads, 4);
}

static void units_multiply(void **unused)
{
    (void)unused;
    assert_int_equal(arguments("--max-body-bytes=64MiB", "--behind-proxy"), DKV_OK);
    assert_int_equal(state.config.max_body_bytes, UINT64_C(64) << 20);
    assert_true(state.config.behind_proxy);
    assert_int_equal(arguments("--behind-proxy=false", NULL), DKV_OK);
    assert_false(state.config.behind_proxy);
}

static void a_bad_argument_is_named_with_value_and_range(void **unused)
{
    static const struct {
        const char *argument;
        const char *words[3];
    } rows[] = {
        {"--threads=-1", {"--threads", "'-1'", "0..1024"}},
        {"--threads=1025", {"--threads", "'1025'", "0..1024"}},
        {"--threads=", {"--threads", "''", "0..1024"}},
        {"--threads=4 ", {"--threads", "'4 '", "0..1024"}},
        {"--threads=0x4", {"--threads", "'0x4'", "0..1024"}},
        {"--threads=4.0", {"--threads", "'4.0'", "0..1024"}},
        {"--threads=18446744073709551620", {"--threads", "0..1024", ""}},
        {"--max-body-bytes=99999999TiB", {"--max-body-bytes", "bytes", ".."}},
        {"--max-body-bytes=4gib", {"--max-body-bytes", "'4gib'", ".."}},
        {"--log-level=loud", {"--log-level", "'loud'", "error | warn | info | debug | trace"}},
        {"--log-format=xml", {"--log-format", "'xml'", "text | json"}},
        {"--behind-proxy=maybe", {"--behind-proxy", "'maybe'", "true nor false"}},
        {"--header-timeout-ms=0", {"--header-timeout-ms", "'0'", "1..3600000 ms"}},
        {"--nothing=1", {"--nothing", "unknown option", ""}},
        {"stray", {"'stray'", "no argument", ""}},
        {"--http=127.0.0.1", {"http", "127.0.0.1", "ADDRESS:PORT"}},
        {"--http=127.0.0.1:65536", {"http", "65536", "ADDRESS:PORT"}},
        {"--http=::1:8480", {"http", "::1:8480", "ADDRESS:PORT"}},
        {"--http=example.org:80", {"http", "example.org", "ADDRESS:PORT"}},
        {"--http=0.0.0.0:8480", {"http", "0.0.0.0:8480", "token_file"}},
        {"--http=[::]:8480", {"http", "loopback", "token_file"}},
        {"--config=/nonexistent/x.json", {"config", "/nonexistent/x.json", "No such file"}},
        {"--max-queue-bytes=1MiB", {"max_body_bytes", "4294967296", "max_queue_bytes"}},
        {"--max-queue-bytes=4GiB", {"max_body_bytes", "above 2147483648", "max_client_bytes"}},
        {"--max-client-bytes=1GiB", {"max_body_bytes", "above 1073741824", "max_client_bytes"}},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        dkv_config_fini(&state);
        dkv_config_init(&state);
        if (arguments(rows[i].argument, NULL) == DKV_OK)
            fail_msg("%s was accepted", rows[i].argument);
        for (int w = 0; w < 3; w++)
            if (strstr(err.text, rows[i].words[w]) == NULL)
                fail_msg("%s: '%s' lacks '%s'", rows[i].argument, err.text, rows[i].words[w]);
    }
    (void)unused;
}

static void one_of_http_and_socket_may_be_off(void **unused)
{
    (void)unused;
    assert_int_equal(arguments("--http=off", NULL), DKV_OK);
    assert_int_equal(arguments("--http=off", "--socket=off"), DKV_E_INVALID);
    assert_non_null(strstr(err.text, "nothing to serve"));
    dkv_config_fini(&state);
    dkv_config_init(&state);
    assert_int_equal(arguments("--socket=off", NULL), DKV_OK);
}

static void an_open_address_needs_a_token_file_and_a_proxy(void **unused)
{
    (void)unused;
    assert_int_equal(arguments("--http=0.0.0.0:1", "--token-file=/x"), DKV_E_INVALID);
    assert_non_null(strstr(err.text, "behind_proxy"));
    setenv("DROPKVD_TOKEN_FILE", "/x", 1);
    enum dkv_status status = arguments("--http=0.0.0.0:1", "--behind-proxy");
    unsetenv("DROPKVD_TOKEN_FILE");
    assert_int_equal(status, DKV_OK);
}

static void a_bad_file_is_refused(void **unused)
{
    static const struct {
        const char *text;
        enum dkv_status status;
        const char *word;
    } rows[] = {
        {"", DKV_E_MALFORMED, "line"},
        {"[]", DKV_E_MALFORMED, "object"},
        {"{\"threads\": 1", DKV_E_MALFORMED, "line 1"},
        {"{\"threads\": 1} x", DKV_E_MALFORMED, "line 1"},
        {"{\"threads\": 1, \"threads\": 2}", DKV_E_MALFORMED, "duplicate"},
        {"{\"thread\": 1}", DKV_E_INVALID, "'thread'"},
        {"{\"log-level\": \"info\"}", DKV_E_INVALID, "'log-level'"},
        {"{\"threads\": 1.0}", DKV_E_INVALID, "threads"},
        {"{\"threads\": 1e400}", DKV_E_MALFORMED, "overflow"},
        {"{\"threads\": null}", DKV_E_INVALID, "threads"},
        {"{\"threads\": [1]}", DKV_E_INVALID, "threads"},
        {"{\"threads\": 99999}", DKV_E_INVALID, "0..1024"},
        {"{\"log_level\": 3}", DKV_E_INVALID, "text"},
        {"{\"behind_proxy\": \"true\"}", DKV_E_INVALID, "true or false"},
    };
    (void)unused;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        assert_int_equal(load(rows[i].text), rows[i].status);
        if (strstr(err.text, rows[i].word) == NULL)
            fail_msg("%s: '%s' lacks '%s'", rows[i].text, err.text, rows[i].word);
    }
    assert_int_equal(dkv_config_load_file(&state, "/dev/zero", &err), DKV_E_IO);
    assert_int_equal(dkv_config_load_file(&state, "/tmp", &err), DKV_E_IO);
}

static void what_is_printed_reads_back_the_same(void **unused)
{
    char *first = NULL, *second = NULL;
    size_t n;
    (void)unused;
    assert_int_equal(arguments("--max-body-bytes=1GiB", "--port-file=/tmp/a \"b\\c"), DKV_OK);
    FILE *out = open_memstream(&first, &n);
    dkv_config_print(&state, false, out);
    fclose(out);
    dkv_config_fini(&state);
    dkv_config_init(&state);
    assert_int_equal(load(first), DKV_OK);
    out = open_memstream(&second, &n);
    dkv_config_print(&state, false, out);
    fclose(out);
    assert_string_equal(first, second);
    free(first);
    free(second);
}

static void sources_are_told(void **unused)
{
    char *text = NULL;
    size_t n;
    (void)unused;
    assert_int_equal(arguments("--threads=2", "--print-sources"), DKV_OK);
    assert_int_equal(action, DKV_CLI_PRINT_SOURCES);
    FILE *out = open_memstream(&text, &n);
    dkv_config_print(&state, true, out);
    fclose(out);
    assert_non_null(strstr(text, "\"threads\": {\"value\": 2, \"source\": \"argument\"}"));
    assert_non_null(strstr(text, "\"device\": {\"value\": \"cpu\", \"source\": \"default\"}"));
    free(text);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, fresh, drop)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(the_defaults_are_good),
        TEST(every_field_has_a_name_a_help_and_a_range),
        TEST(a_later_source_wins),
        TEST(variables_that_a_platform_makes_up_are_ignored),
        TEST(an_argument_overrides_the_file_that_another_names),
        TEST(units_multiply),
        TEST(a_bad_argument_is_named_with_value_and_range),
        TEST(one_of_http_and_socket_may_be_off),
        TEST(an_open_address_needs_a_token_file_and_a_proxy),
        TEST(a_bad_file_is_refused),
        TEST(what_is_printed_reads_back_the_same),
        TEST(sources_are_told),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
