/* Convolution in narrow groups of the dtype T: EACH channels of results see as many of x. A vector has
 * several groups, or a part of one. Included once for each dtype, after vector_of.h. */

typedef OF(Lane) OF(Index) __attribute__((vector_size(VECTOR_BYTES)));

/* The lane of each group's first channel, or of the vector's. */
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

static const T OF(no_pixel)[64 / sizeof(T)] = {0};

/* Some places of a line of results (see depthwise_of.h), a vector of channels. */
SPECIALIZED void
OF(group_places)(const OF(Line) *line, int64_t each, int64_t place, int64_t channel,
                 const int places, const int several)
{
    const int64_t channels = line->channels, column = line->column + place * line->stride;
    const int64_t from = several ? channel : channel / each * each; /* the first that is read */
    const OF(Index) first = OF(first_lanes)(each);
    V sum[8];
    UNROLL for (int u = 0; u < places; u++)
        sum[u] = (V){0};
    for (int64_t a = 0, y = line->y; a < line->tall; a++, y += line->y_step) {
        if (y < 0 || y >= line->height)
            continue;
        const T *kernel = line->kernel + a * line->kernel_y + channel;
        for (int64_t b = 0; b < line->wide; b++, kernel += line->kernel_x) {
            const int64_t tap = column + b * line->x_step;
            const T *pixel[8];
            V whole[8];
            UNROLL for (int u = 0; u < places; u++) {
                int64_t at = tap + u * line->stride;
                int inside = at >= 0 && at < line->width;
                pixel[u] = line->x + (y * line->width + at) * channels + from;
                whole[u] = several && inside ? OF(load)(pixel[u]) : (V){0};
                if (!several && !inside)
                    pixel[u] = OF(no_pixel);
            }
            for (int64_t i = 0; i < each; i++) {
                const V factor = OF(load)(kernel + i * channels);
                const OF(Index) index = first + (OF(Lane))i;
                UNROLL for (int u = 0; u < places; u++)
                    sum[u] = OF(FMA)(factor,
                                     several ? OF(lanes_of)(whole[u], index)
                                             : OF(SPREAD)(pixel[u][i]),
                                     sum[u]);
            }
        }
    }
    UNROLL for (int u = 0; u < places; u++)
        OF(store)(line->out + (place + u) * channels + channel, sum[u]);
}

/* A unit is a row of windows. */
static int OF(grouped)(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    const int64_t *n = call->n, channels = n[CHANNELS], each = n[EACH_GROUP];
    (void)scratch;
    OF(Line) line = OF(line_of)(n, (const T *)p[2], each);
    for (int64_t unit = begin; unit < end; unit++) {
        OF(begin_line)(&line, n, p, unit);
        for (int64_t channel = 0; channel < channels; channel += LANES)
            for (int64_t place = 0; place < line.places;) {
                int64_t left = line.places - place;
                int64_t places = line.places >= 7 ? OF(even_places)(line.places) : line.places >= 4 ? 4 : 1;
                if (left < places) /* some of these once more */
                    place = line.places - places;
                if (places == 8 && each < LANES)
                    OF(group_places)(&line, each, place, channel, 8, 1);
                else if (places == 8)
                    OF(group_places)(&line, each, place, channel, 8, 0);
                else if (places == 7 && each < LANES)
                    OF(group_places)(&line, each, place, channel, 7, 1);
                else if (places == 7)
                    OF(group_places)(&line, each, place, channel, 7, 0);
                else if (places == 4 && each < LANES)
                    OF(group_places)(&line, each, place, channel, 4, 1);
                else if (places == 4)
                    OF(group_places)(&line, each, place, channel, 4, 0);
                else
                    OF(group_places)(&line, each, place, channel, 1, each < LANES);
                place += places;
            }
    }
    return 0;
}

/* --- the gradient for the kernel --- */

/* For tap (a, b), a vector of channels, and the channels first .. first + count - 1 of a group of x. */
SPECIALIZED void
OF(group_part)(const int64_t *n, char *const *p, int64_t a, int64_t b, int64_t channel,
               int64_t first, const int count, const int several)
{
    const int64_t channels = n[CHANNELS], each = n[EACH_GROUP];
    const int64_t from = several ? channel : channel / each * each + first;
    OF(Index) index[8];
    V sum[8], total[8];
    int64_t places = 0;
    UNROLL for (int i = 0; i < count; i++) {
        index[i] = OF(first_lanes)(each) + (OF(Lane))(first + i);
        sum[i] = total[i] = (V){0};
    }
    for (int64_t row = 0; row < n[IMAGES] * n[DOWN]; row++) {
        int64_t y = row % n[DOWN] * n[STRIDE_Y] - n[TOP] + a * n[APART_Y];
        int64_t column = b * n[APART_X] - n[LEFT];
        const T *g = (const T *)p[1] + row * n[ACROSS] * channels + channel;
        const T *image = (const T *)p[2] + row / n[DOWN] * n[HEIGHT] * n[WIDTH] * channels;
        const T *pixel = image + (y * n[WIDTH] + column) * channels + from;
        const int64_t last = y >= 0 && y < n[HEIGHT] ? n[ACROSS] : 0;
        for (int64_t j = 0; j < last; j++) {
            if (column >= 0 && column < n[WIDTH]) {
                const V factor = OF(load)(g), whole = several ? OF(load)(pixel) : (V){0};
                UNROLL for (int i = 0; i < count; i++)
                    sum[i] = OF(FMA)(factor,
                                     several ? OF(lanes_of)(whole, index[i]) : OF(SPREAD)(pixel[i]),
                                     sum[i]);
            }
            column += n[STRIDE_X];
            pixel += n[STRIDE_X] * channels;
            g += channels;
        }
        places += n[ACROSS];
        if (places >= PART || row == n[IMAGES] * n[DOWN] - 1) {
            places = 0;
            UNROLL for (int i = 0; i < count; i++) {
                total[i] += sum[i];
                sum[i] = (V){0};
            }
        }
    }
    T *out = (T *)p[0] + ((a * n[WIDE] + b) * each + first) * channels + channel;
    UNROLL for (int i = 0; i < count; i++)
        OF(store)(out + i * channels, total[i]);
}

/* A unit is a row of the kernel for BLOCK channels. */
static int OF(grouped_kernel_vjp)(const KernelCall *call, char *const *p, int64_t begin, int64_t end,
                                  char *scratch)
{
    const int64_t *n = call->n, each = n[EACH_GROUP];
    (void)scratch;
    for (int64_t unit = begin; unit < end; unit++) {
        int64_t channel = unit / n[TALL] * n[BLOCK], a = unit % n[TALL];
        int64_t stop = least(channel + n[BLOCK], n[CHANNELS]);
        for (; channel < stop; channel += LANES)
            for (int64_t b = 0; b < n[WIDE]; b++) {
                if (each == 2)
                    OF(group_part)(n, p, a, b, channel, 0, 2, each < LANES);
                else if (each == 4 && each < LANES)
                    OF(group_part)(n, p, a, b, channel, 0, 4, 1);
                else if (each == 4)
                    OF(group_part)(n, p, a, b, channel, 0, 4, 0);
                for (int64_t i = 0; each >= 8 && i < each; i += 8)
                    if (each < LANES)
                        OF(group_part)(n, p, a, b, channel, i, 8, 1);
                    else
                        OF(group_part)(n, p, a, b, channel, i, 8, 0);
            }
    }
    return 0;
}
