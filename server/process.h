/* What the system says about this process and its workers, for metrics.
 *
 * Thread  any.
 * Odd     what cannot be read is 0.
 */
#ifndef DKV_SERVER_PROCESS_H
#define DKV_SERVER_PROCESS_H

#include "proto/types.h"

#include <sys/types.h>

struct dkv_process_facts {
    double cpu_s;
    double start_time_s; /* since 1970 */
    uint64_t resident_bytes;
    uint64_t n_fds;
    uint64_t max_fds;
};

/* Resident memory of a process of ours. */
uint64_t dkv_process_resident_bytes(pid_t pid);

void dkv_process_facts(struct dkv_process_facts *facts_out);

#endif
