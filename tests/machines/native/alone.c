/* Two bound calls, run by a program without Python. */
#include "plan/bound.h"
#include "plan/tables.h"
#include <stdio.h>

int main(void)
{
    float x[5] = {1, 2, 3, 4, 5}, y[5];
    enum { layout_integers(NAME) COUNT };
    int64_t ints[COUNT] = {[BYTES] = sizeof x, [READS] = 1};
    KernelCall copy = {.kernel = find_kernel("copy"), .units = 1, .nparams = 2, .ints = ints};
    char *addresses[] = {(char *)y, (char *)x};
    const uint32_t there[] = {0, 1}, back[] = {1, 0};
    BoundCall calls[] = {{&copy, there}, {&copy, back}};
    double most = 1e9;
    int next = 0, refused = run_bound(pool_new(2, 0, 0), addresses, calls, 2, &next, &most);
    printf("%d of 2 calls, %d, %g, %s\n", next, refused, y[4], simd_name());
    return 0;
}
