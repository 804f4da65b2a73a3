#define _GNU_SOURCE
#include "processor.h"

#include <string.h>
#if (defined(__x86_64__) || defined(__i386__)) && (defined(__GNUC__) || defined(__clang__))
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

/* --- AMX: the processor has it, the system keeps its registers, and this process may use them --- */

static int has_tiles(void)
{
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || ~d & (1u << 22 | 1u << 24)) /* AMX-BF16, AMX-TILE */
        return 0;
    /* palette 1: 8 registers of 16 rows of 64 bytes */
    if (!__get_cpuid_count(0x1D, 1, &a, &b, &c, &d) || b != (8u << 16 | 64) || (c & 0xFFFF) != 16)
        return 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE))
        return 0;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low >> 17 & 3) == 3; /* XTILECFG, XTILEDATA */
}

/* Asked once a process, for its threads and the processes that it forks. */
static int may_use_tiles(void)
{
    enum { ARCH_REQ_XCOMP_PERM_ = 0x1023, XTILEDATA = 18 };
    static atomic_int answer; /* 0: not asked yet */
    if (!answer)
        answer = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM_, XTILEDATA) ? -1 : 1;
    return answer > 0;
}
#else
static int has_tiles(void)
{
    return 0;
}

static int may_use_tiles(void)
{
    return 0;
}
#endif

int processor_has(const char *name)
{
#if (defined(__x86_64__) || defined(__i386__)) && (defined(__GNUC__) || defined(__clang__))
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (!strcmp(name, "avx2"))
        return avx2;
    if (!strcmp(name, "avx512") || !strcmp(name, "amx_emulated"))
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (!strcmp(name, "avx512_bf16"))
        return processor_has("avx512") && __builtin_cpu_supports("avx512bf16");
#elif defined(__aarch64__)
    if (!strcmp(name, "neon"))
        return 1;
#endif
    if (!strcmp(name, "amx"))
        return processor_has("avx512") && has_tiles() && may_use_tiles();
    return !strcmp(name, "plain");
}

int processor_refused(const char *name)
{
    return !strcmp(name, "amx") && processor_has("avx512") && has_tiles() && !may_use_tiles();
}

int processor_prefers(const char *name)
{
    if (!strcmp(name, "amx_emulated"))
        return 0;
#if (defined(__x86_64__) || defined(__i386__)) && (defined(__GNUC__) || defined(__clang__))
    if (!strcmp(name, "avx512_bf16")) {
        unsigned eax = 0, unused;
        __get_cpuid(1, &eax, &unused, &unused, &unused);
        return __builtin_cpu_is("amd") && (eax >> 8 & 15) + (eax >> 20 & 255) == 26;
    }
#endif
    return 1;
}
