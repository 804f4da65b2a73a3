/* Convolution of dtype T in small groups: EACH output channels read the same number of input channels. A
 * vector covers several groups, or part of one. In the latter case pixels are first copied contiguously,
 * because in an image they may conflict in the first-level cache and be on different pages. Included
 * once per dtype, after vector_of.h. */

typedef OF(Lane) OF(Index) __attribute__((vector_size(VECTOR_BYTES)));

/* For each lane, the lane of the first channel of its group, or of the vector. */
static inline OF(Index) OF(first_lanes)(int64_t each)
{
    OF(Index) index;
    for (int i = 0; i < LANES; i++)
        index[i] = (OF(Lane))(each < LANES ? i / each * each : i);
    return index;
}

static inline V OF(lanes_of)(V x, OF(Index) index)
{
#if defined(__clang__)
    V result;
    for (int i = 0; i < LANES; i++)
        result[i] = x[index[i]];
    return result;
#else
    return __builtin_shuffle(x, index);
#endif
}

/* --- several groups in a vector --- */

/* Some positions of a line of results (see depthwise_of.h), for a vector of channels. `first` are the lanes
 * of the first channel of each group. */
SPECIALIZED void OF(group_places)(const Line *line, int64_t each, OF(Index) first, int64_t place,
                                  int64_t channel, const int places)
{
    const int64_t channels = line->channels, column = line->column + place * line->stride;
    V sum[8];
    UNROLL_FOR (int u = 0; u < places; u++)
        sum[u] = (V){0};
    for (int64_t a = 0, y = line->y; a < line->tall; a++, y += line->y_step) {
        if (y < 0 || y >= line->height)
            continue;
        const T *kernel = line->kernel + a * line->kernel_y + channel;
        for (int64_t b = 0; b < line->wide; b++, kernel += line->kernel_x) {
            const int64_t tap = column + b * line->x_step;
            V whole[8];
            UNROLL_FOR (int u = 0; u < places; u++) {
                int64_t at = tap + u * line->stride;
                int inside = at >= 0 && at < line->width;
                const T *pixel = line->x + (y * line->width + at) * channels + channel;
                whole[u] = inside ? OF(load)(pixel) : (V){0};
            }
            for (int64_t i = 0; i < each; i++) {
                const V factor = OF(load)(kernel + i * channels);
                const OF(Index) index = first + (OF(Lane))i;
                UNROLL_FOR (int u = 0; u < places; u++)
                    sum[u] = OF(FMA)(factor, OF(lanes_of)(whole[u], index), sum[u]);
            }
        }
    }
    UNROLL_FOR (int u = 0; u < places; u++)
        OF(store)(line->out + (place + u) * channels + channel, sum[u]);
}

/* All positions of a line, for a vector of channels. */
static inline void OF(groups_line)(const Line *line, int64_t each, OF(Index) first, int64_t channel)
{
    for (int64_t place = 0; place < line->places;) {
        int64_t places = line->places >= 7 ? OF(even_places)(line->places) : line->places >= 4 ? 4 : 1;
        if (line->places - place < places) /* overlap the previous tile */
            place = line->places - places;
        if (places == 8)
            OF(group_places)(line, each, first, place, channel, 8);
        else if (places == 7)
            OF(group_places)(line, each, first, place, channel, 7);
        else if (places == 4)
            OF(group_places)(line, each, first, place, channel, 4);
        else
            OF(group_places)(line, each, first, place, channel, 1);
        place += places;
    }
}

/* --- vectors of a group --- */

/* Copy the pixels of a group that some positions of a line read, from `channel` on, with zeros outside of
 * the image. */
static Line OF(group_line)(const Line *line, int64_t each, int64_t channel, int64_t place, int64_t places,
                           T *pixels)
{
    const int64_t first = line->column + place * line->stride;
    Line near = *line;
    near.x = pixels;
    near.kernel += channel;
    near.out += place * line->channels + channel;
    near.places = places;
    near.width = (places - 1) * line->stride + (line->wide - 1) * line->x_step + 1;
    near.tall = 0;
    for (int64_t a = 0, y = line->y; a < line->tall; a++, y += line->y_step) {
        if (y < 0 || y >= line->height)
            continue;
        if (near.tall++ == 0)
            near.kernel += a * line->kernel_y;
        const T *from = line->x + (y * line->width + first) * line->channels + channel;
        for (int64_t at = first; at < first + near.width; at++, from += line->channels) {
            const int inside = at >= 0 && at < line->width;
            for (int64_t j = 0; j < each; j += LANES, pixels += LANES)
                OF(store)(pixels, inside ? OF(load)(from + j) : (V){0});
        }
    }
    return near;
}

/* Some positions and vectors of channels, which share the loads of x. */
SPECIALIZED void OF(group_tile)(const Line *near, int64_t each, int64_t place, int64_t channel,
                                const int places, const int vectors)
{
    const int64_t channels = near->channels, step = near->stride * each;
    V sum[8][2];
    UNROLL_FOR (int u = 0; u < places; u++)
        UNROLL_FOR (int v = 0; v < vectors; v++)
            sum[u][v] = (V){0};
    for (int64_t a = 0; a < near->tall; a++) {
        const T *kernel = near->kernel + a * near->kernel_y + channel;
        const T *x = near->x + (a * near->width + place * near->stride) * each;
        for (int64_t b = 0; b < near->wide; b++, x += near->x_step * each)
            for (int64_t i = 0; i < each; i++, kernel += channels) {
                V factor[2];
                UNROLL_FOR (int v = 0; v < vectors; v++)
                    factor[v] = OF(load)(kernel + v * LANES);
                UNROLL_FOR (int u = 0; u < places; u++) {
                    const V pixel = OF(SPREAD)(x[u * step + i]);
                    UNROLL_FOR (int v = 0; v < vectors; v++)
                        sum[u][v] = OF(FMA)(factor[v], pixel, sum[u][v]);
                }
            }
    }
    T *out = near->out + place * channels + channel;
    UNROLL_FOR (int u = 0; u < places; u++, out += channels)
        UNROLL_FOR (int v = 0; v < vectors; v++)
            OF(store)(out + v * LANES, sum[u][v]);
}

#define TILE(count, vectors)                      \
    if (places == count && two == (vectors == 2)) \
        OF(group_tile)(&near, each, place, channel, count, vectors);
/* All positions of a line, for a group from channel `first` on. */
static void OF(group)(const Line *line, int64_t each, int64_t first)
{
    T pixels[PIXELS / sizeof(T)];
    const int64_t room = PIXELS / (int64_t)sizeof(T) / (line->tall * each);
    const int64_t most = (room - 1 - (line->wide - 1) * line->x_step) / line->stride + 1;
    const int two = each >= 2 * LANES, large = two ? 6 : 8, less = large - 1;
    for (int64_t begin = 0; begin < line->places; begin += most) {
        const int64_t count = least(most, line->places - begin);
        const Line near = OF(group_line)(line, each, first, begin, count, pixels);
        const int even = (count + less) / large * large <= (count + less - 1) / less * less;
        const int64_t places = count >= large ? (even ? large : less) : count >= 4 ? 4 : 1;
        for (int64_t channel = 0; channel < each; channel += two ? 2 * LANES : LANES)
            for (int64_t next = 0; next < count; next += places) {
                const int64_t place = least(next, count - places); /* overlap the previous tile */
                TILE(8, 1) TILE(7, 1) TILE(4, 1) TILE(1, 1) TILE(6, 2) TILE(5, 2) TILE(4, 2) TILE(1, 2)
            }
    }
}
#undef TILE

/* A unit is a row of windows. */
static int OF(grouped)(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    const int64_t *n = call->ints, channels = n[CHANNELS], each = n[EACH_GROUP];
    (void)scratch;
    Line line = OF(line_of)(n, (const T *)p[2], each);
    const OF(Index) first = OF(first_lanes)(each);
    for (int64_t unit = begin; unit < end; unit++) {
        OF(begin_line)(&line, n, p, unit);
        if (each < LANES)
            for (int64_t channel = 0; channel < channels; channel += LANES)
                OF(groups_line)(&line, each, first, channel);
        else
            for (int64_t channel = 0; channel < channels; channel += each)
                OF(group)(&line, each, channel);
    }
    return 0;
}

/* --- the gradient for the kernel: several groups in a vector --- */

/* Gradient of tap (a, b), for a vector of channels and EACH channels of their groups. */
SPECIALIZED void OF(groups_tap)(const int64_t *n, char *const *p, int64_t a, int64_t b, int64_t channel,
                                const int each)
{
    const int64_t channels = n[CHANNELS];
    const OF(Index) first = OF(first_lanes)(each);
    OF(Index) index[8];
    V sum[8], total[8];
    int64_t places = 0;
    UNROLL_FOR (int i = 0; i < each; i++) {
        index[i] = first + (OF(Lane))i;
        sum[i] = total[i] = (V){0};
    }
    for (int64_t row = 0; row < n[IMAGES] * n[DOWN]; row++) {
        int64_t y = row % n[DOWN] * n[STRIDE_Y] - n[TOP] + a * n[APART_Y];
        int64_t column = b * n[APART_X] - n[LEFT];
        const T *g = (const T *)p[1] + row * n[ACROSS] * channels + channel;
        const T *image = (const T *)p[2] + row / n[DOWN] * n[HEIGHT] * n[WIDTH] * channels;
        const T *pixel = image + (y * n[WIDTH] + column) * channels + channel;
        const int64_t last = y >= 0 && y < n[HEIGHT] ? n[ACROSS] : 0;
        for (int64_t j = 0; j < last; j++) {
            if (column >= 0 && column < n[WIDTH]) {
                const V factor = OF(load)(g), whole = OF(load)(pixel);
                UNROLL_FOR (int i = 0; i < each; i++)
                    sum[i] = OF(FMA)(factor, OF(lanes_of)(whole, index[i]), sum[i]);
            }
            column += n[STRIDE_X];
            pixel += n[STRIDE_X] * channels;
            g += channels;
        }
        places += n[ACROSS];
        if (places >= PART || row == n[IMAGES] * n[DOWN] - 1) {
            places = 0;
            UNROLL_FOR (int i = 0; i < each; i++) {
                total[i] += sum[i];
                sum[i] = (V){0};
            }
        }
    }
    T *out = (T *)p[0] + (a * n[WIDE] + b) * each * channels + channel;
    UNROLL_FOR (int i = 0; i < each; i++)
        OF(store)(out + i * channels, total[i]);
}

/* --- the same: vectors of a group --- */

/* Add the products of some channels of x and some vectors of g at adjacent positions. */
SPECIALIZED void OF(group_sums)(T *sums, const T *g, const T *x, int64_t places, int64_t each,
                                const int count, const int vectors)
{
    V sum[8][2];
    UNROLL_FOR (int i = 0; i < count; i++)
        UNROLL_FOR (int v = 0; v < vectors; v++)
            sum[i][v] = OF(load)(sums + i * each + v * LANES);
    for (int64_t j = 0; j < places; j++, g += each, x += each) {
        V factor[2];
        UNROLL_FOR (int v = 0; v < vectors; v++)
            factor[v] = OF(load)(g + v * LANES);
        UNROLL_FOR (int i = 0; i < count; i++) {
            const V pixel = OF(SPREAD)(x[i]);
            UNROLL_FOR (int v = 0; v < vectors; v++)
                sum[i][v] = OF(FMA)(factor[v], pixel, sum[i][v]);
        }
    }
    UNROLL_FOR (int i = 0; i < count; i++)
        UNROLL_FOR (int v = 0; v < vectors; v++)
            OF(store)(sums + i * each + v * LANES, sum[i][v]);
}

static inline void OF(group_pixels)(T *to, const T *from, int64_t count, int64_t step, int64_t each)
{
    for (; count > 0; count--, from += step, to += each)
        for (int64_t j = 0; j < each; j += LANES)
            OF(store)(to + j, OF(load)(from + j));
}

#define SUMS(count, vectors)                                \
    for (int64_t i = 0; i < each; i += count)               \
        for (int64_t j = 0; j < each; j += vectors * LANES) \
            OF(group_sums)(sums + i * each + j, g + j, x + i, places, each, count, vectors);
/* Add the products of all channels of a group at adjacent positions. */
static void OF(group_part)(T *sums, const T *g, const T *x, int64_t places, int64_t each)
{
    if (each >= 2 * LANES) {
        SUMS(4, 2)
    } else if (each >= 8) {
        SUMS(8, 1)
    } else if (each == 4) {
        SUMS(4, 1)
    } else {
        SUMS(2, 1)
    }
}
#undef SUMS

/* Gradient of some taps of row `a` from b on, for a group from `channel` on. */
static void OF(group_taps)(const int64_t *n, char *const *p, int64_t a, int64_t b, int64_t taps,
                           int64_t channel)
{
    const int64_t channels = n[CHANNELS], each = n[EACH_GROUP], step = n[STRIDE_X];
    const int64_t rows = n[IMAGES] * n[DOWN], size = taps * each * each;
    T sums[TAPS * WIDEST * WIDEST] = {0}, totals[TAPS * WIDEST * WIDEST] = {0};
    T g[PLACES * WIDEST], x[PLACES * WIDEST];
    for (int64_t row = 0, places = 0; row < rows; row++) {
        const int64_t y = row % n[DOWN] * n[STRIDE_Y] - n[TOP] + a * n[APART_Y];
        const T *line = (const T *)p[1] + row * n[ACROSS] * channels + channel;
        const T *image = (const T *)p[2] + channel + (row / n[DOWN] * n[HEIGHT] + y) * n[WIDTH] * channels;
        for (int64_t j = 0; y >= 0 && y < n[HEIGHT] && j < n[ACROSS]; j += PLACES) {
            const int64_t count = least(PLACES, n[ACROSS] - j);
            OF(group_pixels)(g, line + j * channels, count, channels, each);
            for (int64_t t = 0; t < taps; t++) {
                const int64_t column = j * step + (b + t) * n[APART_X] - n[LEFT];
                const int64_t first = column < 0 ? (step - 1 - column) / step : 0;
                const int64_t last = least(count, (n[WIDTH] - column + step - 1) / step);
                const T *from = image + (column + first * step) * channels;
                OF(group_pixels)(x, from, last - first, step * channels, each);
                OF(group_part)(sums + t * each * each, g + first * each, x, last - first, each);
            }
        }
        places += n[ACROSS];
        if (places < PART && row < rows - 1)
            continue;
        places = 0;
        for (int64_t i = 0; i < size; i++) {
            totals[i] += sums[i];
            sums[i] = 0;
        }
    }
    T *out = (T *)p[0] + (a * n[WIDE] + b) * each * channels + channel;
    for (int64_t i = 0; i < size; i += each, out += channels)
        memcpy(out, totals + i, (size_t)each * sizeof(T));
}

/* A unit is a row of the kernel for BLOCK channels. */
static int OF(grouped_kernel_vjp)(const KernelCall *call, char *const *p, int64_t begin, int64_t end,
                                  char *scratch)
{
    const int64_t *n = call->ints, each = n[EACH_GROUP];
    (void)scratch;
    for (int64_t unit = begin; unit < end; unit++) {
        int64_t channel = unit / n[TALL] * n[BLOCK], a = unit % n[TALL];
        const int64_t stop = least(channel + n[BLOCK], n[CHANNELS]), several = each < LANES;
        for (; channel < stop; channel += several ? LANES : each)
            for (int64_t b = 0; b < n[WIDE]; b += several ? 1 : TAPS)
                if (!several)
                    OF(group_taps)(n, p, a, b, least(TAPS, n[WIDE] - b), channel);
                else if (each == 2)
                    OF(groups_tap)(n, p, a, b, channel, 2);
                else if (each == 4)
                    OF(groups_tap)(n, p, a, b, channel, 4);
                else
                    OF(groups_tap)(n, p, a, b, channel, 8);
    }
    return 0;
}
