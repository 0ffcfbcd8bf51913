/* The reply to an ended job: written to regions, encoded, then sent.
 *
 * An answer of many JSON numbers, or of many bytes for regions, is an errand, any other made at
 * once.
 *
 * Owner   the exchange, in `answer`; while it is being encoded, the errand. It owns the job.
 * Thread  loop.
 */
#ifndef DKV_SERVER_ANSWER_H
#define DKV_SERVER_ANSWER_H

#include "server/exchange.h"

/* Numbers of the job's answer that are wanted as text. */
uint64_t dkv_answer_numbers(const struct dkv_job *job);

/* Takes an answered job of a suspended exchange, which is resumed with `answer` set once that has
 * been encoded. False if there is no memory: the job stays the caller's. */
bool dkv_answer_begin(struct dkv_exchange *exchange, struct dkv_job *job);

/* Replies with exchange->answer and counts it. An error if it could not be encoded; nothing was
 * sent then. */
enum dkv_status dkv_answer_send(struct dkv_exchange *exchange, struct dkv_error *err);

void dkv_answer_free(struct dkv_answer *answer); /* NULL is fine */

#endif
