/* The reply is encoded over the job's outputs, and a response made over both: nothing is copied.
 *
 * Numbers as text are the exception: two million of them take a second to write. So are large
 * answers for regions, some milliseconds. Both are an errand, for which the connection simply stays
 * suspended.
 */
#include "server/answer.h"

#include "server/clock.h"
#include "server/errand.h"
#include "server/http.h"
#include "server/infer_shm.h"
#include "server/record.h"

#include <stdlib.h>

#define LONG_NUMBERS     4096u /* writing more would hold the loop up for too long */
#define LONG_WRITE_BYTES (UINT64_C(256) << 10) /* copied into a region: some 50 us */
#define LARGE_TEXT_BYTES (1u << 20) /* from here on memory is given back to the system at once */

struct dkv_answer {
    struct dkv_errand errand;
    struct dkv_server *server;
    bool works;          /* a thread may be writing to regions, which the backend must outlive */
    struct dkv_job *job; /* owns what the reply's segments point at */
    struct dkv_oip_reply reply;
    uint64_t output_ns; /* what encoding took */
    enum dkv_status status;
    struct dkv_error error;
};

uint64_t dkv_answer_numbers(const struct dkv_job *job)
{
    const struct dkv_oip_wanted *keep = &job->infer->outputs[DKV_OIP_KEEP_INDICES];
    const struct dkv_oip_wanted *scores = &job->infer->outputs[DKV_OIP_SCORES];
    return (keep->wanted && !keep->binary && keep->region[0] == '\0' ? job->n_keep : 0) +
           (scores->wanted && !scores->binary && scores->region[0] == '\0' ? job->n_scores : 0);
}

void dkv_answer_free(struct dkv_answer *answer)
{
    if (answer == NULL)
        return;
    const bool large = answer->reply.head.n_bytes > LARGE_TEXT_BYTES;
    dkv_oip_reply_fini(&answer->reply);
    if (large)
        dkv_errand_tidy();
    dkv_job_free(answer->job);
    free(answer);
}

/* Any thread. */
static void encode(struct dkv_errand *errand)
{
    struct dkv_answer *answer = (struct dkv_answer *)errand;
    struct dkv_job *job = answer->job;
    dkv_infer_shm_write(job);
    if (job->status != DKV_OK)
        return;
    const struct dkv_oip_result result = {
        .n_blocks = job->request.n_blocks,
        .kv_heads = job->kv_heads,
        .keep_tokens = job->keep_tokens,
        .n_tokens = job->n_tokens,
        .keep = job->keep,
        .ragged = job->ragged,
        .offsets = job->offsets,
        .scores = job->scores,
        .backend = job->backend != NULL ? job->backend : answer->server->facts.backend,
        .window = job->window,
        .degraded = job->degraded,
    };
    const uint64_t began_ns = dkv_clock_ns();
    answer->status = dkv_oip_reply_encode(job->infer, &result, &answer->reply, &answer->error);
    answer->output_ns = dkv_clock_ns() - began_ns;
}

static void on_encoded(struct dkv_errand *errand, struct dkv_exchange *exchange)
{
    struct dkv_answer *answer = (struct dkv_answer *)errand;
    struct dkv_job *job = answer->job;
    answer->server->n_working -= answer->works;
    if (exchange == NULL) {
        dkv_answer_free(answer);
        return;
    }
    dkv_job_release_inputs(job);
    if (job->status == DKV_OK) {
        exchange->answer = answer;
    } else { /* a region could not be written */
        exchange->job = job;
        answer->job = NULL;
        dkv_answer_free(answer);
    }
    dkv_http_resume(exchange);
}

bool dkv_answer_begin(struct dkv_exchange *exchange, struct dkv_job *job)
{
    struct dkv_answer *answer = calloc(1, sizeof(*answer));
    if (answer == NULL)
        return false;
    answer->server = exchange->server;
    answer->job = job;
    const uint64_t n_bytes = dkv_infer_shm_bytes(job);
    if (dkv_answer_numbers(job) > LONG_NUMBERS || n_bytes > LONG_WRITE_BYTES) {
        answer->works = n_bytes > 0;
        answer->server->n_working += answer->works;
        dkv_errand_start(&answer->errand, exchange->server->loop, exchange, encode, on_encoded);
    } else {
        encode(&answer->errand);
        on_encoded(&answer->errand, exchange);
    }
    return true;
}

static void free_answer(void *answer)
{
    dkv_answer_free(answer);
}

/* A response over the reply's own memory: nothing is copied. Takes `answer`, also on failure. */
static struct MHD_Response *response_over(struct dkv_answer *answer)
{
    const struct dkv_oip_reply *reply = &answer->reply;
    struct MHD_IoVec parts[1 + DKV_OIP_OUTPUTS];
    unsigned n_parts = 0;
    parts[n_parts++] = (struct MHD_IoVec){reply->head.bytes, reply->head.n_bytes};
    for (unsigned i = 0; i < reply->n_segments; i++)
        if (reply->segments[i].n_bytes > 0)
            parts[n_parts++] = (struct MHD_IoVec){reply->segments[i].bytes,
                                                  (size_t)reply->segments[i].n_bytes};
    struct MHD_Response *response = MHD_create_response_from_iovec(parts, n_parts, free_answer,
                                                                   answer);
    if (response == NULL) {
        dkv_answer_free(answer);
        return NULL;
    }
    char length[24];
    snprintf(length, sizeof(length), "%zu", reply->head.n_bytes);
    if (reply->binary_bytes > 0)
        MHD_add_response_header(response, DKV_OIP_HEADER, length);
    MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE,
                            reply->binary_bytes > 0 ? "application/octet-stream"
                                                    : "application/json");
    return response;
}

static void count_answer(struct dkv_exchange *exchange, const struct dkv_job *job,
                         uint64_t output_ns)
{
    const struct dkv_record record = {
        .transport = DKV_TRANSPORT_HTTP,
        .job = job,
        .id = job->infer->id,
        .client = exchange->client_name,
        .trace = &exchange->trace,
        .started_ns = exchange->started_ns,
        .output_ns = output_ns,
    };
    dkv_record_end(exchange->server, &record);
}

enum dkv_status dkv_answer_send(struct dkv_exchange *exchange, struct dkv_error *err)
{
    struct dkv_answer *answer = exchange->answer;
    if (answer->status != DKV_OK) {
        *err = answer->error;
        return answer->status;
    }
    exchange->answer = NULL;
    count_answer(exchange, answer->job, answer->output_ns);
    const uint64_t n_bytes = answer->reply.head.n_bytes + answer->reply.binary_bytes;
    dkv_reply_response(exchange, 200, response_over(answer), n_bytes);
    return DKV_OK;
}
