/* What the kernels over eight lanes share. Include after the vector.h of an instruction set. */
#ifndef APA_CPU_LANES8_COMMON_H
#define APA_CPU_LANES8_COMMON_H

/* 2^x to within about an ulp; 0 for x <= -150, infinity from 2^103.5 on, NaN for NaN.
 *
 * x + 1.5·2^23 has round(x) in its low bits, which become the exponent of 2^(n + 24): a normal number from n = -150 on,
 * infinity at n = 104. The factor 2^-24 comes last and rounds once, into the subnormals where need be. */
APA_INLINE v8f v8f_exp2(v8f x)
{
    const v8f magic = v8f_set(0x1.8p23f);
    x = v8f_min_keep_nan(v8f_set(104.0f), v8f_max_keep_nan(v8f_set(-150.0f), x));
    const v8f shifted = v8f_add(x, magic), r = v8f_sub(x, v8f_sub(shifted, magic));
    v8f p = v8f_fma(v8f_set(APA_EXP2_6_C6), r, v8f_set(APA_EXP2_6_C5));
    p = v8f_fma(p, r, v8f_set(APA_EXP2_6_C4));
    p = v8f_fma(p, r, v8f_set(APA_EXP2_6_C3));
    p = v8f_fma(p, r, v8f_set(APA_EXP2_6_C2));
    p = v8f_fma(p, r, v8f_set(APA_EXP2_6_C1));
    p = v8f_fma(p, r, v8f_set(1.0f));
    const v8f power = v8f_from_bits(v8i_add(v8i_left(v8i_from_bits(shifted), 23), v8i_set((127 + 24) << 23)));
    return v8f_mul(v8f_mul(p, power), v8f_set(0x1p-24f));
}

/* round(255·2^x), x <= 0 and finite (whatever it is in lanes that see nothing is masked afterwards).
 *
 * x + 1.5·2^23 has round(x) in its low bits: they become the exponent that is added to the polynomial's. Under -64
 * every result is 0. */
APA_INLINE v8i v8i_probability(v8f x)
{
    const v8f magic = v8f_set(0x1.8p23f);
    x = v8f_max_keep_nan(v8f_set(-64.0f), x);
    const v8f shifted = v8f_add(x, magic), r = v8f_sub(x, v8f_sub(shifted, magic));
    v8f p = v8f_fma(v8f_set(255.0f * APA_EXP2_3_C3), r, v8f_set(255.0f * APA_EXP2_3_C2));
    p = v8f_fma(p, r, v8f_set(255.0f * APA_EXP2_3_C1));
    p = v8f_fma(p, r, v8f_set(255.0f));
    return v8i_from_float(v8f_from_bits(v8i_add(v8i_from_bits(p), v8i_left(v8i_from_bits(shifted), 23))));
}

/* Lanes of a half register that see key j of the tile: lo <= j < hi. */
APA_INLINE v8m v8_visible(v8i lo, v8i hi, int j)
{
    return v8m_and(v8i_gt(hi, v8i_set(j)), v8i_gt(v8i_set(j + 1), lo));
}

/* Asks for part `part` of `parts` of the rows. */
APA_INLINE void apa_lanes8_prefetch(const apa_cpu_prefetch *prefetch, int part, int parts)
{
    if (prefetch == NULL)
        return;
    const int64_t from = prefetch->rows * part / parts, to = prefetch->rows * (part + 1) / parts;
    for (int set = 0; set < 2; set++)
        for (int64_t row = from; row < to; row++)
            for (int64_t byte = 0; byte < prefetch->bytes[set]; byte += 64)
                v8_prefetch(prefetch->row[set] + row * prefetch->stride[set] + byte);
}

/* maximum[r][lane] of a panel's scores, NaN left out. */
APA_INLINE void apa_lanes8_maxima(int n, const float *s, float *maximum)
{
    for (int i = 0; i < n * LANES && maximum != NULL; i += EIGHT) {
        v8f most[2] = {v8f_set(-__builtin_inff()), v8f_set(-__builtin_inff())};
        for (int key = 0; key < TILE; key += 2)
            for (int u = 0; u < 2; u++)
                most[u] = v8f_max_drop_nan(most[u], v8f_load(s + (key + u) * n * LANES + i));
        v8f_store(maximum + i, v8f_max_drop_nan(most[0], most[1]));
    }
}

/* Kernels are written once and named per instruction set: KERNEL(look) is apa_look_avx2 where SUFFIX is avx2. */
#define APA_LANES8_JOIN(name, suffix) apa_##name##_##suffix
#define APA_LANES8_NAME(name, suffix) APA_LANES8_JOIN(name, suffix)
#define KERNEL(name) APA_LANES8_NAME(name, SUFFIX)

#endif
