/* What a message names: regions by number, and places in them or in the message's bulk. Each region
 * is in use by the request from then on.
 */
#include "server/ask.h"

#include <inttypes.h>

/* A region of that number, in use by this request from now on. */
static enum dkv_status use_region(struct dkv_ask *ask, uint32_t number, const char *what,
                                  struct dkv_region **region_out, struct dkv_error *err)
{
    struct dkv_region *region = dkv_slots_find(&ask->session->regions, number);
    if (region == NULL)
        return dkv_error_set(err, DKV_E_NOT_FOUND, "%s: region %u does not exist", what, number);
    if (!region->attached)
        return dkv_error_set(err, DKV_E_NOT_FOUND, "%s: region %u is detached", what, number);
    if (dkv_region_on_gpu(region) && region->loan->error.status != DKV_OK)
        return dkv_error_set(err, DKV_E_NOT_FOUND,
                             "%s: region %u was lost with its worker and must be registered anew: "
                             "%.120s",
                             what, number, region->loan->error.text);
    *region_out = region;
    return dkv_ask_use(ask, region, err);
}

enum dkv_status dkv_ask_make_view(struct dkv_ask *ask, const struct dkv_wire_view *wire,
                                  const char *what, struct dkv_view *view_out,
                                  struct dkv_error *err)
{
    const struct dkv_body *bulk = &ask->job->body;
    struct dkv_region *region = NULL;
    *view_out = (struct dkv_view){
        .base = bulk->data, /* NULL, which the gate refuses, if there is no bulk */
        .bytes = bulk->received_bytes,
        .offset = wire->offset,
        .page_stride = wire->page_stride,
        .token_stride = wire->token_stride,
        .head_stride = wire->head_stride,
        .dtype = (enum dkv_dtype)wire->dtype,
        .place = DKV_PLACE_HOST,
        .scale = wire->scale,
    };
    if (wire->region == 0)
        return DKV_OK;
    enum dkv_status status = use_region(ask, wire->region, what, &region, err);
    if (status != DKV_OK)
        return status;
    view_out->base = dkv_region_base(region);
    view_out->bytes = dkv_loan_end(region->loan, wire->offset);
    if (dkv_region_on_gpu(region))
        view_out->place = DKV_PLACE_DEVICE;
    if (view_out->bytes == 0)
        return dkv_error_set(err, DKV_E_INVALID,
                             "%s: offset %" PRIu64 " is not within the %" PRIu64
                             " bytes of region %u that were passed",
                             what, wire->offset, region->bytes, wire->region);
    return DKV_OK;
}

/* What only the front reads or writes must be host memory. */
static enum dkv_status use_host_region(struct dkv_ask *ask, uint32_t number, const char *what,
                                       struct dkv_region **region_out, struct dkv_error *err)
{
    const enum dkv_status status = use_region(ask, number, what, region_out, err);
    if (status == DKV_OK && dkv_region_on_gpu(*region_out))
        return dkv_error_set(err, DKV_E_INVALID, "%s: region %u is GPU memory, not a memfd", what,
                             number);
    return status;
}

enum dkv_status dkv_ask_make_table(struct dkv_ask *ask, const struct dkv_ask_table *wire,
                                   struct dkv_block *block, struct dkv_error *err)
{
    const uint8_t *base = ask->job->body.data;
    uint64_t room = ask->job->body.received_bytes;
    struct dkv_region *region = NULL;
    enum dkv_status status = DKV_OK;
    if (wire->kind == DKV_WIRE_TABLE_NONE)
        return DKV_OK;
    if (block->page_tokens == 0)
        return dkv_error_set(err, DKV_E_INVALID, "page table: page_tokens is 0");
    if (wire->kind == DKV_WIRE_TABLE_REGION) {
        status = use_region(ask, wire->region, "page table", &region, err);
        if (status != DKV_OK)
            return status;
        base = dkv_region_base(region);
        room = dkv_loan_end(region->loan, wire->offset);
    }
    if (!dkv_range_fits(wire->offset, (uint64_t)wire->entries * wire->entry_bytes, room))
        return dkv_error_set(err, DKV_E_INVALID,
                             "page table: %u entries of %u bytes at %" PRIu64
                             " are not within %" PRIu64,
                             wire->entries, wire->entry_bytes, wire->offset, room);
    block->table = (struct dkv_page_table){
        .entries = base + wire->offset,
        .n_entries = wire->entries,
        .entry_bytes = wire->entry_bytes,
        .place = region != NULL && dkv_region_on_gpu(region) ? DKV_PLACE_DEVICE : DKV_PLACE_HOST,
        .mask = (int64_t)wire->mask,
        .null_entry = wire->null_entry,
        .has_null_entry = wire->has_null,
    };
    return DKV_OK;
}

enum dkv_status dkv_ask_take_fence(struct dkv_ask *ask, const struct dkv_wire_fence *wire,
                                   struct dkv_error *err)
{
    struct dkv_region *region = NULL;
    if (wire->region == 0)
        return DKV_OK;
    enum dkv_status status = use_host_region(ask, wire->region, "fence", &region, err);
    if (status != DKV_OK)
        return status;
    if (!dkv_range_fits(wire->offset, sizeof(uint64_t), region->bytes))
        return dkv_error_set(err, DKV_E_INVALID,
                             "fence: offset %" PRIu64 " is not within the region's %" PRIu64,
                             wire->offset, region->bytes);
    ask->fence.region = region;
    ask->fence.offset = wire->offset;
    ask->fence.value = wire->value;
    return DKV_OK;
}

enum dkv_status dkv_ask_take_output(struct dkv_ask *ask, const struct dkv_wire_output *wire,
                                    struct dkv_error *err)
{
    struct dkv_region *region = NULL;
    if (wire->region == 0)
        return DKV_OK;
    enum dkv_status status = use_host_region(ask, wire->region, "output", &region, err);
    if (status != DKV_OK)
        return status;
    if (!region->writable)
        return dkv_error_set(err, DKV_E_DENIED, "output: region %u was not registered as writable",
                             wire->region);
    status = dkv_region_check_pages(region, err);
    if (status != DKV_OK)
        return status;
    if (!dkv_range_fits(wire->offset, wire->bytes, region->bytes))
        return dkv_error_set(err, DKV_E_INVALID,
                             "output: %" PRIu64 " bytes at %" PRIu64
                             " are not within the region's %" PRIu64,
                             wire->bytes, wire->offset, region->bytes);
    ask->output = region;
    ask->output_offset = wire->offset;
    ask->output_bytes = wire->bytes;
    return DKV_OK;
}
