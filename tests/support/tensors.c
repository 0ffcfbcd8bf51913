/* safetensors: 8 bytes little-endian length of a JSON object, the object, the data. Each member
 * but __metadata__ has dtype, shape and data_offsets [begin, end) into the data. */
#include "tests/support/tensors.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct dkv_tensors {
    char *file;
    size_t bytes;
    const char *data;
    json_t *header;
};

static char *read_file(const char *path, size_t *bytes_out)
{
    FILE *f = fopen(path, "rb");
    if (f == NULL) {
        perror(path);
        return NULL;
    }
    fseek(f, 0, SEEK_END);
    const long size = ftell(f);
    rewind(f);
    char *bytes = size > 0 ? malloc((size_t)size) : NULL;
    if (bytes != NULL && fread(bytes, 1, (size_t)size, f) != (size_t)size) {
        free(bytes);
        bytes = NULL;
    }
    fclose(f);
    *bytes_out = (size_t)size;
    return bytes;
}

struct dkv_tensors *dkv_tensors_open(const char *path)
{
    struct dkv_tensors *tensors = calloc(1, sizeof(*tensors));
    uint64_t header_bytes = 0;
    json_error_t error = {0};
    if (tensors == NULL)
        return NULL;
    tensors->file = read_file(path, &tensors->bytes);
    if (tensors->file != NULL && tensors->bytes >= sizeof(header_bytes))
        memcpy(&header_bytes, tensors->file, sizeof(header_bytes));
    if (header_bytes > 0 && header_bytes <= tensors->bytes - sizeof(header_bytes))
        tensors->header = json_loadb(tensors->file + sizeof(header_bytes), header_bytes, 0, &error);
    if (tensors->header == NULL) {
        fprintf(stderr, "%s: not a safetensors file %s\n", path, error.text);
        dkv_tensors_close(tensors);
        return NULL;
    }
    tensors->data = tensors->file + sizeof(header_bytes) + header_bytes;
    return tensors;
}

void dkv_tensors_close(struct dkv_tensors *tensors)
{
    if (tensors == NULL)
        return;
    json_decref(tensors->header);
    free(tensors->file);
    free(tensors);
}

const char *dkv_tensors_name(const struct dkv_tensors *tensors, size_t i)
{
    const char *name;
    json_t *entry;
    json_object_foreach (tensors->header, name, entry) {
        if (strcmp(name, "__metadata__") != 0 && i-- == 0)
            return name;
    }
    return NULL;
}

int dkv_tensors_find(const struct dkv_tensors *tensors, const char *name,
                     struct dkv_tensor *tensor_out)
{
    const json_t *entry = json_object_get(tensors->header, name);
    const json_t *shape = json_object_get(entry, "shape");
    const json_t *offsets = json_object_get(entry, "data_offsets");
    const uint64_t begin = (uint64_t)json_integer_value(json_array_get(offsets, 0));
    const uint64_t end = (uint64_t)json_integer_value(json_array_get(offsets, 1));
    if (entry == NULL || json_array_size(shape) > 8)
        return 0;
    *tensor_out = (struct dkv_tensor){
        .dtype = json_string_value(json_object_get(entry, "dtype")),
        .n_dims = json_array_size(shape),
        .data = tensors->data + begin,
        .bytes = end - begin,
    };
    for (size_t i = 0; i < tensor_out->n_dims; i++)
        tensor_out->shape[i] = (uint64_t)json_integer_value(json_array_get(shape, i));
    return 1;
}
