/* Grouping of tensors into blocks by their names, and the natural order. */
#include "client/cli/blocks.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* A file whose tensors have these names and the shapes of a small block. */
static struct dkv_tensor_file make_file(const char *path, const char *const *names, size_t n)
{
    struct dkv_tensor_file file = {.path = (char *)(uintptr_t)path};
    file.index.tensors = calloc(n, sizeof(struct dkv_tensor));
    file.index.n_tensors = n;
    for (size_t i = 0; i < n; i++) {
        struct dkv_tensor *t = &file.index.tensors[i];
        *t = (struct dkv_tensor){.name = names[i], .type_name = "BF16", .dtype = DKV_BF16};
        t->n_dims = 4;
        t->shape[0] = 1;
        t->shape[1] = 2;
        t->shape[2] = 5;
        t->shape[3] = 8;
    }
    return file;
}

#define FILE_OF(path, ...)                              \
    make_file(path, (const char *const[]){__VA_ARGS__}, \
              sizeof((const char *const[]){__VA_ARGS__}) / sizeof(const char *))

static struct dkv_block_list found(struct dkv_tensor_file *files, size_t n,
                                   const struct dkv_block_patterns *patterns)
{
    struct dkv_block_list list = {0};
    struct dkv_error error = {0};
    if (dkv_blocks_find(files, n, patterns, &list, &error) != DKV_OK)
        fail_msg("not found: %s", error.text);
    return list;
}

static void not_found(struct dkv_tensor_file file, const struct dkv_block_patterns *patterns,
                      const char *part)
{
    struct dkv_block_list list = {0};
    struct dkv_error error = {0};
    assert_int_equal(dkv_blocks_find(&file, 1, patterns, &list, &error), DKV_E_INVALID);
    if (strstr(error.text, part) == NULL)
        fail_msg("'%s' does not say '%s'", error.text, part);
    free(file.index.tensors);
}

static int order(const char *a, const char *b)
{
    return dkv_natural_order(a, strlen(a), b, strlen(b));
}

static void digits_compare_by_value(void **state)
{
    (void)state;
    static const char *const sorted[] = {
        "",
        "a",
        "a1",
        "a01",
        "a2",
        "a2b",
        "a10",
        "a10b2",
        "a10b11",
        "a99999999999999999999",
        "a100000000000000000000",
        "b",
    };
    const size_t n = sizeof(sorted) / sizeof(sorted[0]);
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < n; j++) {
            const int got = order(sorted[i], sorted[j]);
            if ((got > 0) - (got < 0) != (i > j) - (i < j))
                fail_msg("'%s' and '%s': %d", sorted[i], sorted[j], got);
        }
}

static void layer_2_comes_before_layer_10(void **state)
{
    (void)state;
    struct dkv_tensor_file file = FILE_OF("d.safetensors", "layers.10.key", "layers.10.query",
                                          "layers.10.value", "layers.2.key", "layers.2.query",
                                          "layers.2.value");
    struct dkv_block_list list = found(&file, 1, NULL);
    assert_int_equal(list.n_blocks, 2);
    assert_string_equal(list.blocks[0].name, "layers.2");
    assert_string_equal(list.blocks[0].query->name, "layers.2.query");
    assert_string_equal(list.blocks[0].key->name, "layers.2.key");
    assert_string_equal(list.blocks[1].name, "layers.10");
    assert_string_equal(list.blocks[1].value->name, "layers.10.value");
    dkv_block_list_fini(&list);
    free(file.index.tensors);
}

static void letters_need_a_separator_and_words_do_not(void **state)
{
    (void)state;
    struct dkv_tensor_file file = FILE_OF("d", "a.k", "a.q", "a.v", "mykey", "myquery", "myvalue",
                                          "xk", "xq", "xv");
    struct dkv_block_list list = found(&file, 1, NULL);
    assert_int_equal(list.n_blocks, 2);
    assert_string_equal(list.blocks[0].name, "a");
    assert_string_equal(list.blocks[1].name, "my");
    dkv_block_list_fini(&list);
    free(file.index.tensors);
}

static void bare_names_take_the_name_of_the_file(void **state)
{
    (void)state;
    struct dkv_tensor_file file = FILE_OF("dir/llama.bf16.safetensors", "expected.score", "key",
                                          "query", "value");
    struct dkv_block_list list = found(&file, 1, NULL);
    assert_int_equal(list.n_blocks, 1);
    assert_string_equal(list.blocks[0].name, "llama.bf16");
    dkv_block_list_fini(&list);
    free(file.index.tensors);
}

static void several_files_name_their_blocks_apart(void **state)
{
    (void)state;
    struct dkv_tensor_file files[2] = {FILE_OF("b.safetensors", "l.0.k", "l.0.q", "l.0.v"),
                                       FILE_OF("a.safetensors", "l.0.k", "l.0.q", "l.0.v")};
    struct dkv_block_list list = found(files, 2, NULL);
    assert_int_equal(list.n_blocks, 2);
    assert_string_equal(list.blocks[0].name, "b:l.0");
    assert_string_equal(list.blocks[1].name, "a:l.0");
    assert_ptr_equal(list.blocks[1].query, &files[1].index.tensors[1]);
    dkv_block_list_fini(&list);
    free(files[0].index.tensors);
    free(files[1].index.tensors);
}

static void blocks_of_the_same_name_are_numbered(void **state)
{
    (void)state;
    struct dkv_tensor_file files[2] = {
        FILE_OF("x/a.safetensors", "l.k", "l.q", "l.v", "l_k", "l_q", "l_v"),
        FILE_OF("y/a.safetensors", "l.key", "l.query", "l.value")};
    static const char *const names[] = {"a:l", "a:l#2", "a:l#3"};
    struct dkv_block_list list = found(files, 2, NULL);
    assert_int_equal(list.n_blocks, 3);
    for (size_t i = 0; i < 3; i++)
        assert_string_equal(list.blocks[i].name, names[i]);
    dkv_block_list_fini(&list);
    free(files[0].index.tensors);
    free(files[1].index.tensors);
}

static void a_block_without_one_of_three_is_an_error(void **state)
{
    (void)state;
    not_found(FILE_OF("d", "l.0.key", "l.0.query", "l.0.value", "l.1.key", "l.1.value"), NULL,
              "block l.1 has no query");
}

static void tensors_that_only_end_so_are_ignored(void **state)
{
    (void)state;
    struct dkv_tensor_file file = FILE_OF("d", "l.key", "l.query", "l.value", "monkey");
    struct dkv_block_list list = found(&file, 1, NULL);
    assert_int_equal(list.n_blocks, 1);
    dkv_block_list_fini(&list);
    free(file.index.tensors);
    not_found(FILE_OF("d", "monkey", "weights"), NULL, "name them with --query");
}

static void patterns_stand_for_the_layer(void **state)
{
    (void)state;
    const struct dkv_block_patterns patterns = {"m.{}.attn.qs", "m.{}.attn.ks", "m.{}.attn.vs"};
    struct dkv_tensor_file file = FILE_OF("d", "m.10.attn.ks", "m.10.attn.qs", "m.10.attn.vs",
                                          "m.9.attn.ks", "m.9.attn.qs", "m.9.attn.vs");
    struct dkv_block_list list = found(&file, 1, &patterns);
    assert_int_equal(list.n_blocks, 2);
    assert_string_equal(list.blocks[0].name, "9");
    assert_string_equal(list.blocks[1].name, "10");
    dkv_block_list_fini(&list);
    free(file.index.tensors);
    const struct dkv_block_patterns exact = {"a", "b", "c"};
    not_found(FILE_OF("d", "a", "b"), &exact, "has no value");
    not_found(FILE_OF("d", "x", "y"), &exact, "no tensors match");
}

static void shapes_must_fit_together(void **state)
{
    (void)state;
    struct dropkv_request request = DROPKV_REQUEST_INIT;
    struct dkv_error error;
    struct dkv_tensor_file file = FILE_OF("d", "k", "q", "v");
    struct dkv_tensor *key = &file.index.tensors[0];
    const struct dkv_named_block block = {
        .query = &file.index.tensors[1], .key = key, .value = &file.index.tensors[2]};
    assert_int_equal(dkv_block_request(&block, &request, &error), DKV_OK);
    assert_int_equal(request.batch, 1);
    assert_int_equal(request.kv_heads, 2);
    assert_int_equal(request.n_tokens, 5);
    assert_int_equal(request.head_dim, 8);

    key->shape[2] = 6;
    assert_int_equal(dkv_block_request(&block, &request, &error), DKV_E_INVALID);
    assert_non_null(
        strstr(error.text, "the number of tokens differs: 6 in the key, 5 in the value"));
    key->shape[2] = 5;
    key->n_dims = 2;
    assert_int_equal(dkv_block_request(&block, &request, &error), DKV_E_INVALID);
    assert_non_null(strstr(error.text, "k: 2 dimensions"));
    key->n_dims = 4;
    key->dtype = DKV_DTYPE_NONE;
    assert_int_equal(dkv_block_request(&block, &request, &error), DKV_E_UNSUPPORTED);
    free(file.index.tensors);
}

static void a_missing_batch_dimension_means_one(void **state)
{
    (void)state;
    struct dropkv_request request = DROPKV_REQUEST_INIT;
    struct dkv_tensor_file file = FILE_OF("d", "k", "q", "v");
    for (unsigned i = 0; i < 3; i++) {
        struct dkv_tensor *t = &file.index.tensors[i];
        memmove(t->shape, t->shape + 1, 3 * sizeof(t->shape[0]));
        t->n_dims = 3;
    }
    const struct dkv_named_block block = {.query = &file.index.tensors[1],
                                          .key = &file.index.tensors[0],
                                          .value = &file.index.tensors[2]};
    assert_int_equal(dkv_block_request(&block, &request, NULL), DKV_OK);
    assert_int_equal(request.batch, 1);
    assert_int_equal(request.n_tokens, 5);
    free(file.index.tensors);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(digits_compare_by_value),
        cmocka_unit_test(layer_2_comes_before_layer_10),
        cmocka_unit_test(letters_need_a_separator_and_words_do_not),
        cmocka_unit_test(bare_names_take_the_name_of_the_file),
        cmocka_unit_test(several_files_name_their_blocks_apart),
        cmocka_unit_test(blocks_of_the_same_name_are_numbered),
        cmocka_unit_test(a_block_without_one_of_three_is_an_error),
        cmocka_unit_test(tensors_that_only_end_so_are_ignored),
        cmocka_unit_test(patterns_stand_for_the_layer),
        cmocka_unit_test(shapes_must_fit_together),
        cmocka_unit_test(a_missing_batch_dimension_means_one),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
