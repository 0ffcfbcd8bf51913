/* The float64 judge of bench_fast, on the device: written to be read, one unit at a time. */
#include <math.h>
#include <string.h>

#include "tests/bench/bench_fast.cuh"

namespace bench_fast
{

/* The float64 reference, one unit at a time. */
struct reference_buffers {
    double *logits; /* [rows][n] */
    double *top;    /* [rows] */
    double *sum;    /* [rows] */
    double *output; /* [rows][dim]; without the window's values where rows are averaged */
    double *scores; /* [n] */
    double *sizes;  /* [n]: what an error is measured against */
};

__device__ const unsigned char *query_row(const dkv_cu_block &block, const dkv_cu_unit &unit, int r)
{
    return unit.q + (r / block.window) * block.q_head_stride +
           (r % block.window) * block.q_row_stride;
}

__device__ double element(const unsigned char *row, uint32_t d, uint32_t dtype, float scale)
{
    return static_cast<double>(dkv_cu_load1(row + d * dkv_cu_dtype_bytes(dtype), dtype, 1.0f)) *
           static_cast<double>(scale);
}

__global__ void reference_logits(const dkv_cu_block *blocks, const dkv_cu_unit *units, uint32_t u,
                                 reference_buffers to)
{
    const dkv_cu_unit &unit = units[u];
    const dkv_cu_block &block = blocks[unit.block];
    const uint32_t key = blockIdx.x * blockDim.x + threadIdx.x;
    const int row = blockIdx.y;
    if (key >= block.n_valid)
        return;

    const unsigned char *k = dkv_cu_row(block.k, unit.k, key + block.valid_from,
                                        &unit.report->bad_k_entry);
    const unsigned char *q = query_row(block, unit, row);
    double z = 0.0;
    for (uint32_t d = 0; d < block.head_dim; d++)
        z += static_cast<double>(dkv_cu_load1(q + 2 * d, block.q_dtype, 1.0f)) *
             element(k, d, block.k.dtype, unit.k_scale);
    z *= static_cast<double>(block.scale);
    if (block.softcap != 0.0f)
        z = block.softcap * tanh(z / block.softcap);
    const bool visible = key <= block.n_valid - block.window + row % block.window;
    to.logits[static_cast<size_t>(row) * block.n_valid + key] = visible ? z : -1e300;
}

__device__ double block_reduce(double x, bool maximum)
{
    __shared__ double room[1024];
    room[threadIdx.x] = x;
    __syncthreads();
    for (int half = 512; half > 0; half /= 2) {
        if (threadIdx.x < half)
            room[threadIdx.x] = maximum ? fmax(room[threadIdx.x], room[threadIdx.x + half])
                                        : room[threadIdx.x] + room[threadIdx.x + half];
        __syncthreads();
    }
    const double result = room[0];
    __syncthreads();
    return result;
}

__global__ void reference_softmax(const dkv_cu_block *blocks, const dkv_cu_unit *units, uint32_t u,
                                  reference_buffers to)
{
    const dkv_cu_unit &unit = units[u];
    const dkv_cu_block &block = blocks[unit.block];
    const int row = blockIdx.x;
    const double *z = to.logits + static_cast<size_t>(row) * block.n_valid;
    const double sink = unit.sink_logits ? static_cast<double>(unit.sink_logits[row / block.window])
                                         : -1e300;
    double top = sink;
    for (uint32_t j = threadIdx.x; j < block.n_valid; j += blockDim.x)
        top = fmax(top, z[j]);
    top = block_reduce(top, true);
    double sum = 0.0;
    for (uint32_t j = threadIdx.x; j < block.n_valid; j += blockDim.x)
        sum += exp(z[j] - top);
    sum = block_reduce(sum, false);
    if (threadIdx.x == 0) {
        to.top[row] = top;
        to.sum[row] = sum + exp(sink - top);
    }
}

__global__ void reference_output(const dkv_cu_block *blocks, const dkv_cu_unit *units, uint32_t u,
                                 reference_buffers to)
{
    const dkv_cu_unit &unit = units[u];
    const dkv_cu_block &block = blocks[unit.block];
    const int row = blockIdx.y;
    const double *z = to.logits + static_cast<size_t>(row) * block.n_valid;
    const uint32_t end = block.n_valid - (block.form == DKV_CU_FORM_AVERAGE ? block.window : 0);
    double sum = 0.0;

    for (uint32_t j = blockIdx.x; j < end; j += gridDim.x) {
        const unsigned char *v = dkv_cu_row(block.v, unit.v, j + block.valid_from,
                                            &unit.report->bad_k_entry);
        sum += exp(z[j] - to.top[row]) / to.sum[row] *
               element(v, threadIdx.x, block.v.dtype, unit.v_scale);
    }
    atomicAdd(&to.output[row * block.v_dim + threadIdx.x], sum);
}

/* What row t of a head counts. */
__device__ double weight_of(const dkv_cu_block &block, uint32_t t)
{
    if (block.reduce == DKV_REDUCE_SUM)
        return 1.0;
    if (block.reduce == DKV_REDUCE_MEAN)
        return 1.0 / block.window;
    const double alpha = static_cast<double>(block.ema_alpha);
    return pow(1.0 - alpha, block.window - 1.0 - t) * (t > 0 ? alpha : 1.0);
}

__device__ double warp_sum(double x)
{
    for (int lanes = 16; lanes > 0; lanes /= 2)
        x += __shfl_xor_sync(~0u, x, lanes);
    return x;
}

/* A key as a warp sees it. */
struct seen_key {
    const dkv_cu_block &block;
    const reference_buffers &to;
    const unsigned char *v;
    float v_scale;
    uint32_t key;

    __device__ double weight(uint32_t row) const /* p times the row's sum */
    {
        return exp(to.logits[static_cast<size_t>(row) * block.n_valid + key] - to.top[row]);
    }
    __device__ double value(uint32_t d) const
    {
        return element(v, d, block.v.dtype, v_scale);
    }
    __device__ double output(uint32_t row, uint32_t d) const
    {
        return to.output[row * block.v_dim + d];
    }
    __device__ double distance(uint32_t row) const /* squared */
    {
        double sum = 0.0;
        for (uint32_t d = threadIdx.x % 32; d < block.v_dim; d += 32)
            sum += (output(row, d) - value(d)) * (output(row, d) - value(d));
        return warp_sum(sum);
    }
    __device__ double projection(uint32_t row, double *size) const
    {
        double sum = 0.0;
        *size = 0.0;
        for (uint32_t d = threadIdx.x % 32; d < block.v_dim; d += 32) {
            sum += output(row, d) * value(d);
            *size += fabs(output(row, d) * value(d));
        }
        *size = warp_sum(*size);
        return warp_sum(sum);
    }
    /* The term of a head whose rows become one. */
    __device__ double averaged(uint32_t head) const
    {
        const uint32_t w = block.window;
        double bar = 0.0;
        double left = 0.0;
        for (uint32_t t = 0; t < w; t++) {
            const uint32_t row = head * w + t;
            bar += weight_of(block, t) * weight(row) / to.sum[row];
            left += weight_of(block, t) * (to.sum[row] - weight(row)) / to.sum[row];
        }
        const bool takes_out = bar > 0.5 && key < block.n_valid - w; /* for its digits' sake */
        double sum = 0.0;
        for (uint32_t d = threadIdx.x % 32; d < block.v_dim; d += 32) {
            double gap = -(takes_out ? left : 1.0) * value(d);
            for (uint32_t t = 0; t < w; t++) {
                const uint32_t row = head * w + t;
                const double own = takes_out ? weight(row) / to.sum[row] * value(d) : 0.0;
                gap += weight_of(block, t) * (output(row, d) - own);
            }
            sum += gap * gap;
        }
        sum = warp_sum(sum);
        return left > 0.0 ? bar / left * sqrt(sum) : 0.0;
    }
    /* The term of a row that stands for itself, and what an error of it is measured against. */
    __device__ double term(uint32_t row, double *size) const
    {
        const double counts = weight_of(block, row % block.window);
        const double others = to.sum[row] - weight(row);
        if (block.form == DKV_CU_FORM_PROJ) {
            const double p = counts * weight(row) / to.sum[row];
            const double projected = projection(row, size);
            *size *= p;
            return p * projected;
        }
        const bool alone = block.n_valid == block.window && row % block.window == 0;
        const double odds = others > 0.0 && !alone ? weight(row) / others : 0.0;
        *size = block.form == DKV_CU_FORM_DROPKV ? odds * odds * distance(row)
                                                 : counts * odds * sqrt(distance(row));
        return *size;
    }
};

__global__ void reference_scores(const dkv_cu_block *blocks, const dkv_cu_unit *units, uint32_t u,
                                 reference_buffers to)
{
    const dkv_cu_unit &unit = units[u];
    const dkv_cu_block &block = blocks[unit.block];
    const uint32_t key = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (key >= block.n_valid)
        return;

    const seen_key seen = {
        block, to, dkv_cu_row(block.v, unit.v, key + block.valid_from, &unit.report->bad_k_entry),
        unit.v_scale, key};
    double score = 0.0;
    double size = 0.0;
    if (block.form == DKV_CU_FORM_AVERAGE) {
        for (uint32_t head = 0; head < block.group; head++)
            score += seen.averaged(head);
        size = score;
    } else {
        for (uint32_t row = 0; row < block.group * block.window; row++) {
            double of_row;
            score += seen.term(row, &of_row);
            size += of_row;
        }
    }
    if (threadIdx.x % 32 == 0) {
        to.scores[key] = score / block.group;
        to.sizes[key] = size / block.group;
    }
}

/* Relative errors of one unit's scores; false if they are beyond what docs/numerics.md allows. */
bool compare_unit(const shape_case &c, batch *b, uint32_t u)
{
    const dkv_cu_block &block = b->blocks[b->units[u].block];
    const uint32_t rows = block.group * block.window;
    const uint32_t n = block.n_valid;
    reference_buffers to;
    CHECK(cudaMalloc(&to.logits, sizeof(double) * rows * n));
    CHECK(cudaMalloc(&to.top, sizeof(double) * rows));
    CHECK(cudaMalloc(&to.sum, sizeof(double) * rows));
    CHECK(cudaMalloc(&to.output, sizeof(double) * rows * c.dim));
    CHECK(cudaMalloc(&to.scores, sizeof(double) * n));
    CHECK(cudaMalloc(&to.sizes, sizeof(double) * n));
    CHECK(cudaMemset(to.output, 0, sizeof(double) * rows * c.dim));
    reference_logits<<<dim3((n + 255) / 256, rows), 256>>>(b->wave.blocks, b->wave.units, u, to);
    reference_softmax<<<rows, 1024>>>(b->wave.blocks, b->wave.units, u, to);
    reference_output<<<dim3(64, rows), c.dim>>>(b->wave.blocks, b->wave.units, u, to);
    reference_scores<<<(n + 7) / 8, 256>>>(b->wave.blocks, b->wave.units, u, to);
    std::vector<double> want(n);
    std::vector<double> size(n);
    int exponent;
    std::vector<float> got(n);
    CHECK(cudaMemcpy(want.data(), to.scores, sizeof(double) * n, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(size.data(), to.sizes, sizeof(double) * n, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(&exponent, b->units[u].exponent, sizeof(int), cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(got.data(), b->units[u].scores, sizeof(float) * n, cudaMemcpyDeviceToHost));
    cudaFree(to.logits), cudaFree(to.top), cudaFree(to.sum), cudaFree(to.output);
    cudaFree(to.scores), cudaFree(to.sizes);
    double largest = 0.0;
    for (double s : size)
        largest = std::max(largest, s);
    std::vector<double> error(n);
    uint32_t worst = 0;
    for (uint32_t j = 0; j < n; j++) {
        const double score = ldexp(static_cast<double>(got[j]), -2 * exponent);
        const double floor = std::max(size[j], std::max(1e-12 * largest, 1e-300));
        error[j] = c.pattern == SAME_VALUES ? fabs(score) : fabs(score - want[j]) / floor;
        if (!(error[j] < 1e30))
            error[j] = 1e30;
        if (error[j] > error[worst])
            worst = j;
    }
    const double worst_error = error[worst];
    std::sort(error.begin(), error.end());
    const bool good = error[n / 2] <= 5e-4 && worst_error <= 5e-3;
    printf("%-18s unit %-4u median %.1e p99 %.1e max %.1e at %u (want %.3e)%s\n", c.name, u,
           error[n / 2], error[static_cast<size_t>(n) * 99 / 100], worst_error, worst, want[worst],
           good ? "" : "  WRONG");
    return good;
}

/* Scores of all units of one launch. What the launch works on begins as NaN. */
std::vector<float> scores_of(const struct dkv_cu_device *device, batch *b)
{
    const size_t n = b->blocks[0].n_valid;
    const size_t work_bytes = dkv_cu_work_bytes(b->scorer, &b->blocks[0]);
    std::vector<float> scores(n * b->units.size());
    for (const dkv_cu_unit &unit : b->units) {
        CHECK(cudaMemsetAsync(unit.work, 0xff, work_bytes));
        CHECK(cudaMemsetAsync(unit.scores, 0xff, n * sizeof(float)));
    }
    upload_extra(b);
    launch(device, b);
    for (size_t u = 0; u < b->units.size(); u++)
        CHECK(cudaMemcpyAsync(&scores[u * n], b->units[u].scores, n * sizeof(float),
                              cudaMemcpyDeviceToHost));
    CHECK(cudaDeviceSynchronize());
    return scores;
}

bool check(const shape_case &c, const struct dkv_cu_device *device,
           const struct dkv_cu_scorer *scorer, int launches)
{
    batch b;
    make_batch(c, device, scorer, 4242, &b);
    const std::vector<float> first = scores_of(device, &b);
    bool good = true;
    int differ = 0;
    for (int run = 1; run < launches; run++) {
        const std::vector<float> next = scores_of(device, &b);
        differ += memcmp(first.data(), next.data(), next.size() * sizeof(float)) != 0;
    }
    good &= compare_unit(c, &b, 0);
    if (b.wave.n_units > 1)
        good &= compare_unit(c, &b, b.wave.n_units - 1);
    if (differ > 0) {
        printf("%-18s %d of %d launches differ from the first\n", c.name, differ, launches);
        good = false;
    }
    std::vector<dkv_cu_report> reports(b.wave.n_units);
    CHECK(cudaMemcpy(reports.data(), b.units[0].report, reports.size() * sizeof(reports[0]),
                     cudaMemcpyDeviceToHost));
    for (const dkv_cu_report &report : reports) {
        if (report.flags != 0 || ~report.bad_k_entry || ~report.bad_v_entry) {
            printf("%-18s a unit reports flags %u\n", c.name, report.flags);
            good = false;
            break;
        }
    }
    return good;
}

} // namespace bench_fast
