/* The engines of libdropkv: a module that is opened when an endpoint asks for it, so that who talks
 * to a daemon loads neither engines nor anything of CUDA's.
 *
 * It is looked for beside the library: in the folder that it is installed in, in a build tree, then
 * where this build would install it. It stays loaded, as the CUDA engine that it opens has to.
 */
#include "client/embedded.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define MODULE_FILE "dkv-engine.so"

static const char *const beside[] = {"dropkvd/", "", "../kernels/"};

#define N_BESIDE (sizeof(beside) / sizeof(beside[0]))

/* False: it is not known, and what lies in the working directory is not to be trusted. */
static bool own_directory(char *path_out, size_t bytes)
{
    Dl_info info;
    if (dladdr(beside, &info) == 0 || info.dli_fname == NULL || strchr(info.dli_fname, '/') == NULL)
        return false;
    snprintf(path_out, bytes, "%s", info.dli_fname);
    strrchr(path_out, '/')[1] = '\0';
    return true;
}

/* The loader's text says which file it is about. */
static void *open_module(struct dkv_error *err)
{
    char own[PATH_MAX], path[PATH_MAX + 64];
    const bool known = own_directory(own, sizeof(own));
    for (size_t i = known ? 0 : N_BESIDE; i < N_BESIDE + 1; i++) {
        if (i < N_BESIDE)
            snprintf(path, sizeof(path), "%s%s%s", own, beside[i], MODULE_FILE);
        else
            snprintf(path, sizeof(path), "%s/%s", DKV_MODULE_DIR, MODULE_FILE);
        if (access(path, R_OK) != 0)
            continue;
        void *module = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (module == NULL)
            dkv_error_set(err, DKV_E_UNSUPPORTED, "embedded engine: %.200s", dlerror());
        return module;
    }
    dkv_error_set(err, DKV_E_UNSUPPORTED,
                  "embedded engine: %s is neither beside libdropkv nor in %.120s", MODULE_FILE,
                  DKV_MODULE_DIR);
    return NULL;
}

enum dkv_status dkv_embedded_find(const char *device, const struct dkv_engine_ops **ops_out,
                                  int *ordinal_out, struct dkv_error *err)
{
    static _Atomic(const struct dkv_engine_module *) found;
    const struct dkv_engine_module *engines = found;
    if (engines == NULL) {
        void *module = open_module(err);
        if (module == NULL)
            return DKV_E_UNSUPPORTED;
        engines = dlsym(module, "dkv_engine_module");
        if (engines == NULL || engines->abi != DKV_ENGINE_ABI)
            return dkv_error_set(err, DKV_E_UNSUPPORTED,
                                 "embedded engine: %s is of another version (%u, not %u)",
                                 MODULE_FILE, engines != NULL ? engines->abi : 0, DKV_ENGINE_ABI);
        found = engines;
    }
    return engines->find(device, ops_out, ordinal_out, err);
}
