/* Probabilities of a cold tile: scores of a row in, quantised P out.
 *
 * P = 2^(s - p_frame), so P <= 1; what is multiplied is code/range, code what the matrix unit sees. With c the
 * candidate frame and τ lazy_tau: row-tile   p_frame = the row's maximum in the tile.  code = round(range·P), range 255
 * (int8) or 448 (e4m3). row-tile-pow2: the same with p_frame rounded up to an integer and range 256 (direct codes:
 * 256·2^(.455/8), see below); p_phase: to an integer and 0, 1/2, 1/4, 3/4 in turns, two tiles each. static     p_frame
 * = c
 * + τ.  code = round(S·2^τ·P): S·e^(score - running maximum), as a kernel with a static scale has it ue4m3, pow2
 * p_frame = c + τ.  Per 16 keys code = E2M1(P·1536/s₈)·s₈, s₈ the smallest normal UE4M3 (or power of two) that is >=
 * 256·max P and >= 2^-6; range 1536 = 6·256: max P maps to 6 at most, P = 1 to s₈ = 256 < 448 two-level  p_frame = the
 * row's maximum.  Per 16 keys code = E2M1(2688·P/s₈)·s₈, s₈ = the UE4M3 value nearest to 2688·max P/6; a block whose s₈
 * rounds to 0, or in which nothing is seen, is 0 mx p_frame =
 * c
 * + τ.  Per 32 keys code = element(P/x)·x, x the block's power of two Frames need no P scale in row-tile and two-level:
 * nothing can collapse there.
 *
 * Direct codes (p_map): the code of E2M1 is the number of midpoints that the scaled P reaches, compared in log2 units,
 * so no exponential is taken; a score on a midpoint goes up. Block scales are powers of two, from the largest score.
 * E4M3: the code number is floor(8·log₂(S·P) + 56 - .455 + .5), clamped to 0 … 126: between powers of two the mantissa
 * of a code is linear, its logarithm is not, and .455 centres the error. Sources: APA 0.2 to 0.6; SageAttention3, arXiv
 * 2505.11594 (two-level); P-Cast (static); "Hardware-Aware FP4 FlashAttention-4" (Direct-P); OCP Microscaling
 * Formats 1.0. */
#include "reference/internal.h"

#include <math.h>

#define NVFP4_P_SCALE 256.0
#define NVFP4_P_RANGE 1536.0   /* 6·256 */
#define TWO_LEVEL_RANGE 2688.0 /* 6·448 */
#define POW2_RANGE 256.0
#define UE4M3_MIN_NORMAL 0.015625 /* 2^-6 */
#define UE4M3_STEPS 16.0          /* significands of normals are 8/16 … 15/16 by 1/16 */
#define E8M0_LEAST -127
#define DIRECT_ONE 56.0 /* E4M3's code of 1 */
#define DIRECT_CENTRE 0.455
#define E4M3_LAST 126.0

static const double e2m1_value[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};

/* log2 of the midpoints .25, .75, 1.25, 1.75, 2.5, 3.5, 5 */
static const double e2m1_log2_midpoint[7] = {-2,
                                             -0.41503749927884381854,
                                             0.32192809488736234787,
                                             0.80735492205760410744,
                                             1.32192809488736234787,
                                             1.80735492205760410744,
                                             2.32192809488736234787};

bool apa_reference_framed(const apa_recipe *recipe)
{
    return recipe->p_scale != APA_P_SCALE_ROW_TILE && recipe->p_scale != APA_P_SCALE_TWO_LEVEL &&
           recipe->p_scale != APA_P_SCALE_ROW_TILE_POW2;
}

double apa_reference_phase(const apa_recipe *recipe, int64_t t)
{
    const int64_t pair = t / 2;
    return recipe->p_phase == APA_TOGGLE_ON ? (double)(pair % 2) / 2 + (double)(pair / 2 % 2) / 4 : 0.0;
}

double apa_reference_tau(const apa_recipe *recipe)
{
    return apa_reference_framed(recipe) ? recipe->lazy_tau : 0.0;
}

double apa_reference_p_range(const apa_recipe *recipe)
{
    switch (recipe->p_scale) {
    case APA_P_SCALE_ROW_TILE:
        return apa_recipe_p_range(recipe->pv_format);
    case APA_P_SCALE_ROW_TILE_POW2: /* with direct codes the centre is in what a code stands for: codes are rounded 8·s
                                     */
        return recipe->p_map == APA_P_MAP_DIRECT ? POW2_RANGE * exp2(DIRECT_CENTRE / 8) : POW2_RANGE;
    case APA_P_SCALE_STATIC:
        return recipe->pv_format == APA_PV_FORMAT_EXACT ? 1.0 : recipe->p_static_scale * exp2(recipe->lazy_tau);
    case APA_P_SCALE_TWO_LEVEL:
        return TWO_LEVEL_RANGE;
    case APA_P_SCALE_MX:
        return 1.0;
    default:
        return NVFP4_P_RANGE;
    }
}

/* Smallest normal UE4M3, or power of two, that is >= x, and >= 2^-6. */
static double p_scale_of(double x, apa_p_scale kind)
{
    int exponent;
    if (!(x > UE4M3_MIN_NORMAL))
        return UE4M3_MIN_NORMAL;
    const double fraction = frexp(x, &exponent); /* in [1/2, 1) */
    const double up =
        kind == APA_P_SCALE_POW2 ? (fraction > 0.5 ? 1.0 : 0.5) : ceil(fraction * UE4M3_STEPS) / UE4M3_STEPS;
    return ldexp(up, exponent);
}

static double round_element(apa_pv_format format, double x)
{
    switch (format) {
    case APA_PV_FORMAT_INT8:
        return rint(x);
    case APA_PV_FORMAT_E4M3:
    case APA_PV_FORMAT_MXFP8:
        return apa_reference_round(&apa_reference_e4m3, x);
    case APA_PV_FORMAT_NVFP4:
    case APA_PV_FORMAT_MXFP4:
        return apa_reference_round(&apa_reference_e2m1, x);
    case APA_PV_FORMAT_F16:
        return apa_reference_round(&apa_reference_f16, x);
    default:
        return x;
    }
}

/* Largest of n numbers, `least` if none is larger. */
static double largest(const double *x, int64_t n, double least)
{
    for (int64_t j = 0; j < n; ++j)
        least = x[j] > least ? x[j] : least;
    return least;
}

/* Codes of one block of E2M1 or E4M3 elements with scales: n values P in `p`. */
static void block_codes(const apa_recipe *recipe, const double *p, int64_t n, double *code)
{
    const double top = largest(p, n, 0);
    double scale = 1, factor = 1;
    if (recipe->p_scale == APA_P_SCALE_TWO_LEVEL) {
        factor = TWO_LEVEL_RANGE;
        scale = apa_format_round(APA_FORMAT_UE4M3, TWO_LEVEL_RANGE * top / 6);
    } else if (recipe->p_scale == APA_P_SCALE_MX) {
        const float one = (float)top;
        const apa_format element = recipe->pv_format == APA_PV_FORMAT_MXFP4 ? APA_FORMAT_E2M1 : APA_FORMAT_E4M3;
        scale = apa_format_decode(APA_FORMAT_E8M0,
                                  apa_mx_scale(&one, 1, element, recipe->mx_rounding == APA_MX_ROUNDING_UP));
    } else {
        factor = NVFP4_P_RANGE;
        scale = p_scale_of(NVFP4_P_SCALE * top, recipe->p_scale);
    }
    for (int64_t j = 0; j < n; ++j)
        code[j] = scale == 0 ? 0.0 : round_element(recipe->pv_format, p[j] * factor / scale) * scale;
}

/* How many midpoints 2^x reaches. */
static double direct_e2m1(double x)
{
    int code = 0;
    for (int m = 0; m < 7; ++m)
        code += x >= e2m1_log2_midpoint[m];
    return e2m1_value[code];
}

static double direct_e4m3(double x)
{
    const double code = floor(8 * x + DIRECT_ONE - DIRECT_CENTRE + 0.5);
    return !(code > 0) ? 0.0 : apa_format_decode(APA_FORMAT_E4M3, (uint32_t)(code > E4M3_LAST ? E4M3_LAST : code));
}

/* Codes straight from x = log2 P of n keys (one block). */
static void direct_codes(const apa_recipe *recipe, const double *x, int64_t n, double range, double *code)
{
    const double top = largest(x, n, -INFINITY), log2_range = log2(range);
    int exponent = 0;
    if (recipe->p_scale == APA_P_SCALE_POW2) {
        const double need = ceil(8 + top); /* 256·max P */
        exponent = need > -6 ? (int)need : -6;
    } else if (recipe->p_scale == APA_P_SCALE_MX) {
        const double need = recipe->mx_rounding == APA_MX_ROUNDING_UP ? ceil(top - log2(6.0)) : floor(top) - 2;
        exponent = need > E8M0_LEAST ? (int)need : E8M0_LEAST;
    }
    for (int64_t j = 0; j < n; ++j)
        code[j] = recipe->pv_format == APA_PV_FORMAT_E4M3 ? direct_e4m3(x[j] + log2_range)
                                                          : ldexp(direct_e2m1(x[j] + log2_range - exponent), exponent);
}

static int64_t block_of(const apa_recipe *recipe)
{
    switch (recipe->p_scale) {
    case APA_P_SCALE_UE4M3:
    case APA_P_SCALE_POW2:
    case APA_P_SCALE_TWO_LEVEL:
        return APA_NVFP4_BLOCK;
    case APA_P_SCALE_MX:
        return APA_MX_BLOCK;
    default:
        return APA_REFERENCE_TILE;
    }
}

void apa_reference_probabilities(const apa_recipe *recipe, apa_reference_row *row, double *p, double *code)
{
    const bool framed = apa_reference_framed(recipe), direct = recipe->p_map == APA_P_MAP_DIRECT;
    const double range = apa_reference_p_range(recipe), tau = apa_reference_tau(recipe);
    const int64_t block = block_of(recipe);
    double sum = 0;
    row->p_frame = framed                                         ? row->next + tau
                   : recipe->p_scale == APA_P_SCALE_ROW_TILE_POW2 ? ceil(row->top - row->phase) + row->phase
                                                                  : row->top;
    row->p_sum = 0;
    for (int64_t j = 0; j < APA_REFERENCE_TILE; ++j) {
        /* s - c first: a score that sets the frame has P = 2^-τ exactly, on the edge between two scales */
        const double x = framed ? p[j] - row->next - tau : p[j] - row->p_frame;
        p[j] = direct ? (p[j] == -INFINITY ? -INFINITY : x) : p[j] == -INFINITY ? 0.0 : exp2(x);
        sum += direct ? 0.0 : p[j];
    }
    if (recipe->exact_p == APA_TOGGLE_ON || recipe->pv_format == APA_PV_FORMAT_EXACT) {
        for (int64_t j = 0; j < APA_REFERENCE_TILE; ++j)
            code[j] = p[j] * range;
        row->p_sum = sum;
        return;
    }
    for (int64_t j = 0; j < APA_REFERENCE_TILE; j += block) {
        if (direct)
            direct_codes(recipe, p + j, block, range, code + j);
        else if (block < APA_REFERENCE_TILE)
            block_codes(recipe, p + j, block, code + j);
        else
            for (int64_t i = 0; i < APA_REFERENCE_TILE; ++i)
                code[i] = round_element(recipe->pv_format, range * p[i]);
    }
    for (int64_t j = 0; j < APA_REFERENCE_TILE; ++j) {
        p[j] = code[j] / range;
        row->p_sum += p[j];
    }
    if (recipe->p_sum == APA_P_SUM_EXACT)
        row->p_sum = sum;
}
