/* The comparison as a picture: on the left the error against the budget, one line for each policy,
 * the error's axis logarithmic; on the right which positions each policy keeps at the first budget,
 * one strip for each KV head of the first block. Colours go round the circle of hues, and every
 * line and strip bears its policy's name, so that the picture can be read without them.
 */
#include "client/cli/compare.h"

#include <cairo-svg.h>
#include <cairo.h>
#include <math.h>
#include <string.h>

#define WIDTH     1180.0
#define CHART     440.0 /* width of the chart */
#define CHART_TOP 50.0
#define CHART_LOW 420.0
#define CHART_X   70.0
#define STRIP_X   640.0
#define STRIP_W   520.0
#define STRIP_H   9.0

static void set_hue(cairo_t *cr, size_t i, size_t n)
{
    const double h = 6.0 * (double)i / (double)n, x = 1 - fabs(fmod(h, 2) - 1);
    const double rgb[6][3] = {{1, x, 0}, {x, 1, 0}, {0, 1, x}, {0, x, 1}, {x, 0, 1}, {1, 0, x}};
    const double *c = rgb[(int)h % 6];
    cairo_set_source_rgb(cr, 0.75 * c[0], 0.6 * c[1], 0.85 * c[2]);
}

static void text_at(cairo_t *cr, double x, double y, const char *text)
{
    cairo_move_to(cr, x, y);
    cairo_show_text(cr, text);
}

static double error_of(const struct dkv_comparison_table *table, size_t p, size_t r)
{
    const struct dkv_output_error *e = &dkv_compared_at(table, p, r)->all;
    return fmax(e->relative / (double)e->n, 1e-12);
}

struct axes {
    double x_low, x_high, y_low, y_high; /* logarithms */
};

static struct axes find_axes(const struct dkv_comparison_table *table)
{
    struct axes a = {INFINITY, -INFINITY, INFINITY, -INFINITY};
    for (size_t p = 0; p < table->n_policies; p++)
        for (size_t r = 0; r < table->n_ratios; r++) {
            const double x = log10(fmax(table->ratios[r], 1e-6)), y = log10(error_of(table, p, r));
            a.x_low = fmin(a.x_low, x);
            a.x_high = fmax(a.x_high, x);
            a.y_low = fmin(a.y_low, y);
            a.y_high = fmax(a.y_high, y);
        }
    a.y_low = floor(a.y_low * 2) / 2;
    a.y_high = ceil(a.y_high * 2 + 0.01) / 2;
    if (a.x_high - a.x_low < 0.1)
        a.x_high = a.x_low + 0.1;
    return a;
}

static double x_of(const struct axes *a, double ratio)
{
    return CHART_X + (log10(fmax(ratio, 1e-6)) - a->x_low) / (a->x_high - a->x_low) * (CHART - 100);
}

static double y_of(const struct axes *a, double error)
{
    return CHART_LOW - (log10(error) - a->y_low) / (a->y_high - a->y_low) * (CHART_LOW - CHART_TOP);
}

static void draw_axes(cairo_t *cr, const struct dkv_comparison_table *table, const struct axes *a)
{
    char label[32];
    cairo_set_source_rgb(cr, 0.2, 0.2, 0.2);
    text_at(cr, CHART_X, 28, "relative output error against what is kept");
    for (double y = a->y_low; y <= a->y_high + 1e-9; y += 0.5) {
        const double at = y_of(a, pow(10, y));
        snprintf(label, sizeof(label), "%.2g", pow(10, y));
        text_at(cr, 20, at + 4, label);
        cairo_set_line_width(cr, 0.3);
        cairo_move_to(cr, CHART_X, at);
        cairo_line_to(cr, CHART_X + CHART - 100, at);
        cairo_stroke(cr);
    }
    for (size_t r = 0; r < table->n_ratios; r++) {
        snprintf(label, sizeof(label), "%.3g%%", 100 * table->ratios[r]);
        text_at(cr, x_of(a, table->ratios[r]) - 10, CHART_TOP - 8, label);
    }
}

static void draw_lines(cairo_t *cr, const struct dkv_comparison_table *table, const struct axes *a)
{
    double label_y[DKV_POLICY_COUNT];
    for (size_t p = 0; p < table->n_policies; p++) {
        set_hue(cr, p, table->n_policies);
        cairo_set_line_width(cr, 1.6);
        cairo_new_path(cr); /* text leaves a point behind */
        for (size_t r = 0; r < table->n_ratios; r++) {
            const double x = x_of(a, table->ratios[r]), y = y_of(a, error_of(table, p, r));
            cairo_line_to(cr, x, y);
        }
        cairo_stroke(cr);
        for (size_t r = 0; r < table->n_ratios; r++) {
            cairo_arc(cr, x_of(a, table->ratios[r]), y_of(a, error_of(table, p, r)), 3, 0, 6.2832);
            cairo_fill(cr);
        }
        /* Names keep a line's distance from those above and below. */
        double y = y_of(a, error_of(table, p, table->n_ratios - 1)) + 4;
        for (size_t tries = 0; tries < 4 * table->n_policies; tries++)
            for (size_t before = 0; before < p; before++)
                if (fabs(label_y[before] - y) < 12)
                    y = label_y[before] + 12.5;
        label_y[p] = y;
        text_at(cr, x_of(a, table->ratios[table->n_ratios - 1]) + 10, y, table->policies[p]);
    }
}

static void draw_strip(cairo_t *cr, const struct dropkv_result *result, uint64_t head, double y)
{
    uint64_t count;
    const int32_t *kept = dkv_compare_kept(result, head, &count);
    const double step = STRIP_W / (double)result->n_tokens;
    for (uint64_t i = 0; i < count;) { /* neighbours in one rectangle */
        uint64_t end = i + 1;
        while (end < count && kept[end] == kept[end - 1] + 1)
            end++;
        cairo_rectangle(cr, STRIP_X + kept[i] * step, y, fmax(step * (double)(end - i), 0.6),
                        STRIP_H - 1.5);
        i = end;
    }
    cairo_fill(cr);
}

static double draw_strips(cairo_t *cr, const struct dkv_comparison_table *table, bool draw)
{
    double y = CHART_TOP;
    for (size_t p = 0; p < table->n_policies; p++) {
        const struct dropkv_result *result = dkv_compared_at(table, p, 0)->results[0];
        if (draw) {
            set_hue(cr, p, table->n_policies);
            text_at(cr, STRIP_X - 80, y + STRIP_H, table->policies[p]);
        }
        for (uint32_t h = 0; h < result->kv_heads; h++, y += STRIP_H)
            if (draw)
                draw_strip(cr, result, h, y);
        y += 7;
    }
    return y;
}

static void draw(cairo_t *cr, const struct dkv_comparison_table *table)
{
    const struct axes axes = find_axes(table);
    char title[160];
    cairo_set_source_rgb(cr, 1, 1, 1);
    cairo_paint(cr);
    cairo_select_font_face(cr, "sans-serif", CAIRO_FONT_SLANT_NORMAL, CAIRO_FONT_WEIGHT_NORMAL);
    cairo_set_font_size(cr, 11);
    draw_axes(cr, table, &axes);
    draw_lines(cr, table, &axes);
    cairo_set_source_rgb(cr, 0.2, 0.2, 0.2);
    snprintf(title, sizeof(title), "tokens that are kept at %.3g%%, first to last, %.60s",
             100 * table->ratios[0], table->blocks->blocks[0].name);
    text_at(cr, STRIP_X - 80, 28, title);
    draw_strips(cr, table, true);
}

static bool ends_in(const char *path, const char *end)
{
    const size_t n = strlen(path), m = strlen(end);
    return n > m && strcmp(path + n - m, end) == 0;
}

enum dkv_status dkv_compare_plot(const struct dkv_comparison_table *table, const char *path,
                                 struct dkv_error *err)
{
    const bool png = ends_in(path, ".png");
    const double height = fmax(CHART_LOW + 100, draw_strips(NULL, table, false) + 20);
    if (!png && !ends_in(path, ".svg"))
        return dkv_error_set(err, DKV_E_INVALID, "--plot: a name that ends in .svg or .png");
    cairo_surface_t *surface = png ? cairo_image_surface_create(CAIRO_FORMAT_RGB24, (int)WIDTH,
                                                                (int)height)
                                   : cairo_svg_surface_create(path, WIDTH, height);
    cairo_t *cr = cairo_create(surface);
    draw(cr, table);
    cairo_status_t status = cairo_status(cr);
    cairo_destroy(cr);
    if (status == CAIRO_STATUS_SUCCESS && png)
        status = cairo_surface_write_to_png(surface, path);
    cairo_surface_finish(surface);
    if (status == CAIRO_STATUS_SUCCESS)
        status = cairo_surface_status(surface);
    cairo_surface_destroy(surface);
    return status == CAIRO_STATUS_SUCCESS ? DKV_OK
                                          : dkv_error_set(err, DKV_E_IO, "could not be written: %s",
                                                          cairo_status_to_string(status));
}
