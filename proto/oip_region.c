/* The shared memory extensions: what a register request says, and how regions are listed.
 *
 * The C++ client breaks base64 into lines of 72 characters and ends it with one more break, so
 * line breaks are skipped; nothing else outside the alphabet is.
 */
#include "proto/oip_json.h"

#include <string.h>

#define B64_BYTES_MAX 256u /* 64 bytes are 88 characters, and a few line breaks */

static int b64_value(char c)
{
    static const char alphabet[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
                                   "0123456789+/";
    const char *at = c != '\0' ? strchr(alphabet, c) : NULL;
    return at != NULL ? (int)(at - alphabet) : -1;
}

/* Decodes to at most `room` bytes. False for what is no base64, or more. */
static bool decode_b64(const char *text, uint8_t *out, size_t room, size_t *n_out)
{
    uint32_t bits = 0;
    unsigned n_bits = 0, n_symbols = 0, n_pads = 0;
    size_t n = 0;

    for (; *text != '\0'; text++) {
        if (*text == '\n' || *text == '\r')
            continue;
        const int value = b64_value(*text);
        n_symbols++;
        n_pads += *text == '=';
        if (*text == '=' && n_pads <= 2)
            continue;
        if (value < 0 || n_pads > 0)
            return false;
        bits = bits << 6 | (uint32_t)value;
        n_bits += 6;
        if (n_bits < 8)
            continue;
        n_bits -= 8;
        if (n == room)
            return false;
        out[n++] = (uint8_t)(bits >> n_bits);
        bits &= (1u << n_bits) - 1;
    }
    *n_out = n;
    return n_symbols % 4 == 0 && n_bits == 2 * n_pads && bits == 0;
}

static enum dkv_status read_handle(const json_t *root, struct dkv_oip_region *region,
                                   struct dkv_error *err)
{
    static const char *const known[] = {"b64", NULL};
    json_t *handle = NULL;
    char text[B64_BYTES_MAX] = "";
    size_t n = 0;
    enum dkv_status status = dkv_json_object(root, "region", "raw_handle", &handle, err);

    if (status == DKV_OK && handle == NULL)
        status = dkv_error_set(err, DKV_E_INVALID, "region: raw_handle is missing");
    if (status == DKV_OK)
        status = dkv_json_only(handle, "raw_handle", known, err);
    if (status == DKV_OK)
        status = dkv_json_string(handle, "raw_handle", "b64", text, sizeof(text), err);
    if (status != DKV_OK)
        return status;
    if (!decode_b64(text, region->handle, sizeof(region->handle), &n) ||
        n != sizeof(region->handle))
        return dkv_error_set(err, DKV_E_INVALID,
                             "raw_handle: b64 is not the base64 of a CUDA handle's %u bytes",
                             DKV_OIP_HANDLE_BYTES);
    return DKV_OK;
}

static enum dkv_status read_cuda(const json_t *root, struct dkv_oip_region *region,
                                 struct dkv_error *err)
{
    static const char *const known[] = {"raw_handle", "device_id", "byte_size", NULL};
    enum dkv_status status = dkv_json_only(root, "region", known, err);

    if (status == DKV_OK)
        status = read_handle(root, region, err);
    return status == DKV_OK ? dkv_json_u64(root, "region", "device_id", &region->device, err)
                            : status;
}

static enum dkv_status read_system(const json_t *root, struct dkv_oip_region *region,
                                   struct dkv_error *err)
{
    static const char *const known[] = {"key", "offset", "byte_size", NULL};
    enum dkv_status status = dkv_json_only(root, "region", known, err);

    if (status == DKV_OK)
        status = dkv_json_string(root, "region", "key", region->key, sizeof(region->key), err);
    if (status == DKV_OK)
        status = dkv_json_u64(root, "region", "offset", &region->offset, err);
    if (status == DKV_OK && region->key[0] == '\0')
        status = dkv_error_set(err, DKV_E_INVALID, "region: key is missing");
    return status;
}

enum dkv_status dkv_oip_region_parse(const char *json, size_t json_bytes, bool cuda,
                                     struct dkv_oip_region *region_out, struct dkv_error *err)
{
    struct dkv_oip_region region = *region_out;
    json_t *root;
    uint64_t end;
    enum dkv_status status = dkv_json_load(json, json_bytes, &root, err);

    if (status != DKV_OK)
        return status;
    region.cuda = cuda;
    region.key[0] = '\0';
    region.offset = region.bytes = region.device = 0;
    status = cuda ? read_cuda(root, &region, err) : read_system(root, &region, err);
    if (status == DKV_OK)
        status = dkv_json_u64(root, "region", "byte_size", &region.bytes, err);
    json_decref(root);
    if (status == DKV_OK && region.bytes == 0)
        status = dkv_error_set(err, DKV_E_INVALID, "region: byte_size is missing or 0");
    if (status == DKV_OK && !dkv_add_u64(region.offset, region.bytes, &end))
        status = dkv_error_set(err, DKV_E_INVALID, "region: offset and byte_size overflow");
    if (status == DKV_OK)
        *region_out = region;
    return status;
}

enum dkv_status dkv_oip_region_list(const struct dkv_oip_region *const *regions, size_t n_regions,
                                    struct dkv_oip_text *out)
{
    json_t *list = json_array();

    for (size_t i = 0; i < n_regions; i++) {
        const struct dkv_oip_region *r = regions[i];
        dkv_json_append(
            &list, r->cuda
                       ? json_pack("{s:s, s:I, s:I}", "name", r->name, "device_id",
                                   (json_int_t)r->device, "byte_size", (json_int_t)r->bytes)
                       : json_pack("{s:s, s:s, s:I, s:I}", "name", r->name, "key", r->key, "offset",
                                   (json_int_t)r->offset, "byte_size", (json_int_t)r->bytes));
    }
    return dkv_json_print(list, out);
}
