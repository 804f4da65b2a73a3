/* Tables of kernels by name, one for each file in kernels/ and instruction set. */
#include "tables.h"

#include "processor.h"

#include <string.h>

/* Files in kernels/ with a table of kernels, and files with a table of row functions. */
#define KERNEL_FILES(X, target, bf16_pairs, tiles) \
    X(amx, tiles)                                  \
    X(bytes, target)                               \
    X(chain, target)                               \
    X(creation, target)                            \
    X(depthwise, target)                           \
    X(halves, target)                              \
    X(indexing, target)                            \
    X(layout, target)                              \
    X(linalg, target)                              \
    X(pairs, bf16_pairs)                           \
    X(quantized, target)                           \
    X(random, target)                              \
    X(reduction, target)                           \
    X(rows, target)                                \
    X(solving, target)                             \
    X(sorting, target)                             \
    X(windows, target)
#define ROW_FILES(X, target) X(elementwise, target)

#define DECLARE_KERNELS(file, target) extern const KernelEntry file##_kernels_##target[];
#define DECLARE_ROWS(file, target) extern const RowEntry file##_rows_##target[];
#define LIST_KERNELS(file, target) file##_kernels_##target,
#define LIST_ROWS(file, target) file##_rows_##target,
#define TABLES(set, target, bf16_pairs, tiles)                                             \
    KERNEL_FILES(DECLARE_KERNELS, target, bf16_pairs, tiles)                               \
    ROW_FILES(DECLARE_ROWS, target)                                                        \
    const char built_##set[] = "kernels of " #set; /* setup.py searches for this string */ \
    static const KernelEntry *const kernels_##set[] = {                                    \
        KERNEL_FILES(LIST_KERNELS, target, bf16_pairs, tiles) NULL};                       \
    static const RowEntry *const rows_##set[] = {ROW_FILES(LIST_ROWS, target) NULL};

#define TEXT(name) #name,
#define INTEGERS(file, unused) static const char *const file##_names[] = {file##_integers(TEXT) NULL};
#define LIST_INTEGERS(file, unused) file##_names,
KERNEL_FILES(INTEGERS, , , )
static const char *const *const integers[] = {KERNEL_FILES(LIST_INTEGERS, , , )};
#define NAME_OF_FILE(file, unused) #file,
static const char *const files[] = {KERNEL_FILES(NAME_OF_FILE, , , )};

typedef struct {
    const char *name;
    const KernelEntry *const *kernels;
    const RowEntry *const *rows;
} Set;

/* The build compiles kernels/ for some of these sets and defines WITH_..., the best first.
 * avx512_bf16 has products of pairs, amx has products of bf16 in tiles; everything else is
 * shared with avx512. */
#ifdef WITH_AMX
TABLES(amx, avx512, avx512, amx)
#endif
#ifdef WITH_AMX_EMULATED
TABLES(amx_emulated, avx512, avx512, amx_emulated)
#endif
#ifdef WITH_AVX512_BF16
TABLES(avx512_bf16, avx512, avx512_bf16, avx512)
#endif
#ifdef WITH_AVX512
TABLES(avx512, avx512, avx512, avx512)
#endif
#ifdef WITH_AVX2
TABLES(avx2, avx2, avx2, avx2)
#endif
#ifdef WITH_NEON
TABLES(neon, neon, neon, neon)
#endif
TABLES(plain, plain, plain, plain)

static const Set sets[] = {
#ifdef WITH_AMX
    {"amx", kernels_amx, rows_amx},
#endif
#ifdef WITH_AVX512_BF16
    {"avx512_bf16", kernels_avx512_bf16, rows_avx512_bf16},
#endif
#ifdef WITH_AVX512
    {"avx512", kernels_avx512, rows_avx512},
#endif
#ifdef WITH_AVX2
    {"avx2", kernels_avx2, rows_avx2},
#endif
#ifdef WITH_NEON
    {"neon", kernels_neon, rows_neon},
#endif
    {"plain", kernels_plain, rows_plain},
#ifdef WITH_AMX_EMULATED
    {"amx_emulated", kernels_amx_emulated, rows_amx_emulated}, /* for tests, after the other sets */
#endif
};
static const Set *chosen;

int simd_choose(const char *name)
{
    for (size_t i = 0; i < sizeof sets / sizeof *sets; i++)
        if (!strcmp(sets[i].name, name) && processor_has(name)) {
            chosen = &sets[i];
            return 0;
        }
    return -1;
}

static const Set *set_in_use(void)
{
    for (size_t i = 0; !chosen; i++)
        if (processor_has(sets[i].name))
            chosen = &sets[i];
    return chosen;
}

const char *simd_name(void)
{
    return set_in_use()->name;
}

const char *simd_built(int i, int *here)
{
    if (i >= (int)(sizeof sets / sizeof *sets))
        return NULL;
    *here = processor_has(sets[i].name);
    return sets[i].name;
}

#define FIND(Entry, member)                                                 \
    for (const Entry *const *table = set_in_use()->member; *table; table++) \
        for (const Entry *entry = *table; entry->name; entry++)             \
            if (!strcmp(entry->name, name))                                 \
                return entry;                                               \
    return NULL;

const KernelEntry *find_kernel(const char *name)
{
    FIND(KernelEntry, kernels)
}

const RowEntry *find_row(const char *name)
{
    FIND(RowEntry, rows)
}

const KernelEntry *nth_kernel(int i, const char **file_name, const char *const **names)
{
    const KernelEntry *const *tables = set_in_use()->kernels;
    for (int file = 0; tables[file]; file++)
        for (const KernelEntry *entry = tables[file]; entry->name; entry++)
            if (!i--) {
                *file_name = files[file];
                *names = integers[file];
                return entry;
            }
    return NULL;
}

const RowEntry *nth_row(int i)
{
    for (const RowEntry *const *table = set_in_use()->rows; *table; table++)
        for (const RowEntry *entry = *table; entry->name; entry++)
            if (!i--)
                return entry;
    return NULL;
}
