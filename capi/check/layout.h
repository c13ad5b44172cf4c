/* layout.h: the parts of a workspace, one behind the other. */
#ifndef HR_LAYOUT_H
#define HR_LAYOUT_H

#include <stddef.h>
#include <stdint.h>

/* A part of a workspace is HR_NO_PART, or its first byte. All are at multiples of HR_PART_ALIGNMENT, so
 * that a product finds its factors aligned in one way, whatever else there is. */
#define HR_NO_PART        SIZE_MAX
#define HR_PART_ALIGNMENT ((size_t)256)

/* Appends a part to a layout of `bytes` bytes and returns it. */
static inline size_t hr_take_part(size_t *bytes, int wanted, int64_t rows, int64_t cols,
                                  size_t element)
{
    if (!wanted)
        return HR_NO_PART;
    const size_t at = *bytes, size = (size_t)rows * (size_t)cols * element;
    *bytes += (size + HR_PART_ALIGNMENT - 1) / HR_PART_ALIGNMENT * HR_PART_ALIGNMENT;
    return at;
}

#endif
