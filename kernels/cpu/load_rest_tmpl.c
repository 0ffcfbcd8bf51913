/* The end of a row, shared by all ways to load one. */

/* Elements d .. of a row that do not fill a vector: nothing behind the row is ours to read or
 * write.
 */
static vf load_rest(float *out, const uint8_t *row, size_t d, size_t dim, enum dkv_dtype dtype,
                    vf scale, const float *shift)
{
    const size_t size = dkv_dtype_bytes(dtype);
    float in[LANES] = {0}, move[LANES] = {0}, result[LANES];
    memcpy(in, row + d * size, (dim - d) * size);
    if (shift != NULL)
        memcpy(move, shift + d, (dim - d) * sizeof(float));
    const vf x = v_from(in, dtype);
    v_store(result, v_fma(x, scale, v_load(move)));
    memcpy(out + d, result, (dim - d) * sizeof(float));
    return v_abs(x);
}
