/* Reason phrases of the HTTP statuses that this server uses.
 *
 * Thread  any; no state.
 */
#ifndef DKV_SERVER_HTTP_STATUS_H
#define DKV_SERVER_HTTP_STATUS_H

static inline const char *dkv_http_reason(unsigned http_status)
{
    switch (http_status) {
    case 408: return "Request Timeout";
    case 413: return "Content Too Large";
    case 400: return "Bad Request";
    case 503: return "Service Unavailable";
    default: return "Error";
    }
}

#endif
