/* Widening, rounding, quantisation and rotation in plain C. */
#include "cpu/scalar/scalar.h"
#include "formats/formats.h"

#define TILE APA_CPU_TILE
#define LARGEST_DIM 1024

static float element(apa_dtype dtype, const void *src, int64_t i)
{
    if (dtype == APA_DTYPE_F32)
        return ((const float *)src)[i];
    const uint16_t bits = ((const uint16_t *)src)[i];
    return dtype == APA_DTYPE_F16 ? apa_f16_to_f32(bits) : apa_bf16_to_f32(bits);
}

bool apa_widen_scalar(apa_dtype dtype, const void *src, int64_t n, float *dst)
{
    bool finite = true;
    for (int64_t i = 0; i < n; i++) {
        dst[i] = element(dtype, src, i);
        finite = finite && isfinite(dst[i]);
    }
    return finite;
}

void apa_load_k_scalar(apa_dtype dtype, const void *src, int64_t stride, int64_t n, int64_t D, int64_t Dp, float *k)
{
    for (int64_t key = 0; key < n; key++)
        for (int64_t d = 0; d < Dp; d++)
            k[key * Dp + d] = d < D ? element(dtype, (const char *)src + key * stride, d) : 0.0f;
}

uint64_t apa_load_v_scalar(apa_dtype dtype, const void *src, int64_t stride, int64_t n, int64_t Dv, int64_t Dvp,
                           int64_t key, float *v)
{
    uint64_t poison = 0;
    for (int64_t i = 0; i < n; i++)
        for (int64_t c = 0; c < Dvp; c++) {
            const float x = c < Dv ? element(dtype, (const char *)src + i * stride, c) : 0.0f;
            poison |= (uint64_t)!isfinite(x) << (key + i);
            v[c / 8 * APA_CPU_V_BLOCK + (key + i) * 8 + c % 8] = x;
        }
    return poison;
}

void apa_narrow_scalar(apa_dtype dtype, const float *value, int64_t n, void *dst)
{
    for (int64_t i = 0; i < n; i++)
        if (dtype == APA_DTYPE_F32)
            ((float *)dst)[i] = value[i];
        else
            ((uint16_t *)dst)[i] = dtype == APA_DTYPE_F16 ? apa_f32_to_f16(value[i]) : apa_f32_to_bf16(value[i]);
}

float apa_quantise_row_scalar(const float *value, int64_t n, int8_t *code)
{
    return apa_int8_quantise(value, (size_t)n, code);
}

void apa_hadamard_scalar(float *value, int64_t n, int64_t block)
{
    float root = 1.0f;
    for (int64_t b = block; b > 1; b /= 4)
        root *= b == 2 ? 0.70710678118654752f : 0.5f;
    for (int64_t start = 0; start < n; start += block) {
        float *x = value + start;
        for (int64_t h = 1; h < block; h *= 2)
            for (int64_t i = 0; i < block; i += 2 * h)
                for (int64_t j = i; j < i + h; j++) {
                    const float a = x[j], b = x[j + h];
                    x[j] = a + b;
                    x[j + h] = a - b;
                }
        for (int64_t i = 0; i < block; i++)
            x[i] *= root;
    }
}

int apa_sum_k_scalar(apa_dtype dtype, const void *const *rows, int n, int64_t D, const void *const *ahead, double *sum)
{
    (void)ahead;
    float row[LARGEST_DIM] = {0.0f};
    int count = 0;
    for (int i = 0; i < n; i++) {
        if (!apa_widen_scalar(dtype, rows[i], D, row))
            continue;
        for (int64_t d = 0; d < D; d++)
            sum[d] += row[d];
        count++;
    }
    return count;
}

/* One key; its codes, bias and scale are 0 already. */
static bool quantise_key(apa_dtype dtype, const void *src, int64_t D, const float *mean, int64_t block, int8_t *code,
                         int32_t *bias, float *scale)
{
    float row[LARGEST_DIM] = {0.0f};
    bool finite = apa_widen_scalar(dtype, src, D, row);
    for (int64_t d = 0; d < D; d++)
        row[d] -= mean[d];
    if (block > 1)
        apa_hadamard_scalar(row, D, block);
    for (int64_t d = 0; d < D; d++)
        finite = finite && isfinite(row[d]);
    if (!finite)
        return false;
    *scale = apa_quantise_row_scalar(row, D, code);
    for (int64_t d = 0; d < D; d++)
        *bias -= 128 * code[d];
    return true;
}

bool apa_quantise_k_scalar(apa_dtype dtype, const void *const *rows, int n, int64_t D, const void *const *ahead,
                           const float *mean, int64_t block, int8_t *k8, int32_t *bias, float *k_scale)
{
    (void)ahead;
    const int64_t Dp = (D + 7) / 8 * 8;
    bool finite = true;
    memset(k8, 0, (size_t)(TILE * Dp));
    memset(bias, 0, TILE * sizeof *bias);
    memset(k_scale, 0, TILE * sizeof *k_scale);
    for (int key = 0; key < n; key++)
        finite = quantise_key(dtype, rows[key], D, mean, block, k8 + key * Dp, &bias[key], &k_scale[key]) && finite;
    return finite;
}

/* Channel c of the tile: column has its values. */
static void quantise_column(const float *column, int64_t Dvp, int64_t c, int8_t *v8, float *v_scale)
{
    int8_t code[TILE];
    v_scale[c] = apa_int8_quantise(column, TILE, code);
    for (int key = 0; key < TILE; key++)
        v8[(key / 4 * Dvp + c) * 4 + key % 4] = code[key];
}

bool apa_quantise_v_scalar(apa_dtype dtype, const void *const *rows, int n, int64_t Dv, const void *const *ahead,
                           int8_t *v8, float *v_scale, float *largest)
{
    (void)ahead;
    const int64_t Dvp = (Dv + 7) / 8 * 8;
    float row[LARGEST_DIM];
    bool usable[TILE], finite = true;
    for (int key = 0; key < n; key++) {
        usable[key] = apa_widen_scalar(dtype, rows[key], Dv, row);
        finite = finite && usable[key];
    }
    *largest = 0.0f;
    for (int64_t c = 0; c < Dvp; c++) {
        float column[TILE] = {0.0f};
        for (int key = 0; key < n && c < Dv; key++) {
            column[key] = usable[key] ? element(dtype, rows[key], c) : 0.0f;
            *largest = fabsf(column[key]) > *largest ? fabsf(column[key]) : *largest;
        }
        quantise_column(column, Dvp, c, v8, v_scale);
    }
    return finite;
}
