/* An alarm: a timerfd set to the earliest thing that a transport has to do, in its epoll instance.
 *
 * Owner   open/close; DKV_ALARM_NONE is a closed one.
 * Thread  the client's.
 */
#ifndef DKV_CLIENT_ALARM_H
#define DKV_CLIENT_ALARM_H

#include "proto/types.h"

#define DKV_ALARM_NEVER INT64_MAX
#define DKV_ALARM_NONE  ((struct dkv_alarm){.fd = -1, .set_ns = DKV_ALARM_NEVER})

struct dkv_alarm {
    int fd;
    int64_t set_ns; /* when it goes off, CLOCK_MONOTONIC; DKV_ALARM_NEVER: it does not */
};

/* Makes the descriptor and adds it to the epoll instance, as data.fd. IO; then it stays closed or
 * can be closed. */
enum dkv_status dkv_alarm_open(struct dkv_alarm *alarm, int epoll_fd, struct dkv_error *err);
void dkv_alarm_close(struct dkv_alarm *alarm);

/* It goes off at `due_ns` at the latest; a time that has passed makes it readable at once. It may
 * go off earlier, at a time that it was set to before: then set it again. */
void dkv_alarm_set(struct dkv_alarm *alarm, int64_t due_ns);

/* Takes note that it went off: it is no longer readable nor set. IO. */
enum dkv_status dkv_alarm_clear(struct dkv_alarm *alarm, struct dkv_error *err);

#endif
