// To be preloaded: after JUMP_AFTER seconds the wall clock is a day ahead, and a day behind in every other second from
// then on. The monotonic clock stays.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static int (*real)(clockid_t, struct timespec *);
static time_t begin, after;

__attribute__((constructor)) static void load(void) {
    struct timespec now;
    real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    real(CLOCK_MONOTONIC, &now);
    begin = now.tv_sec;
    after = atoi(getenv("JUMP_AFTER"));
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    struct timespec now;
    int result = real(clock, time);
    if (clock == CLOCK_REALTIME && real(CLOCK_MONOTONIC, &now) == 0 && now.tv_sec >= begin + after) {
        time->tv_sec += now.tv_sec % 2 ? 86400 : -86400;
    }
    return result;
}

int gettimeofday(struct timeval *time, void *zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    time->tv_sec = now.tv_sec;
    time->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *into) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (into) *into = now.tv_sec;
    return now.tv_sec;
}
