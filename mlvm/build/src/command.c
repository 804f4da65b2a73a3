/* Command line of a step: reads inputs, runs the step, and writes outputs. */
#define _POSIX_C_SOURCE 200809L
#include "built.h"
#include "described.h"
#include "step.h"
#ifdef STEP_THREADS
#include "step_threads.h"
#endif

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifdef _WIN32 /* Windows has _aligned_malloc and _aligned_free */
#include <malloc.h>
#define aligned_alloc(alignment, nbytes) _aligned_malloc(nbytes, alignment)
#define free _aligned_free
#include <direct.h>
#define make_directory(name) _mkdir(name)
#else
#include <sys/stat.h>
#define make_directory(name) mkdir(name, 0777)
#endif

static const char HELP[] =
    "usage: step [OPTION ...] INPUT ...\n"
    "\n"
    "Runs the step. INPUT is a .npy file, or the packed elements of one: " STEP_TAKES ".\n"
    "If a file contains several inputs, each run uses the next input, and then starts again.\n"
#ifdef STEP_LENGTHS
    "The shapes of .npy files determine the lengths: " STEP_TAKES_LENGTHS ".\n"
#endif
    "\n"
    "  --weights FILE  initial weights, a file written by the build or by --save\n"
    "  --save FILE     write the state after the last run\n"
    "  --out DIR       create DIR and write DIR/0.npy, ...; with --steps, of all runs\n"
    "  --steps N       run N times\n"
    "  --simd SET      instruction set: " STEP_SETS "\n"
    "  --threads N     number of threads\n"
    "  --time          print the best and the mean time of a run in seconds\n"
    "  --help\n";

typedef struct {
    unsigned char *bytes;
    size_t nbytes;
} Data;

static int complain(const char *what, const char *why)
{
    fprintf(stderr, "step: %s: %s\n", what, why);
    return 1;
}

/* Read a whole file into memory aligned to 64 bytes. */
static int read_file(const char *name, Data *data)
{
    FILE *file = fopen(name, "rb");
    if (!file)
        return complain(name, strerror(errno));
    size_t room = 1 << 16;
    data->nbytes = 0;
    data->bytes = NULL;
    for (int whole = 0; !whole;) {
        unsigned char *more = room <= SIZE_MAX / 2 ? aligned_alloc(64, room *= 2) : NULL;
        if (!more) {
            fclose(file);
            free(data->bytes);
            return complain(name, "memory cannot be allocated");
        }
        if (data->nbytes)
            memcpy(more, data->bytes, data->nbytes);
        free(data->bytes);
        data->bytes = more;
        size_t read = fread(more + data->nbytes, 1, room - data->nbytes, file);
        data->nbytes += read;
        whole = data->nbytes < room;
    }
    int failed = ferror(file);
    fclose(file);
    return failed ? complain(name, "cannot be read") : 0;
}

enum { MOST_DIMENSIONS = 64 };

/* Parse the sizes of a shape in Python's notation, and return their number. */
static int read_shape(const char *text, unsigned long long *lengths)
{
    int count = 0;
    for (char *end; count < MOST_DIMENSIONS; text = end) {
        text += strspn(text, " ,(");
        if (*text < '0' || *text > '9')
            break;
        lengths[count++] = strtoull(text, &end, 10);
    }
    return count;
}

/* Return whether an array has the expected shape, possibly with an additional first axis. Record
 * the sizes of the step; a size that was recorded before must be equal. */
static int fits_shape(const char *text, const TensorSpec *spec, unsigned long long *sizes)
{
    unsigned long long lengths[MOST_DIMENSIONS], input[MOST_DIMENSIONS];
    int count = read_shape(text, lengths), rank = read_shape(spec->shape, input);
    int stacked = count == rank + 1, same = stacked || count == rank;
    for (int i = 0; same && i < rank; i++) {
        unsigned long long n = lengths[i + stacked];
        if (spec->lengths && spec->lengths[i] >= 0) {
            unsigned long long *size = &sizes[spec->lengths[i]];
            *size = *size ? *size : n;
            same = n && n == *size;
        } else
            same = n == input[i] || (!i && !stacked && !spec->lengths && input[0] && n % input[0] == 0);
    }
    return same;
}

/* Return the bytes of an input at these sizes. */
static size_t nbytes_of(const TensorSpec *spec, const unsigned long long *sizes)
{
    unsigned long long input[MOST_DIMENSIONS];
    size_t nbytes = spec->itemsize;
    int rank = read_shape(spec->shape, input);
    for (int i = 0; i < rank; i++) {
        int length = spec->lengths ? spec->lengths[i] : -1;
        nbytes *= (size_t)(length < 0 ? input[i] : sizes[length]);
    }
    return nbytes;
}

/* Remove the header of a .npy file, if it is one. Return NULL, or an error message. */
static const char *unpack(Data *data, const TensorSpec *spec, unsigned long long *sizes)
{
    static char reason[2048];
    static const unsigned char magic[] = {0x93, 'N', 'U', 'M', 'P', 'Y'};
    if (data->nbytes < 12 || memcmp(data->bytes, magic, sizeof magic))
        return spec->lengths ? "expected a .npy file, because its shape determines the lengths" : NULL;
    size_t begin = data->bytes[6] > 1 ? 12 : 10, length = data->bytes[8] | (size_t)data->bytes[9] << 8;
    if (begin == 12)
        length |= (size_t)data->bytes[10] << 16 | (size_t)data->bytes[11] << 24;
    char header[1024];
    if (length >= sizeof header || begin + length > data->nbytes)
        return "the header is truncated or too long";
    memcpy(header, data->bytes + begin, length);
    header[length] = 0;
    if (strstr(header, "'fortran_order': True"))
        return "expected C order, got Fortran order; save numpy.ascontiguousarray(x)";
    const char *descr = strstr(header, "'descr':");
    descr = descr ? strchr(descr + 8, '\'') : NULL;
    size_t name = strlen(spec->dtype);
    if (!descr || strncmp(descr + 1, spec->dtype, name) || descr[1 + name] != '\'') {
        snprintf(reason, sizeof reason, "expected %s, got elements of %.*s", spec->type,
                 descr ? (int)strcspn(descr + 1, "'") : 0, descr ? descr + 1 : "");
        return reason;
    }
    const char *shape = strstr(header, "'shape':");
    shape = shape ? strchr(shape, '(') : NULL;
    if (!shape || !fits_shape(shape, spec, sizes)) {
        snprintf(reason, sizeof reason, "expected %s%s, got shape %.*s", spec->type,
                 spec->lengths ? " with " STEP_TAKES_LENGTHS " as in the inputs before"
                               : " or several stacked along the first axis",
                 shape ? (int)strcspn(shape, ")") + 1 : 0, shape ? shape : "");
        return reason;
    }
    data->nbytes -= begin + length;
    memmove(data->bytes, data->bytes + begin + length, data->nbytes);
    return NULL;
}

/* Create a folder and its parents. Errors are reported when a file in it is opened. */
static void make_folder(const char *name)
{
    char part[4096];
    size_t length = strlen(name);
    if (length >= sizeof part)
        return;
    for (size_t i = 1; i <= length; i++)
        if (name[i] == '/' || !name[i]) {
            memcpy(part, name, i);
            part[i] = 0;
            make_directory(part);
        }
}

static FILE *open_output(const char *folder, int number, const char *dtype, const char *shape, long steps)
{
    char name[4096], header[1024];
    if (snprintf(name, sizeof name, "%s/%d.npy", folder, number) >= (int)sizeof name)
        return complain(folder, "the name is too long"), NULL;
    FILE *file = fopen(name, "wb");
    if (!file)
        return complain(name, strerror(errno)), NULL;
    char runs[32] = "";
    if (steps)
        snprintf(runs, sizeof runs, "%ld, ", steps);
    int length = snprintf(header, sizeof header,
                          "{'descr': '%s', 'fortran_order': False, 'shape': (%s%s), }", dtype, runs, shape);
    int padded = (length + 1 + 10 + 63) / 64 * 64 - 10;
    fprintf(file, "%cNUMPY%c%c%c%c%s%*s\n", 0x93, 1, 0, padded & 255, padded >> 8, header,
            padded - length - 1, "");
    return file;
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

typedef struct {
    const char *weights, *save, *out, *simd;
    long steps, threads;
    int time;
} Options;

static int run(const Options *options, char **names, int count)
{
    static Data inputs[STEP_NINPUTS + 1];
    static FILE *files[STEP_NOUTPUTS + 1];
    static Data weights;
    static void *memory;
    unsigned long long sizes[STEP_NLENGTHS + 1] = {0};
    if (count != STEP_NINPUTS)
        return complain("inputs", "expected " STEP_TAKES);
    for (int i = 0; i < count; i++) {
        if (read_file(names[i], &inputs[i]))
            return 1;
        const TensorSpec *spec = &step_input_specs[i];
        const char *wrong = unpack(&inputs[i], spec, sizes);
        size_t nbytes = nbytes_of(spec, sizes);
        if (!wrong && (inputs[i].nbytes < nbytes || (nbytes && inputs[i].nbytes % nbytes)))
            wrong = "the number of bytes is not a multiple of the input's size";
        if (wrong)
            return complain(names[i], wrong);
    }
    if (options->weights && read_file(options->weights, &weights))
        return 1;
    if (options->out) /* created first, as `save` may be inside it */
        make_folder(options->out);
    FILE *save = options->save ? fopen(options->save, "ab") : NULL; /* existing contents remain */
    if (options->save && (!save || fclose(save)))
        return complain(options->save, strerror(errno));
    struct step step;
    memory = aligned_alloc(64, (step_memory() + 63) / 64 * 64);
    if (!memory)
        return complain("memory", "cannot be allocated");
    if (step_init_for(&step, memory, weights.bytes, weights.nbytes, options->simd))
        return complain("weights", step_error(&step));
#ifdef STEP_LENGTHS
    struct step_lengths lengths;
    int64_t of_inputs[STEP_LENGTHS];
    for (int i = 0; i < STEP_LENGTHS; i++)
        of_inputs[i] = (int64_t)sizes[i];
    memcpy(&lengths, of_inputs, sizeof lengths);
    if (step_set_lengths(&step, &lengths))
        return complain("lengths", step_error(&step));
#endif
    size_t nbytes_out[STEP_NOUTPUTS + 1];
    static char shapes[STEP_NOUTPUTS + 1][1024];
    for (int i = 0; i < STEP_NOUTPUTS; i++) {
        const TensorSpec *spec = &step_output_specs[i];
        nbytes_out[i] = spec->nbytes;
        snprintf(shapes[i], sizeof shapes[i], "%s", spec->shape);
#ifdef STEP_LENGTHS
        int64_t shape[MOST_DIMENSIONS];
        int rank = step_output_shape(&step, i, shape), at = 0;
        nbytes_out[i] = spec->itemsize;
        for (int k = 0; k < rank; k++) {
            at += snprintf(shapes[i] + at, sizeof shapes[i] - (size_t)at, "%lld, ", (long long)shape[k]);
            nbytes_out[i] *= (size_t)shape[k];
        }
#endif
        if (options->out &&
            !(files[i] = open_output(options->out, i, spec->dtype, shapes[i], options->steps)))
            return 1;
    }
    if (options->threads > 1) {
#ifdef STEP_THREADS
        step_use_threads(&step, step_threads((int)options->threads));
#else
        return complain(
            "--threads",
            "expected 1, the number of threads of the build; see `python -m mlvm build --help`");
#endif
    }
    double best = 1e30, begun = now();
    long steps = options->steps ? options->steps : 1;
    for (long number = 0; number < steps; number++) {
        const void *sources[STEP_NINPUTS + 1];
        const void *results[STEP_NOUTPUTS + 1];
        struct step_inputs from;
        struct step_outputs to;
        for (int i = 0; i < STEP_NINPUTS; i++) {
            size_t nbytes = nbytes_of(&step_input_specs[i], sizes);
            size_t there = nbytes ? inputs[i].nbytes / nbytes : 1;
            sources[i] = inputs[i].bytes + (size_t)number % there * nbytes;
        }
        memcpy(&from, sources, STEP_NINPUTS * sizeof *sources);
        double before = now();
        if (step_run(&step, &from, &to))
            return complain("error", step_error(&step));
        double took = now() - before;
        best = took < best ? took : best;
        memcpy(results, &to, STEP_NOUTPUTS * sizeof *results);
        for (int i = 0; options->out && i < STEP_NOUTPUTS; i++)
            if (fwrite(results[i], 1, nbytes_out[i], files[i]) != nbytes_out[i])
                return complain(options->out, strerror(errno));
    }
    double all = now() - begun;
    for (int i = 0; options->out && i < STEP_NOUTPUTS; i++)
        if (fclose(files[i]))
            return complain(options->out, strerror(errno));
    for (int i = 0; i < STEP_NOUTPUTS; i++)
#ifdef STEP_LENGTHS
        printf("output %d: %s of shape (%s)\n", i, step_output_specs[i].type, shapes[i]);
#else
        printf("output %d: %s\n", i, step_output_specs[i].type);
#endif
    if (options->time)
        printf("%s: %.9f s a run, %.9f on the average\n", step_simd(&step), best, all / (double)steps);
    if (options->save) {
        size_t nbytes = step_state();
        void *state = aligned_alloc(64, nbytes);
        FILE *file = fopen(options->save, "wb");
        int failed = !file || !state || step_save(&step, state, nbytes) ||
                     fwrite(state, 1, nbytes, file) != nbytes;
        failed = (file && fclose(file)) || failed;
        free(state);
        if (failed)
            return complain(options->save, "cannot be written");
    }
    free(memory);
    return 0;
}

int main(int argc, char **argv)
{
    Options options = {.threads = 1};
    int i = 1;
    for (; i < argc && argv[i][0] == '-' && argv[i][1]; i++) {
        const char *name = argv[i];
        if (!strcmp(name, "--help") || !strcmp(name, "-h"))
            return fputs(HELP, stdout) < 0;
        if (!strcmp(name, "--time")) {
            options.time = 1;
            continue;
        }
        const char *value = i + 1 < argc ? argv[++i] : NULL;
        char *end = NULL;
        errno = 0;
        long number = value ? strtol(value, &end, 10) : 0;
        int counts = value && end != value && !*end && number > 0 && !errno;
        if (!value)
            return complain(name, "expected a known option with a value; see --help"), 2;
        if (!strcmp(name, "--weights"))
            options.weights = value;
        else if (!strcmp(name, "--save"))
            options.save = value;
        else if (!strcmp(name, "--out"))
            options.out = value;
        else if (!strcmp(name, "--simd"))
            options.simd = value;
        else if (!strcmp(name, "--steps") && counts)
            options.steps = number;
        else if (!strcmp(name, "--threads") && counts && number <= STEP_MOST_THREADS)
            options.threads = number;
        else
            return complain(name, "expected a known option with a valid number; see --help"), 2;
    }
    return run(&options, argv + i, argc - i);
}
