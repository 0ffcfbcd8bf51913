/* What a caller says of caches and stashes, judged the same for every transport.
 *
 * Thread  any; no state.
 * Errors  INVALID, UNSUPPORTED, naming the field.
 */
#ifndef DKV_CLIENT_LAYOUT_H
#define DKV_CLIENT_LAYOUT_H

#include "client/dropkv.h"
#include "proto/types.h"

enum dkv_status dkv_check_cache_layout(const struct dropkv_cache_layout *layout,
                                       struct dkv_error *err);
enum dkv_status dkv_check_stash_layout(const struct dropkv_stash_layout *layout,
                                       struct dkv_error *err);

/* All layers from first_layer on that the cache has, if the prompt says no number. */
enum dkv_status dkv_count_layers(struct dropkv_prompt *prompt, uint32_t n_layers,
                                 struct dkv_error *err);

#endif
