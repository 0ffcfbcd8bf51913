/* What runs next: the device, the level, the parts.
 *
 * Device. Every part waits in a lane: that of the device that holds its memory, or the lane of any
 * device. Nothing is bound before it is launched, so host memory goes to whichever device is least
 * loaded at that moment and no device idles beside another one's backlog.
 *
 * Level. The best one that has work, except that a level which got nothing from the last
 * aging_batches batches of this device goes first; of several such the one passed over longest. As
 * one that was served cannot be overdue again within n_levels batches (aging_batches >= n_levels),
 * every level gets something at least once in aging_batches + n_levels batches.
 *
 * Parts. The head of the batch is whose turn it is (admission_fair.c); its key decides what else
 * can share the launch. The rest of the room goes to other clients' parts of that key, best level
 * first, in ring order, whether it is their turn or not: they are charged all the same.
 *
 * Share. A batch's length is the time that everyone else waits. So while other clients have work
 * open on this device, in flight included, a client gets only its share of the batch limits
 * (limit / clients, but at least one part), and nobody takes more than a share ahead of its turn.
 * A client with a deep pipeline then makes the others' batches longer by one share instead of
 * filling them up.
 *
 * Replays go before everything else, alone on their device: see admission.h.
 */
#include "server/admission_priv.h"

struct builder {
    struct dkv_admission *queue;
    struct dkv_admission_batch *batch;
    uint64_t share_blocks;
    uint64_t share_tokens;
    uint64_t share_bytes;
    uint32_t served_levels; /* bit l: level l got something */
};

/* --- is there something to launch? --------------------------------------------------------- */

static bool any_level_has(const struct dkv_admission *queue, uint32_t device)
{
    for (uint32_t l = 0; l < queue->config.n_levels; l++)
        if (dkv_admission_fair_has(queue, l, device))
            return true;
    return false;
}

static struct dkv_admission_part *first_replay(const struct dkv_admission *queue, uint32_t device)
{
    struct dkv_list *node = dkv_list_first(&queue->lane[device].replays);
    if (node == NULL)
        node = dkv_list_first(&queue->lane[dkv_admission_any_lane(queue)].replays);
    return node != NULL ? dkv_admission_part_of(node) : NULL;
}

static bool runs_solo(const struct dkv_admission_device *device)
{
    const struct dkv_list *node = dkv_list_first(&device->batches);
    return node != NULL && DKV_LIST_OF(node, struct dkv_admission_batch, node)->solo;
}

/* As much waits as one batch may hold. All keys are counted: with several, the batch may leave a
 * little earlier than it had to. */
static bool batch_would_be_full(const struct dkv_admission *queue, uint32_t device)
{
    const struct dkv_admission_config *config = &queue->config;
    const struct dkv_admission_lane *own = &queue->lane[device];
    const struct dkv_admission_lane *any = &queue->lane[dkv_admission_any_lane(queue)];

    return own->n_blocks + any->n_blocks >= config->batch_blocks ||
           own->n_tokens + any->n_tokens >= config->batch_tokens ||
           own->n_bytes + any->n_bytes >= config->batch_bytes;
}

/* When the part that waits longest for the device was offered. */
static uint64_t oldest_us(const struct dkv_admission *queue, uint32_t device)
{
    const struct dkv_list *nodes[2] = {
        dkv_list_first(&queue->lane[device].ages),
        dkv_list_first(&queue->lane[dkv_admission_any_lane(queue)].ages),
    };
    uint64_t oldest = DKV_ADMISSION_NEVER;

    for (int i = 0; i < 2; i++) {
        if (nodes[i] == NULL)
            continue;
        uint64_t offered_us =
            DKV_LIST_OF(nodes[i], struct dkv_admission_part, age_node)->entry->offered_us;
        if (offered_us < oldest)
            oldest = offered_us;
    }
    return oldest;
}

/* When the device may take its next batch if nothing else happens; NEVER: only after an event. */
static uint64_t ready_us(const struct dkv_admission *queue, uint32_t index)
{
    const struct dkv_admission_device *device = &queue->device[index];

    if (!device->up || device->n_batches >= queue->config.max_flight || runs_solo(device))
        return DKV_ADMISSION_NEVER;
    if (first_replay(queue, index) != NULL)
        return device->n_batches == 0 ? 0 : DKV_ADMISSION_NEVER;
    if (!any_level_has(queue, index))
        return DKV_ADMISSION_NEVER;
    if (device->n_batches == 0 || batch_would_be_full(queue, index))
        return 0;
    return oldest_us(queue, index) + queue->config.max_queue_delay_us;
}

uint64_t dkv_admission_wakeup_us(const struct dkv_admission *queue, uint64_t now_us)
{
    uint64_t wakeup_us = queue->n_heap > 0 ? queue->heap[0]->deadline_us : DKV_ADMISSION_NEVER;

    for (uint32_t d = 0; d < queue->config.n_devices; d++) {
        uint64_t at_us = ready_us(queue, d);
        if (at_us < wakeup_us)
            wakeup_us = at_us;
    }
    return wakeup_us < now_us ? now_us : wakeup_us;
}

/* The least loaded device that may take a batch now, or NO_INDEX. */
static uint32_t choose_device(const struct dkv_admission *queue, uint64_t now_us)
{
    uint32_t best = DKV_ADMISSION_NO_INDEX;

    for (uint32_t d = 0; d < queue->config.n_devices; d++) {
        const struct dkv_admission_device *device = &queue->device[d];
        if (ready_us(queue, d) > now_us)
            continue;
        if (best == DKV_ADMISSION_NO_INDEX || device->n_batches < queue->device[best].n_batches ||
            (device->n_batches == queue->device[best].n_batches &&
             device->n_bytes < queue->device[best].n_bytes))
            best = d;
    }
    return best;
}

/* --- forming a batch ----------------------------------------------------------------------- */

static void take(struct dkv_admission_batch *batch, struct dkv_admission *queue,
                 struct dkv_admission_part *part)
{
    struct dkv_admission_entry *entry = part->entry;

    dkv_admission_part_unwait(queue, part);
    dkv_list_push_back(&batch->parts, &part->node);
    part->n_launches++;
    entry->n_in_flight++;
    if (entry->launched_us == 0)
        entry->launched_us = batch->formed_us;
    batch->key = part->key;
    batch->n_parts++;
    batch->n_blocks += part->n_blocks;
    batch->n_tokens += part->n_tokens;
    batch->n_bytes += part->n_bytes;
}

static bool fits(const struct builder *b, const struct dkv_admission_part *part)
{
    const struct dkv_admission_config *config = &b->queue->config;
    return b->batch->n_parts == 0 || (b->batch->n_blocks + part->n_blocks <= config->batch_blocks &&
                                      b->batch->n_tokens + part->n_tokens <= config->batch_tokens &&
                                      b->batch->n_bytes + part->n_bytes <= config->batch_bytes);
}

/* Takes what the turn's flow has for this launch, up to its share. */
static void serve(struct builder *b, struct dkv_admission_turn *turn, uint32_t level)
{
    uint64_t n_blocks = 0, n_tokens = 0, n_bytes = 0;
    struct dkv_admission_part *part;

    while (turn->deficit > -(int64_t)b->share_bytes) {
        part = dkv_admission_fair_first(b->queue, turn->flow, b->batch->device,
                                        b->batch->n_parts > 0 ? &b->batch->key : NULL);
        if (part == NULL || !fits(b, part))
            return;
        n_blocks += part->n_blocks;
        n_tokens += part->n_tokens;
        n_bytes += part->n_bytes;
        if (n_blocks > part->n_blocks &&
            (n_blocks > b->share_blocks || n_tokens > b->share_tokens || n_bytes > b->share_bytes))
            return;
        /* Charged first: the ring lets go of a flow that has neither parts nor debt. */
        turn->deficit -= dkv_admission_fair_cost(b->queue, part);
        take(b->batch, b->queue, part);
        b->served_levels |= 1u << level;
    }
}

static uint64_t share_of(uint64_t limit, uint64_t n_clients)
{
    return limit / n_clients > 0 ? limit / n_clients : 1;
}

static uint32_t choose_level(const struct dkv_admission *queue, uint32_t device)
{
    uint32_t first = DKV_ADMISSION_NO_INDEX, overdue = DKV_ADMISSION_NO_INDEX;

    for (uint32_t l = 0; l < queue->config.n_levels; l++) {
        uint32_t passed = queue->level[l].passed[device];
        if (!dkv_admission_fair_has(queue, l, device))
            continue;
        if (first == DKV_ADMISSION_NO_INDEX)
            first = l;
        if (passed >= queue->config.aging_batches &&
            (overdue == DKV_ADMISSION_NO_INDEX || passed > queue->level[overdue].passed[device]))
            overdue = l;
    }
    return overdue != DKV_ADMISSION_NO_INDEX ? overdue : first;
}

static void count_passed(struct builder *b)
{
    const uint32_t device = b->batch->device;
    for (uint32_t l = 0; l < b->queue->config.n_levels; l++) {
        struct dkv_admission_level *level = &b->queue->level[l];
        bool passed = !(b->served_levels >> l & 1u) && dkv_admission_fair_has(b->queue, l, device);
        level->passed[device] = passed ? level->passed[device] + 1 : 0;
    }
}

/* Among how many the batch is shared: who has work open here, and at least as many as the batch
 * before it served. Whoever was just answered is about to ask again; without counting those, the
 * one client with more in its pipeline would fill a whole batch in between, every time. */
static uint64_t count_sharers(const struct dkv_admission *queue, uint32_t device)
{
    const uint64_t n_open = (uint64_t)queue->lane[device].n_clients +
                            queue->lane[dkv_admission_any_lane(queue)].n_clients;
    const uint64_t n_before = queue->device[device].n_clients_done;
    return n_open > n_before ? n_open : n_before;
}

static void form(struct builder *b)
{
    struct dkv_admission *queue = b->queue;
    const uint32_t device = b->batch->device;
    const uint64_t n_clients = count_sharers(queue, device);
    const uint32_t head_level = choose_level(queue, device);

    b->share_blocks = share_of(queue->config.batch_blocks, n_clients);
    b->share_tokens = share_of(queue->config.batch_tokens, n_clients);
    b->share_bytes = share_of(queue->config.batch_bytes, n_clients);

    struct dkv_admission_turn *head = dkv_admission_fair_pick(queue, head_level, device);
    serve(b, head, head_level);
    for (uint32_t l = 0; l < queue->config.n_levels; l++) {
        DKV_LIST_EACH_SAFE (node, &queue->level[l].ring[device]) {
            struct dkv_admission_turn *turn = DKV_LIST_OF(node, struct dkv_admission_turn, node);
            if (turn != head)
                serve(b, turn, l);
        }
    }
    count_passed(b);
    b->batch->backlog = any_level_has(queue, device);
}

static struct dkv_admission_batch *open_batch(struct dkv_admission *queue, uint32_t device,
                                              uint64_t now_us)
{
    struct dkv_list *node = dkv_list_first(&queue->free_batches);
    assert(node != NULL);
    struct dkv_admission_batch *batch = DKV_LIST_OF(node, struct dkv_admission_batch, node);

    dkv_list_remove(node);
    *batch = (struct dkv_admission_batch){.device = device, .formed_us = now_us};
    dkv_list_init(&batch->parts);
    dkv_list_push_back(&queue->device[device].batches, &batch->node);
    return batch;
}

struct dkv_admission_batch *dkv_admission_next(struct dkv_admission *queue, uint64_t now_us)
{
    dkv_admission_expire(queue, now_us);
    const uint32_t index = choose_device(queue, now_us);
    if (index == DKV_ADMISSION_NO_INDEX)
        return NULL;

    struct dkv_admission_batch *batch = open_batch(queue, index, now_us);
    struct dkv_admission_part *replay = first_replay(queue, index);
    if (replay != NULL) {
        batch->solo = true;
        take(batch, queue, replay);
    } else {
        form(&(struct builder){.queue = queue, .batch = batch});
    }
    queue->device[index].n_batches++;
    queue->device[index].n_bytes += batch->n_bytes;
    queue->counters.batches++;
    queue->counters.batch_parts += batch->n_parts;
    queue->counters.batch_blocks += batch->n_blocks;
    queue->counters.batch_tokens += batch->n_tokens;
    queue->counters.batch_bytes += batch->n_bytes;
    return batch;
}
