/* The same block in other memory: the layouts that serving engines keep their caches in, on the
 * host or on the device.
 *
 * Rows that no token of the block owns (other requests' pages, padding, the null page) hold NaN, so
 * that a wrong read shows.
 */
#ifndef DKV_TESTS_GPU_LAYOUT_H
#define DKV_TESTS_GPU_LAYOUT_H

#include "tests/support/case.h"

enum dkv_layout {
    DKV_LAYOUT_HEADS,       /* [H][n][D], contiguous */
    DKV_LAYOUT_TOKENS,      /* [n][H][D] */
    DKV_LAYOUT_PACKED,      /* [n][H][K|V] */
    DKV_LAYOUT_PAGE_TOKENS, /* [pages][page][H][D], random pages */
    DKV_LAYOUT_PAGE_HEADS,  /* [pages][H][page][D], random pages */
    DKV_LAYOUT_PAGE_PACKED, /* [pages][page][H][K|V]: vLLM's default */
    DKV_LAYOUT_SLOTS,       /* one token a page, random slots: SGLang's default */
    DKV_LAYOUTS,
};

struct dkv_layout_choice {
    enum dkv_layout layout;
    uint32_t page_tokens; /* of paged layouts other than SLOTS */
    uint32_t entry_bytes;
    bool top_bits;        /* set bits above the mask in every entry */
    bool null_pages;      /* pages before valid_from are null entries */
    uint32_t row_padding; /* extra bytes behind each row; a multiple of the element's size */
    enum dkv_place query_place, cache_place, table_place;
};

/* Memory of one re-laid block. */
struct dkv_laid {
    struct dkv_block block; /* views of the memory below */
    struct dkv_plan plan;
    void *host[4];   /* query, keys, values, table: as laid out */
    void *device[4]; /* or NULL */
    uint64_t bytes[4];
};

void dkv_layout_choose(struct dkv_layout_choice *choice_out, const struct dkv_case *c,
                       struct dkv_random *random);

/* Lays out a dense, planned case. Aborts with a line if there is no memory. */
void dkv_layout_make(struct dkv_laid *laid_out, const struct dkv_case *c,
                     const struct dkv_layout_choice *choice, struct dkv_random *random);
void dkv_layout_fini(struct dkv_laid *laid);

/* After a change of laid->host[i]: brings it to the device, if that is where it is read. */
void dkv_layout_update(struct dkv_laid *laid, int i);

#endif
