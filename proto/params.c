/* Setting, resolving and judging parameters: everything here walks the table of params_table.c. */
#include "proto/params_table.h"

#include "proto/policy.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

static void *field_of(struct dkv_params *params, const struct dkv_param_row *row)
{
    return (char *)params + row->offset;
}

static const void *const_field_of(const struct dkv_params *params, const struct dkv_param_row *row)
{
    return (const char *)params + row->offset;
}

static size_t n_words(const struct dkv_param_row *row)
{
    size_t n = 0;
    while (row->words[n] != NULL)
        n++;
    return n;
}

/* ---- The table, from outside ---------------------------------------------------------------- */

const struct dkv_param_info *dkv_param_info(enum dkv_param_id id)
{
    assert((unsigned)id < DKV_PARAM_COUNT);
    return &dkv_param_rows[id].info;
}

bool dkv_param_find(const char *name, enum dkv_param_id *id_out)
{
    for (size_t i = 0; i < DKV_PARAM_COUNT; i++)
        if (strcmp(dkv_param_rows[i].info.name, name) == 0) {
            *id_out = (enum dkv_param_id)i;
            return true;
        }
    return false;
}

static const char *word_or_unknown(enum dkv_param_id id, unsigned value)
{
    return value < n_words(&dkv_param_rows[id]) ? dkv_param_rows[id].words[value] : "unknown";
}

const char *dkv_profile_name(enum dkv_profile profile)
{
    return word_or_unknown(DKV_PARAM_PROFILE, profile);
}

const char *dkv_policy_name(enum dkv_policy policy)
{
    return word_or_unknown(DKV_PARAM_POLICY, policy);
}

const char *dkv_pool_name(enum dkv_pool pool)
{
    return word_or_unknown(DKV_PARAM_POOL, pool);
}

/* ---- Setting -------------------------------------------------------------------------------- */

void dkv_params_init(struct dkv_params *params)
{
    memset(params, 0, sizeof(*params));
}

static enum dkv_status wrong_type(const struct dkv_param_row *row, struct dkv_error *err)
{
    static const char *const wanted[] = {"one of", "a whole number", "a number", "a text of",
                                         "a text of"};
    return dkv_error_set(err, DKV_E_INVALID, "%s: wrong type, needs %s %s", row->info.name,
                         wanted[row->field], row->info.range);
}

static enum dkv_status set_word(const struct dkv_param_row *row, unsigned *field, const char *word,
                                struct dkv_error *err)
{
    char shown[DKV_SHOWN_NAME_BYTES];

    for (unsigned i = 0; row->words[i] != NULL; i++)
        if (strcmp(row->words[i], word) == 0) {
            *field = i;
            return DKV_OK;
        }
    return dkv_error_set(err, DKV_E_INVALID, "%s: '%s' is not one of %s", row->info.name,
                         dkv_show_name(shown, word), row->info.range);
}

/* Longest text of a field. */
static size_t text_max(const struct dkv_param_row *row)
{
    return row->field == DKV_FIELD_LIST ? DKV_LIST_TEXT_MAX : DKV_STREAM_NAME_MAX;
}

static enum dkv_status set_field(struct dkv_params *params, const struct dkv_param_row *row,
                                 const struct dkv_value *value, struct dkv_error *err)
{
    void *field = field_of(params, row);

    switch (row->field) {
    case DKV_FIELD_WORD:
        if (value->kind == DKV_VALUE_BOOL && strcmp(row->words[0], "false") == 0) {
            *(unsigned *)field = value->boolean;
            return DKV_OK;
        }
        if (value->kind != DKV_VALUE_STRING)
            return wrong_type(row, err);
        return set_word(row, field, value->string, err);
    case DKV_FIELD_INT:
        if (value->kind != DKV_VALUE_INT)
            return wrong_type(row, err);
        *(int64_t *)field = value->integer;
        return DKV_OK;
    case DKV_FIELD_REAL:
        if (value->kind != DKV_VALUE_REAL && value->kind != DKV_VALUE_INT)
            return wrong_type(row, err);
        *(double *)field = value->kind == DKV_VALUE_INT ? (double)value->integer : value->real;
        return DKV_OK;
    case DKV_FIELD_TEXT:
    case DKV_FIELD_LIST: break;
    }
    if (value->kind != DKV_VALUE_STRING)
        return wrong_type(row, err);
    if (strlen(value->string) > text_max(row))
        return dkv_error_set(err, DKV_E_INVALID, "%s: %zu bytes long, needs %s", row->info.name,
                             strlen(value->string), row->info.range);
    strcpy(field, value->string);
    return DKV_OK;
}

/* Edits that turn one word into the other; for names of a few letters, so the table is small. */
static unsigned edit_distance(const char *a, const char *b)
{
    unsigned line[DKV_SHOWN_NAME_BYTES];
    const size_t n = strlen(b);

    assert(n < DKV_SHOWN_NAME_BYTES);
    for (unsigned j = 0; j <= n; j++)
        line[j] = j;
    for (unsigned i = 1; a[i - 1] != '\0'; i++) {
        unsigned diagonal = line[0];
        line[0] = i;
        for (size_t j = 1; j <= n; j++) {
            const unsigned replaced = diagonal + (a[i - 1] != b[j - 1]);
            const unsigned moved = (line[j - 1] < line[j] ? line[j - 1] : line[j]) + 1;
            diagonal = line[j];
            line[j] = replaced < moved ? replaced : moved;
        }
    }
    return line[n];
}

static enum dkv_status unknown_name(const char *name, struct dkv_error *err)
{
    char shown[DKV_SHOWN_NAME_BYTES];
    const struct dkv_param_row *nearest = &dkv_param_rows[0];
    unsigned least = UINT32_MAX;

    dkv_show_name(shown, name);
    for (size_t i = 0; i < DKV_PARAM_COUNT; i++) {
        const unsigned distance = edit_distance(shown, dkv_param_rows[i].info.name);
        if (distance < least) {
            least = distance;
            nearest = &dkv_param_rows[i];
        }
    }
    return dkv_error_set(err, DKV_E_INVALID, "unknown parameter '%s', the nearest one is %s", shown,
                         nearest->info.name);
}

static enum dkv_status find_unset(const struct dkv_params *params, const char *name,
                                  enum dkv_param_id *id_out, struct dkv_error *err)
{
    if (!dkv_param_find(name, id_out))
        return unknown_name(name, err);
    if (dkv_params_has(params, *id_out))
        return dkv_error_set(err, DKV_E_INVALID, "%s: given twice",
                             dkv_param_rows[*id_out].info.name);
    return DKV_OK;
}

enum dkv_status dkv_params_set(struct dkv_params *params, const char *name, struct dkv_value value,
                               struct dkv_error *err)
{
    enum dkv_param_id id;
    enum dkv_status status = find_unset(params, name, &id, err);

    if (status == DKV_OK)
        status = set_field(params, &dkv_param_rows[id], &value, err);
    if (status == DKV_OK)
        params->set |= UINT64_C(1) << id;
    return status;
}

/* strtoll() and strtod() skip blanks, and stop where they like; a value is the whole text. */
static bool text_to_int(const char *text, int64_t *out)
{
    char *end;
    errno = 0;
    *out = strtoll(text, &end, 10);
    return errno == 0 && *end == '\0' && strchr("-0123456789", text[0]) != NULL && end != text;
}

static bool text_to_real(const char *text, double *out)
{
    char *end;
    *out = strtod(text, &end);
    return *end == '\0' && strchr("-.0123456789", text[0]) != NULL && end != text;
}

enum dkv_status dkv_params_set_text(struct dkv_params *params, const char *name, const char *text,
                                    struct dkv_error *err)
{
    struct dkv_value value = {.kind = DKV_VALUE_STRING, .string = text};
    enum dkv_param_id id;
    const enum dkv_status status = find_unset(params, name, &id, err);

    if (status != DKV_OK)
        return status;
    value.kind = dkv_param_rows[id].info.kind;
    if ((value.kind == DKV_VALUE_INT && !text_to_int(text, &value.integer)) ||
        (value.kind == DKV_VALUE_REAL && !text_to_real(text, &value.real)))
        return wrong_type(&dkv_param_rows[id], err);
    return dkv_params_set(params, name, value, err);
}

struct dkv_value dkv_params_get(const struct dkv_params *params, enum dkv_param_id id)
{
    const struct dkv_param_row *row = &dkv_param_rows[id];
    const void *field = const_field_of(params, row);
    struct dkv_value value = {.kind = row->info.kind};

    switch (row->field) {
    case DKV_FIELD_WORD: value.string = word_or_unknown(id, *(const unsigned *)field); break;
    case DKV_FIELD_INT: value.integer = *(const int64_t *)field; break;
    case DKV_FIELD_REAL: value.real = *(const double *)field; break;
    case DKV_FIELD_TEXT:
    case DKV_FIELD_LIST: value.string = field; break;
    }
    return value;
}

/* ---- Profiles and defaults ------------------------------------------------------------------ */

#define DEFAULT_KEEP_RATIO 0.1

/* The policy's defaults under the profile, and nothing where one of them is no such word: the gate
 * refuses that. */
static void fill_from_profile(struct dkv_params *filled, const struct dkv_params *params)
{
    const struct dkv_policy_info *policy = dkv_policy_info(params->policy);

    if (policy == NULL || (unsigned)params->profile > DKV_PROFILE_KVPRESS)
        return;
    const struct dkv_policy_defaults *defaults = &policy->profiles[params->profile];
    filled->window = defaults->window;
    filled->pool = defaults->pool;
    filled->kernel = defaults->kernel;
    filled->pool_scope = defaults->pool_scope;
    filled->eps = defaults->eps;
    filled->p_round = defaults->p_round;
    filled->gqa = defaults->gqa;
    filled->reduce = defaults->reduce;
    filled->sinks = defaults->sinks;
    filled->recent = defaults->recent;
    filled->heads = defaults->heads;
    filled->counts_protected = !defaults->on_top;
    if (defaults->granularity > 0)
        filled->granularity = defaults->granularity;
}

/* All fields but the lists. */
#define FIXED_BYTES offsetof(struct dkv_params, per_layer)

void dkv_params_copy(struct dkv_params *to, const struct dkv_params *from)
{
    memcpy(to, from, FIXED_BYTES);
    memcpy(to->per_layer, from->per_layer, strlen(from->per_layer) + 1);
    memcpy(to->per_head, from->per_head, strlen(from->per_head) + 1);
}

static void fill_from_defaults(struct dkv_params *params)
{
    memset(params, 0, FIXED_BYTES);
    params->keep_ratio = DEFAULT_KEEP_RATIO;
    params->ema_alpha = 0.3;
    params->gamma = 200;
    params->alpha = 0.2;
    params->beta = 20;
    params->tau1 = params->tau2 = 1;
    params->min_keep = 1;
    params->granularity = 1;
}

/* Lists are there or empty, and stay where they are. */
void dkv_params_resolve(struct dkv_params *params)
{
    static const size_t bytes[] = {sizeof(unsigned), sizeof(int64_t), sizeof(double),
                                   DKV_STREAM_NAME_MAX + 1};
    struct dkv_params given;

    memcpy(&given, params, FIXED_BYTES);
    fill_from_defaults(params);
    fill_from_profile(params, &given);
    params->set = given.set;
    for (size_t i = 0; i < DKV_PARAM_COUNT; i++) {
        const struct dkv_param_row *row = &dkv_param_rows[i];
        if (row->field != DKV_FIELD_LIST && dkv_params_has(&given, (enum dkv_param_id)i))
            memcpy(field_of(params, row), const_field_of(&given, row), bytes[row->field]);
    }
    if (params->recent == DKV_RECENT_WINDOW)
        params->recent = params->window;
}

/* ---- Ranges --------------------------------------------------------------------------------- */

static enum dkv_status out_of_range(const struct dkv_param_row *row, const char *shown,
                                    struct dkv_error *err)
{
    return dkv_error_set(err, DKV_E_INVALID, "%s: %s is outside %s", row->info.name, shown,
                         row->info.range);
}

static enum dkv_status check_int(const struct dkv_param_row *row, int64_t value,
                                 struct dkv_error *err)
{
    if (value >= (int64_t)row->lo && value <= (int64_t)row->hi)
        return DKV_OK;
    return dkv_error_set(err, DKV_E_INVALID, "%s: %lld is outside %s", row->info.name,
                         (long long)value, row->info.range);
}

static enum dkv_status check_real(const struct dkv_param_row *row, double value,
                                  struct dkv_error *err)
{
    if ((value >= row->lo && value <= row->hi) || (row->or_zero && value == 0))
        return DKV_OK; /* NaN compares false with everything */
    return dkv_error_set(err, DKV_E_INVALID, "%s: %g is outside %s", row->info.name, value,
                         row->info.range);
}

static enum dkv_status check_text(const struct dkv_param_row *row, const char *text,
                                  struct dkv_error *err)
{
    static const char allowed[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
                                  "0123456789._:-";
    char shown[DKV_SHOWN_NAME_BYTES];
    const size_t length = strnlen(text, DKV_STREAM_NAME_MAX + 1);

    if (length >= 1 && length <= DKV_STREAM_NAME_MAX && strspn(text, allowed) == length)
        return DKV_OK;
    return dkv_error_set(err, DKV_E_INVALID, "%s: '%s' is not made of %s", row->info.name,
                         length <= DKV_STREAM_NAME_MAX ? dkv_show_name(shown, text) : "...",
                         row->info.range);
}

bool dkv_params_list(const char *text, uint32_t *numbers_out, size_t max, size_t *count_out)
{
    size_t count = 0;

    for (const char *at = text; *at != '\0'; count++) {
        uint64_t number = 0;
        const char *digits = at;
        for (; *at >= '0' && *at <= '9' && number <= INT32_MAX; at++)
            number = 10 * number + (uint64_t)(*at - '0');
        if (at == digits || number > INT32_MAX || (*at != ',' && *at != '\0') ||
            (*at == ',' && at[1] == '\0'))
            return false;
        if (count < max)
            numbers_out[count] = (uint32_t)number;
        at += *at == ',';
    }
    *count_out = count;
    return true;
}

static enum dkv_status check_field(const struct dkv_params *params, const struct dkv_param_row *row,
                                   struct dkv_error *err)
{
    const void *field = const_field_of(params, row);
    size_t count;

    switch (row->field) {
    case DKV_FIELD_WORD:
        if (*(const unsigned *)field >= n_words(row))
            return out_of_range(row, "an unknown value", err);
        return DKV_OK;
    case DKV_FIELD_INT: return check_int(row, *(const int64_t *)field, err);
    case DKV_FIELD_REAL: return check_real(row, *(const double *)field, err);
    case DKV_FIELD_LIST:
        if (dkv_params_list(field, NULL, 0, &count))
            return DKV_OK;
        return dkv_error_set(err, DKV_E_INVALID, "%s: not %s", row->info.name, row->info.range);
    case DKV_FIELD_TEXT: break;
    }
    return check_text(row, field, err);
}

/* Fields that have no value, or one outside the range, unless the caller gave one. */
static bool optional(enum dkv_param_id id)
{
    return id == DKV_PARAM_TOTAL_TOKENS || id == DKV_PARAM_MAX_KEEP_TOKENS ||
           id == DKV_PARAM_SCALE || id == DKV_PARAM_STREAM || id == DKV_PARAM_WINDOW ||
           id == DKV_PARAM_RECENT || id == DKV_PARAM_N_LAYERS || id == DKV_PARAM_TRACEPARENT;
}

static enum dkv_status check_one_budget(const struct dkv_params *params, struct dkv_error *err)
{
    const struct dkv_param_row *first = NULL;

    for (size_t i = DKV_PARAM_KEEP_RATIO; i <= DKV_PARAM_KEEP_TOKENS; i++) {
        if (!dkv_params_has(params, (enum dkv_param_id)i))
            continue;
        if (first != NULL)
            return dkv_error_set(err, DKV_E_INVALID,
                                 "%s and %s: both given, at most one budget is allowed",
                                 first->info.name, dkv_param_rows[i].info.name);
        first = &dkv_param_rows[i];
    }
    return DKV_OK;
}

/* Parameters that the policy has no meaning for, where a silent one would give a wrong answer. */
static enum dkv_status check_policy(const struct dkv_params *params, struct dkv_error *err)
{
    const struct dkv_policy_info *policy = dkv_policy_info(params->policy);
    const char *reduce = word_or_unknown(DKV_PARAM_REDUCE, params->reduce);

    if (!(policy->reduces >> params->reduce & 1u))
        return dkv_error_set(err, DKV_E_INVALID, "reduce: %s has no form '%s'", policy->name,
                             reduce);
    if (params->eps > 0 && params->policy != DKV_POLICY_DROPKV)
        return dkv_error_set(err, DKV_E_INVALID, "eps: %g is for policy dropkv, %s needs 0",
                             params->eps, policy->name);
    if (params->p_round == DKV_P_ROUND_INPUT && params->policy == DKV_POLICY_RESTKV)
        return dkv_error_set(err, DKV_E_INVALID, "p_round: input is not possible with restkv");
    if (params->policy == DKV_POLICY_KVZIP && params->gqa != DKV_GQA_MAX)
        return dkv_error_set(err, DKV_E_INVALID, "gqa: kvzip takes max alone");
    if (params->policy == DKV_POLICY_H2O && params->gqa == DKV_GQA_MAX)
        return dkv_error_set(err, DKV_E_INVALID, "gqa: max is not possible with h2o");
    if (params->gqa == DKV_GQA_LAYER && params->heads != DKV_HEADS_UNIFORM)
        return dkv_error_set(err, DKV_E_INVALID,
                             "heads: one set for the layer (gqa=layer) needs uniform");
    if (params->layers == DKV_LAYERS_CAKE && params->policy != DKV_POLICY_CAKE &&
        params->policy != DKV_POLICY_SNAPKV)
        return dkv_error_set(err, DKV_E_INVALID, "layers: cake needs policy cake or snapkv, not %s",
                             policy->name);
    return DKV_OK;
}

enum dkv_status dkv_params_check(const struct dkv_params *params, struct dkv_error *err)
{
    enum dkv_status status = check_one_budget(params, err);

    for (size_t i = 0; i < DKV_PARAM_COUNT && status == DKV_OK; i++)
        if (dkv_params_has(params, (enum dkv_param_id)i) || !optional((enum dkv_param_id)i))
            status = check_field(params, &dkv_param_rows[i], err);
    if (status == DKV_OK)
        status = check_policy(params, err);
    if (status == DKV_OK && params->kernel % 2 == 0)
        return dkv_error_set(err, DKV_E_INVALID, "kernel: %lld is even, needs %s",
                             (long long)params->kernel,
                             dkv_param_rows[DKV_PARAM_KERNEL].info.range);
    return status;
}
