// Says at the end of a run which kernels and instructions of the library it executed. With
// HEADROOM_PTX_WHOLE a kernel or a form of instruction that no test reached fails the run; with
// HEADROOM_PTX_REPORT the table of kernels, and the test that ran each first, goes to that file.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cxxabi.h>
#include <map>
#include <string>

#include "tests/c/emulator/machine.h"
#include "tests/ptx/registration.h"

namespace
{
std::string readable(const char *name)
{
    int status = 0;
    char *const text = abi::__cxa_demangle(name, nullptr, nullptr, &status);
    const std::string result = text ? text : name;
    std::free(text);
    return result.substr(0, result.find('('));
}

// Forms of which no test can make use, and why.
const char *const kExcused[] = {
    "div.s64", "div.u64",
    "rem.s64",         // of numbers above 2^32, which counts of tensors in a test are not
    "cvt.rzi.f64.f64", // in pow(): whether an exponent so large is odd
};

struct Count {
    uint64_t ran = 0, all = 0;
    void add(const ptx_function &f)
    {
        for (int32_t n = 0; n < f.count; n++)
            ran += f.code[n].executed > 0;
        all += uint64_t(f.count);
    }
    double percent() const
    {
        return all ? 100.0 * double(ran) / double(all) : 100.0;
    }
};

class Coverage : public testing::Environment
{
    void SetUp() override
    {
        hr_emu::machine.capability = ptx_registration::arch();
    }

    void TearDown() override
    {
        if (ptx_registration::lacks_fault())
            std::_Exit(3);
        const bool whole = std::getenv("HEADROOM_PTX_WHOLE");
        const char *const path = std::getenv("HEADROOM_PTX_REPORT");
        FILE *const report = path ? std::fopen(path, "w") : nullptr;
        Count total;
        size_t kernels = 0, missed = 0;
        for (const ptx_function *const entry : ptx_registration::entries()) {
            Count own;
            own.add(*entry);
            kernels++;
            missed += entry->launches == 0;
            if (report)
                std::fprintf(report, "%5.1f %% of %5llu  %s  (%s)\n", own.percent(),
                             (unsigned long long)own.all, readable(entry->name).c_str(),
                             entry->ran_in ? entry->ran_in : "no test");
            if (whole && entry->launches == 0)
                ADD_FAILURE() << "no test launches " << readable(entry->name);
        }
        const std::string refused = hr_emu::take_report();
        if (!refused.empty())
            ADD_FAILURE() << refused; // a module that no test needed, and that is not understood
        std::map<std::string, Count> forms;
        for (const ptx_module *const module : ptx_machine::modules())
            for (int k = 0; k < module->function_count; k++) {
                const ptx_function &f = *module->functions[k];
                total.add(f);
                for (int32_t n = 0; n < f.count; n++) {
                    Count &form = forms[f.code[n].form->text];
                    form.ran += f.code[n].executed > 0;
                    form.all++;
                }
            }
        size_t reached = 0;
        for (const auto &[text, form] : forms) {
            reached += form.ran > 0;
            if (report)
                std::fprintf(report, "%6llu of %6llu  %s\n", (unsigned long long)form.ran,
                             (unsigned long long)form.all, text.c_str());
            const bool excused = std::count(std::begin(kExcused), std::end(kExcused), text);
            if (whole && form.ran == 0 && !excused)
                ADD_FAILURE() << "no test executes " << text;
        }
        char line[160];
        std::snprintf(
            line, sizeof line,
            "PTX for %d: %zu of %zu kernels ran, %llu of %llu instructions (%.1f %%), %zu of "
            "their %zu forms\n",
            ptx_registration::arch(), kernels - missed, kernels, (unsigned long long)total.ran,
            (unsigned long long)total.all, total.percent(), reached, forms.size());
        std::fputs(line, stdout);
        if (report)
            std::fputs(line, report);
        if (report)
            std::fclose(report);
    }
};

const auto *const coverage = testing::AddGlobalTestEnvironment(new Coverage);
} // namespace

std::string ptx_registration::running_test()
{
    const auto *const test = testing::UnitTest::GetInstance()->current_test_info();
    return test ? std::string(test->test_suite_name()) + "." + test->name() : "";
}
