/* The HTTP transport: many exchanges on libcurl's multi interface, behind one descriptor.
 *
 * libcurl tells which sockets it waits for and when it wants to be called; the sockets go into an
 * epoll instance, the earliest time into a timerfd in the same instance, and that instance is the
 * descriptor the caller watches. Connections are kept alive and shared by all exchanges of a
 * client; what waits for a free one waits inside libcurl.
 *
 * An attempt that failed in a way a second try may cure is tried again after a pause: what the
 * server's Retry-After says, or a doubling pause of our own, as long as the deadline is later than
 * that. Scoring changes nothing on the server, so doing it twice is harmless.
 */
#include "client/alarm.h"
#include "client/http_exchange.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#define FIRST_PAUSE_NS   INT64_C(50000000)
#define NEVER_NS         DKV_ALARM_NEVER
#define EVENTS_PER_ROUND 64
#define IDLE_HANDLES_MAX 16u

/* One dispatch does this many rounds of ready sockets before the caller's loop gets its turn. */
#define ROUNDS_MAX 16

struct dkv_transport {
    struct dkv_http_target target;
    CURLM *multi;
    int epoll_fd;
    struct dkv_alarm alarm;
    int64_t curl_due_ns; /* when libcurl wants to be called */
    int64_t own_due_ns;  /* the earliest deadline or retry; may be early, never late */
    uint32_t max_retries;
    struct dkv_exchange *first; /* all exchanges */
    CURL *idle[IDLE_HANDLES_MAX];
    unsigned n_idle;
};

static pthread_once_t curl_once = PTHREAD_ONCE_INIT;

static void init_curl(void)
{
    (void)curl_global_init(CURL_GLOBAL_DEFAULT);
    dkv_oip_init();
}

/* ---- what libcurl waits for ---- */

static int on_socket(CURL *easy, curl_socket_t socket, int what, void *context, void *known)
{
    struct dkv_transport *t = context;
    struct epoll_event event = {.data.fd = socket};
    (void)easy;
    if (what == CURL_POLL_REMOVE) {
        (void)epoll_ctl(t->epoll_fd, EPOLL_CTL_DEL, socket, NULL); /* it may be closed already */
        return 0;
    }
    event.events = (what & CURL_POLL_IN ? EPOLLIN : 0u) | (what & CURL_POLL_OUT ? EPOLLOUT : 0u);
    if (known == NULL)
        curl_multi_assign(t->multi, socket, t); /* any value: "seen before" */
    if (epoll_ctl(t->epoll_fd, known == NULL ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, socket, &event) == 0)
        return 0;
    /* A descriptor number that was closed and came back behind libcurl's record of it. */
    const int other = errno == EEXIST ? EPOLL_CTL_MOD : EPOLL_CTL_ADD;
    return epoll_ctl(t->epoll_fd, other, socket, &event) == 0 ? 0 : -1;
}

static int on_timer(CURLM *multi, long timeout_ms, void *context)
{
    struct dkv_transport *t = context;
    (void)multi;
    t->curl_due_ns = timeout_ms < 0 ? NEVER_NS : dkv_now_ns() + timeout_ms * INT64_C(1000000);
    return 0;
}

static void note_due(struct dkv_transport *t, int64_t at_ns)
{
    t->own_due_ns = at_ns < t->own_due_ns ? at_ns : t->own_due_ns;
}

/* Sets the alarm to the earliest thing that has to happen. */
static void arm_timer(struct dkv_transport *t)
{
    dkv_alarm_set(&t->alarm, t->curl_due_ns < t->own_due_ns ? t->curl_due_ns : t->own_due_ns);
}

/* ---- exchanges ---- */

static void unlink_exchange(struct dkv_transport *t, struct dkv_exchange *ex)
{
    if (ex->prev != NULL)
        ex->prev->next = ex->next;
    else
        t->first = ex->next;
    if (ex->next != NULL)
        ex->next->prev = ex->prev;
}

/* Keeps the easy handle for the next exchange: making one is dear beside a small request. */
static void exchange_free(struct dkv_transport *t, struct dkv_exchange *ex)
{
    if (ex->retry_at_ns == 0)
        curl_multi_remove_handle(t->multi, ex->easy);
    dkv_exchange_reset(ex);
    if (t->n_idle < IDLE_HANDLES_MAX)
        t->idle[t->n_idle++] = ex->easy;
    else
        curl_easy_cleanup(ex->easy);
    unlink_exchange(t, ex);
    free(ex);
}

static enum dkv_status start_attempt(struct dkv_transport *t, struct dkv_exchange *ex,
                                     struct dkv_error *err)
{
    enum dkv_status status = dkv_exchange_prepare(ex, &t->target, err);
    if (status == DKV_OK && curl_multi_add_handle(t->multi, ex->easy) != CURLM_OK)
        status = dkv_error_set(err, DKV_E_INTERNAL, "libcurl refused a request");
    return status;
}

static enum dkv_status http_submit(struct dkv_transport *t, struct dkv_job *job,
                                   struct dkv_error *err)
{
    struct dkv_exchange *ex = calloc(1, sizeof(*ex));
    if (ex == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a request");
    ex->job = job;
    if (t->n_idle > 0)
        ex->easy = t->idle[--t->n_idle];
    const enum dkv_status status = start_attempt(t, ex, err);
    if (status != DKV_OK) {
        dkv_exchange_reset(ex);
        curl_easy_cleanup(ex->easy);
        free(ex);
        return status;
    }
    ex->next = t->first;
    if (t->first != NULL)
        t->first->prev = ex;
    t->first = ex;
    job->carrier = ex;
    note_due(t, job->deadline_ns);
    arm_timer(t);
    return DKV_OK;
}

static void http_cancel(struct dkv_transport *t, struct dkv_job *job)
{
    exchange_free(t, job->carrier);
    job->carrier = NULL;
    arm_timer(t);
}

static void hand_back(struct dkv_transport *t, struct dkv_exchange *ex, enum dkv_status status,
                      const struct dkv_error *error)
{
    struct dkv_job *job = ex->job;
    job->result->n_attempts = ex->n_attempts;
    exchange_free(t, ex);
    dkv_job_done(job, status, status == DKV_OK ? "" : error->text);
}

/* When to try again; NEVER_NS: not within the deadline. */
static int64_t retry_time(const struct dkv_transport *t, const struct dkv_exchange *ex)
{
    if (ex->n_attempts > t->max_retries)
        return NEVER_NS;
    int64_t pause_ns = FIRST_PAUSE_NS << (ex->n_attempts < 8 ? ex->n_attempts - 1 : 7);
    if (ex->reply.retry_after_s >= 0) {
        if (ex->reply.retry_after_s > 86400)
            return NEVER_NS;
        pause_ns = ex->reply.retry_after_s * INT64_C(1000000000);
    }
    const int64_t at_ns = dkv_now_ns() + pause_ns;
    return at_ns < ex->job->deadline_ns ? at_ns : NEVER_NS;
}

static void finish_attempt(struct dkv_transport *t, struct dkv_exchange *ex, CURLcode code)
{
    struct dkv_error error = {0};
    bool may_retry;
    const enum dkv_status status = dkv_exchange_judge(ex, code, &may_retry, &error);
    const int64_t at_ns = may_retry ? retry_time(t, ex) : NEVER_NS;
    if (at_ns == NEVER_NS) {
        hand_back(t, ex, status, &error);
        return;
    }
    curl_multi_remove_handle(t->multi, ex->easy);
    dkv_exchange_reset(ex);
    ex->retry_at_ns = at_ns;
    note_due(t, at_ns);
}

static void finish_attempts(struct dkv_transport *t)
{
    CURLMsg *message;
    int left;
    while ((message = curl_multi_info_read(t->multi, &left)) != NULL) {
        struct dkv_exchange *ex = NULL;
        const CURLcode code = message->data.result; /* the message dies with the handle's removal */
        if (message->msg != CURLMSG_DONE)
            continue;
        curl_easy_getinfo(message->easy_handle, CURLINFO_PRIVATE, (char **)&ex);
        finish_attempt(t, ex, code);
    }
}

static void start_retry(struct dkv_transport *t, struct dkv_exchange *ex)
{
    struct dkv_error error = {0};
    ex->retry_at_ns = 0;
    const enum dkv_status status = start_attempt(t, ex, &error);
    if (status != DKV_OK)
        hand_back(t, ex, status, &error);
}

/* Ends what is past its deadline, whatever it waits for (libcurl's own timeout does not run while a
 * transfer waits for a free connection), and starts what has paused long enough. */
static void run_own_timers(struct dkv_transport *t)
{
    static const struct dkv_error too_late = {DKV_E_TIMEOUT,
                                              "the deadline passed before the answer came"};
    const int64_t now_ns = dkv_now_ns();
    struct dkv_exchange *next;
    if (now_ns < t->own_due_ns)
        return;
    t->own_due_ns = NEVER_NS;
    for (struct dkv_exchange *ex = t->first; ex != NULL; ex = next) {
        next = ex->next;
        if (now_ns >= ex->job->deadline_ns) {
            hand_back(t, ex, DKV_E_TIMEOUT, &too_late);
            continue;
        }
        note_due(t, ex->job->deadline_ns);
        if (ex->retry_at_ns > now_ns)
            note_due(t, ex->retry_at_ns);
        else if (ex->retry_at_ns != 0)
            start_retry(t, ex);
    }
}

/* ---- dispatching ---- */

static int curl_events(uint32_t events)
{
    return (events & EPOLLIN ? CURL_CSELECT_IN : 0) | (events & EPOLLOUT ? CURL_CSELECT_OUT : 0) |
           (events & (EPOLLERR | EPOLLHUP) ? CURL_CSELECT_ERR : 0);
}

static void run_timer(struct dkv_transport *t)
{
    int running;
    if (t->curl_due_ns == NEVER_NS || dkv_now_ns() < t->curl_due_ns)
        return;
    t->curl_due_ns = NEVER_NS; /* libcurl says so again if it needs more */
    curl_multi_socket_action(t->multi, CURL_SOCKET_TIMEOUT, 0, &running);
}

static enum dkv_status http_dispatch(struct dkv_transport *t, struct dkv_error *err)
{
    struct epoll_event events[EVENTS_PER_ROUND];
    int n = 1;
    for (int round = 0; n > 0 && round < ROUNDS_MAX; round++) {
        int running;
        run_timer(t);
        n = epoll_wait(t->epoll_fd, events, EVENTS_PER_ROUND, 0);
        if (n < 0 && errno != EINTR)
            return dkv_error_set(err, DKV_E_IO, "could not poll: %s", strerror(errno));
        for (int i = 0; i < n; i++) {
            if (events[i].data.fd == t->alarm.fd) {
                enum dkv_status status = dkv_alarm_clear(&t->alarm, err);
                if (status != DKV_OK)
                    return status;
            } else {
                curl_multi_socket_action(t->multi, events[i].data.fd, curl_events(events[i].events),
                                         &running);
            }
        }
        finish_attempts(t);
    }
    run_own_timers(t); /* behind answers: what came in time is taken, however late the caller is */
    arm_timer(t);
    return DKV_OK;
}

static int http_fd(const struct dkv_transport *t)
{
    return t->epoll_fd;
}

/* ---- opening and closing ---- */

static void http_close(struct dkv_transport *t)
{
    if (t == NULL)
        return;
    while (t->n_idle > 0)
        curl_easy_cleanup(t->idle[--t->n_idle]);
    curl_multi_cleanup(t->multi); /* closes the connections, which tells on_socket */
    dkv_alarm_close(&t->alarm);
    if (t->epoll_fd >= 0)
        close(t->epoll_fd);
    dkv_http_target_fini(&t->target);
    free(t);
}

static enum dkv_status open_descriptors(struct dkv_transport *t, struct dkv_error *err)
{
    t->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (t->epoll_fd < 0)
        return dkv_error_set(err, DKV_E_IO, "could not make an epoll instance: %s",
                             strerror(errno));
    return dkv_alarm_open(&t->alarm, t->epoll_fd, err);
}

static void set_up_multi(struct dkv_transport *t, uint32_t max_connections)
{
    curl_multi_setopt(t->multi, CURLMOPT_SOCKETFUNCTION, on_socket);
    curl_multi_setopt(t->multi, CURLMOPT_SOCKETDATA, t);
    curl_multi_setopt(t->multi, CURLMOPT_TIMERFUNCTION, on_timer);
    curl_multi_setopt(t->multi, CURLMOPT_TIMERDATA, t);
    curl_multi_setopt(t->multi, CURLMOPT_MAX_TOTAL_CONNECTIONS, (long)max_connections);
    curl_multi_setopt(t->multi, CURLMOPT_MAXCONNECTS, (long)max_connections);
}

static enum dkv_status http_open(const struct dkv_transport_config *config,
                                 struct dkv_transport **transport_out, struct dkv_error *err)
{
    pthread_once(&curl_once, init_curl);
    struct dkv_transport *t = calloc(1, sizeof(*t));
    if (t == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a transport");
    *t = (struct dkv_transport){
        .epoll_fd = -1,
        .alarm = DKV_ALARM_NONE,
        .curl_due_ns = NEVER_NS,
        .own_due_ns = NEVER_NS,
        .max_retries = config->max_retries,
    };
    enum dkv_status status = dkv_http_target_init(&t->target, config->address, config->token, err);
    if (status == DKV_OK)
        status = open_descriptors(t, err);
    if (status == DKV_OK && (t->multi = curl_multi_init()) == NULL)
        status = dkv_error_set(err, DKV_E_NOMEM, "no memory for a transport");
    if (status != DKV_OK) {
        http_close(t);
        return status;
    }
    set_up_multi(t, config->max_connections);
    *transport_out = t;
    return DKV_OK;
}

/* ---- about the server ---- */

static enum dkv_status http_health(struct dkv_transport *t, int64_t deadline_ns,
                                   struct dkv_error *err)
{
    struct dkv_error why = {0};
    enum dkv_status status = dkv_http_get(&t->target, t->target.ready_url, deadline_ns, NULL, NULL,
                                          &why);
    if (status == DKV_OK)
        return DKV_OK;
    if (status == DKV_E_UNAVAILABLE || status == DKV_E_TIMEOUT || status == DKV_E_DENIED ||
        status == DKV_E_DRAINING)
        return dkv_error_set(err, status, "%s", why.text);
    return dkv_error_set(err, DKV_E_UNAVAILABLE, "the endpoint is not ready: %s", why.text);
}

typedef enum dkv_status (*parse_fn)(const char *json, size_t json_bytes, struct dkv_oip_info *info,
                                    struct dkv_error *err);

static enum dkv_status get_and_parse(struct dkv_transport *t, const char *url, parse_fn parse,
                                     int64_t deadline_ns, struct dkv_oip_info *info,
                                     struct dkv_error *err)
{
    char *body = NULL;
    size_t n_bytes = 0;
    enum dkv_status status = dkv_http_get(&t->target, url, deadline_ns, &body, &n_bytes, err);
    if (status == DKV_OK)
        status = parse(body != NULL ? body : "", n_bytes, info, err);
    free(body);
    return status;
}

static enum dkv_status http_info(struct dkv_transport *t, int64_t deadline_ns,
                                 struct dkv_oip_info *info_out, struct dkv_error *err)
{
    enum dkv_status status = get_and_parse(t, t->target.server_url, dkv_oip_server_metadata_parse,
                                           deadline_ns, info_out, err);
    if (status == DKV_OK)
        status = get_and_parse(t, t->target.model_url, dkv_oip_model_metadata_parse, deadline_ns,
                               info_out, err);
    return status;
}

const struct dkv_transport_ops dkv_transport_http = {
    .open = http_open,
    .close = http_close,
    .submit = http_submit,
    .cancel = http_cancel,
    .fd = http_fd,
    .dispatch = http_dispatch,
    .health = http_health,
    .info = http_info,
};
