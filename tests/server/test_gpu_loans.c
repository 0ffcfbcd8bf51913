/* What of clients' GPU memory needs no GPU: loans of chunks, one mapping per allocation, and how a
 * job is divided among devices. The engine here only counts what it is asked to map; tests/gpu has
 * the real one. */
#include "server/imports.h"
#include "server/job.h"
#include "server/loan.h"

#include "proto/memfd.h"
#include "proto/wire.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#define MIB (UINT64_C(1) << 20)

/* ---- an engine that counts ---- */

static struct {
    unsigned n_open, n_imports, n_releases;
    enum dkv_status next;
} driver;

/* A device address: nobody reads there. */
static const uintptr_t somewhere = (uintptr_t)1 << 40;

static enum dkv_status count_import(struct dkv_engine *engine, const struct dkv_import *from,
                                    struct dkv_mapping **mapping_out, struct dkv_error *err)
{
    (void)engine;
    if (driver.next != DKV_OK)
        return dkv_error_set(err, driver.next, "no");
    struct dkv_mapping *mapping = calloc(1, sizeof(*mapping));
    assert_non_null(mapping);
    mapping->base = (const void *)somewhere;
    mapping->bytes = 8 * MIB;
    if (from->host != NULL) {
        mapping->base = from->host;
        mapping->bytes = from->host_bytes;
    } else if (from->handle == NULL) {
        const struct dkv_import_chunk *last = &from->chunks[from->n_chunks - 1];
        mapping->first = from->chunks[0].offset;
        mapping->bytes = last->offset + last->bytes - mapping->first;
    }
    driver.n_open++;
    driver.n_imports++;
    *mapping_out = mapping;
    return DKV_OK;
}

static enum dkv_status count_release(struct dkv_engine *engine, struct dkv_mapping *mapping,
                                     struct dkv_error *err)
{
    (void)engine;
    (void)err;
    free(mapping);
    driver.n_open--;
    driver.n_releases++;
    return DKV_OK;
}

static const struct dkv_engine_ops counting = {
    .name = "counting", .import = count_import, .release = count_release};

static int open_imports(void **state)
{
    static struct dkv_imports imports;
    memset(&driver, 0, sizeof(driver));
    dkv_imports_init(&imports, &counting, NULL);
    *state = &imports;
    return 0;
}

static int close_imports(void **state)
{
    dkv_imports_fini(*state);
    return driver.n_open == 0 ? 0 : -1;
}

static struct dkv_link_loan legacy(uint64_t owner, uint32_t generation, uint8_t handle)
{
    struct dkv_link_loan loan = {.memory = DKV_LINK_CUDA_LEGACY,
                                 .offset = MIB,
                                 .bytes = MIB,
                                 .key = {.owner = owner, .generation = generation}};
    memset(loan.key.handle, handle, sizeof(loan.key.handle));
    return loan;
}

static struct dkv_imported *attach(struct dkv_imports *imports, struct dkv_link_loan loan)
{
    struct dkv_imported *imported = NULL;
    const void *base = NULL;
    struct dkv_error err = {0};
    if (dkv_imports_attach(imports, &loan, NULL, &imported, &base, &err) != DKV_OK)
        fail_msg("%s", err.text);
    assert_int_equal((uintptr_t)base, somewhere + loan.offset);
    return imported;
}

static uint32_t release(struct dkv_imports *imports)
{
    uint32_t number = 99;
    struct dkv_error err;
    assert_int_equal(dkv_imports_release(imports, &number, &err), DKV_OK);
    return number;
}

/* Mapped for writing, as a worker maps a region that answers go to. */
static void *map_region(uint64_t bytes)
{
    void *base = NULL;
    const int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_int_equal(ftruncate(fd, (off_t)bytes), 0);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
    assert_int_equal(dkv_memfd_map(fd, 0, bytes, true, &base, NULL), DKV_OK);
    close(fd);
    return base;
}

static struct dkv_link_loan host(uint64_t owner, uint64_t bytes)
{
    return (struct dkv_link_loan){
        .memory = DKV_LINK_HOST, .bytes = bytes, .writable = true, .key = {.owner = owner}};
}

static void what_is_pinned_is_unmapped_when_it_is_released(void **state)
{
    struct dkv_imports *imports = *state;
    const struct dkv_link_loan page = host(1, 4096);
    struct dkv_imported *imported = NULL;
    unsigned char pages;
    void *base = map_region(4096);
    assert_int_equal(dkv_imports_pin(imports, &page, base, &imported, NULL), DKV_OK);
    assert_non_null(imported);
    assert_int_equal(imports->pinned_bytes, 4096);
    assert_false(dkv_imports_detach(imports, imported, 7, 0)); /* when nothing runs */
    assert_int_equal(mincore(base, 4096, &pages), 0);
    assert_int_equal(release(imports), 7);
    assert_int_equal(driver.n_open, 0);
    assert_int_equal(imports->pinned_bytes, 0);
    assert_int_equal(mincore(base, 4096, &pages), -1);
    assert_int_equal(errno, ENOMEM);
}

/* Then answers are copied there. */
static void what_cannot_be_pinned_is_written_all_the_same(void **state)
{
    struct dkv_imports *imports = *state;
    const struct dkv_link_loan page = host(1, 4096), large = host(1, DKV_IMPORTS_PIN_MAX + 1);
    struct dkv_imported *imported = (void *)&driver;
    struct dkv_error err;
    assert_int_equal(dkv_imports_pin(imports, &large, &driver, &imported, &err), DKV_OK);
    assert_null(imported);
    assert_int_equal(driver.n_imports, 0);
    driver.next = DKV_E_INTERNAL;
    assert_int_equal(dkv_imports_pin(imports, &page, &driver, &imported, &err), DKV_OK);
    assert_null(imported);
    assert_int_equal(imports->pinned_bytes, 0);
    driver.next = DKV_E_DEVICE;
    assert_int_equal(dkv_imports_pin(imports, &page, &driver, &imported, &err), DKV_E_DEVICE);
}

/* Of a connection of some user; NULL: it was not pinned. */
static struct dkv_imported *pin_of_user(struct dkv_imports *imports, uint32_t user, uint64_t owner,
                                        uint64_t bytes)
{
    struct dkv_link_loan loan = host(owner, bytes);
    loan.key.user = user;
    struct dkv_imported *imported = NULL;
    void *base = map_region(bytes);
    assert_int_equal(dkv_imports_pin(imports, &loan, base, &imported, NULL), DKV_OK);
    if (imported == NULL)
        dkv_memfd_unmap(base, bytes);
    return imported;
}

/* Each connection is another user's. */
static struct dkv_imported *pin(struct dkv_imports *imports, uint64_t owner, uint64_t bytes)
{
    return pin_of_user(imports, (uint32_t)owner, owner, bytes);
}

static void one_user_leaves_something_whatever_connections_it_has(void **state)
{
    struct dkv_imports *imports = *state;
    const uint64_t eighth = DKV_IMPORTS_PIN_MAX / 8;
    struct dkv_imported *first = pin_of_user(imports, 7, 1, eighth);
    for (uint64_t owner = 2; owner <= 6; owner++)
        assert_non_null(pin_of_user(imports, 7, owner, eighth));
    assert_null(pin_of_user(imports, 7, 9, 4096));
    assert_non_null(pin_of_user(imports, 8, 10, eighth));
    assert_false(dkv_imports_detach(imports, first, 3, 0));
    assert_int_equal(release(imports), 3);
    assert_non_null(pin_of_user(imports, 7, 9, eighth));
}

static void one_connection_pins_no_more_than_its_share(void **state)
{
    struct dkv_imports *imports = *state;
    const uint64_t half = DKV_IMPORTS_PIN_SHARE / 2;
    struct dkv_imported *first = pin(imports, 1, half);
    assert_non_null(first);
    assert_non_null(pin(imports, 1, half));
    assert_null(pin(imports, 1, 4096));
    assert_non_null(pin(imports, 2, half)); /* others have their own */
    assert_false(dkv_imports_detach(imports, first, 7, 0));
    assert_null(pin(imports, 1, 4096)); /* it is still there */
    assert_int_equal(release(imports), 7);
    assert_non_null(pin(imports, 1, half));
    assert_non_null(pin(imports, 2, half));
    assert_null(pin(imports, 3, 4096)); /* of all together */
}

/* ---- one mapping per allocation ---- */

static void loans_of_one_handle_share_a_mapping(void **state)
{
    struct dkv_imports *imports = *state;
    struct dkv_imported *a = attach(imports, legacy(1, 0, 'h'));
    struct dkv_imported *b = attach(imports, legacy(1, 0, 'h'));
    assert_ptr_equal(a, b);
    assert_int_equal(driver.n_imports, 1);
    assert_true(dkv_imports_detach(imports, a, 7, 0));
    assert_int_equal(dkv_imports_due_ns(imports), UINT64_MAX);
    assert_false(dkv_imports_detach(imports, b, 8, 5));
    assert_int_equal(dkv_imports_due_ns(imports), 5 + DKV_IMPORTS_LEAVE_NS);
    assert_int_equal(driver.n_open, 1);
    assert_int_equal(release(imports), 8);
    assert_int_equal(driver.n_open, 0);
}

static void other_connections_generations_and_handles_do_not(void **state)
{
    struct dkv_imports *imports = *state;
    struct dkv_imported *all[4] = {
        attach(imports, legacy(1, 0, 'h')), attach(imports, legacy(2, 0, 'h')),
        attach(imports, legacy(1, 1, 'h')), attach(imports, legacy(1, 0, 'i'))};
    assert_int_equal(driver.n_imports, 4);
    for (unsigned i = 0; i < 4; i++)
        for (unsigned k = 0; k < i; k++)
            assert_ptr_not_equal(all[i], all[k]);
}

/* Its owner may have freed the memory, and the bytes may name another allocation now. */
static void what_leaves_is_not_handed_out_again(void **state)
{
    struct dkv_imports *imports = *state;
    struct dkv_imported *old = attach(imports, legacy(1, 0, 'h'));
    assert_false(dkv_imports_detach(imports, old, 2, 0));
    struct dkv_imported *new = attach(imports, legacy(1, 0, 'h'));
    assert_ptr_not_equal(old, new);
    assert_int_equal(driver.n_imports, 2);
    assert_int_equal(release(imports), 2);
    assert_int_equal(driver.n_open, 1);
}

static void mappings_leave_oldest_first(void **state)
{
    struct dkv_imports *imports = *state;
    struct dkv_imported *a = attach(imports, legacy(1, 0, 'a'));
    struct dkv_imported *b = attach(imports, legacy(1, 0, 'b'));
    assert_false(dkv_imports_detach(imports, b, 20, 100));
    assert_false(dkv_imports_detach(imports, a, 10, 200));
    assert_int_equal(dkv_imports_due_ns(imports), 100 + DKV_IMPORTS_LEAVE_NS);
    assert_int_equal(release(imports), 20);
    assert_int_equal(dkv_imports_due_ns(imports), 200 + DKV_IMPORTS_LEAVE_NS);
    assert_int_equal(release(imports), 10);
}

static void a_loan_lies_within_what_was_allocated(void **state)
{
    struct dkv_imports *imports = *state;
    static const struct {
        uint64_t offset, bytes;
        bool fits;
    } rows[] = {
        {0, 8 * MIB, true},           {8 * MIB - 1, 1, true}, {0, 8 * MIB + 1, false},
        {8 * MIB, 1, false},          {1, 8 * MIB, false},    {UINT64_MAX, 1, false},
        {8 * MIB, UINT64_MAX, false}, {1, UINT64_MAX, false},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct dkv_link_loan loan = legacy(1, 0, 'h');
        struct dkv_imported *imported = NULL;
        const void *base;
        struct dkv_error err = {0};
        loan.offset = rows[i].offset;
        loan.bytes = rows[i].bytes;
        const enum dkv_status status = dkv_imports_attach(imports, &loan, NULL, &imported, &base,
                                                          &err);
        assert_int_equal(status, rows[i].fits ? DKV_OK : DKV_E_INVALID);
        if (status == DKV_OK)
            assert_false(dkv_imports_detach(imports, imported, 3, 0));
        else
            assert_non_null(strstr(err.text, "8388608"));
        assert_int_equal(release(imports), rows[i].fits ? 3 : 0);
        assert_int_equal(driver.n_open, 0);
    }
}

/* ... also while others use the allocation, which stays theirs. */
static void a_refused_loan_takes_nothing_from_others(void **state)
{
    struct dkv_imports *imports = *state;
    struct dkv_link_loan bad = legacy(1, 0, 'h');
    struct dkv_imported *good = attach(imports, legacy(1, 0, 'h'));
    struct dkv_imported *none = NULL;
    const void *base;
    struct dkv_error err;
    bad.bytes = 9 * MIB;
    assert_int_equal(dkv_imports_attach(imports, &bad, NULL, &none, &base, &err), DKV_E_INVALID);
    assert_int_equal(dkv_imports_due_ns(imports), UINT64_MAX);
    assert_false(dkv_imports_detach(imports, good, 4, 0));
}

static void an_engine_without_import_says_so(void **state)
{
    struct dkv_imports imports;
    const struct dkv_link_loan loan = legacy(1, 0, 'h');
    struct dkv_imported *none = NULL;
    const void *base;
    struct dkv_error err;
    (void)state;
    dkv_imports_init(&imports, &dkv_engine_cpu, NULL);
    assert_int_equal(dkv_imports_attach(&imports, &loan, NULL, &none, &base, &err),
                     DKV_E_UNSUPPORTED);
    assert_non_null(strstr(err.text, "cpu"));
}

static void a_failed_import_leaves_nothing(void **state)
{
    struct dkv_imports *imports = *state;
    const struct dkv_link_loan loan = legacy(1, 0, 'h');
    struct dkv_imported *none = NULL;
    const void *base;
    struct dkv_error err;
    driver.next = DKV_E_NOMEM;
    assert_int_equal(dkv_imports_attach(imports, &loan, NULL, &none, &base, &err), DKV_E_NOMEM);
    driver.next = DKV_OK;
    assert_ptr_not_equal(attach(imports, loan), NULL);
    assert_int_equal(driver.n_imports, 1);
}

/* Every chunk loan has a mapping of its own, whatever its key says. */
static void chunks_are_not_shared(void **state)
{
    struct dkv_imports *imports = *state;
    const struct dkv_import_chunk chunks[2] = {{4 * MIB, 2 * MIB, -1}, {6 * MIB, 2 * MIB, -1}};
    const struct dkv_link_loan loan = {
        .memory = DKV_LINK_CUDA_VMM, .offset = 5 * MIB, .bytes = 3 * MIB, .n_chunks = 2};
    struct dkv_imported *a = NULL, *b = NULL;
    const void *base;
    struct dkv_error err;
    assert_int_equal(dkv_imports_attach(imports, &loan, chunks, &a, &base, &err), DKV_OK);
    assert_int_equal((uintptr_t)base, somewhere + MIB);
    assert_int_equal(dkv_imports_attach(imports, &loan, chunks, &b, &base, &err), DKV_OK);
    assert_int_equal(driver.n_open, 2);
    struct dkv_link_loan before = loan;
    before.offset = 3 * MIB;
    struct dkv_imported *none = NULL;
    assert_int_equal(dkv_imports_attach(imports, &before, chunks, &none, &base, &err),
                     DKV_E_INVALID);
}

/* ---- loans ---- */

static struct dkv_loan *chunk_loan(uint64_t offset, uint64_t bytes,
                                   const struct dkv_wire_chunk *chunks, uint16_t n,
                                   enum dkv_status expected)
{
    uint8_t records[8 * DKV_WIRE_CHUNK_BYTES];
    int fds[8];
    struct dkv_error err = {0};
    struct dkv_loan *loan = NULL;
    const int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    for (uint16_t i = 0; i < n; i++) {
        dkv_wire_put_chunk(records + (size_t)i * DKV_WIRE_CHUNK_BYTES, &chunks[i]);
        fds[i] = fd;
    }
    const struct dkv_wire_region wire = {.kind = DKV_WIRE_REGION_CUDA_VMM,
                                         .n_chunks = n,
                                         .offset = offset,
                                         .bytes = bytes,
                                         .chunks = records};
    assert_int_equal(dkv_loan_new_cuda(&wire, fds, 1, 0, &loan, &err), expected);
    close(fd);
    return loan;
}

/* Between chunks nothing is mapped: a view ends where the run of chunks that it begins in does. */
static void a_view_ends_with_its_run_of_chunks(void **state)
{
    const struct dkv_wire_chunk chunks[] = {
        {0, 2 * MIB}, {2 * MIB, 4 * MIB}, {8 * MIB, 2 * MIB}, {10 * MIB, 2 * MIB}};
    (void)state;
    struct dkv_loan *loan = chunk_loan(MIB, 10 * MIB, chunks, 4, DKV_OK);
    static const struct {
        uint64_t offset, end;
    } rows[] = {
        {0, 5 * MIB},     {MIB, 5 * MIB},      {5 * MIB - 1, 5 * MIB}, {5 * MIB, 0},
        {7 * MIB - 1, 0}, {7 * MIB, 10 * MIB}, {9 * MIB, 10 * MIB},    {10 * MIB - 1, 10 * MIB},
        {10 * MIB, 0},    {UINT64_MAX, 0},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
        assert_int_equal(dkv_loan_end(loan, rows[i].offset), rows[i].end);
    assert_int_equal(dkv_loan_fds(loan), 4);
    assert_int_equal(dkv_loan_kind_of(loan), DKV_LOAN_DEVICE);
    dkv_loan_free(loan);
    chunk_loan(6 * MIB, MIB, chunks, 4, DKV_E_INVALID);     /* where there is none */
    chunk_loan(6 * MIB, 3 * MIB, chunks, 3, DKV_E_INVALID); /* the first two are not reached */
    chunk_loan(MIB, 4 * MIB, chunks, 3, DKV_E_INVALID);     /* nor is the last */
    loan = chunk_loan(MIB, 4 * MIB, chunks, 2, DKV_OK);
    assert_int_equal(dkv_loan_end(loan, 0), 4 * MIB);
    dkv_loan_free(loan);
}

/* ---- parts ---- */

enum { HEADS = 1, ROWS = 4, DIM = 8, TOKENS = 32, KEEP = 5 };
#define TENSOR_BYTES (sizeof(float) * TOKENS * DIM)

static struct dkv_loan *gpu_loan(uint32_t device)
{
    struct dkv_loan *loan = NULL;
    struct dkv_error err;
    const struct dkv_wire_region wire = {
        .kind = DKV_WIRE_REGION_CUDA_LEGACY, .bytes = MIB, .handle = {1}};
    assert_int_equal(dkv_loan_new_cuda(&wire, NULL, 1, device, &loan, &err), DKV_OK);
    loan->number = DKV_LINK_LOANS + device;
    return loan;
}

static struct dkv_view view_of(const struct dkv_loan *loan, const void *host, uint64_t rows)
{
    struct dkv_view view = dkv_view_dense(loan != NULL ? dkv_loan_base(loan) : host, TENSOR_BYTES,
                                          DKV_FP32, rows, DIM);
    view.place = loan != NULL ? DKV_PLACE_DEVICE : DKV_PLACE_HOST;
    return view;
}

struct places {
    const struct dkv_loan *query, *key, *value; /* NULL: host memory */
};

static struct dkv_job *new_job(struct dkv_arena *arena, const struct places *places, uint32_t n,
                               struct dkv_loan *const *loans, unsigned n_loans)
{
    struct dkv_error err;
    struct dkv_job *job = dkv_job_new(arena);
    assert_int_equal(dkv_job_add_blocks(job, n, &err), DKV_OK);
    assert_int_equal(dkv_job_add_side(job, TENSOR_BYTES, &err), DKV_OK);
    for (uint32_t i = 0; i < n; i++)
        job->blocks[i] = (struct dkv_block){
            .q_heads = HEADS,
            .kv_heads = HEADS,
            .head_dim = DIM,
            .q_rows = ROWS,
            .n_tokens = TOKENS - i,
            .query = view_of(places[i].query, job->side, ROWS),
            .key = view_of(places[i].key, job->side, TOKENS),
            .value = view_of(places[i].value, job->side, TOKENS),
        };
    dkv_params_init(&job->request.params);
    dkv_params_set_text(&job->request.params, "keep_tokens", "5", &err);
    dkv_params_set_text(&job->request.params, "window", "4", &err);
    dkv_params_resolve(&job->request.params);
    job->request.want_scores = true;
    if (dkv_request_validate(&job->request, job->plans, &err) != DKV_OK)
        fail_msg("%s", err.text);
    job->loans = calloc(n_loans, sizeof(struct dkv_loan *));
    memcpy(job->loans, loans, n_loans * sizeof(struct dkv_loan *));
    job->n_loans = n_loans;
    return job;
}

static void blocks_go_where_their_memory_is(void **state)
{
    struct dkv_arena arena;
    struct dkv_error err = {0};
    struct dkv_loan *const loans[2] = {gpu_loan(0), gpu_loan(1)};
    const struct places places[5] = {
        {loans[1], loans[1], loans[1]}, /* all on 1 */
        {NULL, NULL, NULL},             /* anywhere */
        {NULL, loans[0], NULL},         /* keys on 0 */
        {NULL, NULL, loans[1]},         /* values on 1 */
        {NULL, NULL, NULL},
    };
    (void)state;
    assert_int_equal(dkv_arena_open(&arena, 64 * MIB, MIB, &err), DKV_OK);
    struct dkv_job *job = new_job(&arena, places, 5, loans, 2);
    assert_int_equal(dkv_job_prepare(job, MIB, &err), DKV_OK);
    assert_int_equal(job->entry.n_parts, 3);
    static const uint32_t devices[3] = {1, DKV_ADMISSION_ANY_DEVICE, 0};
    static const uint32_t n_blocks[3] = {2, 2, 1};
    static const uint64_t n_tokens[3] = {TOKENS + TOKENS - 3, TOKENS - 1 + TOKENS - 4, TOKENS - 2};
    for (unsigned p = 0; p < 3; p++) {
        assert_int_equal(job->parts[p].device, devices[p]);
        assert_int_equal(job->parts[p].n_blocks, n_blocks[p]);
        assert_int_equal(job->parts[p].n_tokens, n_tokens[p]);
        assert_int_equal(job->written[p].job->n_blocks, n_blocks[p]);
    }
    /* Answers lie in the order of the blocks, whatever part writes them. */
    const struct dkv_link_block *const order[5] = {
        &job->written[0].job->blocks[0], &job->written[1].job->blocks[0],
        &job->written[2].job->blocks[0], &job->written[0].job->blocks[1],
        &job->written[1].job->blocks[1]};
    uint64_t keep = dkv_arena_offset(&arena, job->keep);
    uint64_t scores = dkv_arena_offset(&arena, job->scores);
    for (unsigned i = 0; i < 5; i++) {
        assert_int_equal(order[i]->block.n_tokens, TOKENS - i);
        assert_int_equal(order[i]->keep.offset, keep);
        assert_int_equal(order[i]->scores.offset, scores);
        keep += KEEP * sizeof(int32_t);
        scores += (TOKENS - i) * sizeof(float);
    }
    assert_int_equal(order[2]->pointers[DKV_LINK_KEY].memory, DKV_LINK_LOANS + 0);
    assert_int_equal(order[3]->pointers[DKV_LINK_VALUE].memory, DKV_LINK_LOANS + 1);
    assert_int_equal(order[3]->pointers[DKV_LINK_KEY].memory, DKV_LINK_IN_ARENA);
    dkv_job_free(job);

    /* One device only: one part. */
    const struct places one[2] = {{loans[0], loans[0], loans[0]}, {NULL, loans[0], NULL}};
    job = new_job(&arena, one, 2, loans, 2);
    assert_int_equal(dkv_job_prepare(job, MIB, &err), DKV_OK);
    assert_int_equal(job->entry.n_parts, 1);
    assert_int_equal(job->parts[0].device, 0);
    dkv_job_free(job);

    /* A block of two GPUs is nobody's. */
    const struct places two[1] = {{NULL, loans[0], loans[1]}};
    job = new_job(&arena, two, 1, loans, 2);
    assert_int_equal(dkv_job_prepare(job, MIB, &err), DKV_E_INVALID);
    assert_non_null(strstr(err.text, "block 0"));
    dkv_job_free(job);
    dkv_arena_close(&arena); /* asserts that every range has come back */
    dkv_loan_free(loans[0]);
    dkv_loan_free(loans[1]);
}

int main(void)
{
#define IMPORTS(test) cmocka_unit_test_setup_teardown(test, open_imports, close_imports)
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(what_is_pinned_is_unmapped_when_it_is_released,
                                        open_imports, close_imports),
        cmocka_unit_test_setup_teardown(what_cannot_be_pinned_is_written_all_the_same, open_imports,
                                        close_imports),
        cmocka_unit_test_setup_teardown(one_connection_pins_no_more_than_its_share, open_imports,
                                        close_imports),
        cmocka_unit_test_setup_teardown(one_user_leaves_something_whatever_connections_it_has,
                                        open_imports, close_imports),
        IMPORTS(loans_of_one_handle_share_a_mapping),
        IMPORTS(other_connections_generations_and_handles_do_not),
        IMPORTS(what_leaves_is_not_handed_out_again),
        IMPORTS(mappings_leave_oldest_first),
        IMPORTS(a_loan_lies_within_what_was_allocated),
        IMPORTS(a_refused_loan_takes_nothing_from_others),
        IMPORTS(a_failed_import_leaves_nothing),
        IMPORTS(chunks_are_not_shared),
        cmocka_unit_test(an_engine_without_import_says_so),
        cmocka_unit_test(a_view_ends_with_its_run_of_chunks),
        cmocka_unit_test(blocks_go_where_their_memory_is),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
