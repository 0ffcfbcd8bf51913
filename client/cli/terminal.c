/* Terminal properties, number formatting and the progress bar. */
#include "client/cli/terminal.h"

#include <inttypes.h>
#include <langinfo.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#define DEFAULT_WIDTH 100u
#define BAR_CELLS     30u
#define PATIENCE_NS   INT64_C(500000000) /* before a bar appears */
#define REDRAW_NS     INT64_C(100000000)

static bool is_set(const char *name)
{
    const char *value = getenv(name);
    return value != NULL && value[0] != '\0';
}

static unsigned columns(FILE *stream)
{
    struct winsize size;
    const char *text = getenv("COLUMNS");
    const unsigned long named = text == NULL ? 0 : strtoul(text, NULL, 10);
    if (named >= 20 && named <= 1000)
        return (unsigned)named;
    if (ioctl(fileno(stream), TIOCGWINSZ, &size) == 0 && size.ws_col >= 20)
        return size.ws_col;
    return DEFAULT_WIDTH;
}

struct dkv_terminal dkv_terminal_of(FILE *stream)
{
    const char *term = getenv("TERM");
    const bool is_tty = isatty(fileno(stream)) != 0;
    return (struct dkv_terminal){
        .width = columns(stream),
        .is_tty = is_tty,
        .color = is_tty && !is_set("NO_COLOR") && term != NULL && strcmp(term, "dumb") != 0,
        .utf8 = strcmp(nl_langinfo(CODESET), "UTF-8") == 0,
    };
}

const char *dkv_grouped(uint64_t value)
{
    static char buffers[8][32];
    static unsigned next;
    char digits[24];
    char *out = buffers[next++ % 8];
    const int n = snprintf(digits, sizeof(digits), "%" PRIu64, value);
    char *to = out;
    for (int i = 0; i < n; i++) {
        if (i > 0 && (n - i) % 3 == 0)
            *to++ = ',';
        *to++ = digits[i];
    }
    *to = '\0';
    return out;
}

void dkv_progress_init(struct dkv_progress *progress, int64_t now_ns)
{
    *progress = (struct dkv_progress){.terminal = dkv_terminal_of(stderr), .start_ns = now_ns};
}

void dkv_progress_show(struct dkv_progress *progress, uint64_t done, uint64_t all, int64_t now_ns)
{
    if (!progress->terminal.is_tty || now_ns - progress->start_ns < PATIENCE_NS ||
        (progress->drawn_ns != 0 && now_ns - progress->drawn_ns < REDRAW_NS))
        return;
    progress->drawn_ns = now_ns;
    const unsigned full = all == 0 ? BAR_CELLS : (unsigned)(done * BAR_CELLS / all);
    fputs("\r[", stderr);
    for (unsigned i = 0; i < BAR_CELLS; i++)
        fputs(i < full ? (progress->terminal.utf8 ? "█" : "#") : " ", stderr);
    fprintf(stderr, "] %s of %s blocks", dkv_grouped(done), dkv_grouped(all));
    fflush(stderr);
}

void dkv_progress_fini(struct dkv_progress *progress)
{
    if (progress->drawn_ns != 0)
        fputs("\r\033[K", stderr);
}
