/* What the terminal can show.
 *
 * Thread  the program's only one: some texts are in static memory.
 * Errors  none: what the terminal does not tell has a default.
 */
#ifndef DKV_CLIENT_CLI_TERMINAL_H
#define DKV_CLIENT_CLI_TERMINAL_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

struct dkv_terminal {
    unsigned width; /* columns: of the terminal, $COLUMNS, or 100 */
    bool is_tty;
    bool color; /* a terminal, and neither NO_COLOR nor TERM=dumb */
    bool utf8;  /* the locale's encoding */
};

/* Needs setlocale() before. */
struct dkv_terminal dkv_terminal_of(FILE *stream);

/* "1,234,567" in a rotating static buffer of eight texts. */
const char *dkv_grouped(uint64_t value);

/* A line "[#####.....] 5/10" on standard error, redrawn in place; drawn only where standard error
 * is a terminal and the work has lasted half a second. */
struct dkv_progress {
    struct dkv_terminal terminal;
    int64_t start_ns;
    int64_t drawn_ns; /* 0: not yet */
};

void dkv_progress_init(struct dkv_progress *progress, int64_t now_ns);
void dkv_progress_show(struct dkv_progress *progress, uint64_t done, uint64_t all, int64_t now_ns);
void dkv_progress_fini(struct dkv_progress *progress); /* wipes the line */

#endif
