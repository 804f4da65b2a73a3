/* The limits of one core, for `bench.peak`: fused multiply-adds of f32 in registers, and bytes that a
   copy moves in a working set of a given size. Compiled with -O3 -march=native. */

#include <stdint.h>
#include <string.h>
#include <time.h>

#ifdef __AVX512F__
#define BYTES 64
#elif defined __AVX__
#define BYTES 32
#else
#define BYTES 16
#endif
typedef float vector __attribute__((vector_size(BYTES)));
enum { LANES = BYTES / 4, CHAINS = 12, ROUNDS = 200000 };

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Floating-point operations a second: independent chains hide the latency of an instruction. */
double flops_per_second(void)
{
    vector sum[CHAINS], x, y;
    for (int j = 0; j < LANES; j++)
        x[j] = 0.5f, y[j] = 1.0f;
    memset(sum, 0, sizeof sum);
    __asm__ volatile("" : "+v"(x), "+v"(y));
    double start = now();
    for (int i = 0; i < ROUNDS; i++) {
#pragma GCC unroll 12
        for (int j = 0; j < CHAINS; j++)
            sum[j] = sum[j] * x + y;
    }
    double seconds = now() - start;
    for (int j = 0; j < CHAINS; j++)
        __asm__ volatile("" ::"v"(sum[j]));
    return 2.0 * LANES * CHAINS * ROUNDS / seconds;
}

/* Bytes read and written a second, from the first half of a buffer of n bytes to its second half. */
double bytes_per_second(char *buffer, int64_t n)
{
    int64_t half = n / 2, times = 1 + (16 << 20) / n;
    double start = now();
    for (int64_t i = 0; i < times; i++) {
        memcpy(buffer + half, buffer, (size_t)half);
        __asm__ volatile("" ::: "memory");
    }
    return (double)(2 * half * times) / (now() - start);
}
