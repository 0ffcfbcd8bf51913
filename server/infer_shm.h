/* Inference requests whose tensors, or answers, lie in regions that HTTP clients have registered.
 *
 * Owner   the job holds a use of every region it names until its inputs are released.
 * Thread  loop, but for dkv_infer_shm_write().
 */
#ifndef DKV_SERVER_INFER_SHM_H
#define DKV_SERVER_INFER_SHM_H

#include "server/exchange.h"

/* Before binding: finds the regions that the job names and says in *memory where their inputs are.
 * The small vectors are read at once, into *vectors_out, which the caller frees after binding.
 * NOT_FOUND, INVALID, NOMEM. */
enum dkv_status dkv_infer_shm_find(struct dkv_exchange *exchange, struct dkv_job *job,
                                   struct dkv_oip_memory *memory, void **vectors_out,
                                   struct dkv_error *err);

/* After binding: what lies on a GPU is said to, and the job gets the loans. NOMEM. */
enum dkv_status dkv_infer_shm_lend(struct dkv_job *job, struct dkv_error *err);

/* After the job was prepared: is there room for its answers, and not too much to be copied?
 * INVALID, TOO_LARGE. */
enum dkv_status dkv_infer_shm_check(const struct dkv_exchange *exchange, const struct dkv_job *job,
                                    struct dkv_error *err);

/* Bytes of the answer that go to regions. */
uint64_t dkv_infer_shm_bytes(const struct dkv_job *job);

/* Writes them, if the job has ended well, on any thread. A region that cannot be written fails it.
 */
void dkv_infer_shm_write(struct dkv_job *job);

#endif
