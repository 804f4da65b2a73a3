#define _DEFAULT_SOURCE
#include "machine_code.h"

int64_t code_after = 1 << 15; /* generating the code needs about as much time */

#if defined(__x86_64__) && defined(__unix__)
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { chain_integers(NAME) REST };
enum { chain_value_integers(NAME) STRIDES };

enum { MOST_CALLS = 8192 }; /* with code at the same time; the system limits the number of mappings */
enum { MOST_CODE = 1 << 16, PAGE = 4096 }; /* bytes: for each call, and of a page */

/* --- instructions of vectors: dst = a op b, or op b --- */

/* Constants, repeated in vectors of f32 and then of f64 at the start of the pages. */
enum { ONE = 1, SIGN, NCONSTANTS };
enum { ANY_SIZE, IS_F32, IS_F64, IS_BOOL };
typedef struct {
    const char *row; /* row function without its dtype */
    uint8_t opcode, predicate;
    enum { UNARY, BINARY, COMPARE, SELECT, MOVE, OF_MASKS } kind;
    int constant; /* a, or 0: an operand of the row function */
} Instruction;

static const uint64_t constants[] = {0x3F8000003F800000, 0x3FF0000000000000, 0x8000000080000000,
                                     1ull << 63};
enum { V_ADD, V_SUBTRACT, V_MULTIPLY, V_DIVIDE };
static const Instruction instructions[] = {
    [V_ADD] = {"add", 0x58, 0, BINARY},
    [V_SUBTRACT] = {"subtract", 0x5C, 0, BINARY},
    [V_MULTIPLY] = {"multiply", 0x59, 0, BINARY},
    [V_DIVIDE] = {"divide", 0x5E, 0, BINARY},
    {"square", 0x59, 0, BINARY},
    {"sqrt", 0x51, 0, UNARY},
    {"reciprocal", 0x5E, 0, BINARY, ONE},
    {"negative", 0x57, 0, BINARY, SIGN},
    {"equal", 0xC2, 0x00, COMPARE},
    {"not_equal", 0xC2, 0x04, COMPARE},
    {"less", 0xC2, 0x11, COMPARE},
    {"less_equal", 0xC2, 0x12, COMPARE},
    {"greater", 0xC2, 0x1E, COMPARE},
    {"greater_equal", 0xC2, 0x1D, COMPARE},
    {"where", 0x4A, 0, SELECT},
    {"copy", 0x10, 0, MOVE},
    {"bitwise_and", 0x54, 0, OF_MASKS},
    {"bitwise_or", 0x56, 0, OF_MASKS},
    /* a mask is a nan or zero, so it equals itself if it is false */
    {"bitwise_invert", 0xC2, 0x00, OF_MASKS},
    {"logical_not", 0xC2, 0x00, OF_MASKS},
};

/* Instruction on numbered values: dst = a op b; c is the mask of a SELECT; -1 is none. */
enum { A, B, C, DST, NVALUES_OF_MICRO };
typedef struct {
    const Instruction *op;
    int v[NVALUES_OF_MICRO]; /* values */
    int next
        [NVALUES_OF_MICRO]; /* for each value the next instruction that reads it, or the number of all */
} Micro;

/* --- the links that become code --- */

typedef struct {
    const KernelCall *call;
    const int64_t *values, **links; /* in the call's integers */
    int64_t nvalues, nlinks;
    int *last;            /* the last link that reads a value */
    int *mask;            /* for each value whether it is a mask; in a vector it has no memory */
    Micro *list;          /* of the segment */
    int count, nnames;    /* of the instructions; of the values, also within lines */
    int begin, end;       /* links of the segment */
    int type, is_element; /* all values have one element */
} Chain;

static const int64_t *value_of(const Chain *chain, int64_t value)
{
    return chain->values + value * (STRIDES + chain->call->ints[NAXES]);
}

/* Values of the chain, constants, and values within lines have successive numbers. */
static int constant_of(const Chain *chain, int value)
{
    return value >= chain->nvalues && value < chain->nvalues + NCONSTANTS ? value - (int)chain->nvalues : 0;
}

static int is_kind(const Chain *chain, int64_t value, int kind)
{
    return value < chain->nvalues && value_of(chain, value)[KIND] == kind;
}

static void add(Chain *chain, const Instruction *op, int dst, int a, int b, int c)
{
    chain->list[chain->count++] = (Micro){op, {a, b, c, dst}, {0}};
}

/* Return the dtype of a row function and the length of its op's name. */
static int type_of(const char *row, size_t *length)
{
    const char *end = strrchr(row, '_');
    *length = end ? (size_t)(end - row) : 0;
    if (!end)
        return -1;
    if (!strcmp(end, "_f32") || !strcmp(end, "_4"))
        return IS_F32;
    if (!strcmp(end, "_bool"))
        return IS_BOOL;
    return !strcmp(end, "_f64") || !strcmp(end, "_8") ? IS_F64 : -1;
}

/* Add the instructions of a link; return 0 if there are none. */
static int add_link(Chain *chain, int i)
{
    /* in the order of LINE_ADD and following; x is the line's value */
    static const struct {
        int op, reversed;
    } of_line[] = {{V_ADD, 0},      {V_SUBTRACT, 0}, {V_SUBTRACT, 1},
                   {V_MULTIPLY, 0}, {V_DIVIDE, 0},   {V_DIVIDE, 1}};
    const int64_t *link = chain->links[i], *v = link + 1, *by = link + 1 + link[0];
    const char *row = chain->call->rows[i]->name;
    size_t length;
    int type = type_of(row, &length), last = (int)v[link[0] - 1];
    if (type < 0 || (type != IS_BOOL && chain->type != ANY_SIZE && type != chain->type))
        return 0;
    if (by[0] > 1) { /* a line */
        int x = (int)v[1];
        for (int64_t k = 2; k < link[0]; k++) {
            int y = (int)v[k], op = of_line[by[k] >> 1].op, reversed = of_line[by[k] >> 1].reversed;
            int dst = k + 1 == link[0] ? (int)v[0] : chain->nnames++;
            add(chain, &instructions[op], dst, reversed ? y : x, reversed ? x : y, -1);
            x = dst;
        }
        chain->type = type;
        return 1;
    }
    for (size_t k = 0; k < sizeof instructions / sizeof *instructions; k++) {
        const Instruction *op = &instructions[k];
        if (strlen(op->row) != length || strncmp(op->row, row, length))
            continue;
        int to_mask = op->kind == COMPARE || op->kind == OF_MASKS;
        if ((op->kind == OF_MASKS) != (type == IS_BOOL) ||
            (to_mask && !chain->is_element && !is_kind(chain, v[0], TEMPORARY)))
            return 0;
        for (int64_t j = 1; j < link[0]; j++) {
            int is_mask = op->kind == OF_MASKS || (op->kind == SELECT && j == 1);
            if (chain->is_element && is_mask)
                chain->mask[v[j]] = 1;
            if (chain->mask[v[j]] != is_mask)
                return 0;
        }
        int first = op->constant ? (int)chain->nvalues + op->constant : (int)v[1];
        if (op->kind == SELECT)
            add(chain, op, (int)v[0], last, (int)v[2], first);
        else /* some have one operand twice */
            add(chain, op, (int)v[0], op->kind == UNARY || op->kind == MOVE ? -1 : first, last, -1);
        chain->mask[v[0]] = to_mask;
        chain->type = type == IS_BOOL ? chain->type : type;
        return 1;
    }
    return 0;
}

/* Find the links of the segment that begins with link `begin`. */
static void find_segment(Chain *chain, int begin, int most)
{
    chain->begin = chain->end = begin;
    chain->count = 0;
    chain->nnames = (int)chain->nvalues + NCONSTANTS;
    chain->type = ANY_SIZE;
    memset(chain->mask, 0, (size_t)chain->nvalues * sizeof *chain->mask);
    while (chain->end < most && add_link(chain, chain->end))
        chain->end++;
}

/* --- registers and bytes of the code --- */

enum { NREGISTERS = 16, AX = 0, CX = 1, DX = 2, SI = 6, DI = 7 };
static const uint8_t saved[] = {3, 5, 12, 13, 14, 15}; /* registers that the caller expects unchanged */
static const uint8_t pointers[] = {9, 10, 11, 3, 5, 12, 13, 14, 15};

typedef struct {
    Chain *chain;
    uint8_t *at, *end;
    int is_scalar;             /* the code is for one element, not for a vector */
    int value_in[NREGISTERS];  /* -1: none */
    int *register_of, *stored; /* for each value; -1: none */
    int *next_of;              /* the next instruction that reads a value */
    int *pointer_of;           /* for each value: the register of its address; -1: none */
    const uint8_t *constants;
    int failed;
} Writer;

static void byte(Writer *w, int value)
{
    if (w->at < w->end)
        *w->at++ = (uint8_t)value;
    else
        w->failed = 1;
}

static void bytes(Writer *w, const char *text, int count)
{
    for (int i = 0; i < count; i++)
        byte(w, text[i]);
}

static void number(Writer *w, int64_t value)
{
    for (int i = 0; i < 4; i++)
        byte(w, (int)(value >> 8 * i));
    w->failed |= value != (int32_t)value;
}

/* mov register, [rdi + 8 * value]; the values of a chain of elements are at rdx */
static void load_pointer(Writer *w, int to, int value)
{
    byte(w, to > 7 ? 0x4C : 0x48);
    byte(w, 0x8B);
    byte(w, 0x80 | (to & 7) << 3 | (w->chain->is_element ? DX : DI));
    number(w, 8 * value);
}

/* Return whether an instruction has no scalar form: vmovmskps, and the logical ones. */
static int is_of_bits(int opcode)
{
    return opcode >> 3 == 0x50 >> 3 && opcode != 0x51; /* 0x51: square roots */
}

/* An instruction with registers dst and a, whose last operand is register b, or the memory of `value` if b is -1.
 * `map` is 1 for 0F and 3 for 0F3A. */
static void vector_op(Writer *w, int map, int opcode, int dst, int a, int b, int value)
{
    int constant = b < 0 ? constant_of(w->chain, value) : 0, is_f64 = w->chain->type == IS_F64;
    const int64_t *spec = b < 0 && !constant ? value_of(w->chain, value) : NULL;
    int base = DX, index = w->chain->is_element ? 4 : AX; /* 4 encodes: no index */
    int64_t offset = 0;
    if (spec && (spec[KIND] == TEMPORARY || spec[KIND] == SCALAR)) {
        offset = spec[PLACE];
        index = spec[KIND] == SCALAR ? 4 : index;
    } else if (spec) {
        base = w->pointer_of[value] < 0 ? CX : w->pointer_of[value];
        if (base == CX)
            load_pointer(w, CX, value);
    }
    int high = b < 0 ? base >> 3 : b >> 3;
    int is_one = w->is_scalar && map == 1 && !(opcode == 0x10 && b >= 0) && !is_of_bits(opcode);
    int prefix = is_one ? 2 + is_f64 : map == 3 || is_f64; /* none, 66, F3, F2 */
    byte(w, 0xC4);
    byte(w, (dst > 7 ? 0 : 0x80) | 0x40 | (high ? 0 : 0x20) | map);
    byte(w, (~a & 15) << 3 | (w->is_scalar ? 0 : 4) | prefix);
    byte(w, opcode);
    if (b >= 0) {
        byte(w, 0xC0 | (dst & 7) << 3 | (b & 7));
    } else if (constant) {
        byte(w, (dst & 7) << 3 | 5); /* relative to the next instruction */
        number(w, w->constants + (2 * (constant - 1) + is_f64) * CODE_VECTOR - w->at - 4);
    } else {
        byte(w, 0x80 | (dst & 7) << 3 | 4);
        byte(w, index << 3 | (base & 7));
        number(w, offset);
    }
}

/* Find the next use of each value. */
static void find_uses(Writer *w)
{
    Chain *chain = w->chain;
    for (int value = 0; value < chain->nnames; value++)
        w->next_of[value] = chain->count;
    for (int i = chain->count - 1; i >= 0; i--) {
        Micro *micro = &chain->list[i];
        for (int k = 0; k < NVALUES_OF_MICRO; k++)
            micro->next[k] = micro->v[k] < 0 ? chain->count : w->next_of[micro->v[k]];
        for (int k = 0; k < DST; k++)
            if (micro->v[k] >= 0)
                w->next_of[micro->v[k]] = i;
    }
}

static void load(Writer *w, int r, int value)
{
    if (w->chain->mask[value]) { /* one element */
        load_pointer(w, SI, value);
        bytes(w, "\x0F\xB6\x0E\x48\xF7\xD9\xC4", 7); /* movzx ecx, byte [rsi]; neg rcx; vmovq r, rcx */
        byte(w, r > 7 ? 0x61 : 0xE1);
        bytes(w, "\xF9\x6E", 2);
        byte(w, 0xC1 | (r & 7) << 3);
    } else {
        vector_op(w, 1, 0x10, r, 0, -1, value);
    }
}

static void store(Writer *w, int value)
{
    if (w->chain->mask[value]) { /* one element */
        vector_op(w, 1, 0x50, CX, 0, w->register_of[value], -1);
        load_pointer(w, SI, value);
        bytes(w, "\x83\xE1\x01\x88\x0E", 5); /* and ecx, 1; mov [rsi], cl */
    } else {
        vector_op(w, 1, 0x11, w->register_of[value], 0, -1, value);
    }
    w->stored[value] = 1;
}

static void release(Writer *w, int r)
{
    if (w->value_in[r] >= 0)
        w->register_of[w->value_in[r]] = -1;
    w->value_in[r] = -1;
}

/* Return a register for the value, which is not one of `locked`; the value that is needed last moves to memory. */
static int take(Writer *w, int value, unsigned locked)
{
    int best = -1, latest = -1;
    for (int r = 0; r < NREGISTERS; r++) {
        int old = w->value_in[r], next = old < 0 ? INT32_MAX : w->next_of[old];
        if (locked >> r & 1 || (old >= 0 && w->chain->mask[old] && !w->chain->is_element))
            continue;
        if (next > latest)
            best = r, latest = next;
    }
    if (best < 0)
        return w->failed = 1, 0;
    int old = w->value_in[best];
    if (old >= w->chain->nvalues && !constant_of(w->chain, old))
        w->failed = 1;
    else if (old >= 0 && !w->stored[old] && latest < w->chain->count)
        store(w, old);
    release(w, best);
    w->value_in[best] = value;
    return w->register_of[value] = best;
}

/* Return the register of operand k, and lock it; -1 if the instruction is to read it from memory. */
static int operand(Writer *w, const Micro *micro, int k, unsigned *locked, int may_be_memory)
{
    int value = micro->v[k], r = w->register_of[value];
    if (r < 0 && !(may_be_memory && micro->next[k] == w->chain->count))
        load(w, r = take(w, value, *locked), value);
    *locked |= r < 0 ? 0 : 1u << r;
    return r;
}

static void write_micro(Writer *w, const Micro *micro)
{
    const Chain *chain = w->chain;
    const Instruction *op = micro->op;
    int ia = A, ib = B, dst = micro->v[DST];
    int commutes = op->opcode == instructions[V_ADD].opcode ||
                   op->opcode == instructions[V_MULTIPLY].opcode || is_of_bits(op->opcode);
    if (op->kind == BINARY && commutes && w->register_of[micro->v[A]] < 0 &&
        w->register_of[micro->v[B]] >= 0)
        ia = B, ib = A;
    unsigned locked = 0;
    for (int k = 0; k < DST; k++)
        if (micro->v[k] >= 0 && w->register_of[micro->v[k]] >= 0)
            locked |= 1u << w->register_of[micro->v[k]];
    int ra = micro->v[ia] < 0 ? 0 : operand(w, micro, ia, &locked, 0);
    int is_read_whole = op->kind == SELECT || op->kind == OF_MASKS || is_of_bits(op->opcode);
    is_read_whole &= w->is_scalar && !constant_of(chain, micro->v[ib]);
    int rb = operand(w, micro, ib, &locked, !is_read_whole);
    int rc = micro->v[C] < 0 ? 0 : operand(w, micro, C, &locked, 0);
    if (w->is_scalar && op->kind == UNARY && rb >= 0)
        ra = rb;       /* no wait for the last value of another register */
    unsigned kept = 0; /* registers of operands that are read later; the result may overwrite the others */
    for (int k = 0; k < DST; k++) {
        int value = micro->v[k], r = value < 0 ? -1 : w->register_of[value];
        if (r < 0)
            continue;
        w->next_of[value] = micro->next[k];
        if (micro->next[k] == chain->count)
            release(w, r);
        else
            kept |= 1u << r;
    }
    int rd = take(w, dst, kept), opcode = op->opcode + (op->kind == SELECT && chain->type == IS_F64);
    vector_op(w, op->kind == SELECT ? 3 : 1, opcode, rd, ra, rb, micro->v[ib]);
    if (op->opcode == 0xC2)
        byte(w, op->predicate);
    if (op->kind == SELECT)
        byte(w, rc << 4);
    w->next_of[dst] = micro->next[DST];
    if (dst < chain->nvalues && (!chain->mask[dst] || chain->is_element)) {
        w->stored[dst] = 0;
        if (!is_kind(chain, dst, TEMPORARY) || chain->last[dst] >= chain->end)
            store(w, dst);
    }
    if (micro->next[DST] == chain->count)
        release(w, rd);
}

static void write_instructions(Writer *w)
{
    const Chain *chain = w->chain;
    memset(w->register_of, -1, (size_t)chain->nnames * sizeof *w->register_of);
    memset(w->value_in, -1, sizeof w->value_in);
    for (int i = 0; i < chain->nnames; i++)
        w->stored[i] = 1;
    find_uses(w);
    for (int i = 0; i < chain->count; i++)
        write_micro(w, &chain->list[i]);
}

/* Write a loop over the bytes of the values, `step` at once, while rax is less than the register of `compare`. */
static void write_loop(Writer *w, int step, const char *compare)
{
    bytes(w, compare, 3);
    bytes(w, "\x0F\x8D", 2); /* jge end */
    uint8_t *to_end = w->at;
    number(w, 0);
    uint8_t *loop = w->at;
    write_instructions(w);
    bytes(w, "\x48\x83\xC0", 3); /* add rax, step */
    byte(w, step);
    bytes(w, compare, 3);
    bytes(w, "\x0F\x8C", 2); /* jl loop */
    number(w, loop - w->at - 4);
    if (!w->failed)
        memcpy(to_end, &(int32_t){(int32_t)(w->at - to_end - 4)}, 4);
}

/* Write the code of the segment. */
static void write_segment(Writer *w)
{
    const Chain *chain = w->chain;
    size_t npointers = 0;
    memset(w->pointer_of, -1, (size_t)chain->nnames * sizeof *w->pointer_of);
    bytes(w, "\xF3\x0F\x1E\xFA", 4); /* endbr64 */
    size_t nsaved = chain->is_element ? 0 : sizeof saved;
    if (chain->is_element)
        bytes(w, "\x48\x8B\x57\x08", 4); /* mov rdx, [rdi + 8]: the link's at[0] */
    for (size_t i = 0; i < nsaved; i++) {
        if (saved[i] > 7)
            byte(w, 0x41);
        byte(w, 0x50 | (saved[i] & 7)); /* push */
    }
    for (int i = 0; i < chain->count; i++) {
        for (int k = 0; k < NVALUES_OF_MICRO; k++) {
            int value = chain->list[i].v[k];
            if (value < 0 || value >= chain->nvalues || chain->mask[value] || w->pointer_of[value] >= 0 ||
                is_kind(chain, value, TEMPORARY) || is_kind(chain, value, SCALAR) ||
                npointers == sizeof pointers - sizeof saved + nsaved)
                continue;
            w->pointer_of[value] = pointers[npointers++];
            load_pointer(w, w->pointer_of[value], value);
        }
    }
    w->is_scalar = chain->is_element;
    if (chain->is_element) {
        write_instructions(w);
        bytes(w, "\x48\x81\xC7", 3); /* add rdi, the size of the links */
        number(w, (chain->end - chain->begin) * (int64_t)sizeof(Link));
        bytes(w, "\xFF\x27", 2); /* jmp [rdi]: the next link's function */
    } else {
        bytes(w, "\x31\xC0\x49\x89\xC8", 5);        /* xor eax, eax; mov r8, rcx */
        write_loop(w, CODE_VECTOR, "\x48\x39\xF0"); /* cmp rax, rsi */
        w->is_scalar = 1;
        write_loop(w, chain->type == IS_F64 ? 8 : 4, "\x4C\x39\xC0"); /* cmp rax, r8 */
        for (size_t i = nsaved; i-- > 0;) {
            if (saved[i] > 7)
                byte(w, 0x41);
            byte(w, 0x58 | (saved[i] & 7)); /* pop */
        }
        bytes(w, "\xC5\xF8\x77\xC3", 4); /* vzeroupper; ret */
    }
    while ((w->at - w->end) % 16 && !w->failed)
        byte(w, 0xCC);
}

/* Write the code of each segment of the chain; masks of vectors stay in the segment that computes them. */
static void write_segments(Writer *w, CodeSegment *segments)
{
    Chain *chain = w->chain;
    for (int i = 0; i < chain->nlinks;) {
        find_segment(chain, i, (int)chain->nlinks);
        for (int v = 0; v < chain->nvalues && !chain->is_element; v++)
            if (chain->mask[v] && chain->last[v] >= chain->end) {
                int writer = i;
                while (chain->links[writer][1] != v)
                    writer++;
                find_segment(chain, i, writer);
                v = -1;
            }
        uint8_t *entry = w->at;
        if (chain->count > 1)
            write_segment(w);
        if (chain->count > 1 && !w->failed) {
            segments[i] = (CodeSegment){.nlinks = chain->end - i, .size = chain->type == IS_F64 ? 8 : 4};
            segments[i].nints = chain->links[chain->end] - chain->links[i];
            memcpy(&segments[i].run, &entry, sizeof entry);
        } else {
            w->at = entry;
            w->failed = 0;
        }
        i = chain->end > i ? chain->end : i + 1;
    }
}

static atomic_int ncalls;

static void generate(const KernelCall *call)
{
    const int64_t *n = call->ints, *link;
    int64_t nvalues = n[NVALUES], nlinks = n[NLINKS];
    size_t names = (size_t)(nvalues + NCONSTANTS + nlinks * CHAIN_MOST_OPERANDS), each = 4 * names;
    char *memory = malloc((size_t)(nlinks + 1) * sizeof link + names * sizeof(Micro) + 6 * each);
    CodeSegment *segments = calloc((size_t)nlinks, sizeof *segments);
    uint8_t *pages = mmap(NULL, MOST_CODE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    size_t nbytes = 0;
    if (memory && segments && (void *)pages != MAP_FAILED) {
        Chain chain = {.call = call, .values = n + REST + n[NAXES], .nvalues = nvalues, .nlinks = nlinks};
        chain.is_element = !strcmp(call->kernel->name, "chain_of_elements");
        chain.links = (const int64_t **)memory;
        chain.list = (Micro *)(chain.links + nlinks + 1);
        chain.last = (int *)(chain.list + names);
        chain.mask = chain.last + names;
        Writer w = {.chain = &chain, .register_of = chain.mask + names, .constants = pages};
        w.at = pages + 4 * sizeof constants;
        w.end = pages + MOST_CODE;
        for (size_t i = 0; i < 4 * sizeof constants / sizeof *constants; i++)
            ((uint64_t *)pages)[i] = constants[i / 4];
        w.stored = w.register_of + names;
        w.pointer_of = w.stored + names;
        w.next_of = w.pointer_of + names;
        memset(chain.last, -1, each);
        memset(chain.mask, 0, each);
        link = chain.values + nvalues * (STRIDES + n[NAXES]);
        for (int64_t i = 0; i < nlinks; link += 1 + 2 * link[0], i++) {
            chain.links[i] = link;
            for (int64_t k = 1; k < link[0]; k++)
                chain.last[link[1 + k]] = (int)i;
        }
        chain.links[nlinks] = link;
        write_segments(&w, segments);
        nbytes = (size_t)(w.at - pages + PAGE - 1) / PAGE * PAGE;
        if (w.at == pages + 4 * sizeof constants || mprotect(pages, nbytes, PROT_READ | PROT_EXEC))
            nbytes = 0;
    }
    if ((void *)pages != MAP_FAILED && nbytes < MOST_CODE)
        munmap(pages + nbytes, MOST_CODE - nbytes);
    free(memory);
    if (!nbytes) {
        free(segments);
        return;
    }
    atomic_fetch_add(&ncalls, 1);
    call->code->pages = pages;
    call->code->nbytes = nbytes;
    atomic_store_explicit(&call->code->segments, segments, memory_order_release);
}

void code_count(const KernelCall *call, int64_t elements)
{
    MachineCode *code = call->code;
    if (!code)
        return;
    long long before = atomic_load_explicit(&code->elements, memory_order_relaxed);
    if (before >= code_after)
        return;
    before = atomic_fetch_add_explicit(&code->elements, elements, memory_order_relaxed);
    if (before < code_after && before + elements >= code_after && ncalls < MOST_CALLS)
        generate(call); /* other threads run the links' row functions meanwhile, with the same bits */
}

void code_free(MachineCode *code)
{
    if (code->pages) {
        munmap(code->pages, code->nbytes);
        atomic_fetch_sub(&ncalls, 1);
    }
    free(atomic_load(&code->segments));
}
#else
void code_count(const KernelCall *call, int64_t elements)
{
    (void)call, (void)elements;
}

void code_free(MachineCode *code)
{
    (void)code;
}
#endif
