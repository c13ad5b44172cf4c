// older_system.cpp: linked into the C++ of a wheel by .ci/wheels.
//
// A wheel is for systems with glibc 2.28 and GCC 8's libstdc++. What newer headers call, and those
// libraries lack, is here. Compile it as C++20.
#include <new>
#include <sstream>

// Whether libstdc++ may count without atomics, since glibc 2.32: no.
extern "C" {
char __libc_single_threaded = 0;
}

namespace std
{
void __throw_bad_array_new_length() // since GCC 11
{
    throw bad_array_new_length();
}
} // namespace std

// Members of streams that libstdc++ has since GCC 9 and 11.
template std::basic_stringstream<char>::basic_stringstream();
template std::basic_ostringstream<char>::basic_ostringstream();
template std::string std::basic_stringbuf<char>::str() const &;
template std::string std::basic_stringbuf<char>::str() &&;
