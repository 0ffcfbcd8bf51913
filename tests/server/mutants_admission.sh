#!/bin/sh
# Breaks the admission queue, one line at a time, and confirms that the simulator notices each
# break: a check that cannot fail is worth nothing.
#
# usage: mutants_admission.sh CC... ROOT BUILD_DIR
#
# A mutant is a file of server/, a line of it (a fixed string that occurs there once) and what
# stands there instead. It must change the file, compile, and make some seed fail.
set -eu
unset DKV_SANITIZED # it thins out the seeds; what is compiled here bears no sanitizer
while [ $# -gt 2 ]; do
    cc=${cc:+$cc }$1
    shift
done
root=$1 work=$2/admission-mutants
seeds=${DKV_MUTANT_SEEDS:-4000}
flags="-std=c17 -D_GNU_SOURCE -O1 -w"
rm -rf "$work"
mkdir -p "$work"
cd "$root"

for source in server/admission*.c proto/types.c tests/server/sim_*.c; do
    $cc $flags -I. -c "$source" -o "$work/$(basename "$source" .c).o"
done
$cc "$work"/*.o -o "$work/sim"
"$work/sim" --seeds "$seeds" >/dev/null || { echo "the queue fails without a mutation"; exit 1; }

total=0 survived=0

# mutant NAME FILE OLD NEW
mutant() {
    name=$1 file=$2 old=$3 new=$4
    total=$((total + 1))
    mkdir -p "$work/m/server"
    OLD=$old NEW=$new awk '
        !done && (at = index($0, ENVIRON["OLD"])) {
            $0 = substr($0, 1, at - 1) ENVIRON["NEW"] substr($0, at + length(ENVIRON["OLD"]))
            done = 1
        }
        { print }
        END { exit !done }' "server/$file" >"$work/m/server/$file" ||
        { echo "$name: its line is not in $file any more"; exit 1; }
    case $file in
    *.h) sources=$(ls server/admission*.c) ;;
    *) sources=$work/m/server/$file ;;
    esac
    cp "$work"/*.o "$work/m/"
    for source in $sources; do
        $cc $flags -I"$work/m" -I. -c "$source" -o "$work/m/$(basename "$source" .c).o"
    done
    $cc "$work"/m/*.o -o "$work/m/sim"
    rm -r "$work/m/server"
    if timeout 120 "$work/m/sim" --jobs 1 --seeds "$seeds" >"$work/m/log" 2>&1; then
        echo "SURVIVED  $name"
        survived=$((survived + 1))
    else
        printf '%-58s %s\n' "$name" "$(grep -m1 -oE '(seed [0-9]+ .*|Assertion.*)' "$work/m/log" |
            cut -c1-110)"
    fi
}

mutant 'levels do not age' admission_batch.c \
    'return overdue != DKV_ADMISSION_NO_INDEX ? overdue : first;' 'return first;'
mutant 'of overdue levels the one just passed goes first' admission_batch.c \
    'passed > queue->level[overdue].passed[device]' 'passed < queue->level[overdue].passed[device]'
mutant 'the worst level is served first' admission_batch.c \
    'if (first == DKV_ADMISSION_NO_INDEX)' 'if (true)'
mutant 'credit is not asked for' admission_fair.c 'if (turn->deficit > 0 &&' 'if ('
mutant 'service is not charged' admission_batch.c \
    'turn->deficit -= dkv_admission_fair_cost(b->queue, part);' ';'
mutant 'every part costs the same' admission_fair.c \
    'return (int64_t)(part->n_bytes +' 'return (int64_t)(1024 +'
mutant 'debts are forgiven when a flow is empty' admission_fair.c \
    'if (!flow_has(queue, flow, device) && turn->deficit >= 0) {' \
    'if (!flow_has(queue, flow, device)) {'
mutant 'a round pays only who is first' admission_fair.c \
    'turn->deficit += rounds * quantum;' 'if (node == ring->next) turn->deficit += rounds * quantum;'
mutant 'a client may fill the batch' admission_batch.c \
    'return limit / n_clients > 0 ? limit / n_clients : 1;' 'return limit;'
mutant 'shares ignore work in flight' admission.c \
    'entry->n_in_flight--;' \
    'entry->n_in_flight--; close_lane(queue, entry->client, dkv_admission_part_of(node)->lane); open_lane(queue, entry->client, (dkv_admission_part_of(node)->lane + 1) % (queue->config.n_devices + 1));'
mutant 'an OK may come after the deadline' admission.c \
    'entry->status == DKV_OK && dkv_admission_expired(entry, now_us)' 'false'
mutant 'the deadline itself is in time' admission_priv.h \
    'return now_us >= entry->deadline_us;' 'return now_us > entry->deadline_us;'
mutant 'expired work is launched' admission_batch.c \
    'dkv_admission_expire(queue, now_us);' ';'
mutant 'a deadline is forgotten once the work runs' admission_batch.c \
    'if (entry->launched_us == 0)' \
    'dkv_admission_heap_remove(queue, entry); if (entry->launched_us == 0)'
mutant 'who failed in flight is told at the end' admission.c \
    'dkv_list_push_back(&queue->given_up, &entry->given_up_node);' ';'
mutant 'who failed with nothing in flight is told twice' admission.c \
    'dkv_list_remove(&entry->given_up_node);' ';'
mutant 'the longer of two timeouts counts' admission_judge.c 'cap_us < timeout_us' \
    'cap_us > timeout_us'
mutant 'an expired offer is accepted' admission_judge.c 'return DKV_ADMISSION_EXPIRED;' ';'
mutant 'sleeps past deadlines' admission_batch.c \
    'queue->n_heap > 0 ? queue->heap[0]->deadline_us : DKV_ADMISSION_NEVER' 'DKV_ADMISSION_NEVER'
mutant 'the heap sifts to the wrong child' admission_load.c \
    'queue->heap[child + 1]->deadline_us < queue->heap[child]->deadline_us' \
    'queue->heap[child + 1]->deadline_us > queue->heap[child]->deadline_us'
mutant 'batches exceed their bytes' admission_batch.c \
    'b->batch->n_bytes + part->n_bytes <= config->batch_bytes' 'true'
mutant 'batches mix keys' admission_fair.c 'part->key == *key' 'true'
mutant 'an idle device waits for a fuller batch' admission_batch.c \
    'device->n_batches == 0 || batch_would_be_full(queue, index)' 'batch_would_be_full(queue, index)'
mutant 'a busy device does not wait for one' admission_batch.c \
    'return oldest_us(queue, index) + queue->config.max_queue_delay_us;' 'return 0;'
mutant 'the most loaded device is served first' admission_batch.c \
    'device->n_batches < queue->device[best].n_batches' \
    'device->n_batches > queue->device[best].n_batches'
mutant 'host memory goes to the first device only' admission_fair.c \
    'queue->config.n_devices - 1 : lane' '0 : lane'
mutant 'a down device is given work' admission_batch.c '!device->up || device->n_batches' \
    'device->n_batches'
mutant 'one batch too many in flight' admission_batch.c \
    'device->n_batches >= queue->config.max_flight' 'device->n_batches > queue->config.max_flight'
mutant 'parts are replayed without end' admission.c '&& part->n_launches == 1)' ')'
mutant 'parts of a lost batch are not replayed' admission.c '&& part->n_launches == 1)' \
    '&& part->n_launches == 0)'
mutant 'a replay takes neighbours along' admission_batch.c \
    'queue->config.max_flight || runs_solo(device)' 'queue->config.max_flight'
mutant 'new work goes before replays' admission_batch.c \
    'return device->n_batches == 0 ? 0 : DKV_ADMISSION_NEVER;' ';'
mutant 'a cancelled entry is replayed' admission.c \
    'entry->status == DKV_OK && !dkv_admission_expired(entry, now_us) && part->n_launches == 1' \
    '!dkv_admission_expired(entry, now_us) && part->n_launches == 1'
mutant 'the last reason counts' admission.c 'if (entry->status == DKV_OK) {' \
    'if (entry->status != DKV_OK) entry->status = status; else {'
mutant 'an entry ends with parts in flight' admission.c \
    'if (entry->n_waiting > 0 || entry->n_in_flight > 0)' 'if (entry->n_waiting > 0)'
mutant 'bytes of ended entries stay' admission.c 'client->open_bytes -= entry->n_bytes;' ';'
mutant 'the quota of entries is one too many' admission_judge.c \
    'client->n_open >= config->client_max_entries' 'client->n_open > config->client_max_entries'
mutant 'the bound on bytes forgets the offer itself' admission_judge.c \
    '!has_room(queue->open_bytes, config->max_bytes, n_bytes)' 'queue->open_bytes >= config->max_bytes'
mutant 'offers come in while draining' admission_judge.c 'if (queue->draining)' 'if (false)'
mutant 'degrade is ignored' admission.c 'entry->degrade &&' 'false &&'
mutant 'a retired device keeps its work' admission.c 'fail_lane(queue, index, now_us);' ';'
mutant 'any-device work outlives the last device' admission.c \
    'fail_lane(queue, dkv_admission_any_lane(queue), now_us);' ';'
mutant 'a client overtakes itself' admission_fair.c 'own->seq < any->seq ? own : any' \
    'own->seq < any->seq ? any : own'
mutant 'retry-after is not bounded' admission_load.c 'if (us < RETRY_MIN_US)' 'if (false)'
mutant 'late without anything ahead' admission_load.c 'running.bytes + queued.bytes <= 0.0' 'false'

echo "$((total - survived)) of $total mutants caught"
[ "$survived" -eq 0 ]
