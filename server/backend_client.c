/* Clients: found by name where they have one, so that all connections of a token are one client,
 * and kept until the last of its jobs has ended, since the queue's accounts are in it. */
#include "server/backend_priv.h"

#include <stdlib.h>
#include <string.h>

static void free_client(struct dkv_backend_client *client)
{
    dkv_admission_client_fini(client->backend->queue, &client->share);
    dkv_list_remove(&client->node);
    dkv_quota_holder_unref(client->holder);
    free(client);
}

void dkv_backend_client_free_if_unused(struct dkv_backend_client *client)
{
    if (client->n_refs == 0 && client->n_jobs == 0)
        free_client(client);
}

struct dkv_backend_client *dkv_backend_client_get(struct dkv_backend *backend, const char *name)
{
    if (name != NULL)
        DKV_LIST_EACH (node, &backend->clients) {
            struct dkv_backend_client *client = DKV_LIST_OF(node, struct dkv_backend_client, node);
            if (*client->name != '\0' && strcmp(client->name, name) == 0) {
                client->n_refs++;
                return client;
            }
        }
    struct dkv_backend_client *client = calloc(1, sizeof(*client));
    struct dkv_quota_holder *holder = dkv_quota_holder_new();
    if (client == NULL || holder == NULL) {
        dkv_quota_holder_unref(holder);
        free(client);
        return NULL;
    }
    client->holder = holder;
    client->backend = backend;
    client->n_refs = 1;
    snprintf(client->name, sizeof(client->name), "%s", name != NULL ? name : "");
    dkv_admission_client_init(backend->queue, &client->share);
    dkv_list_push_back(&backend->clients, &client->node);
    return client;
}

struct dkv_quota_holder *dkv_backend_client_holder(const struct dkv_backend_client *client)
{
    return client->holder;
}

bool dkv_backend_client_is(const struct dkv_backend_client *client, const char *name)
{
    return strcmp(client->name, name != NULL ? name : "") == 0;
}

void dkv_backend_client_put(struct dkv_backend_client *client)
{
    if (client == NULL)
        return;
    client->n_refs--;
    dkv_backend_client_free_if_unused(client);
}

void dkv_backend_free_clients(struct dkv_backend *backend)
{
    DKV_LIST_EACH_SAFE (node, &backend->clients)
        free_client(DKV_LIST_OF(node, struct dkv_backend_client, node));
}
