/* Grouping by name: every tensor whose name ends in a role becomes a candidate (prefix, style,
 * role); sorting the candidates brings the members of each block together, in natural order, and
 * one pass over them forms the blocks. A file of a million tensors stays O(n log n). */
#include "client/cli/blocks.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SHOWN_NAME 96u
#define N_ROLES    3u

static const char *const role_names[N_ROLES] = {"query", "key", "value"};
static const char *const role_letters[N_ROLES] = {"q", "k", "v"};

struct candidate {
    const struct dkv_tensor *tensor;
    const char *prefix; /* start of the tensor's name, or what `{}` stands for */
    size_t length;
    unsigned style; /* 0: words, 1: letters */
    unsigned role;
};

struct candidates {
    struct candidate *items;
    size_t n;
    size_t cap;
};

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static size_t digits_at(const char *text, size_t at, size_t length)
{
    size_t n = 0;
    while (at + n < length && is_digit(text[at + n]))
        n++;
    return n;
}

static size_t zeros_at(const char *text, size_t at, size_t n_digits)
{
    size_t n = 0;
    while (n + 1 < n_digits && text[at + n] == '0')
        n++;
    return n;
}

int dkv_natural_order(const char *a, size_t a_length, const char *b, size_t b_length)
{
    size_t i = 0;
    size_t j = 0;
    while (i < a_length && j < b_length) {
        size_t n = digits_at(a, i, a_length);
        size_t m = digits_at(b, j, b_length);
        if (n == 0 || m == 0) {
            if (a[i] != b[j])
                return (unsigned char)a[i] < (unsigned char)b[j] ? -1 : 1;
            i++;
            j++;
            continue;
        }
        const size_t a_zeros = zeros_at(a, i, n);
        const size_t b_zeros = zeros_at(b, j, m);
        if (n - a_zeros != m - b_zeros)
            return n - a_zeros < m - b_zeros ? -1 : 1;
        const int order = memcmp(a + i + a_zeros, b + j + b_zeros, n - a_zeros);
        if (order != 0)
            return order;
        i += n;
        j += m;
    }
    if (i < a_length || j < b_length)
        return i < a_length ? 1 : -1;
    /* Equal by value, as 1 and 01 are: a total order needs one of them first. */
    if (a_length != b_length)
        return a_length < b_length ? -1 : 1;
    return memcmp(a, b, a_length);
}

static int candidate_order(const void *a, const void *b)
{
    const struct candidate *x = a;
    const struct candidate *y = b;
    const int order = dkv_natural_order(x->prefix, x->length, y->prefix, y->length);
    if (order != 0)
        return order;
    if (x->style != y->style)
        return x->style < y->style ? -1 : 1;
    return x->role < y->role ? -1 : x->role > y->role;
}

static enum dkv_status add_candidate(struct candidates *list, struct candidate item,
                                     struct dkv_error *err)
{
    if (list->n == list->cap) {
        const size_t cap = list->cap == 0 ? 64 : 2 * list->cap;
        struct candidate *bigger = reallocarray(list->items, cap, sizeof(item));
        if (bigger == NULL)
            return dkv_error_set(err, DKV_E_NOMEM, "no memory for %zu names", cap);
        list->items = bigger;
        list->cap = cap;
    }
    list->items[list->n++] = item;
    return DKV_OK;
}

/* ---- names without patterns ---- */

static bool is_separator(char c)
{
    return c == '.' || c == '/' || c == '_' || c == '-' || c == ':';
}

static bool ends_in(const char *name, size_t length, const char *suffix, size_t *prefix_out)
{
    const size_t n = strlen(suffix);
    if (length < n || memcmp(name + length - n, suffix, n) != 0)
        return false;
    *prefix_out = length - n;
    return true;
}

static bool classify(const struct dkv_tensor *tensor, struct candidate *out)
{
    const char *name = tensor->name;
    const size_t length = strlen(name);
    size_t prefix;
    for (unsigned role = 0; role < N_ROLES; role++) {
        if (ends_in(name, length, role_names[role], &prefix)) {
            *out = (struct candidate){tensor, name, prefix, 0, role};
            return true;
        }
        if (ends_in(name, length, role_letters[role], &prefix) &&
            (prefix == 0 || is_separator(name[prefix - 1]))) {
            *out = (struct candidate){tensor, name, prefix, 1, role};
            return true;
        }
    }
    return false;
}

static enum dkv_status collect_by_suffix(const struct dkv_tensor_file *file,
                                         struct candidates *list, struct dkv_error *err)
{
    struct candidate item;
    enum dkv_status status = DKV_OK;
    for (size_t i = 0; status == DKV_OK && i < file->index.n_tensors; i++)
        if (classify(&file->index.tensors[i], &item))
            status = add_candidate(list, item, err);
    return status;
}

/* ---- names by pattern ---- */

/* Finds what `{}` stands for; a pattern without it matches only itself, with empty text. */
static bool match_pattern(const char *pattern, const char *name, const char **text_out,
                          size_t *length_out)
{
    const char *braces = strstr(pattern, "{}");
    const size_t length = strlen(name);
    if (braces == NULL) {
        *text_out = name + length;
        *length_out = 0;
        return strcmp(pattern, name) == 0;
    }
    const size_t before = (size_t)(braces - pattern);
    const size_t after = strlen(braces + 2);
    if (length <= before + after || memcmp(name, pattern, before) != 0 ||
        memcmp(name + length - after, braces + 2, after) != 0)
        return false;
    *text_out = name + before;
    *length_out = length - before - after;
    return true;
}

static enum dkv_status collect_by_pattern(const struct dkv_tensor_file *file,
                                          const struct dkv_block_patterns *patterns,
                                          struct candidates *list, struct dkv_error *err)
{
    const char *const pattern[N_ROLES] = {patterns->query, patterns->key, patterns->value};
    enum dkv_status status = DKV_OK;
    for (size_t i = 0; i < file->index.n_tensors; i++) {
        const struct dkv_tensor *tensor = &file->index.tensors[i];
        for (unsigned role = 0; status == DKV_OK && role < N_ROLES; role++) {
            struct candidate item = {.tensor = tensor, .role = role};
            if (match_pattern(pattern[role], tensor->name, &item.prefix, &item.length))
                status = add_candidate(list, item, err);
        }
    }
    return status;
}

/* ---- forming blocks ---- */

static bool same_group(const struct candidate *a, const struct candidate *b)
{
    return a->style == b->style && a->length == b->length &&
           memcmp(a->prefix, b->prefix, a->length) == 0;
}

/* The prefix without the separator at its end. */
static size_t text_length(const struct candidate *c)
{
    const bool ends = c->length > 0 && is_separator(c->prefix[c->length - 1]);
    return c->length - (ends ? 1 : 0);
}

/* The block's name: that, or the file's name without its
 * extension where nothing is left. With several files, "FILE:prefix". */
static char *block_name(const struct dkv_tensor_file *file, const struct candidate *c,
                        bool several_files)
{
    const char *slash = strrchr(file->path, '/');
    const char *base = slash == NULL ? file->path : slash + 1;
    const char *dot = strrchr(base, '.');
    const size_t stem = dot == NULL || dot == base ? strlen(base) : (size_t)(dot - base);
    const size_t length = text_length(c);
    char raw[512];
    if (length == 0)
        snprintf(raw, sizeof(raw), "%.*s", (int)stem, base);
    else if (several_files)
        snprintf(raw, sizeof(raw), "%.*s:%.*s", (int)stem, base, (int)length, c->prefix);
    else
        snprintf(raw, sizeof(raw), "%.*s", (int)length, c->prefix);
    char *name = malloc(sizeof(raw));
    if (name != NULL)
        dkv_printable(raw, name, sizeof(raw));
    return name;
}

static enum dkv_status incomplete(const struct dkv_tensor_file *file, const struct candidate *group,
                                  const struct dkv_tensor *const members[N_ROLES],
                                  struct dkv_error *err)
{
    char shown[SHOWN_NAME];
    char *name = block_name(file, group, false);
    enum dkv_status status = DKV_E_NOMEM;
    for (unsigned role = 0; name != NULL && role < N_ROLES; role++)
        if (members[role] == NULL)
            status = dkv_error_set(err, DKV_E_INVALID, "block %s has no %s",
                                   dkv_printable(name, shown, sizeof(shown)), role_names[role]);
    free(name);
    return status;
}

static enum dkv_status form_block(const struct dkv_tensor_file *file, const struct candidate *group,
                                  size_t n, bool several_files, struct dkv_block_list *list,
                                  struct dkv_error *err)
{
    const struct dkv_tensor *members[N_ROLES] = {NULL};
    unsigned n_members = 0;
    for (size_t i = 0; i < n; i++) {
        n_members += members[group[i].role] == NULL;
        members[group[i].role] = group[i].tensor;
    }
    if (n_members == 1)
        return DKV_OK; /* some tensor whose name happens to end so */
    if (n_members == 2)
        return incomplete(file, group, members, err);
    struct dkv_named_block *block = &list->blocks[list->n_blocks];
    *block = (struct dkv_named_block){
        .name = block_name(file, group, several_files),
        .query = members[0],
        .key = members[1],
        .value = members[2],
        .file = file,
        .prefix = group->prefix,
        .prefix_length = group->length,
        .text_length = text_length(group),
    };
    if (block->name == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a name");
    list->n_blocks++;
    return DKV_OK;
}

static enum dkv_status form_blocks(const struct dkv_tensor_file *file,
                                   struct candidates *candidates, bool several_files,
                                   struct dkv_block_list *list, struct dkv_error *err)
{
    enum dkv_status status = DKV_OK;
    const size_t room = list->n_blocks + candidates->n / N_ROLES + 1;
    struct dkv_named_block *bigger = reallocarray(list->blocks, room, sizeof(*bigger));
    if (bigger == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for %zu blocks", room);
    list->blocks = bigger;
    if (candidates->n > 0)
        qsort(candidates->items, candidates->n, sizeof(candidates->items[0]), candidate_order);
    for (size_t i = 0, n; status == DKV_OK && i < candidates->n; i += n) {
        const struct candidate *group = &candidates->items[i];
        for (n = 1; i + n < candidates->n && same_group(group, group + n); n++)
            ;
        status = form_block(file, group, n, several_files, list, err);
    }
    return status;
}

static int by_name(const void *a, const void *b)
{
    const struct dkv_named_block *const *x = a;
    const struct dkv_named_block *const *y = b;
    const int order = strcmp((*x)->name, (*y)->name);
    return order != 0 ? order : (*x < *y ? -1 : *x > *y);
}

static bool add_number(struct dkv_named_block *block, size_t number)
{
    char *longer = NULL;
    if (asprintf(&longer, "%s#%zu", block->name, number) < 0)
        return false;
    free(block->name);
    block->name = longer;
    return true;
}

/* Blocks of the same name (dumps of the same name in two folders, "a.q" beside "a_q") become
 * NAME, NAME#2 and so on: names are keys in what is written. */
static enum dkv_status tell_apart(struct dkv_block_list *list, struct dkv_error *err)
{
    struct dkv_named_block **sorted = calloc(list->n_blocks, sizeof(*sorted));
    bool done = sorted != NULL;
    for (size_t i = 0; done && i < list->n_blocks; i++)
        sorted[i] = &list->blocks[i];
    if (done)
        qsort(sorted, list->n_blocks, sizeof(*sorted), by_name);
    for (size_t i = 0, n; done && i < list->n_blocks; i += n) {
        for (n = 1;
             done && i + n < list->n_blocks && strcmp(sorted[i]->name, sorted[i + n]->name) == 0;
             n++)
            done = add_number(sorted[i + n], n + 1);
    }
    free(sorted);
    return done ? DKV_OK : dkv_error_set(err, DKV_E_NOMEM, "no memory for names");
}

enum dkv_status dkv_blocks_find(const struct dkv_tensor_file *files, size_t n_files,
                                const struct dkv_block_patterns *patterns,
                                struct dkv_block_list *list_out, struct dkv_error *err)
{
    struct dkv_block_list list = {0};
    enum dkv_status status = DKV_OK;
    for (size_t i = 0; status == DKV_OK && i < n_files; i++) {
        struct candidates candidates = {0};
        status = patterns != NULL && patterns->query != NULL
                     ? collect_by_pattern(&files[i], patterns, &candidates, err)
                     : collect_by_suffix(&files[i], &candidates, err);
        if (status == DKV_OK)
            status = form_blocks(&files[i], &candidates, n_files > 1, &list, err);
        free(candidates.items);
    }
    if (status == DKV_OK && list.n_blocks == 0)
        status = patterns != NULL && patterns->query != NULL
                     ? dkv_error_set(err, DKV_E_INVALID,
                                     "no tensors match --query, --key and --value")
                     : dkv_error_set(err, DKV_E_INVALID,
                                     "no tensors PREFIXquery, PREFIXkey and PREFIXvalue (or q, k, "
                                     "v); name them with --query, --key and --value");
    if (status == DKV_OK)
        status = tell_apart(&list, err);
    if (status != DKV_OK) {
        dkv_block_list_fini(&list);
        return status;
    }
    *list_out = list;
    return DKV_OK;
}

void dkv_block_list_fini(struct dkv_block_list *list)
{
    for (size_t i = 0; i < list->n_blocks; i++)
        free(list->blocks[i].name);
    free(list->blocks);
    *list = (struct dkv_block_list){0};
}

/* ---- a block's shapes ---- */

struct shape4 {
    uint64_t batch;
    uint64_t heads;
    uint64_t tokens;
    uint64_t dim;
};

static enum dkv_status read_shape(const struct dkv_tensor *tensor, struct shape4 *out,
                                  struct dkv_error *err)
{
    char shown[SHOWN_NAME];
    const char *name = dkv_printable(tensor->name, shown, sizeof(shown));
    if (tensor->dtype == DKV_DTYPE_NONE)
        return dkv_error_set(err, DKV_E_UNSUPPORTED,
                             "%s: elements of type %s; BF16, F16, F32, F8_E4M3 and F8_E5M2 are "
                             "read",
                             name, tensor->type_name);
    if (tensor->n_dims != 3 && tensor->n_dims != 4)
        return dkv_error_set(err, DKV_E_INVALID,
                             "%s: %u dimensions; [batch,] heads, tokens, dim are expected", name,
                             tensor->n_dims);
    const uint64_t *last = tensor->shape + tensor->n_dims - 3;
    *out = (struct shape4){tensor->n_dims == 4 ? tensor->shape[0] : 1, last[0], last[1], last[2]};
    if (out->batch > UINT32_MAX || out->heads > UINT32_MAX || out->dim > UINT32_MAX)
        return dkv_error_set(err, DKV_E_INVALID, "%s: a dimension is above %" PRIu32, name,
                             UINT32_MAX);
    return DKV_OK;
}

static enum dkv_status same_dim(const char *what, uint64_t a, const char *a_name, uint64_t b,
                                const char *b_name, struct dkv_error *err)
{
    if (a == b)
        return DKV_OK;
    return dkv_error_set(err, DKV_E_INVALID,
                         "%s differs: %" PRIu64 " in the %s, %" PRIu64 " in the %s", what, a,
                         a_name, b, b_name);
}

enum dkv_status dkv_block_request(const struct dkv_named_block *block,
                                  struct dropkv_request *request_out, struct dkv_error *err)
{
    struct shape4 q = {0};
    struct shape4 k = {0};
    struct shape4 v = {0};
    enum dkv_status status = read_shape(block->query, &q, err);
    if (status == DKV_OK)
        status = read_shape(block->key, &k, err);
    if (status == DKV_OK)
        status = read_shape(block->value, &v, err);
    if (status == DKV_OK)
        status = same_dim("batch", q.batch, "query", k.batch, "key", err);
    if (status == DKV_OK)
        status = same_dim("batch", k.batch, "key", v.batch, "value", err);
    if (status == DKV_OK)
        status = same_dim("the number of KV heads", k.heads, "key", v.heads, "value", err);
    if (status == DKV_OK)
        status = same_dim("the number of tokens", k.tokens, "key", v.tokens, "value", err);
    if (status == DKV_OK)
        status = same_dim("head_dim", q.dim, "query", k.dim, "key", err);
    if (status != DKV_OK)
        return status;
    request_out->batch = (uint32_t)q.batch;
    request_out->q_heads = (uint32_t)q.heads;
    request_out->kv_heads = (uint32_t)k.heads;
    request_out->head_dim = (uint32_t)q.dim;
    request_out->v_dim = (uint32_t)v.dim;
    request_out->q_rows = q.tokens;
    request_out->n_tokens = k.tokens;
    request_out->query = (struct dropkv_tensor){.data = block->query->data,
                                                .dtype = (enum dropkv_dtype)block->query->dtype};
    request_out->key = (struct dropkv_tensor){.data = block->key->data,
                                              .dtype = (enum dropkv_dtype)block->key->dtype};
    request_out->value = (struct dropkv_tensor){.data = block->value->data,
                                                .dtype = (enum dropkv_dtype)block->value->dtype};
    return DKV_OK;
}
