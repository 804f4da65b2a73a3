#include "processor.h"

#include <string.h>
#if (defined(__x86_64__) || defined(__i386__)) && (defined(__GNUC__) || defined(__clang__))
#include <cpuid.h>
#endif

int processor_has(const char *name)
{
#if (defined(__x86_64__) || defined(__i386__)) && (defined(__GNUC__) || defined(__clang__))
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (!strcmp(name, "avx2"))
        return avx2;
    if (!strcmp(name, "avx512"))
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (!strcmp(name, "avx512_bf16"))
        return processor_has("avx512") && __builtin_cpu_supports("avx512bf16");
#elif defined(__aarch64__)
    if (!strcmp(name, "neon"))
        return 1;
#endif
    return !strcmp(name, "plain");
}

int processor_prefers(const char *name)
{
#if (defined(__x86_64__) || defined(__i386__)) && (defined(__GNUC__) || defined(__clang__))
    if (!strcmp(name, "avx512_bf16")) {
        unsigned eax = 0, unused;
        __get_cpuid(1, &eax, &unused, &unused, &unused);
        return __builtin_cpu_is("amd") && (eax >> 8 & 15) + (eax >> 20 & 255) == 26;
    }
#endif
    (void)name;
    return 1;
}
