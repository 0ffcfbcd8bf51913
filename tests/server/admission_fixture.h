/* A small admission queue for tests: two devices, three levels, four clients, requests of one block
 * of 100 bytes, and what tests do with them, with cmocka's assertions. Each ends with a recount of
 * the books. */
#ifndef DKV_TESTS_SERVER_ADMISSION_FIXTURE_H
#define DKV_TESTS_SERVER_ADMISSION_FIXTURE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "server/admission.h"

#define N_CLIENTS 4
#define N_JOBS    64
#define ANY       DKV_ADMISSION_ANY_DEVICE

static const struct dkv_admission_config base_config = {
    .n_devices = 2,
    .n_levels = 3,
    .default_level = 2,
    .aging_batches = 3,
    .max_flight = 2,
    .batch_blocks = 8,
    .batch_tokens = 1000000,
    .batch_bytes = 1000000,
    .max_entries = 32,
    .max_bytes = 1000000,
    .client_max_entries = 16,
    .client_max_bytes = 500000,
    .quantum_bytes = 1000,
    .restart_us = 200000,
};

struct job {
    struct dkv_admission_entry entry;
    struct dkv_admission_part parts[4];
};

struct fixture {
    struct dkv_admission *queue;
    struct dkv_admission_client clients[N_CLIENTS];
    struct job jobs[N_JOBS];
    uint32_t n_jobs;
    uint64_t retry_us;
    struct dkv_error err;
};

static inline struct fixture *begin(const struct dkv_admission_config *config)
{
    struct fixture *f = calloc(1, sizeof(*f));
    assert_non_null(f);
    assert_int_equal(dkv_admission_new(config, &f->queue, &f->err), DKV_OK);
    for (int i = 0; i < N_CLIENTS; i++)
        dkv_admission_client_init(f->queue, &f->clients[i]);
    for (uint32_t d = 0; d < config->n_devices; d++)
        dkv_admission_device_up(f->queue, d);
    return f;
}

/* Ends whatever is open, and looks at the books once more. */
static inline void end(struct fixture *f)
{
    dkv_admission_fail_all(f->queue, DKV_E_DRAINING, 1u << 30);
    for (uint32_t d = 0; d < 2; d++)
        dkv_admission_device_lost(f->queue, d, 1u << 30);
    while (dkv_admission_pop_done(f->queue) != NULL)
        continue;
    assert_int_equal(dkv_admission_recount(f->queue, &f->err), DKV_OK);
    for (int i = 0; i < N_CLIENTS; i++)
        dkv_admission_client_fini(f->queue, &f->clients[i]);
    dkv_admission_free(f->queue);
    free(f);
}

/* A request of one block of 100 bytes for device 0. */
static inline struct job *job(struct fixture *f)
{
    assert_true(f->n_jobs < N_JOBS);
    struct job *j = &f->jobs[f->n_jobs++];
    j->entry.parts = j->parts;
    j->entry.n_parts = 1;
    for (int i = 0; i < 4; i++)
        j->parts[i] = (struct dkv_admission_part){
            .key = 1, .device = 0, .n_blocks = 1, .n_tokens = 10, .n_bytes = 100};
    return j;
}

static inline enum dkv_admission_verdict offer(struct fixture *f, int client, struct job *j,
                                               uint64_t now)
{
    return dkv_admission_offer(f->queue, &f->clients[client], &j->entry, now, &f->retry_us,
                               &f->err);
}

static inline struct job *accepted(struct fixture *f, int client, uint64_t now)
{
    struct job *j = job(f);
    assert_int_equal(offer(f, client, j, now), DKV_ADMISSION_ACCEPTED);
    return j;
}

static inline struct dkv_admission_batch *batch(struct fixture *f, uint64_t now, uint32_t n_parts)
{
    struct dkv_admission_batch *b = dkv_admission_next(f->queue, now);
    assert_non_null(b);
    assert_int_equal(b->n_parts, n_parts);
    return b;
}

static inline void nothing(struct fixture *f, uint64_t now)
{
    assert_null(dkv_admission_next(f->queue, now));
}

static inline void ends(struct fixture *f, const struct job *j, enum dkv_status status)
{
    assert_ptr_equal(dkv_admission_pop_done(f->queue), &j->entry);
    assert_int_equal(j->entry.status, status);
}

static inline bool has(const struct dkv_admission_batch *b, const struct job *j)
{
    DKV_LIST_EACH (node, &b->parts)
        if (DKV_LIST_OF(node, struct dkv_admission_part, node)->entry == &j->entry)
            return true;
    return false;
}

#endif
