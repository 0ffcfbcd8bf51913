/* One send() of a message that fits any socket's buffer. */
#include "server/raw_reply.h"

#include "proto/oip.h"

#include <stdio.h>
#include <sys/socket.h>

static const char *reason(unsigned http_status)
{
    switch (http_status) {
    case 400: return "Bad Request";
    case 408: return "Request Timeout";
    case 411: return "Length Required";
    case 413: return "Content Too Large";
    case 429: return "Too Many Requests";
    case 431: return "Request Header Fields Too Large";
    case 503: return "Service Unavailable";
    default: return "Error";
    }
}

bool dkv_raw_reply(int fd, unsigned http_status, const char *text)
{
    char body[DKV_OIP_ERROR_BYTES];
    char message[DKV_OIP_ERROR_BYTES + 256];
    const size_t n_body = dkv_oip_error_encode(text, body);
    const int n = snprintf(message, sizeof(message),
                           "HTTP/1.1 %u %s\r\nConnection: close\r\nContent-Type: application/json"
                           "\r\n%sContent-Length: %zu\r\n\r\n%s",
                           http_status, reason(http_status),
                           http_status == 503 || http_status == 429 ? "Retry-After: 1\r\n" : "",
                           n_body, body);
    return n > 0 && (size_t)n < sizeof(message) &&
           send(fd, message, (size_t)n, MSG_NOSIGNAL | MSG_DONTWAIT) == n;
}
