// Whether AddressSanitizer is on, however the compiler says so.
#pragma once

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define HR_EMU_ASAN 1
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define HR_EMU_ASAN 1
#endif

#if defined(HR_EMU_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
