/* Files that change under the mapping, and what cannot be mapped at all. */
#include "client/cli/guard.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <sysexits.h>
#include <unistd.h>

#include <cmocka.h>

#define DATA_BYTES 65536u

static char folder[] = "/tmp/dkv-test-guard-XXXXXX";
static char path[64];

/* One tensor of DATA_BYTES bytes. */
static void write_file(void)
{
    char header[96];
    const int n = snprintf(header, sizeof(header),
                           "{\"a\":{\"dtype\":\"U8\",\"shape\":[%u],\"data_offsets\":[0,%u]}}",
                           DATA_BYTES, DATA_BYTES);
    const uint8_t length[8] = {(uint8_t)n};
    static const uint8_t data[DATA_BYTES];
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(length, 1, 8, file), 8);
    assert_int_equal(fwrite(header, 1, (size_t)n, file), n);
    assert_int_equal(fwrite(data, 1, DATA_BYTES, file), DATA_BYTES);
    assert_int_equal(fclose(file), 0);
}

/* Reads the last byte of a file that was cut after it was opened; never returns. */
static void read_shrunk_file(int error_fd)
{
    struct dkv_tensor_file file;
    dup2(error_fd, STDERR_FILENO);
    if (dkv_tensor_file_open(path, &file, NULL) != DKV_OK)
        _exit(1);
    dkv_guard_add(&file);
    if (truncate(path, 4096) != 0)
        _exit(2);
    const struct dkv_tensor *t = &file.index.tensors[0];
    const volatile uint8_t *last = t->data + t->bytes - 1;
    _exit(*last == 0 ? 3 : 4);
}

static void a_file_that_shrinks_is_named_and_ends_the_program(void **state)
{
    (void)state;
    int pipe_fds[2];
    char said[512] = {0};
    int status;
    write_file();
    assert_int_equal(pipe(pipe_fds), 0);
    const pid_t pid = fork();
    if (pid == 0)
        read_shrunk_file(pipe_fds[1]);
    close(pipe_fds[1]);
    size_t used = 0;
    ssize_t n;
    while ((n = read(pipe_fds[0], said + used, sizeof(said) - 1 - used)) > 0)
        used += (size_t)n;
    close(pipe_fds[0]);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), EX_IOERR);
    assert_non_null(strstr(said, path));
    assert_non_null(strstr(said, "shrank"));
}

static void refused(const char *name, enum dkv_status status, const char *part)
{
    struct dkv_tensor_file file = {0};
    struct dkv_error error = {0};
    assert_int_equal(dkv_tensor_file_open(name, &file, &error), status);
    if (strstr(error.text, part) == NULL)
        fail_msg("'%s' does not say '%s'", error.text, part);
    assert_null(file.map);
}

static void what_is_not_a_file_is_refused(void **state)
{
    (void)state;
    refused("/nonexistent/x", DKV_E_NOT_FOUND, "could not open");
    refused(folder, DKV_E_INVALID, "not a regular file");
    refused("/dev/null", DKV_E_INVALID, "not a regular file");
    char fifo[64];
    snprintf(fifo, sizeof(fifo), "%s/fifo", folder);
    assert_int_equal(mkfifo(fifo, 0600), 0);
    refused(fifo, DKV_E_INVALID, "not a regular file");
    unlink(fifo);
    assert_int_equal(truncate(path, 0), 0);
    refused(path, DKV_E_INVALID, "empty");
}

static void names_are_made_fit_for_terminals(void **state)
{
    (void)state;
    static const struct {
        const char *raw;
        size_t room;
        const char *shown;
    } rows[] = {
        {"layers.0.key", 64, "layers.0.key"},
        {"\033[2Jx\n\x7f", 64, "?[2Jx??"},
        {"caf\xc3\xa9 \xe2\x96\x88", 64, "caf\xc3\xa9 \xe2\x96\x88"},
        {"\xc2\x9b"
         "31m",
         64, "??31m"}, /* CSI as one character */
        {"\xff\xc3", 64, "??"},
        {"abcdefgh", 9, "abcdefgh"},
        {"abcdefghi", 9, "abcde..."},
        {"abc\xc3\xa9\xc3\xa9\xc3\xa9", 9, "abc\xc3\xa9..."},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        char out[64];
        assert_string_equal(dkv_printable(rows[i].raw, out, rows[i].room), rows[i].shown);
    }
}

static int make_folder(void **state)
{
    (void)state;
    if (mkdtemp(folder) == NULL)
        return -1;
    snprintf(path, sizeof(path), "%s/dump.safetensors", folder);
    return 0;
}

static int remove_folder(void **state)
{
    (void)state;
    unlink(path);
    return rmdir(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_file_that_shrinks_is_named_and_ends_the_program),
        cmocka_unit_test(what_is_not_a_file_is_refused),
        cmocka_unit_test(names_are_made_fit_for_terminals),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
