/* Mapping of tensor files, and what both formats share. */
#include "client/tensor_file.h"

#include "client/npy.h"
#include "client/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

void dkv_tensor_index_fini(struct dkv_tensor_index *index)
{
    free(index->tensors);
    free(index->names);
    *index = (struct dkv_tensor_index){0};
}

const struct dkv_tensor *dkv_tensor_index_find(const struct dkv_tensor_index *index,
                                               const char *name)
{
    size_t low = 0;
    size_t high = index->n_tensors;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        const int order = strcmp(index->tensors[middle].name, name);
        if (order == 0)
            return &index->tensors[middle];
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return NULL;
}

static enum dkv_status map_regular_file(int fd, struct dkv_tensor_file *file, struct dkv_error *err)
{
    struct stat st;
    if (fstat(fd, &st) != 0)
        return dkv_error_set(err, DKV_E_IO, "could not stat: %s", strerror(errno));
    if (!S_ISREG(st.st_mode))
        return dkv_error_set(err, DKV_E_INVALID, "not a regular file, cannot be mapped");
    if (st.st_size == 0)
        return dkv_error_set(err, DKV_E_INVALID, "the file is empty");
    void *map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (map == MAP_FAILED)
        return dkv_error_set(err, DKV_E_IO, "could not map %lld bytes: %s", (long long)st.st_size,
                             strerror(errno));
    file->map = map;
    file->bytes = (uint64_t)st.st_size;
    return DKV_OK;
}

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash == NULL ? path : slash + 1;
}

static enum dkv_status parse_any(struct dkv_tensor_file *file, struct dkv_error *err)
{
    if (file->bytes >= DKV_NPY_MAGIC_BYTES &&
        memcmp(file->map, DKV_NPY_MAGIC, DKV_NPY_MAGIC_BYTES) == 0)
        return dkv_npy_parse(file->map, file->bytes, base_name(file->path), &file->index, err);
    return dkv_safetensors_parse(file->map, file->bytes, &file->index, err);
}

enum dkv_status dkv_tensor_file_open(const char *path, struct dkv_tensor_file *file_out,
                                     struct dkv_error *err)
{
    struct dkv_tensor_file file = {.path = strdup(path)};
    if (file.path == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a path");
    /* O_NONBLOCK: opening a named pipe must fail the check below, not wait for a writer. */
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        const int saved = errno;
        free(file.path);
        return dkv_error_set(err, saved == ENOENT ? DKV_E_NOT_FOUND : DKV_E_IO,
                             "could not open: %s", strerror(saved));
    }
    enum dkv_status status = map_regular_file(fd, &file, err);
    close(fd); /* the mapping keeps the file */
    if (status == DKV_OK)
        status = parse_any(&file, err);
    if (status != DKV_OK) {
        dkv_tensor_file_close(&file);
        return status;
    }
    *file_out = file;
    return DKV_OK;
}

void dkv_tensor_file_close(struct dkv_tensor_file *file)
{
    dkv_tensor_index_fini(&file->index);
    if (file->map != NULL)
        munmap(file->map, file->bytes);
    free(file->path);
    *file = (struct dkv_tensor_file){0};
}

/* Bytes of the UTF-8 sequence at `s`, 0 if it is not one of a printable character. C1 controls
 * (U+0080..U+009F) are terminal commands too. */
static size_t printable_bytes(const unsigned char *s)
{
    if (s[0] < 0x80)
        return s[0] >= 0x20 && s[0] != 0x7f ? 1 : 0;
    const size_t n = s[0] >= 0xf0 && s[0] <= 0xf4   ? 4
                     : s[0] >= 0xe0 && s[0] <= 0xef ? 3
                     : s[0] >= 0xc2 && s[0] <= 0xdf ? 2
                                                    : 0;
    for (size_t i = 1; i < n; i++)
        if ((s[i] & 0xc0) != 0x80)
            return 0;
    return n == 2 && s[0] == 0xc2 && s[1] < 0xa0 ? 0 : n;
}

const char *dkv_printable(const char *text, char *out, size_t out_bytes)
{
    const unsigned char *s = (const unsigned char *)text;
    size_t used = 0;
    size_t cut = 0; /* where "..." goes if the text does not fit */
    while (*s != '\0') {
        const size_t n = printable_bytes(s);
        const size_t take = n == 0 ? 1 : n;
        if (used + take + 1 > out_bytes) {
            strcpy(out + cut, "...");
            return out;
        }
        if (n == 0)
            out[used] = '?';
        else
            memcpy(out + used, s, n);
        used += take;
        s += take;
        if (used + 4 <= out_bytes)
            cut = used;
    }
    out[used] = '\0';
    return out;
}
