/* The status table, the error object and the element types. */
#include "proto/types.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

static const struct dkv_status_info status_table[] = {
    {DKV_OK, "OK", "success", 200, 0, false},
    {DKV_E_MALFORMED, "MALFORMED", "the message could not be read", 400, 65, false},
    {DKV_E_INVALID, "INVALID", "a field is outside its allowed range", 400, 65, false},
    {DKV_E_UNSUPPORTED, "UNSUPPORTED", "this is not supported", 501, 65, false},
    {DKV_E_NOT_FOUND, "NOT_FOUND", "no such thing", 404, 68, false},
    {DKV_E_DENIED, "DENIED", "not permitted", 403, 77, false},
    {DKV_E_TOO_LARGE, "TOO_LARGE", "above a size limit", 413, 65, false},
    {DKV_E_BUSY, "BUSY", "too much work is waiting", 503, 75, true},
    {DKV_E_TIMEOUT, "TIMEOUT", "the deadline passed", 503, 75, true},
    {DKV_E_DRAINING, "DRAINING", "the server is shutting down", 503, 75, true},
    {DKV_E_CANCELLED, "CANCELLED", "the request was cancelled", 400, 75, true},
    {DKV_E_UNAVAILABLE, "UNAVAILABLE", "nobody answers at the endpoint", 503, 69, true},
    {DKV_E_NOMEM, "NOMEM", "out of memory", 503, 71, true},
    {DKV_E_DEVICE, "DEVICE", "the device failed", 503, 69, true},
    {DKV_E_IO, "IO", "input or output failed", 500, 74, false},
    {DKV_E_INTERNAL, "INTERNAL", "an internal error", 500, 70, false},
};

const struct dkv_status_info *dkv_status_info(enum dkv_status status)
{
    const size_t n_rows = sizeof(status_table) / sizeof(status_table[0]);
    for (size_t i = 0; i < n_rows; i++)
        if (status_table[i].status == status)
            return &status_table[i];
    return &status_table[n_rows - 1];
}

enum dkv_status dkv_error_set(struct dkv_error *err, enum dkv_status status, const char *format,
                              ...)
{
    if (err != NULL) {
        va_list args;
        err->status = status;
        va_start(args, format);
        vsnprintf(err->text, sizeof(err->text), format, args);
        va_end(args);
    }
    return status;
}

const char *dkv_show_name(char shown[DKV_SHOWN_NAME_BYTES], const char *name)
{
    static const char plain[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.:-";
    size_t n = 0;

    for (; n < DKV_SHOWN_NAME_BYTES - 1 && name[n] != '\0'; n++)
        shown[n] = strchr(plain, name[n]) != NULL ? name[n] : '?';
    shown[n] = '\0';
    return shown;
}

static const struct {
    enum dkv_dtype dtype;
    size_t bytes;
    const char *oip_name;
    const char *file_name;
} dtype_table[] = {
    {DKV_BF16, 2, "BF16", "BF16"},          {DKV_FP16, 2, "FP16", "F16"},
    {DKV_FP32, 4, "FP32", "F32"},           {DKV_F8_E4M3, 1, "F8_E4M3", "F8_E4M3"},
    {DKV_F8_E5M2, 1, "F8_E5M2", "F8_E5M2"},
};

#define N_DTYPES (sizeof(dtype_table) / sizeof(dtype_table[0]))

size_t dkv_dtype_bytes(enum dkv_dtype dtype)
{
    for (size_t i = 0; i < N_DTYPES; i++)
        if (dtype_table[i].dtype == dtype)
            return dtype_table[i].bytes;
    return 0;
}

const char *dkv_dtype_name(enum dkv_dtype dtype)
{
    for (size_t i = 0; i < N_DTYPES; i++)
        if (dtype_table[i].dtype == dtype)
            return dtype_table[i].oip_name;
    return "none";
}

enum dkv_dtype dkv_dtype_parse(const char *name)
{
    for (size_t i = 0; i < N_DTYPES; i++)
        if (strcasecmp(name, dtype_table[i].oip_name) == 0 ||
            strcasecmp(name, dtype_table[i].file_name) == 0)
            return dtype_table[i].dtype;
    return DKV_DTYPE_NONE;
}
