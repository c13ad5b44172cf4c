// older_system.c: linked into the C of a wheel by .ci/wheels.
//
// glibc has atexit() in a part that is linked into each library, and the libraries that a wheel is
// linked to are empty but for the names of what glibc exports. The code that nvcc adds calls it.
extern void *__dso_handle; // of this library
int __cxa_atexit(void (*function)(void *), void *argument, void *library);

__attribute__((visibility("hidden"))) int atexit(void (*function)(void))
{
    return __cxa_atexit((void (*)(void *))function, (void *)0, &__dso_handle);
}
