/* The JSON part of an infer request, as a server sees it before the tensors arrive.
 *
 * The input is the JSON alone, so that the corpus can be read. How many binary bytes "follow" is
 * taken from the text itself, else no mutated size would ever get past the sum check.
 */
#include "proto/oip.h"
#include "tests/fuzz/fuzz.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* The sum of all numbers behind "binary_data_size": */
static uint64_t claimed_bytes(const char *json, size_t size)
{
    static const char key[] = "\"binary_data_size\":";
    const size_t n = strlen(key);
    uint64_t sum = 0;

    for (size_t i = 0; i + n < size; i++) {
        uint64_t value = 0;
        if (memcmp(json + i, key, n) != 0)
            continue;
        for (size_t j = i + n; j < size && json[j] >= '0' && json[j] <= '9'; j++)
            value = value * 10 + (uint64_t)(json[j] - '0');
        sum += value;
    }
    return sum;
}

/* What every accepted request has kept. */
static void check(const struct dkv_oip_infer *infer, uint64_t binary_bytes)
{
    uint64_t used = 0, n_wanted = 0;

    assert(infer->n_blocks >= 1 && infer->n_blocks <= DKV_BLOCKS_MAX);
    assert(strlen(infer->id) <= DKV_OIP_ID_BYTES_MAX);
    for (int i = 0; i < DKV_OIP_INPUTS; i++) {
        const struct dkv_oip_tensor *t = &infer->inputs[i];
        assert(i > DKV_OIP_VALUE || t->source != DKV_OIP_ABSENT);
        if (t->source == DKV_OIP_BINARY) {
            assert(dkv_range_fits(t->offset, t->bytes, binary_bytes));
            used += t->bytes;
        }
        assert(t->source != DKV_OIP_JSON || t->dtype == DKV_FP32);
        assert(t->source != DKV_OIP_SHM || infer->uses_shm);
    }
    assert(used == binary_bytes);
    for (int i = 0; i < DKV_OIP_OUTPUTS; i++)
        n_wanted += infer->outputs[i].wanted;
    assert(n_wanted > 0);
}

/* Whatever a client wrote, the text is short, plain and names no path. */
static void check_error(const struct dkv_error *err)
{
    char body[DKV_OIP_ERROR_BYTES];

    assert(err->status != DKV_OK && err->text[0] != '\0');
    for (const char *c = err->text; *c != '\0'; c++)
        assert(*c >= 0x20 && *c < 0x7f && *c != '/');
    assert(dkv_oip_error_encode(err->text, body) < sizeof(body));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *json = (const char *)data;
    const uint64_t binary_bytes = claimed_bytes(json, size);
    struct dkv_oip_infer infer;
    struct dkv_error err;

    if (dkv_oip_infer_parse(json, size, binary_bytes, &infer, &err) == DKV_OK) {
        check(&infer, binary_bytes);
        dkv_oip_infer_fini(&infer);
    } else {
        check_error(&err);
    }
    return 0;
}
