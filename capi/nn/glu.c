/* glu.c: hr_glu_forward and _backward: checks, then the kernel of the device. */
#include "kernels/nn/glu.h"

#include "capi/check/rows.h"

static hr_status check_config(const char *function, hr_glu_config *own, const hr_glu_config *config)
{
    HR_REQUIRE(config, "%s: config is NULL", function);
    HR_TRY(hr_copy_config(function, "config->", own, sizeof *own, config,
                          offsetof(hr_glu_config, dtype) + sizeof own->dtype,
                          "HR_GLU_CONFIG_INIT"));
    HR_REQUIRE(own->activation >= HR_SILU && own->activation <= HR_RELU_SQUARED,
               "%s: config->activation is %d, wanted 0 to %d", function, (int)own->activation,
               (int)HR_RELU_SQUARED);
    return hr_check_float(function, "config->dtype", own->dtype);
}

/* Every matrix that must be there, and those that may be. */
static hr_status check_matrix(const char *function, const char *name, const hr_rows *matrix,
                              int is_needed, const glu_args *args)
{
    HR_REQUIRE(matrix || !is_needed, "%s: %s is NULL", function, name);
    return hr_check_rows(function, name, matrix, args->rows, args->cols, args->dtype);
}

/* If no matrix has gaps between rows, all of them are one long row. */
static void join_rows(glu_args *args)
{
    const hr_rows *const all[] = {&args->gate, &args->up,    &args->dh,
                                  &args->h,    &args->dgate, &args->dup};
    for (size_t k = 0; k < sizeof all / sizeof *all; k++)
        if (all[k]->data && all[k]->stride != args->cols)
            return;
    args->cols *= args->rows;
    args->rows = 1;
}

static hr_status run(glu_args *args, const hr_exec *exec)
{
    if (args->rows == 0)
        return HR_OK;
    join_rows(args);
    if (exec->device == HR_CPU)
        return glu_cpu(args);
    HR_RETURN_CUDA(glu_cuda(args, exec), exec);
}

hr_status hr_glu_forward(const hr_rows *h, const hr_rows *gate, const hr_rows *up, int64_t rows,
                         int64_t cols, const hr_glu_config *config, const hr_exec *exec)
{
    static const char function[] = "hr_glu_forward";
    hr_glu_config own = HR_GLU_CONFIG_INIT;
    HR_TRY(hr_check_sizes(function, rows, cols));
    HR_TRY(check_config(function, &own, config));
    HR_TRY(hr_check_exec(function, exec));
    glu_args args = {.rows = rows, .cols = cols, .activation = own.activation, .dtype = own.dtype};
    HR_TRY(check_matrix(function, "h", h, 1, &args));
    HR_TRY(check_matrix(function, "gate", gate, 1, &args));
    HR_TRY(check_matrix(function, "up", up, 0, &args));
    args.h = *h;
    args.gate = *gate;
    args.up = hr_rows_or_none(up);
    return run(&args, exec);
}

hr_status hr_glu_backward(const hr_rows *dgate, const hr_rows *dup, const hr_rows *h,
                          const hr_rows *dh, const hr_rows *gate, const hr_rows *up, int64_t rows,
                          int64_t cols, const hr_glu_config *config, const hr_exec *exec)
{
    static const char function[] = "hr_glu_backward";
    hr_glu_config own = HR_GLU_CONFIG_INIT;
    HR_TRY(hr_check_sizes(function, rows, cols));
    HR_TRY(check_config(function, &own, config));
    HR_TRY(hr_check_exec(function, exec));
    glu_args args = {.rows = rows, .cols = cols, .activation = own.activation, .dtype = own.dtype};
    HR_REQUIRE(!dup == !up, "%s: %s is NULL, but %s is not; give both or neither", function,
               dup ? "up" : "dup", dup ? "dup" : "up");
    HR_TRY(check_matrix(function, "dgate", dgate, 1, &args));
    HR_TRY(check_matrix(function, "dup", dup, 0, &args));
    HR_TRY(check_matrix(function, "h", h, 0, &args));
    HR_TRY(check_matrix(function, "dh", dh, 1, &args));
    HR_TRY(check_matrix(function, "gate", gate, 1, &args));
    HR_TRY(check_matrix(function, "up", up, 0, &args));
    args.dgate = *dgate;
    args.dup = hr_rows_or_none(dup);
    args.h = hr_rows_or_none(h);
    args.dh = *dh;
    args.gate = *gate;
    args.up = hr_rows_or_none(up);
    return run(&args, exec);
}
