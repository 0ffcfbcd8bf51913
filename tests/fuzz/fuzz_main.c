/* Replays a corpus: each argument is a file or a folder of files, taken in the order of their
 * names. Exit 1 if there was nothing to replay, because a test that runs no input proves nothing.
 */
#include "tests/fuzz/fuzz.h"

#include <dirent.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

/* An exact heap copy, so that a sanitizer sees the first byte read past the input. */
static int replay_file(const char *path)
{
    struct stat info;
    FILE *file = fopen(path, "rb");

    if (file == NULL || fstat(fileno(file), &info) != 0) {
        perror(path);
        exit(1);
    }
    const size_t size = (size_t)info.st_size;
    uint8_t *data = malloc(size > 0 ? size : 1);
    if (data == NULL || fread(data, 1, size, file) != size) {
        fprintf(stderr, "%s: could not be read\n", path);
        exit(1);
    }
    fclose(file);
    (void)LLVMFuzzerTestOneInput(data, size);
    free(data);
    return 1;
}

static int not_hidden(const struct dirent *entry)
{
    return entry->d_name[0] != '.';
}

static int replay(const char *path)
{
    struct dirent **entries;
    const int n = scandir(path, &entries, not_hidden, alphasort);
    int count = 0;

    if (n < 0)
        return replay_file(path);
    for (int i = 0; i < n; i++) {
        char name[PATH_MAX];
        snprintf(name, sizeof(name), "%s/%s", path, entries[i]->d_name);
        count += replay_file(name);
        free(entries[i]);
    }
    free(entries);
    return count;
}

int main(int argc, char **argv)
{
    int count = 0;

    for (int i = 1; i < argc; i++)
        count += replay(argv[i]);
    printf("%d inputs replayed\n", count);
    return count > 0 ? 0 : 1;
}
