/* Verdicts: one register's tile masses, λ and frame, all in the lanes; a verdict is one mask. */
#include "cpu/avx512/avx512.h"
#include "cpu/avx512/vector.h"

#include <math.h>

bool apa_look_avx512(apa_cpu_walk *walk, const float *maximum, float k_scale_max, float v_max, float *top)
{
    const __m512 lowest = _mm512_set1_ps(-INFINITY), most = _mm512_loadu_ps(maximum);
    const __mmask16 seen = _mm512_cmp_ps_mask(most, lowest, _CMP_NEQ_UQ);
    const __m512 x = _mm512_mask_mul_ps(lowest, seen, most, _mm512_loadu_ps(walk->q_scale));
    _mm512_storeu_ps(top, x);
    const __m512 highest = _mm512_fmadd_ps(_mm512_loadu_ps(walk->error), _mm512_set1_ps(k_scale_max), x);
    const __m512 over = _mm512_sub_ps(highest, _mm512_loadu_ps(walk->frame));
    /* Most tiles are far from negligible; their exponents alone say so: 64·2^over > 2^-26·λ once
     * over + 6 >= floor(log2 λ) + 1 - 26. */
    const __m512 margin = _mm512_sub_ps(over, _mm512_getexp_ps(_mm512_loadu_ps(walk->lambda)));
    const __mmask16 plain = _mm512_cmp_ps_mask(margin, _mm512_set1_ps(-31.0f), _CMP_GE_OQ);
    if ((walk->real & plain & seen) != 0)
        return false;
    const __m512 power = apa_avx512_exp2(over);
    const __m512 bound = _mm512_maskz_mul_ps(seen, power, _mm512_set1_ps((float)TILE));
    const __m512 skipped = _mm512_add_ps(_mm512_loadu_ps(walk->skipped), bound);
    const __m512 limit = _mm512_mul_ps(_mm512_loadu_ps(walk->lambda), _mm512_set1_ps(APA_CPU_SKIP_LIMIT));
    const __mmask16 within = _mm512_cmp_ps_mask(skipped, limit, _CMP_LE_OQ);
    if ((walk->real & (uint16_t)~within) != 0)
        return false;
    _mm512_storeu_ps(walk->skipped, skipped);
    _mm512_storeu_ps(walk->skipped_v, _mm512_fmadd_ps(bound, _mm512_set1_ps(v_max), _mm512_loadu_ps(walk->skipped_v)));
    return true;
}

APA_INLINE void scale16(float *x, __m512 factor)
{
    _mm512_storeu_ps(x, _mm512_mul_ps(_mm512_loadu_ps(x), factor));
}

APA_INLINE __m512 tile_scale(__m512 top, __m512 frame)
{
    const __mmask16 seen = _mm512_cmp_ps_mask(top, _mm512_set1_ps(-INFINITY), _CMP_NEQ_UQ);
    return _mm512_maskz_mul_ps(seen, apa_avx512_exp2(_mm512_sub_ps(top, frame)), _mm512_set1_ps(1.0f / 255.0f));
}

APA_INLINE bool exceeds(const apa_cpu_walk *walk, __m512 mass, float eps, __m512 lambda)
{
    return (walk->real & _mm512_cmp_ps_mask(mass, _mm512_mul_ps(_mm512_set1_ps(eps), lambda), _CMP_GT_OQ)) != 0;
}

int apa_judge_avx512(apa_cpu_walk *walk, const float *top, const int32_t *sum, float eps, float *alpha, float *p_scale)
{
    int judged = 0;
    const __m512 x = _mm512_loadu_ps(top);
    __m512 frame = _mm512_loadu_ps(walk->frame);
    const __mmask16 moves =
        _mm512_cmp_ps_mask(x, _mm512_add_ps(frame, _mm512_set1_ps(APA_CPU_FRAME_SLACK)), _CMP_GT_OQ);
    if (moves != 0) {
        const __m512 moved = _mm512_mask_mov_ps(frame, moves, x);
        const __m512 factor =
            _mm512_mask_mov_ps(_mm512_set1_ps(1.0f), moves, apa_avx512_exp2(_mm512_sub_ps(frame, moved)));
        frame = moved;
        _mm512_storeu_ps(walk->frame, frame);
        _mm512_storeu_ps(alpha, factor);
        scale16(walk->lambda, factor);
        scale16(walk->floor, factor);
        scale16(walk->cold, factor);
        scale16(walk->skipped, factor);
        scale16(walk->skipped_v, factor);
        if (_mm512_cmp_ps_mask(factor, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ) != 0)
            judged |= APA_CPU_JUDGED_MOVED;
    }
    const __m512 scale = tile_scale(x, frame);
    _mm512_storeu_ps(p_scale, scale);
    const __m512 mass = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_loadu_si512(sum)), scale);
    const __m512 lambda = _mm512_add_ps(_mm512_loadu_ps(walk->lambda), mass);
    _mm512_storeu_ps(walk->lambda, lambda);
    if (exceeds(walk, mass, eps, _mm512_max_ps(lambda, _mm512_loadu_ps(walk->floor))))
        judged |= APA_CPU_JUDGED_CANDIDATE;
    return judged;
}

bool apa_judge_again_avx512(const apa_cpu_walk *walk, const float *top, const int32_t *sum, float eps, float *p_scale)
{
    const __m512 scale = tile_scale(_mm512_loadu_ps(top), _mm512_loadu_ps(walk->frame));
    _mm512_storeu_ps(p_scale, scale);
    return exceeds(walk, _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_loadu_si512(sum)), scale), eps,
                   _mm512_loadu_ps(walk->lambda));
}
