// Whether a text contains a POSIX extended regular expression.
#pragma once

#include <gtest/gtest.h>

#include <string>

testing::AssertionResult matches(const std::string &text, const std::string &pattern);
