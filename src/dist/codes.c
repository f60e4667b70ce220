/* Codes: made, and taken apart. See codes.h. */
#include "dist/codes.h"

#include <math.h>
#include <string.h>

#define LARGEST_DIM 1024
#define LOG2_E 1.4426950408889634

/* ------------------------------------------------------------------------------- layout */

static int64_t up(int64_t bytes, int64_t to)
{
    return (bytes + to - 1) / to * to;
}

static int64_t head_bytes(const apa_dist_job *job, int64_t keys)
{
    const apa_dist_card *c = job->mine;
    const int64_t tiles = apa_dist_tiles(keys);
    return up(4 * (c->D + keys + tiles * c->Dv) + tiles + keys * (c->D + c->Dv), 64);
}

int64_t apa_dist_codes_bytes(const apa_dist_job *job, int64_t keys)
{
    return job->mine->B * job->mine->Hkv * head_bytes(job, keys);
}

apa_dist_codes apa_dist_codes_at(const apa_dist_job *job, const char *packed, int64_t keys, int64_t head)
{
    const apa_dist_card *c = job->mine;
    const int64_t tiles = apa_dist_tiles(keys);
    apa_dist_codes codes;
    codes.mean = (float *)(void *)(packed + head * head_bytes(job, keys));
    codes.k_scale = codes.mean + c->D;
    codes.v_scale = codes.k_scale + keys;
    codes.poisoned = (uint8_t *)(codes.v_scale + tiles * c->Dv);
    codes.k = (int8_t *)(codes.poisoned + tiles);
    codes.v = codes.k + keys * c->D;
    return codes;
}

/* ------------------------------------------------------------------------------- numbers */

/* IEEE 754 binary16: exponent and mantissa move to binary32's places and 2^112 sets the bias right, subnormals too; the
 * top exponent becomes binary32's. */
static float half(uint16_t bits)
{
    uint32_t wide = (uint32_t)(bits & 0x7fff) << 13;
    float value;
    memcpy(&value, &wide, sizeof value);
    value *= 0x1p112f;
    memcpy(&wide, &value, sizeof wide);
    wide |= (bits & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u;
    wide |= (uint32_t)(bits & 0x8000) << 16;
    memcpy(&value, &wide, sizeof value);
    return value;
}

bool apa_dist_widen(apa_dtype dtype, const void *row, int64_t n, float *to)
{
    const uint16_t *half_row = row;
    if (dtype == APA_DTYPE_F32)
        memcpy(to, row, (size_t)n * sizeof *to);
    for (int64_t i = 0; i < n && dtype == APA_DTYPE_F16; i++)
        to[i] = half(half_row[i]);
    for (int64_t i = 0; i < n && dtype == APA_DTYPE_BF16; i++) {
        const uint32_t wide = (uint32_t)half_row[i] << 16;
        memcpy(&to[i], &wide, sizeof wide);
    }
    float check = 0.0f; /* 0·x is 0 for every finite x */
    for (int64_t i = 0; i < n; i++)
        check += 0.0f * to[i];
    return check == 0.0f;
}

/* Largest power of two that divides D. */
static int64_t rotation_block(const apa_dist_job *job)
{
    return job->recipe.hadamard == APA_TOGGLE_ON ? (job->mine->D & -job->mine->D) : 1;
}

void apa_dist_rotate(const apa_dist_job *job, float *row)
{
    const int64_t block = rotation_block(job);
    const float factor = (float)(1.0 / sqrt((double)block));
    for (int64_t step = 1; step < block; step *= 2)
        for (int64_t at = 0; at < job->mine->D; at += 2 * step)
            for (int64_t i = at; i < at + step; i++) {
                const float a = row[i], b = row[i + step];
                row[i] = a + b;
                row[i + step] = a - b;
            }
    for (int64_t i = 0; i < job->mine->D && block > 1; i++)
        row[i] *= factor;
}

#define LEAST_TOP 0x1.fcp-120f /* 127·2^-126: under it a block counts as zero, so that scales are normal numbers */

/* Symmetric INT8 of n values that lie `stride` apart, all finite. Returns the scale. */
static float quantise(const float *value, int64_t n, int64_t stride, int8_t *code)
{
    float top = 0.0f;
    for (int64_t i = 0; i < n; i++)
        top = fabsf(value[i * stride]) > top ? fabsf(value[i * stride]) : top;
    const float inverse = top < LEAST_TOP ? 0.0f : 127.0f / top;
    for (int64_t i = 0; i < n; i++) {
        float scaled = rintf(value[i * stride] * inverse);
        scaled = scaled > 127.0f ? 127.0f : scaled < -127.0f ? -127.0f : scaled;
        code[i * stride] = (int8_t)scaled;
    }
    return top < LEAST_TOP ? 0.0f : top / 127.0f;
}

/* ------------------------------------------------------------------------------- packing */

static const void *row_at(const apa_tensor *tensor, int64_t head, int64_t row)
{
    const int64_t b = head / tensor->shape[1], h = head % tensor->shape[1];
    return (const char *)tensor->data + (b * tensor->stride[0] + h * tensor->stride[1] + row * tensor->stride[2]) *
                                            (int64_t)apa_dtype_bytes(tensor->dtype);
}

/* Mean per channel over the run's finite keys; zeros when the recipe does not smooth. */
static void find_mean(const apa_dist_job *job, const apa_dist_run *run, int64_t head, float *mean)
{
    const int64_t D = job->mine->D;
    double sum[LARGEST_DIM] = {0.0}, part[LARGEST_DIM], keys = 0.0;
    float row[LARGEST_DIM];
    memset(mean, 0, (size_t)D * sizeof *mean);
    if (job->recipe.smooth_k != APA_TOGGLE_ON)
        return;
    for (int64_t tile = 0; tile < run->count; tile += APA_DIST_TILE) {
        memset(part, 0, sizeof part);
        for (int64_t key = tile; key < run->count && key < tile + APA_DIST_TILE; key++) {
            if (!apa_dist_widen(job->k.dtype, row_at(&job->k, head, run->at + key), D, row))
                continue;
            keys += 1.0;
            for (int64_t d = 0; d < D; d++)
                part[d] += (double)row[d];
        }
        for (int64_t d = 0; d < D; d++)
            sum[d] += part[d];
    }
    for (int64_t d = 0; d < D && keys > 0.0; d++)
        mean[d] = (float)(sum[d] / keys);
}

static void pack_k(const apa_dist_job *job, const apa_dist_run *run, int64_t head, const apa_dist_codes *to,
                   apa_dist_reach *reach)
{
    const int64_t D = job->mine->D;
    float row[LARGEST_DIM];
    for (int64_t key = 0; key < run->count; key++) {
        int8_t *code = to->k + key * D;
        to->k_scale[key] = 0.0f;
        if (!apa_dist_widen(job->k.dtype, row_at(&job->k, head, run->at + key), D, row)) {
            memset(code, 0, (size_t)D);
            to->poisoned[key / APA_DIST_TILE] = 1;
            continue;
        }
        for (int64_t d = 0; d < D; d++)
            row[d] -= to->mean[d];
        apa_dist_rotate(job, row);
        float total = 0.0f;
        for (int64_t d = 0; d < D; d++)
            total += fabsf(row[d]);
        to->k_scale[key] = quantise(row, D, 1, code);
        reach->k_sum = total > reach->k_sum ? total : reach->k_sum;
        reach->k_scale = to->k_scale[key] > reach->k_scale ? to->k_scale[key] : reach->k_scale;
    }
}

static void pack_v_tile(const apa_dist_job *job, const apa_dist_run *run, int64_t head, int64_t tile,
                        const apa_dist_codes *to)
{
    const int64_t Dv = job->mine->Dv, first = tile * APA_DIST_TILE, rest = run->count - first;
    const int64_t keys = rest < APA_DIST_TILE ? rest : APA_DIST_TILE;
    float value[APA_DIST_TILE][128]; /* channels in strips */
    float whole[LARGEST_DIM];
    int8_t code[APA_DIST_TILE][128];
    bool finite[APA_DIST_TILE];
    for (int64_t c = 0; c < Dv; c += 128) {
        const int64_t width = Dv - c < 128 ? Dv - c : 128;
        for (int64_t key = 0; key < keys; key++) {
            const void *row = row_at(&job->v, head, run->at + first + key);
            if (c == 0) {
                finite[key] = apa_dist_widen(job->v.dtype, row, Dv, whole);
                to->poisoned[tile] |= !finite[key];
            }
            memset(value[key], 0, sizeof value[key]);
            if (finite[key])
                apa_dist_widen(job->v.dtype, (const char *)row + c * job->element, width, value[key]);
        }
        for (int64_t i = 0; i < width; i++)
            to->v_scale[tile * Dv + c + i] = quantise(&value[0][i], keys, 128, &code[0][i]);
        for (int64_t key = 0; key < keys; key++)
            memcpy(to->v + (first + key) * Dv + c, code[key], (size_t)width);
    }
}

void apa_dist_codes_pack(const apa_dist_job *job, const apa_dist_run *run, char *packed, apa_dist_reach *reach)
{
    const int64_t tiles = apa_dist_tiles(run->count);
    for (int64_t head = 0; head < job->mine->B * job->mine->Hkv; head++) {
        const apa_dist_codes to = apa_dist_codes_at(job, packed, run->count, head);
        memset(to.poisoned, 0, (size_t)tiles);
        find_mean(job, run, head, to.mean);
        pack_k(job, run, head, &to, reach);
        for (int64_t tile = 0; tile < tiles; tile++)
            pack_v_tile(job, run, head, tile, &to);
        apa_dist_rotate(job, to.mean); /* q·mean is asked of rotated queries */
    }
}

void apa_dist_codes_unpack(const apa_dist_job *job, const apa_dist_codes *codes, int64_t keys, float *k, float *v)
{
    const int64_t D = job->mine->D, Dv = job->mine->Dv;
    for (int64_t key = 0; key < keys; key++) {
        const float scale = codes->k_scale[key], *v_scale = codes->v_scale + key / APA_DIST_TILE * Dv;
        for (int64_t d = 0; d < D; d++)
            k[key * D + d] = scale * (float)codes->k[key * D + d];
        for (int64_t d = 0; d < Dv; d++)
            v[key * Dv + d] = v_scale[d] * (float)codes->v[key * Dv + d];
    }
}

/* |q'·k' - q·k| <= Σ|q|·(half a step of k) + Σ|k|·(half a step of q), and the product of both. */
double apa_dist_score_error(const apa_dist_job *job, const apa_dist_reach *reach, int32_t ranks)
{
    apa_dist_reach most = {0, 0.0f, 0.0f, 0.0f, 0.0f};
    for (int32_t r = 0; r < ranks; r++) {
        if (reach[r].unbounded)
            return INFINITY;
        most.q_sum = fmaxf(most.q_sum, reach[r].q_sum);
        most.q_top = fmaxf(most.q_top, reach[r].q_top);
        most.k_sum = fmaxf(most.k_sum, reach[r].k_sum);
        most.k_scale = fmaxf(most.k_scale, reach[r].k_scale);
    }
    const double q_half = (double)most.q_top / 254.0, k_half = (double)most.k_scale / 2.0;
    return fabs(job->mine->scale) * LOG2_E *
           ((double)most.q_sum * k_half + (double)most.k_sum * q_half + (double)job->mine->D * q_half * k_half);
}
