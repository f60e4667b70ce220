/* The NVFP4 matrix product against plain loops, on whatever the device has: the instruction on sm_120a, the version in
 * software elsewhere.
 *
 * A single element 1 goes through every lane and register place of A, then of B, with random codes and scales in the
 * other operand: the result then is one row (or column) of the other operand times the scales, exactly, and lies where
 * the tables say only if both operands and all scales do. The tables are written here a second time, from the PTX ISA
 * (matrix fragments for mma.m16n8k64, block scaling for mma.sync), element by element. Then random operands, held
 * against a sum in double. */
#include "cuda/nvfp4.cuh"
#include "tests/cuda/verify.h"

#include <cuda_runtime.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

namespace
{

constexpr int M = 16, N = 8, K = 64, BLOCKS = 4;

/* One product: codes and scales as matrices. */
struct Operands {
    uint8_t a[M][K], b[K][N];                       /* E2M1 */
    uint8_t scale_a[M][BLOCKS], scale_b[BLOCKS][N]; /* UE4M3 */
    int from_a, from_b;
};

/* The same as the lanes hold it, and the result. */
struct Lanes {
    uint32_t a[32][4], b[32][2], scale_a[32], scale_b[32];
    int from_a, from_b;
    float d[32][4];
};

__global__ void product_kernel(Lanes *all)
{
    Lanes &x = all[blockIdx.x];
    const int lane = threadIdx.x;
    float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    const uint32_t a[4] = {x.a[lane][0], x.a[lane][1], x.a[lane][2], x.a[lane][3]};
    /* selectors are immediates in kernels: all eight pairs, one of which is meant */
#pragma unroll
    for (int from_a = 0; from_a < 2; from_a++)
#pragma unroll
        for (int from_b = 0; from_b < 4; from_b++)
            if (x.from_a == from_a && x.from_b == from_b)
                mma_nvfp4(d, a, x.b[lane][0], x.b[lane][1], x.scale_a[lane], from_a, x.scale_b[lane], from_b);
    for (int i = 0; i < 4; i++)
        x.d[lane][i] = d[i];
}

double e2m1(int code)
{
    static const double value[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    return (code & 8) != 0 ? -value[code & 7] : value[code & 7];
}

double ue4m3(int code)
{
    return code < 8 ? ldexp(code, -9) : ldexp(8 + code % 8, code / 8 - 10);
}

/* Row and column of element i (0 … 31) of A in a lane; of element i (0 … 15) of B. */
int row_of_a(int lane, int i)
{
    return lane / 4 + (i / 8 % 2 == 0 ? 0 : 8);
}

int column_of_a(int lane, int i)
{
    return lane % 4 * 8 + i % 8 + (i < 16 ? 0 : 32);
}

int row_of_b(int lane, int i)
{
    return lane % 4 * 8 + i % 8 + (i < 8 ? 0 : 32);
}

Lanes to_lanes(const Operands &x)
{
    Lanes y;
    memset(&y, 0, sizeof y);
    y.from_a = x.from_a;
    y.from_b = x.from_b;
    for (int lane = 0; lane < 32; lane++) {
        for (int i = 0; i < 32; i++)
            y.a[lane][i / 8] |= static_cast<uint32_t>(x.a[row_of_a(lane, i)][column_of_a(lane, i)]) << (4 * (i % 8));
        for (int i = 0; i < 16; i++)
            y.b[lane][i / 8] |= static_cast<uint32_t>(x.b[row_of_b(lane, i)][lane / 4]) << (4 * (i % 8));
        /* lanes that are not asked for their scales hold other numbers */
        const bool gives_a = lane % 4 / 2 == x.from_a, gives_b = lane % 4 == x.from_b;
        for (int j = 0; j < BLOCKS; j++) {
            const int row = lane / 4 + 8 * (lane % 2);
            y.scale_a[lane] |= static_cast<uint32_t>(gives_a ? x.scale_a[row][j] : 0x55 + j) << (8 * j);
            y.scale_b[lane] |= static_cast<uint32_t>(gives_b ? x.scale_b[j][lane / 4] : 0x33 + j) << (8 * j);
        }
    }
    return y;
}

/* Expected result, and the sum of magnitudes for a tolerance. */
double expected(const Operands &x, int m, int n, double *size)
{
    double sum = 0;
    *size = 0;
    for (int k = 0; k < K; k++) {
        const double term =
            e2m1(x.a[m][k]) * ue4m3(x.scale_a[m][k / 16]) * e2m1(x.b[k][n]) * ue4m3(x.scale_b[k / 16][n]);
        sum += term;
        *size += fabs(term);
    }
    return sum;
}

Operands random_operands(unsigned *state)
{
    Operands x;
    uint8_t *bytes = reinterpret_cast<uint8_t *>(&x);
    for (size_t i = 0; i < sizeof x; i++) {
        *state = *state * 1664525u + 1013904223u;
        bytes[i] = static_cast<uint8_t>(*state >> 24);
    }
    for (int k = 0; k < K; k++) {
        for (int m = 0; m < M; m++)
            x.a[m][k] &= 15;
        for (int n = 0; n < N; n++)
            x.b[k][n] &= 15;
    }
    for (int j = 0; j < BLOCKS; j++) { /* 1 … 126, subnormals among them */
        for (int m = 0; m < M; m++)
            x.scale_a[m][j] = static_cast<uint8_t>(1 + x.scale_a[m][j] % 126);
        for (int n = 0; n < N; n++)
            x.scale_b[j][n] = static_cast<uint8_t>(1 + x.scale_b[j][n] % 126);
    }
    *state = *state * 1664525u + 1013904223u;
    x.from_a = static_cast<int>(*state >> 24 & 1);
    x.from_b = static_cast<int>(*state >> 25 & 3);
    return x;
}

/* Elements of d that are off by more than `tolerance` of the sum of magnitudes. */
int wrong_in(const Operands &x, const Lanes &y, double tolerance)
{
    int wrong = 0;
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++) {
            double size;
            const double want = expected(x, lane / 4 + (i < 2 ? 0 : 8), lane % 4 * 2 + i % 2, &size);
            wrong += !(fabs(y.d[lane][i] - want) <= tolerance * size);
        }
    return wrong;
}

bool run(Lanes *lanes, int n)
{
    Lanes *device = nullptr;
    const size_t bytes = n * sizeof(Lanes);
    bool good = cudaMalloc(&device, bytes) == cudaSuccess &&
                cudaMemcpy(device, lanes, bytes, cudaMemcpyHostToDevice) == cudaSuccess;
    if (good) {
        product_kernel<<<static_cast<unsigned>(n), 32>>>(device);
        good = cudaGetLastError() == cudaSuccess &&
               cudaMemcpy(lanes, device, bytes, cudaMemcpyDeviceToHost) == cudaSuccess;
    }
    cudaFree(device);
    return good;
}

} // namespace

extern "C" int apa_verify_fragments(void)
{
    unsigned state = 7;
    const int places_a = 32 * 32, places_b = 32 * 16, random = 512, n = places_a + places_b + random;
    Operands *all = static_cast<Operands *>(malloc(n * sizeof(Operands)));
    Lanes *lanes = static_cast<Lanes *>(malloc(n * sizeof(Lanes)));
    if (all == nullptr || lanes == nullptr) {
        printf("NVFP4 product: no memory\n");
        free(all);
        free(lanes);
        return 1;
    }
    for (int at = 0; at < n; at++) {
        Operands &x = all[at];
        x = random_operands(&state);
        if (at < places_a) {
            memset(x.a, 0, sizeof x.a);
            x.a[row_of_a(at / 32, at % 32)][column_of_a(at / 32, at % 32)] = 2;
        } else if (at < places_a + places_b) {
            const int place = at - places_a;
            memset(x.b, 0, sizeof x.b);
            x.b[row_of_b(place / 16, place % 16)][place / 16 / 4] = 2;
        }
        lanes[at] = to_lanes(x);
    }
    const bool ran = run(lanes, n);
    int wrong[3] = {0, 0, 0};
    for (int at = 0; ran && at < n; at++) {
        const int kind = at < places_a ? 0 : at < places_a + places_b ? 1 : 2;
        /* one element: exact. Random: 64 terms, sums kept to at least 2^-20 of their size */
        wrong[kind] += wrong_in(all[at], lanes[at], kind < 2 ? 0.0 : ldexp(1.0, -20));
    }
    int device = 0, major = 0, minor = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    printf("NVFP4 product (%s): of %d places of A %d wrong, of %d of B %d, of %d random products %d elements\n",
           !ran                        ? "did not run"
           : 10 * major + minor >= 120 ? "the instruction"
                                       : "in software",
           places_a, wrong[0], places_b, wrong[1], random, wrong[2]);
    free(all);
    free(lanes);
    return !ran || wrong[0] + wrong[1] + wrong[2] > 0;
}
