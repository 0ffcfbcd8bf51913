/* Reading and writing .npy.
 *
 * The header is a Python literal, for which no C library exists, so it is read by a parser of
 * exactly the dictionary that the format allows: three known keys, each once, in any order; a
 * string, a boolean and a tuple of counts. Everything else is refused.
 */
#include "client/npy.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

struct cursor {
    const char *at;
    const char *end;
};

/* What the dictionary says. */
struct header {
    char descr[12];
    bool has_descr;
    bool fortran_order;
    bool has_order;
    bool has_shape;
    uint32_t n_dims;
    uint64_t shape[DKV_TENSOR_DIMS_MAX];
    uint64_t elements;
};

static void skip_space(struct cursor *c)
{
    while (c->at < c->end && (*c->at == ' ' || *c->at == '\n' || *c->at == '\t' || *c->at == '\r'))
        c->at++;
}

static bool take(struct cursor *c, const char *word)
{
    const size_t length = strlen(word);
    skip_space(c);
    if ((size_t)(c->end - c->at) < length || memcmp(c->at, word, length) != 0)
        return false;
    c->at += length;
    return true;
}

/* A quoted string without escapes: neither key nor type needs any. */
static bool take_string(struct cursor *c, char *out, size_t out_bytes)
{
    skip_space(c);
    if (c->at == c->end || (*c->at != '\'' && *c->at != '"'))
        return false;
    const char quote = *c->at++;
    size_t used = 0;
    for (; c->at < c->end && *c->at != quote; c->at++) {
        if (*c->at < 0x20 || *c->at > 0x7e || *c->at == '\\' || used + 1 == out_bytes)
            return false;
        out[used++] = *c->at;
    }
    if (c->at == c->end)
        return false;
    c->at++;
    out[used] = '\0';
    return true;
}

static bool take_count(struct cursor *c, uint64_t *out)
{
    uint64_t value = 0;
    skip_space(c);
    const char *start = c->at;
    for (; c->at < c->end && *c->at >= '0' && *c->at <= '9'; c->at++)
        if (!dkv_mul_u64(value, 10, &value) ||
            !dkv_add_u64(value, (uint64_t)(*c->at - '0'), &value))
            return false;
    if (c->at == start)
        return false;
    (void)take(c, "L"); /* Python 2 wrote 64-bit counts as 12L */
    *out = value;
    return true;
}

static enum dkv_status take_shape(struct cursor *c, struct header *header, struct dkv_error *err)
{
    header->elements = 1;
    if (!take(c, "("))
        return dkv_error_set(err, DKV_E_INVALID, "npy header: 'shape' is not a tuple");
    while (!take(c, ")")) {
        uint64_t dim;
        if (!take_count(c, &dim))
            return dkv_error_set(err, DKV_E_INVALID,
                                 "npy header: 'shape' holds something that is not a count");
        if (!dkv_mul_u64(header->elements, dim, &header->elements))
            return dkv_error_set(err, DKV_E_INVALID,
                                 "npy header: the product of 'shape' overflows");
        if (header->n_dims < DKV_TENSOR_DIMS_MAX)
            header->shape[header->n_dims] = dim;
        header->n_dims++;
        if (!take(c, ",")) {
            if (!take(c, ")"))
                return dkv_error_set(err, DKV_E_INVALID, "npy header: 'shape' does not end");
            break;
        }
    }
    header->has_shape = true;
    return DKV_OK;
}

static enum dkv_status take_descr(struct cursor *c, struct header *header, struct dkv_error *err)
{
    if (!take_string(c, header->descr, sizeof(header->descr)))
        return dkv_error_set(err, DKV_E_UNSUPPORTED,
                             "npy header: 'descr' is not a plain element type");
    header->has_descr = true;
    return DKV_OK;
}

static enum dkv_status take_order(struct cursor *c, struct header *header, struct dkv_error *err)
{
    if (take(c, "True"))
        header->fortran_order = true;
    else if (!take(c, "False"))
        return dkv_error_set(err, DKV_E_INVALID,
                             "npy header: 'fortran_order' is neither True nor False");
    header->has_order = true;
    return DKV_OK;
}

static enum dkv_status take_entry(struct cursor *c, struct header *header, struct dkv_error *err)
{
    char key[20];
    if (!take_string(c, key, sizeof(key)) || !take(c, ":"))
        return dkv_error_set(err, DKV_E_INVALID, "npy header: a key was expected");
    if (strcmp(key, "descr") == 0 && !header->has_descr)
        return take_descr(c, header, err);
    if (strcmp(key, "fortran_order") == 0 && !header->has_order)
        return take_order(c, header, err);
    if (strcmp(key, "shape") == 0 && !header->has_shape)
        return take_shape(c, header, err);
    return dkv_error_set(err, DKV_E_INVALID, "npy header: key '%s' is unknown or used twice", key);
}

static enum dkv_status read_dictionary(struct cursor c, struct header *header,
                                       struct dkv_error *err)
{
    enum dkv_status status = DKV_OK;
    if (!take(&c, "{"))
        return dkv_error_set(err, DKV_E_INVALID, "npy header: not a dictionary");
    while (!take(&c, "}")) {
        status = take_entry(&c, header, err);
        if (status != DKV_OK)
            return status;
        if (take(&c, ","))
            continue;
        if (take(&c, "}"))
            break;
        return dkv_error_set(err, DKV_E_INVALID, "npy header: ',' or '}' was expected");
    }
    skip_space(&c);
    if (c.at != c.end)
        return dkv_error_set(err, DKV_E_INVALID, "npy header: something follows the dictionary");
    if (!header->has_descr || !header->has_order || !header->has_shape)
        return dkv_error_set(err, DKV_E_INVALID, "npy header: '%s' is missing",
                             !header->has_descr   ? "descr"
                             : !header->has_order ? "fortran_order"
                                                  : "shape");
    return DKV_OK;
}

/* Element size from a type such as "<f4", "|V2", "<c16"; 0 if it is not of that form. */
static uint64_t element_bytes(const char *descr)
{
    char *end;
    if (strlen(descr) < 3 || descr[2] < '1' || descr[2] > '9')
        return 0;
    const unsigned long bytes = strtoul(descr + 2, &end, 10);
    return *end == '\0' && bytes <= 1u << 20 ? bytes : 0;
}

static enum dkv_status judge_type(const struct header *header, uint64_t *bytes_out,
                                  enum dkv_dtype *dtype_out, struct dkv_error *err)
{
    const char *descr = header->descr;
    if (descr[0] == '>')
        return dkv_error_set(err, DKV_E_UNSUPPORTED,
                             "npy: big-endian elements ('%s') are not read; save with "
                             "array.astype('<%s')",
                             descr, descr + 1);
    if (header->fortran_order)
        return dkv_error_set(err, DKV_E_UNSUPPORTED,
                             "npy: Fortran order is not read; save with "
                             "numpy.ascontiguousarray(array)");
    *bytes_out = strchr("<|=", descr[0]) != NULL ? element_bytes(descr) : 0;
    if (*bytes_out == 0 || (descr[0] == '=' || descr[0] == '\0'))
        return dkv_error_set(err, DKV_E_UNSUPPORTED, "npy: element type '%s' is not read", descr);
    *dtype_out = strcmp(descr, "<f4") == 0   ? DKV_FP32
                 : strcmp(descr, "<f2") == 0 ? DKV_FP16
                                             : DKV_DTYPE_NONE;
    return DKV_OK;
}

/* Finds the dictionary by the version's header length. */
static enum dkv_status find_dictionary(const uint8_t *bytes, uint64_t size, struct cursor *out,
                                       struct dkv_error *err)
{
    if (size < DKV_NPY_MAGIC_BYTES + 4 || memcmp(bytes, DKV_NPY_MAGIC, DKV_NPY_MAGIC_BYTES) != 0)
        return dkv_error_set(err, DKV_E_INVALID, "not an npy file");
    const unsigned major = bytes[6];
    const unsigned minor = bytes[7];
    if (major < 1 || major > 3 || minor != 0)
        return dkv_error_set(err, DKV_E_UNSUPPORTED, "npy version %u.%u not in 1.0..3.0", major,
                             minor);
    uint64_t start = 10;
    uint64_t length = bytes[8] | (uint64_t)bytes[9] << 8;
    if (major > 1) {
        start = 12;
        if (size < start)
            return dkv_error_set(err, DKV_E_INVALID, "npy: the file is truncated");
        length |= (uint64_t)bytes[10] << 16 | (uint64_t)bytes[11] << 24;
    }
    if (length > DKV_NPY_HEADER_MAX)
        return dkv_error_set(err, DKV_E_INVALID, "npy: header length %" PRIu64 " not in 1..%u",
                             length, DKV_NPY_HEADER_MAX);
    if (length > size - start)
        return dkv_error_set(err, DKV_E_INVALID,
                             "npy: header length %" PRIu64 ", but only %" PRIu64
                             " bytes follow: the file is truncated",
                             length, size - start);
    *out = (struct cursor){(const char *)bytes + start, (const char *)bytes + start + length};
    return DKV_OK;
}

static enum dkv_status make_index(const struct dkv_tensor *tensor, const char *name,
                                  struct dkv_tensor_index *index_out, struct dkv_error *err)
{
    struct dkv_tensor_index index = {
        .tensors = malloc(sizeof(*tensor)), .n_tensors = 1, .names = strdup(name)};
    if (index.tensors == NULL || index.names == NULL) {
        dkv_tensor_index_fini(&index);
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a tensor");
    }
    index.tensors[0] = *tensor;
    index.tensors[0].name = index.names;
    *index_out = index;
    return DKV_OK;
}

enum dkv_status dkv_npy_parse(const void *bytes, uint64_t size, const char *name,
                              struct dkv_tensor_index *index_out, struct dkv_error *err)
{
    struct cursor dictionary = {0};
    struct header header = {0};
    struct dkv_tensor tensor = {0};
    uint64_t unit = 0;
    uint64_t needed = 0;
    enum dkv_status status = find_dictionary(bytes, size, &dictionary, err);
    if (status == DKV_OK)
        status = read_dictionary(dictionary, &header, err);
    if (status == DKV_OK)
        status = judge_type(&header, &unit, &tensor.dtype, err);
    if (status != DKV_OK)
        return status;

    tensor.data = (const uint8_t *)dictionary.end;
    tensor.bytes = size - (uint64_t)(tensor.data - (const uint8_t *)bytes);
    if (!dkv_mul_u64(header.elements, unit, &needed))
        return dkv_error_set(err, DKV_E_INVALID, "npy header: the product of 'shape' overflows");
    if (needed != tensor.bytes)
        return dkv_error_set(err, DKV_E_INVALID,
                             "npy: %" PRIu64 " elements of '%s' are %" PRIu64
                             " bytes, the file holds %" PRIu64,
                             header.elements, header.descr, needed, tensor.bytes);
    strcpy(tensor.type_name, header.descr);
    tensor.n_dims = header.n_dims;
    memcpy(tensor.shape, header.shape, sizeof(tensor.shape));
    return make_index(&tensor, name, index_out, err);
}

enum dkv_status dkv_npy_set_dtype(struct dkv_tensor *tensor, enum dkv_dtype dtype,
                                  struct dkv_error *err)
{
    const char kind = tensor->type_name[1];
    if (tensor->dtype != DKV_DTYPE_NONE || (kind != 'V' && kind != 'u'))
        return dkv_error_set(err, DKV_E_INVALID, "'%s' elements cannot be taken for %s",
                             tensor->type_name, dkv_dtype_name(dtype));
    if (element_bytes(tensor->type_name) != dkv_dtype_bytes(dtype))
        return dkv_error_set(err, DKV_E_INVALID, "'%s' elements have another size than %s",
                             tensor->type_name, dkv_dtype_name(dtype));
    tensor->dtype = dtype;
    return DKV_OK;
}

enum dkv_status dkv_npy_write(FILE *stream, const char *descr, uint32_t n_dims,
                              const uint64_t *shape, const void *data, uint64_t bytes,
                              struct dkv_error *err)
{
    char header[512];
    const size_t room = sizeof(header);
    int used = snprintf(header, room, "{'descr': '%s', 'fortran_order': False, 'shape': (", descr);
    for (uint32_t i = 0; i < n_dims && i < DKV_TENSOR_DIMS_MAX; i++)
        used += snprintf(header + used, room - (size_t)used, "%s%" PRIu64 "%s", i > 0 ? " " : "",
                         shape[i], i + 1 < n_dims || n_dims == 1 ? "," : "");
    used += snprintf(header + used, room - (size_t)used, "), }");

    /* The elements start at a multiple of 64 bytes, and the header ends in a newline. */
    const unsigned prefix = DKV_NPY_MAGIC_BYTES + 4;
    const unsigned padded = (prefix + (unsigned)used + 1 + 63) / 64 * 64 - prefix;
    const uint8_t start[4] = {1, 0, (uint8_t)(padded & 255), (uint8_t)(padded >> 8)};
    const bool written = fwrite(DKV_NPY_MAGIC, 1, DKV_NPY_MAGIC_BYTES, stream) ==
                             DKV_NPY_MAGIC_BYTES &&
                         fwrite(start, 1, sizeof(start), stream) == sizeof(start) &&
                         fprintf(stream, "%-*s\n", (int)padded - 1, header) == (int)padded &&
                         (bytes == 0 || fwrite(data, 1, bytes, stream) == bytes);
    if (!written || fflush(stream) != 0)
        return dkv_error_set(err, DKV_E_IO, "could not write the npy file");
    return DKV_OK;
}
