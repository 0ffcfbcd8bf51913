/* The tensors of an infer request, between the files that read it. Private to proto/oip*.c. */
#ifndef DKV_PROTO_OIP_TENSOR_H
#define DKV_PROTO_OIP_TENSOR_H

#include "proto/oip_json.h"

/* The inputs and outputs of the model, in enum order. */
struct dkv_oip_tensor_info {
    const char *name;
    unsigned n_dims;
    bool required; /* else optional and FP32 */
};
extern const struct dkv_oip_tensor_info dkv_oip_input_table[DKV_OIP_INPUTS];
extern const char *const dkv_oip_output_names[DKV_OIP_OUTPUTS];

/* Reads one element of `inputs` into infer->inputs[]. *binary_end is where the binary section has
 * been used up to, and moves on by what this input takes. */
enum dkv_status dkv_oip_tensor_parse(const json_t *input, struct dkv_oip_infer *infer,
                                     uint64_t *binary_end, struct dkv_error *err);

/* Writes the numbers of a `data` array, nested or flat, that dkv_oip_tensor_parse() has accepted.
 */
void dkv_oip_tensor_convert(const json_t *data, float *to);

/* Bytes of side memory that inputs[input] takes, a multiple of its alignment. */
uint64_t dkv_oip_side_need(const struct dkv_oip_infer *infer, int input);

#endif
