/* Reading safetensors.
 *
 * Parsing works in three steps. A scanner walks the top-level object of the header and finds where
 * each name and each value begins and ends, counting only quotes and brackets. Each piece is then
 * handed to jansson, which alone judges whether it is JSON and what it says: a header of a million
 * tensors is a million small documents, never one tree of a gigabyte, and the scanner can at worst
 * cut a broken header in the wrong place, where jansson refuses the piece. Last, the tensors are
 * sorted by offset to see that they tile the data exactly, and by name to see that no name is used
 * twice and to be found by bisection.
 *
 * Values nested deeper than a tensor's description needs are refused by the scanner, before
 * jansson recurses into them.
 */
#include "client/safetensors.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#define LENGTH_BYTES 8u /* of the header length at the start of a file */
#define DEPTH_MAX    4u /* {"shape": [..]} needs 2 */
#define SHOWN_NAME   64u

/* Element types the format knows and scoring does not read: their sizes are still checked. */
static const struct {
    const char *name;
    unsigned bits;
} other_types[] = {
    {"BOOL", 8}, {"U8", 8},      {"I8", 8},   {"U16", 16},    {"I16", 16},
    {"U32", 32}, {"I32", 32},    {"U64", 64}, {"I64", 64},    {"F64", 64},
    {"C64", 64}, {"F8_E8M0", 8}, {"F4", 4},   {"F6_E2M3", 6}, {"F6_E3M2", 6},
};

/* 0 for a type that this file does not know. */
static unsigned type_bits(const char *name, enum dkv_dtype dtype)
{
    if (dtype != DKV_DTYPE_NONE)
        return 8 * (unsigned)dkv_dtype_bytes(dtype);
    for (size_t i = 0; i < sizeof(other_types) / sizeof(other_types[0]); i++)
        if (strcmp(name, other_types[i].name) == 0)
            return other_types[i].bits;
    return 0;
}

/* ---- the scanner ---- */

struct scanner {
    const char *at;
    const char *end;
};

struct piece {
    const char *text;
    size_t length;
};

static void skip_space(struct scanner *s)
{
    while (s->at < s->end && strchr(" \t\n\r", *s->at) != NULL && *s->at != '\0')
        s->at++;
}

static bool take_char(struct scanner *s, char c)
{
    skip_space(s);
    if (s->at == s->end || *s->at != c)
        return false;
    s->at++;
    return true;
}

/* Leaves `at` behind the closing quote. */
static bool skip_string(struct scanner *s)
{
    for (s->at++; s->at < s->end; s->at++) {
        if (*s->at == '\\') {
            s->at++;
        } else if (*s->at == '"') {
            s->at++;
            return true;
        }
    }
    s->at = s->end; /* an escape at the very end stepped one too far */
    return false;
}

static bool take_string(struct scanner *s, struct piece *piece_out)
{
    skip_space(s);
    piece_out->text = s->at;
    if (s->at == s->end || *s->at != '"' || !skip_string(s))
        return false;
    piece_out->length = (size_t)(s->at - piece_out->text);
    return true;
}

/* A value ends before the ',' or '}' of the object that holds it. */
static enum dkv_status take_value(struct scanner *s, struct piece *piece_out, struct dkv_error *err)
{
    unsigned depth = 0;
    skip_space(s);
    piece_out->text = s->at;
    while (s->at < s->end) {
        const char c = *s->at;
        if (c == '"') {
            if (!skip_string(s))
                break;
            continue;
        }
        if (depth == 0 && (c == ',' || c == '}')) {
            piece_out->length = (size_t)(s->at - piece_out->text);
            return DKV_OK;
        }
        if ((c == '{' || c == '[') && ++depth > DEPTH_MAX)
            return dkv_error_set(err, DKV_E_INVALID,
                                 "header: a value is nested more than %u levels deep", DEPTH_MAX);
        if (c == '}' || c == ']') {
            if (depth == 0)
                break;
            depth--;
        }
        s->at++;
    }
    return dkv_error_set(err, DKV_E_INVALID, "header: a value does not end");
}

/* ---- the table that is being built ---- */

struct builder {
    struct dkv_tensor *tensors;
    size_t n_tensors;
    size_t tensors_cap;
    char *names; /* names are kept as offsets until the last one is known */
    size_t names_used;
    size_t names_cap;
    const uint8_t *data;
    uint64_t data_bytes;
    bool has_metadata;
};

static enum dkv_status grow(void **array, size_t *cap, size_t needed, size_t element_bytes,
                            struct dkv_error *err)
{
    if (needed <= *cap)
        return DKV_OK;
    const size_t new_cap = needed * 2 < 64 ? 64 : needed * 2;
    void *bigger = reallocarray(*array, new_cap, element_bytes);
    if (bigger == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for %zu tensors", needed);
    *array = bigger;
    *cap = new_cap;
    return DKV_OK;
}

/* Appends a tensor whose name is, for now, an offset into `names`. */
static enum dkv_status append_name(struct builder *b, const char *name, struct dkv_tensor *tensor,
                                   struct dkv_error *err)
{
    const size_t bytes = strlen(name) + 1;
    enum dkv_status status = grow((void **)&b->names, &b->names_cap, b->names_used + bytes, 1, err);
    if (status == DKV_OK)
        status = grow((void **)&b->tensors, &b->tensors_cap, b->n_tensors + 1,
                      sizeof(b->tensors[0]), err);
    if (status != DKV_OK)
        return status;
    memcpy(b->names + b->names_used, name, bytes);
    tensor->name = (const char *)(uintptr_t)b->names_used;
    b->names_used += bytes;
    b->tensors[b->n_tensors++] = *tensor;
    return DKV_OK;
}

/* ---- one tensor's description ---- */

static enum dkv_status refuse(struct dkv_error *err, const char *name, const char *what)
{
    char shown[SHOWN_NAME];
    return dkv_error_set(err, DKV_E_INVALID, "tensor %s: %s",
                         dkv_printable(name, shown, sizeof(shown)), what);
}

static bool get_count(const json_t *value, uint64_t *out)
{
    if (!json_is_integer(value) || json_integer_value(value) < 0)
        return false;
    *out = (uint64_t)json_integer_value(value);
    return true;
}

static enum dkv_status read_shape(const json_t *shape, const char *name, struct dkv_tensor *tensor,
                                  uint64_t *elements_out, struct dkv_error *err)
{
    if (!json_is_array(shape))
        return refuse(err, name, "\"shape\" is not an array");
    const size_t n_dims = json_array_size(shape);
    uint64_t elements = 1;
    for (size_t i = 0; i < n_dims; i++) {
        uint64_t dim;
        if (!get_count(json_array_get(shape, i), &dim))
            return refuse(err, name, "\"shape\" holds something that is not a count");
        if (!dkv_mul_u64(elements, dim, &elements))
            return refuse(err, name, "the product of its shape overflows");
        if (i < DKV_TENSOR_DIMS_MAX)
            tensor->shape[i] = dim;
    }
    tensor->n_dims = (uint32_t)n_dims;
    *elements_out = elements;
    return DKV_OK;
}

static enum dkv_status read_offsets(const json_t *offsets, const char *name,
                                    const struct builder *b, struct dkv_tensor *tensor,
                                    struct dkv_error *err)
{
    char shown[SHOWN_NAME];
    uint64_t begin;
    uint64_t end;
    if (json_array_size(offsets) != 2 || !get_count(json_array_get(offsets, 0), &begin) ||
        !get_count(json_array_get(offsets, 1), &end))
        return refuse(err, name, "\"data_offsets\" is not two counts");
    if (begin > end)
        return refuse(err, name, "\"data_offsets\" ends before it begins");
    if (end > b->data_bytes)
        return dkv_error_set(err, DKV_E_INVALID,
                             "tensor %s: data_offsets end at %" PRIu64 ", past the %" PRIu64
                             " bytes of data in the file",
                             dkv_printable(name, shown, sizeof(shown)), end, b->data_bytes);
    tensor->data = b->data + begin;
    tensor->bytes = end - begin;
    return DKV_OK;
}

static enum dkv_status check_bytes(const struct dkv_tensor *tensor, const char *name,
                                   uint64_t elements, struct dkv_error *err)
{
    char shown[SHOWN_NAME];
    uint64_t bits;
    const unsigned element_bits = type_bits(tensor->type_name, tensor->dtype);
    if (element_bits == 0)
        return DKV_OK; /* a type of the future; nobody here reads such a tensor */
    if (!dkv_mul_u64(elements, element_bits, &bits))
        return refuse(err, name, "the product of its shape overflows");
    if (bits % 8 != 0 || bits / 8 != tensor->bytes)
        return dkv_error_set(err, DKV_E_INVALID,
                             "tensor %s: %" PRIu64 " elements of %s are %" PRIu64
                             " bytes, data_offsets give %" PRIu64,
                             dkv_printable(name, shown, sizeof(shown)), elements, tensor->type_name,
                             bits / 8, tensor->bytes);
    return DKV_OK;
}

static enum dkv_status read_tensor(const json_t *value, const char *name, struct builder *b,
                                   struct dkv_error *err)
{
    struct dkv_tensor tensor = {0};
    uint64_t elements = 0;
    const char *type_name = json_string_value(json_object_get(value, "dtype"));
    if (type_name == NULL)
        return refuse(err, name, "\"dtype\" is missing or not a string");
    char shown[sizeof(tensor.type_name)];
    strcpy(tensor.type_name, dkv_printable(type_name, shown, sizeof(shown)));
    tensor.dtype = dkv_dtype_parse(type_name);
    enum dkv_status status = read_shape(json_object_get(value, "shape"), name, &tensor, &elements,
                                        err);
    if (status == DKV_OK)
        status = read_offsets(json_object_get(value, "data_offsets"), name, b, &tensor, err);
    if (status == DKV_OK)
        status = check_bytes(&tensor, name, elements, err);
    if (status == DKV_OK)
        status = append_name(b, name, &tensor, err);
    return status;
}

static enum dkv_status read_metadata(const json_t *value, struct builder *b, struct dkv_error *err)
{
    const char *key;
    json_t *text;
    if (b->has_metadata)
        return dkv_error_set(err, DKV_E_INVALID, "header: __metadata__ is used twice");
    b->has_metadata = true;
    if (!json_is_object(value))
        return dkv_error_set(err, DKV_E_INVALID, "header: __metadata__ is not an object");
    json_object_foreach ((json_t *)(uintptr_t)value, key, text) {
        if (!json_is_string(text))
            return dkv_error_set(err, DKV_E_INVALID,
                                 "header: __metadata__ holds a value that is not a string");
    }
    return DKV_OK;
}

static enum dkv_status read_entry(struct piece name, struct piece value, struct builder *b,
                                  struct dkv_error *err)
{
    json_error_t why;
    enum dkv_status status;
    /* The parser's complaint quotes the file, control characters and all. */
    char quoted[81];
    json_t *name_json = json_loadb(name.text, name.length, JSON_DECODE_ANY, &why);
    if (name_json == NULL)
        return dkv_error_set(err, DKV_E_INVALID, "header: a name is not a JSON string: %s",
                             dkv_printable(why.text, quoted, sizeof(quoted)));
    const char *name_text = json_string_value(name_json);
    json_t *value_json = json_loadb(value.text, value.length, JSON_REJECT_DUPLICATES, &why);
    char shown[SHOWN_NAME];
    if (value_json == NULL)
        status = dkv_error_set(err, DKV_E_INVALID, "tensor %s: its description is not JSON: %s",
                               dkv_printable(name_text, shown, sizeof(shown)),
                               dkv_printable(why.text, quoted, sizeof(quoted)));
    else if (strcmp(name_text, "__metadata__") == 0)
        status = read_metadata(value_json, b, err);
    else if (!json_is_object(value_json))
        status = refuse(err, name_text, "its description is not an object");
    else
        status = read_tensor(value_json, name_text, b, err);
    json_decref(value_json);
    json_decref(name_json);
    return status;
}

static enum dkv_status read_header(struct scanner s, struct builder *b, struct dkv_error *err)
{
    if (s.at == s.end || *s.at != '{')
        return dkv_error_set(err, DKV_E_INVALID, "header: does not begin with '{'");
    s.at++;
    bool more = !take_char(&s, '}');
    while (more) {
        struct piece name = {0};
        struct piece value = {0};
        if (!take_string(&s, &name))
            return dkv_error_set(err, DKV_E_INVALID, "header: a tensor's name was expected");
        if (!take_char(&s, ':'))
            return dkv_error_set(err, DKV_E_INVALID, "header: ':' was expected after a name");
        enum dkv_status status = take_value(&s, &value, err);
        if (status == DKV_OK)
            status = read_entry(name, value, b, err);
        if (status != DKV_OK)
            return status;
        more = take_char(&s, ',');
        if (!more && !take_char(&s, '}'))
            return dkv_error_set(err, DKV_E_INVALID, "header: ',' or '}' was expected");
    }
    skip_space(&s);
    if (s.at != s.end)
        return dkv_error_set(err, DKV_E_INVALID, "header: something follows its last '}'");
    return DKV_OK;
}

/* ---- what must hold between tensors ---- */

static int by_place(const void *a, const void *b)
{
    const struct dkv_tensor *x = a;
    const struct dkv_tensor *y = b;
    if (x->data != y->data)
        return x->data < y->data ? -1 : 1;
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

static int by_name(const void *a, const void *b)
{
    const struct dkv_tensor *x = a;
    const struct dkv_tensor *y = b;
    return strcmp(x->name, y->name);
}

static void sort(const struct builder *b, int (*order)(const void *, const void *))
{
    if (b->n_tensors > 0) /* qsort() wants an array even for nothing */
        qsort(b->tensors, b->n_tensors, sizeof(b->tensors[0]), order);
}

static enum dkv_status check_tiling(const struct builder *b, struct dkv_error *err)
{
    char shown[SHOWN_NAME];
    uint64_t end = 0;
    sort(b, by_place);
    for (size_t i = 0; i < b->n_tensors; i++) {
        const struct dkv_tensor *t = &b->tensors[i];
        const uint64_t begin = (uint64_t)(t->data - b->data);
        if (begin != end)
            return dkv_error_set(err, DKV_E_INVALID,
                                 "tensor %s: begins at %" PRIu64 ", %s the end of the one before "
                                 "it at %" PRIu64,
                                 dkv_printable(t->name, shown, sizeof(shown)), begin,
                                 begin < end ? "inside" : "leaving a gap after", end);
        end = begin + t->bytes;
    }
    if (end != b->data_bytes)
        return dkv_error_set(err, DKV_E_INVALID,
                             "the tensors end at %" PRIu64 ", the file's data at %" PRIu64, end,
                             b->data_bytes);
    return DKV_OK;
}

static enum dkv_status check_names(const struct builder *b, struct dkv_error *err)
{
    sort(b, by_name);
    for (size_t i = 1; i < b->n_tensors; i++)
        if (strcmp(b->tensors[i - 1].name, b->tensors[i].name) == 0)
            return refuse(err, b->tensors[i].name, "the name is used twice");
    return DKV_OK;
}

static void place_names(struct builder *b)
{
    for (size_t i = 0; i < b->n_tensors; i++)
        b->tensors[i].name = b->names + (uintptr_t)b->tensors[i].name;
}

static uint64_t read_le64(const uint8_t *bytes)
{
    uint64_t value = 0;
    for (unsigned i = 0; i < LENGTH_BYTES; i++)
        value |= (uint64_t)bytes[i] << (8 * i);
    return value;
}

enum dkv_status dkv_safetensors_parse(const void *bytes, uint64_t size,
                                      struct dkv_tensor_index *index_out, struct dkv_error *err)
{
    if (size < LENGTH_BYTES + 2)
        return dkv_error_set(err, DKV_E_INVALID,
                             "%" PRIu64 " bytes are too short for a safetensors file", size);
    const uint64_t header_bytes = read_le64(bytes);
    if (header_bytes > DKV_SAFETENSORS_HEADER_MAX)
        return dkv_error_set(err, DKV_E_INVALID,
                             "header length %" PRIu64 " not in 2..%u: not a safetensors file?",
                             header_bytes, DKV_SAFETENSORS_HEADER_MAX);
    if (header_bytes > size - LENGTH_BYTES)
        return dkv_error_set(err, DKV_E_INVALID,
                             "header length %" PRIu64 ", but only %" PRIu64
                             " bytes follow: the file is truncated",
                             header_bytes, size - LENGTH_BYTES);
    const char *header = (const char *)bytes + LENGTH_BYTES;
    struct builder b = {
        .data = (const uint8_t *)header + header_bytes,
        .data_bytes = size - LENGTH_BYTES - header_bytes,
    };
    enum dkv_status status = read_header((struct scanner){header, header + header_bytes}, &b, err);
    if (status == DKV_OK) {
        place_names(&b);
        status = check_tiling(&b, err);
    }
    if (status == DKV_OK)
        status = check_names(&b, err);
    if (status != DKV_OK) {
        free(b.tensors);
        free(b.names);
        return status;
    }
    *index_out = (struct dkv_tensor_index){b.tensors, b.n_tensors, b.names};
    return DKV_OK;
}
