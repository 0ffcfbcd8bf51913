/* The table of routes and the matcher, which walks pattern and path segment by segment. */
#include "server/routes.h"

#include "server/handlers.h"

#include <string.h>

#define MODEL         "/v2/models/{model}"
#define MODEL_VERSION "/v2/models/{model}/versions/{version}"

const struct dkv_route dkv_routes[] = {
    {DKV_ROUTE_GET, "/", dkv_handle_page, false, true, false},
    {DKV_ROUTE_GET, "/v2", dkv_handle_server, false, false, false},
    {DKV_ROUTE_GET, "/v2/health/live", dkv_handle_live, true, false, false},
    {DKV_ROUTE_GET, "/v2/health/ready", dkv_handle_ready, true, false, false},
    {DKV_ROUTE_GET, "/v2/models/stats", dkv_handle_stats_all, false, false, false},
    {DKV_ROUTE_GET, MODEL, dkv_handle_model, false, false, false},
    {DKV_ROUTE_GET, MODEL_VERSION, dkv_handle_model, false, false, false},
    {DKV_ROUTE_GET, MODEL "/ready", dkv_handle_model_ready, false, false, false},
    {DKV_ROUTE_GET, MODEL_VERSION "/ready", dkv_handle_model_ready, false, false, false},
    {DKV_ROUTE_GET, MODEL "/config", dkv_handle_config, false, false, false},
    {DKV_ROUTE_GET, MODEL_VERSION "/config", dkv_handle_config, false, false, false},
    {DKV_ROUTE_GET, MODEL "/stats", dkv_handle_stats, false, true, false},
    {DKV_ROUTE_GET, MODEL_VERSION "/stats", dkv_handle_stats, false, false, false},
    {DKV_ROUTE_POST, MODEL "/infer", dkv_handle_infer, false, false, true},
    {DKV_ROUTE_POST, MODEL_VERSION "/infer", dkv_handle_infer, false, false, true},
    {DKV_ROUTE_POST, "/v2/repository/index", dkv_handle_index, false, false, false},
    {DKV_ROUTE_GET, "/v2/systemsharedmemory/status", dkv_handle_shm_status, false, false, false},
    {DKV_ROUTE_GET, "/v2/cudasharedmemory/status", dkv_handle_shm_status, false, false, false},
    {DKV_ROUTE_GET, "/v2/systemsharedmemory/region/{region}/status", dkv_handle_shm_status, false,
     false, false},
    {DKV_ROUTE_GET, "/v2/cudasharedmemory/region/{region}/status", dkv_handle_shm_status, false,
     false, false},
    {DKV_ROUTE_POST, "/v2/systemsharedmemory/region/{region}/register", dkv_handle_shm_register,
     false, false, false},
    {DKV_ROUTE_POST, "/v2/cudasharedmemory/region/{region}/register", dkv_handle_shm_register,
     false, false, false},
    {DKV_ROUTE_POST, "/v2/systemsharedmemory/unregister", dkv_handle_shm_unregister, false, false,
     false},
    {DKV_ROUTE_POST, "/v2/cudasharedmemory/unregister", dkv_handle_shm_unregister, false, false,
     false},
    {DKV_ROUTE_POST, "/v2/systemsharedmemory/region/{region}/unregister", dkv_handle_shm_unregister,
     false, false, false},
    {DKV_ROUTE_POST, "/v2/cudasharedmemory/region/{region}/unregister", dkv_handle_shm_unregister,
     false, false, false},
    {DKV_ROUTE_GET, "/metrics", dkv_handle_metrics, false, true, false},
};

const size_t dkv_n_routes = sizeof(dkv_routes) / sizeof(dkv_routes[0]);

static int hex_value(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    if (c >= 'A' && c <= 'F')
        return c - 'A' + 10;
    return -1;
}

/* Decodes one segment; false for a bad escape, a NUL, an empty or an over-long segment. */
static bool decode_segment(const char *text, size_t n_bytes, char *out)
{
    size_t used = 0;
    for (size_t i = 0; i < n_bytes; i++) {
        char c = text[i];
        if (c == '%') {
            int high = i + 2 < n_bytes ? hex_value(text[i + 1]) : -1;
            int low = high >= 0 ? hex_value(text[i + 2]) : -1;
            if (low < 0)
                return false;
            c = (char)(high * 16 + low);
            i += 2;
        }
        if (c == '\0' || used == DKV_ROUTE_NAME_BYTES)
            return false;
        out[used++] = c;
    }
    out[used] = '\0';
    return used > 0;
}

static size_t segment_bytes(const char *text)
{
    return strcspn(text, "/");
}

static bool is_digits(const char *text)
{
    return *text != '\0' && strspn(text, "0123456789") == strlen(text);
}

/* Where a pattern's placeholder stores its segment. */
static char *placeholder(struct dkv_route_match *match, const char *pattern, size_t n_bytes)
{
    if (n_bytes == 7 && memcmp(pattern, "{model}", 7) == 0)
        return match->model;
    if (n_bytes == 9 && memcmp(pattern, "{version}", 9) == 0)
        return match->version;
    if (n_bytes == 8 && memcmp(pattern, "{region}", 8) == 0)
        return match->region;
    return NULL;
}

static bool matches(const char *pattern, const char *path, struct dkv_route_match *match)
{
    *match = (struct dkv_route_match){0};
    if (pattern[1] == '\0')
        return strcmp(path, pattern) == 0;
    while (*pattern == '/' && *path == '/') {
        size_t n_pattern = segment_bytes(++pattern);
        size_t n_path = segment_bytes(++path);
        char *slot = placeholder(match, pattern, n_pattern);
        char decoded[DKV_ROUTE_NAME_BYTES + 1];
        if (!decode_segment(path, n_path, decoded))
            return false;
        if (slot != NULL)
            strcpy(slot, decoded);
        else if (strlen(decoded) != n_pattern || memcmp(decoded, pattern, n_pattern) != 0)
            return false;
        if (slot == match->version && !is_digits(decoded))
            return false;
        pattern += n_pattern;
        path += n_path;
    }
    return *pattern == '\0' && *path == '\0';
}

enum dkv_route_result dkv_route_find(const char *method, const char *path,
                                     struct dkv_route_match *match_out, const char **allow_out)
{
    enum dkv_route_result result = DKV_ROUTE_NONE;
    const bool is_get = strcmp(method, "GET") == 0 || strcmp(method, "HEAD") == 0;
    const bool is_post = strcmp(method, "POST") == 0;
    for (size_t i = 0; i < dkv_n_routes; i++) {
        if (!matches(dkv_routes[i].pattern, path, match_out))
            continue;
        if (dkv_routes[i].method == DKV_ROUTE_GET ? is_get : is_post) {
            match_out->route = &dkv_routes[i];
            return DKV_ROUTE_FOUND;
        }
        *allow_out = dkv_routes[i].method == DKV_ROUTE_GET ? "GET, HEAD" : "POST";
        result = DKV_ROUTE_WRONG_METHOD;
    }
    return result;
}
