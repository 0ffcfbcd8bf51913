/* Reads the token file and compares without telling by time how close a guess was: every token is
 * compared over its full length with every candidate, and the results are only looked at together.
 */
#include "server/auth.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#define FILE_BYTES_MAX 32768

static bool is_token_text(const char *text, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (text[i] <= ' ' || text[i] >= 0x7f)
            return false;
    return true;
}

/* One line, without its end: "TOKEN" or "NAME TOKEN". */
static enum dkv_status add_line(struct dkv_auth *auth, char *line, unsigned number,
                                struct dkv_error *err)
{
    char *token = strchr(line, ' ');
    if (auth->n_tokens == DKV_TOKENS_MAX_COUNT)
        return dkv_error_set(err, DKV_E_INVALID, "token_file: more than %d tokens",
                             DKV_TOKENS_MAX_COUNT);
    struct dkv_token *slot = &auth->tokens[auth->n_tokens];
    if (token == NULL) {
        token = line;
        snprintf(slot->client, sizeof(slot->client), "client%u", auth->n_tokens + 1);
    } else {
        *token++ = '\0';
        if (strlen(line) > DKV_CLIENT_NAME_BYTES || !is_token_text(line, strlen(line)))
            return dkv_error_set(err, DKV_E_INVALID,
                                 "token_file: line %u: a client's name has at most %d characters",
                                 number, DKV_CLIENT_NAME_BYTES);
        snprintf(slot->client, sizeof(slot->client), "%s", line);
    }
    size_t n = strlen(token);
    if (n < DKV_TOKEN_MIN_BYTES || n > DKV_TOKEN_MAX_BYTES || !is_token_text(token, n))
        return dkv_error_set(err, DKV_E_INVALID,
                             "token_file: line %u: a token has %d..%d printable characters, this "
                             "one %zu",
                             number, DKV_TOKEN_MIN_BYTES, DKV_TOKEN_MAX_BYTES, n);
    memcpy(slot->bytes, token, n);
    slot->n_bytes = n;
    auth->n_tokens++;
    return DKV_OK;
}

static enum dkv_status parse(struct dkv_auth *auth, char *text, struct dkv_error *err)
{
    unsigned number = 0;
    for (char *line = text; line != NULL;) {
        char *next = strchr(line, '\n');
        if (next != NULL)
            *next++ = '\0';
        number++;
        size_t n = strlen(line);
        if (n > 0 && line[n - 1] == '\r')
            line[n - 1] = '\0';
        if (*line != '\0' && *line != '#') {
            enum dkv_status status = add_line(auth, line, number, err);
            if (status != DKV_OK)
                return status;
        }
        line = next;
    }
    if (auth->n_tokens == 0)
        return dkv_error_set(err, DKV_E_INVALID, "token_file: there is no token in it");
    return DKV_OK;
}

/* Nobody but the owner may. Where that is somebody else, the group that the daemon runs as may
 * read: the volumes of container platforms belong to root and give their files to a group. */
static bool is_private(const struct stat *info)
{
    const bool given = info->st_uid != geteuid() && info->st_gid == getegid();
    const mode_t group_may = given ? 040 : 0;
    return (info->st_mode & 077 & ~group_may) == 0;
}

static enum dkv_status read_private_file(const char *path, char *text, size_t text_bytes,
                                         struct dkv_error *err)
{
    struct stat info;
    enum dkv_status status = DKV_OK;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    if (fd < 0)
        return dkv_error_set(err, DKV_E_IO, "token_file: cannot open %.120s: %s", path,
                             strerror(errno));
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode))
        status = dkv_error_set(err, DKV_E_IO, "token_file: %.120s is not a regular file", path);
    else if (!is_private(&info))
        status = dkv_error_set(
            err, DKV_E_DENIED,
            "token_file: %.120s has mode %04o; others must not have access "
            "(chmod 0600; 0640 if it is another user's and of the daemon's group)",
            path, (unsigned)info.st_mode & 07777);
    else if (info.st_size >= (off_t)text_bytes)
        status = dkv_error_set(err, DKV_E_INVALID, "token_file: %lld bytes, at most %zu are read",
                               (long long)info.st_size, text_bytes - 1);
    else {
        ssize_t n = read(fd, text, text_bytes - 1);
        if (n < 0)
            status = dkv_error_set(err, DKV_E_IO, "token_file: %s", strerror(errno));
        else
            text[n] = '\0';
    }
    close(fd);
    return status;
}

enum dkv_status dkv_auth_load(struct dkv_auth *auth, const char *path, struct dkv_error *err)
{
    struct dkv_auth fresh = {.required = true};
    char text[FILE_BYTES_MAX];
    if (*path == '\0') {
        dkv_auth_fini(auth);
        return DKV_OK;
    }
    enum dkv_status status = read_private_file(path, text, sizeof(text), err);
    if (status == DKV_OK)
        status = parse(&fresh, text, err);
    if (status == DKV_OK)
        *auth = fresh;
    explicit_bzero(text, sizeof(text));
    explicit_bzero(&fresh, sizeof(fresh));
    return status;
}

void dkv_auth_fini(struct dkv_auth *auth)
{
    explicit_bzero(auth, sizeof(*auth));
}

/* 1 if equal. Looks at all DKV_TOKEN_MAX_BYTES whatever the lengths. */
static unsigned same_bytes(const struct dkv_token *token, const unsigned char *given,
                           size_t n_given)
{
    unsigned differs = (unsigned)(token->n_bytes ^ n_given);
    for (size_t i = 0; i < DKV_TOKEN_MAX_BYTES; i++)
        differs |= token->bytes[i] ^ given[i];
    return differs == 0;
}

const char *dkv_auth_check_token(const struct dkv_auth *auth, const char *token, size_t n)
{
    unsigned char given[DKV_TOKEN_MAX_BYTES] = {0};
    const char *client = NULL;
    if (!auth->required)
        return "local";
    if (n > DKV_TOKEN_MAX_BYTES)
        return NULL;
    memcpy(given, token, n);
    for (unsigned i = 0; i < auth->n_tokens; i++)
        if (same_bytes(&auth->tokens[i], given, n))
            client = auth->tokens[i].client;
    explicit_bzero(given, sizeof(given));
    return client;
}

const char *dkv_auth_check(const struct dkv_auth *auth, const char *authorization)
{
    static const char scheme[] = "Bearer ";
    if (!auth->required)
        return "local";
    if (authorization == NULL || strncasecmp(authorization, scheme, sizeof(scheme) - 1) != 0)
        return NULL;
    const char *token = authorization + sizeof(scheme) - 1;
    return dkv_auth_check_token(auth, token, strlen(token));
}
