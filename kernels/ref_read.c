/* How the reference reads memory: the address rule of a view, a page table's entries with their
 * checks, elements with their scales; a KV head's tokens end as two matrices of doubles. */
#include "kernels/ref_priv.h"

#include "kernels/convert.h"

#include <assert.h>
#include <math.h>

static bool is_key(const struct dkv_ref_job *job, const struct dkv_view *view)
{
    return view == &job->block->key;
}

/* Entry(i) of the address rule: the page that holds tokens i*page .. */
static enum dkv_status read_entry(const struct dkv_ref_job *job, const struct dkv_view *view,
                                  uint64_t i, int64_t *entry_out)
{
    const struct dkv_block *block = job->block;
    const bool own = !is_key(job, view) && block->v_table.entries != NULL;
    const struct dkv_page_table *table = own ? &block->v_table : &block->table;
    const uint64_t limit = is_key(job, view) ? job->plan->k_entry_limit : job->plan->v_entry_limit;
    const char *name = own ? "v_table" : "table";

    if (table->entries == NULL) {
        *entry_out = (int64_t)i;
        return DKV_OK;
    }
    int64_t stored;
    const char *at = (const char *)table->entries + i * table->entry_bytes;
    if (table->entry_bytes == sizeof(int32_t)) {
        int32_t narrow;
        memcpy(&narrow, at, sizeof(narrow));
        stored = narrow;
    } else {
        memcpy(&stored, at, sizeof(stored));
    }
    const int64_t entry = table->mask != 0 ? stored & table->mask : stored;
    if (table->has_null_entry && (stored == table->null_entry || entry == table->null_entry))
        return dkv_error_set(job->err, DKV_E_INVALID,
                             "%s: entry %llu is the null entry %lld, but holds valid tokens", name,
                             (unsigned long long)i, (long long)stored);
    if (entry < 0 || (uint64_t)entry >= limit)
        return dkv_error_set(job->err, DKV_E_INVALID, "%s: entry %llu is %lld, not in 0..%lld",
                             name, (unsigned long long)i, (long long)entry, (long long)limit - 1);
    *entry_out = entry;
    return DKV_OK;
}

/* Where the row of token t of head h starts. */
static enum dkv_status locate(const struct dkv_ref_job *job, const struct dkv_view *view,
                              uint64_t h, uint64_t t, const char **at_out)
{
    int64_t at = (int64_t)view->offset + (int64_t)h * view->head_stride;
    const uint64_t page = job->block->page_tokens;
    if (page == 0 || view == &job->block->query) {
        at += (int64_t)t * view->token_stride;
    } else {
        int64_t entry = 0;
        const enum dkv_status status = read_entry(job, view, t / page, &entry);
        if (status != DKV_OK)
            return status;
        at += entry * view->page_stride + (int64_t)(t % page) * view->token_stride;
    }
    *at_out = (const char *)view->base + at;
    return DKV_OK;
}

/* Reads one row as doubles; *finite_out tells whether all are, *bad_out the first that is not. */
enum dkv_status dkv_ref_read_row(const struct dkv_ref_job *job, const struct dkv_view *view,
                                 uint64_t h, uint64_t t, size_t dim, double *out, bool *finite_out,
                                 size_t *bad_out)
{
    const char *at;
    const enum dkv_status status = locate(job, view, h, t, &at);
    if (status != DKV_OK)
        return status;
    const size_t bytes = dkv_dtype_bytes(view->dtype);
    double scale = view->scale != 0 ? view->scale : 1.0;
    if (view->head_scales != NULL)
        scale = view->head_scales[h];
    *finite_out = true;
    for (size_t e = dim; e-- > 0;) {
        out[e] = scale * (double)dkv_element_to_f32(at + e * bytes, view->dtype);
        if (!isfinite(out[e])) {
            *finite_out = false;
            *bad_out = e;
        }
    }
    return DKV_OK;
}

enum dkv_status dkv_ref_not_finite(const struct dkv_ref_job *job, const char *tensor,
                                   const char *kind, uint64_t h, uint64_t t, size_t e)
{
    return dkv_error_set(job->err, DKV_E_INVALID,
                         "%s: head %llu, %s %llu, element %zu is not finite", tensor,
                         (unsigned long long)h, kind, (unsigned long long)t, e);
}

/* Loads KV head h; tokens that must not be looked at are marked invisible. */
enum dkv_status dkv_ref_load_head(struct dkv_ref_job *job, uint64_t h)
{
    const struct dkv_block *block = job->block;
    for (uint64_t t = 0; t < job->n; t++) {
        job->head.invisible[t] = t < block->valid_from;
        if (t < block->valid_from)
            continue;
        const struct {
            const struct dkv_view *view;
            const char *name;
            double *to;
            size_t dim;
        } sides[] = {{&block->key, "key", job->head.key + t * job->d, job->d},
                     {&block->value, "value", job->head.value + t * job->dv, job->dv}};
        for (size_t s = 0; s < 2; s++) {
            bool finite;
            size_t bad = 0;
            const enum dkv_status status = dkv_ref_read_row(job, sides[s].view, h, t, sides[s].dim,
                                                            sides[s].to, &finite, &bad);
            if (status != DKV_OK)
                return status;
            if (!finite && job->params->nonfinite == DKV_NONFINITE_ERROR)
                return dkv_ref_not_finite(job, sides[s].name, "token", h, t, bad);
            if (!finite)
                job->head.invisible[t] = true;
        }
    }
    return DKV_OK;
}
