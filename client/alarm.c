/* The alarm of a transport. A descriptor that is set to an earlier time than is needed stays as it
 * is and goes off once too early, after which it is set anew: in a loop of requests with the same
 * patience, each of which has a later deadline than the one before, that is one system call per
 * patience instead of two per request. */
#include "client/alarm.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#define NS_PER_S INT64_C(1000000000)

enum dkv_status dkv_alarm_open(struct dkv_alarm *alarm, int epoll_fd, struct dkv_error *err)
{
    *alarm = DKV_ALARM_NONE;
    alarm->fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = alarm->fd};
    if (alarm->fd < 0 || epoll_ctl(epoll_fd, EPOLL_CTL_ADD, alarm->fd, &event) != 0)
        return dkv_error_set(err, DKV_E_IO, "could not make a timer: %s", strerror(errno));
    return DKV_OK;
}

void dkv_alarm_close(struct dkv_alarm *alarm)
{
    if (alarm->fd >= 0)
        close(alarm->fd);
    *alarm = DKV_ALARM_NONE;
}

void dkv_alarm_set(struct dkv_alarm *alarm, int64_t due_ns)
{
    if (due_ns >= alarm->set_ns)
        return;
    due_ns = due_ns < 1 ? 1 : due_ns; /* zero would disarm it */
    alarm->set_ns = due_ns;
    const struct itimerspec spec = {
        .it_value = {.tv_sec = due_ns / NS_PER_S, .tv_nsec = due_ns % NS_PER_S}};
    (void)timerfd_settime(alarm->fd, TFD_TIMER_ABSTIME, &spec, NULL);
}

enum dkv_status dkv_alarm_clear(struct dkv_alarm *alarm, struct dkv_error *err)
{
    uint64_t n_expired;
    alarm->set_ns = DKV_ALARM_NEVER;
    if (read(alarm->fd, &n_expired, sizeof(n_expired)) < 0 && errno != EAGAIN)
        return dkv_error_set(err, DKV_E_IO, "could not read a timer: %s", strerror(errno));
    return DKV_OK;
}
