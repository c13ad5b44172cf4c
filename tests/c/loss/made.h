// What the tests of this family share: logits, targets, runs of one function alone, and what losses of
// logits have in common.
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

// ---- Losses of logits ----------------------------------------------------------------------------

constexpr double kUnit = 0x1p-24; // half an ulp at 1, in binary32

// Rows and classes: of a warp and of a thread block, in whole groups of eight and not.
constexpr int64_t kShapes[][2] = {{1, 1},   {7, 2},    {9, 7},    {6, 64},
                                  {3, 520}, {5, 1031}, {3, 2056}, {2, 5001}};

// The error of a gradient that is so small that it becomes 0.
inline double tiny_of(hr_dtype dtype)
{
    return dtype == HR_F16 ? 0x1p-25 : 0x1p-125;
}

// The rows of a gradient, which lie over the logits where the case says so.
template <class Case>
hr_rows gradient_rows(const Case &c, const hr_rows &logits, const Tensors &grad)
{
    if (c.in_place)
        return {logits.data, logits.stride * (c.grad_dtype == c.dtype ? 1 : 2)};
    return {grad.data[0], c.classes + c.gap};
}

// Over the logits and apart, the same bits. set_options(c) takes a case whose number of classes is
// known.
template <class Run, class SetOptions>
void expect_gradient_over_logits(Backend &backend, SetOptions set_options)
{
    for (const auto &[dtype, grad_dtype] :
         {std::pair{HR_F32, HR_F32}, {HR_BF16, HR_BF16}, {HR_F32, HR_BF16}, {HR_F32, HR_F16}})
        for (const int64_t classes : {37, 1030, 2600}) {
            decltype(Run::shape) c;
            c.rows = 4, c.classes = classes, c.dtype = dtype, c.grad_dtype = grad_dtype;
            c.gap = 24 - classes % 8;
            set_options(c);
            auto over = c;
            over.in_place = true;
            const Run apart(backend, c), inside(backend, over);
            ASSERT_EQ(apart.call(), HR_OK) << hr_last_error();
            ASSERT_EQ(inside.call(), HR_OK) << hr_last_error();
            const std::vector<double> one = apart.gradients(), other = inside.gradients();
            for (int64_t i = 0; i < c.rows; i++)
                for (int64_t j = 0; j < classes; j++)
                    ASSERT_EQ(one[size_t(i * apart.grad_rows.stride + j)],
                              other[size_t(i * inside.grad_rows.stride + j)])
                        << over << ", row " << i << ", class " << j;
        }
}
