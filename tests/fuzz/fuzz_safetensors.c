/* The safetensors reader, on bytes as a file would hold them. What it accepts is read as a user of
 * the index would: every byte of every tensor, every shape, every name. */
#include "client/safetensors.h"
#include "tests/fuzz/fuzz.h"

#include <assert.h>
#include <string.h>

static volatile uint8_t sink; /* so that bytes are really read */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct dkv_tensor_index index = {0};
    struct dkv_error error;
    if (dkv_safetensors_parse(data, size, &index, &error) != DKV_OK) {
        assert(index.tensors == NULL && strlen(error.text) < sizeof(error.text));
        return 0;
    }
    for (size_t i = 0; i < index.n_tensors; i++) {
        const struct dkv_tensor *t = &index.tensors[i];
        for (uint64_t j = 0; j < t->bytes; j++)
            sink ^= t->data[j];
        char shown[24];
        assert(strlen(dkv_printable(t->name, shown, sizeof(shown))) < sizeof(shown));
        assert(dkv_tensor_index_find(&index, t->name) == t);
    }
    dkv_tensor_index_fini(&index);
    return 0;
}
