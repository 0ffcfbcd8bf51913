/* The daemon is a child process whose log tells its port; the scripted server a thread that answers
 * from a list. */
#include "tests/client/http_fixture.h"

#include <arpa/inet.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static void give_up(const char *what)
{
    perror(what);
    abort();
}

/* ---- the daemon ---- */

/* Its log tells where it listens, whichever port it got. */
static unsigned read_port(int log_fd)
{
    char log[8192];
    size_t used = 0;
    while (used + 1 < sizeof(log)) {
        const ssize_t n = read(log_fd, log + used, sizeof(log) - 1 - used);
        if (n <= 0)
            break;
        used += (size_t)n;
        log[used] = '\0';
        const char *line = strstr(log, "listening on ");
        const char *port = line == NULL ? NULL : strstr(line, "port ");
        if (port != NULL && strchr(port, '\n') != NULL)
            return (unsigned)strtoul(port + 5, NULL, 10);
    }
    fprintf(stderr, "the daemon did not start: %.*s\n", (int)used, log);
    abort();
}

void dkv_test_daemon_start(struct dkv_test_daemon *daemon, const char *program, unsigned port)
{
    int log[2];
    char address[32];
    snprintf(address, sizeof(address), "127.0.0.1:%u", port);
    if (pipe(log) != 0 || (daemon->pid = fork()) < 0)
        give_up("fork");
    if (daemon->pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* a failed test leaves nothing behind */
        dup2(log[1], STDERR_FILENO);
        close(log[0]);
        close(log[1]);
        execl(program, program, "--http", address, "--socket", "off", (char *)NULL);
        _exit(127);
    }
    close(log[1]);
    daemon->log_fd = log[0];
    daemon->port = read_port(log[0]);
    snprintf(daemon->url, sizeof(daemon->url), "http://127.0.0.1:%u", daemon->port);
}

void dkv_test_daemon_stop(struct dkv_test_daemon *daemon, int signal_number)
{
    kill(daemon->pid, signal_number);
    waitpid(daemon->pid, NULL, 0);
    close(daemon->log_fd);
    daemon->pid = 0;
}

/* ---- the scripted server ---- */

_Atomic enum dkv_test_turn *dkv_test_turn;

struct dkv_test_server {
    int listener;
    int stop_fds[2]; /* closing [1] ends the thread */
    pthread_t thread;
    const struct dkv_test_scene *scenes;
    size_t n_scenes;
    size_t n_connections;
};

/* False once the server is to stop. */
static bool wait_for(const struct dkv_test_server *server, int fd)
{
    struct pollfd fds[2] = {{.fd = fd, .events = POLLIN},
                            {.fd = server->stop_fds[0], .events = POLLIN}};
    (void)poll(fds, 2, -1);
    return fds[1].revents == 0;
}

static bool has_whole_request(const char *bytes, size_t n, bool head_is_enough)
{
    const char *end = memmem(bytes, n, "\r\n\r\n", 4);
    if (end == NULL || head_is_enough)
        return end != NULL;
    const char *length = memmem(bytes, n, "Content-Length: ", 16);
    /* "Inference-Header-Content-Length" holds the same words. */
    while (length != NULL && length > bytes && length[-1] == '-')
        length = memmem(length + 1, n - (size_t)(length + 1 - bytes), "Content-Length: ", 16);
    const size_t body = length == NULL ? 0 : strtoul(length + 16, NULL, 10);
    return n >= (size_t)(end + 4 - bytes) + body;
}

static void play(const struct dkv_test_server *server, const struct dkv_test_scene *scene, int fd)
{
    const size_t cap = 16u << 20;
    char *bytes = malloc(cap);
    size_t n = 0;
    while (n < cap && !has_whole_request(bytes, n, scene->reply_early)) {
        if (!wait_for(server, fd))
            break;
        const ssize_t got = recv(fd, bytes + n, cap - n, 0);
        if (got <= 0)
            break;
        n += (size_t)got;
    }
    if (dkv_test_turn != NULL)
        *dkv_test_turn = DKV_TEST_HELD;
    while (dkv_test_turn != NULL && *dkv_test_turn == DKV_TEST_HELD)
        usleep(1000);
    if (scene->reply != NULL)
        (void)!send(fd, scene->reply, scene->n_bytes, MSG_NOSIGNAL);
    if (scene->reply_early) { /* as a careful server does: let the client read before the reset */
        shutdown(fd, SHUT_WR);
        while (wait_for(server, fd) && recv(fd, bytes, cap, 0) > 0)
            ;
    }
    if (scene->hang)
        while (wait_for(server, fd) && recv(fd, bytes, cap, 0) > 0)
            ;
    free(bytes);
    close(fd);
    if (dkv_test_turn != NULL)
        *dkv_test_turn = DKV_TEST_REPLIED;
}

static void *serve(void *context)
{
    struct dkv_test_server *server = context;
    while (wait_for(server, server->listener)) {
        const int fd = accept(server->listener, NULL, NULL);
        if (fd < 0)
            continue;
        if (server->n_connections < server->n_scenes)
            play(server, &server->scenes[server->n_connections], fd);
        else
            close(fd);
        server->n_connections++;
    }
    return NULL;
}

struct dkv_test_server *dkv_test_server_start(const struct dkv_test_scene *scenes, size_t n_scenes,
                                              char url_out[64])
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof(address);
    struct dkv_test_server *server = calloc(1, sizeof(*server));
    server->scenes = scenes;
    server->n_scenes = n_scenes;
    server->listener = socket(AF_INET, SOCK_STREAM, 0);
    if (pipe(server->stop_fds) != 0 ||
        bind(server->listener, (struct sockaddr *)&address, sizeof(address)) != 0 ||
        listen(server->listener, 16) != 0 ||
        getsockname(server->listener, (struct sockaddr *)&address, &length) != 0 ||
        pthread_create(&server->thread, NULL, serve, server) != 0)
        give_up("scripted server");
    snprintf(url_out, 64, "http://127.0.0.1:%u", (unsigned)ntohs(address.sin_port));
    return server;
}

size_t dkv_test_server_stop(struct dkv_test_server *server)
{
    close(server->stop_fds[1]);
    pthread_join(server->thread, NULL);
    const size_t n = server->n_connections;
    close(server->stop_fds[0]);
    close(server->listener);
    free(server);
    return n;
}

/* ---- a client ---- */

struct dropkv_client *dkv_test_http_client(const char *url, int32_t max_retries)
{
    struct dropkv_client_options options = DROPKV_CLIENT_OPTIONS_INIT;
    struct dropkv_client *client = NULL;
    struct dropkv_error error;
    options.max_retries = max_retries;
    if (dropkv_client_open(url, &options, &client, &error) != DROPKV_OK) {
        fprintf(stderr, "%s\n", error.text);
        abort();
    }
    return client;
}
