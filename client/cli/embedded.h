/* The endpoint "embedded:": the engine inside this process.
 *
 * Address  embedded:[DEVICE][?threads=N], DEVICE being cpu (the default), cuda or cuda:N.
 * Thread   the client's: dropkv_dispatch() computes, a batch of waiting requests at a time.
 */
#ifndef DKV_CLIENT_CLI_EMBEDDED_H
#define DKV_CLIENT_CLI_EMBEDDED_H

#include "client/transport.h"

extern const struct dkv_transport_ops dkv_transport_embedded;

#endif
