/*
 * ptx.h: PTX on the CPU. A module is parsed into functions, each an array of decoded instructions; an
 * instruction calls the executor of its row in the table of forms; a thread is a frame per function.
 *
 * Addresses are those of the host, but for shared memory: there an address of the window is an offset,
 * and a generic one is that of the host. The semantics are those of NVIDIA's "PTX ISA", release 9.0,
 * whose sections the rows name.
 */
#ifndef PTX_H
#define PTX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum ptx_type {
    PTX_NO_TYPE,
    PTX_PRED,
    PTX_B8,
    PTX_B16,
    PTX_B32,
    PTX_B64,
    PTX_U8,
    PTX_U16,
    PTX_U32,
    PTX_U64,
    PTX_S8,
    PTX_S16,
    PTX_S32,
    PTX_S64,
    PTX_F16,
    PTX_BF16,
    PTX_F16X2,
    PTX_BF16X2,
    PTX_F32,
    PTX_F64
} ptx_type;

typedef enum ptx_space {
    PTX_GENERIC,
    PTX_GLOBAL,
    PTX_SHARED,
    PTX_PARAM,
    PTX_LOCAL,
    PTX_CONST
} ptx_space;

typedef enum ptx_rounding {
    PTX_UNROUNDED,
    PTX_RN, /* to nearest, ties to even */
    PTX_RZ,
    PTX_RM,
    PTX_RP,
    PTX_RNI, /* the same, to an integer */
    PTX_RZI,
    PTX_RMI,
    PTX_RPI,
} ptx_rounding;

/* What stands in an instruction between its name and its types. EQU to GEU are true of a NaN too. */
typedef enum ptx_mode {
    PTX_PLAIN,
    PTX_EQ,
    PTX_NE,
    PTX_LT,
    PTX_LE,
    PTX_GT,
    PTX_GE,
    PTX_EQU,
    PTX_NEU,
    PTX_LTU,
    PTX_LEU,
    PTX_GTU,
    PTX_GEU,
    PTX_NUM,
    PTX_NAN,
    PTX_LO,
    PTX_HI,
    PTX_WIDE,
    PTX_BFLY,
    PTX_DOWN,
    PTX_UP,
    PTX_IDX,
    PTX_ADD,
    PTX_MIN,
    PTX_MAX,
    PTX_AND,
    PTX_OR,
    PTX_XOR,
    PTX_EXCH,
    PTX_CAS,
    PTX_L,
    PTX_R,
    PTX_TO,
    PTX_BALLOT,
    PTX_ANY,
    PTX_ALL
} ptx_mode;

typedef struct ptx_thread ptx_thread;
typedef struct ptx_instruction ptx_instruction;
typedef struct ptx_function ptx_function;
typedef struct ptx_module ptx_module;
typedef void ptx_execute(ptx_thread *t, const ptx_instruction *i);

/* A row of the table. `form` is the name and its qualifiers, each a list of choices; one that ends in
 * "?" may be left out. `operands`: d is written, a is read, m is an address, l a label; "?" as above. */
typedef struct ptx_row {
    const char *form;
    const char *operands;
    ptx_execute *run;
    const char *meaning;
    const char *section;
} ptx_row;

/* The groups, each in its own file, and each ended by a row without a form. */
extern const ptx_row ptx_integer[], ptx_float32[], ptx_float64[], ptx_approximate[], ptx_compare[],
    ptx_logic[], ptx_convert[], ptx_move[], ptx_memory[], ptx_control[], ptx_warp[];
extern const ptx_row *const ptx_groups[];
ptx_execute ptx_select; /* of selp */

/* A row, and what its qualifiers are in one instruction. */
typedef struct ptx_form {
    char *text;
    const ptx_row *row; /* NULL: not in the table */
    ptx_type type, type2;
    ptx_space space;
    ptx_rounding rounding;
    ptx_mode mode;
    bool ftz, sat, nan, clamp;
    bool observes; /* of the groups whose effect is outside of registers */
    int vector;    /* 1, 2, 4 */
} ptx_form;

#define PTX_DESTINATIONS 4
#define PTX_SOURCES      5

struct ptx_instruction {
    ptx_execute *run;
    ptx_form *form;
    ptx_type type, type2; /* of the form, closer by */
    ptx_mode mode;
    int32_t guard; /* the register of a predicate, or -1 */
    bool guard_not;
    uint8_t destinations, sources;
    int32_t d[PTX_DESTINATIONS], s[PTX_SOURCES]; /* registers; constants stand behind these */
    int64_t offset;                              /* of an address */
    int32_t target;                              /* of a branch */
    uint32_t line;
    const struct ptx_call *call;
    uint64_t executed;
};

/* A place in memory with a name. */
typedef struct ptx_place {
    ptx_space space;
    int64_t offset;
    int64_t bytes;
} ptx_place;

#define PTX_MOST_PARAMETERS 16

typedef struct ptx_call {
    ptx_function *function;
    int parameters;
    bool returns;
    ptx_place result, parameter[PTX_MOST_PARAMETERS]; /* in the caller's frame */
} ptx_call;

/* What a constant of a function is. */
typedef enum ptx_origin {
    PTX_FIXED,
    PTX_OF_FRAME,   /* the address of a byte of the frame */
    PTX_OF_ENTRY,   /* the address of a byte of the launch's parameters */
    PTX_OF_DYNAMIC, /* the offset of dynamic shared memory */
    PTX_SPECIAL,    /* a special register */
} ptx_origin;

typedef struct ptx_constant {
    ptx_origin origin;
    uint64_t value;
} ptx_constant;

struct ptx_function {
    ptx_module *module;
    char *name;
    bool is_entry, is_defined;
    ptx_instruction *code;
    int32_t count;
    int32_t registers;
    ptx_constant *constants;
    int32_t constant_count;
    int64_t frame_bytes; /* parameters of calls, and those of the function unless it is an entry */
    int parameters;
    bool returns;
    ptx_place result, parameter[PTX_MOST_PARAMETERS];
    int64_t parameter_bytes; /* of an entry */
    int64_t shared_bytes;    /* static */
    uint32_t most_threads;   /* .maxntid, or 0 */
    uint64_t launches;
    char *ran_in; /* the first test that launched it */
};

/* A variable of a module, .global or .const. */
typedef struct ptx_variable {
    char *data;
    int64_t bytes;
} ptx_variable;

struct ptx_module {
    char *text; /* ours */
    const char *name;
    int arch;
    ptx_function **functions;
    int function_count;
    ptx_variable *variables;
    int variable_count;
    int64_t shared_bytes; /* of the module, before those of an entry */
};

/* The text is copied. Returns NULL with the reason in `why`. */
ptx_module *ptx_parse(const char *text, size_t bytes, const char *name, char *why,
                      size_t why_bytes);
void ptx_free(ptx_module *module);
ptx_function *ptx_find(const ptx_module *module, const char *name);

/* Of "f32" and the like; PTX_NO_TYPE if it is none. */
ptx_type ptx_type_of(const char *word, size_t length);

/* The form of an instruction such as "add.rn.f32", the same object for the same text. */
ptx_form *ptx_form_of(const char *text, size_t length);

typedef enum ptx_special_register {
    PTX_TID_X,
    PTX_TID_Y,
    PTX_TID_Z,
    PTX_NTID_X,
    PTX_NTID_Y,
    PTX_NTID_Z,
    PTX_CTAID_X,
    PTX_CTAID_Y,
    PTX_CTAID_Z,
    PTX_NCTAID_X,
    PTX_NCTAID_Y,
    PTX_NCTAID_Z,
    PTX_LANEID,
    PTX_SPECIAL_REGISTERS
} ptx_special_register;

/* What the threads of a launch share. */
typedef struct ptx_launch {
    const ptx_function *entry;
    char *parameters;
    char *shared;
    int64_t shared_bytes;
    uint64_t seed; /* of the errors of approximations */
} ptx_launch;

struct ptx_thread {
    const ptx_launch *launch;
    const ptx_thread *caller; /* the same thread, in the function that called this one */
    uint32_t special[PTX_SPECIAL_REGISTERS];

    /* Of the function that runs. */
    const ptx_function *function;
    int32_t next;
    uint64_t *r;
    uint8_t *is_set;
    char *memory;
    uint8_t *memory_is_set;
};

/* Runs one thread to its end. */
void ptx_run(ptx_thread *t);
void ptx_call_function(ptx_thread *t, const ptx_call *call);

/* ---- What the machine around it gives: machine.cpp --------------------------------------------- */

/* Reports a problem of the running thread, and ends the launch. */
#ifdef __cplusplus
#define _Noreturn [[noreturn]]
#endif
_Noreturn void ptx_problem(const ptx_instruction *i, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
void ptx_note_access(const ptx_instruction *i, const void *address, size_t bytes, bool write);
void ptx_note_atomic(const ptx_instruction *i, const void *address, size_t bytes);
void ptx_wait_for_block(const ptx_instruction *i);
uint64_t ptx_exchange(const ptx_instruction *i, uint32_t mask, uint64_t value, uint32_t lane);
uint32_t ptx_vote(const ptx_instruction *i, uint32_t mask, bool predicate);

#ifdef __cplusplus
}
#endif
#endif
