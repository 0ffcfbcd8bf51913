/* One valid message of every type and form, and the decoder for any type: for the tests of the wire
 * and for its fuzz target.
 */
#ifndef DKV_TESTS_WIRE_SAMPLES_H
#define DKV_TESTS_WIRE_SAMPLES_H

#include "proto/wire.h"

#define N_WIRE_SAMPLES 22

struct wire_sample {
    unsigned type;
    uint8_t payload[DKV_WIRE_PAYLOAD_MAX];
    size_t bytes;
    uint16_t n_fds;
    uint64_t bulk_bytes;
};

/* Fills sample i of N_WIRE_SAMPLES. */
void wire_sample(unsigned i, struct wire_sample *sample);

/* Decodes a payload of any type and everything it holds, records and parameters included. On
 * success the message is encoded again into again[] and *again_bytes says how long it is. */
enum dkv_status wire_decode_any(unsigned type, const uint8_t *in, size_t bytes, uint8_t *again,
                                size_t *again_bytes, struct dkv_error *err);

#endif
