/* The tiles of AMX: eight registers of 16 rows of 64 bytes, which are 16 f32 or 16 pairs of bf16. Where
 * AMX_EMULATED is defined, memory takes their place, and TDPBF16PS is done as Intel's manual defines it
 * (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2), so that products may be tested
 * on a processor without them. Registers are constants. */
#ifndef MLVM_TILES_H
#define MLVM_TILES_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

enum { TILE_ROWS = 16, TILE_ROW_BYTES = 64, TILE_DEPTH = 32, TILE_HALVES = 512 };

#if defined(AMX_EMULATED)
#include "half.h"

#include <float.h>

typedef struct {
    _Alignas(64) char row[TILE_ROWS][TILE_ROW_BYTES];
} TileRegister;
static _Thread_local TileRegister tile_register[8];

static inline void tiles_begin(void)
{
    memset(tile_register, 0, sizeof tile_register);
}

static inline void tiles_end(void)
{
    memset(tile_register, -1, sizeof tile_register); /* nobody is to rely on what they held */
}

static inline void tile_load(int tile, const void *from, int64_t row_bytes)
{
    for (int i = 0; i < TILE_ROWS; i++)
        memcpy(tile_register[tile].row[i], (const char *)from + i * row_bytes, TILE_ROW_BYTES);
}

static inline void tile_store(int tile, void *to, int64_t row_bytes)
{
    for (int i = 0; i < TILE_ROWS; i++)
        memcpy((char *)to + i * row_bytes, tile_register[tile].row[i], TILE_ROW_BYTES);
}

static inline void tiles_read(const void *memory)
{
    (void)memory;
}

/* Subnormal numbers are zeros. */
static inline float flushed(float x)
{
    return x > -FLT_MIN && x < FLT_MIN ? float_of_bits(bits_of_float(x) & 0x80000000) : x;
}

/* The products of the even elements of a row and of the odd ones have sums of their own, rounded at each
 * step; the sum of these two is then added to what the tile held. */
static inline void tile_dot(int sums, int rows, int pairs)
{
    for (int m = 0; m < TILE_ROWS; m++) {
        float even[16] = {0}, odd[16] = {0}, total[16];
        uint16_t x[32], y[32];
        memcpy(x, tile_register[rows].row[m], sizeof x);
        memcpy(total, tile_register[sums].row[m], sizeof total);
        for (int k = 0; k < 16; k++) {
            const float x0 = flushed(widen_bf16(x[2 * k])), x1 = flushed(widen_bf16(x[2 * k + 1]));
            memcpy(y, tile_register[pairs].row[k], sizeof y);
            for (int n = 0; n < 16; n++) {
                even[n] = flushed(__builtin_fmaf(x0, flushed(widen_bf16(y[2 * n])), even[n]));
                odd[n] = flushed(__builtin_fmaf(x1, flushed(widen_bf16(y[2 * n + 1])), odd[n]));
            }
        }
        for (int n = 0; n < 16; n++)
            total[n] = flushed(flushed(total[n]) + flushed(even[n] + odd[n]));
        memcpy(tile_register[sums].row[m], total, sizeof total);
    }
}

#define TILE_ZERO(tile) memset(&tile_register[tile], 0, sizeof(TileRegister))
#define TILE_LOAD(tile, from, row_bytes) tile_load(tile, from, row_bytes)
#define TILE_STORE(tile, to, row_bytes) tile_store(tile, to, row_bytes)
#define TILE_DOT(sums, rows, pairs) tile_dot(sums, rows, pairs)

#else

/* What follows reads memory that was written before: gcc 12 does not know that of its own instructions. */
static inline void tiles_read(const void *memory)
{
    __asm__ volatile("" : : "r"(memory) : "memory");
}

/* A thread's own: it says how large its tiles are, and lets go of them, so that nobody saves them. */
static inline void tiles_begin(void)
{
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shape.row_bytes[i] = TILE_ROW_BYTES;
        shape.rows[i] = TILE_ROWS;
    }
    tiles_read(&shape);
    _tile_loadconfig(&shape);
}

static inline void tiles_end(void)
{
    _tile_release();
}

#define TILE_ZERO(tile) _tile_zero(tile)
#define TILE_LOAD(tile, from, row_bytes) _tile_loadd(tile, from, row_bytes)
#define TILE_STORE(tile, to, row_bytes) _tile_stored(tile, to, row_bytes)
#define TILE_DOT(sums, rows, pairs) _tile_dpbf16ps(sums, rows, pairs)
#endif

#endif
