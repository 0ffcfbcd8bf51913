/* Device names to engines. The CUDA engine is a module that is only opened when asked for, so that
 * a program without a GPU neither links nor loads anything of CUDA's.
 *
 * It is looked for beside the program (a build tree, an unpacked archive), beside the file that
 * this code is in, if that is a library of somebody else's program, then in the directory it is
 * installed in, under one name. It stays loaded: CUDA does not survive being unmapped.
 */
#include "kernels/engine.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MODULE_FILE   "dkv-cuda.so"
#define MODULE_SYMBOL "dkv_engine_cuda"

/* Paths relative to the program or library: installed side by side, and the build tree's. */
static const char *const beside[] = {"", "cuda/", "kernels/cuda/", "../kernels/cuda/",
                                     "../../kernels/cuda/"};

#define N_BESIDE (sizeof(beside) / sizeof(beside[0]))

/* Leaves a path's directory with a trailing slash. False: there is none. */
static bool cut_to_directory(char *path)
{
    char *slash = strrchr(path, '/');
    if (slash != NULL)
        slash[1] = '\0';
    return slash != NULL;
}

static bool program_directory(char *path_out, size_t bytes)
{
    const ssize_t length = readlink("/proc/self/exe", path_out, bytes - 1);
    path_out[length > 0 ? length : 0] = '\0';
    return cut_to_directory(path_out);
}

/* Of a program the loader says what it was called by, which may be no path: what lies in the
 * working directory is not beside it then, and not to be trusted. False: it is not known. */
static bool own_directory(char *path_out, size_t bytes)
{
    Dl_info info;
    if (dladdr(beside, &info) == 0 || info.dli_fname == NULL)
        return false;
    snprintf(path_out, bytes, "%s", info.dli_fname);
    return cut_to_directory(path_out);
}

/* Why a module did not open: the loader's text without the path it starts with. */
static const char *loader_reason(void)
{
    const char *text = dlerror();
    if (text == NULL)
        return "unknown reason";
    const char *colon = strstr(text, ": ");
    return colon != NULL ? colon + 2 : text;
}

static void *open_module(struct dkv_error *err)
{
    char program[PATH_MAX], own[PATH_MAX], path[PATH_MAX + 64];
    const bool known[2] = {program_directory(program, sizeof(program)),
                           own_directory(own, sizeof(own))};
    for (size_t i = 0; i < 2 * N_BESIDE + 1; i++) {
        if (i < 2 * N_BESIDE && !known[i / N_BESIDE])
            continue;
        if (i < 2 * N_BESIDE)
            snprintf(path, sizeof(path), "%s%s%s", i < N_BESIDE ? program : own,
                     beside[i % N_BESIDE], MODULE_FILE);
        else
            snprintf(path, sizeof(path), "%s/%s", DKV_MODULE_DIR, MODULE_FILE);
        if (access(path, R_OK) != 0)
            continue;
        void *module = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (module == NULL)
            dkv_error_set(err, DKV_E_UNSUPPORTED, "cuda engine: %s does not load: %s", MODULE_FILE,
                          loader_reason());
        return module;
    }
    dkv_error_set(err, DKV_E_UNSUPPORTED,
                  "cuda engine: %s is neither beside the program nor installed", MODULE_FILE);
    return NULL;
}

static const struct dkv_engine_ops *cuda_ops(struct dkv_error *err)
{
    static _Atomic(const struct dkv_engine_ops *) found;
    if (found != NULL)
        return found;
    void *module = open_module(err);
    if (module == NULL)
        return NULL;
    const struct dkv_engine_ops *ops = dlsym(module, MODULE_SYMBOL);
    if (ops == NULL || ops->abi != DKV_ENGINE_ABI) {
        dkv_error_set(err, DKV_E_UNSUPPORTED, "cuda engine: %s is of another version (%u, not %u)",
                      MODULE_FILE, ops != NULL ? ops->abi : 0, DKV_ENGINE_ABI);
        return NULL;
    }
    found = ops;
    return found;
}

/* "cuda" or "cuda:N". */
static bool parse_cuda(const char *name, int *ordinal_out)
{
    *ordinal_out = 0;
    if (strcmp(name, "cuda") == 0)
        return true;
    if (strncmp(name, "cuda:", 5) != 0 || name[5] < '0' || name[5] > '9')
        return false;
    char *end;
    const long value = strtol(name + 5, &end, 10);
    if (*end != '\0' || value > 1023)
        return false;
    *ordinal_out = (int)value;
    return true;
}

enum dkv_status dkv_engine_find(const char *device_name, const struct dkv_engine_ops **ops_out,
                                int *device_out, struct dkv_error *err)
{
    char shown[DKV_SHOWN_NAME_BYTES];
    int ordinal = 0;
    const struct dkv_engine_ops *ops = NULL;
    if (strcmp(device_name, "cpu") == 0)
        ops = &dkv_engine_cpu;
    else if (!parse_cuda(device_name, &ordinal))
        return dkv_error_set(err, DKV_E_INVALID,
                             "device: '%s' is not one of cpu, cuda, cuda:0 .. cuda:1023",
                             dkv_show_name(shown, device_name));
    else if ((ops = cuda_ops(err)) == NULL)
        return DKV_E_UNSUPPORTED;
    *ops_out = ops;
    *device_out = ordinal;
    return DKV_OK;
}
