/* How the libraries export their functions. */
#pragma once

#ifdef __cplusplus
#define EXPORT extern "C" __attribute__((visibility("default")))
#else
#define EXPORT __attribute__((visibility("default")))
#endif
/* A function of one statement, on one line. */
#define CALL(signature, ...) \
    EXPORT signature         \
    {                        \
        __VA_ARGS__          \
    }
