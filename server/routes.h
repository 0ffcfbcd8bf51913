/* Which handler answers a path: one table, and nothing is served that is not in it.
 *
 * Matching looks at the path alone (the query string is not part of it), in full, without a
 * trailing slash. Segments are separated before they are percent-decoded, so "%2F" is a character
 * of a name and never a separator. {version} must be digits.
 *
 * Thread  any; pure.
 */
#ifndef DKV_SERVER_ROUTES_H
#define DKV_SERVER_ROUTES_H

#include "proto/types.h"

#define DKV_ROUTE_NAME_BYTES 128

struct dkv_exchange;

/* Answers an exchange whose body has been received. */
typedef void (*dkv_route_fn)(struct dkv_exchange *exchange);

enum dkv_route_method { DKV_ROUTE_GET = 1, DKV_ROUTE_POST = 2 };

struct dkv_route {
    enum dkv_route_method method; /* GET serves HEAD too */
    const char *pattern;          /* "/v2/models/{model}/versions/{version}/infer" */
    dkv_route_fn handler;
    bool open;   /* answers without a token: what a load balancer's probe asks */
    bool page;   /* of the status page: a browser may sign in with a password, which is a token */
    bool tensor; /* takes a body up to max_body_bytes; the others up to a few kilobytes */
};

struct dkv_route_match {
    const struct dkv_route *route;
    char model[DKV_ROUTE_NAME_BYTES + 1];
    char version[DKV_ROUTE_NAME_BYTES + 1]; /* "" if the path has none */
    char region[DKV_ROUTE_NAME_BYTES + 1];
};

enum dkv_route_result { DKV_ROUTE_FOUND, DKV_ROUTE_NONE, DKV_ROUTE_WRONG_METHOD };

extern const struct dkv_route dkv_routes[];
extern const size_t dkv_n_routes;

/* `path` is what stood in the request line, not decoded. On WRONG_METHOD, *allow_out is the value
 * of the Allow header. */
enum dkv_route_result dkv_route_find(const char *method, const char *path,
                                     struct dkv_route_match *match_out, const char **allow_out);

#endif
