/* Writing safetensors: the header as one document, padded to whole words, then the data. */
#include "client/safetensors.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#define LENGTH_BYTES 8u /* of the header length at the start of a file */

static json_t *describe(const struct dkv_safetensors_out *tensor, uint64_t begin)
{
    json_t *shape = json_array();
    for (uint32_t i = 0; i < tensor->n_dims; i++)
        json_array_append_new(shape, json_integer((json_int_t)tensor->shape[i]));
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", tensor->type_name, "shape", shape,
                     "data_offsets", (json_int_t)begin, (json_int_t)(begin + tensor->bytes));
}

static char *header_text(const struct dkv_safetensors_out *tensors, size_t n_tensors,
                         const char *const (*metadata)[2], size_t n_metadata)
{
    uint64_t begin = 0;
    int failed = 0;
    json_t *header = json_object();
    if (n_metadata > 0) {
        json_t *pairs = json_object();
        for (size_t i = 0; i < n_metadata; i++)
            failed |= json_object_set_new(pairs, metadata[i][0], json_string(metadata[i][1]));
        failed |= json_object_set_new(header, "__metadata__", pairs);
    }
    for (size_t i = 0; i < n_tensors; i++) {
        failed |= json_object_set_new(header, tensors[i].name, describe(&tensors[i], begin));
        begin += tensors[i].bytes;
    }
    char *text = failed ? NULL : json_dumps(header, JSON_COMPACT);
    json_decref(header);
    return text;
}

static bool write_header(FILE *stream, const char *text)
{
    const size_t length = strlen(text);
    const size_t padded = (length + LENGTH_BYTES + 63) / 64 * 64 - LENGTH_BYTES;
    uint8_t le64[LENGTH_BYTES];
    for (unsigned i = 0; i < LENGTH_BYTES; i++)
        le64[i] = (uint8_t)((uint64_t)padded >> (8 * i));
    return fwrite(le64, 1, LENGTH_BYTES, stream) == LENGTH_BYTES &&
           fwrite(text, 1, length, stream) == length &&
           fprintf(stream, "%*s", (int)(padded - length), "") == (int)(padded - length);
}

enum dkv_status dkv_safetensors_write(FILE *stream, const struct dkv_safetensors_out *tensors,
                                      size_t n_tensors, const char *const (*metadata)[2],
                                      size_t n_metadata, struct dkv_error *err)
{
    char *text = header_text(tensors, n_tensors, metadata, n_metadata);
    if (text == NULL)
        return dkv_error_set(err, DKV_E_INVALID, "could not describe the tensors in JSON");
    bool written = write_header(stream, text);
    free(text);
    for (size_t i = 0; written && i < n_tensors; i++)
        written = tensors[i].bytes == 0 ||
                  fwrite(tensors[i].data, 1, tensors[i].bytes, stream) == tensors[i].bytes;
    if (!written || fflush(stream) != 0)
        return dkv_error_set(err, DKV_E_IO, "could not write the safetensors file");
    return DKV_OK;
}
