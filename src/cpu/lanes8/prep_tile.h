/* Prep of whole tiles, eight values at a time: included after cpu/lanes8/prep.h, whose helpers it uses. */

/* Asks for a row of `bytes` bytes; NULL: nothing to ask for. */
APA_INLINE void ask_for_row(const void *const *ahead, int i, int64_t bytes)
{
    for (int64_t byte = 0; ahead != NULL && byte < bytes; byte += 64)
        v8_prefetch((const char *)ahead[i] + byte);
}

APA_INLINE int64_t row_bytes(apa_dtype dtype, int64_t n)
{
    return n * (dtype == APA_DTYPE_F32 ? 4 : 2);
}

APA_INLINE bool row_is_finite(apa_dtype dtype, const char *src, int64_t n)
{
    v8m bad = v8m_none();
    for (int64_t i = 0; i < n; i += EIGHT)
        bad = v8m_or(bad, v8f_not_finite(load_upto8(dtype, src, i, n)));
    return v8m_bits(bad) == 0;
}

/* ---- K ---- */

APA_INLINE int sum_k(apa_dtype dtype, const void *const *rows, int n, int64_t D, const void *const *ahead, double *sum)
{
    int count = 0;
    for (int key = 0; key < n; key++) {
        ask_for_row(ahead, key, row_bytes(dtype, D));
        if (!row_is_finite(dtype, rows[key], D))
            continue;
        int64_t d = 0;
        for (; d + EIGHT <= D; d += EIGHT)
            v8f_accumulate(sum + d, load_upto8(dtype, rows[key], d, D));
        if (d < D) {
            float rest[EIGHT];
            v8f_store(rest, load_upto8(dtype, rows[key], d, D));
            for (int i = 0; d + i < D; i++)
                sum[d + i] += rest[i];
        }
        count++;
    }
    return count;
}

int KERNEL(sum_k)(apa_dtype dtype, const void *const *rows, int n, int64_t D, const void *const *ahead, double *sum)
{
    switch (dtype) {
    case APA_DTYPE_F16:
        return sum_k(APA_DTYPE_F16, rows, n, D, ahead, sum);
    case APA_DTYPE_BF16:
        return sum_k(APA_DTYPE_BF16, rows, n, D, ahead, sum);
    default:
        return sum_k(APA_DTYPE_F32, rows, n, D, ahead, sum);
    }
}

APA_INLINE bool quantise_keys(apa_dtype dtype, const void *const *rows, int n, int64_t D, const void *const *ahead,
                              const float *mean, int64_t block, int8_t *k8, int32_t *bias, float *k_scale)
{
    const int64_t Dp = (D + 7) / 8 * 8;
    bool finite = true;
    for (int key = 0; key < n; key++) {
        int8_t *code = k8 + key * Dp;
        int32_t sum = 0;
        float scale = 0.0f;
        ask_for_row(ahead, key, row_bytes(dtype, D));
        memset(code + D, 0, (size_t)(Dp - D));
        if (!quantise_k(dtype, rows[key], D, mean, block, code, &scale, &sum)) {
            memset(code, 0, (size_t)D);
            finite = false;
        }
        bias[key] = -128 * sum;
        k_scale[key] = scale;
    }
    memset(k8 + n * Dp, 0, (size_t)((TILE - n) * Dp));
    memset(bias + n, 0, sizeof *bias * (size_t)(TILE - n));
    memset(k_scale + n, 0, sizeof *k_scale * (size_t)(TILE - n));
    return finite;
}

bool KERNEL(quantise_k)(apa_dtype dtype, const void *const *rows, int n, int64_t D, const void *const *ahead,
                        const float *mean, int64_t block, int8_t *k8, int32_t *bias, float *k_scale)
{
    switch (dtype) {
    case APA_DTYPE_F16:
        return quantise_keys(APA_DTYPE_F16, rows, n, D, ahead, mean, block, k8, bias, k_scale);
    case APA_DTYPE_BF16:
        return quantise_keys(APA_DTYPE_BF16, rows, n, D, ahead, mean, block, k8, bias, k_scale);
    default:
        return quantise_keys(APA_DTYPE_F32, rows, n, D, ahead, mean, block, k8, bias, k_scale);
    }
}

/* ---- V ---- */

/* Codes of eight channels of four keys as words; keys from n on are zeros. */
APA_INLINE v8i quad_codes(apa_dtype dtype, const void *const *rows, int n, int64_t c, int64_t Dv, v8f inverse)
{
    v8i packed = v8i_set(0);
    for (int j = 0; j < 4 && j < n; j++) {
        const v8i code = codes8(load_upto8(dtype, rows[j], c, Dv), inverse);
        packed = v8i_or(packed, j == 3 ? v8i_left(code, 24) : v8i_left(v8i_low_byte(code), 8 * j));
    }
    return packed;
}

/* All channels; false, with nothing to be relied on, when a row is not finite. */
APA_INLINE bool quantise_finite(apa_dtype dtype, const void *const *rows, int n, int64_t Dv, const void *const *ahead,
                                int8_t *v8, float *v_scale, float *largest)
{
    const int64_t Dvp = (Dv + 7) / 8 * 8;
    v8f most = v8f_set(0.0f);
    v8m bad = v8m_none();
    for (int64_t c = 0; c < Dvp; c += EIGHT) {
        v8f amax = v8f_set(0.0f);
        for (int key = 0; key < n; key++) {
            ask_for_row(c == 0 ? ahead : NULL, key, row_bytes(dtype, Dv));
            const v8f x = load_upto8(dtype, rows[key], c, Dv);
            bad = v8m_or(bad, v8f_not_finite(x));
            amax = v8f_max_drop_nan(amax, v8f_abs(x));
        }
        most = v8f_max_drop_nan(most, amax);
        const v8m usable = v8f_ge(amax, v8f_set(APA_INT8_AMAX_MIN));
        const v8f inverse = v8f_keep(usable, v8f_div(v8f_set(127.0f), amax));
        v8f_store(v_scale + c, v8f_keep(usable, v8f_div(amax, v8f_set(127.0f))));
        for (int quad = 0; quad < TILE / 4; quad++)
            v8i_store((int32_t *)(void *)(v8 + (quad * Dvp + c) * 4),
                      quad_codes(dtype, rows + 4 * quad, n - 4 * quad, c, Dv, inverse));
    }
    *largest = v8f_reduce_max(most);
    return v8m_bits(bad) == 0;
}

APA_INLINE bool quantise_values(apa_dtype dtype, const void *const *rows, int n, int64_t Dv, const void *const *ahead,
                                int8_t *v8, float *v_scale, float *largest)
{
    static const uint64_t zeros[LARGEST_DIM * 4 / 8] = {0};
    const void *cleaned[TILE];
    if (quantise_finite(dtype, rows, n, Dv, ahead, v8, v_scale, largest))
        return true;
    for (int key = 0; key < n; key++)
        cleaned[key] = row_is_finite(dtype, rows[key], Dv) ? rows[key] : zeros;
    quantise_finite(dtype, cleaned, n, Dv, NULL, v8, v_scale, largest);
    return false;
}

bool KERNEL(quantise_v)(apa_dtype dtype, const void *const *rows, int n, int64_t Dv, const void *const *ahead,
                        int8_t *v8, float *v_scale, float *largest)
{
    switch (dtype) {
    case APA_DTYPE_F16:
        return quantise_values(APA_DTYPE_F16, rows, n, Dv, ahead, v8, v_scale, largest);
    case APA_DTYPE_BF16:
        return quantise_values(APA_DTYPE_BF16, rows, n, Dv, ahead, v8, v_scale, largest);
    default:
        return quantise_values(APA_DTYPE_F32, rows, n, Dv, ahead, v8, v_scale, largest);
    }
}
