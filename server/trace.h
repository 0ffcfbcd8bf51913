/* Traces: what a caller's `traceparent` says, and spans of requests written to a file.
 *
 * A header of W3C Trace Context ("00-<trace>-<parent>-<flags>") is carried into the log line of its
 * request. With a trace file, a request is also written there as spans in OTLP/JSON, one
 * ExportTraceServiceRequest a line, as the OpenTelemetry collector's file receiver reads it:
 *
 *   dropkv.score         header read .. reply ready       (server)
 *     dropkv.receive     header read .. queued
 *     dropkv.queue       queued .. given to the engine
 *     dropkv.device      in the engine
 *
 * Which requests: those whose caller sampled them, and of those without a header one in `every`.
 *
 * Owner   open/close of the file.
 * Thread  loop. A line is one write() that never blocks; a span that cannot be written is counted.
 */
#ifndef DKV_SERVER_TRACE_H
#define DKV_SERVER_TRACE_H

#include "server/metrics.h"

/* What a request's header said. Zero: nothing, or nothing valid. */
struct dkv_trace {
    char trace_id[33];  /* lower case hexadecimal; "" if there is none */
    char parent_id[17]; /* the caller's span */
    bool sampled;
    char text[56]; /* the header as far as it was read, for the log */
};

/* Reads a header's value; false, with *trace_out zero, if it is not one. Versions above 00 are read
 * as far as 00 goes, as the standard has it. */
bool dkv_trace_parse(const char *text, struct dkv_trace *trace_out);

struct dkv_trace_file {
    int fd; /* -1: none */
    char path[256];
    uint64_t every; /* 0: only what callers sampled */
    uint64_t n_untraced;
    uint64_t n_spans, n_lost; /* for metrics */
};

/* IO, INVALID. `path` "": none. */
enum dkv_status dkv_trace_open(struct dkv_trace_file *file, const char *path, uint64_t every,
                               struct dkv_error *err);
enum dkv_status dkv_trace_reopen(struct dkv_trace_file *file, struct dkv_error *err);
void dkv_trace_close(struct dkv_trace_file *file);

/* A request that ended now. */
struct dkv_trace_request {
    const struct dkv_trace *trace; /* NULL: there was no header */
    const char *outcome;           /* "ok", "busy" */
    const char *error;             /* NULL or the sentence */
    const char *transport;
    const char *stream; /* "" for none */
    uint64_t number;
    uint64_t blocks, tokens, kept, bytes;
    uint64_t started_ns, queued_ns, launched_ns, finished_ns; /* 0: never */
};
void dkv_trace_write(struct dkv_trace_file *file, const struct dkv_trace_request *request);

#endif
