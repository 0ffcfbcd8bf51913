/* A refusal written straight to a socket, for where the HTTP library takes no response: before it
 * has a connection, and in the middle of a body.
 *
 * Owner   borrows the socket.
 * Thread  any; never blocks.
 * Errors  false if the socket did not take it: the peer may be gone.
 */
#ifndef DKV_SERVER_RAW_REPLY_H
#define DKV_SERVER_RAW_REPLY_H

#include <stdbool.h>

/* {"error": text} with Connection: close. The caller closes the connection. */
bool dkv_raw_reply(int fd, unsigned http_status, const char *text);

#endif
