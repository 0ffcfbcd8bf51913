/* How fast dropkvd takes a body in, beside a bare libmicrohttpd that throws the bytes away.
 *
 *   bench_http DROPKVD [MIB] [ROUNDS]
 *
 * One client, one connection a round, the same bytes for both servers, rounds alternating so that
 * the machine's moods hit both. The request is a real one: keys and values of a long block, of
 * which every token is kept (keep_ratio 1), so that the answer costs no scoring and the time is the
 * body's. Time runs from the first byte of the header to the last byte of the reply. Printed: the
 * best round of each, their ratio, and the daemon's peak resident memory; and the processor time
 * that a server took for a body, on average over all rounds but the first, which says what a body
 * costs where other programs make the best round a matter of luck.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <microhttpd.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define KV_HEADS 8u
#define HEAD_DIM 128u
#define PIECE    (1u << 20)

static void fail(const char *what)
{
    fprintf(stderr, "bench_http: %s: %s\n", what, strerror(errno));
    exit(1);
}

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* ---- the bare sink, in a process of its own ---- */

static enum MHD_Result sink(void *cls, struct MHD_Connection *mhd, const char *path,
                            const char *method, const char *version, const char *upload,
                            size_t *upload_bytes, void **request)
{
    static int seen;
    (void)cls, (void)path, (void)method, (void)version, (void)upload;
    if (*request == NULL) {
        *request = &seen;
        return MHD_YES;
    }
    if (*upload_bytes > 0) {
        *upload_bytes = 0;
        return MHD_YES;
    }
    struct MHD_Response *response = MHD_create_response_from_buffer(0, NULL,
                                                                    MHD_RESPMEM_PERSISTENT);
    enum MHD_Result queued = MHD_queue_response(mhd, 200, response);
    MHD_destroy_response(response);
    return queued;
}

/* Tells its port through `out`, then serves until killed. */
static void run_sink(int out, size_t memory_bytes)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct MHD_Daemon *daemon =
        memory_bytes == 0
            ? MHD_start_daemon(MHD_USE_EPOLL_INTERNAL_THREAD, 0, NULL, NULL, sink, NULL,
                               MHD_OPTION_SOCK_ADDR, &address, MHD_OPTION_END)
            : MHD_start_daemon(MHD_USE_EPOLL_INTERNAL_THREAD, 0, NULL, NULL, sink, NULL,
                               MHD_OPTION_SOCK_ADDR, &address, MHD_OPTION_CONNECTION_MEMORY_LIMIT,
                               memory_bytes, MHD_OPTION_CONNECTION_MEMORY_INCREMENT,
                               memory_bytes / 2, MHD_OPTION_END);
    if (daemon == NULL)
        fail("sink");
    unsigned port = MHD_get_daemon_info(daemon, MHD_DAEMON_INFO_BIND_PORT)->port;
    if (write(out, &port, sizeof(port)) != sizeof(port))
        fail("sink");
    for (;;)
        pause();
}

static pid_t start_sink(size_t memory_bytes, unsigned *port_out)
{
    int ends[2];
    if (pipe(ends) != 0)
        fail("pipe");
    pid_t pid = fork();
    if (pid == 0)
        run_sink(ends[1], memory_bytes);
    close(ends[1]);
    if (read(ends[0], port_out, sizeof(*port_out)) != sizeof(*port_out))
        fail("sink");
    close(ends[0]);
    return pid;
}

/* ---- dropkvd ---- */

/* Reads the daemon's log until it says where it listens. */
static unsigned wait_for_port(int log)
{
    char text[4096];
    size_t used = 0;
    for (;;) {
        ssize_t n = read(log, text + used, sizeof(text) - 1 - used);
        if (n <= 0)
            fail("dropkvd did not start");
        used += (size_t)n;
        text[used] = '\0';
        const char *port = strstr(text, ", port ");
        if (port != NULL && strchr(port, '\n') != NULL)
            return (unsigned)strtoul(port + 7, NULL, 10);
    }
}

static pid_t start_daemon(const char *program, unsigned *port_out)
{
    int ends[2];
    if (pipe(ends) != 0)
        fail("pipe");
    pid_t pid = fork();
    if (pid == 0) {
        dup2(ends[1], STDERR_FILENO);
        execl(program, program, "--http", "127.0.0.1:0", "--socket", "off", (char *)NULL);
        fail(program);
    }
    close(ends[1]);
    *port_out = wait_for_port(ends[0]);
    return pid;
}

static long peak_rss_kib(pid_t pid)
{
    char path[64], line[256];
    long kib = -1;
    snprintf(path, sizeof(path), "/proc/%d/status", (int)pid);
    FILE *file = fopen(path, "r");
    while (file != NULL && fgets(line, sizeof(line), file) != NULL)
        if (sscanf(line, "VmHWM: %ld", &kib) == 1)
            break;
    if (file != NULL)
        fclose(file);
    return kib;
}

/* Of all threads so far. */
static double cpu_s(pid_t pid)
{
    clockid_t clock;
    struct timespec used;
    if (clock_getcpuclockid(pid, &clock) != 0 || clock_gettime(clock, &used) != 0)
        fail("processor time");
    return (double)used.tv_sec + (double)used.tv_nsec * 1e-9;
}

/* ---- the client ---- */

static void send_all(int fd, const char *bytes, size_t n)
{
    while (n > 0) {
        ssize_t sent = send(fd, bytes, n, MSG_NOSIGNAL);
        if (sent < 0)
            fail("send");
        bytes += sent;
        n -= (size_t)sent;
    }
}

/* Reads a reply whole; exits unless it is a 200. */
static void read_reply(int fd)
{
    static char text[65536];
    size_t used = 0;
    uint64_t left = UINT64_MAX;
    while (left > 0) {
        ssize_t n = recv(fd, text + used, sizeof(text) - 1 - used, 0);
        if (n <= 0)
            fail("the reply ended early");
        if (left != UINT64_MAX) {
            left -= (uint64_t)n;
            continue;
        }
        used += (size_t)n;
        text[used] = '\0';
        const char *end = strstr(text, "\r\n\r\n");
        if (end == NULL)
            continue;
        if (strncmp(text, "HTTP/1.1 200", 12) != 0) {
            fprintf(stderr, "bench_http: %s\n", text);
            exit(1);
        }
        const char *length = strcasestr(text, "\r\nContent-Length: ");
        left = strtoull(length + 18, NULL, 10) - (used - (size_t)(end + 4 - text));
        used = 0;
    }
}

static double upload_s(unsigned port, const char *head, const char *json, uint64_t n_bytes)
{
    static char piece[PIECE];
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_port = htons((uint16_t)port),
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof(address)) != 0)
        fail("connect");
    const double began = now_s();
    send_all(fd, head, strlen(head));
    send_all(fd, json, strlen(json));
    while (n_bytes > 0) {
        size_t n = n_bytes < PIECE ? (size_t)n_bytes : PIECE;
        send_all(fd, piece, n);
        n_bytes -= n;
    }
    read_reply(fd);
    const double took = now_s() - began;
    close(fd);
    return took;
}

int main(int argc, char **argv)
{
    const uint64_t mib = argc > 2 ? strtoull(argv[2], NULL, 10) : 256;
    const int rounds = argc > 3 ? atoi(argv[3]) : 24;
    if (argc < 2 || mib < 1 || rounds < 2) {
        fprintf(stderr, "usage: bench_http DROPKVD [MIB] [ROUNDS]\n");
        return 64;
    }
    const uint64_t n_tokens = (mib << 20) / (2 * KV_HEADS * HEAD_DIM * 2);
    const uint64_t kv_bytes = n_tokens * KV_HEADS * HEAD_DIM * 2;
    const uint64_t q_bytes = KV_HEADS * HEAD_DIM * 2;
    char json[1024], head[1024];
    snprintf(json, sizeof(json),
             "{\"parameters\":{\"keep_ratio\":1.0,\"window\":1},\"inputs\":["
             "{\"name\":\"query\",\"datatype\":\"BF16\",\"shape\":[1,%u,1,%u],"
             "\"parameters\":{\"binary_data_size\":%llu}},"
             "{\"name\":\"key\",\"datatype\":\"BF16\",\"shape\":[1,%u,%llu,%u],"
             "\"parameters\":{\"binary_data_size\":%llu}},"
             "{\"name\":\"value\",\"datatype\":\"BF16\",\"shape\":[1,%u,%llu,%u],"
             "\"parameters\":{\"binary_data_size\":%llu}}],"
             "\"outputs\":[{\"name\":\"keep_indices\",\"parameters\":{\"binary_data\":true}}]}",
             KV_HEADS, HEAD_DIM, (unsigned long long)q_bytes, KV_HEADS,
             (unsigned long long)n_tokens, HEAD_DIM, (unsigned long long)kv_bytes, KV_HEADS,
             (unsigned long long)n_tokens, HEAD_DIM, (unsigned long long)kv_bytes);
    const uint64_t n_bytes = q_bytes + 2 * kv_bytes;
    snprintf(head, sizeof(head),
             "POST /v2/models/dropkv/infer HTTP/1.1\r\nHost: 127.0.0.1\r\n"
             "Inference-Header-Content-Length: %zu\r\nContent-Length: %llu\r\n\r\n",
             strlen(json), (unsigned long long)(n_bytes + strlen(json)));

    struct {
        const char *name;
        pid_t pid;
        unsigned port;
        double best_s;
        double first_s;
        double cpu_s;
    } servers[3] = {{.name = "bare sink"}, {.name = "bare sink, 128 KiB"}, {.name = "dropkvd"}};
    servers[0].pid = start_sink(0, &servers[0].port);
    servers[1].pid = start_sink(128u << 10, &servers[1].port);
    servers[2].pid = start_daemon(argv[1], &servers[2].port);
    for (int round = 0; round < rounds; round++)
        for (int i = 0; i < 3; i++) {
            const double before_s = cpu_s(servers[i].pid);
            const double took = upload_s(servers[i].port, head, json, n_bytes);
            if (round == 0)
                servers[i].first_s = took;
            else
                servers[i].cpu_s += (cpu_s(servers[i].pid) - before_s) / (rounds - 1);
            if (round == 0 || took < servers[i].best_s)
                servers[i].best_s = took;
        }
    const double body_mib = (double)(n_bytes + strlen(json)) / (1 << 20);
    const double peak_mib = (double)peak_rss_kib(servers[2].pid) / 1024;
    for (int i = 0; i < 3; i++) {
        printf("%-20s %6.0f MiB/s, the first body %6.0f MiB/s; processor %.0f ms a body\n",
               servers[i].name, body_mib / servers[i].best_s, body_mib / servers[i].first_s,
               servers[i].cpu_s * 1e3);
        kill(servers[i].pid, SIGTERM);
        waitpid(servers[i].pid, NULL, 0);
    }
    printf(
        "ratio to the bare sink %.2f, to the sink with the daemon's buffers %.2f (at least 0.60)\n",
        servers[0].best_s / servers[2].best_s, servers[1].best_s / servers[2].best_s);
    printf("body %.1f MiB, peak resident %.1f MiB: %.1f above the body (at most 32)\n", body_mib,
           peak_mib, peak_mib - body_mib);
    return servers[0].best_s / servers[2].best_s >= 0.6 && peak_mib - body_mib <= 32 ? 0 : 1;
}
