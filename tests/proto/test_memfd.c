/* Shared host memory: what is mapped is sealed, what is not sealed is read, what is neither is
 * refused by its kind. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/memfd.h"

static struct dkv_error err;

static int memfd(uint64_t bytes, int seals)
{
    const int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, (off_t)bytes), 0);
    if (seals != 0)
        assert_int_equal(fcntl(fd, F_ADD_SEALS, seals), 0);
    return fd;
}

static void refused(int fd, const char *word)
{
    struct dkv_memfd_info info;
    assert_true(fd >= 0);
    assert_int_equal(dkv_memfd_inspect(fd, &info, &err), DKV_E_INVALID);
    if (strstr(err.text, word) == NULL)
        fail_msg("\"%s\" does not say \"%s\"", err.text, word);
    close(fd);
}

static void our_own_is_sealed_allocated_and_zero(void **state)
{
    (void)state;
    struct dkv_memfd_info info;
    struct stat st;
    void *base;
    int fd;
    assert_int_equal(dkv_memfd_new(100000, &fd, &base, &err), DKV_OK);
    assert_int_equal(dkv_memfd_inspect(fd, &info, &err), DKV_OK);
    assert_int_equal(info.kind, DKV_MEMFD_SEALED);
    assert_int_equal(info.bytes, 100000);
    assert_true(info.writable);
    assert_int_equal(fstat(fd, &st), 0);
    assert_true(st.st_blocks * 512 >= 100000);
    assert_int_not_equal(ftruncate(fd, 1), 0);
    for (size_t i = 0; i < 100000; i += 99)
        assert_int_equal(((char *)base)[i], 0);
    dkv_memfd_unmap(base, 100000);
    close(fd);
    assert_int_equal(dkv_memfd_new(0, &fd, &base, &err), DKV_E_INVALID);
    assert_int_equal(dkv_memfd_new(UINT64_C(1) << 62, &fd, &base, &err), DKV_E_NOMEM);
}

static void what_is_no_memory_is_refused_by_its_kind(void **state)
{
    (void)state;
    int pipes[2], sockets[2];
    char name[] = "test_memfd_XXXXXX";
    assert_int_equal(pipe(pipes), 0);
    refused(pipes[0], "a pipe");
    refused(pipes[1], "not open for reading");
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets), 0);
    refused(sockets[0], "a socket");
    close(sockets[1]);
    refused(open("/dev/zero", O_RDWR), "a device");
    refused(open(".", O_RDONLY), "a directory");
    refused(open(".", O_PATH), "not open for reading");
    refused(eventfd(0, 0), "not a file");
    const int disk = mkstemp(name);
    assert_true(disk >= 0);
    unlink(name);
    if (fcntl(disk, F_GET_SEALS) < 0) /* the build folder is not a tmpfs */
        refused(disk, "a file on disk");
    struct dkv_memfd_info info;
    assert_int_equal(dkv_memfd_inspect(-1, &info, &err), DKV_E_INVALID);
}

static void only_both_seals_make_it_mappable(void **state)
{
    (void)state;
    static const int seals[] = {0, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_SHRINK | F_SEAL_GROW};
    for (unsigned i = 0; i < 4; i++) {
        struct dkv_memfd_info info;
        void *base = NULL;
        const int fd = memfd(8192, seals[i]);
        assert_int_equal(dkv_memfd_inspect(fd, &info, &err), DKV_OK);
        assert_int_equal(info.kind, i == 3 ? DKV_MEMFD_SEALED : DKV_MEMFD_LOOSE);
        assert_int_equal(dkv_memfd_map(fd, 0, 8192, false, &base, &err),
                         i == 3 ? DKV_OK : DKV_E_INVALID);
        dkv_memfd_unmap(base, 8192);
        close(fd);
    }
}

/* Their owner can punch a hole and use up the pool: to touch the hole is a SIGBUS then. */
static void huge_pages_are_not_mapped(void **state)
{
    (void)state;
    struct dkv_memfd_info info;
    void *base = NULL;
    char read[64];
    const int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB);
    if (fd < 0)
        skip(); /* a kernel without them */
    assert_int_equal(ftruncate(fd, 2 << 20), 0);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
    assert_int_equal(dkv_memfd_inspect(fd, &info, &err), DKV_OK);
    assert_int_equal(info.kind, DKV_MEMFD_LOOSE);
    assert_false(info.writable);
    assert_int_equal(dkv_memfd_map(fd, 0, 4096, false, &base, &err), DKV_E_INVALID);
    assert_int_equal(dkv_memfd_read(fd, 4096, read, sizeof(read), &err), DKV_OK);
    close(fd);
}

static void a_file_that_was_short_when_it_was_sealed_is_not_mapped_beyond_its_end(void **state)
{
    (void)state;
    void *base;
    const int fd = memfd(4096, F_SEAL_SHRINK | F_SEAL_GROW);
    static const uint64_t values[] = {
        0, 1, 4095, 4096, 4097, 1u << 31, UINT64_C(1) << 32, UINT64_MAX - 1, UINT64_MAX};
    for (unsigned i = 0; i < 9; i++)
        for (unsigned k = 0; k < 9; k++) {
            const uint64_t offset = values[i], bytes = values[k];
            const bool fits = bytes > 0 && offset <= 4096 && bytes <= 4096 - offset;
            assert_int_equal(dkv_memfd_map(fd, offset, bytes, false, &base, &err),
                             fits ? DKV_OK : DKV_E_INVALID);
            if (fits)
                dkv_memfd_unmap(base, bytes);
        }
    close(fd);
}

static void any_offset_can_be_mapped(void **state)
{
    (void)state;
    const char text[] = "at an odd place";
    void *base;
    const int fd = memfd(100000, F_SEAL_SHRINK | F_SEAL_GROW);
    assert_int_equal(pwrite(fd, text, sizeof(text), 50001), sizeof(text));
    assert_int_equal(dkv_memfd_map(fd, 50001, sizeof(text), true, &base, &err), DKV_OK);
    assert_string_equal(base, text);
    dkv_memfd_unmap(base, sizeof(text));
    close(fd);
}

static void memory_sealed_against_writing_is_no_output(void **state)
{
    (void)state;
    struct dkv_memfd_info info;
    void *base;
    const int fd = memfd(4096, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE);
    assert_int_equal(dkv_memfd_inspect(fd, &info, &err), DKV_OK);
    assert_false(info.writable);
    assert_int_equal(dkv_memfd_map(fd, 0, 4096, true, &base, &err), DKV_E_INVALID);
    close(fd);
}

static void a_truncated_file_is_an_error_and_no_signal(void **state)
{
    (void)state;
    char to[8192];
    const int fd = memfd(8192, 0);
    assert_int_equal(dkv_memfd_read(fd, 0, to, 8192, &err), DKV_OK);
    assert_int_equal(ftruncate(fd, 4097), 0);
    assert_int_equal(dkv_memfd_read(fd, 0, to, 8192, &err), DKV_E_INVALID);
    assert_non_null(strstr(err.text, "4097"));
    assert_int_equal(dkv_memfd_read(fd, 4097, to, 0, &err), DKV_OK);
    assert_int_equal(dkv_memfd_read(fd, UINT64_MAX - 5, to, 100, &err), DKV_E_INVALID);
    close(fd);
}

static void a_sparse_terabyte_costs_nothing_to_look_at(void **state)
{
    (void)state;
    struct dkv_memfd_info info;
    struct stat st;
    char to[4096];
    const int fd = memfd(UINT64_C(1) << 40, 0);
    assert_int_equal(dkv_memfd_inspect(fd, &info, &err), DKV_OK);
    assert_true(info.bytes == UINT64_C(1) << 40);
    assert_int_equal(dkv_memfd_read(fd, UINT64_C(1) << 39, to, sizeof(to), &err), DKV_OK);
    assert_int_equal(fstat(fd, &st), 0);
    assert_int_equal(st.st_blocks, 0);
    close(fd);
}

static void holes_are_seen_until_they_are_filled(void **state)
{
    (void)state;
    const int fd = memfd(10000, 0);
    assert_true(dkv_memfd_has_holes(fd));
    assert_int_equal(pwrite(fd, "x", 1, 5000), 1);
    assert_true(dkv_memfd_has_holes(fd));
    assert_int_equal(fallocate(fd, 0, 0, 10000), 0);
    assert_false(dkv_memfd_has_holes(fd));
    assert_int_equal(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 4096, 4096), 0);
    assert_true(dkv_memfd_has_holes(fd));
    close(fd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(our_own_is_sealed_allocated_and_zero),
        cmocka_unit_test(what_is_no_memory_is_refused_by_its_kind),
        cmocka_unit_test(only_both_seals_make_it_mappable),
        cmocka_unit_test(huge_pages_are_not_mapped),
        cmocka_unit_test(a_file_that_was_short_when_it_was_sealed_is_not_mapped_beyond_its_end),
        cmocka_unit_test(any_offset_can_be_mapped),
        cmocka_unit_test(memory_sealed_against_writing_is_no_output),
        cmocka_unit_test(a_truncated_file_is_an_error_and_no_signal),
        cmocka_unit_test(holes_are_seen_until_they_are_filled),
        cmocka_unit_test(a_sparse_terabyte_costs_nothing_to_look_at),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
