/* The local socket against a daemon of the test's own, which answers when and as no real one does
 * on demand. */
#include "client/transport.h"
#include "proto/conn.h"
#include "tests/client/calls.h"

#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { TOKENS = 16, N_REQUESTS = 600 };

static const struct dkv_test_shape shape = {1, 1, 8, 8, TOKENS};
static float tensor[TOKENS][8];

/* ---- the daemon ---- */

struct server {
    pid_t pid;
    int talk_fd; /* with the test: a byte when the requests are there, one when they are answered */
    char folder[32], path[40], endpoint[48];
};

static void say(struct dkv_wire_conn *conn, uint8_t type, uint64_t id, const void *payload,
                size_t n_bytes)
{
    struct dkv_error err;
    if (dkv_wire_conn_send(
            conn,
            &(struct dkv_wire_conn_output){
                .type = type, .id = id, .payload = payload, .payload_bytes = n_bytes},
            &err) != DKV_OK)
        _exit(3);
}

static void welcome(struct dkv_wire_conn *conn, uint64_t id)
{
    static const char *const texts[DKV_WIRE_ABOUT_TEXTS] = {"0", "test", "none", "none", ""};
    uint8_t payload[1024], about[DKV_WIRE_ABOUT_MAX];
    const size_t n_about = dkv_wire_put_about(about, texts);
    const struct dkv_wire_welcome m = {.magic = DKV_WIRE_MAGIC,
                                       .version = DKV_WIRE_VERSION,
                                       .about_bytes = (uint16_t)n_about,
                                       .max_in_flight = 2 * N_REQUESTS,
                                       .max_bulk_bytes = 1 << 20};
    const size_t n = dkv_wire_put_welcome(payload, &m);
    memcpy(payload + n, about, n_about);
    say(conn, DKV_WIRE_WELCOME, id, payload, n + n_about);
}

static void refuse(struct dkv_wire_conn *conn, uint64_t id)
{
    uint8_t payload[64];
    const struct dkv_wire_error m = {.status = DKV_E_INVALID, .block = UINT32_MAX, .text_bytes = 2};
    const size_t n = dkv_wire_put_error(payload, &m);
    memcpy(payload + n, "no", 2);
    say(conn, DKV_WIRE_ERROR, id, payload, n + 2);
}

/* One byte each way. */
static void rendezvous(int fd)
{
    char byte = '!';
    if (write(fd, &byte, 1) != 1 || read(fd, &byte, 1) != 1)
        _exit(4);
}

/* Keeps all answers back until `n_wanted` requests are there and the test says so. */
static void serve(struct dkv_wire_conn *conn, unsigned n_wanted, int talk_fd)
{
    uint64_t ids[N_REQUESTS];
    unsigned n = 0;
    for (struct dkv_error err;;) {
        struct pollfd ready = {.fd = dkv_wire_conn_fd(conn), .events = POLLIN};
        struct dkv_wire_conn_message m;
        bool got;
        uint64_t n_bulk;
        if (dkv_wire_conn_next(conn, &m, &err) != DKV_OK)
            _exit(0);
        if (m.header.type == 0) {
            if (poll(&ready, 1, -1) != 1 || dkv_wire_conn_read(conn, &got, &err) != DKV_OK)
                _exit(0); /* the client has gone */
            continue;
        }
        if (m.header.type == DKV_WIRE_HELLO)
            welcome(conn, m.header.id);
        else if (m.header.type == DKV_WIRE_SCORE_BLOCKS)
            ids[n++] = m.header.id;
        while (dkv_wire_conn_bulk_left(conn) > 0)
            if (dkv_wire_conn_read_bulk(conn, NULL, UINT64_MAX, &n_bulk, &err) != DKV_OK)
                _exit(0);
        const bool complete = n == n_wanted;
        if (complete)
            rendezvous(talk_fd);
        for (unsigned i = 0; complete && i < n_wanted; i++)
            refuse(conn, ids[i]);
        n %= n_wanted;
        if (dkv_wire_conn_flush(conn, &err) != DKV_OK)
            _exit(0);
        if (complete && write(talk_fd, "!", 1) != 1)
            _exit(4);
    }
}

static struct server start_server(unsigned n_wanted)
{
    struct server server = {.folder = "/tmp/dropkv-test-XXXXXX"};
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    assert_non_null(mkdtemp(server.folder));
    snprintf(server.path, sizeof(server.path), "%s/s", server.folder);
    snprintf(server.endpoint, sizeof(server.endpoint), "unix://%s", server.path);
    strcpy(address.sun_path, server.path);
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(fd, (const struct sockaddr *)&address, sizeof(address)), 0);
    assert_int_equal(listen(fd, 1), 0);
    int talk[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, talk), 0);
    server.talk_fd = talk[0];
    server.pid = fork();
    assert_true(server.pid >= 0);
    if (server.pid == 0) {
        struct dkv_wire_conn *conn;
        struct dkv_error err;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (dkv_wire_conn_open(accept(fd, NULL, NULL), DKV_WIRE_FROM_CLIENT, &conn, &err) == DKV_OK)
            serve(conn, n_wanted, talk[1]);
        _exit(2);
    }
    close(fd);
    close(talk[1]);
    return server;
}

/* It ends when its client has closed the connection. */
static void end_server(const struct server *server)
{
    int status;
    assert_int_equal(waitpid(server->pid, &status, 0), server->pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    close(server->talk_fd);
    unlink(server->path);
    rmdir(server->folder);
}

/* Sends until the server has every request, and lets it answer. */
static void send_all(struct dropkv_client *client, const struct server *server)
{
    struct pollfd told = {.fd = server->talk_fd, .events = POLLIN};
    for (int i = 0; poll(&told, 1, 1) == 0; i++) {
        assert_true(i < 10000);
        assert_int_equal(dropkv_dispatch(client, 0, NULL), DROPKV_OK);
    }
    char byte;
    assert_int_equal(read(server->talk_fd, &byte, 1), 1);
    assert_int_equal(write(server->talk_fd, &byte, 1), 1);
}

/* ---- the tests ---- */

/* More than a dispatch handles: the rest makes the descriptor readable, although nothing more comes
 * from the socket. */
static void answers_that_come_together_are_all_heard_of(void **state)
{
    const struct server server = start_server(N_REQUESTS);
    struct dropkv_client_options options = DROPKV_CLIENT_OPTIONS_INIT;
    struct dropkv_client *client;
    struct dropkv_result *result;
    const struct dropkv_request r = dkv_test_request(&shape, 1, tensor, tensor, tensor);
    unsigned n_answers = 0;
    (void)state;
    options.max_in_flight = N_REQUESTS;
    assert_int_equal(dropkv_client_open(server.endpoint, &options, &client, NULL), DROPKV_OK);
    for (int i = 0; i < N_REQUESTS; i++)
        assert_int_equal(dropkv_submit(client, &r, NULL, NULL), DROPKV_OK);
    send_all(client, &server);
    while (n_answers < N_REQUESTS) {
        struct pollfd ready = {.fd = dropkv_fd(client), .events = POLLIN};
        if (poll(&ready, 1, 10000) != 1)
            fail_msg("%u answers, and nothing tells of the others", n_answers);
        assert_int_equal(dropkv_dispatch(client, 0, NULL), DROPKV_OK);
        for (; (result = dropkv_next_result(client)) != NULL; n_answers++) {
            assert_int_equal(result->status, DROPKV_E_INVALID);
            assert_string_equal(result->error_text, "no");
            dropkv_result_free(result);
        }
    }
    assert_int_equal(dropkv_in_flight(client), 0);
    dropkv_client_close(client);
    end_server(&server);
}

/* The caller sleeps over the deadline of requests whose answers came long before. */
static void answers_that_came_in_time_are_taken_late(void **state)
{
    enum { LATE = 300, TIMEOUT_US = 2000000 };
    const struct server server = start_server(LATE);
    struct dropkv_client_options options = DROPKV_CLIENT_OPTIONS_INIT;
    struct dropkv_client *client;
    struct dropkv_result *result;
    struct dropkv_request r = dkv_test_request(&shape, 1, tensor, tensor, tensor);
    char byte;
    const int64_t deadline_ns = dkv_now_ns() + (TIMEOUT_US + 50000) * INT64_C(1000);
    (void)state;
    options.max_in_flight = LATE;
    r.timeout_us = TIMEOUT_US;
    assert_int_equal(dropkv_client_open(server.endpoint, &options, &client, NULL), DROPKV_OK);
    for (int i = 0; i < LATE; i++)
        assert_int_equal(dropkv_submit(client, &r, NULL, NULL), DROPKV_OK);
    send_all(client, &server);
    assert_int_equal(read(server.talk_fd, &byte, 1), 1); /* answered */
    while (dkv_now_ns() < deadline_ns)
        usleep(1000);
    assert_int_equal(dropkv_dispatch(client, 0, NULL), DROPKV_OK);
    for (unsigned n = 0; n < LATE; n++) {
        result = dropkv_next_result(client);
        assert_non_null(result);
        if (result->status != DROPKV_E_INVALID)
            fail_msg("answer %u: %s", n, result->error_text);
        dropkv_result_free(result);
    }
    dropkv_client_close(client);
    end_server(&server);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(answers_that_came_in_time_are_taken_late),
        cmocka_unit_test(answers_that_come_together_are_all_heard_of),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
