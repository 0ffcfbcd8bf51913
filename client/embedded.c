/* The transport that carries calls no further than an engine in this process: its life, and what it
 * says of itself. */
#include "client/buffer.h"
#include "client/embedded_priv.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* ---- opening ---- */

/* Splits "embedded:cuda:1?threads=4". */
static enum dkv_status read_address(const char *address, char *device, size_t device_bytes,
                                    struct dkv_engine_config *config, struct dkv_error *err)
{
    const char *start = address + strlen("embedded:");
    const char *question = strchr(start, '?');
    const size_t length = question == NULL ? strlen(start) : (size_t)(question - start);
    if (length >= device_bytes)
        return dkv_error_set(err, DKV_E_INVALID, "endpoint: the device's name is too long");
    memcpy(device, start, length);
    device[length] = '\0';
    if (length == 0)
        strcpy(device, "cpu");
    if (question == NULL)
        return DKV_OK;
    char *end, shown[DKV_SHOWN_NAME_BYTES];
    const char *number = question + strlen("?threads=");
    if (strncmp(question, "?threads=", 9) != 0)
        return dkv_error_set(err, DKV_E_INVALID, "endpoint: only ?threads=N may follow the device");
    const unsigned long threads = strtoul(number, &end, 10);
    if (end == number || *end != '\0' || threads < 1 || threads > 1024)
        return dkv_error_set(err, DKV_E_INVALID, "endpoint: threads '%s' not in 1..1024",
                             dkv_show_name(shown, number));
    config->threads = (unsigned)threads;
    return DKV_OK;
}

/* On a thread of the driver's, at any time until the engine is closed. */
static void batch_is_done(void *arg)
{
    const struct dkv_transport *t = arg;
    const uint64_t one = 1;
    const ssize_t done = write(t->event_fd, &one, sizeof(one)); /* which an eventfd takes */
    (void)done;
}

static enum dkv_status open_engine(const struct dkv_transport_config *config,
                                   struct dkv_transport *t, struct dkv_error *err)
{
    char device[32];
    struct dkv_engine_config engine_config = {
        .max_batch_items = DKV_EMBEDDED_BATCH_MAX,
        .stream = config->cuda_stream,
        .on_done = batch_is_done,
        .on_done_arg = t,
    };
    enum dkv_status status = read_address(config->address, device, sizeof(device), &engine_config,
                                          err);
    if (status == DKV_OK)
        status = dkv_embedded_find(device, &t->ops, &engine_config.device, err);
    if (status == DKV_OK && config->cuda_stream != NULL && !dkv_embedded_is_async(t))
        status = dkv_error_set(err, DKV_E_INVALID,
                               "options: cuda_stream is for embedded:cuda:N, not for the %s engine",
                               t->ops->name);
    if (status == DKV_OK)
        status = t->ops->open(&engine_config, &t->engine, err);
    if (status == DKV_OK)
        t->depth = t->ops->max_in_flight < DKV_EMBEDDED_DEPTH_MAX ? t->ops->max_in_flight
                                                                  : DKV_EMBEDDED_DEPTH_MAX;
    return status;
}

static enum dkv_status open_descriptors(struct dkv_transport *t, struct dkv_error *err)
{
    struct epoll_event event = {.events = EPOLLIN};
    t->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    t->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (t->epoll_fd < 0 || t->event_fd < 0 ||
        epoll_ctl(t->epoll_fd, EPOLL_CTL_ADD, t->event_fd, &event) != 0)
        return dkv_error_set(err, DKV_E_IO, "could not make an eventfd: %s", strerror(errno));
    return dkv_alarm_open(&t->alarm, t->epoll_fd, err);
}

static void embedded_close(struct dkv_transport *t)
{
    if (t == NULL)
        return;
    dkv_embedded_queue_fini(t);
    dkv_embedded_caches_fini(t);
    if (t->engine != NULL)
        t->ops->close(t->engine);
    dkv_alarm_close(&t->alarm);
    if (t->event_fd >= 0)
        close(t->event_fd);
    if (t->epoll_fd >= 0)
        close(t->epoll_fd);
    free(t);
}

static enum dkv_status embedded_open(const struct dkv_transport_config *config,
                                     struct dkv_transport **transport_out, struct dkv_error *err)
{
    struct dkv_transport *t = calloc(1, sizeof(*t));
    if (t == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for the engine");
    t->alarm = DKV_ALARM_NONE;
    enum dkv_status status = open_descriptors(t, err);
    if (status == DKV_OK)
        status = open_engine(config, t, err);
    if (status != DKV_OK) {
        embedded_close(t);
        return status;
    }
    *transport_out = t;
    return DKV_OK;
}

static int embedded_fd(const struct dkv_transport *t)
{
    return t->epoll_fd;
}

/* Memory is read where it is, in a buffer or not. */
static enum dkv_status embedded_add_buffer(struct dkv_transport *t,
                                           const struct dropkv_buffer *buffer, bool writable,
                                           struct dkv_error *err)
{
    (void)writable;
    return buffer->on_gpu && t->ops->place == NULL
               ? dkv_error_set(err, DKV_E_UNSUPPORTED,
                               "buffer: the %s engine cannot read GPU memory", t->ops->name)
               : DKV_OK;
}

/* ---- about itself ---- */

/* An engine that could be opened is ready while its device lives. */
static enum dkv_status embedded_health(struct dkv_transport *t, int64_t deadline_ns,
                                       struct dkv_error *err)
{
    (void)deadline_ns;
    return t->lost ? dkv_error_set(err, DKV_E_UNAVAILABLE,
                                   "the device was lost; this process has to be restarted")
                   : DKV_OK;
}

static enum dkv_status embedded_info(struct dkv_transport *t, int64_t deadline_ns,
                                     struct dkv_oip_info *info_out, struct dkv_error *err)
{
    struct dkv_engine_info info;
    (void)deadline_ns;
    (void)err;
    t->ops->info(t->engine, &info);
    *info_out = (struct dkv_oip_info){.server = "libdropkv (embedded)"};
    snprintf(info_out->version, sizeof(info_out->version), "%s", dropkv_version());
    snprintf(info_out->platform, sizeof(info_out->platform), "%s", t->ops->name);
    snprintf(info_out->backend, sizeof(info_out->backend), "%s", info.backend);
    snprintf(info_out->device, sizeof(info_out->device), "%s", info.device);
    return DKV_OK;
}

const struct dkv_transport_ops dkv_transport_embedded = {
    .open = embedded_open,
    .close = embedded_close,
    .submit = dkv_embedded_submit,
    .cancel = dkv_embedded_cancel,
    .fd = embedded_fd,
    .ready = dkv_embedded_ready,
    .dispatch = dkv_embedded_dispatch,
    .health = embedded_health,
    .info = embedded_info,
    .add_buffer = embedded_add_buffer,
    .objects = &dkv_embedded_objects,
};
