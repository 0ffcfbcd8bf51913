/* Engines for tests, by name.
 *
 * The name comes from the program's first argument or DKV_TEST_ENGINE, else "cpu": the same tests
 * judge the CUDA engine with "cuda:0". DKV_TEST_THREADS is the most threads that CPU engines get,
 * where an emulator cannot do with several. */
#ifndef DKV_TESTS_SUPPORT_ENGINES_H
#define DKV_TESTS_SUPPORT_ENGINES_H

#include "tests/support/case.h"

/* "cpu", "cuda:0", ... */
const char *dkv_test_engine_name(int argc, char **argv);

/* Opens it. Ends the program with 77 (skipped) and a line saying why where this machine cannot run
 * it; with 1 on any other error. */
struct dkv_scorer dkv_test_engine_open(const char *name, unsigned threads);
void dkv_test_engine_close(struct dkv_scorer *scorer);

#endif
