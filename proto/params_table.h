/* The parameter table. Private to proto/params*.c; everybody else reads it through params.h.
 *
 * A parameter is one row: its name, what it holds, where it lives in dkv_params and which values it
 * may take. Setters, getters, range checks, help texts and the server's metadata all walk the
 * table, so a new parameter is one enum value, one field and one row.
 */
#ifndef DKV_PROTO_PARAMS_TABLE_H
#define DKV_PROTO_PARAMS_TABLE_H

#include "proto/params.h"

enum dkv_field { DKV_FIELD_WORD, DKV_FIELD_INT, DKV_FIELD_REAL, DKV_FIELD_TEXT, DKV_FIELD_LIST };

struct dkv_param_row {
    struct dkv_param_info info;
    enum dkv_field field;
    size_t offset;            /* in dkv_params */
    const char *const *words; /* DKV_FIELD_WORD: NULL-terminated, indexed by the enum's value */
    double lo, hi;            /* DKV_FIELD_INT, DKV_FIELD_REAL: allowed range, both ends included */
    bool or_zero;             /* ... and 0, which means "off" */
};

extern const struct dkv_param_row dkv_param_rows[DKV_PARAM_COUNT];

#endif
