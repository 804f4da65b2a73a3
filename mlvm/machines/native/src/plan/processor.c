#define _GNU_SOURCE
#include "processor.h"

#include <string.h>

#if (defined(__x86_64__) || defined(__i386__)) && defined(__GNUC__)
#include <cpuid.h>
#include <stdatomic.h>

enum { ASKED = 1, AVX2 = 2, AVX512 = 4, AVX512_BF16 = 8, AVX512_VNNI = 16, ZEN5 = 32 };

/* What the processor says itself, and the system of the registers that it saves. */
static unsigned asked(void)
{
    unsigned eax = 0, ebx = 0, ecx = 0, vendor = 0, saved = 0, more = 0, vnni = 0, unused;
    __get_cpuid(0, &unused, &vendor, &unused, &unused);
    __get_cpuid(1, &eax, &unused, &ecx, &unused);
    if (ecx & bit_OSXSAVE)
        __asm__("xgetbv" : "=a"(saved), "=d"(unused) : "c"(0));
    __get_cpuid_count(7, 0, &unused, &ebx, &vnni, &unused);
    __get_cpuid_count(7, 1, &more, &unused, &unused, &unused);
    const unsigned all = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    unsigned family = (eax >> 8 & 15) + (eax >> 20 & 255), found = ASKED;
    if (vendor == signature_AMD_ebx && family == 26)
        found |= ZEN5;
    if ((saved & 0x6) != 0x6 || !(ecx & bit_FMA) || !(ebx & bit_AVX2))
        return found;
    found |= AVX2;
    if ((saved & 0xe6) != 0xe6 || (ebx & all) != all)
        return found;
    return found | AVX512 | (more & 1 << 5 ? AVX512_BF16 : 0) | (vnni & 1 << 11 ? AVX512_VNNI : 0);
}

/* Not `__builtin_cpu_supports`: it says no to all where a compiler's runtime library leaves it out, as
 * that of `zig cc`. The processor is asked once: in a virtual machine that takes microseconds. */
static unsigned features(void)
{
    static atomic_uint found;
    unsigned known = atomic_load_explicit(&found, memory_order_relaxed);
    if (!known)
        atomic_store_explicit(&found, known = asked(), memory_order_relaxed);
    return known;
}
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
#if (defined(__x86_64__) || defined(__i386__)) && defined(__GNUC__)
    static const struct {
        const char *name;
        unsigned feature;
    } known[] = {{"avx2", AVX2}, {"avx512", AVX512}, {"amx_emulated", AVX512},
                 {"avx512_bf16", AVX512_BF16}, {"avx512_vnni", AVX512_VNNI}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(name, known[i].name))
            return (features() & known[i].feature) != 0;
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
#if (defined(__x86_64__) || defined(__i386__)) && defined(__GNUC__)
    if (!strcmp(name, "avx512_bf16"))
        return (features() & ZEN5) != 0;
#endif
    return 1;
}
