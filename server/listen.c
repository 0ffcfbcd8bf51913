/* Parses and opens the listening address. Host names are not resolved: what a daemon listens on
 * must not depend on a name service, and whether an address is loopback must be known for sure. */
#include "server/listen.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BACKLOG 1024

static enum dkv_status bad_address(const char *text, struct dkv_error *err)
{
    return dkv_error_set(err, DKV_E_INVALID,
                         "http: '%.64s' is not ADDRESS:PORT (as 127.0.0.1:8480 or [::1]:8480)",
                         text);
}

/* Splits "host:port" or "[host]:port"; false if there is no such form. */
static bool split(const char *text, char *host, size_t host_bytes, const char **port_out)
{
    const char *colon = strrchr(text, ':');
    if (colon == NULL)
        return false;
    const char *start = text;
    const char *end = colon;
    if (*text == '[') {
        if (colon == text + 1 || colon[-1] != ']')
            return false;
        start++;
        end--;
    } else if (memchr(text, ':', (size_t)(colon - text)) != NULL) {
        return false;
    }
    if (end <= start || (size_t)(end - start) >= host_bytes)
        return false;
    memcpy(host, start, (size_t)(end - start));
    host[end - start] = '\0';
    *port_out = colon + 1;
    return true;
}

static bool parse_port(const char *text, in_port_t *port_out)
{
    unsigned long port = 0;
    size_t length = strlen(text);
    if (length == 0 || length > 5 || strspn(text, "0123456789") != length)
        return false;
    port = strtoul(text, NULL, 10);
    *port_out = htons((uint16_t)port);
    return port <= 65535;
}

static bool is_loopback(const struct sockaddr_storage *address)
{
    if (address->ss_family == AF_INET)
        return ntohl(((const struct sockaddr_in *)address)->sin_addr.s_addr) >> 24 == 127;
    return IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)address)->sin6_addr);
}

enum dkv_status dkv_listen_parse(const char *text, struct dkv_listen_address *out,
                                 struct dkv_error *err)
{
    char host[64];
    const char *port_text;
    in_port_t port;
    if (!split(text, host, sizeof(host), &port_text) || !parse_port(port_text, &port))
        return bad_address(text, err);
    if (strcmp(host, "localhost") == 0)
        strcpy(host, "127.0.0.1");

    struct sockaddr_in *v4 = (struct sockaddr_in *)&out->address;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)&out->address;
    memset(out, 0, sizeof(*out));
    if (inet_pton(AF_INET, host, &v4->sin_addr) == 1) {
        v4->sin_family = AF_INET;
        v4->sin_port = port;
        out->address_bytes = sizeof(*v4);
    } else if (inet_pton(AF_INET6, host, &v6->sin6_addr) == 1) {
        v6->sin6_family = AF_INET6;
        v6->sin6_port = port;
        out->address_bytes = sizeof(*v6);
    } else {
        return bad_address(text, err);
    }
    out->loopback = is_loopback(&out->address);
    return DKV_OK;
}

static unsigned port_in_use(int fd)
{
    struct sockaddr_storage bound;
    socklen_t bytes = sizeof(bound);
    if (getsockname(fd, (struct sockaddr *)&bound, &bytes) != 0)
        return 0;
    return ntohs(bound.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&bound)->sin6_port
                                             : ((struct sockaddr_in *)&bound)->sin_port);
}

enum dkv_status dkv_listen_open(const struct dkv_listen_address *address, int *fd_out,
                                unsigned *port_out, struct dkv_error *err)
{
    const int on = 1;
    const struct sockaddr *to = (const struct sockaddr *)&address->address;
    int fd = socket(to->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return dkv_error_set(err, DKV_E_IO, "http: no socket: %s", strerror(errno));
    if (setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) != 0 ||
        (to->sa_family == AF_INET6 &&
         setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof(on)) != 0) ||
        bind(fd, to, address->address_bytes) != 0 || listen(fd, BACKLOG) != 0) {
        dkv_error_set(err, DKV_E_IO, "http: cannot listen: %s", strerror(errno));
        close(fd);
        return DKV_E_IO;
    }
    *fd_out = fd;
    *port_out = port_in_use(fd);
    return DKV_OK;
}

bool dkv_listen_adopt(int fd, struct dkv_listen_address *out, unsigned *port_out)
{
    memset(out, 0, sizeof(*out));
    out->address_bytes = sizeof(out->address);
    if (getsockname(fd, (struct sockaddr *)&out->address, &out->address_bytes) != 0 ||
        (out->address.ss_family != AF_INET && out->address.ss_family != AF_INET6))
        return false;
    out->loopback = is_loopback(&out->address);
    *port_out = port_in_use(fd);
    return true;
}
