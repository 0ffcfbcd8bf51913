/* What every fuzz target defines. With -Dfuzz=true libFuzzer calls it; otherwise fuzz_main.c does,
 * once per file of the stored corpus, in every test run.
 *
 * Must return 0, and must not crash, leak or fail an assertion on any input.
 */
#ifndef DKV_TESTS_FUZZ_H
#define DKV_TESTS_FUZZ_H

#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#endif
