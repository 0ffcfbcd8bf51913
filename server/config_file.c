/* Reads the JSON configuration file.
 *
 * jansson parses, with repeated fields refused; each value is then written as text and judged by
 * dkv_config_set() like one from the command line. A file is a few kilobytes: anything above
 * FILE_BYTES_MAX is a mistake (a device, a log) and is refused before it is read.
 */
#include "server/config.h"

#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define FILE_BYTES_MAX 65536

/* The whole file as a string to free, or NULL. */
static char *read_file(const char *path, size_t *bytes_out, struct dkv_error *err)
{
    char *text = NULL;
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        dkv_error_set(err, DKV_E_IO, "config: cannot open %.120s: %s", path, strerror(errno));
        return NULL;
    }
    struct stat info;
    if (fstat(fileno(file), &info) != 0 || !S_ISREG(info.st_mode))
        dkv_error_set(err, DKV_E_IO, "config: %.120s is not a regular file", path);
    else if (info.st_size > FILE_BYTES_MAX)
        dkv_error_set(err, DKV_E_IO, "config: %.120s has %lld bytes, at most %d are read", path,
                      (long long)info.st_size, FILE_BYTES_MAX);
    else if ((text = calloc(1, FILE_BYTES_MAX + 1)) == NULL)
        dkv_error_set(err, DKV_E_NOMEM, "config: out of memory");
    else
        *bytes_out = fread(text, 1, FILE_BYTES_MAX, file);
    fclose(file);
    return text;
}

/* A JSON scalar as the text an argument would have; false for anything else. */
static bool value_text(const json_t *value, char *out, size_t out_bytes)
{
    int length;
    switch (json_typeof(value)) {
    case JSON_STRING: length = snprintf(out, out_bytes, "%s", json_string_value(value)); break;
    case JSON_INTEGER:
        length = snprintf(out, out_bytes, "%lld", (long long)json_integer_value(value));
        break;
    case JSON_TRUE: length = snprintf(out, out_bytes, "true"); break;
    case JSON_FALSE: length = snprintf(out, out_bytes, "false"); break;
    default: return false;
    }
    return length >= 0 && (size_t)length < out_bytes;
}

static enum dkv_status set_field(struct dkv_config_state *state, const char *name,
                                 const json_t *value, struct dkv_error *err)
{
    char text[4096];
    int field = dkv_config_find(name);
    if (field < 0 || strchr(name, '-') != NULL)
        return dkv_error_set(err, DKV_E_INVALID, "config: there is no field '%.40s'", name);
    if (!value_text(value, text, sizeof(text)))
        return dkv_error_set(err, DKV_E_INVALID,
                             "config: %s is neither text, a whole number, true nor false", name);
    if (dkv_config_fields[field].kind == DKV_CONFIG_TEXT && !json_is_string(value))
        return dkv_error_set(err, DKV_E_INVALID, "config: %s must be text, in quotes", name);
    if (dkv_config_fields[field].kind == DKV_CONFIG_BOOL && !json_is_boolean(value))
        return dkv_error_set(err, DKV_E_INVALID, "config: %s must be true or false", name);
    return dkv_config_set(state, field, text, DKV_SOURCE_FILE, name, err);
}

enum dkv_status dkv_config_load_file(struct dkv_config_state *state, const char *path,
                                     struct dkv_error *err)
{
    size_t n_bytes = 0;
    char *text = read_file(path, &n_bytes, err);
    if (text == NULL)
        return err != NULL ? err->status : DKV_E_IO;

    json_error_t why;
    json_t *root = json_loadb(text, n_bytes, JSON_REJECT_DUPLICATES, &why);
    free(text);
    if (root == NULL)
        return dkv_error_set(err, DKV_E_MALFORMED, "config: %.120s line %d: %.80s", path, why.line,
                             why.text);

    enum dkv_status status = DKV_OK;
    const char *name;
    json_t *value;
    if (!json_is_object(root))
        status = dkv_error_set(err, DKV_E_MALFORMED, "config: %.120s is not a JSON object", path);
    else
        json_object_foreach (root, name, value) {
            status = set_field(state, name, value, err);
            if (status != DKV_OK)
                break;
        }
    json_decref(root);
    return status;
}
