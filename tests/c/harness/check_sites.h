/* check_sites.h: included before the sources of the C interface where the tests build them. Every
 * HR_REQUIRE and HR_TRY leaves a record that can switch it off. */
#ifndef HR_CHECK_SITES_H
#define HR_CHECK_SITES_H

typedef struct hr_check_site {
    const char *file;
    int line, off;
} hr_check_site;

/* The linker gathers the addresses from __start_hr_checks to __stop_hr_checks. */
#define HR_CHECK_PASSES(condition)                                                               \
    __extension__({                                                                              \
        static hr_check_site site = {__FILE__, __LINE__, 0};                                     \
        static hr_check_site *const address __attribute__((section("hr_checks"), used)) = &site; \
        (condition) || site.off;                                                                 \
    })

#endif
