/* Reads over the raw bytes of a header before the HTTP library gets them.
 *
 * The library answers some malformed headers itself, with a page of its own that is no JSON (and
 * whose header 0.9.75 sends twice), and accepts others that it should not. What it would judge
 * badly is found here; the guard (http_guard.h) judges the fields afterwards.
 *
 * Owner   borrows the bytes for the call.
 * Thread  any; pure.
 */
#ifndef DKV_SERVER_HTTP_SCAN_H
#define DKV_SERVER_HTTP_SCAN_H

#include "server/http_guard.h"

enum dkv_http_scan_result {
    DKV_HTTP_SCAN_MORE, /* so far good; the header is not complete */
    DKV_HTTP_SCAN_GOOD,
    DKV_HTTP_SCAN_BAD, /* *verdict_out says why */
};

/* `bytes` is the start of a connection; bytes behind the header are not looked at. */
enum dkv_http_scan_result dkv_http_scan(const char *bytes, size_t n_bytes,
                                        struct dkv_http_verdict *verdict_out);

#endif
