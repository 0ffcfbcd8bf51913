/* The routes of the shared memory extensions. Without --allow-client-shm they say that HTTP callers
 * may not name memory.
 *
 * Whether a region can be used is known when every worker has opened it; until then the request is
 * suspended. */
#include "server/handlers.h"

#include "server/exchange.h"
#include "server/http.h"
#include "server/shm.h"

#include <string.h>

static bool is_cuda(const struct dkv_exchange *exchange)
{
    return strncmp(exchange->match.route->pattern, "/v2/cuda", 8) == 0;
}

static void reply_status_of(struct dkv_exchange *exchange, const struct dkv_error *err)
{
    dkv_reply_error(exchange, dkv_status_info(err->status)->http_status, err->text);
}

void dkv_handle_shm_status(struct dkv_exchange *exchange)
{
    static const struct dkv_oip_region *const none[1];
    const struct dkv_shm *shm = exchange->server->shm;
    const char *name = exchange->match.region;
    struct dkv_oip_text text = {0};
    struct dkv_error err = {0};
    enum dkv_status status;
    if (shm != NULL)
        status = dkv_shm_status(shm, exchange->client_name, is_cuda(exchange), name, &text, &err);
    else if (*name != '\0')
        status = dkv_error_set(&err, DKV_E_NOT_FOUND, "no such shared memory region");
    else
        status = dkv_oip_region_list(none, 0, &text);
    if (status == DKV_OK)
        dkv_reply_bytes(exchange, 200, "application/json", text.bytes, text.n_bytes);
    else if (err.status != DKV_OK)
        reply_status_of(exchange, &err);
    else
        dkv_reply_error(exchange, dkv_status_info(status)->http_status,
                        dkv_status_info(status)->text);
}

static void reply_registered(struct dkv_exchange *exchange)
{
    dkv_reply_empty(exchange, 200);
}

static void on_registered(void *waiter, const struct dkv_error *error)
{
    struct dkv_exchange *exchange = waiter;
    if (error->status != DKV_OK) {
        exchange->refused_status = dkv_status_info(error->status)->http_status;
        exchange->refusal = *error;
    }
    exchange->waits_for_region = false;
    dkv_http_resume(exchange); /* nothing if it is not suspended yet */
}

void dkv_handle_shm_register(struct dkv_exchange *exchange)
{
    struct dkv_shm *shm = exchange->server->shm;
    struct dkv_oip_region told;
    struct dkv_error err = {0};
    if (shm == NULL) {
        dkv_reply_error(exchange, 403,
                        "shared memory of HTTP clients is not accepted: send tensors in the body");
        return;
    }
    memset(&told, 0, sizeof(told));
    memcpy(told.name, exchange->match.region, sizeof(told.name));
    exchange->waits_for_region = true;
    if (dkv_oip_region_parse((const char *)exchange->body.data,
                             (size_t)exchange->body.received_bytes, is_cuda(exchange), &told,
                             &err) != DKV_OK ||
        dkv_shm_register(shm, exchange->client_name, &told, on_registered, exchange, &err) !=
            DKV_OK) {
        exchange->waits_for_region = false;
        reply_status_of(exchange, &err);
        return;
    }
    exchange->resumed = reply_registered;
    if (exchange->waits_for_region)
        dkv_http_suspend(exchange);
    else if (exchange->refused_status != 0)
        dkv_reply_error(exchange, exchange->refused_status, exchange->refusal.text);
    else
        reply_registered(exchange);
}

/* Where nothing can be registered there is nothing to do: the answer that clients expect on their
 * way out. */
void dkv_handle_shm_unregister(struct dkv_exchange *exchange)
{
    if (exchange->server->shm != NULL)
        dkv_shm_unregister(exchange->server->shm, exchange->client_name, is_cuda(exchange),
                           exchange->match.region);
    dkv_reply_empty(exchange, 200);
}
