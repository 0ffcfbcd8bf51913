/* Messages over the socket pair, and pointers to offsets and back.
 *
 * A block has thirteen pointers. A table says where each is and how many bytes lie behind it, so
 * that packing, sizing and unpacking are one loop each and none of them can be forgotten in one of
 * these.
 */
#include "server/link.h"

#include <assert.h>
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* ---- messages ---- */

/* What is sent for every batch leaves out what is large. */
static size_t bytes_of(const struct dkv_link_msg *msg)
{
    switch (msg->type) {
    case DKV_LINK_RUN: return offsetof(struct dkv_link_msg, run) + sizeof(msg->run);
    case DKV_LINK_DONE: return offsetof(struct dkv_link_msg, done) + sizeof(msg->done);
    default: return sizeof(*msg);
    }
}

bool dkv_link_send(int socket, const struct dkv_link_msg *msg, int fd)
{
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr aligned;
    } control;
    struct iovec part = {(void *)(uintptr_t)msg, bytes_of(msg)};
    struct msghdr head = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd >= 0) {
        memset(&control, 0, sizeof(control));
        head.msg_control = &control;
        head.msg_controllen = sizeof(control);
        struct cmsghdr *header = CMSG_FIRSTHDR(&head);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(header), &fd, sizeof(fd));
    }
    ssize_t n;
    do
        n = sendmsg(socket, &head, MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    return n == (ssize_t)part.iov_len;
}

int dkv_link_receive(int socket, bool wait, struct dkv_link_msg *msg_out, int *fd_out)
{
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr aligned;
    } control;
    struct iovec part = {msg_out, sizeof(*msg_out)};
    struct msghdr head = {.msg_iov = &part,
                          .msg_iovlen = 1,
                          .msg_control = &control,
                          .msg_controllen = sizeof(control)};
    ssize_t n;
    *fd_out = -1;
    do
        n = recvmsg(socket, &head, MSG_CMSG_CLOEXEC | (wait ? 0 : MSG_DONTWAIT));
    while (n < 0 && errno == EINTR);
    if (n < 0)
        return errno == ECONNRESET ? 0 : -1;
    const struct cmsghdr *header = CMSG_FIRSTHDR(&head);
    if (header != NULL && header->cmsg_type == SCM_RIGHTS)
        memcpy(fd_out, CMSG_DATA(header), sizeof(*fd_out));
    if (n >= (ssize_t)sizeof(msg_out->type) && n == (ssize_t)bytes_of(msg_out))
        return 1;
    if (*fd_out >= 0)
        close(*fd_out);
    *fd_out = -1;
    return 0;
}

/* ---- the pointers ---- */

enum behind { TENSOR, Q_FLOATS, KV_FLOATS, ENTRIES, TOKEN_FLOATS, METRIC_FLOATS };

struct pointer {
    size_t at; /* in dkv_block */
    enum behind what;
};

static const struct pointer pointers[DKV_LINK_POINTERS] = {
    [DKV_LINK_QUERY] = {offsetof(struct dkv_block, query.base), TENSOR},
    [DKV_LINK_KEY] = {offsetof(struct dkv_block, key.base), TENSOR},
    [DKV_LINK_VALUE] = {offsetof(struct dkv_block, value.base), TENSOR},
    [DKV_LINK_TABLE] = {offsetof(struct dkv_block, table.entries), ENTRIES},
    [DKV_LINK_V_TABLE] = {offsetof(struct dkv_block, v_table.entries), ENTRIES},
    {offsetof(struct dkv_block, query.head_scales), Q_FLOATS},
    {offsetof(struct dkv_block, key.head_scales), KV_FLOATS},
    {offsetof(struct dkv_block, value.head_scales), KV_FLOATS},
    {offsetof(struct dkv_block, sink_logits), Q_FLOATS},
    {offsetof(struct dkv_block, token_weight), TOKEN_FLOATS},
    {offsetof(struct dkv_block, carry_in), TOKEN_FLOATS},
    {offsetof(struct dkv_block, external_scores), TOKEN_FLOATS},
    {offsetof(struct dkv_block, value_metric), METRIC_FLOATS},
};

static const void *get(const struct dkv_block *block, unsigned i)
{
    const void *value;
    memcpy(&value, (const char *)block + pointers[i].at, sizeof(value));
    return value;
}

static void set(struct dkv_block *block, unsigned i, const void *value)
{
    memcpy((char *)block + pointers[i].at, &value, sizeof(value));
}

/* Bytes behind a vector. The gate has bounded them. */
static uint64_t vector_bytes(const struct dkv_block *block, unsigned i)
{
    const struct dkv_page_table *table = i == DKV_LINK_TABLE ? &block->table : &block->v_table;
    switch (pointers[i].what) {
    case Q_FLOATS: return block->q_heads * sizeof(float);
    case KV_FLOATS: return block->kv_heads * sizeof(float);
    case TOKEN_FLOATS: return block->kv_heads * block->n_tokens * sizeof(float);
    case METRIC_FLOATS: {
        const uint64_t dim = block->v_dim != 0 ? block->v_dim : block->head_dim;
        return block->q_heads * dim * dim * sizeof(float);
    }
    case ENTRIES: return table->n_entries * table->entry_bytes;
    case TENSOR: break;
    }
    return 0;
}

static uint64_t rounded(uint64_t bytes)
{
    return (bytes + 15) & ~UINT64_C(15);
}

/* ---- the front's side ---- */

/* The memory that holds `at`; NOWHERE if it is neither in the arena nor in a range. */
static struct dkv_link_addr locate(const struct dkv_arena *arena, const void *at,
                                   const struct dkv_link_range *ranges, unsigned n_ranges)
{
    if (at == NULL)
        return (struct dkv_link_addr){DKV_LINK_NOWHERE, 0};
    if (dkv_arena_has(arena, at))
        return (struct dkv_link_addr){DKV_LINK_IN_ARENA, dkv_arena_offset(arena, at)};
    for (unsigned i = 0; i < n_ranges; i++) {
        const uint64_t offset = (uint64_t)(uintptr_t)at - (uint64_t)(uintptr_t)ranges[i].base;
        if (offset < ranges[i].bytes)
            return (struct dkv_link_addr){ranges[i].number, offset};
    }
    return (struct dkv_link_addr){DKV_LINK_NOWHERE, 0};
}

uint64_t dkv_link_job_bytes(const struct dkv_arena *arena, const struct dkv_block *blocks,
                            uint32_t n_blocks, const struct dkv_link_range *ranges,
                            unsigned n_ranges)
{
    uint64_t n_bytes = rounded(sizeof(struct dkv_link_job) +
                               n_blocks * sizeof(struct dkv_link_block));
    for (uint32_t b = 0; b < n_blocks; b++)
        for (unsigned i = 0; i < DKV_LINK_POINTERS; i++) {
            const void *at = get(&blocks[b], i);
            if (at != NULL && locate(arena, at, ranges, n_ranges).memory == DKV_LINK_NOWHERE)
                n_bytes += rounded(vector_bytes(&blocks[b], i));
        }
    return n_bytes;
}

void dkv_link_pack(const struct dkv_arena *arena, const struct dkv_request *request,
                   const struct dkv_plan *plans, const struct dkv_link_range *ranges,
                   unsigned n_ranges, struct dkv_link_job *to)
{
    unsigned char *tail = (unsigned char *)to +
                          rounded(sizeof(*to) + request->n_blocks * sizeof(to->blocks[0]));
    dkv_params_copy(&to->params, &request->params);
    to->n_blocks = request->n_blocks;
    for (uint32_t b = 0; b < request->n_blocks; b++) {
        const struct dkv_block *block = &request->blocks[b];
        struct dkv_link_block *packed = &to->blocks[b];
        packed->block = *block;
        packed->plan = plans[b];
        packed->scores = packed->counts = (struct dkv_link_addr){DKV_LINK_NOWHERE, 0};
        packed->keep = packed->scores;
        packed->ring = (struct dkv_ring){0};
        packed->status = DKV_OK;
        for (unsigned i = 0; i < DKV_LINK_POINTERS; i++) {
            const void *at = get(block, i);
            struct dkv_link_addr *addr = &packed->pointers[i];
            set(&packed->block, i, NULL);
            *addr = locate(arena, at, ranges, n_ranges);
            if (at == NULL || addr->memory != DKV_LINK_NOWHERE)
                continue;
            assert(pointers[i].what != TENSOR);
            const uint64_t n_bytes = vector_bytes(block, i);
            memcpy(tail, at, n_bytes);
            *addr = (struct dkv_link_addr){DKV_LINK_IN_ARENA, dkv_arena_offset(arena, tail)};
            tail += rounded(n_bytes);
        }
    }
}

/* ---- the worker's side ---- */

bool dkv_link_unpack(const struct dkv_link_block *from, dkv_link_find_fn find, void *owner,
                     struct dkv_block *block_out)
{
    *block_out = from->block;
    for (unsigned i = 0; i < DKV_LINK_POINTERS; i++) {
        const struct dkv_link_addr *addr = &from->pointers[i];
        if (addr->memory == DKV_LINK_NOWHERE)
            continue;
        const unsigned char *base = find(owner, addr->memory);
        if (base == NULL)
            return false;
        set(block_out, i, base + addr->offset);
    }
    return true;
}
