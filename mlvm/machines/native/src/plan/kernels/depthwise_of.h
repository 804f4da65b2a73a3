/* Depthwise convolution of the dtype T. Included once per dtype, after vector_of.h. */

/* --- sums over a window --- * A line of results: each is the sum over the taps of a window, row by row,
 * of a pixel times an element of the kernel. The sums of a tile of positions are in registers. */
typedef struct {
    const T *x, *kernel; /* the image; the first tap */
    T *out;
    int64_t channels, height, width;
    int64_t tall, y, y_step, kernel_y; /* rows of taps: row of the first tap in the image, and strides */
    int64_t wide, x_step, kernel_x;    /* the same for the taps in a row */
    int64_t column, stride; /* column of the first tap at the first position; distance between positions */
    int64_t places, out_step; /* in pixels */
} OF(LineOf);
#define Line OF(LineOf)

static inline V OF(load_some)(const T *from, int64_t count)
{
    V value = {0};
    memcpy(&value, from, (size_t)count * sizeof(T));
    return value;
}

/* `some`: there are fewer channels than vector lanes; `inside`: all taps are in the image. */
SPECIALIZED void OF(places)(const Line *line, int64_t place, int64_t channel, const int places,
                            const int vectors, const int inside, const int some)
{
    V sum[4][2];
    const int64_t channels = line->channels, step = line->stride * channels;
    const int64_t column = line->column + place * line->stride;
    UNROLL_FOR (int i = 0; i < places; i++)
        UNROLL_FOR (int v = 0; v < vectors; v++)
            sum[i][v] = (V){0};
    for (int64_t a = 0, y = line->y; a < line->tall; a++, y += line->y_step) {
        if (y < 0 || y >= line->height)
            continue;
        const T *kernel = line->kernel + a * line->kernel_y + channel;
        const T *row = line->x + (y * line->width + column) * channels + channel;
        if (inside && !some && line->stride > 1) /* prefetch pixels that the next tile reads first */
            UNROLL_FOR (int i = 1; i <= 2 * places; i++)
                __builtin_prefetch(row + ((places - 1) * line->stride + line->wide - 1 + i) * channels);
        for (int64_t b = 0; b < line->wide; b++) {
            int64_t first = column + b * line->x_step;
            V factor[2];
            UNROLL_FOR (int v = 0; v < vectors; v++)
                factor[v] = some ? OF(load_some)(kernel, channels) : OF(load)(kernel + v * LANES);
            UNROLL_FOR (int i = 0; i < places; i++) {
                int64_t at = first + i * line->stride;
                if (inside || (at >= 0 && at < line->width))
                    UNROLL_FOR (int v = 0; v < vectors; v++) {
                        const T *from = row + i * step + v * LANES;
                        sum[i][v] = OF(FMA)(
                            factor[v], some ? OF(load_some)(from, channels) : OF(load)(from), sum[i][v]);
                    }
            }
            kernel += line->kernel_x;
            row += line->x_step * channels;
        }
    }
    T *out = line->out + place * line->out_step * channels + channel;
    UNROLL_FOR (int i = 0; i < places; i++, out += line->out_step * channels)
        UNROLL_FOR (int v = 0; v < vectors; v++) {
            if (some)
                memcpy(out, &sum[i][v], (size_t)channels * sizeof(T));
            else
                OF(store)(out + v * LANES, sum[i][v]);
        }
}

/* The same for adjacent positions and taps, in reverse order if `turned`: each pixel is read once for all
 * positions, and a row's taps are in registers, next to the sums. */
SPECIALIZED void OF(beside)(const Line *line, int64_t place, int64_t channel, const int places,
                            const int wide, const int turned, const int inside)
{
    V sum[8], factor[7];
    const int64_t channels = line->channels, next = turned ? -channels : channels;
    const int64_t column = line->column + place + (turned ? places - 1 : 0);
    UNROLL_FOR (int i = 0; i < places; i++)
        sum[i] = (V){0};
    for (int64_t a = 0, y = line->y; a < line->tall; a++, y += line->y_step) {
        if (y < 0 || y >= line->height)
            continue;
        const T *kernel = line->kernel + a * line->kernel_y + channel;
        const T *row = line->x + (y * line->width + column) * channels + channel;
        UNROLL_FOR (int b = 0; b < wide; b++, kernel += line->kernel_x)
            factor[b] = OF(load)(kernel);
        UNROLL_FOR (int j = 0; j < places - 1 + wide; j++, row += next) {
            if (!inside && (uint64_t)(column + (turned ? -j : j)) >= (uint64_t)line->width)
                continue;
            const V pixel = OF(load)(row);
            UNROLL_FOR (int i = 0; i < places; i++) {
                V *to = &sum[turned ? places - 1 - i : i];
                if (j >= i && j - i < wide)
                    *to = OF(FMA)(factor[j - i], pixel, *to);
            }
        }
    }
    T *out = line->out + place * line->out_step * channels + channel;
    UNROLL_FOR (int i = 0; i < places; i++, out += line->out_step * channels)
        OF(store)(out, sum[i]);
}

/* Number of positions per tile: 8, or 7 if fewer positions are then computed twice. */
static inline int64_t OF(even_places)(int64_t places)
{
    return places >= 8 && (places + 7) / 8 * 8 <= (places + 6) / 7 * 7 ? 8 : 7;
}

#define BESIDE(count, taps, turned, inside)                                                             \
    if (places == count && line->wide == taps && line->x_step == (turned ? -1 : 1) && within == inside) \
        for (; channel < end; channel += LANES)                                                         \
            OF(beside)(line, place, least(channel, line->channels - LANES), count, taps, turned, inside);
/* clang-format off */
#define BESIDES(count, taps)                                                             \
    BESIDE(count, taps, 0, 0) BESIDE(count, taps, 0, 1) BESIDE(count, taps, 1, 0) BESIDE(count, taps, 1, 1)
/* clang-format on */
/* Whole vectors of channels for 7 or 8 positions; `within`: all taps are in the image. */
static void OF(channels_beside)(const Line *line, int64_t place, int64_t channel, int64_t end,
                                int64_t places, int within)
{
    BESIDES(7, 3) BESIDES(7, 5) BESIDES(7, 7) BESIDES(8, 3) BESIDES(8, 5) BESIDES(8, 7)
}
#undef BESIDES
#undef BESIDE

/* Some channels of the same number of positions: the last vector may overlap the previous one. */
SPECIALIZED void OF(channels)(const Line *line, int64_t place, int64_t channel, int64_t end,
                              const int places, const int vectors, const int inside)
{
    if (line->channels < LANES) {
        OF(places)(line, place, 0, places, 1, inside, 1);
        return;
    }
    for (; channel + vectors * LANES <= end; channel += vectors * LANES)
        OF(places)(line, place, channel, places, vectors, inside, 0);
    for (; channel < end; channel += LANES)
        OF(places)(line, place, least(channel, line->channels - LANES), places, 1, inside, 0);
}

static void OF(line)(const Line *line)
{
    enum { BLOCK = 512 / sizeof(T) }; /* channels with taps that fit into the first-level cache */
    const int64_t far = (line->wide - 1) * line->x_step;
    const int beside = VECTOR_BYTES * ROWS > 96 && line->channels >= LANES && line->places >= 7 &&
                       line->wide % 2 && line->wide >= 3 && line->wide <= 7 && line->stride == 1 &&
                       (line->x_step == 1 || line->x_step == -1);
    const int64_t most = beside ? OF(even_places)(line->places) : line->places >= 4 ? 4 : 1;
    for (int64_t channel = 0; channel < line->channels; channel += BLOCK) {
        int64_t end = least(channel + BLOCK, line->channels);
        for (int64_t place = 0; place < line->places;) {
            int64_t rest = line->places - place, places = most;
            if (rest < places) /* overlap the previous tile */
                place = line->places - places;
            int64_t first = line->column + place * line->stride;
            int64_t last = first + (places - 1) * line->stride;
            int inside = first + least(far, 0) >= 0 && last + (far > 0 ? far : 0) < line->width;
            if (beside)
                OF(channels_beside)(line, place, channel, end, places, inside);
            else if (places == 1)
                OF(channels)(line, place, channel, end, 1, 2, 0);
            else if (inside)
                OF(channels)(line, place, channel, end, 4, 2, 1);
            else
                OF(channels)(line, place, channel, end, 4, 2, 0);
            place += places;
        }
    }
}

/* Lines of a convolution: a tap of the kernel has `each` rows of channels. */
static inline Line OF(line_of)(const int64_t *n, const T *kernel, int64_t each)
{
    const int64_t channels = n[CHANNELS], tap = each * channels;
    return (Line){.channels = channels,
                  .height = n[HEIGHT],
                  .width = n[WIDTH],
                  .tall = n[TALL],
                  .y_step = n[APART_Y],
                  .kernel_y = n[WIDE] * tap,
                  .wide = n[WIDE],
                  .x_step = n[APART_X],
                  .kernel_x = tap,
                  .column = -n[LEFT],
                  .stride = n[STRIDE_X],
                  .places = n[ACROSS],
                  .out_step = 1,
                  .kernel = kernel};
}

/* Set the line of a row of windows, counted over all images. */
static inline void OF(begin_line)(Line *line, const int64_t *n, char *const *p, int64_t row)
{
    line->x = (const T *)p[1] + row / n[DOWN] * n[HEIGHT] * n[WIDTH] * n[CHANNELS];
    line->y = row % n[DOWN] * n[STRIDE_Y] - n[TOP];
    line->out = (T *)p[0] + row * n[ACROSS] * n[CHANNELS];
}

/* A unit is a row of windows. */
static int OF(depthwise)(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    Line line = OF(line_of)(call->ints, (const T *)p[2], 1);
    (void)scratch;
    for (int64_t unit = begin; unit < end; unit++) {
        OF(begin_line)(&line, call->ints, p, unit);
        OF(line)(&line);
    }
    return 0;
}

/* Find the taps 0 .. taps - 1 that reach a position of an image: `at` is the position, counted from the
 * edge of the padding, and tap j of window i is at i * `stride` + j * `apart`. Return their number; set
 * the first tap, the distance between taps, the window of the first tap, and the distance between
 * windows. */
static inline int64_t OF(reaching)(int64_t at, int64_t taps, int64_t stride, int64_t apart, int64_t *first,
                                   int64_t *step, int64_t *window, int64_t *back)
{
    int64_t nruns = 0;
    *first = *step = *window = *back = 0;
    for (int64_t j = 0; j < taps; j++) {
        int64_t from = at - j * apart;
        if ((from % stride + stride) % stride)
            continue;
        from = from >= 0 ? from / stride : -(-from / stride);
        if (nruns == 0) {
            *first = j;
            *window = from;
        } else if (nruns == 1) {
            *step = j - *first;
            *back = from - *window;
        }
        nruns++;
    }
    return nruns;
}

/* The result is an image; HEIGHT x WIDTH windows are read. A unit is a row of the image. Positions
 * that are `stride` apart are reached by the same taps. */
static int OF(depthwise_transpose)(const KernelCall *call, char *const *p, int64_t begin, int64_t end,
                                   char *scratch)
{
    const int64_t *n = call->ints, channels = n[CHANNELS];
    (void)scratch;
    Line line = {
        .channels = channels, .height = n[HEIGHT], .width = n[WIDTH], .stride = 1, .out_step = n[STRIDE_X]};
    for (int64_t unit = begin; unit < end; unit++) {
        int64_t row = unit % n[DOWN], first_row, row_step, first, step;
        line.x = (const T *)p[1] + unit / n[DOWN] * n[HEIGHT] * n[WIDTH] * channels;
        line.tall = OF(reaching)(row + n[TOP], n[TALL], n[STRIDE_Y], n[APART_Y], &first_row, &row_step,
                                 &line.y, &line.y_step);
        line.kernel_y = row_step * n[WIDE] * channels;
        for (int64_t phase = 0; phase < least(n[STRIDE_X], n[ACROSS]); phase++) {
            line.wide = OF(reaching)(phase + n[LEFT], n[WIDE], n[STRIDE_X], n[APART_X], &first, &step,
                                     &line.column, &line.x_step);
            line.kernel_x = step * channels;
            line.kernel = (const T *)p[2] + (first_row * n[WIDE] + first) * channels;
            line.places = (n[ACROSS] - phase + n[STRIDE_X] - 1) / n[STRIDE_X];
            line.out = (T *)p[0] + (unit * n[ACROSS] + phase) * channels;
            OF(line)(&line);
        }
    }
    return 0;
}

/* --- sums over the positions --- */

/* Sums for some taps of a kernel row over a row of windows; `from` is the pixel in the first window. */
SPECIALIZED void OF(taps)(V sum[3][4], const int64_t *n, const T *g, const T *from, int64_t column,
                          const int taps, const int vectors, int64_t some)
{
    const int64_t channels = n[CHANNELS], step = n[STRIDE_X] * channels;
    const int64_t apart = n[APART_X], next = apart * channels;
    V s[3][4];
    UNROLL_FOR (int b = 0; b < taps; b++)
        UNROLL_FOR (int v = 0; v < vectors; v++)
            s[b][v] = sum[b][v];
    for (int64_t j = 0; j < n[ACROSS]; j++, column += n[STRIDE_X], g += channels, from += step) {
        int inside = column >= 0 && column + (taps - 1) * apart < n[WIDTH];
        V factor[4];
        UNROLL_FOR (int v = 0; v < vectors; v++)
            factor[v] = some ? OF(load_some)(g, some) : OF(load)(g + v * LANES);
        UNROLL_FOR (int b = 0; b < taps; b++) {
            int64_t at = column + b * apart;
            if (inside || (at >= 0 && at < n[WIDTH]))
                UNROLL_FOR (int v = 0; v < vectors; v++) {
                    const T *pixel = from + b * next + v * LANES;
                    s[b][v] = OF(FMA)(factor[v], some ? OF(load_some)(pixel, some) : OF(load)(pixel),
                                      s[b][v]);
                }
        }
    }
    UNROLL_FOR (int b = 0; b < taps; b++)
        UNROLL_FOR (int v = 0; v < vectors; v++)
            sum[b][v] = s[b][v];
}

/* Gradient of the taps b .. b + taps - 1 of row a, for a few vectors of channels. A sum is split into
 * parts of rows of windows with PART positions. */
SPECIALIZED void OF(kernel_part)(const int64_t *n, char *const *p, int64_t a, int64_t b, int64_t channel,
                                 const int taps, const int vectors, int64_t some, int64_t skip)
{
    const int64_t channels = n[CHANNELS];
    const V zero = {0};
    V sum[3][4], total[3][4];
    int64_t places = 0;
    UNROLL_FOR (int i = 0; i < taps; i++)
        UNROLL_FOR (int v = 0; v < vectors; v++)
            sum[i][v] = total[i][v] = zero;
    for (int64_t row = 0; row < n[IMAGES] * n[DOWN]; row++) {
        int64_t y = row % n[DOWN] * n[STRIDE_Y] - n[TOP] + a * n[APART_Y];
        if (y >= 0 && y < n[HEIGHT]) {
            int64_t column = b * n[APART_X] - n[LEFT];
            const T *image = (const T *)p[2] + row / n[DOWN] * n[HEIGHT] * n[WIDTH] * channels;
            const T *g = (const T *)p[1] + row * n[ACROSS] * channels + channel;
            image += (y * n[WIDTH] + column) * channels + channel;
            OF(taps)(sum, n, g, image, column, taps, vectors, some);
        }
        places += n[ACROSS];
        if (places >= PART || row == n[IMAGES] * n[DOWN] - 1) {
            places = 0;
            UNROLL_FOR (int i = 0; i < taps; i++)
                UNROLL_FOR (int v = 0; v < vectors; v++) {
                    total[i][v] += sum[i][v];
                    sum[i][v] = zero;
                }
        }
    }
    T *out = (T *)p[0] + (a * n[WIDE] + b) * channels + channel;
    UNROLL_FOR (int i = 0; i < taps; i++)
        UNROLL_FOR (int v = 0; v < vectors; v++) {
            T *to = out + i * channels + v * LANES;
            if (some || skip)
                memcpy(to + skip, (T *)&total[i][v] + skip,
                       (size_t)((some ? some : LANES) - skip) * sizeof(T));
            else
                OF(store)(to, total[i][v]);
        }
}

SPECIALIZED void OF(kernel_channels)(const int64_t *n, char *const *p, int64_t a, int64_t b,
                                     int64_t channel, int64_t end, const int taps)
{
    enum { AT_ONCE = VECTOR_BYTES == 64 ? 4 : 2 };
    int64_t channels = n[CHANNELS];
    for (; channel + AT_ONCE * LANES <= end; channel += AT_ONCE * LANES)
        OF(kernel_part)(n, p, a, b, channel, taps, AT_ONCE, 0, 0);
    for (; channel + LANES <= end; channel += LANES)
        OF(kernel_part)(n, p, a, b, channel, taps, 1, 0, 0);
    if (channel < end && channels >= LANES)
        OF(kernel_part)(n, p, a, b, channels - LANES, taps, 1, 0, channel - channels + LANES);
    else if (channel < end)
        OF(kernel_part)(n, p, a, b, channel, taps, 1, channels, 0);
}

/* A unit is a row of the kernel for BLOCK channels. */
static int OF(depthwise_kernel_vjp)(const KernelCall *call, char *const *p, int64_t begin, int64_t end,
                                    char *scratch)
{
    const int64_t *n = call->ints;
    (void)scratch;
    for (int64_t unit = begin; unit < end; unit++) {
        int64_t channel = unit / n[TALL] * n[BLOCK], a = unit % n[TALL], b = 0;
        int64_t stop = least(channel + n[BLOCK], n[CHANNELS]);
        for (; b + 3 <= n[WIDE]; b += 3)
            OF(kernel_channels)(n, p, a, b, channel, stop, 3);
        if (b + 2 <= n[WIDE])
            OF(kernel_channels)(n, p, a, b, channel, stop, 2);
        else if (b < n[WIDE])
            OF(kernel_channels)(n, p, a, b, channel, stop, 1);
    }
    return 0;
}
