/* libdropkv: its version, status and errors, element types. Part of dropkv.h. */
#ifndef DROPKV_BASE_H
#define DROPKV_BASE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define DROPKV_API __attribute__((visibility("default")))
#else
#define DROPKV_API
#endif

#define DROPKV_VERSION_MAJOR  0
#define DROPKV_VERSION_MINOR  1
#define DROPKV_VERSION_PATCH  0
#define DROPKV_VERSION_NUMBER 100 /* major * 10000 + minor * 100 + patch */

/* The version of the library that is running, as text ("0.1.0") and as DROPKV_VERSION_NUMBER. */
DROPKV_API const char *dropkv_version(void);
DROPKV_API int dropkv_version_number(void);

/* ---- status ---- */

enum dropkv_status {
    DROPKV_OK = 0,

    /* The request has to change. */
    DROPKV_E_MALFORMED = 1,   /* an answer or message could not be read */
    DROPKV_E_INVALID = 2,     /* a field is outside its allowed range */
    DROPKV_E_UNSUPPORTED = 3, /* well formed, but not something this version can do */
    DROPKV_E_NOT_FOUND = 4,
    DROPKV_E_DENIED = 5,    /* a token is missing or wrong */
    DROPKV_E_TOO_LARGE = 6, /* above a size limit of the server */

    /* The same request may succeed later. */
    DROPKV_E_BUSY = 16,    /* too much is waiting already */
    DROPKV_E_TIMEOUT = 17, /* the deadline passed */
    DROPKV_E_DRAINING = 18,
    DROPKV_E_CANCELLED = 19,
    DROPKV_E_UNAVAILABLE = 20, /* nobody answers at the endpoint */

    /* This side or the server failed. */
    DROPKV_E_NOMEM = 32,
    DROPKV_E_DEVICE = 33,
    DROPKV_E_IO = 34,
    DROPKV_E_INTERNAL = 35,
};

/* Why something failed: one sentence with the field, its value and the allowed range. */
struct dropkv_error {
    enum dropkv_status status;
    char text[248];
};

/* "INVALID", and "a field is outside its allowed range". Static strings, never NULL. */
DROPKV_API const char *dropkv_status_name(enum dropkv_status status);
DROPKV_API const char *dropkv_status_text(enum dropkv_status status);

/* 1 if the same request may succeed later, else 0. */
DROPKV_API int dropkv_status_retryable(enum dropkv_status status);

/* ---- element types ---- */

enum dropkv_dtype {
    DROPKV_BF16 = 1,
    DROPKV_FP16 = 2,
    DROPKV_FP32 = 3,
    DROPKV_F8_E4M3 = 4, /* the "fn" variant: no infinities */
    DROPKV_F8_E5M2 = 5,
};

/* Size of one element in bytes; 0 for an unknown type. */
DROPKV_API size_t dropkv_dtype_bytes(enum dropkv_dtype dtype);

#ifdef __cplusplus
}
#endif
#endif
