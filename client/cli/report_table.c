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

#define STRIP_MIN        12u
#define STRIP_MAX        64u
#define NAME_COLUMNS_MAX 32u
#define HEAD_BOLD        "\033[1m"
#define STRIP_TINT       "\033[36m"
#define PLAIN            "\033[0m"

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

static const int32_t *kept_of(const struct row *row, uint64_t head, uint64_t *count_out)
{
    const struct dropkv_result *r = row->outcome->result;
    const uint64_t at = row->first_head + head;
    *count_out = r->keep_tokens;
    if (r->keep_offsets == NULL)
        return r->keep_indices + at * r->keep_tokens;
    *count_out = (uint64_t)(r->keep_offsets[at + 1] - r->keep_offsets[at]);
    return r->keep_indices + r->keep_offsets[at];
}

/* Of all the block's heads. */
static uint64_t all_kept(const struct dropkv_result *r)
{
    const uint64_t heads = (uint64_t)r->batch * r->kv_heads;
    return r->keep_offsets != NULL ? (uint64_t)r->keep_offsets[heads] : heads * r->keep_tokens;
}

static struct shares count_shares(const struct row *row)
{
    const struct dropkv_result *r = row->outcome->result;
    uint64_t sink = 0;
    uint64_t recent = 0;
    uint64_t total = 0, count;
    for (uint64_t h = 0; h < row->n_heads; h++) {
        const int32_t *kept = kept_of(row, h, &count);
        total += count;
        for (uint64_t i = 0; i < count; i++) {
            const uint64_t t = (uint64_t)kept[i];
            if (t >= r->n_tokens - row->outcome->recent)
                recent++;
            else if (t < row->outcome->sinks)
                sink++;
        }
    }
    const double all = (double)total;
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
        uint64_t count;
        const int32_t *kept = kept_of(row, h, &count);
        for (uint64_t i = 0; i < count; i++)
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

/* Widths of the columns that fit their contents. */
struct layout {
    unsigned name;
    unsigned heads;
    unsigned tokens;
    unsigned kept;
    unsigned strip; /* 0: none */
    bool per_head;  /* a column that says which KV head */
};

static void pad(FILE *stream, unsigned n)
{
    fprintf(stream, "%*s", (int)n, "");
}

static void format_heads(const struct dkv_outcome *outcome, char out[32])
{
    snprintf(out, 32, "%u/%u", outcome->q_heads, outcome->result->kv_heads);
}

static void format_kept(const struct dropkv_result *r, char out[64])
{
    snprintf(out, 64, "%s (%.1f%%)", dkv_grouped(r->keep_tokens),
             100.0 * (double)r->keep_tokens / (double)r->n_tokens);
}

static void widen(unsigned *width, const char *text)
{
    const unsigned n = text_columns(text);
    *width = n > *width ? n : *width;
}

#define PER_HEAD_COLUMNS 6u
#define SHARES_COLUMNS   23u /* sink, recent and middle */

static struct layout plan_layout(const struct dkv_report *report, unsigned width)
{
    struct layout layout = {
        .name = 5, .heads = 5, .tokens = 6, .kept = 4, .per_head = report->per_head};
    for (size_t i = 0; i < report->n_outcomes; i++) {
        char text[64];
        const struct dkv_outcome *outcome = &report->outcomes[i];
        widen(&layout.name, outcome->name);
        format_heads(outcome, text);
        widen(&layout.heads, text);
        widen(&layout.tokens, dkv_grouped(outcome->result->n_tokens));
        format_kept(outcome->result, text);
        widen(&layout.kept, text);
    }
    if (layout.name > NAME_COLUMNS_MAX)
        layout.name = NAME_COLUMNS_MAX;
    const unsigned used = layout.name + (layout.per_head ? PER_HEAD_COLUMNS : 0) + 2 +
                          layout.heads + 2 + layout.tokens + 2 + layout.kept + SHARES_COLUMNS + 2;
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
    fprintf(stream, "%s  %*s  %*s  %*s", layout->per_head ? "  head" : "", (int)layout->heads,
            "heads", (int)layout->tokens, "tokens", (int)layout->kept, "kept");
    fputs("   sink  recent  middle", stream);
    if (layout->strip > 0)
        fputs(layout->strip >= 25 ? "  where the kept tokens lie" : "  where", stream);
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
    format_heads(row->outcome, heads);
    format_kept(r, kept);
    print_name(row->outcome->name, layout->name, stream);
    if (layout->per_head)
        fprintf(stream, "  %4" PRIu64, row->first_head % r->kv_heads);
    fprintf(stream, "  %*s  %*s  %*s  %4.0f%%  %5.0f%%  %5.0f%%", (int)layout->heads, heads,
            (int)layout->tokens, dkv_grouped(r->n_tokens), (int)layout->kept, kept,
            100.0 * shares.sink, 100.0 * shares.recent, 100.0 * shares.middle);
    if (layout->strip > 0)
        draw_strip(row, layout->strip, terminal, stream);
    fputc('\n', stream);
}

static void print_outcome(const struct dkv_outcome *outcome, const struct layout *layout,
                          const struct dkv_terminal *terminal, FILE *stream)
{
    const uint64_t n_heads = (uint64_t)outcome->result->batch * outcome->result->kv_heads;
    const uint64_t step = layout->per_head ? 1 : n_heads;
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
        kept += all_kept(r);
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
