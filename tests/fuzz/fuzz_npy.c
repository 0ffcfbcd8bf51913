/* The npy reader, on bytes as a file would hold them. */
#include "client/npy.h"
#include "tests/fuzz/fuzz.h"

#include <assert.h>
#include <string.h>

static volatile uint8_t sink; /* so that bytes are really read */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct dkv_tensor_index index = {0};
    struct dkv_error error;
    if (dkv_npy_parse(data, size, "array", &index, &error) != DKV_OK) {
        assert(index.tensors == NULL && strlen(error.text) < sizeof(error.text));
        return 0;
    }
    struct dkv_tensor *t = &index.tensors[0];
    for (uint64_t j = 0; j < t->bytes; j++)
        sink ^= t->data[j];
    assert(t->data + t->bytes == data + size);
    (void)dkv_npy_set_dtype(t, DKV_BF16, &error);
    dkv_tensor_index_fini(&index);
    return 0;
}
