/* Kernels without asynchronous matrix products, run on a CPU: a thread of the system for every thread of a block,
 * blocks one after the other. Sources of kernels are included after this file as C++; here are CUDA's words for it,
 * barriers of warps and blocks, what lanes tell each other, and those instructions that the sources have as PTX. Slow,
 * and enough to hold every index and every race-free exchange of prep, verdicts and the end against a plain loop. */
#ifndef APA_TEST_ON_CPU_H
#define APA_TEST_ON_CPU_H

#include <cuda_runtime.h> /* before the words below are redefined */

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <math_constants.h>

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#undef __shared__
#undef __launch_bounds__
#undef __global__
#undef __device__
#undef __host__
#undef __grid_constant__
#undef __forceinline__
#undef __noinline__
#define __shared__ static
#define __launch_bounds__(...)
#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__
#define __CUDA_ARCH__ 900

using std::isfinite;
using std::isnan;

/* ---- a grid ---- */

struct place {
    unsigned x, y, z;
};
static thread_local place own_thread;
static place own_block, block_size, grid_size;
#define threadIdx own_thread
#define blockIdx own_block
#define blockDim block_size
#define gridDim grid_size

struct warp_state {
    std::barrier<> meet{32};
    uint64_t told[32];
    bool there[32];
};
static std::vector<std::unique_ptr<warp_state>> block_warps;
static std::unique_ptr<std::barrier<>> block_meet;
static std::map<int, std::unique_ptr<std::barrier<>>> block_named; /* barriers for a part of the block, by number */
static std::mutex named_turn;

static warp_state &own_warp()
{
    return *block_warps[threadIdx.x / 32];
}

static void run_thread(unsigned number, const std::function<void()> &kernel)
{
    own_thread = {number, 0, 0};
    kernel();
    own_warp().there[number % 32] = false; /* the others go on without it */
    own_warp().meet.arrive_and_drop();
    block_meet->arrive_and_drop();
}

static void run_grid(unsigned blocks, unsigned threads, const std::function<void()> &kernel)
{
    block_size = {threads, 1, 1};
    grid_size = {blocks, 1, 1};
    for (unsigned block = 0; block < blocks; block++) {
        own_block = {block, 0, 0};
        block_warps.clear();
        for (unsigned warp = 0; warp < threads / 32; warp++) {
            block_warps.push_back(std::make_unique<warp_state>());
            std::fill_n(block_warps.back()->there, 32, true);
        }
        block_meet = std::make_unique<std::barrier<>>(threads);
        block_named.clear();
        std::vector<std::thread> running;
        for (unsigned number = 0; number < threads; number++)
            running.emplace_back(run_thread, number, kernel);
        for (std::thread &one : running)
            one.join();
    }
}

/* In place of cuda/chain.cuh: kernels run one after the other. */
#define APA_CUDA_CHAIN_CUH
static inline void chain_go()
{
}
static inline void chain_wait()
{
}
template <typename... Parameters, typename... Arguments>
static cudaError_t launch_chained(int, void (*kernel)(Parameters...), int64_t blocks, int threads, int, cudaStream_t,
                                  const Arguments &...arguments)
{
    run_grid(static_cast<unsigned>(blocks), static_cast<unsigned>(threads), [&] { kernel(arguments...); });
    return cudaSuccess;
}

static inline cudaError_t fill_now(void *to, int value, size_t bytes)
{
    memset(to, value, bytes);
    return cudaSuccess;
}
#define cudaMemsetAsync(to, value, bytes, stream) fill_now(to, value, bytes)

/* ---- what threads tell each other ---- */

static inline void __syncthreads()
{
    block_meet->arrive_and_wait();
}

static inline void __syncwarp()
{
    own_warp().meet.arrive_and_wait();
}

static inline void named_barrier(int which, int threads)
{
    std::barrier<> *meet;
    {
        const std::lock_guard<std::mutex> turn(named_turn);
        std::unique_ptr<std::barrier<>> &named = block_named[which];
        if (named == nullptr)
            named = std::make_unique<std::barrier<>>(threads);
        meet = named.get();
    }
    meet->arrive_and_wait();
}

/* `own` of every lane goes to answer(), which sees them all. */
template <typename T, typename F> static auto exchange(T own, F answer)
{
    warp_state &warp = own_warp();
    memcpy(&warp.told[threadIdx.x % 32], &own, sizeof own);
    warp.meet.arrive_and_wait();
    const auto result = answer([&](int lane) {
        T x;
        memcpy(&x, &warp.told[lane], sizeof x);
        return x;
    });
    warp.meet.arrive_and_wait();
    return result;
}

template <typename T> static T __shfl_sync(unsigned, T own, int lane)
{
    return exchange(own, [&](auto of) { return of(lane); });
}

template <typename T> static T __shfl_xor_sync(unsigned, T own, int mask)
{
    return exchange(own, [&](auto of) { return of(static_cast<int>(threadIdx.x % 32) ^ mask); });
}

template <typename T, typename F> static T over_lanes(T own, T none, F add)
{
    return exchange(own, [&](auto of) {
        T all = none;
        for (int lane = 0; lane < 32; lane++)
            if (own_warp().there[lane])
                all = add(all, of(lane));
        return all;
    });
}

static inline unsigned __ballot_sync(unsigned, bool own)
{
    return over_lanes(own ? 1u << threadIdx.x % 32 : 0u, 0u, [](unsigned a, unsigned b) { return a | b; });
}

static inline bool __any_sync(unsigned, bool own)
{
    return __ballot_sync(0xffffffffu, own) != 0;
}

static inline int __reduce_min_sync(unsigned, int own)
{
    return over_lanes(own, INT32_MAX, [](int a, int b) { return std::min(a, b); });
}

static inline int __reduce_max_sync(unsigned, int own)
{
    return over_lanes(own, INT32_MIN, [](int a, int b) { return std::max(a, b); });
}

static inline unsigned __reduce_add_sync(unsigned, unsigned own)
{
    return over_lanes(own, 0u, [](unsigned a, unsigned b) { return a + b; });
}

static std::mutex atomic_turn;

template <typename T, typename F> static T atomically(T *at, F change)
{
    const std::lock_guard<std::mutex> turn(atomic_turn);
    const T before = *at;
    *at = change(before);
    return before;
}

static inline int atomicMax(int *at, int x)
{
    return atomically(at, [&](int before) { return std::max(before, x); });
}

static inline int atomicMin(int *at, int x)
{
    return atomically(at, [&](int before) { return std::min(before, x); });
}

static inline int atomicAdd(int *at, int x)
{
    return atomically(at, [&](int before) { return before + x; });
}

static inline unsigned long long atomicAdd(unsigned long long *at, unsigned long long x)
{
    return atomically(at, [&](unsigned long long before) { return before + x; });
}

/* ---- arithmetic ---- */

template <typename A, typename B> static auto min(A a, B b)
{
    using T = std::common_type_t<A, B>;
    return std::min<T>(static_cast<T>(a), static_cast<T>(b));
}

template <typename A, typename B> static auto max(A a, B b)
{
    using T = std::common_type_t<A, B>;
    return std::max<T>(static_cast<T>(a), static_cast<T>(b));
}

template <typename To, typename From> static To same_bits(From x)
{
    To y;
    static_assert(sizeof x == sizeof y);
    memcpy(static_cast<void *>(&y), static_cast<const void *>(&x), sizeof y);
    return y;
}

static inline float __int_as_float(int x)
{
    return same_bits<float>(x);
}
static inline int __float_as_int(float x)
{
    return same_bits<int>(x);
}
static inline float __uint_as_float(unsigned x)
{
    return same_bits<float>(x);
}
static inline unsigned __float_as_uint(float x)
{
    return same_bits<unsigned>(x);
}
static inline double __longlong_as_double(long long x)
{
    return same_bits<double>(x);
}
static inline float __fmul_rn(float a, float b)
{
    return a * b;
}
static inline float rsqrtf(float x)
{
    return 1.0f / std::sqrt(x);
}
static inline int __popc(unsigned x)
{
    return __builtin_popcount(x);
}
static inline int __ffs(int x)
{
    return __builtin_ffs(x);
}
static inline float __fdividef(float a, float b)
{
    return a / b;
}
template <typename T> static T __ldcg(const T *from)
{
    return *from;
}
static inline unsigned __byte_perm(unsigned low, unsigned high, unsigned which)
{
    const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
    unsigned to = 0;
    for (int i = 0; i < 4; i++)
        to |= static_cast<unsigned>(both >> 8 * (which >> 4 * i & 7) & 0xff) << 8 * i;
    return to;
}

/* ---- instructions that the sources have as PTX ---- */

static char somewhere; /* among variables of the program: 32-bit addresses are distances from it */

static inline uint32_t address_of(const void *pointer)
{
    return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(pointer) - reinterpret_cast<uintptr_t>(&somewhere) +
                                 (1u << 30));
}

static inline char *at_address(uint32_t address)
{
    return reinterpret_cast<char *>(reinterpret_cast<uintptr_t>(&somewhere) + address - (1u << 30));
}

/* The headers' own versions get other names, which nobody calls. */
#define __cvta_generic_to_shared(pointer) (static_cast<void>(pointer), 0)
#define shared_address ptx_shared_address
#define named_barrier ptx_named_barrier
#define mma_16 ptx_mma_16
#define exp2_fast ptx_exp2_fast
#define log2_fast ptx_log2_fast
#define pack_e4m3 ptx_pack_e4m3
#define pack_16 ptx_pack_16
#define max_u16_2 ptx_max_u16_2
#define min_16_2 ptx_min_16_2
#define max_16_2 ptx_max_16_2
#define wide_product ptx_wide_product
#define as_it_is ptx_as_it_is
#define copy_async_16_or_zero ptx_copy_async_16_or_zero
#define copy_async_commit ptx_copy_async_commit
#define copy_async_wait ptx_copy_async_wait
#define copy_bulk_out ptx_copy_bulk_out
#define copy_bulk_out_wait ptx_copy_bulk_out_wait
#define fence_for_async ptx_fence_for_async
#define load_shared_4 ptx_load_shared_4
#define load_shared_8 ptx_load_shared_8
#define load_shared_16 ptx_load_shared_16
#define store_shared_4 ptx_store_shared_4
#define store_shared_8 ptx_store_shared_8
#define store_shared_16 ptx_store_shared_16
#include "cuda/wgmma/hopper.cuh"
#undef shared_address
#undef named_barrier
#undef mma_16
#undef exp2_fast
#undef log2_fast
#undef pack_e4m3
#undef pack_16
#undef max_u16_2
#undef min_16_2
#undef max_16_2
#undef wide_product
#undef as_it_is
#undef copy_async_16_or_zero
#undef copy_async_commit
#undef copy_async_wait
#undef copy_bulk_out
#undef copy_bulk_out_wait
#undef fence_for_async
#undef load_shared_4
#undef load_shared_8
#undef load_shared_16
#undef store_shared_4
#undef store_shared_8
#undef store_shared_16

static inline float exp2_fast(float x)
{
    return std::exp2(x);
}

static inline float log2_fast(float x)
{
    return std::log2(x);
}

static inline uint32_t shared_address(const void *pointer)
{
    return address_of(pointer);
}

static inline uint32_t pack_e4m3(float low, float high)
{
    return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}

static inline uint16_t bits_16(float x, bool bf16)
{
    return bf16 ? same_bits<uint16_t>(__float2bfloat16_rn(x)) : same_bits<uint16_t>(__float2half_rn(x));
}

static inline float value_16(uint16_t bits, bool bf16)
{
    return bf16 ? same_bits<float>(static_cast<uint32_t>(bits) << 16) : __half2float(same_bits<__half>(bits));
}

template <bool BF16> static uint32_t pack_16(float low, float high)
{
    return bits_16(low, BF16) | static_cast<uint32_t>(bits_16(high, BF16)) << 16;
}

/* Operands in the lanes as the PTX ISA has them: with lane 4g + t, a[0] holds row g, columns 2t and 2t + 1, a[1] row
 * g + 8, a[2] and a[3] the same 8 columns further; b0 column g, rows 2t and 2t + 1, b1 the same 8 rows further. */
template <bool BF16> static void mma_16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    const auto both = [](uint32_t low, uint32_t high) { return low | static_cast<uint64_t>(high) << 32; };
    const auto half = [](uint64_t four, int i) { return value_16(static_cast<uint16_t>(four >> 16 * i), BF16); };
    const int g = static_cast<int>(threadIdx.x % 32 / 4), t = static_cast<int>(threadIdx.x % 4);
    float row[2][16], column[2][16];
    for (int h = 0; h < 2; h++)
        exchange(both(a[h], a[2 + h]), [&](auto of) {
            for (int k = 0; k < 16; k++)
                row[h][k] = half(of(4 * g + k % 8 / 2), k / 8 * 2 + k % 2);
            return 0;
        });
    exchange(both(b0, b1), [&](auto of) {
        for (int i = 0; i < 2; i++)
            for (int k = 0; k < 16; k++)
                column[i][k] = half(of(4 * (2 * t + i) + k % 8 / 2), k / 8 * 2 + k % 2);
        return 0;
    });
    for (int h = 0; h < 2; h++)
        for (int i = 0; i < 2; i++)
            for (int k = 0; k < 16; k++)
                d[2 * h + i] += row[h][k] * column[i][k];
}

static inline uint32_t max_u16_2(uint32_t a, uint32_t b)
{
    return std::max(a & 0xffff, b & 0xffff) | std::max(a >> 16, b >> 16) << 16;
}

/* choose(x, y) of the floats in each half. */
template <bool BF16, typename F> static uint32_t choose_16_2(uint32_t a, uint32_t b, F choose)
{
    const auto half = [](uint32_t two, int i) { return value_16(static_cast<uint16_t>(two >> 16 * i), BF16); };
    return pack_16<BF16>(choose(half(a, 0), half(b, 0)), choose(half(a, 1), half(b, 1)));
}

template <bool BF16> static uint32_t min_16_2(uint32_t a, uint32_t b)
{
    return choose_16_2<BF16>(a, b, [](float x, float y) { return std::fmin(x, y); });
}

template <bool BF16> static uint32_t max_16_2(uint32_t a, uint32_t b)
{
    return choose_16_2<BF16>(a, b, [](float x, float y) { return std::fmax(x, y); });
}

static inline int64_t wide_product(int a, int b)
{
    return static_cast<int64_t>(a) * b;
}

template <typename T> static const T *as_it_is(const T *pointer)
{
    return pointer;
}

static inline void copy_async_16_or_zero(uint32_t to, const void *from, int bytes)
{
    memset(at_address(to), 0, 16);
    memcpy(at_address(to), from, static_cast<size_t>(bytes));
}
static inline void copy_async_commit()
{
}
template <int> static void copy_async_wait()
{
}
static inline uint32_t load_shared_4(uint32_t address)
{
    uint32_t r;
    memcpy(&r, at_address(address), 4);
    return r;
}
static inline void store_shared_4(uint32_t address, uint32_t x)
{
    memcpy(at_address(address), &x, 4);
}
static inline void load_shared_8(uint32_t (&r)[2], uint32_t address)
{
    memcpy(r, at_address(address), 8);
}
static inline void store_shared_8(uint32_t address, const uint32_t (&r)[2])
{
    memcpy(at_address(address), r, 8);
}
static inline void load_shared_16(uint32_t (&r)[4], uint32_t address)
{
    memcpy(r, at_address(address), 16);
}
static inline void store_shared_16(uint32_t address, const uint32_t (&r)[4])
{
    memcpy(at_address(address), r, 16);
}
static inline void copy_bulk_out(void *to, uint32_t from, uint32_t bytes)
{
    memcpy(to, at_address(from), bytes);
}
static inline void copy_bulk_out_wait()
{
}
static inline void fence_for_async()
{
}

/* ---- checking ---- */

static int64_t checked, wrong;

/* Fails on a comparison with NaN. */
static inline void expect(bool holds, const char *what, int64_t a, int64_t b)
{
    checked++;
    if (holds)
        return;
    if (wrong++ < 10)
        printf("%s at %lld, %lld\n", what, static_cast<long long>(a), static_cast<long long>(b));
}

/* x within tolerance of what it should be, relative to 1 and more. */
static inline bool near(double x, double due, double tolerance)
{
    return x == due || std::fabs(x - due) <= tolerance * (1.0 + std::fabs(due));
}

#endif
