/* The table.
 *
 * A row tells, of all kept tokens of a block, which share are sinks, recent tokens and the middle:
 * sinks and recent tokens are kept by any rule, so the middle is where scoring shows. The strip
 * draws the sequence from left to right; each cell's height is the share of its tokens that were
 * kept, over all heads of the row.
 */
#include "client/cli/report.h"
#include "client/cli/terminal.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define STRIP_MIN  12u
#define STRIP_MAX  64u
#define NAME_MAX_  32u
#define HEAD_BOLD  "\033[1m"
#define STRIP_TINT "\033[36m"
#define PLAIN      "\033[0m"

static const char *const blocks_utf8[] = {"·", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
static const char *const blocks_ascii[] = {".", ":", "-", "=", "+", "*", "#", "%", "@"};
#define N_LEVELS 8u

/* A row: some heads of one outcome, next to each other. */
struct row {
    const struct dkv_outcome *outcome;
    uint64_t first_head; /* over batch and KV heads */
    uint64_t n_heads;
};

struct shares {
    double sink;
    double recent;
    double middle;
};

static const int32_t *kept_of(const struct row *row, uint64_t head)
{
    const struct dropkv_result *r = row->outcome->result;
    return r->keep_indices + (row->first_head + head) * r->keep_tokens;
}

static struct shares count_shares(const struct row *row)
{
    const struct dropkv_result *r = row->outcome->result;
    uint64_t sink = 0;
    uint64_t recent = 0;
    for (uint64_t h = 0; h < row->n_heads; h++) {
        const int32_t *kept = kept_of(row, h);
        for (uint64_t i = 0; i < r->keep_tokens; i++) {
            const uint64_t t = (uint64_t)kept[i];
            if (t >= r->n_tokens - row->outcome->recent)
                recent++;
            else if (t < row->outcome->sinks)
                sink++;
        }
    }
    const double all = (double)(row->n_heads * r->keep_tokens);
    struct shares shares = {(double)sink / all, (double)recent / all, 0};
    shares.middle = 1.0 - shares.sink - shares.recent;
    return shares;
}

/* Tokens of cell c: [c * n / cells, (c + 1) * n / cells). */
static void draw_strip(const struct row *row, unsigned cells, const struct dkv_terminal *terminal,
                       FILE *stream)
{
    const struct dropkv_result *r = row->outcome->result;
    const uint64_t n = r->n_tokens;
    uint64_t counts[STRIP_MAX] = {0};
    if (cells > n)
        cells = (unsigned)n;
    for (uint64_t h = 0; h < row->n_heads; h++) {
        const int32_t *kept = kept_of(row, h);
        for (uint64_t i = 0; i < r->keep_tokens; i++)
            counts[(((uint64_t)kept[i] + 1) * cells - 1) / n]++;
    }
    const char *const *glyphs = terminal->utf8 ? blocks_utf8 : blocks_ascii;
    fputs(terminal->color ? "  " STRIP_TINT : "  ", stream);
    for (unsigned c = 0; c < cells; c++) {
        const uint64_t tokens = (c + 1) * n / cells - c * n / cells;
        const uint64_t room = tokens * row->n_heads;
        const uint64_t level = (counts[c] * N_LEVELS + room - 1) / room;
        fputs(glyphs[level > N_LEVELS ? N_LEVELS : level], stream);
    }
    fputs(terminal->color ? PLAIN : "", stream);
}

/* Columns a UTF-8 text takes, for alignment: one for each character. */
static unsigned text_columns(const char *text)
{
    unsigned n = 0;
    for (; *text != '\0'; text++)
        n += ((unsigned char)*text & 0xc0) != 0x80;
    return n;
}

struct layout {
    unsigned name;
    unsigned strip; /* 0: none */
    bool heads;     /* a column that says which KV head */
};

static void pad(FILE *stream, unsigned n)
{
    fprintf(stream, "%*s", (int)n, "");
}

/* All but the first column and the strip. */
#define FIXED_COLUMNS 55u

static struct layout plan_layout(const struct dkv_report *report, unsigned width)
{
    struct layout layout = {.name = 5, .heads = report->per_head};
    for (size_t i = 0; i < report->n_outcomes; i++) {
        const unsigned n = text_columns(report->outcomes[i].name);
        layout.name = n > layout.name ? n : layout.name;
    }
    if (layout.name > NAME_MAX_)
        layout.name = NAME_MAX_;
    const unsigned used = layout.name + FIXED_COLUMNS + (layout.heads ? 6 : 0);
    if (width >= used + STRIP_MIN)
        layout.strip = width - used > STRIP_MAX ? STRIP_MAX : width - used;
    return layout;
}

static void print_header(const struct layout *layout, const struct dkv_terminal *terminal,
                         FILE *stream)
{
    fputs(terminal->color ? HEAD_BOLD : "", stream);
    fputs("block", stream);
    pad(stream, layout->name - 5);
    fprintf(stream, "%s  %7s  %9s  %16s", layout->heads ? "  head" : "", "heads", "tokens", "kept");
    fprintf(stream, "  %5s  %6s  %6s", "sink", "recent", "middle");
    if (layout->strip > 0)
        fputs(layout->strip > 30 ? "  where the kept tokens lie" : "  where", stream);
    fputs(terminal->color ? PLAIN "\n" : "\n", stream);
}

/* Cuts a name at a character's start. */
static void print_name(const char *name, unsigned columns, FILE *stream)
{
    unsigned n = 0;
    const unsigned all = text_columns(name);
    for (const char *c = name; *c != '\0'; c++) {
        const bool starts = ((unsigned char)*c & 0xc0) != 0x80;
        if (starts && all > columns && n + 2 == columns)
            break;
        n += starts;
        fputc(*c, stream);
    }
    if (all > columns)
        fputs("..", stream);
    else
        pad(stream, columns - all);
}

static void print_row(const struct row *row, const struct layout *layout,
                      const struct dkv_terminal *terminal, FILE *stream)
{
    const struct dropkv_result *r = row->outcome->result;
    const struct shares shares = count_shares(row);
    char heads[32];
    char kept[64];
    print_name(row->outcome->name, layout->name, stream);
    if (layout->heads)
        fprintf(stream, "  %4" PRIu64, row->first_head % r->kv_heads);
    snprintf(heads, sizeof(heads), "%u/%u", row->outcome->q_heads, r->kv_heads);
    snprintf(kept, sizeof(kept), "%s (%.1f%%)", dkv_grouped(r->keep_tokens),
             100.0 * (double)r->keep_tokens / (double)r->n_tokens);
    fprintf(stream, "  %7s  %9s  %16s  %4.0f%%  %5.0f%%  %5.0f%%", heads, dkv_grouped(r->n_tokens),
            kept, 100.0 * shares.sink, 100.0 * shares.recent, 100.0 * shares.middle);
    if (layout->strip > 0)
        draw_strip(row, layout->strip, terminal, stream);
    fputc('\n', stream);
}

static void print_outcome(const struct dkv_outcome *outcome, const struct layout *layout,
                          const struct dkv_terminal *terminal, FILE *stream)
{
    const uint64_t n_heads = (uint64_t)outcome->result->batch * outcome->result->kv_heads;
    const uint64_t step = layout->heads ? 1 : n_heads;
    for (uint64_t h = 0; h < n_heads; h += step)
        print_row(&(struct row){outcome, h, step}, layout, terminal, stream);
}

static void print_summary(const struct dkv_report *report, FILE *stream)
{
    uint64_t n_heads = 0;
    uint64_t kept = 0;
    uint64_t tokens = 0;
    unsigned n_degraded = 0;
    for (size_t i = 0; i < report->n_outcomes; i++) {
        const struct dropkv_result *r = report->outcomes[i].result;
        const uint64_t heads = (uint64_t)r->batch * r->kv_heads;
        n_heads += heads;
        kept += heads * r->keep_tokens;
        tokens += heads * r->n_tokens;
        n_degraded += r->degraded != 0;
    }
    fprintf(stream, "\n%s block%s, %s KV heads: %s of %s tokens kept in %.1f ms by %s (%s)\n",
            dkv_grouped(report->n_outcomes), report->n_outcomes == 1 ? "" : "s",
            dkv_grouped(n_heads), dkv_grouped(kept), dkv_grouped(tokens),
            (double)report->elapsed_ns / 1e6, report->outcomes[0].result->backend,
            report->endpoint);
    fprintf(stream,
            "sink: the first %" PRIu64 " tokens, recent: the last %" PRIu64
            ", middle: all between; shares of what was kept\n",
            report->outcomes[0].sinks, report->outcomes[0].recent);
    if (n_degraded > 0)
        fprintf(stream,
                "%u answers are degraded: the server was overloaded and kept sinks and the "
                "newest tokens without scoring\n",
                n_degraded);
}

enum dkv_status dkv_report_table(const struct dkv_report *report, FILE *stream,
                                 struct dkv_error *err)
{
    const struct dkv_terminal terminal = dkv_terminal_of(stream);
    const struct layout layout = plan_layout(report, terminal.width);
    print_header(&layout, &terminal, stream);
    for (size_t i = 0; i < report->n_outcomes; i++)
        print_outcome(&report->outcomes[i], &layout, &terminal, stream);
    print_summary(report, stream);
    if (fflush(stream) != 0 || ferror(stream))
        return dkv_error_set(err, DKV_E_IO, "could not write the table");
    return DKV_OK;
}
