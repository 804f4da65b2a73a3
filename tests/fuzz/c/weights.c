/* libFuzzer: what a built step is given from outside. The input is a file of weights, and a .npy file
 * as the command line reads it. */
#define main main_of_the_command
#include "mlvm/build/src/command.c"
#undef main

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    static _Alignas(64) unsigned char memory[1 << 20];
    struct step step;
    Data data = {aligned_alloc(64, (size + 64) / 64 * 64), size};
    if (!data.bytes || step_memory() > sizeof memory)
        abort();
    memcpy(data.bytes, bytes, size);
    if (!step_init(&step, memory, data.bytes, size)) {
        struct step_outputs outputs;
        static const _Alignas(8) unsigned char zeros[1 << 16];
        struct step_inputs inputs;
        for (size_t i = 0; i < sizeof inputs / sizeof(void *); i++) {
            const void *at = zeros;
            memcpy((char *)&inputs + i * sizeof at, &at, sizeof at);
        }
        step_run(&step, &inputs, &outputs);
    } else if (!step_error(&step)[0])
        abort();
    static const TensorSpec spec = {"f32[2,3]", "<f4", "2, 3,", 24, 4, NULL};
    unsigned long long sizes[1] = {0};
    unpack(&data, &spec, sizes);
    free(data.bytes);
    return 0;
}
