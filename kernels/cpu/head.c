/* Shape, memory and preparation of a head; the passes are in head_pass.c and, for rules other than
 * DropKV's, head_rule.c; the states between them in head_merge.c and head_average.c, the centres of
 * keys and values in head_centre.c, the search for what went wrong in head_explain.c.
 */
#include "kernels/cpu/head.h"

#include "kernels/convert.h"

#include <math.h>
#include <string.h>

#define SPLIT_TOKENS_MIN  4096u
#define SPLITS_MAX        32u
#define SPLIT_BYTES_MAX   (1u << 20) /* of all splits' panels, where two fit at all */
#define NATIVE_OFFSET_MAX 1.0 /* keys no further from zero than they spread: no digit is lost */

static uint32_t whole_vectors(const struct dkv_cpu_ops *ops, uint32_t rows)
{
    return (rows + ops->lanes - 1) / ops->lanes * ops->lanes;
}

/* Rows per query head that a chunk has at most. */
static uint32_t chunk_rows(const struct dkv_plan *plan)
{
    return plan->group < DKV_ROWS_MAX ? DKV_ROWS_MAX / plan->group : 1;
}

void dkv_head_take_rows(struct dkv_head *head, uint32_t c)
{
    const struct dkv_plan *plan = head->item->plan;
    const uint32_t most = chunk_rows(plan), left = plan->window - c * most;
    head->chunk = c;
    head->row_first = c * most;
    head->window = left < most ? left : most;
    head->rows = plan->group * head->window;
    head->n_rows = whole_vectors(head->ops, head->rows);
}

void dkv_head_init(struct dkv_head *head, const struct dkv_cpu_ops *ops,
                   const struct dkv_item *item, uint32_t index)
{
    const struct dkv_block *block = item->block;
    const struct dkv_plan *plan = item->plan;
    const struct dkv_params *params = item->params;
    *head = (struct dkv_head){.ops = ops, .item = item, .index = index};
    head->rule = dkv_rule_of(params->policy);
    head->dim = block->head_dim;
    head->v_dim = head->rule->psi != DKV_PSI_ONE ? plan->v_dim : 0;
    head->n_chunks = (plan->window - 1) / chunk_rows(plan) + 1;
    dkv_head_take_rows(head, 0);
    head->n = plan->n_valid;
    head->mask = params->nonfinite == DKV_NONFINITE_MASK;
    head->round = DKV_FP32;
    if (params->p_round == DKV_P_ROUND_INPUT &&
        (block->query.dtype == DKV_BF16 || block->query.dtype == DKV_FP16))
        head->round = block->query.dtype;
    head->author_form = params->eps > 0 && head->round != DKV_FP32;
    head->averaged = params->reduce == DKV_REDUCE_EMA_FIRST;
    head->n_bars = whole_vectors(ops, plan->group);
    if (block->value_metric != NULL)
        head->metric_dim = whole_vectors(ops, head->v_dim);
    head->native_bf16 = ops->dot_bf16 != NULL && block->query.dtype == DKV_BF16 &&
                        block->key.dtype == DKV_BF16 && !head->mask;

    dkv_reader_init(&head->keys, &block->key, &block->table, block->page_tokens,
                    plan->k_entry_limit, index);
    dkv_reader_init(&head->values, &block->value,
                    block->v_table.entries != NULL ? &block->v_table : &block->table,
                    block->page_tokens, plan->v_entry_limit, index);

    const uint32_t panel_dim = head->v_dim > 0 ? head->v_dim : 1;
    uint64_t most = SPLIT_BYTES_MAX / (sizeof(float) * panel_dim * head->n_rows);
    most = most < 2 ? 2 : most > SPLITS_MAX ? SPLITS_MAX : most;
    uint64_t tokens = (head->n + most - 1) / most;
    tokens = tokens < SPLIT_TOKENS_MIN ? SPLIT_TOKENS_MIN : tokens;
    head->split_tokens = (tokens + DKV_TILE_KEYS - 1) / DKV_TILE_KEYS * DKV_TILE_KEYS;
    head->n_splits = (uint32_t)((head->n + head->split_tokens - 1) / head->split_tokens);
}

/* Deals out pieces of one allocation, or only counts them where base is NULL. */
struct dealer {
    uint8_t *base;
    size_t used;
};

static void *deal(struct dealer *dealer, size_t count, size_t size)
{
    void *piece = dealer->base != NULL ? dealer->base + dealer->used : NULL;
    dealer->used += (count * size + 63) & ~(size_t)63;
    return piece;
}

static void deal_head(struct dkv_head *head, struct dealer *dealer)
{
    const size_t rows = head->n_rows, dim = head->dim, v_dim = head->v_dim;
    if (head->native_bf16)
        head->query_pairs = deal(dealer, rows * dim / 2, sizeof(uint32_t));
    head->queries = deal(dealer, rows * dim, sizeof(float));
    head->key_shift = deal(dealer, dim, sizeof(float));
    head->value_shift = deal(dealer, v_dim, sizeof(float));
    head->scaled_shift = deal(dealer, v_dim, sizeof(float));
    head->outputs = deal(dealer, rows * v_dim, sizeof(float));
    head->out_norm = deal(dealer, rows, sizeof(float));
    head->ref = deal(dealer, rows, sizeof(float));
    head->inv = deal(dealer, rows, sizeof(float));
    head->best_key = deal(dealer, rows, sizeof(int32_t));
    head->best_p = deal(dealer, rows, sizeof(double));
    head->best_exact = deal(dealer, rows, sizeof(double));
    head->best_term = deal(dealer, rows, sizeof(float));
    head->row_weight = deal(dealer, rows, sizeof(float));
    if (head->averaged) {
        head->best_left = deal(dealer, rows, sizeof(double));
        head->bar_outputs = deal(dealer, (size_t)head->n_bars * v_dim, sizeof(float));
        head->bar_norm = deal(dealer, head->n_bars, sizeof(float));
        head->bar_key = deal(dealer, head->n_bars, sizeof(int32_t));
        head->bar_term = deal(dealer, head->n_bars, sizeof(float));
    }
    if (head->metric_dim > 0) {
        const size_t outputs = head->averaged ? head->n_bars : rows;
        head->metric = deal(dealer, (size_t)head->item->plan->group * v_dim * head->metric_dim,
                            sizeof(float));
        head->metric_output = deal(dealer, outputs * head->metric_dim, sizeof(float));
    }
    head->splits = deal(dealer, head->n_splits, sizeof(struct dkv_split_state));
    for (uint32_t s = 0; s < head->n_splits; s++) {
        struct dkv_split_state state = {
            .best = deal(dealer, rows, sizeof(float)),
            .best_key = deal(dealer, rows, sizeof(int32_t)),
            .ref = deal(dealer, rows, sizeof(float)),
            .sum = deal(dealer, rows, sizeof(double)),
            .panel = deal(dealer, rows * v_dim, sizeof(float)),
        };
        if (dealer->base != NULL)
            head->splits[s] = state;
    }
    head->raw = deal(dealer, head->n, sizeof(float));
    /* A row can see a single key only in a block of one window, or where tokens are masked. */
    if (head->mask || head->n == head->item->plan->window)
        head->flags = deal(dealer, head->n, sizeof(uint8_t));
}

size_t dkv_head_bytes(const struct dkv_head *head)
{
    struct dkv_head copy = *head;
    struct dealer dealer = {0};
    deal_head(&copy, &dealer);
    return dealer.used;
}

void dkv_head_place(struct dkv_head *head, void *memory)
{
    struct dealer dealer = {.base = memory};
    deal_head(head, &dealer);
}

static size_t deal_tile(struct dkv_tile *tile, const struct dkv_head *head, void *memory)
{
    struct dealer dealer = {.base = memory};
    const uint32_t dim = head->dim > head->v_dim ? head->dim : head->v_dim;
    tile->rows = deal(&dealer, (size_t)DKV_TILE_KEYS * dim, sizeof(float));
    tile->logits = deal(&dealer, (size_t)DKV_TILE_KEYS * head->n_rows, sizeof(float));
    tile->terms = deal(&dealer, (size_t)DKV_TILE_KEYS * head->n_rows, sizeof(float));
    tile->keep = deal(&dealer, head->n_rows, sizeof(float));
    tile->sum = deal(&dealer, head->n_rows, sizeof(float));
    tile->back = deal(&dealer, head->n_rows, sizeof(float));
    tile->back_key = deal(&dealer, head->n_rows, sizeof(int32_t));
    tile->row = deal(&dealer, head->v_dim, sizeof(float));
    tile->wide = deal(&dealer, dim, sizeof(double));
    if (head->metric_dim > 0)
        tile->metric_values = deal(&dealer, (size_t)DKV_TILE_KEYS * head->metric_dim,
                                   sizeof(float));
    if (head->averaged)
        tile->bars = deal(&dealer, 2 * (size_t)DKV_TILE_KEYS * head->n_bars, sizeof(float));
    return dealer.used;
}

size_t dkv_tile_bytes(const struct dkv_head *head)
{
    struct dkv_tile tile;
    return deal_tile(&tile, head, NULL);
}

void dkv_tile_place(struct dkv_tile *tile, const struct dkv_head *head, void *memory)
{
    deal_tile(tile, head, memory);
}

uint32_t dkv_head_query_head(const struct dkv_head *head, uint32_t row)
{
    return head->index * head->item->plan->group + row / head->window;
}

static const uint8_t *query_row(const struct dkv_head *head, uint32_t row)
{
    const struct dkv_block *block = head->item->block;
    const struct dkv_plan *plan = head->item->plan;
    const struct dkv_view *view = &block->query;
    const uint32_t q_head = dkv_head_query_head(head, row);
    const uint64_t q_row = plan->first_row + head->row_first + row % head->window;
    return (const uint8_t *)view->base + view->offset + (int64_t)q_head * view->head_stride +
           (int64_t)q_row * view->token_stride;
}

static double query_scale(const struct dkv_head *head, uint32_t row)
{
    const struct dkv_view *view = &head->item->block->query;
    const uint32_t q_head = dkv_head_query_head(head, row);
    if (view->dtype != DKV_F8_E4M3 && view->dtype != DKV_F8_E5M2)
        return 1.0;
    if (view->head_scales != NULL)
        return (double)view->head_scales[q_head];
    return view->scale != 0.0f ? (double)view->scale : 1.0;
}

/* Query elements, row by row into the panel's columns; exact but where rows have scales of their
 * own. Padding rows are zero. */
static bool pack_queries(struct dkv_head *head)
{
    const enum dkv_dtype dtype = head->item->block->query.dtype;
    const size_t size = dkv_dtype_bytes(dtype), n_rows = head->n_rows;
    memset(head->queries, 0, sizeof(float) * n_rows * head->dim);
    for (uint32_t r = 0; r < head->rows; r++) {
        const uint8_t *row = query_row(head, r);
        const double scale = query_scale(head, r);
        for (uint32_t d = 0; d < head->dim; d++) {
            const float x = dkv_element_to_f32(row + d * size, dtype);
            if (!isfinite(x))
                return false;
            head->queries[d * n_rows + r] = (float)((double)x * scale);
        }
    }
    return true;
}

/* Pairs of adjacent elements of bf16 rows as they are. */
static bool pack_query_pairs(struct dkv_head *head)
{
    const size_t n_rows = head->n_rows;
    memset(head->query_pairs, 0, sizeof(uint32_t) * n_rows * head->dim / 2);
    for (uint32_t r = 0; r < head->rows; r++) {
        const uint8_t *row = query_row(head, r);
        for (uint32_t d = 0; d < head->dim; d += 2) {
            uint16_t low, high;
            memcpy(&low, row + 2 * d, 2);
            memcpy(&high, row + 2 * d + 2, 2);
            if (!isfinite(dkv_bf16_to_f32(low)) || !isfinite(dkv_bf16_to_f32(high)))
                return false;
            head->query_pairs[d / 2 * n_rows + r] = (uint32_t)high << 16 | low;
        }
    }
    return true;
}

/* What dot products are multiplied by on the way to logits. */
static double logit_factor(const struct dkv_head *head)
{
    const double cap = head->item->params->logit_softcap;
    const double unit = cap > 0 ? 1.0 / cap : DKV_LOG2E; /* softcap multiplies by both later */
    return head->item->plan->scale * unit * (double)head->keys.scale;
}

bool dkv_head_logit(const struct dkv_head *head, uint32_t row, uint64_t token, double *logit_out)
{
    const enum dkv_dtype q_dtype = head->item->block->query.dtype;
    const size_t q_size = dkv_dtype_bytes(q_dtype), k_size = dkv_dtype_bytes(head->keys.dtype);
    const double cap = head->item->params->logit_softcap;
    const uint8_t *query = query_row(head, row);
    const void *key;
    if (!dkv_reader_rows(&head->keys, head->item->block->valid_from + token, 1, &key))
        return false;
    double sum = 0.0;
    for (uint32_t d = 0; d < head->dim; d++) {
        const float q = dkv_element_to_f32(query + d * q_size, q_dtype);
        const float k = dkv_element_to_f32((const uint8_t *)key + d * k_size, head->keys.dtype);
        sum += (double)q * ((double)k + (double)head->key_shift[d]);
    }
    sum *= logit_factor(head) * query_scale(head, row);
    *logit_out = cap > 0 ? cap * DKV_LOG2E * tanh(sum) : sum;
    return true;
}

/* Tokens whose terms are sums of |a - v| do not care where the values' origin is; those of a . v
 * do, and so does an output that leaves tokens out. */
static bool centre_values(struct dkv_head *head, const struct dkv_tile *tile)
{
    double offset;
    if (head->v_dim > 0 && !head->averaged && head->rule->psi != DKV_PSI_PROJ)
        return dkv_head_centre(head, &head->values, head->v_dim, tile->rows, head->value_shift,
                               &offset);
    memset(head->value_shift, 0, sizeof(float) * head->v_dim);
    return true;
}

/* What a row counts in the reduction over rows. */
static void weigh_rows(struct dkv_head *head)
{
    const struct dkv_params *params = head->item->params;
    const uint32_t all = head->item->plan->window;
    memset(head->row_weight, 0, sizeof(float) * head->n_rows);
    for (uint32_t r = 0; r < head->rows; r++) {
        const uint32_t t = head->row_first + r % head->window;
        double weight = 1.0;
        if (params->reduce == DKV_REDUCE_MEAN)
            weight = 1.0 / all;
        else if (params->reduce == DKV_REDUCE_EMA || params->reduce == DKV_REDUCE_EMA_FIRST)
            weight = pow(1.0 - params->ema_alpha, all - 1 - t) * (t > 0 ? params->ema_alpha : 1.0);
        head->row_weight[r] = (float)weight;
    }
}

unsigned dkv_head_begin(struct dkv_head *head, const struct dkv_tile *tile)
{
    const double cap = head->item->params->logit_softcap;
    double offset;
    if (!centre_values(head, tile) ||
        !dkv_head_centre(head, &head->keys, head->dim, tile->rows, head->key_shift, &offset))
        return DKV_FAULT_TABLE;
    /* bf16 products cannot have the centre taken out: not where it would cost digits. */
    head->native_bf16 = head->native_bf16 && !(offset > NATIVE_OFFSET_MAX);
    /* A common key offset moves all logits of a row alike, which only softmax forgives. */
    if (cap > 0 || head->native_bf16)
        memset(head->key_shift, 0, sizeof(float) * head->dim);

    weigh_rows(head);
    if (head->metric_dim > 0 && !dkv_head_take_metric(head))
        return DKV_FAULT_EXTRA;
    head->query_factor = (float)logit_factor(head);
    const bool finite = head->native_bf16 ? pack_query_pairs(head) : pack_queries(head);
    if (head->flags != NULL && head->chunk == 0)
        memset(head->flags, 0, head->n);
    return finite ? DKV_FAULT_NONE : DKV_FAULT_NONFINITE;
}

/* How often a rule's term counts the unit of values. */
static int value_degree(const struct dkv_rule *rule)
{
    switch (rule->psi) {
    case DKV_PSI_ONE: return 0;
    case DKV_PSI_DIST: return 1;
    case DKV_PSI_DIST2:
    case DKV_PSI_PROJ: break;
    }
    return 2;
}

double dkv_head_score_factor(const struct dkv_head *head)
{
    const enum dkv_gqa gqa = head->item->params->gqa;
    const double unit = (double)head->values.scale / (double)head->value_factor;
    double factor = head->rule->phi == DKV_PHI_ODDS2 ? (double)head->gain * (double)head->gain
                                                     : (double)head->gain;
    factor = 1.0 / factor;
    for (int i = 0; i < value_degree(head->rule); i++)
        factor *= unit;
    return gqa == DKV_GQA_MEAN || gqa == DKV_GQA_LAYER ? factor / head->item->plan->group : factor;
}

void dkv_head_spread(const struct dkv_head *head, double *entropy_out, double *variance_out)
{
    *entropy_out = *variance_out = 0.0;
    for (uint32_t s = 0; s < head->n_splits; s++) {
        *entropy_out += head->splits[s].entropy;
        *variance_out += head->splits[s].variance;
    }
}

void dkv_head_scores(const struct dkv_head *head, double *scores_out)
{
    const double factor = dkv_head_score_factor(head);
    for (uint64_t j = 0; j < head->n; j++)
        scores_out[j] = (double)head->raw[j] * factor;
}

void dkv_head_finish(const struct dkv_head *head)
{
    const struct dkv_item *item = head->item;
    if (item->scores_out == NULL)
        return;
    float *scores = item->scores_out + (uint64_t)head->index * item->block->n_tokens;
    memset(scores, 0, sizeof(float) * item->block->valid_from);
    scores += item->block->valid_from;

    const double factor = dkv_head_score_factor(head);
    for (uint64_t j = 0; j < head->n; j++)
        scores[j] = (float)((double)head->raw[j] * factor);
}
