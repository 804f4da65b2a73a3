/* Windows of images, [N, H, W, C] with windows of KH x KW: an item computes one element of the
 * result. */

#define IMAGE \
    const i64 total, const i64 height, const i64 width, const i64 channels, const i64 rows, const i64 columns, \
    const i64 high, const i64 wide, const i64 down, const i64 across, const i64 apart_down, const i64 apart_across, \
    const i64 top, const i64 left

/* Offset in the image of the element at position (i, j) in the window (row, column); -1 in the
 * padding. */
DEVICE i64 inside(i64 image, i64 row, i64 column, i64 channel, i64 height, i64 width, i64 channels)
{
    if (row < 0 || row >= height || column < 0 || column >= width) return -1;
    return ((image * height + row) * width + column) * channels + channel;
}

#define PLACE(i, j) inside(at, row * down + (i) * apart_down - top, column * across + (j) * apart_across - left, \
                           channel, height, width, channels)

/* The item's pixel: its channel, and its position in the padded image `at`. */
#define PIXEL \
    const i64 element = ITEM(0); \
    if (element >= total) return; \
    i64 at = element; \
    const i64 channel = at % channels; at /= channels; \
    const i64 w = at % width + left; at /= width; \
    const i64 h = at % height + top; at /= height;

/* Repeat the body for each window of the image `at` that contains the pixel (h, w), at its
 * position (i, j). For windows without gaps, only each down-th row and each across-th column can
 * contain it. */
#define FIRST_OF(place, step, apart) (apart == 1 ? (i32)(place) % (i32)(step) : 0)
#define NEXT_OF(step, apart) (apart == 1 ? step : 1)
#define OF_EACH_WINDOW(DO) \
    for (i64 i = FIRST_OF(h, down, apart_down); i < high; i += NEXT_OF(down, apart_down)) { \
        const i32 first = (i32)(h - i * apart_down); \
        if (first < 0 || first % (i32)down || first / (i32)down >= rows) continue; \
        for (i64 j = FIRST_OF(w, across, apart_across); j < wide; j += NEXT_OF(across, apart_across)) { \
            const i32 second = (i32)(w - j * apart_across); \
            if (second < 0 || second % (i32)across || second / (i32)across >= columns) continue; \
            const i64 window = (at * rows + first / (i32)down) * columns + second / (i32)across; \
            DO \
        } \
    }

KERNEL void patches(TENSOR(T, out), TENSOR(T, x), const COMPUTED(T) filler, IMAGE)
{
    POINTER(T, out);
    POINTER(T, x);
    const i64 element = ITEM(0);
    if (element >= total) return;
    i64 at = element;
    const i64 channel = at % channels; at /= channels;
    const i64 j = at % wide; at /= wide;
    const i64 i = at % high; at /= high;
    const i64 column = at % columns; at /= columns;
    const i64 row = at % rows; at /= rows;
    const i64 place = PLACE(i, j);
    if (place < 0) STORE(T, out, element, filler);
    else out[element] = x[place];
}

KERNEL void unpatches(TENSOR(T, out), TENSOR(T, x), const COMPUTED(T) filler, IMAGE)
{
    POINTER(T, out);
    POINTER(T, x);
    PIXEL
    COMPUTED(T) sum = 0;
    OF_EACH_WINDOW(sum += LOAD(T, x, ((window * high + i) * wide + j) * channels + channel);)
    STORE(T, out, element, sum);
}

#define POOL(FOLD) \
    const i64 element = ITEM(0); \
    if (element >= total) return; \
    i64 at = element; \
    const i64 channel = at % channels; at /= channels; \
    const i64 column = at % columns; at /= columns; \
    const i64 row = at % rows; at /= rows; \
    COMPUTED(T) one = filler; \
    for (i64 i = 0; i < high; i++) \
        for (i64 j = 0; j < wide; j++) { \
            const i64 place = PLACE(i, j); \
            if (place < 0) continue; \
            const COMPUTED(T) other = LOAD(T, x, place); \
            one = FOLD; \
        }

KERNEL void max_pool2d(TENSOR(T, out), TENSOR(T, x), const COMPUTED(T) filler, IMAGE)
{
    POINTER(T, out);
    POINTER(T, x);
    POOL((one > other || one != one ? one : other))
    STORE(T, out, element, one);
}

KERNEL void avg_pool2d(TENSOR(T, out), TENSOR(T, x), const COMPUTED(T) filler, IMAGE)
{
    POINTER(T, out);
    POINTER(T, x);
    POOL((one + other))
    STORE(T, out, element, one / (high * wide));
}

KERNEL void pool_shares(TENSOR(T, largest), TENSOR(T, shares), TENSOR(T, g), TENSOR(T, x),
                        const COMPUTED(T) filler, IMAGE)
{
    GLOBAL COMPUTED(T) *largest = (GLOBAL COMPUTED(T) *)(largest_memory + largest_at);
    GLOBAL COMPUTED(T) *shares = (GLOBAL COMPUTED(T) *)(shares_memory + shares_at);
    POINTER(T, g);
    POINTER(T, x);
    POOL((one > other || one != one ? one : other))
    COMPUTED(T) count = 0;
    for (i64 i = 0; i < high; i++)
        for (i64 j = 0; j < wide; j++) {
            const i64 place = PLACE(i, j);
            count += place >= 0 && LOAD(T, x, place) == one;
        }
    largest[element] = one;
    shares[element] = LOAD(T, g, element) / count;
}

KERNEL void max_pool2d_vjp(TENSOR(T, out), TENSOR(T, largest), TENSOR(T, shares),
                           TENSOR(T, x), const COMPUTED(T) filler, IMAGE)
{
    POINTER(T, out);
    const GLOBAL COMPUTED(T) *largest = (const GLOBAL COMPUTED(T) *)(largest_memory + largest_at);
    const GLOBAL COMPUTED(T) *shares = (const GLOBAL COMPUTED(T) *)(shares_memory + shares_at);
    POINTER(T, x);
    PIXEL
    const COMPUTED(T) value = LOAD(T, x, element);
    COMPUTED(T) sum = 0;
    OF_EACH_WINDOW(
        const i64 from = window * channels + channel;
        sum += (COMPUTED(T))(value == largest[from]) * shares[from];)
    STORE(T, out, element, sum);
}
