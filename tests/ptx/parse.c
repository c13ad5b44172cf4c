/* parse.c: the text of a module to its functions and variables. What nvcc writes, and no more: what is
 * not understood is an error with its line. */
#include <ctype.h>
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/ptx/values.h"

/* ---- Words ------------------------------------------------------------------------------------- */

typedef struct word {
    const char *text;
    size_t length;
} word;

typedef enum symbol_kind { A_REGISTER, A_RANGE, A_LABEL, A_PLACE, A_VARIABLE } symbol_kind;

typedef struct symbol {
    word name;
    symbol_kind kind;
    int32_t first, count; /* of registers; the instruction of a label */
    ptx_origin origin;
    ptx_place place;
} symbol;

/* A branch whose label may come later. */
typedef struct jump {
    int32_t instruction;
    word label;
} jump;

typedef struct parser {
    const char *at;
    uint32_t line;
    word now; /* the word that is looked at; empty at the end */
    ptx_module *module;
    symbol *symbols;
    int symbol_count;
    jump *jumps;
    int jump_count;
    ptx_function *function;
    jmp_buf failed;
    char *why;
    size_t why_bytes;
} parser;

static _Noreturn void fail(parser *p, const char *format, ...)
{
    const int length = snprintf(p->why, p->why_bytes, "%s:%u: ", p->module->name, p->line);
    va_list rest;
    va_start(rest, format);
    if (length > 0 && (size_t)length < p->why_bytes)
        vsnprintf(p->why + length, p->why_bytes - (size_t)length, format, rest);
    va_end(rest);
    longjmp(p->failed, 1);
}

static bool in_word(char c)
{
    return isalnum((unsigned char)c) || c == '_' || c == '$' || c == '%' || c == '.';
}

static void advance(parser *p)
{
    const char *c = p->at;
    for (;; c++) {
        if (c[0] == '/' && c[1] == '/')
            c += strcspn(c, "\n");
        if (*c == '\n')
            p->line++;
        else if (!isspace((unsigned char)*c))
            break;
    }
    p->now.text = c;
    if (*c == '"')
        c += 2 + strcspn(c + 1, "\"");
    else if (in_word(*c))
        while (in_word(*c))
            c++;
    else if (*c)
        c++;
    p->now.length = (size_t)(c - p->now.text);
    p->at = c;
}

static bool equal(word w, const char *text)
{
    return strlen(text) == w.length && memcmp(w.text, text, w.length) == 0;
}

static bool is(const parser *p, const char *text)
{
    return equal(p->now, text);
}

static bool take(parser *p, const char *text)
{
    if (!is(p, text))
        return false;
    advance(p);
    return true;
}

static void want(parser *p, const char *text)
{
    if (!take(p, text))
        fail(p, "found '%.*s', wanted '%s'", (int)p->now.length, p->now.text, text);
}

static word take_word(parser *p)
{
    const word w = p->now;
    if (w.length == 0 || !in_word(*w.text))
        fail(p, "found '%.*s', wanted a word", (int)w.length, w.text);
    advance(p);
    return w;
}

/* An integer, or the bits of a number of binary32 (0f) or binary64 (0d). */
static bool number(word w, uint64_t *value)
{
    if (w.length == 0 || !isdigit((unsigned char)*w.text))
        return false;
    const bool is_float = w.length > 2 && *w.text == '0' && strchr("fFdD", w.text[1]);
    char text[32];
    const size_t skipped = is_float ? 2 : 0;
    if (w.length - skipped >= sizeof text)
        return false;
    memcpy(text, w.text + skipped, w.length - skipped);
    text[w.length - skipped] = 0;
    char *end;
    *value = strtoull(text, &end, is_float ? 16 : 0);
    return *end == 0 || strcmp(end, "U") == 0;
}

static int64_t take_number(parser *p)
{
    const bool negative = take(p, "-");
    uint64_t value;
    if (!number(p->now, &value))
        fail(p, "found '%.*s', wanted a number", (int)p->now.length, p->now.text);
    advance(p);
    return negative ? -(int64_t)value : (int64_t)value;
}

/* ---- Symbols ----------------------------------------------------------------------------------- */

static symbol *define(parser *p, word name, symbol_kind kind)
{
    if ((p->symbol_count & (p->symbol_count - 1)) == 0)
        p->symbols = realloc(p->symbols, (size_t)(2 * p->symbol_count + 1) * sizeof *p->symbols);
    symbol *const s = &p->symbols[p->symbol_count++];
    *s = (symbol){.name = name, .kind = kind};
    return s;
}

static const symbol *look_up(const parser *p, word name)
{
    size_t prefix = name.length;
    while (prefix > 0 && isdigit((unsigned char)name.text[prefix - 1]))
        prefix--;
    const long index = prefix < name.length ? strtol(name.text + prefix, NULL, 10) : -1;
    for (int k = p->symbol_count - 1; k >= 0; k--) {
        const symbol *const s = &p->symbols[k];
        const size_t length = s->kind == A_RANGE ? prefix : name.length;
        if (s->name.length == length && memcmp(s->name.text, name.text, length) == 0 &&
            (s->kind != A_RANGE || (index >= 0 && index < s->count)))
            return s;
    }
    return NULL;
}

/* Constants are numbered down from -1 until the registers are counted. */
static int32_t constant(parser *p, ptx_origin origin, uint64_t value)
{
    ptx_function *const f = p->function;
    for (int32_t k = f->constant_count - 1; k >= 0 && k >= f->constant_count - 64; k--)
        if (f->constants[k].origin == origin && f->constants[k].value == value)
            return -1 - k;
    if ((f->constant_count & (f->constant_count - 1)) == 0)
        f->constants =
            realloc(f->constants, (size_t)(2 * f->constant_count + 1) * sizeof *f->constants);
    f->constants[f->constant_count++] = (ptx_constant){origin, value};
    return -f->constant_count;
}

/* ---- Declarations ------------------------------------------------------------------------------ */

static ptx_type type_of(parser *p, word w)
{
    const ptx_type type = *w.text == '.' ? ptx_type_of(w.text + 1, w.length - 1) : PTX_NO_TYPE;
    if (type != PTX_NO_TYPE)
        return type;
    fail(p, "'%.*s' is no type", (int)w.length, w.text);
}

static int64_t aligned(int64_t offset, int64_t to)
{
    return (offset + to - 1) / to * to;
}

typedef struct declared {
    word name;
    ptx_type type;
    int64_t align, bytes, elements;
} declared;

/* After the space: alignment, type, name, dimensions. */
static declared declaration(parser *p)
{
    declared d = {.elements = 1};
    if (take(p, ".align"))
        d.align = take_number(p);
    d.type = type_of(p, take_word(p));
    if (take(p, ".ptr")) { /* of what it points to */
        (void)(take(p, ".global") || take(p, ".shared"));
        if (take(p, ".align"))
            (void)take_number(p);
    }
    d.name = take_word(p);
    while (take(p, "[")) {
        d.elements *= is(p, "]") ? 0 : take_number(p);
        want(p, "]");
    }
    d.bytes = d.elements * ptx_bytes(d.type);
    if (d.align == 0)
        d.align = ptx_bytes(d.type);
    return d;
}

static void registers(parser *p)
{
    (void)type_of(p, take_word(p));
    do {
        const word name = take_word(p);
        symbol *const s = define(p, name, A_REGISTER);
        s->first = p->function->registers;
        s->count = 1;
        if (take(p, "<")) {
            s->kind = A_RANGE;
            s->count = (int32_t)take_number(p);
            want(p, ">");
        }
        p->function->registers += s->count;
    } while (take(p, ","));
    want(p, ";");
}

/* A place in the frame: a parameter of a call, or local memory. */
static ptx_place in_frame(parser *p, const declared *d, ptx_space space)
{
    ptx_function *const f = p->function;
    const ptx_place place = {space, aligned(f->frame_bytes, d->align), d->bytes};
    f->frame_bytes = place.offset + place.bytes;
    symbol *const s = define(p, d->name, A_PLACE);
    s->origin = PTX_OF_FRAME;
    s->place = place;
    return place;
}

/* Shared memory of the module lies before that of an entry; what has no size is the launch's. */
static void shared(parser *p)
{
    const declared d = declaration(p);
    want(p, ";");
    symbol *const s = define(p, d.name, A_PLACE);
    s->place.space = PTX_SHARED;
    if (d.bytes == 0) {
        s->origin = PTX_OF_DYNAMIC;
        return;
    }
    int64_t *const used = p->function && p->function->is_entry ? &p->function->shared_bytes
                                                               : &p->module->shared_bytes;
    s->origin = PTX_FIXED;
    s->place.offset = aligned(*used, d.align);
    s->place.bytes = d.bytes;
    *used = s->place.offset + d.bytes;
}

static void variable(parser *p)
{
    const declared d = declaration(p);
    ptx_module *const m = p->module;
    m->variables = realloc(m->variables, (size_t)(m->variable_count + 1) * sizeof *m->variables);
    ptx_variable *const v = &m->variables[m->variable_count++];
    v->bytes = d.bytes;
    v->data = aligned_alloc(256, (size_t)aligned(d.bytes + 1, 256));
    memset(v->data, 0, (size_t)d.bytes);
    symbol *const s = define(p, d.name, A_VARIABLE);
    s->place.offset = (int64_t)(intptr_t)v->data;
    if (take(p, "=")) {
        const bool braces = take(p, "{");
        for (int64_t k = 0; k < d.elements; k++) {
            const int64_t value = take_number(p);
            memcpy(v->data + k * ptx_bytes(d.type), &value, (size_t)ptx_bytes(d.type));
            if (!take(p, ","))
                break;
        }
        if (braces)
            want(p, "}");
    }
    want(p, ";");
}

/* ---- Instructions ------------------------------------------------------------------------------ */

static int32_t special(word w)
{
    static const char *const names[PTX_SPECIAL_REGISTERS] = {
        "%tid.x",   "%tid.y",   "%tid.z",    "%ntid.x",   "%ntid.y",   "%ntid.z", "%ctaid.x",
        "%ctaid.y", "%ctaid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z", "%laneid"};
    for (int k = 0; k < PTX_SPECIAL_REGISTERS; k++)
        if (equal(w, names[k]))
            return k;
    return -1;
}

/* A register, a number, or the address of something. */
static int32_t value(parser *p)
{
    uint64_t bits;
    if (is(p, "-") || number(p->now, &bits))
        return constant(p, PTX_FIXED, (uint64_t)take_number(p));
    const word name = take_word(p);
    if (special(name) >= 0)
        return constant(p, PTX_SPECIAL, (uint64_t)special(name));
    const symbol *const s = look_up(p, name);
    if (!s)
        fail(p, "'%.*s' is not declared", (int)name.length, name.text);
    switch (s->kind) {
    case A_REGISTER:
        return s->first;
    case A_RANGE:
        return s->first + (int32_t)strtol(name.text + s->name.length, NULL, 10);
    case A_PLACE:
        return constant(p, s->origin, (uint64_t)s->place.offset);
    case A_VARIABLE:
        return constant(p, PTX_FIXED, (uint64_t)s->place.offset);
    default:
        fail(p, "'%.*s' has no value", (int)name.length, name.text);
    }
}

static int32_t sink(parser *p)
{
    advance(p);
    return p->function->registers++;
}

/* One operand into the instruction: several registers in braces, or two with a bar between. */
static void operand(parser *p, ptx_instruction *i, bool destination)
{
    const bool braces = take(p, "{");
    do {
        const int32_t at = is(p, "_") ? sink(p) : value(p);
        if (destination ? i->destinations == PTX_DESTINATIONS : i->sources == PTX_SOURCES)
            fail(p, "too many operands");
        if (destination)
            i->d[i->destinations++] = at;
        else
            i->s[i->sources++] = at;
        if (destination && at < 0)
            fail(p, "a constant is no destination");
    } while (braces ? take(p, ",") : destination && take(p, "|"));
    if (braces)
        want(p, "}");
}

static void address(parser *p, ptx_instruction *i)
{
    want(p, "[");
    i->s[i->sources++] = value(p);
    if (take(p, "+") || is(p, "-"))
        i->offset = take_number(p);
    want(p, "]");
}

static ptx_function *function_of(parser *p, word name);

static ptx_place named_place(parser *p)
{
    const word name = take_word(p);
    const symbol *const s = look_up(p, name);
    if (!s || s->kind != A_PLACE || s->origin != PTX_OF_FRAME)
        fail(p, "'%.*s' is no parameter", (int)name.length, name.text);
    return s->place;
}

static const ptx_call *call(parser *p)
{
    ptx_call *const c = calloc(1, sizeof *c);
    if (take(p, "(")) {
        c->returns = true;
        c->result = named_place(p);
        want(p, ")");
        want(p, ",");
    }
    c->function = function_of(p, take_word(p));
    if (take(p, ",")) {
        want(p, "(");
        while (!take(p, ")")) {
            if (c->parameters == PTX_MOST_PARAMETERS)
                fail(p, "too many parameters");
            c->parameter[c->parameters++] = named_place(p);
            (void)take(p, ",");
        }
    }
    return c;
}

static void instruction(parser *p)
{
    ptx_function *const f = p->function;
    if ((f->count & (f->count - 1)) == 0)
        f->code = realloc(f->code, (size_t)(2 * f->count + 1) * sizeof *f->code);
    ptx_instruction *const i = &f->code[f->count++];
    *i = (ptx_instruction){.guard = -1, .line = p->line};
    if (take(p, "@")) {
        i->guard_not = take(p, "!");
        i->guard = value(p);
    }
    const word name = take_word(p);
    i->form = ptx_form_of(name.text, name.length);
    if (!i->form->row)
        fail(p, "'%s' is not in the table of instructions", i->form->text);
    i->run = i->form->row->run;
    i->type = i->form->type;
    i->type2 = i->form->type2;
    i->mode = i->form->mode;
    for (const char *o = i->form->row->operands; *o; o++) {
        if (*o == '?')
            continue;
        if (o[1] == '?' && is(p, ";"))
            continue;
        if (o != i->form->row->operands)
            want(p, ",");
        if (*o == 'm')
            address(p, i);
        else if (*o == 'l') {
            p->jumps = realloc(p->jumps, (size_t)(p->jump_count + 1) * sizeof *p->jumps);
            p->jumps[p->jump_count++] = (jump){f->count - 1, take_word(p)};
        } else if (*o == 'f')
            i->call = call(p);
        else
            operand(p, i, *o == 'd');
    }
    want(p, ";");
}

/* What stands between braces; labels are of the whole function, other names end with the block. */
static void block(parser *p)
{
    const int outside = p->symbol_count;
    while (!take(p, "}")) {
        if (p->now.length == 0)
            fail(p, "the text ends within a function");
        if (take(p, "{")) {
            block(p);
        } else if (take(p, ".reg")) {
            registers(p);
        } else if (is(p, ".param") || is(p, ".local")) {
            const ptx_space space = is(p, ".param") ? PTX_PARAM : PTX_LOCAL;
            advance(p);
            const declared d = declaration(p);
            want(p, ";");
            (void)in_frame(p, &d, space);
        } else if (take(p, ".shared")) {
            shared(p);
        } else if (take(p, ".pragma")) {
            advance(p);
            want(p, ";");
        } else if (take(p, ".loc")) {
            for (const uint32_t line = p->line; p->line == line && p->now.length > 0;)
                advance(p);
        } else if (p->at[0] == ':') {
            const word name = take_word(p);
            want(p, ":");
            ptx_function *const f = p->function;
            p->jumps = realloc(p->jumps, (size_t)(p->jump_count + 1) * sizeof *p->jumps);
            p->jumps[p->jump_count++] = (jump){-1 - f->count, name};
        } else {
            instruction(p);
        }
    }
    p->symbol_count = outside;
}

/* ---- Functions --------------------------------------------------------------------------------- */

static ptx_function *function_of(parser *p, word name)
{
    ptx_module *const m = p->module;
    for (int k = 0; k < m->function_count; k++)
        if (equal(name, m->functions[k]->name))
            return m->functions[k];
    m->functions = realloc(m->functions, (size_t)(m->function_count + 1) * sizeof(void *));
    ptx_function *const f = calloc(1, sizeof *f);
    f->module = m;
    f->name = strndup(name.text, name.length);
    return m->functions[m->function_count++] = f;
}

static void parameters(parser *p)
{
    ptx_function *const f = p->function;
    f->parameters = 0;
    while (!take(p, ")")) {
        want(p, ".param");
        const declared d = declaration(p);
        if (f->parameters == PTX_MOST_PARAMETERS)
            fail(p, "too many parameters");
        ptx_place *const place = &f->parameter[f->parameters++];
        if (f->is_entry) {
            *place = (ptx_place){PTX_PARAM, aligned(f->parameter_bytes, d.align), d.bytes};
            f->parameter_bytes = place->offset + d.bytes;
            symbol *const s = define(p, d.name, A_PLACE);
            s->origin = PTX_OF_ENTRY;
            s->place = *place;
        } else {
            *place = in_frame(p, &d, PTX_PARAM);
        }
        (void)take(p, ",");
    }
}

static int by_name(const void *a, const void *b)
{
    const jump *const x = a, *const y = b;
    const size_t n = x->label.length < y->label.length ? x->label.length : y->label.length;
    const int order = memcmp(x->label.text, y->label.text, n);
    if (order != 0 || x->label.length != y->label.length)
        return order != 0 ? order : x->label.length < y->label.length ? -1 : 1;
    return x->instruction < y->instruction ? -1 : x->instruction > y->instruction;
}

/* A label sorts before the branches to it. */
static void resolve(parser *p)
{
    ptx_function *const f = p->function;
    if (p->jump_count > 0)
        qsort(p->jumps, (size_t)p->jump_count, sizeof *p->jumps, by_name);
    const jump *label = NULL;
    for (int k = 0; k < p->jump_count; k++) {
        const jump *const j = &p->jumps[k];
        if (j->instruction < 0)
            label = j;
        else if (!label || label->label.length != j->label.length ||
                 memcmp(label->label.text, j->label.text, j->label.length) != 0)
            fail(p, "no label '%.*s'", (int)j->label.length, j->label.text);
        else
            f->code[j->instruction].target = -1 - label->instruction;
    }
    p->jump_count = 0;
    for (int32_t n = 0; n < f->count; n++) {
        ptx_instruction *const i = &f->code[n];
        for (int k = 0; k < i->sources; k++)
            if (i->s[k] < 0)
                i->s[k] = f->registers - 1 - i->s[k];
    }
    f->frame_bytes = aligned(f->frame_bytes, 16);
}

static void function(parser *p, bool is_entry)
{
    const int outside = p->symbol_count;
    declared result = {0};
    const bool returns = !is_entry && take(p, "(");
    if (returns) {
        want(p, ".param");
        result = declaration(p);
        want(p, ")");
    }
    ptx_function *const f = p->function = function_of(p, take_word(p));
    f->is_entry = is_entry;
    f->returns = returns;
    f->shared_bytes = p->module->shared_bytes; /* an entry's own lies behind */
    f->frame_bytes = f->parameter_bytes = 0;
    if (returns)
        f->result = in_frame(p, &result, PTX_PARAM);
    if (take(p, "("))
        parameters(p);
    while (!is(p, "{") && !is(p, ";")) {
        const bool threads = is(p, ".maxntid");
        if (!threads && !is(p, ".minnctapersm") && !is(p, ".noreturn") && !is(p, ".maxnreg"))
            fail(p, "'%.*s' of a function is not known", (int)p->now.length, p->now.text);
        advance(p);
        uint32_t product = 1;
        uint64_t bits;
        while (number(p->now, &bits)) {
            product *= (uint32_t)take_number(p);
            (void)take(p, ",");
        }
        if (threads)
            f->most_threads = product;
    }
    if (take(p, ";")) {
        p->symbol_count = outside;
        p->function = NULL;
        return;
    }
    want(p, "{");
    block(p);
    resolve(p);
    f->is_defined = true;
    p->symbol_count = outside;
    p->function = NULL;
}

static void module(parser *p)
{
    while (p->now.length > 0) {
        if (take(p, ".version") || take(p, ".address_size")) {
            advance(p);
        } else if (take(p, ".target")) {
            const word target = take_word(p); /* sm_90 */
            p->module->arch = target.length > 3 ? atoi(target.text + 3) : 0;
        } else if (take(p, ".visible") || take(p, ".extern") || take(p, ".weak")) {
        } else if (take(p, ".global") || take(p, ".const")) {
            variable(p);
        } else if (take(p, ".shared")) {
            shared(p);
        } else if (is(p, ".entry") || is(p, ".func")) {
            const bool is_entry = is(p, ".entry");
            advance(p);
            function(p, is_entry);
        } else {
            fail(p, "'%.*s' is not known here", (int)p->now.length, p->now.text);
        }
    }
}

ptx_module *ptx_parse(const char *text, size_t bytes, const char *name, char *why, size_t why_bytes)
{
    ptx_module *const volatile m = calloc(1, sizeof *m);
    m->text = strndup(text, bytes);
    m->name = name;
    parser *const p = calloc(1, sizeof *p);
    p->at = m->text;
    p->line = 1;
    p->module = m;
    p->why = why;
    p->why_bytes = why_bytes;
    const volatile bool ok = setjmp(p->failed) == 0;
    if (ok) {
        advance(p);
        module(p);
    }
    free(p->symbols);
    free(p->jumps);
    free(p);
    if (ok)
        return m;
    ptx_free(m);
    return NULL;
}

ptx_function *ptx_find(const ptx_module *m, const char *name)
{
    for (int k = 0; k < m->function_count; k++)
        if (strcmp(m->functions[k]->name, name) == 0)
            return m->functions[k];
    return NULL;
}

void ptx_free(ptx_module *m)
{
    for (int k = 0; k < m->function_count; k++) {
        ptx_function *const f = m->functions[k];
        for (int32_t n = 0; n < f->count; n++)
            free((void *)f->code[n].call);
        free(f->code);
        free(f->constants);
        free(f->name);
        free(f->ran_in);
        free(f);
    }
    for (int k = 0; k < m->variable_count; k++)
        free(m->variables[k].data);
    free(m->functions);
    free(m->variables);
    free(m->text);
    free(m);
}
