/* libdropkv: ask which tokens of a KV cache to keep.
 *
 * A request hands over the last query rows, the keys and the values of one layer, for one or more
 * sequences; the answer lists, for every KV head, the tokens to keep. Tensors are read where they
 * lie, through byte strides, and are sent without a copy of the library's own.
 *
 *     struct dropkv_client *client;
 *     struct dropkv_result *result;
 *     struct dropkv_error error;
 *     if (dropkv_client_open("http://127.0.0.1:8480", NULL, &client, &error) != DROPKV_OK)
 *         ...error.text says why...
 *
 *     struct dropkv_param params[] = {dropkv_real("keep_ratio", 0.1), dropkv_int("sinks", 4)};
 *     struct dropkv_request request = DROPKV_REQUEST_INIT;
 *     request.batch = 1, request.q_heads = 32, request.kv_heads = 8, request.head_dim = 128;
 *     request.q_rows = 64, request.n_tokens = n;
 *     request.query = (struct dropkv_tensor){.data = q, .dtype = DROPKV_BF16};
 *     ...key and value in the same way...
 *     request.params = params, request.n_params = 2;
 *     if (dropkv_score(client, &request, &result, &error) == DROPKV_OK)
 *         ...result->keep_indices...
 *     dropkv_result_free(result);
 *     dropkv_client_close(client);
 *
 * Threads     a client belongs to one thread at a time: the caller serialises all calls on it.
 *             Different clients are independent. The library starts no thread, installs no signal
 *             handler and keeps no state outside its clients. An embedded engine has threads of its
 *             own.
 * Processes   a client belongs to the process that opened it: after fork() the child may only close
 *             it, which does nothing there.
 * Errors      every function that can fail returns a status; where it takes a `struct
 *             dropkv_error *`, that may be NULL, and is written only on failure.
 * Deadlines   every call ends: a request without a deadline of its own gets the client's.
 * Memory      once as many requests of a size were in flight as ever will be, further ones allocate
 *             nothing over unix:/// (messages of up to 4 MiB, scores of up to 16 MiB) and embedded:
 *             results that were freed are used again.
 * ABI         structures that the caller makes begin with their size, set by the _INIT macros, and
 *             grow at their end; structures that the library makes grow at their end too. Status
 *             and type numbers are never reused. The soname changes when this does not hold.
 */
#ifndef DROPKV_H
#define DROPKV_H

/* The calls, by what they are about. Programs include this file alone. */
#include "dropkv/base.h"    /* version, status and errors, element types */
#include "dropkv/buffer.h"  /* memory shared with a daemon on the same host, a GPU's too */
#include "dropkv/cache.h"   /* caches that are registered once, and prompts in them */
#include "dropkv/client.h"  /* a client and its endpoint; an engine in this process */
#include "dropkv/request.h" /* one layer: tensors and parameters */
#include "dropkv/score.h"   /* asking and the answer: blocking, or from an event loop */

#endif
