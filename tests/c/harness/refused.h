// refused.h: calls that must be refused. Each is a good call with one argument made wrong, with the
// status and the words to expect; no byte may have changed.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>

#include "tests/c/harness/matches.h"
#include "tests/c/harness/tensors.h"

template <class Run> struct BadInput {
    std::string message; // a pattern: which argument, what was got
    std::function<void(Run &)> spoil;
    hr_status status = HR_INVALID_ARGUMENT;
};

template <class Run> using BadInputs = std::vector<BadInput<Run>>;

template <class Run> void expect_refused(Run &run, const BadInput<Run> &bad)
{
    SCOPED_TRACE("expecting " + bad.message);
    const std::vector<uint8_t> before = run.image();
    bad.spoil(run);
    EXPECT_EQ(run.call(), bad.status) << hr_last_error();
    EXPECT_TRUE(matches(hr_last_error(), bad.message));
    EXPECT_EQ(run.image(), before);
    EXPECT_TRUE(run.whole());
}

// Each of them in a run of its own.
template <class Run, class Case>
void expect_all_refused(Backend &backend, const Case &good, const BadInputs<Run> &all)
{
    for (const BadInput<Run> &bad : all) {
        Run run(backend, good);
        expect_refused(run, bad);
    }
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

template <class Run> BadInputs<Run> joined(std::initializer_list<BadInputs<Run>> parts)
{
    BadInputs<Run> all;
    for (const BadInputs<Run> &part : parts)
        all.insert(all.end(), part.begin(), part.end());
    return all;
}

// A number of a config, refused at each of the values.
template <class Run, class Number>
BadInputs<Run> bad_numbers(const std::string &message, Number number,
                           const std::vector<double> &values)
{
    BadInputs<Run> all;
    for (const double value : values)
        all.push_back({message, [=](Run &r) {
                           auto &slot = number(r);
                           slot = static_cast<std::decay_t<decltype(slot)>>(value);
                       }});
    return all;
}

// The first `size` bytes of a config, as a caller with an older header has them: then nothing of it.
template <class Config> void cut(Config &config, size_t size)
{
    config.size = size;
    std::memset(reinterpret_cast<char *>(&config) + size, 0xEE, sizeof config - size);
}

// What every op refuses of its config and of where it should run.
template <class Run> BadInputs<Run> bad_config_or_exec()
{
    return {
        {": config is NULL", [](Run &r) { r.config_argument = nullptr; }},
        {": config->size is 0, wanted", [](Run &r) { r.config.size = 0; }},
        {": config->size is 999, wanted", [](Run &r) { r.config.size = 999; }},
        {": config->size is .*, wanted", [](Run &r) { r.config.size += 4; }}, // a newer header's
        {": config->size is .*, wanted", [](Run &r) { r.config.size -= 1; }},
        {": exec is NULL", [](Run &r) { r.exec_argument = nullptr; }},
        {": exec->device is -2", [](Run &r) { r.exec.device = -2; }},
    };
}

// What an op says of one of its lists.
template <class Run> struct ListRule {
    std::string name;
    std::function<Tensors &(Run &)> list;
    std::vector<hr_dtype> types;
    enum { MEASURED, LEADS, ALONE } role = MEASURED; // against the list that leads
    bool may_be_null = false;
    int64_t numel = 300; // of the last of its three tensors
};

// What every op refuses of a list of three tensors.
template <class Run> BadInputs<Run> bad_list(const ListRule<Run> &rule)
{
    const auto list = rule.list;
    const std::string name = ": " + rule.name, numel = std::to_string(rule.numel);
    const std::string one_less = std::to_string(rule.numel - 1);
    BadInputs<Run> all = {
        {name + "->data is NULL", [=](Run &r) { list(r).list.data = nullptr; }},
        {name + "->numel is NULL", [=](Run &r) { list(r).list.numel = nullptr; }},
        {name + "->dtype is NULL", [=](Run &r) { list(r).list.dtype = nullptr; }},
        {name + "->count is -1", [=](Run &r) { list(r).list.count = -1; }},
        {name + "\\[2\\] is NULL", [=](Run &r) { list(r).data[2] = nullptr; }},
        {name + "\\[0\\] has numel -4", [=](Run &r) { list(r).numel[0] = -4; }},
    };
    if (!rule.may_be_null)
        all.push_back({name + " is NULL", [=](Run &r) { list(r).argument = nullptr; }});
    if (rule.types != std::vector<hr_dtype>{HR_U8})
        all.push_back({name + "\\[2\\] is at .* not a multiple of [248] bytes",
                       [=](Run &r) { list(r).data[2] = moved(list(r).data[2], 1); }});
    if (rule.role != ListRule<Run>::MEASURED)
        all.push_back({name + " has more than 2\\^59 elements",
                       [=](Run &r) { list(r).numel[2] = INT64_MAX; }});
    const bool leads = rule.role == ListRule<Run>::LEADS;
    if (rule.role != ListRule<Run>::ALONE) {
        all.push_back({leads ? "->count is 3, wanted 2" : name + "->count is 2, wanted 3",
                       [=](Run &r) { list(r).list.count = 2; }});
        all.push_back({leads ? "\\[2\\] has numel " + numel + ", wanted " + one_less
                             : name + "\\[2\\] has numel " + one_less + ", wanted " + numel,
                       [=](Run &r) { list(r).numel[2]--; }});
    }
    for (const int type : {0, 1, 2, 3, 4, 5, 6, 7, -1}) // all there are, and two that are none
        if (std::count(rule.types.begin(), rule.types.end(), hr_dtype(type)) == 0)
            all.push_back({name + "\\[2\\] has dtype .*\\(" + std::to_string(type) +
                               "\\), wanted " + words_of(rule.types) + "$",
                           [=](Run &r) { list(r).dtype[2] = hr_dtype(type); }});
    return all;
}

template <class Run> BadInputs<Run> bad_lists(const std::vector<ListRule<Run>> &rules)
{
    BadInputs<Run> all;
    for (const ListRule<Run> &rule : rules)
        for (BadInput<Run> &bad : bad_list(rule))
            all.push_back(std::move(bad));
    return all;
}
