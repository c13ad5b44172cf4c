/* control.c: branches, calls and ends (9.7.12). Predicates of any instruction are in run.c. */
#include "tests/ptx/values.h"

static void bra(ptx_thread *t, const ptx_instruction *i)
{
    t->next = i->target;
}

static void call(ptx_thread *t, const ptx_instruction *i)
{
    if (!i->call->function->is_defined)
        ptx_problem(i, "%s is not in the module", i->call->function->name);
    ptx_call_function(t, i->call);
}

static void ret(ptx_thread *t, const ptx_instruction *i)
{
    (void)i;
    t->next = t->function->count;
}

static void trap(ptx_thread *t, const ptx_instruction *i)
{
    (void)t;
    ptx_problem(i, "trap");
}

const ptx_row ptx_control[] = {
    {"bra uni?", "l", bra, "goes on there; .uni: all threads of a warp do", "9.7.12.3"},
    {"call uni?", "f", call, "the function, with copies of its parameters", "9.7.12.5"},
    {"ret uni?", "", ret, "ends the function", "9.7.12.6"},
    {"trap", "", trap, "ends the launch with an error", "9.7.20"},
    {0},
};
