/* Loading, printing and reading JSON.
 *
 * Three bounds are taken from the bytes before jansson sees them. The nesting depth, because a
 * recursive parser must not be led down by a client; the number of values, because a tree costs
 * some 50 bytes for a value that takes two in the text ("0,"); and the number of objects' members,
 * because hashing them takes ten times as long as an array's values. All are read off the
 * punctuation outside strings, which needs no understanding of the rest: if the scan is fooled by
 * text that is not JSON, jansson refuses that text anyway, no deeper than brackets really go.
 */
#include "proto/oip_json.h"

#include <stdlib.h>
#include <string.h>

void dkv_oip_init(void)
{
    json_object_seed(0);
}

void dkv_oip_text_fini(struct dkv_oip_text *text)
{
    free(text->bytes);
    memset(text, 0, sizeof(*text));
}

/* ---- Loading -------------------------------------------------------------------------------- */

struct measure {
    uint64_t values;  /* at least as many as the document has */
    uint64_t members; /* likewise, of objects */
    unsigned depth;   /* greatest */
};

static struct measure measure(const char *bytes, size_t n_bytes)
{
    struct measure m = {.values = 1};
    unsigned depth = 0;
    bool in_string = false;

    for (size_t i = 0; i < n_bytes && m.depth <= DKV_OIP_JSON_DEPTH_MAX; i++) {
        const char c = bytes[i];
        if (in_string) {
            if (c == '\\')
                i++;
            else if (c == '"')
                in_string = false;
            continue;
        }
        switch (c) {
        case '"': in_string = true; break;
        case '[':
        case '{':
            m.values++;
            if (++depth > m.depth)
                m.depth = depth;
            break;
        case ']':
        case '}':
            if (depth > 0)
                depth--;
            break;
        case ',': m.values++; break;
        case ':': m.members++; break;
        default: break;
        }
    }
    return m;
}

static enum dkv_status refuse(const json_error_t *why, struct dkv_error *err)
{
    const char *what;

    /* jansson 2.14 says nothing when a node cannot be allocated. (Where its lexer cannot allocate a
     * string it reports a bad token, which cannot be told from one.) */
    if (why->text[0] == '\0')
        return dkv_error_set(err, DKV_E_NOMEM, "no memory to read the JSON");
    switch (json_error_code(why)) {
    case json_error_out_of_memory:
        return dkv_error_set(err, DKV_E_NOMEM, "no memory to read the JSON");
    case json_error_premature_end_of_input: what = "ends too early"; break;
    case json_error_end_of_input_expected: what = "goes on after its end"; break;
    case json_error_invalid_utf8: what = "is not UTF-8"; break;
    case json_error_null_byte_in_key:
    case json_error_null_character: what = "has a NUL in a string"; break;
    case json_error_duplicate_key: what = "has a key twice"; break;
    case json_error_numeric_overflow: what = "has a number out of range"; break;
    default: what = "is not well formed"; break;
    }
    return dkv_error_set(err, DKV_E_MALFORMED, "JSON: %s, near byte %d", what, why->position);
}

enum dkv_status dkv_json_load(const char *bytes, size_t n_bytes, json_t **root_out,
                              struct dkv_error *err)
{
    const struct measure m = measure(bytes, n_bytes);
    json_error_t why;

    if (m.depth > DKV_OIP_JSON_DEPTH_MAX)
        return dkv_error_set(err, DKV_E_MALFORMED, "JSON: nested deeper than %u levels",
                             DKV_OIP_JSON_DEPTH_MAX);
    if (m.values > DKV_OIP_JSON_VALUES_MAX)
        return dkv_error_set(err, DKV_E_TOO_LARGE,
                             "JSON: more than %u values, send tensors in binary form",
                             DKV_OIP_JSON_VALUES_MAX);
    if (m.members > DKV_OIP_JSON_MEMBERS_MAX)
        return dkv_error_set(err, DKV_E_TOO_LARGE, "JSON: more than %u members of objects",
                             DKV_OIP_JSON_MEMBERS_MAX);
    json_t *root = json_loadb(bytes, n_bytes, JSON_REJECT_DUPLICATES, &why);
    if (root == NULL)
        return refuse(&why, err);
    if (!json_is_object(root)) {
        json_decref(root);
        return dkv_error_set(err, DKV_E_MALFORMED, "JSON: the document is not an object");
    }
    *root_out = root;
    return DKV_OK;
}

/* ---- Building and printing ------------------------------------------------------------------- */

static void drop_if(bool failed, json_t **container)
{
    if (failed) {
        json_decref(*container);
        *container = NULL;
    }
}

void dkv_json_append(json_t **list, json_t *value)
{
    drop_if(json_array_append_new(*list, value) != 0, list);
}

void dkv_json_set(json_t **object, const char *key, json_t *value)
{
    drop_if(json_object_set_new(*object, key, value) != 0, object);
}

enum dkv_status dkv_json_print(json_t *document, struct dkv_oip_text *out)
{
    char *bytes = document != NULL ? json_dumps(document, JSON_COMPACT) : NULL;

    json_decref(document);
    if (bytes == NULL)
        return DKV_E_NOMEM;
    out->bytes = bytes;
    out->n_bytes = strlen(bytes);
    return DKV_OK;
}

/* ---- Reading -------------------------------------------------------------------------------- */

json_t *dkv_json_member(const json_t *object, const char *key)
{
    json_t *value = json_object_get(object, key);
    return json_is_null(value) ? NULL : value;
}

static bool listed(const char *key, const char *const known[])
{
    for (; *known != NULL; known++)
        if (strcmp(*known, key) == 0)
            return true;
    return false;
}

enum dkv_status dkv_json_only(const json_t *object, const char *where, const char *const known[],
                              struct dkv_error *err)
{
    char shown[DKV_SHOWN_NAME_BYTES];
    const char *key;
    json_t *value;

    json_object_foreach ((json_t *)object, key, value)
        if (!listed(key, known))
            return dkv_error_set(err, DKV_E_INVALID, "%s: unknown key '%s'", where,
                                 dkv_show_name(shown, key));
    return DKV_OK;
}

static enum dkv_status wrong_kind(const char *where, const char *key, const char *needed,
                                  struct dkv_error *err)
{
    return dkv_error_set(err, DKV_E_INVALID, "%s: %s must be %s", where, key, needed);
}

enum dkv_status dkv_json_object(const json_t *object, const char *where, const char *key,
                                json_t **out, struct dkv_error *err)
{
    json_t *value = dkv_json_member(object, key);

    if (value == NULL)
        return DKV_OK;
    if (!json_is_object(value))
        return wrong_kind(where, key, "an object", err);
    *out = value;
    return DKV_OK;
}

enum dkv_status dkv_json_array(const json_t *object, const char *where, const char *key,
                               json_t **out, struct dkv_error *err)
{
    json_t *value = dkv_json_member(object, key);

    if (value == NULL)
        return DKV_OK;
    if (!json_is_array(value))
        return wrong_kind(where, key, "an array", err);
    *out = value;
    return DKV_OK;
}

enum dkv_status dkv_json_bool(const json_t *object, const char *where, const char *key, bool *out,
                              struct dkv_error *err)
{
    const json_t *value = dkv_json_member(object, key);

    if (value == NULL)
        return DKV_OK;
    if (!json_is_boolean(value))
        return wrong_kind(where, key, "true or false", err);
    *out = json_is_true(value);
    return DKV_OK;
}

enum dkv_status dkv_json_u64(const json_t *object, const char *where, const char *key,
                             uint64_t *out, struct dkv_error *err)
{
    const json_t *value = dkv_json_member(object, key);

    if (value == NULL)
        return DKV_OK;
    if (!json_is_integer(value) || json_integer_value(value) < 0)
        return wrong_kind(where, key, "a whole number in 0..9223372036854775807", err);
    *out = (uint64_t)json_integer_value(value);
    return DKV_OK;
}

enum dkv_status dkv_json_string(const json_t *object, const char *where, const char *key, char *out,
                                size_t size, struct dkv_error *err)
{
    const json_t *value = dkv_json_member(object, key);

    if (value == NULL)
        return DKV_OK;
    if (!json_is_string(value))
        return wrong_kind(where, key, "a string", err);
    if (json_string_length(value) >= size)
        return dkv_error_set(err, DKV_E_INVALID, "%s: %s has %zu bytes, allowed are 0..%zu", where,
                             key, json_string_length(value), size - 1);
    memcpy(out, json_string_value(value), json_string_length(value) + 1);
    return DKV_OK;
}

void dkv_json_show(const json_t *object, const char *key, char *out, size_t size)
{
    const json_t *value = dkv_json_member(object, key);
    size_t n = 0;

    if (json_is_string(value)) {
        const char *string = json_string_value(value);
        for (; n < size - 1 && string[n] != '\0'; n++)
            out[n] = string[n] >= 0x20 && string[n] < 0x7f ? string[n] : '?';
    }
    out[n] = '\0';
}
