/* The queue's configuration from the daemon's. */
#include "server/backend.h"

#include <string.h>

static uint64_t or_half(uint64_t value, uint64_t of)
{
    return value != 0 ? value : of - of / 2;
}

static uint64_t at_most(uint64_t value, uint64_t limit)
{
    return value < limit ? value : limit;
}

static uint32_t count_devices(const struct dkv_config *config, bool *any_gpu_out)
{
    char name[DKV_DEVICE_NAME_BYTES];
    uint32_t n = 0;
    *any_gpu_out = false;
    for (; dkv_config_device(config, n, name); n++)
        *any_gpu_out |= strcmp(name, "cpu") != 0;
    return n;
}

enum dkv_status dkv_backend_limits(const struct dkv_config *config,
                                   struct dkv_admission_config *limits_out, struct dkv_error *err)
{
    bool any_gpu;
    const uint32_t n_devices = count_devices(config, &any_gpu);
    const uint32_t suits = any_gpu ? 2 : 1;
    *limits_out = (struct dkv_admission_config){
        .n_devices = n_devices,
        .n_levels = (uint32_t)config->priorities,
        .default_level = (uint32_t)config->default_priority,
        .aging_batches = (uint32_t)config->aging_batches,
        .max_flight = config->batches_in_flight != 0 ? (uint32_t)config->batches_in_flight : suits,
        .max_queue_delay_us = config->max_queue_delay_us,
        .batch_blocks = (uint32_t)config->max_batch_items,
        .batch_tokens = config->max_batch_tokens,
        .batch_bytes = config->max_batch_bytes,
        .max_entries = (uint32_t)config->max_queue_requests,
        .max_bytes = config->max_queue_read_bytes,
        .client_max_entries = (uint32_t)at_most(
            or_half(config->max_client_requests, config->max_queue_requests),
            config->max_queue_requests),
        .client_max_bytes = at_most(
            or_half(config->max_client_read_bytes, config->max_queue_read_bytes),
            config->max_queue_read_bytes),
        .quantum_bytes = config->quantum_bytes,
        .max_timeout_us = config->request_timeout_ms * 1000,
        .restart_us = 200000,
    };
    return dkv_admission_config_check(limits_out, err);
}
