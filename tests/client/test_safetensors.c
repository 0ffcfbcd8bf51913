/* The safetensors reader: what it accepts, and each way a file can be wrong. */
#include "client/safetensors.h"

#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

/* A file in memory. */
struct file {
    uint8_t *bytes;
    uint64_t size;
};

static struct file make_file(const char *header, uint64_t header_length, uint64_t data_bytes)
{
    const uint64_t actual = strlen(header);
    struct file file = {.size = 8 + actual + data_bytes};
    file.bytes = calloc(1, file.size);
    assert_non_null(file.bytes);
    for (unsigned i = 0; i < 8; i++)
        file.bytes[i] = (uint8_t)(header_length >> (8 * i));
    memcpy(file.bytes + 8, header, actual);
    return file;
}

static struct file well_formed(const char *header, uint64_t data_bytes)
{
    return make_file(header, strlen(header), data_bytes);
}

static void assert_refused(struct file file, const char *part)
{
    struct dkv_tensor_index index = {0};
    struct dkv_error error = {0};
    const enum dkv_status status = dkv_safetensors_parse(file.bytes, file.size, &index, &error);
    if (status != DKV_E_INVALID)
        fail_msg("status %d instead of INVALID, wanted '%s'", status, part);
    if (strstr(error.text, part) == NULL)
        fail_msg("'%s' does not say '%s'", error.text, part);
    assert_null(index.tensors);
    free(file.bytes);
}

static void header_refused(const char *header, uint64_t data_bytes, const char *part)
{
    assert_refused(well_formed(header, data_bytes), part);
}

static void tensors_are_found_with_shape_type_and_place(void **state)
{
    (void)state;
    struct file file = well_formed(
        "{\"__metadata__\":{\"a\":\"b\"},"
        "\"b\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[8,20]},"
        "\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}   ",
        20);
    struct dkv_tensor_index index = {0};
    struct dkv_error error;
    assert_int_equal(dkv_safetensors_parse(file.bytes, file.size, &index, &error), DKV_OK);
    assert_int_equal(index.n_tensors, 2);
    const struct dkv_tensor *b = dkv_tensor_index_find(&index, "b");
    assert_non_null(b);
    assert_int_equal(b->dtype, DKV_BF16);
    assert_int_equal(b->n_dims, 2);
    assert_int_equal(b->shape[1], 3);
    assert_int_equal(b->bytes, 12);
    assert_ptr_equal(b->data, file.bytes + file.size - 12);
    assert_null(dkv_tensor_index_find(&index, "c"));
    assert_null(dkv_tensor_index_find(&index, "__metadata__"));
    dkv_tensor_index_fini(&index);
    free(file.bytes);
}

static void control_characters_of_a_file_do_not_reach_the_terminal(void **state)
{
    (void)state;
    static const char *const headers[] = {"{\"a\":\x1b}", "{\"a\":{\"b\" \x1b 1}}",
                                          "{\"a\":{\"b\":1\n\x1b}}"};
    for (size_t i = 0; i < sizeof(headers) / sizeof(headers[0]); i++) {
        struct file file = well_formed(headers[i], 0);
        struct dkv_tensor_index index = {0};
        struct dkv_error error = {0};
        assert_int_equal(dkv_safetensors_parse(file.bytes, file.size, &index, &error),
                         DKV_E_INVALID);
        for (const char *text = error.text; *text != '\0'; text++)
            if ((unsigned char)*text < 0x20)
                fail_msg("byte 0x%02x in the text of header %zu", (unsigned char)*text, i);
        free(file.bytes);
    }
}

static void escaped_names_are_read(void **state)
{
    (void)state;
    struct file file = well_formed(
        "{\"a\\\"}\\u00e9\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]}}", 1);
    struct dkv_tensor_index index = {0};
    assert_int_equal(dkv_safetensors_parse(file.bytes, file.size, &index, NULL), DKV_OK);
    assert_string_equal(index.tensors[0].name, "a\"}\xc3\xa9");
    dkv_tensor_index_fini(&index);
    free(file.bytes);
}

static void empty_files_and_empty_tensors_are_fine(void **state)
{
    (void)state;
    const char *const headers[] = {
        "{}",
        "{ }",
        "{\"e\":{\"dtype\":\"F32\",\"shape\":[0,4],\"data_offsets\":[0,0]}}",
    };
    for (size_t i = 0; i < sizeof(headers) / sizeof(headers[0]); i++) {
        struct file file = well_formed(headers[i], 0);
        struct dkv_tensor_index index = {0};
        assert_int_equal(dkv_safetensors_parse(file.bytes, file.size, &index, NULL), DKV_OK);
        dkv_tensor_index_fini(&index);
        free(file.bytes);
    }
}

static void types_unknown_to_us_are_tolerated(void **state)
{
    (void)state;
    struct file file = well_formed(
        "{\"a\":{\"dtype\":\"Q7_FUTURE\",\"shape\":[9],\"data_offsets\":[0,3]},"
        "\"i\":{\"dtype\":\"I64\",\"shape\":[1],\"data_offsets\":[3,11]}}",
        11);
    struct dkv_tensor_index index = {0};
    assert_int_equal(dkv_safetensors_parse(file.bytes, file.size, &index, NULL), DKV_OK);
    assert_int_equal(index.tensors[0].dtype, DKV_DTYPE_NONE);
    assert_string_equal(index.tensors[0].type_name, "Q7_FUTURE");
    dkv_tensor_index_fini(&index);
    free(file.bytes);
}

static void every_truncation_is_refused(void **state)
{
    (void)state;
    struct file whole = well_formed(
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8);
    for (uint64_t size = 0; size < whole.size; size++) {
        struct dkv_tensor_index index = {0};
        uint8_t *cut = malloc(size == 0 ? 1 : size); /* its own end, for the sanitizer */
        memcpy(cut, whole.bytes, size);
        assert_int_equal(dkv_safetensors_parse(cut, size, &index, NULL), DKV_E_INVALID);
        free(cut);
    }
    free(whole.bytes);
}

static void lying_header_lengths_are_refused(void **state)
{
    (void)state;
    assert_refused(make_file("{}", 3, 0), "truncated");
    assert_refused(make_file("{}", 1, 0), "expected");
    assert_refused(make_file("{}", 0, 0), "begin with '{'");
    assert_refused(make_file("{}", UINT64_MAX, 0), "not in 2..100000000");
    assert_refused(make_file("{}", UINT64_MAX - 7, 0), "not in 2..");
    assert_refused(make_file("{}", 100000001, 0), "not in 2..");
}

static void headers_that_are_not_json_are_refused(void **state)
{
    (void)state;
    header_refused(" {}", 0, "does not begin with '{'");
    header_refused("[]", 0, "does not begin with '{'");
    header_refused("{}x", 0, "something follows");
    header_refused("{\"a\"}", 0, "':' was expected");
    header_refused("{\"a\":}", 0, "not JSON");
    header_refused("{\"a\":1", 0, "does not end");
    header_refused("{\"a\":\"b}", 0, "does not end");
    header_refused("{\"a\\", 0, "name was expected");
    header_refused("{\"a\":{]}}", 0, "not JSON");
    header_refused("{\"a\":]}", 0, "does not end");
    header_refused("{,}", 0, "name was expected");
    header_refused("{\"a\":{},}", 0, "\"dtype\" is missing");
    header_refused("{\"\xff\":{}}", 0, "not a JSON string");
    header_refused("{\"a\":1}", 0, "not JSON");
    header_refused("{\"a\":[]}", 0, "not an object");
    header_refused("{\"__metadata__\":{\"a\":1}}", 0, "not a string");
    header_refused("{\"__metadata__\":{},\"__metadata__\":{}}", 0, "used twice");
}

static void nesting_bombs_are_refused(void **state)
{
    (void)state;
    static char header[1000006] = "{\"a\":";
    const size_t start = strlen(header);
    memset(header + start, '[', sizeof(header) - 1 - start);
    header_refused(header, 0, "nested more than");
    for (size_t i = start; i + 4 < sizeof(header); i += 4)
        memcpy(header + i, "{\"\":", 4);
    header_refused(header, 0, "nested more than");
}

static void shapes_and_offsets_must_agree(void **state)
{
    (void)state;
    header_refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,8]}}", 8,
                   "3 elements of F32 are 12 bytes, data_offsets give 8");
    header_refused("{\"a\":{\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,1]}}", 1,
                   "3 elements of F4");
    header_refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[9],\"data_offsets\":[0,9]}}", 8,
                   "past the 8 bytes");
    header_refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[4,2]}}", 8,
                   "ends before it begins");
    header_refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1,2]}}", 1,
                   "not two counts");
    header_refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[-1,0]}}", 1,
                   "not two counts");
    header_refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[1.0],\"data_offsets\":[0,1]}}", 1,
                   "not a count");
    header_refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[-1],\"data_offsets\":[0,1]}}", 1,
                   "not a count");
    header_refused("{\"a\":{\"dtype\":\"U8\",\"shape\":3,\"data_offsets\":[0,1]}}", 1,
                   "not an array");
    header_refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[4294967296,4294967296],"
                   "\"data_offsets\":[0,0]}}",
                   0, "overflows");
    header_refused("{\"a\":{\"dtype\":\"F64\",\"shape\":[2305843009213693952],"
                   "\"data_offsets\":[0,0]}}",
                   0, "overflows");
}

static void overlaps_gaps_and_leftovers_are_refused(void **state)
{
    (void)state;
#define PAIR(a, b, c, d)                                                        \
    "{\"x\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[" #a "," #b "]}," \
    "\"y\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[" #c "," #d "]}}"
    header_refused(PAIR(0, 4, 2, 6), 6, "inside the end");
    header_refused(PAIR(0, 4, 0, 4), 4, "inside the end");
    header_refused(PAIR(0, 4, 5, 9), 9, "leaving a gap");
    header_refused(PAIR(1, 5, 5, 9), 9, "leaving a gap");
    header_refused(PAIR(0, 4, 4, 8), 9, "the tensors end at 8");
    header_refused("{}", 1, "the tensors end at 0");
}

static void names_used_twice_are_refused(void **state)
{
    (void)state;
    header_refused("{\"x\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
                   "\"\\u0078\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}",
                   2, "x: the name is used twice");
    header_refused("{\"x\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[1],"
                   "\"data_offsets\":[0,1]}}",
                   1, "duplicate");
}

static void names_with_terminal_commands_are_not_echoed(void **state)
{
    (void)state;
    header_refused("{\"\\u001b[2J\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,1]}}", 1,
                   "tensor ?[2J:");
}

static void a_million_tensors_are_read_in_seconds(void **state)
{
    (void)state;
    enum { N = 1000000 };
    char *header = malloc((size_t)N * 80);
    char *at = header;
    *at++ = '{';
    for (unsigned i = 0; i < N; i++)
        at += sprintf(at, "%s\"t%u\":{\"dtype\":\"BF16\",\"shape\":[1],\"data_offsets\":[%u,%u]}",
                      i > 0 ? "," : "", (unsigned)(i * UINT64_C(7919) % N), 2 * i, 2 * i + 2);
    strcpy(at, "}");
    struct file file = well_formed(header, 2 * (uint64_t)N);
    free(header);
    struct dkv_tensor_index index = {0};
    struct dkv_error error = {0};
    const clock_t start = clock();
    if (dkv_safetensors_parse(file.bytes, file.size, &index, &error) != DKV_OK)
        fail_msg("%s", error.text);
    const double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
    print_message("%.2f s of processor time\n", seconds);
    assert_int_equal(index.n_tensors, N);
    assert_non_null(dkv_tensor_index_find(&index, "t777777"));
#ifndef __SANITIZE_ADDRESS__ /* which makes allocations many times dearer */
    assert_true(seconds < 5.0);
#endif
    dkv_tensor_index_fini(&index);
    free(file.bytes);
}

static void what_is_written_is_read_back(void **state)
{
    (void)state;
    static const int32_t keep[6] = {1, 2, 3, 4, 5, 6};
    static const float scores[2] = {0.5f, -1.0f};
    const uint64_t keep_shape[3] = {1, 2, 3};
    const uint64_t scores_shape[1] = {2};
    const struct dkv_safetensors_out tensors[] = {
        {"a.keep_indices", "I32", 3, keep_shape, keep, sizeof(keep)},
        {"a.scores", "F32", 1, scores_shape, scores, sizeof(scores)},
    };
    const char *const metadata[][2] = {{"backend", "cpu \"quoted\""}};
    char *bytes = NULL;
    size_t size = 0;
    FILE *stream = open_memstream(&bytes, &size);
    assert_int_equal(dkv_safetensors_write(stream, tensors, 2, metadata, 1, NULL), DKV_OK);
    fclose(stream);
    struct dkv_tensor_index index = {0};
    assert_int_equal(dkv_safetensors_parse(bytes, size, &index, NULL), DKV_OK);
    const struct dkv_tensor *read = dkv_tensor_index_find(&index, "a.keep_indices");
    assert_non_null(read);
    assert_memory_equal(read->data, keep, sizeof(keep));
    assert_int_equal((uintptr_t)(read->data - (uint8_t *)bytes) % 64, 0);
    assert_int_equal(dkv_tensor_index_find(&index, "a.scores")->dtype, DKV_FP32);
    dkv_tensor_index_fini(&index);
    free(bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tensors_are_found_with_shape_type_and_place),
        cmocka_unit_test(control_characters_of_a_file_do_not_reach_the_terminal),
        cmocka_unit_test(escaped_names_are_read),
        cmocka_unit_test(empty_files_and_empty_tensors_are_fine),
        cmocka_unit_test(types_unknown_to_us_are_tolerated),
        cmocka_unit_test(every_truncation_is_refused),
        cmocka_unit_test(lying_header_lengths_are_refused),
        cmocka_unit_test(headers_that_are_not_json_are_refused),
        cmocka_unit_test(nesting_bombs_are_refused),
        cmocka_unit_test(shapes_and_offsets_must_agree),
        cmocka_unit_test(overlaps_gaps_and_leftovers_are_refused),
        cmocka_unit_test(names_used_twice_are_refused),
        cmocka_unit_test(names_with_terminal_commands_are_not_echoed),
        cmocka_unit_test(a_million_tensors_are_read_in_seconds),
        cmocka_unit_test(what_is_written_is_read_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
