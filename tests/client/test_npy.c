/* The npy reader: versions, orders, types, and each way a file can be wrong. */
#include "client/npy.h"

#include <setjmp.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

struct file {
    uint8_t *bytes;
    uint64_t size;
};

static struct file make_file(unsigned major, const char *header, uint64_t header_length,
                             uint64_t data_bytes)
{
    const unsigned length_bytes = major == 1 ? 2 : 4;
    const uint64_t start = 8 + length_bytes;
    struct file file = {.size = start + strlen(header) + data_bytes};
    file.bytes = calloc(1, file.size);
    assert_non_null(file.bytes);
    memcpy(file.bytes, DKV_NPY_MAGIC, 6);
    file.bytes[6] = (uint8_t)major;
    for (unsigned i = 0; i < length_bytes; i++)
        file.bytes[8 + i] = (uint8_t)(header_length >> (8 * i));
    memcpy(file.bytes + start, header, strlen(header));
    return file;
}

static struct file version1(const char *header, uint64_t data_bytes)
{
    return make_file(1, header, strlen(header), data_bytes);
}

static struct dkv_tensor_index accepted(struct file file)
{
    struct dkv_tensor_index index = {0};
    struct dkv_error error = {0};
    if (dkv_npy_parse(file.bytes, file.size, "x", &index, &error) != DKV_OK)
        fail_msg("refused: %s", error.text);
    assert_int_equal(index.n_tensors, 1);
    return index;
}

static void assert_refused(struct file file, enum dkv_status wanted, const char *part)
{
    struct dkv_tensor_index index = {0};
    struct dkv_error error = {0};
    const enum dkv_status status = dkv_npy_parse(file.bytes, file.size, "x", &index, &error);
    if (status != wanted || strstr(error.text, part) == NULL)
        fail_msg("%d '%s', wanted %d '%s'", status, error.text, wanted, part);
    assert_null(index.tensors);
    free(file.bytes);
}

static void all_three_versions_are_read(void **state)
{
    (void)state;
    const char *header = "{'descr': '<f2', 'fortran_order': False, 'shape': (2, 3), }      \n";
    for (unsigned version = 1; version <= 3; version++) {
        struct file file = make_file(version, header, strlen(header), 12);
        struct dkv_tensor_index index = accepted(file);
        assert_int_equal(index.tensors[0].dtype, DKV_FP16);
        assert_int_equal(index.tensors[0].n_dims, 2);
        assert_int_equal(index.tensors[0].shape[0], 2);
        assert_int_equal(index.tensors[0].shape[1], 3);
        assert_ptr_equal(index.tensors[0].data, file.bytes + file.size - 12);
        assert_string_equal(index.tensors[0].name, "x");
        dkv_tensor_index_fini(&index);
        free(file.bytes);
    }
}

static void keys_come_in_any_order_and_quotes(void **state)
{
    (void)state;
    const char *const headers[] = {
        "{\"shape\":(4,),\"fortran_order\":False,\"descr\":\"<f4\"}\n",
        "{'fortran_order': False, 'descr': '<f4', 'shape': (2L, 2L)}",
        "{ 'shape' : ( 1 , 4 ) , 'descr' : '<f4' , 'fortran_order' : False , }",
    };
    for (size_t i = 0; i < sizeof(headers) / sizeof(headers[0]); i++) {
        struct file file = version1(headers[i], 16);
        struct dkv_tensor_index index = accepted(file);
        assert_int_equal(index.tensors[0].dtype, DKV_FP32);
        dkv_tensor_index_fini(&index);
        free(file.bytes);
    }
}

static void scalars_and_empty_arrays_are_read(void **state)
{
    (void)state;
    struct file scalar = version1("{'descr': '<f4', 'fortran_order': False, 'shape': ()}", 4);
    struct dkv_tensor_index index = accepted(scalar);
    assert_int_equal(index.tensors[0].n_dims, 0);
    dkv_tensor_index_fini(&index);
    free(scalar.bytes);
    struct file empty = version1("{'descr': '<f4', 'fortran_order': False, 'shape': (0, 5)}", 0);
    index = accepted(empty);
    assert_int_equal(index.tensors[0].bytes, 0);
    dkv_tensor_index_fini(&index);
    free(empty.bytes);
}

static void fortran_order_is_refused_by_name(void **state)
{
    (void)state;
    assert_refused(version1("{'descr': '<f4', 'fortran_order': True, 'shape': (2, 2)}", 16),
                   DKV_E_UNSUPPORTED, "Fortran order");
}

static void big_endian_is_refused_by_name(void **state)
{
    (void)state;
    assert_refused(version1("{'descr': '>f4', 'fortran_order': False, 'shape': (2, 2)}", 16),
                   DKV_E_UNSUPPORTED, "big-endian");
}

static void objects_and_records_are_refused(void **state)
{
    (void)state;
    assert_refused(version1("{'descr': '|O', 'fortran_order': False, 'shape': (2,)}", 16),
                   DKV_E_UNSUPPORTED, "'|O'");
    assert_refused(version1("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2,)}", 8),
                   DKV_E_UNSUPPORTED, "not a plain element type");
    assert_refused(version1("{'descr': '<f0', 'fortran_order': False, 'shape': (2,)}", 0),
                   DKV_E_UNSUPPORTED, "'<f0'");
    assert_refused(version1("{'descr': '', 'fortran_order': False, 'shape': (2,)}", 0),
                   DKV_E_UNSUPPORTED, "not read");
}

static void raw_elements_take_the_type_they_are_given(void **state)
{
    (void)state;
    struct dkv_error error;
    struct file file = version1("{'descr': '|V2', 'fortran_order': False, 'shape': (3,)}", 6);
    struct dkv_tensor_index index = accepted(file);
    assert_int_equal(index.tensors[0].dtype, DKV_DTYPE_NONE);
    assert_int_equal(dkv_npy_set_dtype(&index.tensors[0], DKV_F8_E4M3, &error), DKV_E_INVALID);
    assert_non_null(strstr(error.text, "another size"));
    assert_int_equal(dkv_npy_set_dtype(&index.tensors[0], DKV_BF16, &error), DKV_OK);
    assert_int_equal(index.tensors[0].dtype, DKV_BF16);
    dkv_tensor_index_fini(&index);
    free(file.bytes);

    file = version1("{'descr': '<i2', 'fortran_order': False, 'shape': (3,)}", 6);
    index = accepted(file);
    assert_int_equal(dkv_npy_set_dtype(&index.tensors[0], DKV_BF16, &error), DKV_E_INVALID);
    dkv_tensor_index_fini(&index);
    free(file.bytes);
}

static void wrong_headers_are_refused(void **state)
{
    (void)state;
    static const struct {
        const char *header;
        const char *part;
    } rows[] = {
        {"", "not a dictionary"},
        {"{", "key was expected"},
        {"{}", "'descr' is missing"},
        {"{'descr': '<f4', 'shape': (1,)}", "'fortran_order' is missing"},
        {"{'descr': '<f4', 'fortran_order': False}", "'shape' is missing"},
        {"{'descr': '<f4', 'descr': '<f4'}", "used twice"},
        {"{'colour': 1}", "unknown"},
        {"{'descr': '<f4', 'fortran_order': 0, 'shape': (1,)}", "neither True nor False"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': 1}", "not a tuple"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}", "not a count"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (1 2)}", "does not end"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (1,", "not a count"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,)}",
         "not a count"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296)}",
         "overflows"},
        {"{'descr': '<f8', 'fortran_order': False, 'shape': (2305843009213693952,)}", "overflows"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (1,)} x", "something follows"},
        {"{'descr': '<f4' 'fortran_order': False}", "',' or '}'"},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
        assert_refused(version1(rows[i].header, 4), DKV_E_INVALID, rows[i].part);
}

static void sizes_must_agree(void **state)
{
    (void)state;
    const char *header = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2)}";
    assert_refused(version1(header, 15), DKV_E_INVALID,
                   "4 elements of '<f4' are 16 bytes, the file holds 15");
    assert_refused(version1(header, 17), DKV_E_INVALID, "the file holds 17");
}

static void lying_lengths_and_versions_are_refused(void **state)
{
    (void)state;
    assert_refused(make_file(1, "{}", 3, 0), DKV_E_INVALID, "truncated");
    assert_refused(make_file(2, "{}", UINT32_MAX, 0), DKV_E_INVALID, "not in 1..65536");
    assert_refused(make_file(4, "{}", 2, 0), DKV_E_UNSUPPORTED, "version 4.0");
    struct file minor = make_file(1, "{}", 2, 0);
    minor.bytes[7] = 1;
    assert_refused(minor, DKV_E_UNSUPPORTED, "version 1.1");
    struct file magic = make_file(1, "{}", 2, 0);
    magic.bytes[0] = 'x';
    assert_refused(magic, DKV_E_INVALID, "not an npy file");
}

static void every_truncation_is_refused(void **state)
{
    (void)state;
    struct file whole = version1("{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}", 8);
    for (uint64_t size = 0; size < whole.size; size++) {
        struct dkv_tensor_index index = {0};
        uint8_t *cut = malloc(size == 0 ? 1 : size);
        memcpy(cut, whole.bytes, size);
        assert_int_equal(dkv_npy_parse(cut, size, "x", &index, NULL), DKV_E_INVALID);
        free(cut);
    }
    free(whole.bytes);
}

static void what_is_written_is_read_back(void **state)
{
    (void)state;
    static const int32_t keep[6] = {1, 2, 3, 4, 5, 6};
    for (uint32_t n_dims = 1; n_dims <= 3; n_dims += 2) {
        const uint64_t shape[3] = {n_dims == 1 ? 6 : 1, 2, 3};
        char *bytes = NULL;
        size_t size = 0;
        FILE *stream = open_memstream(&bytes, &size);
        assert_int_equal(dkv_npy_write(stream, "<i4", n_dims, shape, keep, sizeof(keep), NULL),
                         DKV_OK);
        fclose(stream);
        struct dkv_tensor_index index = accepted((struct file){(uint8_t *)bytes, size});
        assert_int_equal(index.tensors[0].n_dims, n_dims);
        assert_memory_equal(index.tensors[0].data, keep, sizeof(keep));
        assert_int_equal((uintptr_t)(index.tensors[0].data - (uint8_t *)bytes) % 64, 0);
        dkv_tensor_index_fini(&index);
        free(bytes);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_three_versions_are_read),
        cmocka_unit_test(keys_come_in_any_order_and_quotes),
        cmocka_unit_test(scalars_and_empty_arrays_are_read),
        cmocka_unit_test(fortran_order_is_refused_by_name),
        cmocka_unit_test(big_endian_is_refused_by_name),
        cmocka_unit_test(objects_and_records_are_refused),
        cmocka_unit_test(raw_elements_take_the_type_they_are_given),
        cmocka_unit_test(wrong_headers_are_refused),
        cmocka_unit_test(sizes_must_agree),
        cmocka_unit_test(lying_lengths_and_versions_are_refused),
        cmocka_unit_test(every_truncation_is_refused),
        cmocka_unit_test(what_is_written_is_read_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
