/* Tile registers of AMX: eight registers with 16 rows of 64 bytes, which are 16 f32 or 16 pairs of bf16.
 * With AMX_EMULATED they are emulated in memory, and TDPBF16PS is computed as in Intel's manual (Intel
 * 64 and IA-32 Architectures Software Developer's Manual, volume 2), to test products on other
 * processors. Register numbers are constants. */
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
    memset(tile_register, -1, sizeof tile_register); /* previous contents must not be used */
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

/* Flush subnormal numbers to zero. */
static inline float flushed(float x)
{
    return x > -FLT_MIN && x < FLT_MIN ? float_of_bits(bits_of_float(x) & 0x80000000) : x;
}

/* Products of the even and the odd elements of a row are summed separately, rounded at each step; the
 * sum of both is then added to the tile. */
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

/* Compiler barrier before tiles read memory: gcc 12 does not know that its tile intrinsics read memory. */
static inline void tiles_read(const void *memory)
{
    __asm__ volatile("" : : "r"(memory) : "memory");
}

/* Configure the thread's tile registers, and release them afterwards, so that the system need not save
 * them. */
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
