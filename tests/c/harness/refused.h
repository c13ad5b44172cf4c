// Calls that must be refused: what to spoil in a good one, and the words to expect.
#pragma once

#include <functional>
#include <string>

#include "tests/c/harness/matches.h"
#include "tests/c/harness/tensors.h"

template <class Run> struct BadInput {
    std::string message; // a pattern: which argument, what was got
    std::function<void(Run &)> spoil;
};

// Refused with these words, and no byte changed.
template <class Run> void expect_refused(Run &run, const BadInput<Run> &bad)
{
    SCOPED_TRACE("expecting " + bad.message);
    const std::vector<uint8_t> before = run.image();
    bad.spoil(run);
    EXPECT_EQ(run.call(), HR_INVALID_ARGUMENT) << hr_last_error();
    EXPECT_TRUE(matches(hr_last_error(), bad.message));
    EXPECT_EQ(run.image(), before);
    EXPECT_TRUE(run.whole());
}

// On a device that no machine has.
template <class Run> void expect_no_such_device(Run &run)
{
    const std::vector<uint8_t> before = run.image();
    run.exec.device = 1000;
    const hr_status got = run.call();
    EXPECT_TRUE(got == HR_NO_DEVICE || got == HR_UNSUPPORTED) << got;
    EXPECT_TRUE(matches(hr_last_error(), "exec->device is 1000"));
    EXPECT_EQ(run.image(), before);
}

template <class T> T *moved(T *pointer, size_t bytes)
{
    return reinterpret_cast<T *>(reinterpret_cast<uintptr_t>(pointer) + bytes);
}

// What every call refuses of a list of 3 tensors, the last of 300 elements. `types` are the dtypes
// it takes, in words; `leads` if the other lists are measured against this one.
template <class Run>
std::vector<BadInput<Run>> bad_lists(Tensors Run::*list, const std::string &name,
                                     const std::string &types, bool leads)
{
    std::vector<BadInput<Run>> all = {
        {name + "->data is NULL", [=](Run &r) { (r.*list).list.data = nullptr; }},
        {name + "->numel is NULL", [=](Run &r) { (r.*list).list.numel = nullptr; }},
        {name + "->dtype is NULL", [=](Run &r) { (r.*list).list.dtype = nullptr; }},
        {name + "->count is -1", [=](Run &r) { (r.*list).list.count = -1; }},
        {name + "\\[2\\] is NULL", [=](Run &r) { (r.*list).data[2] = nullptr; }},
        {name + "\\[2\\] is at .* not a multiple of [24] bytes",
         [=](Run &r) { (r.*list).data[2] = moved((r.*list).data[2], 1); }},
        {name + "\\[0\\] has numel -4", [=](Run &r) { (r.*list).numel[0] = -4; }},
    };
    if (leads)
        all.push_back({name + " has more than 2\\^59 elements",
                       [=](Run &r) { (r.*list).numel[2] = INT64_MAX; }});
    else
        all.insert(all.end(),
                   {{name + "->count is 2, wanted 3", [=](Run &r) { (r.*list).list.count = 2; }},
                    {name + "\\[2\\] has numel 299, wanted 300",
                     [=](Run &r) { (r.*list).numel[2] = 299; }}});
    for (const int type : {int(HR_U8), int(HR_I16), int(HR_F64), 7, -1})
        all.push_back(
            {name + "\\[2\\] has dtype .*\\(" + std::to_string(type) + "\\), wanted " + types + "$",
             [=](Run &r) { (r.*list).dtype[2] = hr_dtype(type); }});
    return all;
}
