/* Who has a loan: its owner, jobs, workers. It ends when none of them does.
 *
 *   attach --> shown to every worker that is up, and to each that comes up later
 *   detach --> no new job; when the last job has ended the workers are told; when the last of them
 *              has answered, or is gone, the loan is
 *
 * Two bits per worker say what is open: `attaching`, it has not said whether it could map it, and
 * `holding`, it was told and may have it. A worker's end clears both.
 */
#include "server/backend_priv.h"

#include "proto/wire.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

static void release_if_free(struct dkv_loan *loan)
{
    if (!loan->detached || loan->n_jobs > 0 || loan->holding != 0)
        return;
    const dkv_loan_released_fn on_released = loan->on_released;
    void *owner = loan->owner;
    loan->backend->loans[loan->number - DKV_LINK_LOANS] = NULL;
    loan->backend->loan_bytes -= loan->bytes;
    dkv_loan_free(loan);
    if (on_released != NULL)
        on_released(owner);
}

/* Tells a worker of a loan that is in use. One that is shown GPU memory again finds out anew
 * whether it can be had. */
static void show(struct dkv_backend *backend, unsigned d, struct dkv_loan *loan)
{
    if (loan->device != DKV_LOAN_EVERYWHERE && loan->device != d)
        return;
    if (dkv_loan_on_gpu(loan))
        loan->error = (struct dkv_error){0};
    loan->attaching |= 1u << d;
    loan->holding |= 1u << d;
    dkv_worker_attach(backend->devices[d].worker, loan);
}

/* The owner has let go and no job needs it: the workers shall too. */
static void withdraw(struct dkv_loan *loan)
{
    struct dkv_backend *backend = loan->backend;
    if (!loan->detached || loan->n_jobs > 0)
        return;
    for (unsigned d = 0; d < backend->n_devices; d++)
        if (loan->holding & 1u << d)
            dkv_worker_detach(backend->devices[d].worker, loan);
    release_if_free(loan);
}

void dkv_backend_hold_loans(struct dkv_job *job)
{
    for (unsigned i = 0; i < job->n_loans; i++) {
        assert(!job->loans[i]->detached);
        job->loans[i]->n_jobs++;
    }
}

void dkv_backend_drop_loans(struct dkv_job *job)
{
    for (unsigned i = 0; i < job->n_loans; i++)
        if (--job->loans[i]->n_jobs == 0)
            withdraw(job->loans[i]);
    job->n_loans = 0;
}

static bool find_number(struct dkv_backend *backend, struct dkv_loan *loan)
{
    unsigned i = 0;
    while (i < backend->n_loans && backend->loans[i] != NULL)
        i++;
    if (i == DKV_LOANS_MAX)
        return false;
    if (i == backend->n_loans) {
        const unsigned n = backend->n_loans == 0 ? 64 : 2 * backend->n_loans;
        struct dkv_loan **loans = realloc(backend->loans, n * sizeof(struct dkv_loan *));
        if (loans == NULL)
            return false;
        memset(loans + backend->n_loans, 0, (n - backend->n_loans) * sizeof(struct dkv_loan *));
        backend->loans = loans;
        backend->n_loans = n;
    }
    backend->loans[i] = loan;
    loan->number = DKV_LINK_LOANS + i;
    return true;
}

static void tell_attached(struct dkv_loan *loan)
{
    const dkv_loan_attached_fn on_attached = loan->on_attached;
    loan->on_attached = NULL;
    if (on_attached != NULL && !loan->detached)
        on_attached(loan, loan->owner, &loan->error);
}

static enum dkv_status add(struct dkv_backend *backend, struct dkv_loan *loan,
                           dkv_loan_attached_fn on_attached, void *owner,
                           struct dkv_loan **loan_out, struct dkv_error *err)
{
    loan->backend = backend;
    /* It takes as many addresses as it has bytes, here and in its workers, and a file of holes or a
     * wide reservation costs its owner nothing. */
    if (loan->bytes > DKV_LOANS_BYTES_MAX - backend->loan_bytes) {
        dkv_loan_free(loan);
        return dkv_error_set(err, DKV_E_BUSY,
                             "region: with it all regions would have more than %llu bytes",
                             (unsigned long long)DKV_LOANS_BYTES_MAX);
    }
    if (!find_number(backend, loan)) {
        dkv_loan_free(loan);
        return dkv_error_set(err, DKV_E_TOO_LARGE, "region: there are %u already", DKV_LOANS_MAX);
    }
    backend->loan_bytes += loan->bytes;
    loan->on_attached = on_attached;
    loan->owner = owner;
    *loan_out = loan;
    for (unsigned d = 0; d < backend->n_devices; d++)
        if (backend->devices[d].up)
            show(backend, d, loan);
    if (loan->attaching == 0)
        tell_attached(loan);
    return DKV_OK;
}

enum dkv_status dkv_backend_attach(struct dkv_backend *backend, int fd, uint64_t offset,
                                   uint64_t bytes, bool writable, uint64_t connection,
                                   uint32_t user, dkv_loan_attached_fn on_attached, void *owner,
                                   struct dkv_loan **loan_out, struct dkv_error *err)
{
    struct dkv_loan *loan;
    const enum dkv_status status = dkv_loan_new(fd, offset, bytes, &loan, err);
    if (status != DKV_OK)
        return status;
    loan->writable = writable;
    loan->key.owner = connection;
    loan->key.user = user;
    return add(backend, loan, on_attached, owner, loan_out, err);
}

/* The worker of the GPU of that name. */
static enum dkv_status find_gpu(const struct dkv_backend *backend, const uint8_t *uuid,
                                uint32_t *device_out, struct dkv_error *err)
{
    unsigned n_gpus = 0;
    for (unsigned d = 0; d < backend->n_devices; d++) {
        if (!dkv_backend_is_gpu(&backend->devices[d]))
            continue;
        n_gpus++;
        if (memcmp(backend->devices[d].engine.uuid, uuid, DKV_UUID_BYTES) == 0) {
            *device_out = d;
            return DKV_OK;
        }
    }
    if (n_gpus == 0)
        return dkv_error_set(err, DKV_E_UNSUPPORTED,
                             "region: this daemon takes host memory (memfd) only: no CUDA worker "
                             "is there that could import GPU memory");
    return dkv_error_set(err, DKV_E_UNSUPPORTED,
                         "region: none of this daemon's %u GPUs is "
                         "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-"
                         "%02x%02x%02x%02x%02x%02x, which holds the memory",
                         n_gpus, uuid[0], uuid[1], uuid[2], uuid[3], uuid[4], uuid[5], uuid[6],
                         uuid[7], uuid[8], uuid[9], uuid[10], uuid[11], uuid[12], uuid[13],
                         uuid[14], uuid[15]);
}

enum dkv_status dkv_backend_attach_cuda(struct dkv_backend *backend,
                                        const struct dkv_wire_region *wire, const int *fds,
                                        uint64_t connection, dkv_loan_attached_fn on_attached,
                                        void *owner, struct dkv_loan **loan_out,
                                        struct dkv_error *err)
{
    struct dkv_loan *loan;
    uint32_t device = 0;
    enum dkv_status status = find_gpu(backend, wire->device_uuid, &device, err);
    if (status == DKV_OK)
        status = dkv_loan_new_cuda(wire, fds, connection, device, &loan, err);
    return status == DKV_OK ? add(backend, loan, on_attached, owner, loan_out, err) : status;
}

void dkv_backend_detach(struct dkv_loan *loan, dkv_loan_released_fn on_released, void *owner)
{
    loan->detached = true;
    loan->on_released = on_released;
    loan->owner = owner;
    withdraw(loan);
}

void dkv_backend_on_attached(void *owner, unsigned index, uint32_t number,
                             const struct dkv_error *error)
{
    struct dkv_backend *backend = owner;
    struct dkv_loan *loan = backend->loans[number - DKV_LINK_LOANS];
    if (loan == NULL)
        return;
    if (error->status != DKV_OK)
        loan->error = *error;
    loan->attaching &= ~(1u << index);
    if (loan->attaching == 0)
        tell_attached(loan);
}

void dkv_backend_on_detached(void *owner, unsigned index, uint32_t number)
{
    struct dkv_backend *backend = owner;
    struct dkv_loan *loan = backend->loans[number - DKV_LINK_LOANS];
    if (loan == NULL)
        return;
    loan->holding &= ~(1u << index);
    release_if_free(loan);
}

void dkv_backend_show_loans(struct dkv_backend *backend, unsigned d)
{
    for (unsigned i = 0; i < backend->n_loans; i++)
        if (backend->loans[i] != NULL)
            show(backend, d, backend->loans[i]);
}

/* Where nothing can be mapped any more, the question whether it can be is answered by the next
 * worker. Nobody is told before every loan is known to be out of the worker's hands: an owner that
 * is told may give back whatever it has. */
void dkv_backend_forget_loans(struct dkv_backend *backend, unsigned d)
{
    for (unsigned i = 0; i < backend->n_loans; i++)
        if (backend->loans[i] != NULL) {
            backend->loans[i]->holding &= ~(1u << d);
            backend->loans[i]->attaching &= ~(1u << d);
        }
    for (unsigned i = 0; i < backend->n_loans; i++) {
        struct dkv_loan *loan = backend->loans[i];
        if (loan != NULL && loan->detached)
            release_if_free(loan);
        else if (loan != NULL && loan->attaching == 0)
            tell_attached(loan); /* which may be its end */
    }
}

void dkv_backend_count_loans(const struct dkv_backend *backend, struct dkv_backend_info *info_out)
{
    for (unsigned i = 0; i < backend->n_loans; i++) {
        const struct dkv_loan *loan = backend->loans[i];
        if (loan == NULL)
            continue;
        const enum dkv_loan_kind kind = dkv_loan_kind_of(loan);
        info_out->n_loans[kind]++;
        info_out->loan_bytes[kind] += loan->bytes;
        for (unsigned d = 0; d < backend->n_devices && kind != DKV_LOAN_LOOSE; d++)
            if (loan->holding & ~loan->attaching & 1u << d)
                info_out->workers[d].mapped_bytes += loan->bytes;
    }
}

void dkv_backend_free_loans(struct dkv_backend *backend)
{
    for (unsigned i = 0; i < backend->n_loans; i++)
        if (backend->loans[i] != NULL)
            dkv_loan_free(backend->loans[i]);
    free(backend->loans);
}
