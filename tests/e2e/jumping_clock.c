/* Preloaded: the wall clock jumps by JUMP_S seconds as soon as the file JUMP_IF is there; other clocks do not. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static time_t jump_s(void) {
    int before = errno;
    const char *file = getenv("JUMP_IF"), *by = getenv("JUMP_S");
    time_t seconds = file && by && access(file, F_OK) == 0 ? atol(by) : 0;
    errno = before;
    return seconds;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    long code = syscall(SYS_clock_gettime, clock, now);
    if (code == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += jump_s();
    return code;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    long code = syscall(SYS_gettimeofday, now, zone);
    if (code == 0 && now)
        now->tv_sec += jump_s();
    return code;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at)
        *at = now.tv_sec;
    return now.tv_sec;
}
