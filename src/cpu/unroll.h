/* A loop that must be unrolled whole, since arrays stay in registers only where every index is a constant. gcc wants a
 * number, at least the loop's; clang takes a number for how often to repeat the body, and leaves shorter loops as they
 * are. */
#ifndef APA_CPU_UNROLL_H
#define APA_CPU_UNROLL_H

#ifdef __clang__
#define APA_UNROLL _Pragma("unroll")
#define APA_UNROLL_BY_GCC /* where it pays with gcc, and makes clang spill */
#else
#define APA_UNROLL _Pragma("GCC unroll 16")
#define APA_UNROLL_BY_GCC APA_UNROLL
#endif

#endif
