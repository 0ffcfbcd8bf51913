/* JSON as the protocol codec needs it: jansson behind its known traps. Private to proto/oip*.c.
 *
 * jansson 2.14 turns 1.0 and 1e3 into reals whose integer value reads as 0, keeps the last of two
 * equal keys and parses 2,048 levels deep. Everything here exists so that no reader has to remember
 * that: documents are measured before they are parsed, and values are taken by kind or refused.
 *
 * `where` is what error texts call the object that is being read: "request", "input key", ...
 * JSON null counts as absent, as clients in dynamic languages mean it.
 */
#ifndef DKV_PROTO_OIP_JSON_H
#define DKV_PROTO_OIP_JSON_H

#include "proto/oip.h"

#include <jansson.h>

/* Parses a document that must be one object; the caller owns the reference. MALFORMED with the
 * position, TOO_LARGE, or NOMEM. */
enum dkv_status dkv_json_load(const char *bytes, size_t n_bytes, json_t **root_out,
                              struct dkv_error *err);

/* Building: once memory has run out anywhere, *list or *object is NULL, stays NULL, and makes what
 * contains it NULL; so only dkv_json_print() looks. Both take the value's reference. */
void dkv_json_append(json_t **list, json_t *value);
void dkv_json_set(json_t **object, const char *key, json_t *value);

/* Prints a document and drops the reference; a NULL document (jansson ran out of memory while it
 * was built) gives NOMEM. */
enum dkv_status dkv_json_print(json_t *document, struct dkv_oip_text *out);

/* The member, or NULL if it is absent or null. */
json_t *dkv_json_member(const json_t *object, const char *key);

/* INVALID if the object has a key that is not in the NULL-terminated list. */
enum dkv_status dkv_json_only(const json_t *object, const char *where, const char *const known[],
                              struct dkv_error *err);

/* Optional members by kind: DKV_OK and untouched output if absent, INVALID if of another kind. The
 * object and array are borrowed. */
enum dkv_status dkv_json_object(const json_t *object, const char *where, const char *key,
                                json_t **out, struct dkv_error *err);
enum dkv_status dkv_json_array(const json_t *object, const char *where, const char *key,
                               json_t **out, struct dkv_error *err);
enum dkv_status dkv_json_bool(const json_t *object, const char *where, const char *key, bool *out,
                              struct dkv_error *err);
/* A whole number from 0 to 2^63-1. */
enum dkv_status dkv_json_u64(const json_t *object, const char *where, const char *key,
                             uint64_t *out, struct dkv_error *err);
/* A string of less than `size` bytes. */
enum dkv_status dkv_json_string(const json_t *object, const char *where, const char *key, char *out,
                                size_t size, struct dkv_error *err);

/* Takes a string to show to a person, "" if there is none: what is too long is cut, what a terminal
 * would obey becomes '?'. */
void dkv_json_show(const json_t *object, const char *key, char *out, size_t size);

#endif
