/* What happens when an input file shrinks while it is mapped: the kernel answers the next read
 * beyond its end with SIGBUS. The guard turns that into one sentence with the file's name and exit
 * code 74 instead of a silent death. It ends the process: the read that failed is somewhere inside
 * the engine or libcurl, and no answer made from it could be trusted.
 *
 * Thread  the main thread adds and removes; the handler runs on whichever thread did the read.
 */
#ifndef DKV_CLIENT_CLI_GUARD_H
#define DKV_CLIENT_CLI_GUARD_H

#include "client/tensor_file.h"

/* Installs the handler and watches the file's mapping. Files beyond the first 64 are not watched:
 * for them the signal has its usual effect. */
void dkv_guard_add(const struct dkv_tensor_file *file);
void dkv_guard_remove(const struct dkv_tensor_file *file);

#endif
