#include "processor.h"

#include <string.h>

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
#elif defined(__aarch64__)
    if (!strcmp(name, "neon"))
        return 1;
#endif
    return !strcmp(name, "plain");
}
