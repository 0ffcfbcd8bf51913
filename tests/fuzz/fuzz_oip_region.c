/* The body of a request that registers shared memory, of either kind; what was accepted is listed.
 */
#include "proto/oip.h"
#include "tests/fuzz/fuzz.h"

#include <assert.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    for (int cuda = 0; cuda < 2; cuda++) {
        struct dkv_oip_region region = {.name = "name"};
        const struct dkv_oip_region *const list[] = {&region};
        struct dkv_oip_text text = {0};
        struct dkv_error err = {0};
        uint64_t end;
        const enum dkv_status status = dkv_oip_region_parse((const char *)data, size, cuda != 0,
                                                            &region, &err);
        assert(strcmp(region.name, "name") == 0);
        if (status != DKV_OK) {
            assert(err.text[0] != '\0' && region.bytes == 0);
            continue;
        }
        assert(region.cuda == (cuda != 0) && region.bytes > 0);
        assert(dkv_add_u64(region.offset, region.bytes, &end));
        assert(cuda || (region.key[0] != '\0' && strlen(region.key) <= DKV_OIP_KEY_BYTES_MAX));
        assert(dkv_oip_region_list(list, 1, &text) == DKV_OK && text.n_bytes > 2);
        dkv_oip_text_fini(&text);
    }
    return 0;
}
