/* The limits of a configuration, and what each verdict is called. */
#include <inttypes.h>

#include "server/admission_priv.h"

/* Sums of bytes and of credit stay far from the ends of int64. */
#define BYTES_MAX   (UINT64_C(1) << 50)
#define QUANTUM_MAX (UINT64_C(1) << 40)
#define TIME_MAX_US (UINT64_C(1) << 50)
#define ENTRIES_MAX (1u << 20)

static const struct dkv_admission_verdict_info verdict_table[DKV_ADMISSION_VERDICTS] = {
    [DKV_ADMISSION_ACCEPTED] = {"accepted", DKV_OK, 200},
    [DKV_ADMISSION_DEGRADED] = {"degraded", DKV_OK, 200},
    [DKV_ADMISSION_FULL] = {"full", DKV_E_BUSY, 503},
    [DKV_ADMISSION_QUOTA] = {"quota", DKV_E_BUSY, 429},
    [DKV_ADMISSION_LATE] = {"late", DKV_E_BUSY, 503},
    [DKV_ADMISSION_EXPIRED] = {"expired", DKV_E_TIMEOUT, 503},
    [DKV_ADMISSION_NO_DEVICE] = {"no_device", DKV_E_BUSY, 503},
    [DKV_ADMISSION_DRAINING] = {"draining", DKV_E_DRAINING, 503},
    [DKV_ADMISSION_TOO_LARGE] = {"too_large", DKV_E_TOO_LARGE, 413},
};

const struct dkv_admission_verdict_info *dkv_admission_verdict_info(
    enum dkv_admission_verdict verdict)
{
    assert(verdict < DKV_ADMISSION_VERDICTS);
    return &verdict_table[verdict];
}

struct bound {
    const char *name;
    uint64_t value;
    uint64_t min;
    uint64_t max;
};

enum dkv_status dkv_admission_relimit(struct dkv_admission *queue,
                                      const struct dkv_admission_config *config,
                                      struct dkv_error *err)
{
    struct dkv_admission_config merged = queue->config;
    merged.aging_batches = config->aging_batches;
    merged.max_queue_delay_us = config->max_queue_delay_us;
    merged.batch_blocks = config->batch_blocks;
    merged.batch_tokens = config->batch_tokens;
    merged.batch_bytes = config->batch_bytes;
    merged.max_entries = config->max_entries;
    merged.max_bytes = config->max_bytes;
    merged.client_max_entries = config->client_max_entries;
    merged.client_max_bytes = config->client_max_bytes;
    merged.max_timeout_us = config->max_timeout_us;
    const enum dkv_status status = dkv_admission_config_check(&merged, err);
    if (status != DKV_OK)
        return status;
    if (merged.max_entries > queue->heap_entries)
        return dkv_error_set(err, DKV_E_INVALID,
                             "admission: max_entries %" PRIu32 " is above %" PRIu32
                             ", what there is memory for",
                             merged.max_entries, queue->heap_entries);
    queue->config = merged;
    return DKV_OK;
}

enum dkv_status dkv_admission_config_check(const struct dkv_admission_config *c,
                                           struct dkv_error *err)
{
    const struct bound bounds[] = {
        {"devices", c->n_devices, 1, DKV_ADMISSION_DEVICES_MAX},
        {"priority_levels", c->n_levels, 1, DKV_ADMISSION_LEVELS_MAX},
        {"default_priority", c->default_level, 1, c->n_levels},
        {"aging_batches", c->aging_batches, c->n_levels, UINT32_MAX / 2},
        {"max_flight", c->max_flight, 1, DKV_ADMISSION_FLIGHT_MAX},
        {"max_queue_delay_us", c->max_queue_delay_us, 0, TIME_MAX_US},
        {"batch_blocks", c->batch_blocks, 1, UINT32_MAX},
        {"batch_tokens", c->batch_tokens, 1, BYTES_MAX},
        {"batch_bytes", c->batch_bytes, 1, BYTES_MAX},
        {"max_entries", c->max_entries, 1, ENTRIES_MAX},
        {"max_bytes", c->max_bytes, 1, BYTES_MAX},
        {"client_max_entries", c->client_max_entries, 1, c->max_entries},
        {"client_max_bytes", c->client_max_bytes, 1, c->max_bytes},
        {"quantum_bytes", c->quantum_bytes, 1, QUANTUM_MAX},
        {"max_timeout_us", c->max_timeout_us, 0, TIME_MAX_US},
        {"restart_us", c->restart_us, 0, TIME_MAX_US},
    };

    for (size_t i = 0; i < sizeof(bounds) / sizeof(bounds[0]); i++)
        if (bounds[i].value < bounds[i].min || bounds[i].value > bounds[i].max)
            return dkv_error_set(err, DKV_E_INVALID,
                                 "admission: %s %" PRIu64 " is not in %" PRIu64 "..%" PRIu64,
                                 bounds[i].name, bounds[i].value, bounds[i].min, bounds[i].max);
    return DKV_OK;
}
