/* Opens the CUDA engine for a test program, or ends the program: 77 with a line that says why there
 * is none. */
#ifndef DKV_TESTS_GPU_DEVICE_H
#define DKV_TESTS_GPU_DEVICE_H

#include <stdio.h>
#include <stdlib.h>

#include "tests/support/case.h"

static inline void dkv_gpu_open(struct dkv_scorer *scorer_out)
{
    const char *name = getenv("DKV_GPU") != NULL ? getenv("DKV_GPU") : "cuda:0";
    struct dkv_engine_config config = {0};
    struct dkv_engine_info info;
    struct dkv_error err;
    if (dkv_engine_find(name, &scorer_out->ops, &config.device, &err) != DKV_OK ||
        scorer_out->ops->open(&config, &scorer_out->engine, &err) != DKV_OK) {
        printf("skipped: %s\n", err.text);
        exit(err.status == DKV_E_UNSUPPORTED ? 77 : 1);
    }
    scorer_out->ops->info(scorer_out->engine, &info);
    printf("%s, %s\n", info.backend, info.device);
}

#endif
