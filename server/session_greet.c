/* The first message of a connection and its answer: which version is spoken, and what the client
 * may use.
 */
#include "server/session_priv.h"

#include <string.h>

#define HOST_FEATURES (DKV_WIRE_FEATURE_MEMFD | DKV_WIRE_FEATURE_OUTPUT | DKV_WIRE_FEATURE_FENCE)
#define GPU_FEATURES  (DKV_WIRE_FEATURE_CUDA_LEGACY | DKV_WIRE_FEATURE_CUDA_VMM)
#define WELCOME_BYTES 48u
#define WELCOME_BYTES_MAX \
    (WELCOME_BYTES + DKV_ADMISSION_DEVICES_MAX * DKV_WIRE_DEVICE_BYTES + DKV_WIRE_ABOUT_MAX)

/* Names are the connection's own: nobody can guess, or has seen, what another one may name. */
static void give_names(struct dkv_session *session)
{
    if (!session->all->server->config->allow_shm_names ||
        !dkv_shm_name_prefix(session->uid, session->shm_prefix))
        session->shm_prefix[0] = '\0';
}

static size_t put_about(const struct dkv_session *session, uint8_t about[DKV_WIRE_ABOUT_MAX])
{
    const struct dkv_server *server = session->all->server;
    const char *const texts[DKV_WIRE_ABOUT_TEXTS] = {
        [DKV_WIRE_ABOUT_VERSION] = server->facts.version,
        [DKV_WIRE_ABOUT_PLATFORM] = DKV_OIP_PLATFORM,
        [DKV_WIRE_ABOUT_BACKEND] = server->facts.backend,
        [DKV_WIRE_ABOUT_DEVICE] = server->facts.device,
        [DKV_WIRE_ABOUT_SHM] = session->shm_prefix,
    };
    return dkv_wire_put_about(about, texts);
}

/* The devices' records, and whether one is a GPU. */
static unsigned list_devices(const struct dkv_server *server, uint8_t *records, bool *any_gpu_out)
{
    static const uint8_t none[DKV_UUID_BYTES];
    uint8_t uuids[DKV_ADMISSION_DEVICES_MAX][DKV_UUID_BYTES];
    const unsigned n = dkv_backend_uuids(server->backend, uuids);
    *any_gpu_out = false;
    for (unsigned d = 0; d < n; d++) {
        struct dkv_wire_device device = {.kind = DKV_WIRE_DEVICE_CPU};
        memcpy(device.uuid, uuids[d], sizeof(device.uuid));
        if (memcmp(uuids[d], none, sizeof(none)) != 0)
            device.kind = DKV_WIRE_DEVICE_CUDA;
        *any_gpu_out |= device.kind == DKV_WIRE_DEVICE_CUDA;
        records += dkv_wire_put_device(records, &device);
    }
    return n;
}

void dkv_session_greet(struct dkv_session *session, const struct dkv_wire_conn_message *message)
{
    struct dkv_error err = {0};
    struct dkv_wire_hello hello;
    uint8_t payload[WELCOME_BYTES_MAX];
    uint8_t about[DKV_WIRE_ABOUT_MAX];
    bool any_gpu;
    const struct dkv_server *server = session->all->server;
    enum dkv_status status = DKV_OK;
    if (message->header.type != DKV_WIRE_HELLO)
        status = dkv_error_set(&err, DKV_E_MALFORMED, "%s before hello",
                               dkv_wire_type_name(message->header.type));
    if (status == DKV_OK)
        status = dkv_wire_get_hello(message->payload, message->header.payload_bytes, &hello, &err);
    if (status == DKV_OK &&
        (hello.version_min > DKV_WIRE_VERSION || hello.version_max < DKV_WIRE_VERSION))
        status = dkv_error_set(&err, DKV_E_UNSUPPORTED,
                               "versions %u..%u are offered, this daemon speaks %u",
                               hello.version_min, hello.version_max, DKV_WIRE_VERSION);
    if (status != DKV_OK) {
        dkv_session_violation(session, message->header.id, &err);
        return;
    }
    const unsigned n_devices = list_devices(server, payload + WELCOME_BYTES, &any_gpu);
    uint32_t features = HOST_FEATURES | (any_gpu ? GPU_FEATURES : 0);
    give_names(session);
    if (*session->shm_prefix != '\0')
        features |= DKV_WIRE_FEATURE_SHM_NAMES;
    if (!session->trusted)
        features &= ~(uint32_t)DKV_WIRE_FEATURE_CUDA_LEGACY;
    const struct dkv_wire_welcome welcome = {
        .magic = DKV_WIRE_MAGIC,
        .version = DKV_WIRE_VERSION,
        .n_devices = (uint16_t)n_devices,
        .features = hello.features & features,
        .about_bytes = (uint16_t)put_about(session, about),
        .instance = session->all->instance,
        .max_regions = DKV_SESSION_REGIONS,
        .max_caches = DKV_SESSION_CACHES,
        .max_in_flight = DKV_SESSION_IN_FLIGHT,
        .max_fds = DKV_SESSION_FDS,
        .max_bulk_bytes = server->max_body_bytes,
    };
    size_t n = dkv_wire_put_welcome(payload, &welcome) + n_devices * DKV_WIRE_DEVICE_BYTES;
    memcpy(payload + n, about, welcome.about_bytes);
    n += welcome.about_bytes;
    session->greeted = true;
    dkv_session_send(session, DKV_WIRE_WELCOME, message->header.id, payload, n);
}
