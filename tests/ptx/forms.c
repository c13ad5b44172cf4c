/* forms.c: from the text of an instruction to its row and the meaning of its qualifiers. */
#include <stdlib.h>
#include <string.h>

#include "tests/ptx/ptx.h"

const ptx_row *const ptx_groups[] = {
    ptx_integer, ptx_float32, ptx_float64, ptx_approximate, ptx_compare, ptx_logic,
    ptx_convert, ptx_move,    ptx_memory,  ptx_control,     ptx_warp,    NULL,
};

typedef enum field { TYPE, SPACE, ROUNDING, MODE, FLAG, VECTOR } field;

/* The words of a field, in the order of its numbers. */
static const struct {
    field field;
    int first;
    const char *words;
} vocabulary[] = {
    {TYPE, PTX_PRED,
     "pred b8 b16 b32 b64 u8 u16 u32 u64 s8 s16 s32 s64 f16 bf16 f16x2 bf16x2 f32 f64"},
    {SPACE, PTX_GLOBAL, "global shared param local const"},
    {ROUNDING, PTX_RN, "rn rz rm rp rni rzi rmi rpi"},
    {MODE, PTX_EQ,
     "eq ne lt le gt ge equ neu ltu leu gtu geu num nan lo hi wide bfly down up idx add min max "
     "and or "
     "xor exch cas l r to ballot any all"},
    {FLAG, 0, "ftz sat NaN clamp"},
    {VECTOR, 1, "v1 v2 v3 v4"},
};

/* The number of the word among those of the field, -1 if it is none of them. */
static int number_of(size_t k, const char *word, size_t length)
{
    int number = vocabulary[k].first;
    for (const char *w = vocabulary[k].words; *w; number++) {
        const size_t n = strcspn(w, " ");
        if (n == length && memcmp(w, word, n) == 0)
            return number;
        w += n + (w[n] == ' ');
    }
    return -1;
}

ptx_type ptx_type_of(const char *word, size_t length)
{
    const int number = number_of(0, word, length);
    return number < 0 ? PTX_NO_TYPE : (ptx_type)number;
}

static void note(ptx_form *form, const char *text, size_t length)
{
    bool *const flags[] = {&form->ftz, &form->sat, &form->nan, &form->clamp};
    for (size_t k = 0; k < sizeof vocabulary / sizeof *vocabulary; k++) {
        const int value = number_of(k, text, length);
        if (value < 0)
            continue;
        switch (vocabulary[k].field) {
        case TYPE:
            *(form->type ? &form->type2 : &form->type) = (ptx_type)value;
            break;
        case SPACE:
            form->space = (ptx_space)value;
            break;
        case ROUNDING:
            form->rounding = (ptx_rounding)value;
            break;
        case MODE:
            form->mode = (ptx_mode)value;
            break;
        case FLAG:
            *flags[value] = true;
            break;
        case VECTOR:
            form->vector = value;
            break;
        }
    }
}

/* Whether one of the choices, which end at a space, is the word. */
static bool is_choice(const char *choices, const char *word, size_t length)
{
    for (const char *c = choices; *c && *c != ' ';) {
        const size_t n = strcspn(c, "|? ");
        if (n == length && memcmp(c, word, length) == 0)
            return true;
        c += n;
        if (*c == '|')
            c++;
        else
            break;
    }
    return false;
}

/* Whether the text is of the row's form; then `form` gets what the qualifiers say. */
static bool matches(const ptx_row *row, const char *text, ptx_form *form)
{
    const char *pattern = row->form, *word = text;
    while (*pattern) {
        const size_t length = strcspn(word, "."), choices = strcspn(pattern, " ");
        if (length > 0 && is_choice(pattern, word, length)) {
            if (word != text)
                note(form, word, length);
            word += length + (word[length] == '.');
        } else if (pattern[choices - 1] != '?') {
            return false;
        }
        pattern += choices + (pattern[choices] == ' ');
    }
    return *word == 0;
}

#define BUCKETS 1024
static ptx_form *buckets[BUCKETS];

ptx_form *ptx_form_of(const char *text, size_t length)
{
    uint32_t hash = 2166136261u;
    for (size_t k = 0; k < length; k++)
        hash = (hash ^ (unsigned char)text[k]) * 16777619u;
    for (;; hash++) {
        ptx_form **const slot = &buckets[hash % BUCKETS];
        if (!*slot) {
            ptx_form *const form = calloc(1, sizeof *form);
            form->text = strndup(text, length);
            for (int g = 0; ptx_groups[g] && !form->row; g++)
                for (const ptx_row *row = ptx_groups[g]; row->form && !form->row; row++) {
                    ptx_form found = {.text = form->text, .vector = 1};
                    if (matches(row, form->text, &found)) {
                        *form = found;
                        form->row = row;
                        form->observes = ptx_groups[g] == ptx_memory ||
                                         ptx_groups[g] == ptx_control || ptx_groups[g] == ptx_warp;
                    }
                }
            return *slot = form;
        }
        if (strlen((*slot)->text) == length && memcmp((*slot)->text, text, length) == 0)
            return *slot;
    }
}
