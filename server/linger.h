/* Sockets that are closed slowly, so that a refusal arrives.
 *
 * Closing a socket that holds unread bytes makes the kernel send a reset, and a reset may overtake
 * the reply: a client that is still sending a large body would see "connection reset" instead of
 * "413" or "503, try again". So after an early refusal a copy of the socket is kept: its sending
 * side is closed, and what still comes is thrown away until the peer has closed, or a time or an
 * amount is over.
 *
 * Owner   the set; close_all() ends every one. Handles are freed by the loop.
 * Thread  loop only.
 * Errors  none: where the socket cannot be kept it is closed at once.
 */
#ifndef DKV_SERVER_LINGER_H
#define DKV_SERVER_LINGER_H

#include <uv.h>

#define DKV_LINGER_MAX   64u                 /* sockets at once */
#define DKV_LINGER_MS    2000u               /* time of each */
#define DKV_LINGER_BYTES (UINT64_C(1) << 28) /* thrown away of each */

struct dkv_linger;

struct dkv_linger_set {
    struct dkv_linger *first;
    unsigned n;
};

/* Keeps a duplicate of `fd`, which stays the caller's to close. */
void dkv_linger_add(struct dkv_linger_set *set, uv_loop_t *loop, int fd);
void dkv_linger_close_all(struct dkv_linger_set *set);

#endif
