/* What both ends of every interface agree on: status codes, the error object, element types and
 * size arithmetic that cannot overflow.
 *
 * Thread  any; nothing here has state.
 * Seen by C and by CUDA C++, so this header stays in their common part.
 */
#ifndef DKV_PROTO_TYPES_H
#define DKV_PROTO_TYPES_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DKV_RESTRICT                     __restrict__
#define DKV_PRINTF(fmt_index, arg_index) __attribute__((format(printf, fmt_index, arg_index)))

#ifdef __cplusplus
extern "C" {
#endif

/* Status codes travel on the wire: numbers are never reused. Three groups, by who has to act. */
enum dkv_status {
    DKV_OK = 0,

    /* 1..15: the caller has to change the request. */
    DKV_E_MALFORMED = 1,   /* the bytes are not a message */
    DKV_E_INVALID = 2,     /* a field is outside its allowed range */
    DKV_E_UNSUPPORTED = 3, /* well formed, but not something we can do */
    DKV_E_NOT_FOUND = 4,   /* the named thing does not exist (for this caller) */
    DKV_E_DENIED = 5,      /* the caller may not do this */
    DKV_E_TOO_LARGE = 6,   /* above a configured size limit */

    /* 16..31: the same request may succeed later. */
    DKV_E_BUSY = 16,        /* a bound of the queue is reached */
    DKV_E_TIMEOUT = 17,     /* the deadline passed */
    DKV_E_DRAINING = 18,    /* shutting down */
    DKV_E_CANCELLED = 19,   /* the caller went away or cancelled */
    DKV_E_UNAVAILABLE = 20, /* nobody answers at the endpoint */

    /* 32..: our side failed. */
    DKV_E_NOMEM = 32,
    DKV_E_DEVICE = 33, /* sticky device error: the process that owns the device must be replaced */
    DKV_E_IO = 34,
    DKV_E_INTERNAL = 35,
};

/* One row of the table that gives every status its names. */
struct dkv_status_info {
    enum dkv_status status;
    const char *name;     /* "INVALID": stable, for programs */
    const char *text;     /* one plain sentence, for people */
    unsigned http_status; /* answer of the HTTP front */
    unsigned exit_code;   /* sysexits code of the command line */
    bool retryable;       /* the same request may succeed later */
};

/* Never NULL: unknown numbers give the row of DKV_E_INTERNAL. */
const struct dkv_status_info *dkv_status_info(enum dkv_status status);

/* Why something failed. Whoever first knows the cause writes the sentence, with the field, the
 * value and the allowed range; everyone else forwards it. Short by design: it goes to clients, so
 * it never holds addresses, paths of ours, or client text other than a checked name. */
struct dkv_error {
    enum dkv_status status;
    char text[248];
};

/* Fills `err` (may be NULL) and returns `status`, so that a check can end in one statement. */
enum dkv_status dkv_error_set(struct dkv_error *err, enum dkv_status status, const char *format,
                              ...) DKV_PRINTF(3, 4);

/* A name that a client chose, made fit for an error text or a log line: at most 39 bytes, and
 * anything but ASCII letters, digits and "_.:-" becomes '?'. Returns `shown`. */
#define DKV_SHOWN_NAME_BYTES 40
const char *dkv_show_name(char shown[DKV_SHOWN_NAME_BYTES], const char *name);

/* Element types. The numbers travel on the wire. */
enum dkv_dtype {
    DKV_DTYPE_NONE = 0,
    DKV_BF16 = 1,
    DKV_FP16 = 2,
    DKV_FP32 = 3,
    DKV_F8_E4M3 = 4, /* "fn" variant: no infinities, S.1111.111 is NaN */
    DKV_F8_E5M2 = 5,
};

/* 0 for an unknown dtype. */
size_t dkv_dtype_bytes(enum dkv_dtype dtype);

/* Name in the Open Inference Protocol ("BF16", "FP16", "FP32", "F8_E4M3", "F8_E5M2") and in
 * safetensors files ("BF16", "F16", "F32", ...). dkv_dtype_name() gives the first;
 * dkv_dtype_parse() takes either, in any case, and DKV_DTYPE_NONE means unknown. */
const char *dkv_dtype_name(enum dkv_dtype dtype);
enum dkv_dtype dkv_dtype_parse(const char *name);

/* Where bytes live. */
enum dkv_place {
    DKV_PLACE_HOST = 0,
    DKV_PLACE_DEVICE = 1, /* readable by kernels of the engine's device */
};

/* Checked arithmetic for sizes that come from a client: false means overflow, and *out is then
 * unchanged. */
static inline bool dkv_mul_u64(uint64_t a, uint64_t b, uint64_t *out)
{
    uint64_t r;
    if (__builtin_mul_overflow(a, b, &r))
        return false;
    *out = r;
    return true;
}

static inline bool dkv_add_u64(uint64_t a, uint64_t b, uint64_t *out)
{
    uint64_t r;
    if (__builtin_add_overflow(a, b, &r))
        return false;
    *out = r;
    return true;
}

/* True if [offset, offset + bytes) lies within [0, size). */
static inline bool dkv_range_fits(uint64_t offset, uint64_t bytes, uint64_t size)
{
    return offset <= size && bytes <= size - offset;
}

#ifdef __cplusplus
}
#endif
#endif
