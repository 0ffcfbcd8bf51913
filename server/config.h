/* The daemon's configuration: one table of fields, four sources.
 *
 * Defaults < JSON file < environment (DROPKVD_<NAME>) < arguments (--<name> with dashes): a later
 * source replaces an earlier one, field by field. The same table makes --help, --print-config and
 * the messages.
 *
 * Owner   dkv_config owns its strings; init/fini.
 * Thread  read-only after start.
 * Errors  INVALID names the field, the value and what would have been accepted, and where the value
 *         came from.
 */
#ifndef DKV_SERVER_CONFIG_H
#define DKV_SERVER_CONFIG_H

#include "proto/types.h"

#include <stdio.h>

struct dkv_config {
    char *http;         /* ADDRESS:PORT or "off" */
    char *socket;       /* path of the local socket, "" for the default one, "off" for none */
    char *socket_group; /* whose members may connect to it, too; "": nobody else */
    char *port_file;    /* where to write the port in use; "" for nowhere */
    char *device;       /* "cpu", "cuda:N", or several with commas between */
    char *cpu_mask;     /* "": every instruction set the CPU has */
    char *token_file;   /* "": no tokens */
    char *log_format;   /* "text", "json", "journald" */
    char *log_level;
    char *log_file;   /* "": standard error, or the journal's own socket */
    char *trace_file; /* "": none */
    bool behind_proxy;
    bool allow_client_shm;
    bool allow_shm_names;
    bool nv_metrics;
    bool show_keep_sets;
    bool fallback_cpu;
    bool test_hooks;
    uint64_t threads; /* of the CPU engine; 0: one per CPU */
    uint64_t max_body_bytes;
    uint64_t max_json_bytes;
    uint64_t max_connections;
    uint64_t max_queue_requests;
    uint64_t max_queue_bytes; /* 0: half of the memory this process may use */
    uint64_t max_queue_read_bytes;
    uint64_t max_client_bytes;      /* 0: half of max_queue_bytes */
    uint64_t max_client_requests;   /* 0: half of max_queue_requests */
    uint64_t max_client_read_bytes; /* 0: half of max_queue_read_bytes */
    uint64_t priorities;
    uint64_t default_priority;
    uint64_t aging_batches;
    uint64_t quantum_bytes;
    uint64_t max_batch_items;
    uint64_t max_batch_tokens;
    uint64_t max_batch_bytes;
    uint64_t max_queue_delay_us;
    uint64_t batches_in_flight; /* 0: as suits the devices */
    uint64_t busy_poll_us;      /* 0: as suits the devices and the machine */
    uint64_t worker_deaths;
    uint64_t worker_stuck_ms; /* 0: twice request_timeout_ms */
    uint64_t header_timeout_ms;
    uint64_t keepalive_timeout_ms;
    uint64_t body_grace_ms;
    uint64_t body_min_bytes_per_s;
    uint64_t request_timeout_ms;
    uint64_t drain_delay_ms;
    uint64_t drain_timeout_ms;
    uint64_t trace_every;
    uint64_t max_streams;
};

enum dkv_config_kind { DKV_CONFIG_U64, DKV_CONFIG_BOOL, DKV_CONFIG_TEXT };

enum dkv_config_source {
    DKV_SOURCE_DEFAULT = 0,
    DKV_SOURCE_FILE,
    DKV_SOURCE_ENV,
    DKV_SOURCE_ARG,
};

struct dkv_config_field {
    const char *name;
    enum dkv_config_kind kind;
    size_t offset;              /* in struct dkv_config */
    const char *default_text;   /* as an argument would say it */
    uint64_t min, max;          /* DKV_CONFIG_U64 */
    const char *const *choices; /* DKV_CONFIG_TEXT: the allowed words, or NULL for any text */
    const char *unit;           /* "bytes", "ms", "" */
    const char *help;           /* one sentence */
    bool is_list;               /* DKV_CONFIG_TEXT: arguments add up, with commas between */
};

#define DKV_CONFIG_FIELDS 49

extern const struct dkv_config_field dkv_config_fields[DKV_CONFIG_FIELDS];

struct dkv_config_state {
    struct dkv_config config;
    enum dkv_config_source sources[DKV_CONFIG_FIELDS];
};

/* All defaults. NOMEM ends the process: there is nothing to serve yet. */
void dkv_config_init(struct dkv_config_state *state);
void dkv_config_fini(struct dkv_config_state *state);

/* Index of a field, or -1. Dashes and underscores are the same. */
int dkv_config_find(const char *name);

/* Sets one field from text; whole numbers may end in KiB, MiB, GiB or TiB. `origin` goes into the
 * message ("--threads", "DROPKVD_THREADS"). */
enum dkv_status dkv_config_set(struct dkv_config_state *state, int field, const char *text,
                               enum dkv_config_source source, const char *origin,
                               struct dkv_error *err);

/* Reads a JSON object of fields. IO if it cannot be read, MALFORMED if it is not JSON; unknown and
 * repeated fields are refused. */
enum dkv_status dkv_config_load_file(struct dkv_config_state *state, const char *path,
                                     struct dkv_error *err);

/* Reads DROPKVD_<NAME> of every field. Other DROPKVD_ variables are none of ours: container
 * platforms make some up from the service's name. */
enum dkv_status dkv_config_load_env(struct dkv_config_state *state, struct dkv_error *err);

/* Name of the device number `index`, or false if there are fewer. */
#define DKV_DEVICE_NAME_BYTES 32
bool dkv_config_device(const struct dkv_config *config, unsigned index,
                       char name_out[DKV_DEVICE_NAME_BYTES]);

/* What one client may hold of `queue_bytes`, which max_queue_bytes came to. */
uint64_t dkv_config_client_bytes(const struct dkv_config *config, uint64_t queue_bytes);

/* The rules that concern several fields. Also reads nothing: files are opened at start. */
enum dkv_status dkv_config_check(const struct dkv_config *config, struct dkv_error *err);

/* May HTTP be served at an address, shown as `text`? Beyond loopback that takes tokens and a proxy
 * that terminates TLS. */
enum dkv_status dkv_config_check_reach(const struct dkv_config *config, bool loopback,
                                       const char *text, struct dkv_error *err);

/* Writes a file that dkv_config_load_file() reads back; with `sources`, each field is an object
 * {"value", "source"} instead. */
void dkv_config_print(const struct dkv_config_state *state, bool sources, FILE *out);

#endif
