#include "tests/c/harness/matches.h"

#include <regex.h>

testing::AssertionResult matches(const std::string &text, const std::string &pattern)
{
    regex_t compiled;
    if (regcomp(&compiled, pattern.c_str(), REG_EXTENDED | REG_NEWLINE | REG_NOSUB) != 0)
        return testing::AssertionFailure() << "not a pattern: " << pattern;
    const bool found = regexec(&compiled, text.c_str(), 0, nullptr, 0) == 0;
    regfree(&compiled);
    if (found)
        return testing::AssertionSuccess();
    return testing::AssertionFailure() << "wanted " << pattern << "\ngot    " << text;
}
