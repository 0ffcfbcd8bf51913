/* What a client parses of a server it need not trust: infer answers, errors and metadata.
 *
 * The first byte chooses the parser, the rest is the document.
 */
#include "proto/oip.h"
#include "tests/fuzz/fuzz.h"

#include <assert.h>
#include <string.h>

static void answer(const char *json, size_t size)
{
    struct dkv_oip_answer answer;
    struct dkv_error err;

    for (uint64_t binary_bytes = 0; binary_bytes <= 48; binary_bytes += 12)
        if (dkv_oip_answer_parse(json, size, binary_bytes, &answer, &err) == DKV_OK) {
            const uint64_t rows = (uint64_t)answer.n_blocks * answer.kv_heads;
            assert(dkv_range_fits(answer.keep_offset, rows * answer.keep_tokens * 4, binary_bytes));
            assert(!answer.has_scores ||
                   dkv_range_fits(answer.scores_offset, rows * answer.n_tokens * 4, binary_bytes));
        }
}

static void error(const char *json, size_t size)
{
    struct dkv_error err;

    assert(dkv_oip_error_parse(503, json, size, &err) == DKV_E_BUSY);
    for (const char *c = err.text; *c != '\0'; c++)
        assert(*c >= 0x20 && *c < 0x7f);
}

static void metadata(const char *json, size_t size)
{
    struct dkv_oip_info info;

    memset(&info, 0, sizeof(info));
    (void)dkv_oip_server_metadata_parse(json, size, &info, NULL);
    (void)dkv_oip_model_metadata_parse(json, size, &info, NULL);
    assert(strlen(info.device) < sizeof(info.device));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0)
        return 0;
    const char *json = (const char *)data + 1;
    switch (data[0]) {
    case 'a': answer(json, size - 1); break;
    case 'e': error(json, size - 1); break;
    default: metadata(json, size - 1); break;
    }
    return 0;
}
