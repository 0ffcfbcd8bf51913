/* What became of an attempt: the answer into the job's result, or a sentence about what went wrong.
 */
#include "client/http_exchange.h"

#include <inttypes.h>
#include <string.h>

/* What a server of ours never sends, but a faulty one may: an index that would make the caller read
 * outside its cache. */
static bool indices_are_sound(const int32_t *keep, uint64_t n_heads, uint64_t k, uint64_t n_tokens)
{
    for (uint64_t h = 0; h < n_heads; h++) {
        int64_t before = -1;
        for (uint64_t i = 0; i < k; i++) {
            const int64_t index = keep[h * k + i];
            if (index <= before || (uint64_t)index >= n_tokens)
                return false;
            before = index;
        }
    }
    return true;
}

/* Heads of unequal lengths. */
static enum dkv_status read_ragged(struct dkv_exchange *ex, const struct dkv_oip_answer *answer,
                                   const char *binary, struct dkv_error *err)
{
    const struct dkv_call *call = &ex->job->call;
    const struct dkv_block *block = &call->blocks[0];
    struct dropkv_result *result = ex->job->result;
    const uint64_t n_heads = (uint64_t)call->request.n_blocks * block->kv_heads;
    if (answer->n_offsets != n_heads + 1 || answer->has_scores != call->request.want_scores ||
        (answer->has_scores && answer->n_tokens != block->n_tokens))
        return dkv_error_set(err, DKV_E_MALFORMED, "answer: its shapes are not the request's");
    enum dkv_status status = dkv_result_reserve_ragged(result, call->request.n_blocks,
                                                       block->kv_heads, block->n_tokens,
                                                       answer->n_keep, answer->has_scores, err);
    if (status != DKV_OK)
        return status;
    memcpy(dkv_result_keep(result), binary + answer->keep_offset, answer->n_keep * sizeof(int32_t));
    memcpy(dkv_result_offsets(result), binary + answer->offsets_offset,
           answer->n_offsets * sizeof(int32_t));
    if (answer->has_scores)
        memcpy(dkv_result_scores(result), binary + answer->scores_offset,
               n_heads * block->n_tokens * sizeof(float));
    status = dkv_result_judge(result, answer->n_keep, err);
    for (uint64_t h = 0; status == DKV_OK && h < n_heads; h++)
        if (!indices_are_sound(result->keep_indices + result->keep_offsets[h], 1,
                               (uint64_t)(result->keep_offsets[h + 1] - result->keep_offsets[h]),
                               block->n_tokens))
            status = dkv_error_set(err, DKV_E_MALFORMED,
                                   "answer: its indices are not ascending within 0..%" PRIu64,
                                   block->n_tokens - 1);
    result->degraded = answer->degraded;
    dkv_result_set_backend(result, answer->backend);
    return status;
}

static enum dkv_status read_answer(struct dkv_exchange *ex, struct dkv_error *err)
{
    struct dkv_oip_answer answer;
    const struct dkv_http_reply *reply = &ex->reply;
    const struct dkv_call *call = &ex->job->call;
    const struct dkv_block *block = &call->blocks[0];
    struct dropkv_result *result = ex->job->result;
    const uint64_t head_bytes = reply->head_bytes == UINT64_MAX ? reply->n_bytes
                                                                : reply->head_bytes;
    if (head_bytes > reply->n_bytes)
        return dkv_error_set(err, DKV_E_MALFORMED,
                             "answer: its head has %" PRIu64 " bytes, the whole answer %zu",
                             head_bytes, reply->n_bytes);
    enum dkv_status status = dkv_oip_answer_parse(reply->bytes, (size_t)head_bytes,
                                                  reply->n_bytes - head_bytes, &answer, err);
    if (status != DKV_OK)
        return status;
    if (answer.ragged)
        return read_ragged(ex, &answer, reply->bytes + head_bytes, err);
    if (answer.n_blocks != call->request.n_blocks || answer.kv_heads != block->kv_heads ||
        answer.keep_tokens > block->n_tokens || answer.has_scores != call->request.want_scores ||
        (answer.has_scores && answer.n_tokens != block->n_tokens))
        return dkv_error_set(err, DKV_E_MALFORMED, "answer: its shapes are not the request's");
    status = dkv_result_reserve(result, answer.n_blocks, answer.kv_heads, block->n_tokens,
                                answer.keep_tokens, answer.has_scores, err);
    if (status != DKV_OK)
        return status;

    const uint64_t n_heads = (uint64_t)answer.n_blocks * answer.kv_heads;
    const char *binary = reply->bytes + head_bytes;
    memcpy(dkv_result_keep(result), binary + answer.keep_offset,
           n_heads * answer.keep_tokens * sizeof(int32_t));
    if (answer.has_scores)
        memcpy(dkv_result_scores(result), binary + answer.scores_offset,
               n_heads * block->n_tokens * sizeof(float));
    if (!indices_are_sound(result->keep_indices, n_heads, answer.keep_tokens, block->n_tokens))
        return dkv_error_set(err, DKV_E_MALFORMED,
                             "answer: its indices are not ascending within 0..%" PRIu64,
                             block->n_tokens - 1);
    result->degraded = answer.degraded;
    dkv_result_set_backend(result, answer.backend);
    return DKV_OK;
}

static enum dkv_status judge_reply(struct dkv_exchange *ex, unsigned http_status, bool *may_retry,
                                   struct dkv_error *err)
{
    if (http_status == 200)
        return read_answer(ex, err);
    const enum dkv_status status = dkv_oip_error_parse(http_status, ex->reply.bytes,
                                                       ex->reply.n_bytes, err);
    /* Only what the server calls temporary, and not a deadline of ours that it honoured. A 502 is a
     * proxy's word for the server behind it that died: the next one may be another. */
    *may_retry = (http_status == 503 || http_status == 502 || http_status == 429) &&
                 status != DKV_E_TIMEOUT;
    return status;
}

enum dkv_status dkv_exchange_judge_failure(const struct dkv_exchange *ex, CURLcode code,
                                           bool *may_retry, struct dkv_error *err)
{
    switch (code) {
    case CURLE_OPERATION_TIMEDOUT:
        return dkv_error_set(err, DKV_E_TIMEOUT, "the deadline passed before the answer came");
    case CURLE_COULDNT_RESOLVE_HOST:
    case CURLE_COULDNT_RESOLVE_PROXY:
        return dkv_error_set(err, DKV_E_UNAVAILABLE, "the endpoint's host has no address");
    case CURLE_COULDNT_CONNECT:
        *may_retry = true;
        return dkv_error_set(err, DKV_E_UNAVAILABLE, "could not connect: nobody listens");
    case CURLE_SEND_ERROR:
    case CURLE_RECV_ERROR:
    case CURLE_GOT_NOTHING:
    case CURLE_PARTIAL_FILE:
        *may_retry = true;
        return dkv_error_set(err, DKV_E_UNAVAILABLE, "the connection broke before the answer");
    case CURLE_WRITE_ERROR:
        if (ex->reply.too_large)
            return dkv_error_set(err, DKV_E_MALFORMED,
                                 "answer: longer than any answer to this request, %" PRIu64
                                 " bytes",
                                 ex->reply.limit_bytes);
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for the answer");
    case CURLE_OUT_OF_MEMORY: return dkv_error_set(err, DKV_E_NOMEM, "no memory for a request");
    default:
        return dkv_error_set(err, DKV_E_UNAVAILABLE, "HTTP failed: %s", curl_easy_strerror(code));
    }
}

enum dkv_status dkv_exchange_judge(struct dkv_exchange *ex, CURLcode code, bool *may_retry,
                                   struct dkv_error *err)
{
    long http_status = 0;
    *may_retry = false;
    curl_easy_getinfo(ex->easy, CURLINFO_RESPONSE_CODE, &http_status);
    /* A server that refuses a body it has not read yet answers, then closes: the answer counts,
     * not the broken connection. */
    const bool refused = http_status >= 400 && ex->reply.n_bytes > 0 &&
                         (code == CURLE_SEND_ERROR || code == CURLE_RECV_ERROR);
    if (code == CURLE_OK || refused)
        return judge_reply(ex, (unsigned)http_status, may_retry, err);
    return dkv_exchange_judge_failure(ex, code, may_retry, err);
}
