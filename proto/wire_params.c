/* Parameters on the wire.
 *
 *   0 number u8 | 1 kind u8 | 2 length u16 | 4 zero u32 | 8 value, padded with zeros to 8 bytes
 *
 * Only what the caller named travels; the other side fills in the rest, so that a default is
 * decided in one place. The receiver goes through dkv_params_set() as every front end does: unknown
 * words, wrong kinds and doubles are refused there, in the same sentences.
 */
#include <inttypes.h>
#include <string.h>

#include "proto/wire.h"

#define RECORD_BYTES 8u

static size_t padded(size_t bytes)
{
    return (bytes + 7) / 8 * 8;
}

static void put_u64(uint8_t *out, uint64_t value)
{
    for (int i = 0; i < 8; i++)
        out[i] = (uint8_t)(value >> (8 * i));
}

static uint64_t get_u64(const uint8_t *in)
{
    uint64_t value = 0;
    for (int i = 0; i < 8; i++)
        value |= (uint64_t)in[i] << (8 * i);
    return value;
}

static size_t put_param(uint8_t *out, enum dkv_param_id id, const struct dkv_value *value)
{
    size_t bytes = 8;
    uint64_t bits = 0;

    if (value->kind == DKV_VALUE_STRING)
        bytes = strlen(value->string);
    memset(out, 0, RECORD_BYTES + padded(bytes));
    out[0] = (uint8_t)id;
    out[1] = (uint8_t)value->kind;
    out[2] = (uint8_t)bytes;
    out[3] = (uint8_t)(bytes >> 8);
    switch (value->kind) {
    case DKV_VALUE_INT: bits = (uint64_t)value->integer; break;
    case DKV_VALUE_BOOL: bits = value->boolean; break;
    case DKV_VALUE_REAL: memcpy(&bits, &value->real, 8); break;
    case DKV_VALUE_STRING: memcpy(out + RECORD_BYTES, value->string, bytes); break;
    }
    if (value->kind != DKV_VALUE_STRING)
        put_u64(out + RECORD_BYTES, bits);
    return RECORD_BYTES + padded(bytes);
}

size_t dkv_wire_put_params(uint8_t *out, const struct dkv_params *params)
{
    size_t bytes = 0;

    for (unsigned i = 0; i < DKV_PARAM_COUNT; i++) {
        if (!dkv_params_has(params, (enum dkv_param_id)i))
            continue;
        const struct dkv_value value = dkv_params_get(params, (enum dkv_param_id)i);
        bytes += put_param(out + bytes, (enum dkv_param_id)i, &value);
    }
    return bytes;
}

/* The value of a record whose `length` bytes and their padding are there. */
static enum dkv_status get_value(const uint8_t *in, unsigned kind, size_t length, char *word,
                                 struct dkv_value *value, struct dkv_error *err)
{
    value->kind = (enum dkv_value_kind)kind;
    for (size_t i = length; i < padded(length); i++)
        if (in[i] != 0)
            return dkv_error_set(err, DKV_E_MALFORMED, "params: padding is not zero");
    if (kind == DKV_VALUE_STRING) {
        memcpy(word, in, length);
        word[length] = '\0';
        if (memchr(word, 0, length) != NULL)
            return dkv_error_set(err, DKV_E_MALFORMED, "params: a zero byte in a word");
        value->string = word;
        return DKV_OK;
    }
    const uint64_t bits = get_u64(in);
    switch (kind) {
    case DKV_VALUE_INT: value->integer = (int64_t)bits; break;
    case DKV_VALUE_REAL: memcpy(&value->real, &bits, 8); break;
    default:
        if (bits > 1)
            return dkv_error_set(err, DKV_E_MALFORMED, "params: a truth value of %" PRIu64, bits);
        value->boolean = bits != 0;
        break;
    }
    return DKV_OK;
}

enum dkv_status dkv_wire_get_params(const uint8_t *in, size_t bytes, struct dkv_params *params,
                                    struct dkv_error *err)
{
    char word[DKV_LIST_TEXT_MAX + 1];

    for (size_t at = 0; at < bytes;) {
        if (bytes - at < RECORD_BYTES)
            return dkv_error_set(err, DKV_E_MALFORMED, "params: %zu bytes left over", bytes - at);
        const unsigned id = in[at], kind = in[at + 1];
        const size_t length = in[at + 2] | (size_t)in[at + 3] << 8;
        const bool is_word = kind == DKV_VALUE_STRING;
        if ((in[at + 4] | in[at + 5] | in[at + 6] | in[at + 7]) != 0 || kind > DKV_VALUE_STRING ||
            (is_word ? length > DKV_LIST_TEXT_MAX : length != 8))
            return dkv_error_set(err, DKV_E_MALFORMED, "params: record at %zu is broken", at);
        at += RECORD_BYTES;
        if (padded(length) > bytes - at)
            return dkv_error_set(err, DKV_E_MALFORMED, "params: the record at %zu is cut off",
                                 at - RECORD_BYTES);
        if (id >= DKV_PARAM_COUNT)
            return dkv_error_set(err, DKV_E_UNSUPPORTED, "params: number %u is not in 0..%u", id,
                                 DKV_PARAM_COUNT - 1);

        struct dkv_value value = {.kind = DKV_VALUE_INT};
        enum dkv_status status = get_value(in + at, kind, length, word, &value, err);
        if (status == DKV_OK)
            status = dkv_params_set(params, dkv_param_info((enum dkv_param_id)id)->name, value,
                                    err);
        if (status != DKV_OK)
            return status;
        at += padded(length);
    }
    return DKV_OK;
}
