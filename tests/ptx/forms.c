/* forms.c: from the text of an instruction to its row and the meaning of its qualifiers. */
#include <stdlib.h>
#include <string.h>

#include "tests/ptx/ptx.h"

const ptx_row *const ptx_groups[] = {
    ptx_integer, ptx_float32, ptx_float64, ptx_approximate, ptx_compare, ptx_logic,
    ptx_convert, ptx_move,    ptx_memory,  ptx_control,     ptx_warp,    NULL,
};

typedef enum field { TYPE, SPACE, ROUNDING, MODE, FTZ, SAT, NOT_A_NUMBER, CLAMP, VECTOR } field;

static const struct {
    const char *text;
    field field;
    int value;
} qualifiers[] = {
    {"pred", TYPE, PTX_PRED},
    {"b8", TYPE, PTX_B8},
    {"b16", TYPE, PTX_B16},
    {"b32", TYPE, PTX_B32},
    {"b64", TYPE, PTX_B64},
    {"u8", TYPE, PTX_U8},
    {"u16", TYPE, PTX_U16},
    {"u32", TYPE, PTX_U32},
    {"u64", TYPE, PTX_U64},
    {"s8", TYPE, PTX_S8},
    {"s16", TYPE, PTX_S16},
    {"s32", TYPE, PTX_S32},
    {"s64", TYPE, PTX_S64},
    {"f16", TYPE, PTX_F16},
    {"bf16", TYPE, PTX_BF16},
    {"f16x2", TYPE, PTX_F16X2},
    {"bf16x2", TYPE, PTX_BF16X2},
    {"f32", TYPE, PTX_F32},
    {"f64", TYPE, PTX_F64},
    {"global", SPACE, PTX_GLOBAL},
    {"shared", SPACE, PTX_SHARED},
    {"param", SPACE, PTX_PARAM},
    {"local", SPACE, PTX_LOCAL},
    {"const", SPACE, PTX_CONST},
    {"rn", ROUNDING, PTX_RN},
    {"rz", ROUNDING, PTX_RZ},
    {"rm", ROUNDING, PTX_RM},
    {"rp", ROUNDING, PTX_RP},
    {"rni", ROUNDING, PTX_RNI},
    {"rzi", ROUNDING, PTX_RZI},
    {"rmi", ROUNDING, PTX_RMI},
    {"rpi", ROUNDING, PTX_RPI},
    {"eq", MODE, PTX_EQ},
    {"ne", MODE, PTX_NE},
    {"lt", MODE, PTX_LT},
    {"le", MODE, PTX_LE},
    {"gt", MODE, PTX_GT},
    {"ge", MODE, PTX_GE},
    {"equ", MODE, PTX_EQU},
    {"neu", MODE, PTX_NEU},
    {"ltu", MODE, PTX_LTU},
    {"leu", MODE, PTX_LEU},
    {"gtu", MODE, PTX_GTU},
    {"geu", MODE, PTX_GEU},
    {"num", MODE, PTX_NUM},
    {"nan", MODE, PTX_NAN},
    {"lo", MODE, PTX_LO},
    {"hi", MODE, PTX_HI},
    {"wide", MODE, PTX_WIDE},
    {"bfly", MODE, PTX_BFLY},
    {"down", MODE, PTX_DOWN},
    {"up", MODE, PTX_UP},
    {"idx", MODE, PTX_IDX},
    {"add", MODE, PTX_ADD},
    {"min", MODE, PTX_MIN},
    {"max", MODE, PTX_MAX},
    {"and", MODE, PTX_AND},
    {"or", MODE, PTX_OR},
    {"xor", MODE, PTX_XOR},
    {"exch", MODE, PTX_EXCH},
    {"cas", MODE, PTX_CAS},
    {"l", MODE, PTX_L},
    {"r", MODE, PTX_R},
    {"to", MODE, PTX_TO},
    {"ballot", MODE, PTX_BALLOT},
    {"any", MODE, PTX_ANY},
    {"all", MODE, PTX_ALL},
    {"ftz", FTZ, 1},
    {"sat", SAT, 1},
    {"NaN", NOT_A_NUMBER, 1},
    {"clamp", CLAMP, 1},
    {"v2", VECTOR, 2},
    {"v4", VECTOR, 4},
};

static void note(ptx_form *form, const char *text, size_t length)
{
    for (size_t k = 0; k < sizeof qualifiers / sizeof *qualifiers; k++) {
        if (strlen(qualifiers[k].text) != length || memcmp(qualifiers[k].text, text, length) != 0)
            continue;
        const int value = qualifiers[k].value;
        switch (qualifiers[k].field) {
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
        case FTZ:
            form->ftz = true;
            break;
        case SAT:
            form->sat = true;
            break;
        case NOT_A_NUMBER:
            form->nan = true;
            break;
        case CLAMP:
            form->clamp = true;
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
static ptx_form **forms;
static int count;

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
            forms = realloc(forms, (size_t)(count + 1) * sizeof *forms);
            forms[count++] = form;
            return *slot = form;
        }
        if (strlen((*slot)->text) == length && memcmp((*slot)->text, text, length) == 0)
            return *slot;
    }
}

ptx_form *const *ptx_forms(int *how_many)
{
    *how_many = count;
    return forms;
}
