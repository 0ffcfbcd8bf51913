/* The public names of what proto/ knows, and the version. */
#include "client/dropkv.h"
#include "proto/types.h"

#define TEXT(x)         #x
#define DOTTED(a, b, c) TEXT(a) "." TEXT(b) "." TEXT(c)

const char *dropkv_version(void)
{
    return DOTTED(DROPKV_VERSION_MAJOR, DROPKV_VERSION_MINOR, DROPKV_VERSION_PATCH);
}

int dropkv_version_number(void)
{
    return DROPKV_VERSION_NUMBER;
}

const char *dropkv_status_name(enum dropkv_status status)
{
    return dkv_status_info((enum dkv_status)status)->name;
}

const char *dropkv_status_text(enum dropkv_status status)
{
    return dkv_status_info((enum dkv_status)status)->text;
}

int dropkv_status_retryable(enum dropkv_status status)
{
    return dkv_status_info((enum dkv_status)status)->retryable;
}

size_t dropkv_dtype_bytes(enum dropkv_dtype dtype)
{
    return dkv_dtype_bytes((enum dkv_dtype)dtype);
}
