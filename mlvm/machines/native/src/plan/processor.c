#define _GNU_SOURCE
#include "processor.h"

#include <string.h>

#if (defined(__x86_64__) || defined(__i386__)) && defined(__GNUC__)
#include <cpuid.h>
#include <stdatomic.h>

enum { ASKED = 1, AVX2 = 2, AVX512 = 4, AVX512_BF16 = 8, AVX512_VNNI = 16, TILES = 32 };

/* Query the features of the processor, and which registers the system saves. */
static unsigned detect(void)
{
    unsigned ebx = 0, ecx = 0, edx = 0, saved = 0, more = 0, vnni = 0, sizes = 0, rows = 0, unused;
    __get_cpuid(1, &unused, &unused, &ecx, &unused);
    if (ecx & bit_OSXSAVE)
        __asm__("xgetbv" : "=a"(saved), "=d"(unused) : "c"(0));
    __get_cpuid_count(7, 0, &unused, &ebx, &vnni, &edx);
    __get_cpuid_count(7, 1, &more, &unused, &unused, &unused);
    const unsigned all = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    unsigned features = ASKED;
    if ((saved & 0x6) != 0x6 || !(ecx & bit_FMA) || !(ebx & bit_AVX2))
        return features;
    features |= AVX2;
    if ((saved & 0xe6) != 0xe6 || (ebx & all) != all)
        return features;
    /* AMX-BF16, AMX-TILE; palette 1: 8 registers of 16 rows of 64 bytes; XTILECFG, XTILEDATA */
    if (!(~edx & (1u << 22 | 1u << 24)) && __get_cpuid_count(0x1D, 1, &unused, &sizes, &rows, &unused) &&
        sizes == (8u << 16 | 64) && (rows & 0xFFFF) == 16 && (saved >> 17 & 3) == 3)
        features |= TILES;
    return features | AVX512 | (more & 1 << 5 ? AVX512_BF16 : 0) | (vnni & 1 << 11 ? AVX512_VNNI : 0);
}

/* Not `__builtin_cpu_supports`, which always returns false if the compiler's runtime library
 * lacks it, as with `zig cc`. The result is cached, because CPUID takes microseconds in a
 * virtual machine. */
static unsigned features(void)
{
    static atomic_uint cached;
    unsigned features = atomic_load_explicit(&cached, memory_order_relaxed);
    if (!features)
        atomic_store_explicit(&cached, features = detect(), memory_order_relaxed);
    return features;
}
#endif

/* --- AMX: a process may use it only with permission of the system --- */

/* 1 if tiles may be used, -1 if the system denied them, 0 if there are none. Asked once per
 * process, for its threads and child processes. */
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

static int tiles(void)
{
    enum { ARCH_REQ_XCOMP_PERM_ = 0x1023, XTILEDATA = 18 };
    static atomic_int answer; /* 0: not asked */
    if (!(features() & TILES))
        return 0;
    if (!answer)
        answer = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM_, XTILEDATA) ? -1 : 1;
    return answer;
}
#else
static int tiles(void)
{
    return 0;
}
#endif

int processor_has(const char *name)
{
#if (defined(__x86_64__) || defined(__i386__)) && defined(__GNUC__)
    static const struct {
        const char *name;
        unsigned feature;
    } known[] = {{"avx2", AVX2},
                 {"avx512", AVX512},
                 {"amx_emulated", AVX512},
                 {"avx512_bf16", AVX512_BF16},
                 {"avx512_vnni", AVX512_VNNI}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(name, known[i].name))
            return (features() & known[i].feature) != 0;
#elif defined(__aarch64__)
    if (!strcmp(name, "neon"))
        return 1;
#endif
    if (!strcmp(name, "amx"))
        return tiles() > 0;
    return !strcmp(name, "plain");
}

int processor_refused(const char *name)
{
    return !strcmp(name, "amx") && tiles() < 0;
}
