/* The local socket's messages. The input is a stream as a peer sends it: headers and payloads, one
 * after the other, the first byte saying which side sends. Whatever is accepted is decoded to the
 * last record, encoded again and decoded again: that must give the same bytes.
 */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "tests/fuzz/fuzz.h"
#include "tests/proto/wire_samples.h"

static uint8_t first[2 * DKV_WIRE_PAYLOAD_MAX], second[2 * DKV_WIRE_PAYLOAD_MAX];

static void one_payload(unsigned type, const uint8_t *payload, size_t bytes)
{
    size_t first_bytes = 0, second_bytes = 0;
    uint8_t *exact = malloc(bytes > 0 ? bytes : 1); /* a read past its end shows */
    assert(exact != NULL);
    memcpy(exact, payload, bytes);
    if (wire_decode_any(type, exact, bytes, first, &first_bytes, NULL) == DKV_OK) {
        assert(first_bytes <= bytes);
        assert(wire_decode_any(type, first, first_bytes, second, &second_bytes, NULL) == DKV_OK);
        assert(second_bytes == first_bytes && memcmp(first, second, first_bytes) == 0);
    }
    free(exact);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct dkv_wire_header header;

    if (size == 0)
        return 0;
    const enum dkv_wire_sender sender = data[0] & 1 ? DKV_WIRE_FROM_DAEMON : DKV_WIRE_FROM_CLIENT;
    data++, size--;
    while (size >= DKV_WIRE_HEADER_BYTES &&
           dkv_wire_get_header(data, sender, &header, NULL) == DKV_OK) {
        data += DKV_WIRE_HEADER_BYTES;
        size -= DKV_WIRE_HEADER_BYTES;
        const size_t bytes = header.payload_bytes < size ? header.payload_bytes : size;
        one_payload(header.type, data, bytes);
        data += bytes;
        size -= bytes;
    }
    return 0;
}
