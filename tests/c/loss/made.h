// What the runs of this family are made of: logits, targets, and runs of one function alone.
#pragma once

#include "tests/c/harness/refused.h"
#include "tests/c/harness/tensors.h"

// What outputs hold before a call.
double garbage(size_t tensor, size_t i);

// Noise, or rarely, where `special`, a NaN, an infinity or a huge or tiny number.
double made_logit(uint64_t seed, size_t i, double size, bool special);

// A class, or -100 for every row of number `ignored`; 0: for none.
int64_t made_target(int64_t row, int64_t classes, int64_t ignored);
std::vector<uint8_t> bytes_of_targets(int64_t rows, int64_t classes, int64_t ignored, bool int32);

// Puts another target into a row.
void put_target(Backend &backend, const Buffer &targets, int64_t row, int64_t value, bool int32);

// The elements of a matrix with `gap` of them between rows; none unless it is wanted.
template <class Case> std::vector<int64_t> matrix(const Case &c, bool wanted = true)
{
    return {wanted ? c.rows * (c.classes + c.gap) : 0};
}

// A run whose call is one function alone.
template <class Run, hr_status (Run::*function)() const> class RunOf : public Run
{
  public:
    using Run::Run;
    hr_status call() const
    {
        return (this->*function)();
    }
};

// A vector that has to be given, and one at an odd address.
template <class Run, class Base>
BadInput<Run> null_of(const std::string &name, Tensors Base::*tensor)
{
    return {": " + name + " is NULL", [=](Run &r) { (r.*tensor).data[0] = nullptr; }};
}

template <class Run, class Base> BadInput<Run> odd(const std::string &name, Tensors Base::*tensor)
{
    return {": " + name + " is at .* not a multiple of 4",
            [=](Run &r) { (r.*tensor).data[0] = moved((r.*tensor).data[0], 2); }};
}

// What functions of logits refuse of their types and sizes.
template <class Run> BadInputs<Run> bad_sizes_or_dtypes()
{
    return {{"rows is -1, wanted 0 or more", [](Run &r) { r.rows = -1; }},
            {"cols is 0, wanted 1 or more", [](Run &r) { r.classes = 0; }},
            {"config->dtype is f64", [](Run &r) { r.config.dtype = HR_F64; }},
            {"config->grad_dtype is u8", [](Run &r) { r.config.grad_dtype = HR_U8; }},
            {"config->grad_dtype is f32, wanted bf16", [](Run &r) { r.config.dtype = HR_BF16; }}};
}

// What their backward functions refuse of the gradients, which may lie over the logits `of`.
template <class Run, class Base>
BadInputs<Run> bad_gradients(const std::string &of_name, hr_rows Base::*of)
{
    return {null_of<Run>("dloss", &Base::dloss),
            odd<Run>("dloss", &Base::dloss),
            {"dloss_stride is -1", [](Run &r) { r.dloss_stride = -1; }},
            {"dloss_stride is .*, wanted .* at most 2\\^59",
             [](Run &r) { r.dloss_stride = INT64_MAX / 2; }},
            {"grad is NULL", [](Run &r) { r.grad_argument = nullptr; }},
            {"grad->stride is 6, wanted", [](Run &r) { r.grad_rows.stride = 6; }},
            {"grad is written over " + of_name + ", but grad->stride is 8, wanted 7", [=](Run &r) {
                 r.grad_rows = {(r.*of).data, 8};
             }}};
}
