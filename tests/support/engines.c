/* Opening engines for tests. */
#include "tests/support/engines.h"

#include <stdio.h>
#include <stdlib.h>

const char *dkv_test_engine_name(int argc, char **argv)
{
    const char *name = getenv("DKV_TEST_ENGINE");
    if (argc > 1)
        name = argv[1];
    return name != NULL ? name : "cpu";
}

static unsigned limit_threads(unsigned threads)
{
    const char *text = getenv("DKV_TEST_THREADS");
    const unsigned long limit = text != NULL ? strtoul(text, NULL, 10) : 0;
    return limit > 0 && threads > limit ? (unsigned)limit : threads;
}

struct dkv_scorer dkv_test_engine_open(const char *name, unsigned threads)
{
    struct dkv_scorer scorer = {0};
    struct dkv_error err = {0};
    int device = 0;
    enum dkv_status status = dkv_engine_find(name, &scorer.ops, &device, &err);
    if (status == DKV_OK) {
        const struct dkv_engine_config config = {.threads = limit_threads(threads),
                                                 .device = device};
        status = scorer.ops->open(&config, &scorer.engine, &err);
    }
    if (status == DKV_OK)
        return scorer;
    printf("%s: %s\n", status == DKV_E_UNSUPPORTED ? "skipped" : "failed", err.text);
    exit(status == DKV_E_UNSUPPORTED ? 77 : 1);
}

void dkv_test_engine_close(struct dkv_scorer *scorer)
{
    if (scorer->ops != NULL)
        scorer->ops->close(scorer->engine);
    *scorer = (struct dkv_scorer){0};
}
