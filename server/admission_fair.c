/* Who is next: deficit round robin over the clients of one priority level, per device.
 *
 * A client's waiting parts of one level are its flow, with one queue per lane (a device's memory,
 * or any device). For each level and device a ring holds the flows that have something the device
 * could run. A flow may be served while its deficit there is positive and is charged what it took;
 * when nobody in the ring has credit left, everyone is paid a quantum, as many times as it takes
 * until somebody has. The flow that was served goes to the back of the ring.
 *
 * It is the "surplus" form: a flow may end below zero, which is what lets a batch be filled with
 * parts that fit the launch although it is not their client's turn (admission_batch.c). That debt
 * is paid off before the client's next turn, so over time everybody gets the same number of bytes:
 * two flows that both have work for a device are paid the same, so what they were served differs
 * by no more than their deficits can, twice (quantum + one batch + one part).
 *
 * A client whose last part was taken on credit stays in the ring until its debt is paid; otherwise
 * whoever sends in bursts would be served for free. When nothing waits for a device at a level, the
 * debts there are forgiven: nobody was kept waiting by them.
 *
 * Devices have deficits of their own. With one deficit for all, a client that keeps one device busy
 * would never have credit at the moment another one looks for work.
 *
 * A part costs its bytes and a sixteenth of a quantum, so that a flood of tiny requests is not
 * free, and the number of turns within a round is bounded.
 */
#include "server/admission_priv.h"

#define TURNS_PER_ROUND 16

static struct dkv_admission_turn *turn_of(struct dkv_list *node)
{
    return DKV_LIST_OF(node, struct dkv_admission_turn, node);
}

static struct dkv_admission_flow *part_flow(const struct dkv_admission_part *part)
{
    return &part->entry->client->flows[part->entry->level];
}

void dkv_admission_flow_init(struct dkv_admission_flow *flow)
{
    *flow = (struct dkv_admission_flow){.n_waiting = 0};
    for (uint32_t i = 0; i < DKV_ADMISSION_LANES_MAX; i++)
        dkv_list_init(&flow->fifo[i]);
    for (uint32_t d = 0; d < DKV_ADMISSION_DEVICES_MAX; d++) {
        flow->turns[d].flow = flow;
        dkv_list_init(&flow->turns[d].node);
    }
}

void dkv_admission_flow_fini(struct dkv_admission_flow *flow)
{
    assert(flow->n_waiting == 0);
    for (uint32_t d = 0; d < DKV_ADMISSION_DEVICES_MAX; d++)
        dkv_list_remove(&flow->turns[d].node);
}

int64_t dkv_admission_fair_cost(const struct dkv_admission *queue,
                                const struct dkv_admission_part *part)
{
    return (int64_t)(part->n_bytes + queue->config.quantum_bytes / TURNS_PER_ROUND + 1);
}

bool dkv_admission_fair_has(const struct dkv_admission *queue, uint32_t level, uint32_t device)
{
    const struct dkv_admission_level *l = &queue->level[level];
    return l->lane_parts[device] + l->lane_parts[dkv_admission_any_lane(queue)] > 0;
}

static bool flow_has(const struct dkv_admission *queue, const struct dkv_admission_flow *flow,
                     uint32_t device)
{
    return !dkv_list_empty(&flow->fifo[device]) ||
           !dkv_list_empty(&flow->fifo[dkv_admission_any_lane(queue)]);
}

/* --- rings --------------------------------------------------------------------------------- */

static void forgive_debts(struct dkv_list *ring)
{
    DKV_LIST_EACH_SAFE (node, ring) {
        turn_of(node)->deficit = 0;
        dkv_list_remove(node);
    }
}

/* Before a part for the device comes in: the flow needs a place in the ring. */
static void join_ring(struct dkv_admission *queue, struct dkv_admission_flow *flow, uint32_t level,
                      uint32_t device)
{
    struct dkv_list *ring = &queue->level[level].ring[device];

    if (!dkv_admission_fair_has(queue, level, device))
        forgive_debts(ring);
    if (!dkv_list_linked(&flow->turns[device].node))
        dkv_list_push_back(ring, &flow->turns[device].node);
}

/* After a part for the device is gone. Credit is not kept for a flow that has nothing to run. */
static void leave_ring(struct dkv_admission *queue, struct dkv_admission_flow *flow,
                       uint32_t device)
{
    struct dkv_admission_turn *turn = &flow->turns[device];

    if (!flow_has(queue, flow, device) && turn->deficit >= 0) {
        turn->deficit = 0;
        dkv_list_remove(&turn->node);
    }
}

/* The devices that a part of this lane is in the ring of: first..last. */
static uint32_t first_device(const struct dkv_admission *queue, uint32_t lane)
{
    return lane == dkv_admission_any_lane(queue) ? 0 : lane;
}

static uint32_t last_device(const struct dkv_admission *queue, uint32_t lane)
{
    return lane == dkv_admission_any_lane(queue) ? queue->config.n_devices - 1 : lane;
}

void dkv_admission_fair_push(struct dkv_admission *queue, struct dkv_admission_part *part)
{
    const uint32_t level = part->entry->level;
    struct dkv_admission_lane *lane = &queue->lane[part->lane];
    struct dkv_admission_flow *flow = part_flow(part);

    for (uint32_t d = first_device(queue, part->lane); d <= last_device(queue, part->lane); d++)
        join_ring(queue, flow, level, d);
    dkv_list_push_back(&flow->fifo[part->lane], &part->node);
    dkv_list_push_back(&lane->ages, &part->age_node);
    flow->n_waiting++;
    queue->level[level].lane_parts[part->lane]++;
    lane->n_blocks += part->n_blocks;
    lane->n_tokens += part->n_tokens;
    lane->n_bytes += part->n_bytes;
}

void dkv_admission_fair_remove(struct dkv_admission *queue, struct dkv_admission_part *part)
{
    struct dkv_admission_lane *lane = &queue->lane[part->lane];
    struct dkv_admission_flow *flow = part_flow(part);

    dkv_list_remove(&part->node);
    dkv_list_remove(&part->age_node);
    flow->n_waiting--;
    queue->level[part->entry->level].lane_parts[part->lane]--;
    lane->n_blocks -= part->n_blocks;
    lane->n_tokens -= part->n_tokens;
    lane->n_bytes -= part->n_bytes;
    for (uint32_t d = first_device(queue, part->lane); d <= last_device(queue, part->lane); d++)
        leave_ring(queue, flow, d);
}

/* --- turns --------------------------------------------------------------------------------- */

/* Pays the ring as many whole rounds as it takes until a flow with work has credit. None has now,
 * or this would not be called, so nobody ends above one quantum. */
static void pay_rounds(struct dkv_admission *queue, struct dkv_list *ring, uint32_t device)
{
    const int64_t quantum = (int64_t)queue->config.quantum_bytes;
    int64_t rounds = INT64_MAX;

    DKV_LIST_EACH (node, ring) {
        const struct dkv_admission_turn *turn = turn_of(node);
        const int64_t needed = -turn->deficit / quantum + 1;
        if (needed < rounds && flow_has(queue, turn->flow, device))
            rounds = needed;
    }
    DKV_LIST_EACH_SAFE (node, ring) {
        struct dkv_admission_turn *turn = turn_of(node);
        turn->deficit += rounds * quantum;
        leave_ring(queue, turn->flow, device);
    }
}

static struct dkv_admission_turn *first_with_credit(const struct dkv_admission *queue,
                                                    const struct dkv_list *ring, uint32_t device)
{
    DKV_LIST_EACH (node, ring) {
        struct dkv_admission_turn *turn = turn_of(node);
        if (turn->deficit > 0 && flow_has(queue, turn->flow, device))
            return turn;
    }
    return NULL;
}

struct dkv_admission_turn *dkv_admission_fair_pick(struct dkv_admission *queue, uint32_t level,
                                                   uint32_t device)
{
    struct dkv_list *ring = &queue->level[level].ring[device];
    struct dkv_admission_turn *turn = first_with_credit(queue, ring, device);

    if (turn == NULL) {
        pay_rounds(queue, ring, device);
        turn = first_with_credit(queue, ring, device);
    }
    assert(turn != NULL);
    dkv_list_remove(&turn->node);
    dkv_list_push_back(ring, &turn->node);
    return turn;
}

static struct dkv_admission_part *first_of_key(const struct dkv_list *fifo, const uint64_t *key)
{
    uint32_t seen = 0;

    DKV_LIST_EACH (node, fifo) {
        struct dkv_admission_part *part = dkv_admission_part_of(node);
        if (key == NULL || part->key == *key)
            return part;
        if (++seen == DKV_ADMISSION_LOOKAHEAD)
            break;
    }
    return NULL;
}

struct dkv_admission_part *dkv_admission_fair_first(const struct dkv_admission *queue,
                                                    const struct dkv_admission_flow *flow,
                                                    uint32_t device, const uint64_t *key)
{
    struct dkv_admission_part *own = first_of_key(&flow->fifo[device], key);
    struct dkv_admission_part *any = first_of_key(&flow->fifo[dkv_admission_any_lane(queue)], key);

    if (own == NULL || any == NULL)
        return own != NULL ? own : any;
    return own->seq < any->seq ? own : any;
}
